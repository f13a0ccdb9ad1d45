"""Tensor groups: layers with the same K and V shapes per token and the same window."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from vattn.errors import ConfigError
from vattn.integers import as_int, shown

# More than any model or machine has, and few enough that a typing error does not compute or reserve for long.
MOST_LAYERS, MOST_SLOTS = 2**10, 2**16
MOST_HEADS = 2**20  # also elements of a head
MOST_TOKENS = 2**32
MOST_ADDRESSES = 2**47  # bytes, which is all that a process has

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
        sliding_window: tokens that a query sees, its own included; memory behind them is given back. None for all.
    """

    layers: Iterable[int]
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: torch.dtype | str | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        try:
            layers = tuple(itertools.islice(self.layers, MOST_LAYERS + 1))
        except TypeError:
            raise ConfigError(f"layers={shown(self.layers)} must be layer indices, range(32) say") from None
        if len(layers) > MOST_LAYERS:
            raise ConfigError(f"layers={shown(self.layers)} are more than {MOST_LAYERS}")
        if not layers:
            raise ConfigError("a tensor group without layers; leave it out")
        object.__setattr__(
            self, "layers", tuple(check_int("layers", layer, at_least=0, at_most=MOST_TOKENS) for layer in layers)
        )
        for name, least in (("num_kv_heads", 1), ("head_dim", 1), ("v_head_dim", 0), ("sliding_window", 1)):
            value = getattr(self, name)
            if value is not None or name in ("num_kv_heads", "head_dim"):
                most = MOST_TOKENS if name == "sliding_window" else MOST_HEADS
                object.__setattr__(self, name, check_int(name, value, at_least=least, at_most=most))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", parse_dtype(self.dtype))

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head sizes of K and V."""
        return self.head_dim, self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def indices(self) -> tuple[int, ...]:
        """`layers` as a tuple of numbers."""
        assert isinstance(self.layers, tuple)
        return self.layers

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a torch.dtype.

        Raises:
            ConfigError: the group has none of its own.
        """
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigError("this tensor group has no dtype of its own but the cache's; give it one")
        return self.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers of the group.

        Raises:
            ConfigError: as for `torch_dtype`.
        """
        return len(self.indices) * self.num_kv_heads * sum(self.head_dims) * self.torch_dtype.itemsize


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """An element type that a cache supports, from a torch.dtype or its name.

    Raises:
        ConfigError: it is not supported.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    raise ConfigError(f"dtype={shown(dtype)} is not one of {', '.join(DTYPES)}")


def is_auto(value: object) -> bool:
    """Whether an option is left to the library; an array, say, is not to be compared with text."""
    return isinstance(value, str) and value == "auto"


def check_choice(name: str, value: object, choices: Collection[str | bool]) -> None:
    """Raises ConfigError if a value is none of the choices; a number is no bool."""
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        raise ConfigError(f"{name}={shown(value)} is not one of {', '.join(map(repr, choices))}")


def check_int(name: str, value: object, *, at_least: int, at_most: int) -> int:
    """A whole number as an `int`.

    Raises:
        ConfigError: it is not a whole number, or out of range.
    """
    try:
        number = as_int(value)
    except TypeError:
        number = at_least - 1
    if not at_least <= number <= at_most:
        raise ConfigError(f"{name}={shown(value)} must be a whole number from {at_least} to {at_most}")
    return number
