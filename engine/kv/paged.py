"""The baseline: blocks of fixed size in one pool, and a block table per request, as in PagedAttention.

Kernels that can follow a block table read the blocks in place (`native`, flash kernels); for the others the blocks of a
request are gathered first.

Layout, measured on a 2-core CPU with torch's fused kernel, one decode of one sequence (gather and kernel; us on one
core; `kv4 x 64`, 8 query heads; contiguous K/V as the floor), at 64, 512 and 4096 cached tokens:

    float32                                              64    512    4096
    contiguous, no gather                                12     39     592
    rows of one head's block, into a kept buffer         14     64     870    <- this file
    the same, a new tensor each time                     14     65    1256
    [heads, blocks, ..] index_select(1), kept buffer     13     63     911    (2 cores: 55 and 776, rows 43 and 478)
    [blocks, block, heads, ..] index_select(0)           16     74     994
    rows, one gather for the whole batch of 8            16     72    1406

So the pool of a layer is `[num_kv_heads * num_blocks, block_size * head_dim]`: a row is one head's part of a block,
a gather yields each head's tokens adjacent, and its buffer is kept, since the next sequence then finds it in cache.
One pool for keys and values together saves 1 to 2 % and would bind their sizes: not taken.

That is one layer of 8 sequences, 64 MB at most, twice the L3. Where everything comes from memory (8 layers, 16
sequences of 4000 tokens, bfloat16, 500 MB) a decode takes 665 us here, 675 over vattn's tensors and 686 over plain
ones: on a CPU the gather costs up to 1.6 x while the cache is warm, and nothing measurable once it is not.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vattn.attention import Blocks

from .base import KVStats, StoredAs, register
from .blocks import BlockKV, PoolBlock
from .spec import KVSpec


@register
class PagedKV(BlockKV):
    """Blocks in one tensor per layer, for keys and for values; scatter and gather."""

    stored_as: ClassVar[StoredAs] = Blocks

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        super().__init__(spec, num_blocks)
        num_layers, num_kv_heads = spec.shape.num_layers, self._layer.num_kv_heads
        num_blocks, block_size, dtype, device = self.num_blocks, self.block_size, spec.dtype, spec.device
        self._heads = num_kv_heads
        self._dims = (self._layer.head_dim, self._layer.v_head_dim)

        # Kernels on CUDA read blocks as a whole and multiply what is past a length by zero, so it must not be NaN.
        allocate = torch.zeros if torch.device(device).type == "cuda" else torch.empty
        # As the block table: to be written outside inference mode, too.
        with torch.inference_mode(False):
            pools = [
                allocate((num_layers, num_kv_heads * num_blocks, block_size * dim), dtype=dtype, device=device)
                for dim in self._dims
            ]
            self._gather_pools = [pool.unbind() for pool in pools]
            heads_first = [
                pool.view(num_layers, num_kv_heads, num_blocks * block_size, dim).unbind()
                for pool, dim in zip(pools, self._dims, strict=True)
            ]
            self._homes = [
                (key.transpose(0, 1), value.transpose(0, 1)) for key, value in zip(*heads_first, strict=True)
            ]
            self._head_rows = torch.arange(num_kv_heads, device=device)[:, None] * num_blocks
            self._stored = [
                Blocks(self._blocked(key), self._blocked(value), self.block_table)
                for key, value in zip(*heads_first, strict=True)
            ]
        # What `read` gathers keys and values into. Kernels that follow the block table never call it.
        self._buffers: list[Tensor | None] = [None, None]
        # Gather indices of each slot, by block range; kept until its blocks change.
        self._gather: dict[int, dict[tuple[int, int], Tensor]] = {}

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """As the protocol says: gathers the blocks that hold `[start, length)` into a buffer that is reused."""
        first, last = start // self.block_size, self._blocks(length)
        rows = self._gather_rows(slot, first, last)
        tokens = (last - first) * self.block_size
        skip, count = start - first * self.block_size, length - start
        gathered = []
        for side, (pools, dim) in enumerate(zip(self._gather_pools, self._dims, strict=True)):
            out = self._buffer(side, rows.numel() * self.block_size * dim).view(rows.numel(), -1)
            torch.index_select(pools[layer], 0, rows, out=out)
            gathered.append(out.view(1, self._heads, tokens, dim).narrow(2, skip, count))
        return gathered[0], gathered[1]

    def stored(self, layer: int) -> Blocks:
        """As the protocol says: the pool, with every slot's block table."""
        return self._stored[layer]

    def stats(self) -> KVStats:
        buffers = sum(buffer.nbytes for buffer in self._buffers if buffer is not None)
        held = self.num_blocks * self._block_bytes + buffers  # neither ever shrinks
        used, live = self._held_bytes()
        return KVStats(
            reserved_bytes=held,
            physical_bytes=held,
            peak_physical_bytes=held,
            used_bytes=used,
            live_bytes=live,
        )

    def close(self) -> None:
        super().close()
        self._gather_pools, self._stored, self._buffers = [], [], [None, None]

    def _copy_block(self, origin: int, target: int) -> None:
        for layer in self._stored:
            for blocks in (layer.key, layer.value):
                blocks[target] = blocks[origin]

    def _append(self, number: int, blocks: list[PoolBlock]) -> None:
        super()._append(number, blocks)
        self._gather.pop(number, None)

    def _buffer(self, side: int, size: int) -> Tensor:
        """Room for `size` elements of the keys (0) or values (1) of a slot."""
        buffer = self._buffers[side]
        if buffer is None or buffer.numel() < size:
            most = self._heads * self.max_blocks * self.block_size * self._dims[side]
            self._buffers[side] = buffer = None  # so that there are never two
            with torch.inference_mode(False):
                buffer = self._gather_pools[side][0].new_empty(min(size + size // 4, most))
            self._buffers[side] = buffer
        return buffer[:size]

    def _gather_rows(self, number: int, first: int, last: int) -> Tensor:
        """Rows of the pool that hold blocks `[first, last)` of a slot, head by head."""
        kept = self._gather.setdefault(number, {})
        rows = kept.get((first, last))
        if rows is None:
            rows = (self._head_rows + self.block_table[number, first:last]).flatten()
            kept[first, last] = rows
        return rows

    def _blocked(self, pool: Tensor) -> Tensor:
        """`[heads, tokens, dim]` as `[blocks, block_size, heads, dim]`."""
        return pool.view(self._heads, self.num_blocks, self.block_size, -1).permute(1, 2, 0, 3)
