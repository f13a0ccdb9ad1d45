"""Rows of a slot in all layers, as bytes: for whoever keeps them outside of the cache, and brings them back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from vattn.attention import PackedBatch, Span

from .base import KVBackend


class Rows:
    """Copies rows out of the slots of a backend, and into those of another one that stores the same.

    Args:
        num_layers: of the model.
        device: the backend's.
    """

    def __init__(self, kv: KVBackend, num_layers: int, device: torch.device | str = "cpu") -> None:
        self._kv = kv
        self._layers = range(num_layers)
        self._device = torch.device(device)
        self._one: list[list[Tensor]] = []  # per layer, one row of each tensor that it stores

    def copy_out(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Those of tokens `[start, end)`: each tensor of each layer."""
        return [rows for layer in self._layers for rows in self._kv.copy_out(layer, slot, end, start)]

    def split(self, data: bytearray, slot: int, start: int, end: int) -> list[memoryview]:
        """The parts that `copy_in` takes, of such tensors one after the other; what is left over is one more."""
        view, parts = memoryview(data), []
        for row in itertools.chain(*self._shapes(slot, end)):
            size = (end - start) * row.nbytes
            parts.append(view[:size])
            view = view[size:]
        return [*parts, view] if view else parts

    def copy_in(self, parts: Sequence[memoryview], slot: int, start: int, end: int, first: int) -> bool:
        """Store the rows of tokens `[start, end)`, for which a slot is prepared, from token `first` on.

        Args:
            parts: the bytes of each tensor of `copy_out`; they can be written to.

        Returns:
            Whether they are: False if their sizes are not those of this backend.
        """
        shapes = self._shapes(slot, end)
        count = end - start
        if [count * row.nbytes for rows in shapes for row in rows] != [len(part) for part in parts]:
            return False
        batch = PackedBatch((Span(slot, first, end),), self._device)
        following = iter(parts)
        for layer, rows in zip(self._layers, shapes, strict=True):
            stored = [_tensor(next(following), count, row)[first - start :].to(self._device) for row in rows]
            self._kv.copy_in(layer, batch, stored)
        return True

    def _shapes(self, slot: int, end: int) -> list[list[Tensor]]:
        if not self._one:
            self._one = [list(self._kv.copy_out(layer, slot, end, end - 1)) for layer in self._layers]
        return self._one


def contents(rows: Sequence[Tensor]) -> list[memoryview]:
    """The bytes of what was copied out."""
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().data for tensor in rows]


def _tensor(part: memoryview, count: int, row: Tensor) -> Tensor:
    """Rows `[count, ...]`, each like `row`."""
    shape = (count, *row.shape[1:])
    return torch.frombuffer(part, dtype=row.dtype).view(shape) if part else row.new_empty(shape)
