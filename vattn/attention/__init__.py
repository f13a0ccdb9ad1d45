"""Attention kernels, unmodified, behind one call; and their place in transformers.

`get(name)` returns an adapter; `register()` makes the packed attention function known to transformers as `"vattn"`.
A new kernel is one file with a class that fulfils `Attention`, and one line in `_ADAPTERS`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vattn.attention.base import Attention, AttentionParams, KVSource, PackedBatch, Span
from vattn.attention.torch_matmul import TorchMatmul
from vattn.attention.torch_sdpa import TorchSDPA
from vattn.errors import ConfigError

__all__ = [
    "Attention",
    "AttentionParams",
    "KVSource",
    "PackedBatch",
    "Span",
    "TorchMatmul",
    "TorchSDPA",
    "describe",
    "get",
    "names",
    "register",
]

_ADAPTERS: dict[str, Callable[[], Attention]] = {TorchSDPA.name: TorchSDPA, TorchMatmul.name: TorchMatmul}


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_ADAPTERS)


def get(name: str = "auto", *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Attention:
    """The adapter called `name`; `"auto"` takes the best one here for `device` and `dtype`.

    Raises:
        ConfigError: no adapter has that name.
    """
    kind = torch.device(device).type
    if name == "auto":
        name = TorchMatmul.name if kind == "cpu" and dtype == torch.bfloat16 else TorchSDPA.name
    try:
        return _ADAPTERS[name]()
    except KeyError:
        raise ConfigError(
            f"unknown attention kernel {name!r}; choose one of {', '.join(('auto', *_ADAPTERS))}"
        ) from None


def describe() -> list[str]:
    """One line per kernel: its name, the rows that it may read past a length, and what it is."""
    return [
        f"{name}: guard rows {adapter.guard_rows}; {(adapter.__doc__ or '').splitlines()[0]}"
        for name, adapter in ((name, make()) for name, make in _ADAPTERS.items())
    ]


def register() -> None:
    """Register the packed attention function and its mask function as `"vattn"` in transformers.

    Needs transformers. Calling it again changes nothing.
    """
    from vattn import hf

    hf.register()
