"""The baseline: fixed blocks, a block table per request, a gather before the kernel.

What PagedAttention's allocator does, with the same unmodified kernel as the contiguous backend behind it.

Layout, measured on a 2-core CPU, one decode of one sequence (gather and kernel; us on one core; `kv4 x 64`, 8
query heads; contiguous K/V as the floor), at 64, 512 and 4096 cached tokens:

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

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.kv import KVStats
from engine.kv.slots import Slots, check_sizes
from vattn.attention import Blocks, PackedBatch
from vattn.errors import OutOfPages


@dataclass
class _Slot:
    """Blocks of one request, in the order of its tokens: token t is in `blocks[t // block_size]`."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # gather indices by block range


class PagedKV:
    """Block allocator, block tables, scatter and gather.

    Conservation law: every block is in exactly one of the free list and one slot's list; together they are
    `num_blocks`. A slot whose greatest length was n has `ceil(n / block_size)` blocks, so a request wastes less than
    one block, unless `prepare` was asked for more than it has tokens.

    Args:
        num_blocks: blocks in the pool; one block holds `block_size` tokens of every layer, keys and values.
        max_num_seqs: slots.
        max_model_len: most tokens of a slot.

    Raises:
        ConfigError: a size below 1.
    """

    name = "paged"

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        v_head_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_sizes(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
        )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_blocks = -(-max_model_len // block_size)
        self._heads = num_kv_heads
        self._dims = (head_dim, v_head_dim)
        self._token_bytes = num_layers * num_kv_heads * (head_dim + v_head_dim) * dtype.itemsize

        # Explicitly outside inference mode: a tensor made inside could never be written outside it.
        with torch.inference_mode(False):
            pools, buffers = [], []
            for dim in self._dims:
                shape = (num_layers, num_kv_heads * num_blocks, block_size * dim)
                pools.append(torch.empty(shape, dtype=dtype, device=device))
                size = num_kv_heads * self.max_blocks * block_size * dim
                buffers.append(torch.empty(size, dtype=dtype, device=device))
            self._gather_pools = [pool.unbind() for pool in pools]
            self._scatter_pools = [
                pool.view(num_layers, num_kv_heads, num_blocks * block_size, dim).unbind()
                for pool, dim in zip(pools, self._dims, strict=True)
            ]
            self._buffers = buffers
            self._head_rows = torch.arange(num_kv_heads, device=device)[:, None] * num_blocks
            self.block_table = torch.zeros((max_num_seqs, self.max_blocks), dtype=torch.int32, device=device)
            self._stored = [
                Blocks(self._blocked(key), self._blocked(value), self.block_table)
                for key, value in zip(*self._scatter_pools, strict=True)
            ]

        self._free = list(range(num_blocks - 1, -1, -1))
        self._slots: Slots[_Slot] = Slots(max_num_seqs, max_model_len)
        self._scatter: tuple[PackedBatch, Tensor] | None = None

    def allocate(self, num_tokens: int) -> int:
        return self._slots.take(_Slot())

    def prepare(self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None) -> None:
        """As the protocol says. `next_lengths` has no use here: taking a block is popping a list."""
        self._slots.check_length(max(lengths.values(), default=0))
        missing = sum(self.needed(length, slot) for slot, length in lengths.items()) - len(self._free)
        if missing > 0:
            raise OutOfPages(
                f"{missing} blocks of {self.block_size} tokens are missing: {len(self._free)} of {self.num_blocks} "
                "are free; preempt or finish a request, or give the pool more memory",
                missing_pages=missing,
                missing_bytes=missing * self.block_size * self._token_bytes,
            )
        for number, length in lengths.items():
            slot = self._slots[number]
            slot.length = length
            have = len(slot.blocks)
            more = self._blocks(length) - have
            if more > 0:
                taken = [self._free.pop() for _ in range(more)]
                slot.blocks += taken
                slot.rows.clear()
                self.block_table[number, have : have + more] = torch.tensor(taken, dtype=torch.int32)

    def free(self, slot: int) -> None:
        self._free += reversed(self._slots[slot].blocks)
        del self._slots[slot]

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        have = 0 if slot is None else len(self._slots[slot].blocks)
        return max(0, self._blocks(num_tokens) - have)

    def available(self) -> int:
        return len(self._free)

    def total(self) -> int:
        return self.num_blocks

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        if self._scatter is None or self._scatter[0] is not batch:
            blocks = self.block_table[batch.slots, batch.positions // self.block_size]
            self._scatter = batch, blocks * self.block_size + batch.positions % self.block_size
        rows = self._scatter[1]
        self._scatter_pools[0][layer].index_copy_(1, rows, key.transpose(0, 1))
        self._scatter_pools[1][layer].index_copy_(1, rows, value.transpose(0, 1))

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """As the protocol says: a gather of the blocks that hold `[start, length)` into a buffer that is used again."""
        first, last = start // self.block_size, self._blocks(length)
        rows = self._gather_rows(slot, first, last)
        tokens = (last - first) * self.block_size
        skip, count = start - first * self.block_size, length - start
        gathered = []
        for pools, buffer, dim in zip(self._gather_pools, self._buffers, self._dims, strict=True):
            out = buffer[: rows.numel() * self.block_size * dim].view(rows.numel(), -1)
            torch.index_select(pools[layer], 0, rows, out=out)
            gathered.append(out.view(1, self._heads, tokens, dim).narrow(2, skip, count))
        return gathered[0], gathered[1]

    def stored(self, layer: int) -> Blocks:
        """As the protocol says: the pool, with every slot's block table."""
        return self._stored[layer]

    def fill_block_tables(self, slots: list[int], out: Tensor) -> Tensor:
        """The block tables of a step in one padded tensor, as a paged kernel takes them; padding means nothing.

        Args:
            slots: the requests of the step, in its order.
            out: `[max_num_seqs, max_blocks]` int32; what is past the view that is returned stays as it is.

        Returns:
            `out[:len(slots), :n]`, n being the blocks of the longest of the requests.
        """
        used = max((len(self._slots[slot].blocks) for slot in slots), default=0)
        view = out[: len(slots), :used]
        rows = torch.tensor(slots, device=self.block_table.device)
        return torch.index_select(self.block_table[:, :used], 0, rows, out=view)

    def stats(self) -> KVStats:
        block = self.block_size * self._token_bytes
        pool = self.num_blocks * block
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)
        return KVStats(
            reserved_bytes=pool + buffers,
            physical_bytes=pool,
            peak_physical_bytes=pool,
            used_bytes=(self.num_blocks - len(self._free)) * block,
            live_bytes=sum(slot.length for slot in self._slots.values()) * self._token_bytes,
        )

    def check(self) -> None:
        owned = [block for slot in self._slots.values() for block in slot.blocks]
        assert sorted(owned + self._free) == list(range(self.num_blocks)), "a block is lost, or in two places"
        for number, slot in self._slots.items():
            assert len(slot.blocks) >= self._blocks(slot.length), f"slot {number} holds fewer blocks than it needs"
            assert self.block_table[number, : len(slot.blocks)].tolist() == slot.blocks

    def close(self) -> None:
        self._slots.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._gather_pools, self._scatter_pools, self._stored, self._buffers = [], [], [], []

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _blocked(self, pool: Tensor) -> Tensor:
        """`[heads, tokens, dim]` as `[blocks, block_size, heads, dim]`."""
        return pool.view(self._heads, self.num_blocks, self.block_size, -1).permute(1, 2, 0, 3)

    def _gather_rows(self, number: int, first: int, last: int) -> Tensor:
        """Rows of the pool that hold blocks `[first, last)` of a slot, head by head; kept until the slot grows."""
        slot = self._slots[number]
        rows = slot.rows.get((first, last))
        if rows is None:
            rows = (self._head_rows + self.block_table[number, first:last]).flatten()
            slot.rows[first, last] = rows
        return rows
