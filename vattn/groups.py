"""Tensor groups: layers that store the same per token, for as long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vattn.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name in ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
    for dtype in (getattr(torch, name),)
}


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Layers that share heads, head sizes, element type and window.

    Attributes:
        layers: their indices in the model, as `KVCache.layer` takes them.
        num_kv_heads: K/V heads of each.
        head_dim: elements of a K head (and of a V head, unless `v_head_dim` says otherwise).
        v_head_dim: elements of a V head, where it differs. 0: these layers store K only, one latent say.
        dtype: element type, as torch has it or by name; by default the cache's.
        sliding_window: a query sees this many tokens, its own included, and memory behind them is given back; None for
            all.
    """

    layers: Iterable[int]
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: torch.dtype | str | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        try:
            layers = tuple(self.layers)
        except TypeError:
            raise ConfigError(f"layers={self.layers!r} must be layer indices, range(32) say") from None
        for layer in layers:
            check_int("layers", layer, at_least=0)
        if not layers:
            raise ConfigError("a tensor group without layers; leave it out")
        object.__setattr__(self, "layers", layers)
        check_int("num_kv_heads", self.num_kv_heads, at_least=1)
        check_int("head_dim", self.head_dim, at_least=1)
        if self.v_head_dim is not None:
            check_int("v_head_dim", self.v_head_dim, at_least=0)
        if self.sliding_window is not None:
            check_int("sliding_window", self.sliding_window, at_least=1)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", parse_dtype(self.dtype))

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head sizes of K and V."""
        return self.head_dim, self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def indices(self) -> tuple[int, ...]:
        """`layers`, as numbers."""
        assert isinstance(self.layers, tuple)
        return self.layers

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it; of a group that has one."""
        assert isinstance(self.dtype, torch.dtype)
        return self.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers of the group."""
        return len(self.indices) * self.num_kv_heads * sum(self.head_dims) * self.torch_dtype.itemsize


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """An element type that a cache can have.

    Raises:
        ConfigError: another one.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype in DTYPES.values():
        assert isinstance(dtype, torch.dtype)
        return dtype
    raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raise a ConfigError for what is no whole number, or too small a one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {at_least}")
