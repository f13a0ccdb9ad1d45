"""Adapters for attention kernels, and the attention function that transformers calls.

`get(name)` returns an adapter; `register()` registers the packed attention function with transformers as `"vattn"`;
`attend` calls vattn's own kernels for CPUs over plain tensors.

A new kernel is one file with a class that implements `Attention`. An instance is accepted wherever a name is; an entry
in `_ADAPTERS` gives it a name. docs/how-to/kernels.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import torch

from vattn.attention.base import Attention, AttentionParams, Case, KVSource, Reads, whole_layer
from vattn.attention.batch import Group, PackedBatch, Span, SpanColumns
from vattn.attention.flash_attn_2 import FlashAttn2
from vattn.attention.flash_attn_3 import FlashAttn3
from vattn.attention.flashinfer import FlashInfer
from vattn.attention.native import Native
from vattn.attention.plain import attend
from vattn.attention.stored import Blocks, Contiguous
from vattn.attention.torch_flash import TorchFlash
from vattn.attention.torch_sdpa import TorchSDPA
from vattn.errors import ConfigError

__all__ = [
    "Attention",
    "AttentionParams",
    "Blocks",
    "Case",
    "Contiguous",
    "Group",
    "KVSource",
    "PackedBatch",
    "Reads",
    "Span",
    "SpanColumns",
    "TorchSDPA",
    "adapters",
    "attend",
    "decode",
    "describe",
    "get",
    "names",
    "register",
    "whole_layer",
]

decode = attend  # another name: most calls are decode steps

# In the order in which "auto" tries them: flash-attn 3 computes prompts in half of the time of the others, where it is
# installed and the device is a Hopper; then kernels that need no installation first, the one without limits last.
_ADAPTERS: dict[str, Callable[[], Attention]] = {
    adapter.name: adapter for adapter in (FlashAttn3, TorchFlash, FlashAttn2, FlashInfer, Native, TorchSDPA)
}


def adapters() -> list[Attention]:
    """All adapters in the order in which "auto" tries them, including those that cannot be used here."""
    return [make() for make in _ADAPTERS.values()]


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_ADAPTERS)


def get(name: str | Attention = "auto", *cases: Case, device: torch.device | str = "cpu") -> Attention:
    """The adapter called `name`; `"auto"` is the first that can be used. An adapter is checked and returned.

    Args:
        cases: requirements, all of which the kernel must meet; by default float32 on `device`.

    Raises:
        ConfigError: no adapter has that name; or it does not meet the requirements (the message says why, and which
            adapters do); or it lacks an attribute of `Attention`.
    """
    cases = cases or (Case(torch.device(device)),)
    if name == "auto":
        return next(adapter for adapter in adapters() if _refusal(adapter, cases) is None)
    if isinstance(name, str) and name not in _ADAPTERS:
        raise ConfigError(f"unknown attention kernel {name!r}; choose one of {', '.join(('auto', *_ADAPTERS))}")
    adapter = _ADAPTERS[name]() if isinstance(name, str) else _declared(name)
    why = _refusal(adapter, cases)
    if why is not None:
        usable = [other.name for other in adapters() if _refusal(other, cases) is None]
        raise ConfigError(
            f"the attention kernel {adapter.name!r} cannot be used here: {why}; possible: "
            f"{', '.join(('auto', *usable))}"
        )
    return adapter


def _refusal(adapter: Attention, cases: Sequence[Case]) -> str | None:
    """Why the adapter cannot be used for one of the cases; None if it can for all."""
    if adapter.reads == "layer" and not all(case.whole_layers for case in cases):
        return "it reads whole layers, and this cache can be read request by request only"
    return next((why for case in cases if (why := adapter.refusal(case)) is not None), None)


def _declared(adapter: Attention) -> Attention:
    """A user's adapter, checked for the attributes of `Attention`."""
    if isinstance(adapter, type):
        raise ConfigError(f"attention is the class {adapter.__name__}; give an object of it, {adapter.__name__}()")
    missing = [name for name in ("name", "guard_rows", "reads", "capturable", "refusal") if not hasattr(adapter, name)]
    if missing:
        raise ConfigError(
            f"the attention kernel {type(adapter).__name__} does not declare {', '.join(missing)}; an adapter has all "
            "that vattn.attention.Attention describes"
        )
    if adapter.reads not in get_args(Reads):
        raise ConfigError(
            f"the attention kernel {adapter.name!r} has reads={adapter.reads!r}; give 'request' or 'layer'"
        )
    return adapter


def describe(case: Case | None = None) -> list[str]:
    """One line per kernel: name, guard rows, description, and the reason if it cannot be used.

    Args:
        case: the requirements; by default bfloat16 on the GPU, or float32 without one.
    """
    if case is None:
        case = Case(torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else Case()
    lines = []
    for adapter in adapters():
        try:
            refusal = adapter.refusal(case)
        except ConfigError as error:
            refusal = str(error)
        lines.append(
            f"{adapter.name}: guard rows {adapter.guard_rows}; {(adapter.__doc__ or '').splitlines()[0]}"
            + (f" Not here: {refusal}." if refusal else "")
        )
    return lines


def register() -> None:
    """Register the packed attention function and its mask function as `"vattn"` in transformers.

    Requires transformers. Idempotent.
    """
    from vattn.attention import interface

    interface.register()
