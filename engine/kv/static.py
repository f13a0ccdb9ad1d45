"""Every slot reserved at full length from the start: wastes most memory, and is the upper limit of speed.

Nothing is mapped, gathered or copied while requests run, and every page is touched in advance. Tokens have the layout
of a `vattn.KVCache` with default options, so kernels read the same strides, and the difference in speed between the two
backends is the price of mapping on demand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Self

import torch

from vattn import drivers
from vattn.config import default_kv_order
from vattn.errors import ConfigError
from vattn.units import format_bytes

from ..checks import checked_whole
from .base import KVDescription, KVStats, NoPrefixCache, SlotView, register
from .contiguous import ContiguousKV
from .slot_book import SlotBook
from .spec import KVSpec


@register
class StaticKV(ContiguousKV, NoPrefixCache):
    """Tensors of `num_slots` times `max_model_len` tokens; the unit of memory is the slot.

    Conservation law: a slot is free, allocated, or allocated and prepared; `available` counts all but the prepared.

    Args:
        num_slots: requests at a time; `allocate` hands out no more, however short they are.

    Raises:
        ConfigError: no slot, or layers that differ.
    """

    name: ClassVar[str] = "static"

    def __init__(self, spec: KVSpec, num_slots: int) -> None:
        layer, num_slots = spec.plain_layer(self.name), checked_whole("num_slots", num_slots, 1)
        num_kv_heads, max_model_len = layer.num_kv_heads, spec.max_model_len
        dtype, device = spec.dtype, spec.device
        self.token_bytes = spec.token_bytes
        self._lengths: SlotBook[int] = SlotBook(num_slots, max_model_len)
        self._prepared: set[int] = set()
        by_head = default_kv_order(device) == "HND"
        layers = []
        # Explicitly outside inference mode: a tensor made inside could never be written outside it. Zeros, because
        # empty memory would be committed page by page while requests run.
        with torch.inference_mode(False):
            for _ in range(spec.shape.num_layers):
                pair = []
                for dim in (layer.head_dim, layer.v_head_dim):
                    if by_head:
                        shape = (num_slots, num_kv_heads, max_model_len, dim)
                        pair.append(torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2))
                    else:
                        shape = (num_slots, max_model_len, num_kv_heads, dim)
                        pair.append(torch.zeros(shape, dtype=dtype, device=device))
                layers.append((pair[0], pair[1]))
        super().__init__(layers)

    @classmethod
    def from_spec(cls, spec: KVSpec) -> Self:
        """As the protocol says; refuses what is not free, as all memory is committed at once."""
        spec.plain_layer(cls.name)
        slots = spec.units("slot", spec.max_model_len, "a smaller max_model_len")
        needed, free = slots * spec.max_model_len * spec.token_bytes, drivers.find(spec.device).available_memory()
        if needed > free:
            raise ConfigError(
                f"{slots} slots of {spec.max_model_len} tokens take {format_bytes(needed)}, but {format_bytes(free)} "
                "is free; lower memory_budget, max_num_seqs or max_model_len"
            )
        return cls(spec, slots)

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        self._lengths.checked_length(num_tokens)
        return self._lengths.take(0)

    def fork(self, slot: int) -> int:
        slot = self._lengths.checked(slot)
        length = self._lengths[slot]
        child = self._lengths.take(length)
        if length:
            self._prepared.add(child)
            self.copy(slot, child, length)
        return child

    def prepare(
        self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None, *, look_ahead: bool = True
    ) -> None:
        """As the protocol says. Memory cannot run short: every slot has its own."""
        lengths = self._lengths.checked_lengths(lengths)
        self._lengths.update(lengths)
        self._prepared.update(lengths)

    def free(self, slot: int, token_ids: Sequence[int] | None = None) -> None:
        slot = self._lengths.checked(slot)
        del self._lengths[slot]
        self._prepared.discard(slot)

    def retain(self, slots: Collection[int]) -> None:
        self._lengths.retain(slots)
        self._prepared.intersection_update(slots)

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        if slot is not None:
            slot = self._lengths.checked(slot)
        return int(num_tokens > 0 and slot not in self._prepared)

    def available(self) -> int:
        return self.total() - len(self._prepared)

    def total(self) -> int:
        return self._lengths.limit

    def stats(self) -> KVStats:
        slot = self._lengths.max_model_len * self.token_bytes
        physical = self.total() * slot
        return KVStats(
            reserved_bytes=physical,
            physical_bytes=physical,
            peak_physical_bytes=physical,
            used_bytes=len(self._prepared) * slot,
            live_bytes=sum(self._lengths.values()) * self.token_bytes,
        )

    def describe(self) -> KVDescription:
        return KVDescription([SlotView(slot, self._lengths.max_model_len) for slot in self._lengths])

    def check(self) -> None:
        self._lengths.check()
        assert self._prepared <= set(self._lengths) <= set(range(self.total())), "a slot is prepared, but not allocated"
        assert all(0 <= length <= self._lengths.max_model_len for length in self._lengths.values())
        assert all(slot in self._prepared for slot, length in self._lengths.items() if length), (
            "a slot was not prepared"
        )

    def close(self) -> None:
        self._lengths.clear()
        self._prepared.clear()
        super().close()
