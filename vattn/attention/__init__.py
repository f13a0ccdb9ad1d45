"""Attention kernels, unmodified, behind one call; and their place in transformers.

`get(name)` returns an adapter; `register()` makes the packed attention function known to transformers as `"vattn"`.
A new kernel is one file with a class that fulfils `Attention`; an instance of it is accepted wherever a name is, and
one line in `_ADAPTERS` gives it a name. docs/kernels.md shows one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import torch

from vattn.attention.base import Attention, AttentionParams, Case, KVSource, Reads
from vattn.attention.batch import Group, PackedBatch, Span
from vattn.attention.flash_attn_2 import FlashAttn2
from vattn.attention.flash_attn_3 import FlashAttn3
from vattn.attention.flashinfer import FlashInfer
from vattn.attention.storage import Blocks, Contiguous
from vattn.attention.torch_flash import TorchFlash
from vattn.attention.torch_matmul import TorchMatmul
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
    "TorchMatmul",
    "TorchSDPA",
    "adapters",
    "describe",
    "get",
    "names",
    "register",
]

# In the order in which "auto" tries them: what needs no installation first, what takes everything last.
_ADAPTERS: dict[str, Callable[[], Attention]] = {
    adapter.name: adapter for adapter in (TorchFlash, FlashAttn2, FlashAttn3, FlashInfer, TorchMatmul, TorchSDPA)
}


def adapters() -> list[Attention]:
    """All adapters, whether they can be used here or not, in the order in which "auto" tries them."""
    return [make() for make in _ADAPTERS.values()]


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_ADAPTERS)


def get(name: str | Attention = "auto", *cases: Case, device: torch.device | str = "cpu") -> Attention:
    """The adapter called `name`, or an adapter itself; `"auto"` takes the first that can be used.

    Args:
        cases: what it is wanted for, all of them; by default float32 on `device`.

    Raises:
        ConfigError: no adapter has that name, or it cannot be used for a case: why not, and which can; or an adapter
            that does not declare what `Attention` asks for.
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
    """An adapter of a user's, which has all that an adapter declares."""
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
    """One line per kernel: its name, the rows that it may read past a length, what it is, and why it cannot be used.

    Args:
        case: what it is wanted for; by default bfloat16 on the GPU, or float32 where there is none.
    """
    if case is None:
        case = Case(torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else Case()
    lines = []
    for adapter in adapters():
        refusal = adapter.refusal(case)
        lines.append(
            f"{adapter.name}: guard rows {adapter.guard_rows}; {(adapter.__doc__ or '').splitlines()[0]}"
            + (f" Not here: {refusal}." if refusal else "")
        )
    return lines


def register() -> None:
    """Register the packed attention function and its mask function as `"vattn"` in transformers.

    Needs transformers. Calling it again changes nothing.
    """
    from vattn.attention import interface

    interface.register()
