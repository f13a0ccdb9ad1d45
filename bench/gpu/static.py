"""The cache that is fully allocated at the start, whose speed virtual memory has to match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bench.gpu.device import DEVICE
from vattn.attention import Contiguous, PackedBatch
from vattn.engine.kv.base import KVStats


class StaticKV:
    """Plain tensors `[slots, tokens, heads, dim]` per layer, fully backed by memory; a slot is given out once."""

    name = "static"

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, slots: int, tokens: int, dtype: torch.dtype
    ) -> None:
        shape = (slots, tokens, num_kv_heads, head_dim)
        with torch.inference_mode(False):
            self._stored = [
                Contiguous(
                    torch.empty(shape, dtype=dtype, device=DEVICE), torch.empty(shape, dtype=dtype, device=DEVICE)
                )
                for _ in range(num_layers)
            ]
        self._next = 0
        self._bytes = 2 * num_layers * self._stored[0].key.nbytes

    def stored(self, layer: int) -> Contiguous:
        return self._stored[layer]

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        stored = self._stored[layer]
        key, value = (side[slot : slot + 1, start:length].transpose(1, 2) for side in (stored.key, stored.value))
        return key, value

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        stored = self._stored[layer]
        singles = batch.num_singles
        for side, rows in ((stored.key, key), (stored.value, value)):
            if singles:
                side.index_put_((batch.slots[:singles], batch.positions[:singles]), rows[:singles])
            for span, row in batch.chunks():
                side[span.slot, span.start : span.end] = rows[row : row + len(span)]

    def allocate(self, num_tokens: int) -> int:
        self._next += 1
        return self._next - 1

    def prepare(
        self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None, *, look_ahead: bool = True
    ) -> None:
        pass

    def look_ahead(self) -> None:
        pass

    def free(self, slot: int, token_ids: Sequence[int] | None = None) -> None:
        pass

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        return 0

    def available(self) -> int:
        return 1

    def total(self) -> int:
        return 1

    def stats(self) -> KVStats:
        return KVStats(self._bytes, self._bytes, self._bytes, self._bytes, 0)

    def check(self) -> None:
        pass

    def close(self) -> None:
        self._stored = []
