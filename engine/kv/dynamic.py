"""A growing tensor per request and layer, copied whenever it grows, as in transformers' DynamicCache.

It wastes no memory, at the price of copying the request's whole cache in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from vattn.attention import PackedBatch
from vattn.errors import OutOfPages

from ..checks import checked_whole
from .base import KVDescription, KVStats, NoPrefixCache, PlainStore, SlotView, StoredAs, register
from .slot_book import SlotBook
from .spec import KVSpec


@dataclass
class _Slot:
    """One request: tensors `[num_kv_heads, tokens, dim]`, keys and values of each layer."""

    layers: list[tuple[Tensor, Tensor]]
    granted: int = 0  # tokens that `prepare` has granted


@register
class DynamicKV(NoPrefixCache, PlainStore):
    """Concatenation; the unit of memory is the token.

    Conservation law: a token of the budget is free, or granted to one slot; a slot stores no more than it was granted.
    Memory is taken by `write`. While a tensor grows its old copy is there as well: beyond the budget, and in
    `peak_physical_bytes`.

    Args:
        num_tokens: the budget for all requests together.

    Raises:
        ConfigError: no token, or layers that differ.
    """

    name: ClassVar[str] = "dynamic"
    stored_as: ClassVar[StoredAs] = None

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        layer, num_tokens = spec.plain_layer(self.name), checked_whole("num_tokens", num_tokens, 1)
        self._num_layers = spec.shape.num_layers
        self._empty = tuple(
            torch.empty((layer.num_kv_heads, 0, dim), dtype=spec.dtype, device=spec.device)
            for dim in (layer.head_dim, layer.v_head_dim)
        )
        self.token_bytes = spec.token_bytes
        self._total = num_tokens
        self._granted = 0
        self._slots: SlotBook[_Slot] = SlotBook(spec.max_num_seqs, spec.max_model_len)
        self._physical = 0
        self._peak = 0

    @classmethod
    def from_spec(cls, spec: KVSpec) -> Self:
        spec.plain_layer(cls.name)
        return cls(spec, spec.units("token", 1, "a smaller model"))

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        self._slots.checked_length(num_tokens)
        key, value = self._empty
        return self._slots.take(_Slot([(key, value)] * self._num_layers))

    def fork(self, slot: int) -> int:
        layers = self._slots[self._slots.checked(slot)].layers
        length = layers[0][0].shape[1]
        if length > self.available():
            raise self._missing(length - self.available())
        copies = [(key.clone(), value.clone()) for key, value in layers]
        child = self._slots.take(_Slot(copies, granted=length))
        self._granted += length
        self._physical += _stored_bytes(self._slots[child])
        self._peak = max(self._peak, self._physical)
        return child

    def trim(self) -> int:
        """Nothing: the memory of a request goes with it."""
        return 0

    def prepare(
        self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None, *, look_ahead: bool = True
    ) -> None:
        """As the protocol says; `write` takes the memory."""
        lengths = self._slots.checked_lengths(lengths)
        more = sum(self.needed(length, slot) for slot, length in lengths.items())
        missing = more - self.available()
        if missing > 0:
            raise self._missing(missing)
        for number, length in lengths.items():
            slot = self._slots[number]
            slot.granted = max(slot.granted, length)
            if slot.layers[0][0].shape[1] > length:
                self._physical -= _stored_bytes(slot)
                slot.layers = [(key[:, :length], value[:, :length]) for key, value in slot.layers]
                self._physical += _stored_bytes(slot)
        self._granted += more

    def free(self, slot: int, token_ids: Sequence[int] | None = None) -> None:
        slot = self._slots.checked(slot)
        self._granted -= self._slots[slot].granted
        self._physical -= _stored_bytes(self._slots[slot])
        del self._slots[slot]

    def retain(self, slots: Collection[int]) -> None:
        """As the protocol says; recomputes the totals from the slots that stay."""
        self._slots.retain(slots)
        self._granted = sum(slot.granted for slot in self._slots.values())
        self._physical = sum(map(_stored_bytes, self._slots.values()))

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        return max(0, num_tokens - (0 if slot is None else self._slots[self._slots.checked(slot)].granted))

    def available(self) -> int:
        return self._total - self._granted

    def total(self) -> int:
        return self._total

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        row = 0
        for span in batch.spans:
            layers = self._slots[span.slot].layers
            before = layers[layer]
            for old in before:
                assert old.shape[1] == span.start, f"{span} does not follow the {old.shape[1]} tokens that are stored"
            grown_key, grown_value = (
                torch.cat([old, rows[row : row + len(span)].transpose(0, 1)], dim=1)
                for old, rows in zip(before, (key, value), strict=True)
            )
            # With both: there may be no memory for the second one.
            layers[layer] = grown_key, grown_value
            new_bytes = grown_key.nbytes + grown_value.nbytes
            self._peak = max(self._peak, self._physical + new_bytes)
            self._physical += new_bytes - sum(old.nbytes for old in before)
            row += len(span)

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """As the protocol says: two views."""
        key, value = self._slots[slot].layers[layer]
        count = length - start
        return key.narrow(1, start, count).unsqueeze(0), value.narrow(1, start, count).unsqueeze(0)

    def stored(self, layer: int) -> None:
        """As the protocol says: none, since there is a tensor per request."""

    def stats(self) -> KVStats:
        """As the protocol says, of what was written."""
        return KVStats(
            reserved_bytes=self._physical,
            physical_bytes=self._physical,
            peak_physical_bytes=self._peak,
            used_bytes=self._physical,
            live_bytes=self._physical,
        )

    def describe(self) -> KVDescription:
        return KVDescription([SlotView(number, slot.layers[0][0].shape[1]) for number, slot in self._slots.items()])

    def check(self) -> None:
        self._slots.check()
        assert self._granted == sum(slot.granted for slot in self._slots.values()) <= self._total, "the books differ"
        assert self._physical == sum(map(_stored_bytes, self._slots.values())), "a tensor is lost"
        for number, slot in self._slots.items():
            stored = max(key.shape[1] for key, _ in slot.layers)
            assert stored <= slot.granted, f"slot {number} stores {stored} tokens, but was granted {slot.granted}"

    def _missing(self, tokens: int) -> OutOfPages:
        return OutOfPages(
            f"room for {tokens} tokens is missing: {self.available()} of {self._total} are free; preempt or finish a "
            "request, or give the cache more memory",
            missing_pages=tokens,
            missing_bytes=tokens * self.token_bytes,
        )

    def close(self) -> None:
        self._slots.clear()
        self._granted = self._physical = 0


def _stored_bytes(slot: _Slot) -> int:
    return sum(key.nbytes + value.nbytes for key, value in slot.layers)
