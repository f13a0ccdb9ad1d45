"""The books of token blocks that slots share: which slot has which block mapped, who uses it, and whether it is cached.

A slot's pages start with blocks, in order; what follows is private. Only what is in a block can be in another slot, or
stay when no slot has it.

    [ blocks used by the request | blocks left over | private pages )
    0                       used * T            len(blocks) * T

Left over are blocks of an earlier request in this slot, or such that the length went down into. They must leave the
slot before its request writes there; until then they are free for a request that wants just them.

Every block is in one state, and its pages are counted by it:
    used     by running requests: its reference count is over 0;
    cached   by nobody, but it is in the index: it can be found, and evicted;
    parked   neither, but a slot has it mapped: its memory is for anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from vattn import _native
from vattn.errors import TokenMismatch
from vattn.layout import Layout
from vattn.prefix import Block, PrefixIndex, block_keys, check_extension, root_key


class State(Enum):
    USED = "used"
    CACHED = "cached"
    PARKED = "parked"
    GONE = "gone"


@dataclass(eq=False, kw_only=True)
class PageBlock(Block):
    """A block in memory.

    Attributes:
        pages: its pages, per kind of tensor.
        slots: the slots that have it mapped.
        state: as it is counted.
    """

    pages: tuple[_native.Pages, ...]
    slots: set[int] = field(default_factory=set)
    state: State = State.GONE


@dataclass
class SlotBlocks:
    """The blocks of one slot.

    Attributes:
        blocks: those it has mapped at its start.
        used: how many of them its request uses.
        tokens: the ids of its request's tokens, as far as they are known: whole blocks.
        salt: what the request's keys start from.
        rewound: its length went down into its blocks, so kernels were launched that read what will have to leave.
    """

    blocks: list[PageBlock] = field(default_factory=list)
    used: int = 0
    tokens: list[int] = field(default_factory=list)
    salt: bytes = b""
    rewound: bool = False


class SharedBlocks:
    """The blocks of one cache; used under its pool's lock.

    Attributes:
        block_tokens: tokens of a block: the fewest that fill whole pages of every kind, so that blocks share no page.
        columns: columns of a block, per kind.
        block_pages: pages of a block.
        index: the published ones.
        ends: where the blocks end that a request uses, in tokens; for requests that use any.
    """

    def __init__(self, layout: Layout, pool: _native.PagePool, spaces: Sequence[_native.AddressSpace]) -> None:
        kinds = layout.kinds
        self.block_tokens = math.lcm(*(k.page_size // math.gcd(k.page_size, k.row_bytes) for k in kinds))
        self.columns = tuple(kind.columns(self.block_tokens) for kind in kinds)
        self.block_pages = layout.pages(self.block_tokens)
        self.index: PrefixIndex[PageBlock] = PrefixIndex()
        self.ends: dict[int, int] = {}
        self._slots = [SlotBlocks() for _ in range(layout.slots)]
        self._pool = pool
        self._spaces = spaces
        self._blocks = dict.fromkeys(State, 0)
        self._several = 0  # blocks with several users

    def __getitem__(self, slot: int) -> SlotBlocks:
        return self._slots[slot]

    def pages(self, state: State) -> int:
        """Pages of the blocks in that state, each counted once."""
        return self.block_pages * self._blocks[state]

    @property
    def saved_pages(self) -> int:
        """Pages that running requests would hold more if they shared nothing."""
        return self.block_pages * (sum(slot.used for slot in self._slots) - self._blocks[State.USED])

    def shared_pages(self) -> int:
        """Pages that several running requests use, each counted once."""
        return self.block_pages * self._several

    def leftover(self, slot: int, length: int) -> bool:
        """Whether blocks of the slot must leave before tokens past `length` are written."""
        return len(self._slots[slot].blocks) * self.block_tokens > length

    def common(self, slot: int, blocks: Sequence[PageBlock]) -> int:
        """How many of these blocks the slot starts with, in their order; equal keys are equal values."""
        count = 0
        for mine, wanted in zip(self._slots[slot].blocks, blocks, strict=False):
            if mine is not wanted and (mine.key is None or mine.key != wanted.key):
                break
            count += 1
        return count

    def cached_prefix(self, slot: int) -> int:
        """Blocks at the start of the slot that are in the index or in use."""
        blocks = self._slots[slot].blocks
        return next((i for i, block in enumerate(blocks) if not block.published and not block.users), len(blocks))

    # Changes

    def use(self, slot: int, count: int, transaction: _native.Transaction | None = None) -> None:
        """The slot's request uses its first `count` blocks from now on."""
        mine = self._slots[slot]
        before = mine.used
        if transaction is not None:
            transaction.on_revert(lambda: self.use(slot, before))
        mine.used = count
        self.index.acquire(mine.blocks[before:count])
        self._several += sum(block.users == 2 for block in mine.blocks[before:count])
        if count < before:
            self.index.release(mine.blocks[count:before])
            self._several -= sum(block.users == 1 for block in mine.blocks[count:before])
        if count:
            self.ends[slot] = count * self.block_tokens
        else:
            self.ends.pop(slot, None)
        for block in mine.blocks[min(before, count) : max(before, count)]:
            self._recount(block)

    def attach(self, transaction: _native.Transaction, slot: int, blocks: Sequence[PageBlock]) -> None:
        """Plans to map these blocks behind those of the slot, which has nothing behind them, read-only."""
        for kind, space in enumerate(self._spaces):
            space.attach(transaction, slot, [block.pages[kind] for block in blocks])
        count = len(self._slots[slot].blocks)
        transaction.on_revert(lambda: self._remove(slot, count))
        self._add(slot, blocks)

    def detach(self, transaction: _native.Transaction, slot: int, count: int) -> None:
        """Notes that all blocks but the first `count`, which the request may use, leave the slot: they are unmapped."""
        removed = self._slots[slot].blocks[count:]
        transaction.on_revert(lambda: self._add(slot, removed))
        self._remove(slot, count)

    def adopt(self, slot: int, count: int) -> None:
        """Makes blocks of the slot's private pages, `count` in all, which its request uses."""
        mine = self._slots[slot]
        for depth in range(len(mine.blocks), count):
            pages = tuple(
                space.pages(slot, depth * columns, (depth + 1) * columns)
                for space, columns in zip(self._spaces, self.columns, strict=True)
            )
            self._add(slot, [PageBlock(depth=depth, pages=pages)])
        if count > mine.used:
            self.use(slot, count)

    def disown(self, slot: int, count: int) -> None:
        """Takes `adopt` back for all blocks but the first `count`, which nobody else has got meanwhile."""
        self.use(slot, min(self._slots[slot].used, count))
        self._remove(slot, count)

    def publish(self, slot: int, token_ids: list[int], length: int) -> None:
        """Publishes the whole blocks of these tokens, which are those of the slot's request up to some point.

        Raises:
            TokenMismatch: they cannot be.
        """
        mine = self._slots[slot]
        check_extension(mine.tokens, token_ids, length)
        known = len(mine.tokens) // self.block_tokens
        count = len(token_ids) // self.block_tokens
        if count == known:
            return
        parent = mine.blocks[known - 1].key if known else root_key(mine.salt)
        assert parent is not None
        keys = list(block_keys(parent, token_ids[known * self.block_tokens :], self.block_tokens))
        for block, key in zip(mine.blocks[known:count], keys, strict=False):
            if block.key not in (None, key):
                raise TokenMismatch(f"block {block.depth} was committed with other tokens by a request that shares it")
        self.adopt(slot, count)
        for block, key in zip(mine.blocks[known:count], keys, strict=True):
            if not block.published and self.index.publish(block, key):
                for pages in block.pages:
                    self._pool.hold(pages)
        mine.tokens = token_ids[: count * self.block_tokens]

    def evict(self, transaction: _native.Transaction, block: PageBlock) -> None:
        """Plans to forget a cached block that no slot has mapped: its pages are free."""
        assert not block.slots, "evicted a block that is mapped"
        self.index.remove(block)
        self._recount(block)
        transaction.on_revert(lambda: self._restore(block))
        for pages in block.pages:
            self._pool.let_go(transaction, pages)

    def forget(self, transaction: _native.Transaction) -> None:
        """Plans to give up every page that only the index holds; these books are of no use afterwards."""
        for block in self.index:
            for pages in block.pages:
                self._pool.let_go(transaction, pages)

    def held(self) -> Iterator[_native.Pages]:
        """The pages that the index holds."""
        return (pages for block in self.index for pages in block.pages)

    def check(self) -> None:
        """Asserts that users, slots, states and the index agree."""
        self.index.check()
        listed = {block for slot in self._slots for block in slot.blocks}
        users = dict.fromkeys(listed, 0)
        for number, slot in enumerate(self._slots):
            assert slot.used <= len(slot.blocks), "a request uses blocks that its slot does not have"
            assert len(slot.tokens) <= slot.used * self.block_tokens, "tokens are known that are not in blocks"
            for depth, block in enumerate(slot.blocks):
                assert number in block.slots, "a block does not know a slot that has it"
                assert block.depth == depth, "a block is out of its place"
            for block in slot.blocks[: slot.used]:
                users[block] += 1
        everything = listed | set(self.index)
        counted = dict.fromkeys(State, 0)
        for block in everything:
            assert block.users == users.get(block, 0), "a block's users are miscounted"
            assert all(block in self._slots[slot].blocks for slot in block.slots), "a slot lacks a block"
            assert block.state == self._state(block), "a block is in another state"
            counted[block.state] += 1
        assert self._several == sum(count > 1 for count in users.values()), "shared blocks are miscounted"
        del counted[State.GONE]
        assert counted == {state: self._blocks[state] for state in counted}, "blocks are miscounted"

    def _restore(self, block: PageBlock) -> None:
        if not self.index.restore(block):
            transaction = _native.Transaction()  # never reverted: the block that was published since stays
            for pages in block.pages:
                self._pool.let_go(transaction, pages)
        self._recount(block)

    def _add(self, slot: int, blocks: Sequence[PageBlock]) -> None:
        self._slots[slot].blocks.extend(blocks)
        for block in blocks:
            block.slots.add(slot)
            self._recount(block)

    def _remove(self, slot: int, count: int) -> None:
        removed = self._slots[slot].blocks[count:]
        assert count >= self._slots[slot].used, "removed a block that is in use"
        del self._slots[slot].blocks[count:]
        for block in removed:
            block.slots.discard(slot)
            self._recount(block)

    def _recount(self, block: PageBlock) -> None:
        state = self._state(block)
        if state is not block.state:
            self._blocks[block.state] -= 1
            self._blocks[state] += 1
            block.state = state

    @staticmethod
    def _state(block: PageBlock) -> State:
        if block.users:
            return State.USED
        if block.published:
            return State.CACHED
        return State.PARKED if block.slots else State.GONE
