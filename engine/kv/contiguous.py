"""Reads and writes of backends that store each layer in one strided tensor, slot by slot.

On CPUs vattn's own copy writes all tokens of a step. Elsewhere all are written with one indexed store, but for a step
with one chunk, which is written as a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from vattn import cpu
from vattn.attention import Contiguous, PackedBatch

from .base import PlainStore, StoredAs


class ContiguousKV(PlainStore):
    """`write` and `read` over plain tensors: no block table and no gather.

    Args:
        layers: keys and values of each layer, `[slots, tokens, heads, dim]` with any strides but the last.
    """

    stored_as: ClassVar[StoredAs] = Contiguous

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        # Views per layer as [slots, tokens, heads, dim], and per layer and slot as chunks are stored and as kernels
        # read them. Made once, since making a view takes a tenth of a short decode.
        self._layers = list(layers)
        self._stored = [Contiguous(key, value) for key, value in layers]
        self._slots = [(key.unbind(), value.unbind()) for key, value in layers]
        self._heads_first = [
            (key.transpose(1, 2).unsqueeze(1).unbind(), value.transpose(1, 2).unsqueeze(1).unbind())
            for key, value in layers
        ]

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        """As `KVBackend` says."""
        singles, (keys, values) = batch.num_singles, self._layers[layer]
        if cpu.store(key, value, keys, values, *self.places(batch)):
            return
        if len(batch.spans) - singles != 1:  # slices of several chunks would be a launch for each
            places = batch.slots, batch.positions
            keys.index_put_(places, key)
            values.index_put_(places, value)
            return
        if singles:
            keys.index_put_(batch.single_places, key[:singles])
            values.index_put_(batch.single_places, value[:singles])
        ((span, row),) = batch.chunks()
        for slots, rows in zip(self._slots[layer], (key, value), strict=True):
            slots[span.slot][span.start : span.end] = rows[row : row + len(span)]

    def homes(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """As `KVBackend` says."""
        return self._layers[layer]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another one, which `prepare` has made writable."""
        for layer in self._layers:
            for slots in layer:
                slots[target, :length] = slots[source, :length]

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """As `KVBackend` says: two views."""
        keys, values = self._heads_first[layer]
        return (keys[slot].narrow(2, start, length - start), values[slot].narrow(2, start, length - start))

    def stored(self, layer: int) -> Contiguous:
        """As `KVBackend` says: contiguous slots."""
        return self._stored[layer]

    def close(self) -> None:
        """Drop the tensors."""
        self._layers, self._stored, self._slots, self._heads_first = [], [], [], []
