"""The books of token blocks that slots share, per band: which slots have a block mapped, which requests use it, and
whether it is cached.

The mapped range of a slot begins with blocks, in order; the pages after them are private. Only the pages of blocks can
be mapped in several slots, or be kept without being mapped. Blocks before a window have left the slot:

    [ left | blocks used by the request | blocks left over | private pages )
    0      start * T                    end * T            (start + len(blocks)) * T

Left-over blocks remain from an earlier request in the slot, or from before the length decreased. They must leave the
slot before its request writes there; until then they are available to a request with the same prefix.

Every block is in one state, by which its pages are counted:
    used     running requests use it: its reference count is positive;
    cached   no request uses it, but it is in the index, so it can be found and evicted;
    pinned   the same, but other processes have it mapped, so evicting it frees nothing;
    parked   neither, but a slot has it mapped: its memory can be reclaimed.

The primary state here is which blocks a slot has, how many of them its request uses, and which blocks are in the index.
Users, slots, states and counts are derived from that, by `refresh`.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum

from vattn import _native
from vattn.errors import TokenMismatch
from vattn.layout import Band
from vattn.pool.journal import Change
from vattn.pool.shares import Foreign, Left, Shares
from vattn.prefix import KEY_BYTES, Block, Key, PrefixIndex


class State(Enum):
    USED = "used"
    CACHED = "cached"
    PINNED = "pinned"
    PARKED = "parked"
    GONE = "gone"


_NOWHERE = frozenset[int]()


@dataclass(eq=False, slots=True, weakref_slot=True)
class PageBlock(Block):
    """A block in memory.

    A prompt has many, which are often all in the same slots, so that one set stands for these.

    Attributes:
        own: its pages, per kind of tensor, if they are this process's.
        slots: the slots that have it mapped.
        state: the state by which its pages are counted.
        retracted: whether its contents are wrong, so that it must not be published again.
        foreign: what its pages are among that are another process's, and count there.
        entry: its number in the directory that other processes read; None if it is not there.
        pinned: whether other processes have it mapped, as of a moment ago.
    """

    own: tuple[_native.Pages, ...] = ()
    retracted: bool = False
    foreign: Foreign | None = None
    entry: int | None = None
    pinned: bool = False
    slots: frozenset[int] = _NOWHERE
    state: State = State.GONE

    @property
    def pages(self) -> tuple[_native.Pages, ...]:
        """Its pages, per kind of tensor."""
        return self.own if self.foreign is None else self.foreign.part(self.depth, self.depth + 1)


@dataclass
class SlotBlocks:
    """The blocks of one slot.

    Attributes:
        blocks: the blocks it has mapped, before all private pages.
        start: the depth of the first block.
    """

    blocks: list[PageBlock] = field(default_factory=list)
    start: int = 0

    @property
    def stop(self) -> int:
        """The depth at which the last block ends; 0 without any."""
        return self.start + len(self.blocks) if self.blocks else 0

    def before(self, depth: int) -> list[PageBlock]:
        """The blocks before this depth."""
        return self.blocks[: max(0, depth - self.start)]

    def after(self, depth: int) -> list[PageBlock]:
        """The blocks from this depth on."""
        return self.blocks[max(0, depth - self.start) :]


class SharedBlocks:
    """The blocks of one band; used under its pool's lock.

    Args:
        band: the geometry; blocks fill whole pages, so no two blocks share a page.
        slots: number of slots.
        used_tokens: per slot, the token at which the blocks that its request uses end; only for slots that use any. All
            bands of a cache share this mapping, and none of them changes it.

    Attributes:
        columns: columns per block, by kind.
        block_pages: pages per block.
        index: the published blocks.
        shares: what other processes have of them, and this one of theirs; None without any.
        restored: blocks that came back when a call failed that had evicted them: others may not find them any more.
    """

    def __init__(
        self,
        band: Band,
        slots: int,
        pool: _native.PagePool,
        spaces: Sequence[_native.AddressSpace],
        used_tokens: Mapping[int, int],
    ) -> None:
        self.columns = tuple(kind.columns(band.block_tokens) for kind in band.kinds)
        self.block_pages = band.pages(band.block_tokens)
        self.index: PrefixIndex[PageBlock] = PrefixIndex()
        self.shares: Shares | None = None
        self.restored = set[PageBlock]()
        self._slots = [SlotBlocks() for _ in range(slots)]
        self._pool = pool
        self._spaces = spaces
        self._block_tokens = band.block_tokens
        self._used_tokens = used_tokens
        self._blocks = dict.fromkeys(State, 0)  # without foreign ones, as below
        self._listed = 0  # blocks that are not gone
        self._uses = 0  # sum of the blocks' users
        self._several = 0  # blocks with several users, foreign ones apart
        self._pinned = set[PageBlock]()  # those that are, and some that were

    def __getitem__(self, slot: int) -> SlotBlocks:
        return self._slots[slot]

    def used(self, slot: int) -> list[PageBlock]:
        """The blocks that the slot's request uses, without those that have left its window."""
        return self._slots[slot].before(self._end(slot))

    def pages(self, state: State) -> int:
        """Pages of the blocks in this state, each counted once."""
        return self.block_pages * self._blocks[state]

    @property
    def held_pages(self) -> int:
        """Pages of all blocks, each counted once."""
        return self.block_pages * self._listed

    @property
    def saved_pages(self) -> int:
        """Additional pages that running requests would hold if they shared nothing."""
        return self.block_pages * (self._uses - self._blocks[State.USED])

    def shared_pages(self) -> int:
        """Pages that several running requests use, each counted once."""
        return self.block_pages * self._several

    def with_keys(self, keys: Set[Key]) -> set[PageBlock]:
        """The blocks with one of these keys, in the index or in slots."""
        return {block for block in self._everything() if block.key in keys}

    def keys(self) -> Iterator[Key]:
        """The keys of all blocks that can be found, in the index or in slots, or that other processes have still."""
        hidden = set[Key]() if self.shares is None else self.shares.hidden_keys
        return itertools.chain((block.key for block in self._everything() if block.key is not None), hidden)

    def _everything(self) -> Iterator[PageBlock]:
        return itertools.chain(self.index, *(slot.blocks for slot in self._slots))

    def common(self, slot: int, blocks: Sequence[PageBlock]) -> int:
        """How many of these blocks, from the first on, are in place in the slot; equal keys mean equal values."""
        mine = self._slots[slot]
        if not blocks or mine.start > blocks[0].depth:
            return 0
        count = 0
        for own, wanted in zip(mine.blocks[blocks[0].depth - mine.start :], blocks, strict=False):
            if own is not wanted and (own.key is None or own.key != wanted.key):
                break
            count += 1
        return count

    def cached_prefix(self, slot: int) -> int:
        """How many blocks of the slot, from its first on, are in the index or in use."""
        blocks = self._slots[slot].blocks
        return next((i for i, block in enumerate(blocks) if not block.published and not block.users), len(blocks))

    def published_prefix(self, slot: int) -> int:
        """How many blocks of the slot, from its first on, are in the index."""
        blocks = self._slots[slot].blocks
        return next((i for i, block in enumerate(blocks) if not block.published), len(blocks))

    # Changes

    def end_moved(self, slot: int, before: int) -> None:
        """Updates users after the depth up to which the slot's request uses blocks changed from `before`. If that is
        reverted, `refresh` recomputes them.
        """
        mine = self._slots[slot]
        old, new = len(mine.before(before)), len(self.used(slot))
        self._acquire(mine.blocks[old:new])
        self._release(mine.blocks[new:old])

    def attach(self, change: Change, slot: int, blocks: Sequence[PageBlock]) -> None:
        """Plans to map one or more blocks read-only after those of the slot, which must have no private pages."""
        for kind, space in enumerate(self._spaces):
            space.attach(change.transaction, slot, [*_pages(blocks, kind)])
        self._add(change, slot, blocks)

    def detach(self, change: Change, slot: int, count: int) -> None:
        """Notes that all blocks but the first `count`, none of them used by the slot's request, leave the slot."""
        mine = self._slots[slot]
        removed = mine.blocks[count:]
        assert count >= len(self.used(slot)), "removed a block that is in use"
        if not removed:
            return
        change.splice(mine.blocks, count)
        _note(removed, slot, mapped=False)
        for block in removed:
            self._recount(block)

    def retire(self, change: Change, slot: int, count: int) -> None:
        """Notes that the first `count` blocks, which the slot's request no longer uses, leave the slot, or private
        pages that begin it.
        """
        mine = self._slots[slot]
        removed = mine.blocks[:count]
        if mine.blocks and not removed:
            return  # no private pages begin it
        used = self.used(slot)[:count]
        change.on_revert(self._bring_back, slot, removed)
        if not removed:
            return
        mine.blocks[:count], mine.start = (), mine.start + len(removed)
        self._release(used)
        _note(removed, slot, mapped=False)
        for block in removed:
            self._recount(block)

    def adopt(self, change: Change, slot: int, end: int) -> None:
        """Turns private pages of the slot into blocks, up to depth `end`."""
        mine = self._slots[slot]
        start = mine.stop or self._spaces[0].first(slot) // self.columns[0]
        if start < end:
            self._add(change, slot, [self._private_block(slot, depth) for depth in range(start, end)])

    def check_keys(self, slot: int, keys: Sequence[Key]) -> None:
        """Raises TokenMismatch if a block of the slot, shared with other slots, already has a different key."""
        for block, key in zip(self._slots[slot].blocks, keys[self._slots[slot].start :], strict=False):
            if block.key not in (None, key):
                raise TokenMismatch(f"block {block.depth} was committed with other tokens by a request that shares it")

    def publish(self, change: Change, slot: int, keys: Sequence[Key], first: int = 0) -> list[PageBlock]:
        """Publishes those of the used blocks, from depth `first` on, for which there are keys; `keys` start at depth 0.

        Returns:
            The newly published blocks, without those whose keys were in the index before.
        """
        mine = self._slots[slot]
        published: list[PageBlock] = []
        for block, key in zip(self.used(slot), keys[mine.start :], strict=False):
            if block.published or block.retracted or block.depth < first:
                continue
            if block.key is None:
                change.set(block, "key", key)
            if self.index.get(key) is not None:
                continue
            change.on_revert(self.index.take_out, block)
            self.index.publish(block, key)
            published.append(block)
            self._pool.hold(change.transaction, block.pages)
        return published

    def insert(self, change: Change, foreign: Foreign, blocks: Sequence[PageBlock], keys: Sequence[Key]) -> None:
        """Publishes all blocks of a run of another process's, made as cached ones, whose keys are not in the index."""
        change.on_revert(self._take_out, blocks)
        self.index.publish_all(blocks, keys)
        self._pool.hold(change.transaction, foreign.pages)

    def share(self, shares: Shares) -> None:
        """Has other processes find blocks that `show` names, from here on."""
        self.shares = shares

    def show(self, block: PageBlock, tokens: Sequence[int]) -> int | None:
        """Has other processes find a published block of these tokens; its entry, or None if they find one already, or
        there is no room.
        """
        assert self.shares is not None
        assert block.key is not None
        block.entry = self.shares.publish(block.key, tokens, block.pages)
        return block.entry

    def yields(self, block: PageBlock) -> bool:
        """Whether memory is had by evicting a cached block: it is this process's, and no other one has it mapped, nor
        will have.
        """
        if block.foreign:
            return False
        if block.entry is not None and self.shares is not None:
            pinned = not self.shares.remove(block.entry)
            if not pinned:
                block.entry = None
            self._note_pinned(block, pinned=pinned)
        return block.entry is None

    def note_pinned(self, blocks: Set[PageBlock]) -> None:
        """Notes which blocks other processes have mapped now."""
        for block in self._pinned | blocks:
            self._note_pinned(block, pinned=block in blocks)
        self._pinned = {*blocks}

    def unpublish(self, change: Change, block: PageBlock) -> None:
        """Has no other process find a block, which stays what it is here."""
        if not self.yields(block):
            self._pool.hold(change.transaction, block.pages)
            self._leave_to_others(change, block, wrong=True)

    def retract(self, change: Change, block: PageBlock) -> None:
        """Has a block with wrong contents, which may be in use, not found any more, in the index or in a slot."""
        published = block.published
        if published:
            change.on_revert(self.index.put_back, block)
            self.index.withdraw(block)
        change.set(block, "key", None)
        change.set(block, "retracted", True)
        self._recount(block)
        if published:
            self._let_go(change, block, wrong=True)

    def withdraw_hidden(self, keys: Set[Key]) -> None:
        """`retract` for what is here no more and other processes have still."""
        if self.shares is not None:
            self.shares.withdraw_hidden(keys)

    def evict(self, change: Change, block: PageBlock) -> None:
        """Plans to evict a cached block that no slot has mapped, which frees its pages."""
        assert not block.slots, "evicted a block that is mapped"
        change.on_revert(self._restore, block)
        self.index.remove(block)
        self._recount(block)
        self._let_go(change, block)

    def forget(self, change: Change) -> None:
        """Plans to give up every page that only the index holds, and to leave those that other processes may map to
        the pool; counts are invalid afterwards.
        """
        if self.shares is not None:
            change.set(self.shares, "alone", True)
        for block in sorted(self.index, key=lambda block: (block.last_use, -block.depth)):
            change.on_revert(self._restore, block)
            self.index.take_out(block)
            if block.entry is not None and self.shares is not None:
                change.put(self.shares.left, block.entry, Left(block.pages, block.last_use))
            else:
                self._let_go(change, block)

    def refresh(self) -> None:
        """Recomputes users, slots, states and counts."""
        blocks = {block for slot in self._slots for block in slot.blocks} | set(self.index)
        for block in blocks:
            block.users, block.slots = 0, _NOWHERE
        for number, slot in enumerate(self._slots):
            _note(slot.blocks, number, mapped=True)
            for block in self.used(number):
                block.users += 1
        self._blocks = dict.fromkeys(State, 0)
        self._listed = sum(not block.foreign for block in blocks)
        self._uses = self._several = 0
        for block in blocks:
            self._uses += block.users
            block.state = self._state(block)
            self._blocks[block.state] += not block.foreign
            self._several += block.users > 1 and not block.foreign
        self.index.refresh()

    def held(self) -> Iterator[_native.Pages]:
        """The pages that the index holds."""
        return (pages for block in self.index for pages in block.pages)

    def check(self) -> None:
        """Asserts that users, slots, states and the index agree."""
        self.index.check()
        listed = {block for slot in self._slots for block in slot.blocks}
        users = dict.fromkeys(listed, 0)
        for number, slot in enumerate(self._slots):
            for depth, block in enumerate(slot.blocks, slot.start):
                assert number in block.slots, "a block does not know a slot that has it"
                assert block.depth == depth, "a block is out of its place"
            for block in self.used(number):
                users[block] += 1
            for space, columns in zip(self._spaces, self.columns, strict=True):
                if space.columns(number) > space.first(number):
                    assert space.first(number) % columns == 0, "a slot begins within a block"
                    first = slot.stop or space.first(number) // columns
                    assert first >= self._end(number), (
                        "pages are mapped in place of blocks that the slot's request uses"
                    )
                if slot.blocks:
                    assert space.first(number) == slot.start * columns, "a slot does not begin with its first block"
                    assert space.columns(number) >= slot.stop * columns, "a block is not mapped"
        everything = listed | set(self.index)
        counted = dict.fromkeys(State, 0)
        for block in everything:
            assert block.users == users.get(block, 0), "a block's users are miscounted"
            assert all(block in self._slots[slot].blocks for slot in block.slots), "a slot lacks a block"
            assert block.state == self._state(block), "a block is in another state"
            counted[block.state] += not block.foreign
        assert self._several == sum(n > 1 and not each.foreign for each, n in users.items()), (
            "shared blocks are miscounted"
        )
        assert self._uses == sum(users.values()), "uses of blocks are miscounted"
        del counted[State.GONE]
        assert self._listed == sum(counted.values()), "blocks are miscounted"
        assert counted == {state: self._blocks[state] for state in counted}, "blocks are miscounted"

    def _end(self, slot: int) -> int:
        """The depth up to which the slot's request uses blocks."""
        return self._used_tokens.get(slot, 0) // self._block_tokens

    def _private_block(self, slot: int, depth: int) -> PageBlock:
        pages = tuple(
            space.pages(slot, depth * columns, (depth + 1) * columns)
            for space, columns in zip(self._spaces, self.columns, strict=True)
        )
        return PageBlock(depth=depth, own=pages)

    def _let_go(self, change: Change, block: PageBlock, *, wrong: bool = False) -> None:
        if not block.foreign and not self.yields(block):
            self._leave_to_others(change, block, wrong=wrong)
            return
        for pages in block.pages:
            self._pool.let_go(change.transaction, pages)

    def _leave_to_others(self, change: Change, block: PageBlock, *, wrong: bool) -> None:
        """Has no other process find a block that some have mapped, and leaves a reference of its pages to them."""
        assert self.shares is not None
        assert block.entry is not None
        number = block.entry
        change.set(block, "entry", None)
        if wrong:
            self.shares.withdraw(change, number, block.pages)
        else:
            assert block.key is not None
            self.shares.hide(change, number, block.key, block.pages)

    def _take_out(self, blocks: Iterable[PageBlock]) -> None:
        """Undoes `insert`."""
        for block in blocks:
            self.index.take_out(block)

    def _restore(self, block: PageBlock) -> None:
        """Undoes `evict`: puts a block back into the index, under an unfindable key if its own is taken by then."""
        if self.shares is not None and not block.foreign:
            self.restored.add(block)
        if not block.published and not self.index.put_back(block):
            block.key = os.urandom(KEY_BYTES)
            self.index.put_back(block)

    def _bring_back(self, slot: int, blocks: list[PageBlock]) -> None:
        """Undoes `retire`; `used_tokens` tells whether the request that used the blocks still runs."""
        mine, space, columns = self._slots[slot], self._spaces[0], self.columns[0]
        if blocks and mine.blocks[:1] == blocks[:1]:
            return
        # Pages that were private at the time and are back have to be blocks if blocks were added after them since, or
        # the request has published what was in them.
        first = blocks[-1].depth + 1 if blocks else space.first(slot) // columns
        end = mine.start if mine.blocks else min(self._end(slot), space.columns(slot) // columns)
        back = [*blocks, *(self._private_block(slot, depth) for depth in range(first, end))]
        if back:
            mine.blocks[:0], mine.start = back, back[0].depth

    def _add(self, change: Change, slot: int, blocks: Sequence[PageBlock]) -> None:
        mine = self._slots[slot]
        assert mine.stop in (0, blocks[0].depth), "blocks with a gap between them"
        if not mine.blocks:
            change.set(mine, "start", blocks[0].depth)
        change.splice(mine.blocks, len(mine.blocks), blocks)
        _note(blocks, slot, mapped=True)
        end = self._end(slot)
        self._acquire(block for block in blocks if block.depth < end)
        for block in blocks:
            self._recount(block)

    def _acquire(self, blocks: Iterable[PageBlock]) -> None:
        found = list(blocks)
        self.index.acquire(found)
        self._uses += len(found)
        for block in found:
            self._several += block.users == 2 and not block.foreign
            self._recount(block)

    def _release(self, blocks: Sequence[PageBlock]) -> None:
        if blocks:
            self.index.release(blocks)
        self._uses -= len(blocks)
        for block in blocks:
            self._several -= block.users == 1 and not block.foreign
            self._recount(block)

    def _note_pinned(self, block: PageBlock, *, pinned: bool) -> None:
        if pinned:
            self._pinned.add(block)
        block.pinned = pinned
        if block.published:
            self._recount(block)

    def _recount(self, block: PageBlock) -> None:
        state = self._state(block)
        if state is not block.state:
            if not block.foreign:
                self._blocks[block.state] -= 1
                self._blocks[state] += 1
                self._listed += (block.state is State.GONE) - (state is State.GONE)
            block.state = state

    @staticmethod
    def _state(block: PageBlock) -> State:
        if block.users:
            return State.USED
        if block.published:
            return State.PINNED if block.pinned else State.CACHED
        return State.PARKED if block.slots else State.GONE


def _note(blocks: Iterable[PageBlock], slot: int, *, mapped: bool) -> None:
    """Notes whether a slot has blocks mapped."""
    after: dict[frozenset[int], frozenset[int]] = {}
    for block in blocks:
        before = block.slots
        if before not in after:
            after[before] = before | {slot} if mapped else before - {slot}
        block.slots = after[before]


def _pages(blocks: Iterable[PageBlock], kind: int) -> Iterator[_native.Pages]:
    """The pages of neighbouring blocks, of one kind of tensor: those of a run of another process's as one."""
    for foreign, run in itertools.groupby(blocks, operator.attrgetter("foreign")):
        if foreign is None:
            yield from (block.own[kind] for block in run)
        else:
            depths = [block.depth for block in run]
            yield foreign.part(depths[0], depths[-1] + 1)[kind]
