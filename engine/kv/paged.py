"""The baseline: blocks of fixed size, and a block table per request, as in PagedAttention.

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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from vattn.attention import Blocks, PackedBatch
from vattn.config import budget_bytes
from vattn.engine.checks import checked_whole
from vattn.engine.kv.base import KVStats, PlainStore, StoredAs, register
from vattn.engine.kv.slots import SlotBook
from vattn.engine.kv.spec import KVSpec
from vattn.errors import ConfigError, InvalidLength, OutOfPages, TokenMismatch
from vattn.prefix import Admission, Block, PrefixIndex, as_ids, block_keys, check_extension, root_key
from vattn.units import format_bytes

_OPTIONS = ("num_blocks",)


@dataclass(eq=False, kw_only=True)
class _Block(Block):
    """A block of the pool that is in use or cached.

    A `retracted` block is never published again, whoever still uses it.
    """

    number: int
    retracted: bool = False


@dataclass
class _Slot:
    """Blocks of one request, in the order of its tokens: token t is in `blocks[t // block_size]`.

    `tokens` are the known ids, of whole blocks, whose keys start from `salt`. `published` are the blocks that this slot
    published.
    """

    blocks: list[_Block] = field(default_factory=list)
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    salt: bytes = b""
    published: list[_Block] = field(default_factory=list)
    rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # gather indices by block range


@register
class PagedKV(PlainStore):
    """Block allocator, block tables, scatter and gather, and a prefix cache with the policy of `vattn.prefix`.

    Conservation law: every block is in exactly one of: the free list, the blocks that slots use, the cached blocks that
    no slot uses; together they are `num_blocks`. A slot whose greatest length was n has `ceil(n / block_size)` blocks,
    so a request wastes less than one block, unless `prepare` was asked for more tokens than it has. Only whole blocks
    are shared, and lengths never go down into one, so shared blocks are never written; the last block of a forked
    request, which is not whole, is copied.

    Args:
        num_blocks: blocks in the pool; one block holds `block_size` tokens of every layer, keys and values.

    Raises:
        ConfigError: no block, or layers that differ.
    """

    name: ClassVar[str] = "paged"
    stored_as: ClassVar[StoredAs] = Blocks

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        layer, num_blocks = spec.plain_layer(self.name, _OPTIONS), checked_whole("num_blocks", num_blocks, 1)
        num_layers, num_kv_heads = spec.shape.num_layers, layer.num_kv_heads
        block_size, dtype, device = spec.block_size, spec.dtype, spec.device
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_blocks = -(-spec.max_model_len // block_size)
        self.token_bytes = spec.token_bytes
        self._heads = num_kv_heads
        self._dims = (layer.head_dim, layer.v_head_dim)

        # Kernels on CUDA read blocks as a whole and multiply what is past a length by zero, so it must not be NaN.
        allocate = torch.zeros if torch.device(device).type == "cuda" else torch.empty
        # Explicitly outside inference mode: a tensor made inside could never be written outside it.
        with torch.inference_mode(False):
            pools, buffers = [], []
            for dim in self._dims:
                shape = (num_layers, num_kv_heads * num_blocks, block_size * dim)
                pools.append(allocate(shape, dtype=dtype, device=device))
                size = num_kv_heads * self.max_blocks * block_size * dim
                buffers.append(torch.empty(size, dtype=dtype, device=device))
            self._gather_pools = [pool.unbind() for pool in pools]
            self._scatter_pools = [
                pool.view(num_layers, num_kv_heads, num_blocks * block_size, dim).unbind()
                for pool, dim in zip(pools, self._dims, strict=True)
            ]
            self._buffers = buffers
            self._head_rows = torch.arange(num_kv_heads, device=device)[:, None] * num_blocks
            self.block_table = torch.zeros((spec.max_num_seqs, self.max_blocks), dtype=torch.int32, device=device)
            self._stored = [
                Blocks(self._blocked(key), self._blocked(value), self.block_table)
                for key, value in zip(*self._scatter_pools, strict=True)
            ]

        self._free = list(range(num_blocks - 1, -1, -1))
        self._slots: SlotBook[_Slot] = SlotBook(spec.max_num_seqs, spec.max_model_len)
        self._index: PrefixIndex[_Block] = PrefixIndex()
        self._scatter: tuple[PackedBatch, Tensor] | None = None

    @classmethod
    def from_spec(cls, spec: KVSpec) -> Self:
        spec.plain_layer(cls.name, _OPTIONS)
        asked = (spec.kv_options or {}).get("num_blocks")
        if asked is None:
            return cls(spec, spec.units("block", spec.block_size, "a smaller block_size"))
        num_blocks = checked_whole("num_blocks", asked, 1)
        budget, size = budget_bytes(spec.memory_budget, spec.device), num_blocks * spec.block_size * spec.token_bytes
        if size > budget:
            raise ConfigError(
                f"num_blocks={num_blocks} of {spec.block_size} tokens take {format_bytes(size)}, but memory_budget is "
                f"{format_bytes(budget)}; give more memory or fewer blocks"
            )
        return cls(spec, num_blocks)

    @property
    def prefix_block_tokens(self) -> int:
        return self.block_size

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        self._slots.checked_length(num_tokens)
        return self._slots.take(_Slot())

    def admit(self, token_ids: Sequence[int], salt: bytes = b"") -> Admission:
        ids = as_ids(token_ids)
        if not 1 <= len(ids) <= self._slots.max_model_len:
            raise InvalidLength(f"{len(ids)} tokens; a request has from 1 to max_model_len={self._slots.max_model_len}")
        blocks = self._index.find(ids, self.block_size, salt)
        number = self.allocate(len(ids))
        slot = self._slots[number]
        self._index.acquire(blocks)
        self._append(number, blocks)
        slot.length = len(blocks) * self.block_size
        slot.tokens, slot.salt = ids[: slot.length], salt
        return Admission(number, slot.length)

    def commit(self, slot: int, token_ids: Sequence[int]) -> None:
        ids, mine = as_ids(token_ids), self._slots[self._slots.checked(slot)]
        check_extension(mine.tokens, ids, mine.length)
        known, whole = len(mine.tokens), len(ids) // self.block_size * self.block_size
        parent = mine.blocks[known // self.block_size - 1].key if known else root_key(mine.salt)
        assert parent is not None
        blocks = mine.blocks[known // self.block_size :]
        keys = list(block_keys(parent, ids[known:], self.block_size))
        for block, key in zip(blocks, keys, strict=False):
            if block.key not in (None, key):
                raise TokenMismatch(f"block {block.depth} was committed with other tokens by a request that shares it")
        for block, key in zip(blocks, keys, strict=False):
            if not block.published and not block.retracted and self._index.publish(block, key):
                mine.published.append(block)
        mine.tokens = ids[:whole]

    def retract(self, slot: int) -> None:
        for block in self._slots[self._slots.checked(slot)].published:
            block.retracted = True
            if block.published:
                self._index.withdraw(block)

    def fork(self, slot: int) -> int:
        source = self._slots[self._slots.checked(slot)]
        whole, rest = divmod(source.length, self.block_size)
        if rest and not self.available():
            raise self._missing(1)
        number = self.allocate(source.length)
        shared = source.blocks[:whole]
        self._index.acquire(shared)
        self._append(number, shared)
        if rest:
            self._append(number, self._take(1, whole))
            target, origin = self._slots[number].blocks[-1].number, source.blocks[whole].number
            for pools in self._scatter_pools:
                for pool in pools:
                    rows = pool.view(self._heads, self.num_blocks, -1)
                    rows[:, target] = rows[:, origin]
        child = self._slots[number]
        child.length, child.salt, child.tokens = source.length, source.salt, source.tokens.copy()
        return number

    def evict_prefixes(self) -> int:
        before = len(self._free)
        self._evict(self._index.unused)
        return len(self._free) - before

    def prepare(self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None) -> None:
        """As the protocol says. `next_lengths` is ignored: taking a block only pops a list."""
        lengths = self._slots.checked_lengths(lengths)
        for number, length in lengths.items():
            slot = self._slots[number]
            if length < slot.length and any(
                b.users > 1 or b.published for b in slot.blocks[length // self.block_size :]
            ):
                raise InvalidLength(
                    f"slot {number} cannot go from {slot.length} tokens down to {length}: blocks after that are shared "
                    "or cached, and would be written again; free the request, and admit its tokens anew"
                )
        missing = sum(self.needed(length, slot) for slot, length in lengths.items()) - self.available()
        if missing > 0:
            raise self._missing(missing)
        for number, length in lengths.items():
            slot = self._slots[number]
            have = len(slot.blocks)
            if (more := self._blocks(length) - have) > 0:
                self._append(number, self._take(more, have))
            slot.length = length

    def free(self, slot: int) -> None:
        slot = self._slots.checked(slot)
        blocks = self._slots[slot].blocks
        self._index.release(blocks)
        self._free += [block.number for block in reversed(blocks) if not block.users and not block.published]
        del self._slots[slot]

    def retain(self, slots: Collection[int]) -> None:
        """As the protocol says; rebuilds all state from the slots that stay. Cached prefixes are dropped."""
        self._slots.retain(slots)
        self._index, self._scatter = PrefixIndex(), None
        for slot in self._slots.values():
            slot.blocks = [_Block(depth=block.depth, number=block.number) for block in slot.blocks]
        held: dict[int, _Block] = {}
        for number, slot in self._slots.items():
            slot.tokens, slot.published = [], []
            blocks = [held.setdefault(block.number, block) for block in slot.blocks]
            slot.blocks = []
            self._index.acquire(blocks)
            self._append(number, blocks)
        self._free = [number for number in range(self.num_blocks - 1, -1, -1) if number not in held]

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        have = 0 if slot is None else len(self._slots[self._slots.checked(slot)].blocks)
        return max(0, self._blocks(num_tokens) - have)

    def available(self) -> int:
        return len(self._free) + self._index.unused

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
        """As the protocol says: gathers the blocks that hold `[start, length)` into a buffer that is reused."""
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
        """The block tables of a step in one padded tensor, as paged kernels take them; padding is arbitrary.

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
        block = self.block_size * self.token_bytes
        pool = self.num_blocks * block
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)
        used = self.num_blocks - self.available()
        saved = sum(len(slot.blocks) for slot in self._slots.values()) - used
        live = sum(slot.length for slot in self._slots.values()) - saved * self.block_size
        return KVStats(
            reserved_bytes=pool + buffers,
            physical_bytes=pool,
            peak_physical_bytes=pool,
            used_bytes=used * block,
            live_bytes=live * self.token_bytes,
        )

    def block_lists(self) -> dict[int, list[int]]:
        """The numbers of each slot's blocks, in the order of its tokens; a block that is shared is in several lists."""
        return {number: [block.number for block in slot.blocks] for number, slot in self._slots.items()}

    def cached_blocks(self) -> list[int]:
        """The numbers of the blocks that only the prefix cache holds."""
        return [block.number for block in self._index if not block.users]

    def check(self) -> None:
        self._index.check()
        self._slots.check()
        users: dict[_Block, int] = dict.fromkeys(self._index, 0)
        for slot in self._slots.values():
            for block in slot.blocks:
                users[block] = users.get(block, 0) + 1
        assert all(block.users == count for block, count in users.items()), "a block's users are miscounted"
        held = [block.number for block in users]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "a block is lost, or in two places"
        for number, slot in self._slots.items():
            assert len(slot.blocks) >= self._blocks(slot.length), f"slot {number} holds fewer blocks than it needs"
            numbers = [block.number for block in slot.blocks]
            assert self.block_table[number, : len(numbers)].tolist() == numbers
            assert [block.depth for block in slot.blocks] == list(range(len(slot.blocks))), "blocks are out of order"
            for block in slot.blocks[slot.length // self.block_size :]:
                assert block.users == 1, "a block that is not whole is shared"
                assert not block.published, "a block that is not whole is cached"
            assert 0 <= slot.length <= self._slots.max_model_len
            assert len(slot.tokens) <= slot.length, f"slot {number} has committed tokens that it does not hold"
            keys = list(block_keys(root_key(slot.salt), slot.tokens, self.block_size))
            assert [block.key for block in slot.blocks[: len(keys)]] == keys, "blocks have the keys of other tokens"

    def close(self) -> None:
        self._slots.clear()
        self._index = PrefixIndex()
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._gather_pools, self._scatter_pools, self._stored, self._buffers = [], [], [], []

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _blocked(self, pool: Tensor) -> Tensor:
        """`[heads, tokens, dim]` as `[blocks, block_size, heads, dim]`."""
        return pool.view(self._heads, self.num_blocks, self.block_size, -1).permute(1, 2, 0, 3)

    def _missing(self, blocks: int) -> OutOfPages:
        return OutOfPages(
            f"{blocks} blocks of {self.block_size} tokens are missing: {self.available()} of {self.num_blocks} are "
            "free, or cached for nobody; preempt or finish a request, or give the pool more memory",
            missing_pages=blocks,
            missing_bytes=blocks * self.block_size * self.token_bytes,
        )

    def _take(self, count: int, depth: int) -> list[_Block]:
        """Free or evicted blocks for one request, from its `depth`-th on; `available()` covers them."""
        self._evict(count - len(self._free))
        blocks = [_Block(depth=depth + i, number=self._free.pop()) for i in range(count)]
        self._index.acquire(blocks)
        return blocks

    def _evict(self, count: int) -> None:
        for _, block in zip(range(count), self._index.victims(), strict=False):
            self._index.remove(block)
            self._free.append(block.number)

    def _append(self, number: int, blocks: list[_Block]) -> None:
        slot = self._slots[number]
        have, more = len(slot.blocks), len(blocks)
        slot.blocks += blocks
        slot.rows.clear()
        numbers = [block.number for block in blocks]
        self.block_table[number, have : have + more] = torch.tensor(numbers, dtype=torch.int32)

    def _gather_rows(self, number: int, first: int, last: int) -> Tensor:
        """Rows of the pool that hold blocks `[first, last)` of a slot, head by head; kept until the slot grows."""
        slot = self._slots[number]
        rows = slot.rows.get((first, last))
        if rows is None:
            rows = (self._head_rows + self.block_table[number, first:last]).flatten()
            slot.rows[first, last] = rows
        return rows
