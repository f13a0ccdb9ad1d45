"""`KVSpec`: what a backend is to hold, where, and how much of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch

from vattn.config import budget_bytes
from vattn.errors import ConfigError
from vattn.units import format_bytes

from ..checks import checked_whole

if TYPE_CHECKING:
    from vattn.packed import KVShape, LayerShape


@dataclass(frozen=True)
class PoolShare:
    """A part of a broker's pool: `PagePool.connect`.

    Attributes:
        name: the pool.
        at_least, at_most: bytes; None for the whole budget.
        label: what `vattn pool top` calls the borrower.
        fingerprint: of what is shared with other processes; None for nothing.
    """

    name: str
    at_least: int
    at_most: int | None
    label: str
    fingerprint: bytes | None = None


@dataclass(frozen=True)
class KVSpec:
    """What every backend is made from; each uses the fields that concern it.

    Attributes:
        shape: what a token stores, layer by layer.
        max_num_seqs: most requests at a time.
        max_model_len: most tokens of a request.
        dtype: of the model's keys and values.
        memory_budget: bytes, text such as "4GiB", or "auto"; see `vattn.KVConfig`.
        block_size: tokens per block, for backends that store blocks.
        guard_rows: rows past a length that the kernel may read.
        chunk_tokens: most tokens by which one step grows a request; None for all of them.
        kv_options: further options of the backend: of `vattn.KVConfig` for `virtual`; `num_blocks` and `windows`, over
            `vattn.BlockWindows`, for `paged`.
        pool: the pool to borrow memory of, for `virtual`; None for memory of its own.

    Raises:
        ConfigError: a size below 1; only `v_head_dim` may be 0, for opaque rows that are stored as keys.
    """

    shape: KVShape
    _: KW_ONLY
    max_num_seqs: int
    max_model_len: int
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    memory_budget: int | str = "auto"
    block_size: int = 16
    guard_rows: int = 0
    chunk_tokens: int | None = None
    kv_options: Mapping[str, Any] | None = None
    pool: PoolShare | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "block_size"):
            object.__setattr__(self, name, checked_whole(name, getattr(self, name), 1))
        for layer in {*self.shape.layers}:
            checked_whole("num_kv_heads", layer.num_kv_heads, 1)
            checked_whole("head_dim", layer.head_dim, 1)
            checked_whole("v_head_dim", layer.v_head_dim, 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, in the model's type."""
        return self.shape.token_elements * self.dtype.itemsize

    def plain_layer(self, kv: str, options: Collection[str] = ()) -> LayerShape:
        """What each layer stores, for a backend that stores all alike.

        Args:
            kv: the backend's name, for the message.
            options: the `kv_options` that it has.

        Raises:
            ConfigError: layers differ, or there are other options.
        """
        others = sorted((self.kv_options or {}).keys() - set(options))
        if others:
            takes = f"only takes {', '.join(options)} as kv_options" if options else "takes no kv_options"
            raise ConfigError(f"kv={kv!r} {takes}, but was given {others}; they are for 'virtual'")
        layer = self.shape.stored_alike
        if layer is None:
            shapes = sorted({(each.num_kv_heads, each.head_dim, each.v_head_dim) for each in self.shape.layers})
            raise ConfigError(
                f"kv={kv!r} stores all layers alike, but the model's differ in (KV heads, key size, value size): "
                f"{shapes}; use kv='virtual'"
            )
        return layer

    def units(self, unit: str, unit_tokens: int, advice: str) -> int:
        """As many units of `unit_tokens` tokens as the budget holds, and no more than can be used.

        Args:
            unit, advice: what a unit is called, and what makes it smaller, for the message.

        Raises:
            ConfigError: the budget is below one unit.
        """
        budget, unit_bytes = budget_bytes(self.memory_budget, self.device), unit_tokens * self.token_bytes
        units = min(budget // unit_bytes, self.max_num_seqs * -(-self.max_model_len // unit_tokens))
        if units < 1:
            raise ConfigError(
                f"memory_budget is {format_bytes(budget)}, but one {unit} of {unit_tokens} tokens takes "
                f"{format_bytes(unit_bytes)}; give more memory or {advice}"
            )
        return units
