"""SlotTable: the primary state of each slot, and what is derived from it.

Every slot is contiguous address space for `max_context_len` tokens. A prefix of it is backed, except for what has left
the windows of layers with a sliding window; the pool's worker executes what is decided. A slot is *active* (a request
has it) or *idle*; the pages of an idle slot are *parked*, except those of token blocks that are cached or that other
slots use.

    [0 ..... start ........ length ........ ready ........ extent ........ max_context_len)
     old queries  live tokens      backed          being backed    address space only

Queries come from `start` on, so pages within a window's width before it must not leave.

The primary state of a slot is its length, its start, what is known of its tokens, and its blocks; everything else here
is derived from that and from what is mapped, by `refresh`. Decisions go through a `Change` (`vattn.pool.journal`),
which reverts them if a call fails.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

from vattn.config import KVConfig
from vattn.errors import InvalidLength
from vattn.pool.journal import GONE, Change
from vattn.prefix import Ancestry, Key, TokenIds
from vattn.slots.bands import Bands, Published
from vattn.slots.blocks import PageBlock, SharedBlocks
from vattn.slots.idle import IdleSlots
from vattn.slots.kept import Kept, KeptRows


@dataclass(frozen=True)
class Known:
    """What is known of the tokens that a slot's request holds, in whole blocks.

    Attributes:
        tokens: the token ids; like `keys`, never modified in place.
        keys: the keys of the blocks.
        admitted: how many of the blocks the request was admitted with, and still has.
        published: blocks that the request was the first to commit.
        salt: the salt that the keys start from.
        rewound: whether the length decreased into blocks, or to 0 behind a window, so that launched kernels may read
            pages that have to leave.
    """

    tokens: TokenIds = field(default_factory=lambda: array("q"))
    keys: list[Key] = field(default_factory=list)
    admitted: int = 0
    published: Published = ()
    salt: bytes = b""
    rewound: bool = False


def most_ahead(block_tokens: int) -> int:
    """How many tokens before its first one a block of so many tokens is queued: at most eight, and a quarter of it."""
    return max(1, min(8, block_tokens // 4))


class SlotTable:
    """The slots of one cache; used under the pool's lock.

    Books are flat instead of one object per slot: a step checks every active slot, in a few microseconds in total.

    Args:
        config: the configuration of the cache.
        slots: number of slots.
        bands: what is mapped under the slots.

    Attributes:
        count: number of slots.
        length: for active slots, the number of live tokens.
        start: for active slots, the first token of coming queries; maintained only if there are windows.
        origin: for active slots whose first tokens are copied in, the token from which on windows are complete.
        limit: for active slots, the length up to which a step has nothing to do.
        ready: tokens that the worker has finished backing.
        known: what is known of the requests' tokens.
        sound: for slots in which something was taken back as wrong, or computed on what was, how many blocks before it
            their requests may publish.
        ancestry: how the keys of blocks follow from each other.
        pending: per slot, the ticket of the last background growth.
        leaving: slots with pages of an ended request that have to be unmapped: in an idle slot as soon as no kernel
            reads them; in an active one, which `zero_on_free` alone has here, by the first step of its request.
        idle: the idle slots, in the order in which they are chosen and reclaimed.
        kept: what is left in them behind their last blocks.
    """

    def __init__(self, config: KVConfig, slots: int, bands: Bands) -> None:
        self._config = config
        self._bands = bands
        self.count = slots
        self.length: dict[int, int] = {}
        self.start: dict[int, int] = {}
        self.origin: dict[int, int] = {}
        self.limit: dict[int, int] = {}
        self.ready = [0] * slots
        self.known = [Known()] * slots
        self.sound: dict[int, int] = {}
        self.ancestry = Ancestry()
        self.pending: dict[int, int] = {}
        self.leaving: dict[int, None] = {}
        self.idle = IdleSlots()
        self.kept = KeptRows()
        for slot in range(slots):
            self.idle.add(slot, 0, 0, 0, 0, None)

    # Queries

    def backed(self, length: int) -> int:
        """Tokens to back for a slot of `length` tokens."""
        return length + self._config.guard_rows if length else 0

    def ahead(self, slot: int) -> int:
        """How many tokens before its first one the next block of a slot is queued. Slots differ, so that the worker
        spreads over several steps what it does for those that grow alike: it takes time from who computes.
        """
        return 1 + slot % most_ahead(self._bands.block_tokens)

    def needed_tokens(self, slot: int) -> int:
        """Tokens that an active slot needs backed, including all tokens of the blocks that its request uses."""
        return max(self.backed(self.length[slot]), self._bands.used_tokens.get(slot, 0))

    def kept_tokens(self, slot: int) -> int:
        """Tokens that an idle slot needs mapped for the rows that are kept behind its last block."""
        kept = self.kept.rows.get(slot)
        return self.backed(kept.end) if kept is not None and kept.start else 0

    def leftover(self, slot: int, target: int | None = None) -> bool:
        """Whether pages of an active slot must leave before tokens past its length are written; with a target, by a
        step to that length.
        """
        length, start = self.length[slot], self.start[slot]
        if target is not None and target < start:  # fewer tokens than announced: queries start there
            start = target
        bands = self._bands
        return (
            slot in self.leaving
            or bands.stop(slot) * bands.block_tokens > length
            or (bands.windowed and not bands.sees(slot, start))
        )

    def check_seen(self, slot: int, length: int) -> None:
        """Checks that the slot can have this length: if it decreases, its windows must still be backed there.

        Raises:
            InvalidLength: they are not.
        """
        if 0 < length < self.length[slot] and (length < self.origin.get(slot, 0) or not self._bands.sees(slot, length)):
            raise InvalidLength(
                f"slot {slot} cannot go back from {self.length[slot]} tokens to {length}: what queries there see has "
                "left the sliding window, and its memory was given back; go back less far, or compute it again from 0"
            )

    def mended(self, lengths: Mapping[int, int]) -> list[int]:
        """The slots that with these lengths go back to what is sound."""
        size = self._bands.block_tokens
        return [slot for slot, count in self.sound.items() if slot in lengths and lengths[slot] <= count * size]

    def live_keys(self) -> Iterator[Key]:
        """The keys of blocks, and those that the next blocks of requests follow."""
        yield from self._bands.keys()
        yield from (known.keys[-1] for known in self.known if known.keys)

    # Decisions

    def take(self, change: Change, slot: int, length: int, *, start: int | None = None, origin: int = 0) -> None:
        """Gives an idle slot to a request."""
        self.idle.remove(slot)
        self.kept.forget(change, slot)
        self._bands.turn(change, slot)
        if not self._config.zero_on_free:
            self.vacated(change, slot)
        change.put(self.length, slot, length)
        change.put(self.start, slot, length if start is None else start)
        if origin:
            change.put(self.origin, slot, origin)
        self.set_limit(slot)

    def note_left_over(self, change: Change, slot: int) -> None:
        """With `zero_on_free`, notes that blocks beyond those that the slot's request uses go with its first step, even
        if that needs no page.
        """
        bands = self._bands
        if self._config.zero_on_free and slot not in self.leaving and bands.stop(slot) > bands.used(slot):
            self.vacate(change, slot)
            self.set_limit(slot)

    def leave(self, change: Change, slot: int, kept: Kept | None = None) -> None:
        """Makes a slot idle when its request ends.

        Args:
            kept: rows of it that another request may go on with, if their pages stay.
        """
        self._bands.use(change, slot, 0)
        self.know(change, slot, Known())
        change.put(self.length, slot, GONE)
        change.put(self.start, slot, GONE)
        for some in (self.origin, self.sound):
            if slot in some:
                change.put(some, slot, GONE)
        del self.limit[slot]
        self._bands.turn(change, slot)
        stays = self._config.deferred_reclamation and not self._config.zero_on_free
        if not stays or not self._bands.begins(slot):
            self.vacate(change, slot)
            kept = None
        self.idle.add(slot, *self._bands.facts(slot))
        if kept is not None and self._has(slot, kept):
            self.kept.keep(change, slot, kept)

    def _has(self, slot: int, kept: Kept) -> bool:
        """Whether these rows directly follow their block in an idle slot, in pages that are mapped there."""
        bands = self._bands
        return (
            bands.stop(slot) * bands.block_tokens == kept.start
            and self.backed(kept.end) <= bands.extent(slot)
            and (kept.start == 0 or self.idle[slot].tail == kept.parent)
        )

    def give_up(self, change: Change, slot: int) -> None:
        """`leave`, if the slot is active."""
        if slot in self.length:
            self.leave(change, slot)

    def know(self, change: Change, slot: int, known: Known) -> None:
        """Sets what is known of the slot's tokens."""
        if known is not self.known[slot]:
            change.put(self.known, slot, known)

    def set_lengths(self, change: Change, lengths: Mapping[int, int], lowered: Iterable[int]) -> None:
        """Sets the lengths of slots.

        Args:
            lengths: the new lengths, by slot.
            lowered: the slots whose length decreases into blocks that their requests use, or to 0 behind a window, or
                to what is sound.
        """
        length, start = self.length, self.start
        if self._bands.windowed:
            # Tokens computed before this step can be taken back by this step at the latest. If a start is past the
            # length, the request's first tokens have yet to be copied in.
            starts = {slot: max(before, start[slot]) for slot, before in length.items()}
            origins = {
                slot: min(first, lengths.get(slot) or first)  # a request may be shorter than announced
                for slot, first in self.origin.items()
                if lengths.get(slot, 1) or not length[slot]
            }
            change.set(self, "start", {slot: min(first, lengths.get(slot, first)) for slot, first in starts.items()})
            change.set(self, "origin", origins)
        change.set(self, "length", {**length, **lengths})
        for slot in lowered:
            self._rewind(change, slot)

    def advance(self, lengths: Mapping[int, int]) -> None:
        """`set_lengths` where nothing else changes with the lengths: adjacent stores that cannot be interrupted."""
        self.length.update(lengths)

    def vacate(self, change: Change, slot: int) -> None:
        """Notes that pages of an ended request have to leave the slot."""
        change.put(self.leaving, slot, None)

    def retract(self, change: Change, keys: Set[Key], others: Published = ()) -> None:
        """Removes wrong blocks from the index for good, and has requests publish nothing that they compute on them.

        Args:
            keys: the keys of wrong blocks.
            others: wrong blocks of which the index has right ones.
        """
        for slot in self.length:
            wrong = next((depth for depth, key in enumerate(self.known[slot].keys) if key in keys), None)
            if wrong is not None:
                self.distrust(change, slot, wrong)
        for shared, block in (*self._bands.with_keys(keys), *others):
            # Those that have not committed it, such as forks, do not know its key.
            for slot in block.slots:
                if self.length.get(slot, 0) > block.depth * self._bands.block_tokens:
                    self.distrust(change, slot, block.depth)
            self.withdraw(change, shared, block)
        self._bands.withdraw_hidden(keys)

    def distrust(self, change: Change, slot: int, count: int) -> None:
        """Has nothing published that a slot has behind its first `count` blocks, until it goes back to there."""
        known, sound = self.known[slot], min(count, self.sound.get(slot, count))
        change.put(self.sound, slot, sound)
        tokens, keys = known.tokens[: sound * self._bands.block_tokens], known.keys[:sound]
        self.know(change, slot, replace(known, tokens=tokens, keys=keys))

    def withdraw(self, change: Change, shared: SharedBlocks, block: PageBlock) -> None:
        """Has a block not found any more; nothing of it may stay in idle slots that are zeroed."""
        shared.retract(change, block)
        for slot in filter(self.idle.__contains__, block.slots):
            if self._config.zero_on_free:
                self.vacate(change, slot)
            self.changed(slot)

    def vacated(self, change: Change, slot: int) -> None:
        """Notes that they have left it, with this change."""
        if slot in self.leaving:
            change.put(self.leaving, slot, GONE)

    def _rewind(self, change: Change, slot: int) -> None:
        """Adjusts the slot after its length decreased, as in `set_lengths`."""
        known, length, block_tokens = self.known[slot], self.length[slot], self._bands.block_tokens
        blocks = -(-self.backed(length) // block_tokens)
        if self._bands.used(slot) > blocks:
            self._bands.use(change, slot, blocks)
        whole = length // block_tokens
        tokens, keys = known.tokens[: whole * block_tokens], known.keys[:whole]
        if length <= self.sound.get(slot, -1) * block_tokens:
            change.put(self.sound, slot, GONE)
        admitted = min(known.admitted, whole)
        self.know(change, slot, replace(known, tokens=tokens, keys=keys, admitted=admitted, rewound=True))
        self.set_limit(slot)

    # Derived state

    def set_limit(self, slot: int) -> None:
        """Computes the limit of an active slot."""
        self.limit[slot] = self._limit(slot)

    def _limit(self, slot: int) -> int:
        length = self.length[slot]
        ready = self.ready[slot] - self._config.guard_rows
        if slot in self.leaving:
            return -1
        if self.leftover(slot):
            limit, used = min(length, ready), self._bands.used_tokens.get(slot, 0)
            if self._bands.stop(slot) * self._bands.block_tokens > used:
                # Guard rows past the used blocks would lie in left-over blocks, which may be evicted.
                limit = min(limit, used - self._config.guard_rows)
            return limit
        most = self._config.max_context_len
        # With overlap, a step that comes that near to the last backed token has to queue the next one.
        limit = most if ready >= most else ready - (self.ahead(slot) if self._config.overlap else 0)
        return self._bands.outlives_at(slot, default=limit) if self._bands.windowed else limit

    def mapped(self, slot: int) -> None:
        """Notes that the worker has finished all growth of the slot."""
        self.pending.pop(slot, None)
        self.ready[slot] = self._bands.extent(slot)

    def growing(self, slots: Iterable[int], ticket: int) -> None:
        """Notes background growth of slots, under this ticket."""
        self.pending.update(dict.fromkeys(slots, ticket))

    def remapping(self, slots: Iterable[int], ticket: int) -> None:
        """Notes that all pages of slots are mapped in the background, under this ticket."""
        for slot in slots:
            self.pending[slot], self.ready[slot] = ticket, 0

    def changed(self, slot: int) -> None:
        """Follows a plan that changes the slot's pages or blocks."""
        self.ready[slot] = min(self.ready[slot], self._bands.extent(slot))
        if slot in self.length:
            self.set_limit(slot)
        else:
            self.idle.update(slot, *self._bands.facts(slot))
            if slot in self.kept.rows and not self._has(slot, self.kept.rows[slot]):
                self.kept.lost(slot)

    def refresh(self, passed: Callable[[int], bool]) -> None:
        """Recomputes derived state from decisions and mappings, after some were reverted.

        Args:
            passed: whether the worker has finished the transaction with a given ticket.
        """
        self.pending = {slot: ticket for slot, ticket in self.pending.items() if not passed(ticket)}
        for slot in range(self.count):
            extent = self._bands.extent(slot)
            self.ready[slot] = min(self.ready[slot], extent) if slot in self.pending else extent
        before, self.idle = self.idle, IdleSlots()
        for slot in dict.fromkeys((*before, *range(self.count))):
            if slot not in self.length:
                self.idle.add(slot, *self._bands.facts(slot))
        self.kept.refresh()
        if not self._config.zero_on_free:
            for slot in [slot for slot in self.leaving if slot in self.length]:
                del self.leaving[slot]
        self.limit = {}
        for slot in self.length:
            self.set_limit(slot)

    def clear(self) -> None:
        """Drops the blocks that requests published, and with them the virtual tensors."""
        self.known.clear()

    def check(self) -> None:
        """Asserts that the books of slots agree with each other and with what is mapped."""
        bands = self._bands
        active, idle = set(self.length), set(self.idle)
        assert active == set(self.limit), "limits are not those of the active slots"
        assert self._config.zero_on_free or set(self.leaving) <= idle, "the pages of a running request are to go"
        assert not active & idle, "a slot is both active and idle"
        assert active | idle == set(range(self.count)), "a slot is neither active nor idle"
        assert active == set(self.start), "starts are not those of the active slots"
        assert set(self.origin) <= active, "an origin is that of an idle slot"
        assert set(self.sound) <= active, "an idle slot has sound blocks"
        assert set(bands.used_tokens) <= active, "an idle slot uses blocks"
        for slot in idle:
            entry = self.idle[slot]
            same = (entry.blocks, entry.extent, entry.pages, entry.private, entry.tail) == bands.facts(slot)
            assert same, "an idle slot is chosen by what it does not have"
        self.kept.check()
        for slot, left in self.kept.rows.items():
            assert slot in idle, "rows are kept in the slot of a running request"
            assert self._has(slot, left), "rows are kept whose pages or last block have gone"
        assert all(bands.tenancy[slot] % 2 == (slot in active) for slot in range(self.count)), "a tenancy is miscounted"
        if self._config.zero_on_free:
            kept = [slot for slot in range(self.count) if slot not in self.leaving and bands.inherited(slot)]
            assert not kept, f"pages of a request that has ended are still in slots {kept}"
        for slot, known in enumerate(self.known):
            assert len(known.tokens) == len(known.keys) * bands.block_tokens, "tokens without keys"
            assert len(known.tokens) <= bands.used_tokens.get(slot, 0), "tokens are known that are not in blocks"
        for slot, length in self.length.items():
            extent = bands.extent(slot)
            assert self.ready[slot] <= extent, "a slot counts on tokens that are not backed"
            used = bands.used_tokens.get(slot, 0)
            whole = -(-self.backed(length) // bands.block_tokens) * bands.block_tokens
            assert used <= whole, "blocks are in use behind a length"
            # Guard rows are backed by the first step, so not yet after tokens that a request was admitted with.
            assert (length if length == used else self.backed(length)) <= extent, "a live token is not backed"
            if bands.windowed and length:
                assert self.start[slot] <= length, "an earlier query can come than what stays backed for it"
                assert bands.sees(slot, self.start[slot]), "a token that is seen has left its window"
            assert self.limit[slot] <= self._limit(slot), (
                "a step would not see that it has to back or replace something"
            )
