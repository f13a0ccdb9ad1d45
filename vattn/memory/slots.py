"""Which pages each slot has: all decisions about memory, taken on the caller's thread, under the pool's lock.

Every slot is contiguous address space for `max_context_len` tokens. What is backed is a prefix of it, less what has
left the windows of layers that have one (`vattn.memory.bands`); the pool's worker executes what is decided. A slot is
*active* (a request has it) or *idle*; the pages of an idle slot are *parked*, save those of token blocks that are
cached or that other slots use (`vattn.memory.sharing`).

    [0 ..... start ........ length ........ ready ........ extent ........ max_context_len)
     old queries  live tokens      backed          being backed    address space only

Queries come from `start` on, so that a window's width before it nothing may leave.

What is decided about a slot is its length, where queries start, what is known of its tokens, and its blocks; everything
else here follows from that and from what is mapped, and `refresh` derives it. Decisions go through a `Change`
(`vattn.memory.journal`), which takes them back where a call fails.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from vattn.config import KVConfig
from vattn.errors import DriverError, InvalidLength, NoFreeSlot, OutOfPages
from vattn.layout import Layout
from vattn.memory.bands import BandPages
from vattn.memory.fences import Fences, refusal
from vattn.memory.idle import IdleSlots
from vattn.memory.journal import Change
from vattn.memory.pool import PagePool, Plan
from vattn.memory.sharing import PageBlock, SharedBlocks, State
from vattn.prefix import Key, PrefixIndex, block_keys, check_extension, root_key
from vattn.units import format_bytes

K = TypeVar("K")
V = TypeVar("V")

# How many idle slots that are equally good at first sight are compared.
_CANDIDATES = 4


@dataclass(frozen=True)
class Known:
    """What is known of the tokens that a slot's request holds: whole blocks of them.

    Attributes:
        tokens: their ids; never changed in place, no more than `keys`.
        keys: of the blocks.
        admitted: how many of them it was admitted with.
        published: blocks that it was the first to commit.
        salt: what the keys start from.
        rewound: the length went down into blocks, so kernels were launched that read what will have to leave.
    """

    tokens: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    admitted: int = 0
    published: tuple[tuple[SharedBlocks, PageBlock], ...] = ()
    salt: bytes = b""
    rewound: bool = False


@dataclass(frozen=True)
class Prefix:
    """Whole blocks that a slot can start with.

    Attributes:
        count: how many.
        blocks: per band, those of them that are seen from behind: the last ones.
    """

    count: int
    blocks: list[list[PageBlock]]


class Slots:
    """The slots of one cache, and what is mapped under them; used under the pool's lock.

    Args:
        config: what the cache was asked to be.
        layout: its geometry.
        budget: the most pages that it may hold.
        pool: where they come from.
    """

    def __init__(self, config: KVConfig, layout: Layout, budget: int, pool: PagePool) -> None:
        self.config = config
        self.layout = layout
        self._budget = budget
        self._pool = pool
        self._bands = [BandPages(band, layout.slots, pool) for band in layout.bands]
        self._block_tokens = layout.bands[0].block_tokens
        self._windowed = any(band.window is not None for band in layout.bands)
        # What is mapped behind a window is of no use to the next request, so it says nothing where there is other.
        self._lasting = [band for band in self._bands if band.band.window is None] or self._bands.copy()

        self._length: dict[int, int] = {}  # of active slots
        # Of active slots: queries to come are for tokens from here on. Kept up only for windows.
        self._start: dict[int, int] = {}
        # Of active slots whose first tokens are copied in: from here on their windows hold what they should.
        self._origin: dict[int, int] = {}
        self._limit: dict[int, int] = {}  # of active slots: up to here, a step has nothing to do
        self._ready = [0] * layout.slots  # tokens whose backing is in place
        self._known = [Known()] * layout.slots
        self._ends: dict[int, int] = {}  # where the blocks end that a request uses, in tokens; of those that use any
        self._pending: dict[int, int] = {}  # ticket of the last growth in the background
        self._leaving: dict[int, None] = {}  # idle slots whose pages are to go as soon as no kernel reads them
        # Active slots whose pages are another request's still, and have to leave before they can be zeroed.
        self._unzeroed: dict[int, None] = {}
        self._fences = Fences(self._pool.driver)
        self._idle = IdleSlots()
        for slot in range(layout.slots):
            self._idle.add(slot, 0, 0, 0, 0, None)
        self._private_active = 0  # pages of active slots that are in no block
        self._private_idle = 0
        self._low_water = int(config.watermark * budget)  # free pages below which parked ones are unmapped
        # An idle slot that backs so many tokens has its eager pages; with windows more has to be looked at.
        kinds = layout.kinds if config.eager_pages and not self._windowed else ()
        self._eager_tokens = max((k.tokens(min(config.eager_pages, k.run_pages)) for k in kinds), default=None)
        self._peak = 0
        self._waits = 0  # times that a step waited for the driver
        self._wait_ns = 0

    # For the pool

    def refresh(self) -> None:
        """Derives anew what follows from the books, after decisions were taken back; under the pool's lock."""
        if not self._bands:
            return
        for band in self._bands:
            band.shared.refresh()
        self._pending = {s: ticket for s, ticket in self._pending.items() if not self._pool.mapper.passed(ticket)}
        for slot in range(self.layout.slots):
            extent = self._extent(slot)
            self._ready[slot] = min(self._ready[slot], extent) if slot in self._pending else extent
        before, self._idle = self._idle, IdleSlots()
        for slot in dict.fromkeys((*before, *range(self.layout.slots))):
            if slot not in self._length:
                self._idle.add(slot, *self._facts(slot))
        self._recount()
        for slot in [slot for slot in self._leaving if slot in self._length]:
            del self._leaving[slot]
        self._limit = {}
        for slot in self._length:
            self._set_limit(slot)

    def reclaim(self, change: Change, pages: int, *, wait: bool) -> int:
        """Plans to free parked pages, of the longest idle slot first, then cached ones; returns how many. Under the
        pool's lock.
        """
        reclaimed = self._reclaim_parked(change, pages, wait=wait)
        if reclaimed < pages:
            reclaimed += self._evict(change, pages - reclaimed, wait=wait)
        return reclaimed

    @property
    def spare_pages(self) -> int:
        """Pages that `reclaim` can give."""
        return self._parked + self._cached - self._stuck_pages()

    # Backing slots; all under the pool's lock

    def _back(
        self,
        targets: Mapping[int, int],
        lengths: Mapping[int, int],
        lowered: Sequence[int],
        handle: int | None,
        capturing: bool,
    ) -> None:
        """Takes on the lengths, with every target backed when it returns; or changes nothing.

        Args:
            lowered: the slots whose length goes down into blocks.
            handle: the stream of the caller's kernels; `capturing`: it captures a graph.
        """
        needs = {slot: self._backed(length) for slot, length in targets.items()}
        begin = time.perf_counter_ns()
        waited = self._await_growth(needs)
        leftover = [slot for slot, length in targets.items() if self._leftover(slot, length)]
        short = {slot: n for slot, n in needs.items() if n > self._extent(slot) or slot in leftover}
        if not short:
            self._take_on(self._pool.change(), lengths, lowered)
        elif capturing:
            raise refusal(f"step has to map memory for {len(short)} slots")
        else:
            waited = True
            self._grow_now(short, leftover, lengths, lowered, handle)
        if waited:
            self._waits += 1
            self._wait_ns += time.perf_counter_ns() - begin
        for slot in targets:
            self._set_limit(slot)

    def _take_on(self, change: Change, lengths: Mapping[int, int], lowered: Sequence[int]) -> None:
        """The slots have these lengths from now on."""
        length, start, origin = self._length, self._start, self._origin

        def undo() -> None:
            self._length, self._start, self._origin = length, start, origin

        change.on_revert(undo)
        if self._windowed:
            # What was computed before this step can be taken back by this step at the latest. A start past the length
            # is that of a request whose tokens are still to be copied in.
            starts = {slot: max(before, start[slot]) for slot, before in length.items()}
            self._start = {slot: min(first, lengths.get(slot, first)) for slot, first in starts.items()}
            self._origin = {
                slot: min(first, lengths.get(slot) or first)  # a request may be shorter than announced
                for slot, first in origin.items()
                if lengths.get(slot, 1) or not length[slot]
            }
        self._length = {**length, **lengths}
        for slot in lowered:
            self._rewind(change, slot)

    def _save(self, slot: int, start: int, end: int) -> list[tuple[int, list[torch.Tensor]]]:
        """Copies of the rows of tokens `[start, end)`, as far as they are seen: per band from where on, and they."""
        starts = [min(end, max(start, band.band.floor(self._start[slot]))) for band in self._bands]
        return [
            (first, [rows.clone() for rows in band.rows.views(slot, first, end)])
            for first, band in zip(starts, self._bands, strict=True)
        ]

    def _grow_now(
        self,
        needs: Mapping[int, int],
        leftover: Sequence[int],
        lengths: Mapping[int, int],
        lowered: Sequence[int],
        handle: int | None,
    ) -> None:
        """Takes on the lengths and backs slots, of which some have blocks that are left over."""
        blocks = {slot: self._length[slot] // self._block_tokens for slot in leftover}
        # The live tokens of the last block, where it is left over in part, go over to the pages that replace it.
        saved = {
            slot: self._save(slot, count * self._block_tokens, self._length[slot])
            for slot, count in blocks.items()
            if self._length[slot] % self._block_tokens
        }
        replaced: list[int] = []

        def plan(change: Change) -> None:
            change.on_revert(replaced.clear)
            replaced[:] = saved
            self._take_on(change, lengths, lowered)
            for slot, count in blocks.items():
                self._release(change, slot, count, handle)
            self._grow_all(change, needs, now=True, handle=handle)
            for slot in needs:
                if self._known[slot].rewound:
                    self._know(change, slot, replace(self._known[slot], rewound=False))

        def write_saved() -> None:
            for slot in replaced:
                for band, (start, views) in zip(self._bands, saved[slot], strict=True):
                    band.rows.write(slot, start, views)
            replaced.clear()

        if saved:
            self._pool.repair(write_saved)
        self._execute(plan)
        write_saved()
        for slot in needs:
            self._ready[slot] = self._extent(slot)

    def _execute(self, plan: Plan) -> int:
        """`PagePool.execute` of a plan for which memory has to be found."""
        try:
            return self._pool.execute(plan)
        except OutOfPages as error:
            # The budget has the pages, but the machine has no memory or no mapping for new ones: those that no request
            # uses are both.
            if not self._parked + self._cached or error.__cause__ is None:
                raise
            self._pool.execute(lambda change: self.reclaim(change, self._budget, wait=True))
            self._pool.commit()
            return self._pool.execute(plan)

    def _release(self, change: Change, slot: int, count: int, handle: int | None) -> None:
        """Plans that the slot, which is to be written to, keeps only its first `count` blocks."""
        if self._fences.is_open(slot):
            raise refusal(f"slot {slot} needs other pages")
        if self._known[slot].rewound:
            self._fences.guard_running(change, handle)
        if self._used(slot) > count:
            self._use(change, slot, count)
        unzeroed = slot in self._unzeroed
        for band in self._bands:
            if unzeroed or band.shared[slot].stop > count or not band.sees(slot, self._start[slot]):
                self._cut(change, slot, count, band)
        if unzeroed:
            change.on_revert(lambda: self._unzeroed.update({slot: None}))
            del self._unzeroed[slot]

    def _rewind(self, change: Change, slot: int) -> None:
        """The length went down into blocks that the slot's request uses."""
        known, length = self._known[slot], self._length[slot]
        blocks = -(-self._backed(length) // self._block_tokens)
        whole = length // self._block_tokens
        if self._used(slot) > blocks:
            self._use(change, slot, blocks)
        self._set_end(change, slot, length)
        self._know(
            change,
            slot,
            replace(known, tokens=known.tokens[: whole * self._block_tokens], keys=known.keys[:whole], rewound=True),
        )
        self._set_limit(slot)

    def _check_seen(self, slot: int, length: int) -> None:
        """Checks that the slot can have that length: where it goes down, what its windows show is still there.

        Raises:
            InvalidLength: it is not.
        """
        if 0 < length < self._length[slot] and (
            length < self._origin.get(slot, 0) or not all(band.sees(slot, length) for band in self._bands)
        ):
            raise InvalidLength(
                f"slot {slot} cannot go back from {self._length[slot]} tokens to {length}: what queries there see has "
                "left the sliding window, and its memory was given back; go back less far, or compute it again from 0"
            )

    # Slots and their blocks

    def _find(self, token_ids: Sequence[int], salt: bytes) -> list[Key]:
        """The keys of the longest cached prefix of a prompt, in whole blocks, that leaves at least a token to compute.

        In a band with a window only those of its last blocks have to be cached that are seen behind it.
        """
        whole = [band.shared.index for band in self._bands if band.band.window is None]
        keys = []
        for key in block_keys(root_key(salt), token_ids[: len(token_ids) - 1], self._block_tokens):
            if not all(index.get(key) for index in whole):
                break
            keys.append(key)
        windowed = [(band, band.cached_rows(keys)) for band in self._bands if band.band.window is not None]
        count = len(keys)
        while count and any(rows[count] < count - band.first_block(count) for band, rows in windowed):
            count -= 1
        return keys[:count]

    def _prefix(self, keys: Sequence[Key]) -> Prefix:
        """The blocks with these keys, of which all that are seen are cached."""
        blocks = []
        for band in self._bands:
            found = map(band.shared.index.get, keys[band.first_block(len(keys)) :])
            blocks.append([block for block in found if block is not None])
        return Prefix(len(keys), blocks)

    def _in_place(self, slot: int, prefix: Prefix) -> int:
        """How many blocks of a prefix the slot can be used with as it is."""
        if not self._windowed:
            (band,) = self._bands
            return band.shared.common(slot, prefix.blocks[0])
        pairs = zip(self._bands, prefix.blocks, strict=True)
        return prefix.count if all(band.in_place(slot, blocks, prefix.count) for band, blocks in pairs) else 0

    def _choose(self, prefix: Prefix, num_tokens: int | None) -> int:
        """The idle slot in which most of a prefix can be had, with the least to map and the least to lose."""
        if not self._idle:
            raise NoFreeSlot(
                f"all {self.layout.slots} slots are taken; free one with free_reqid, or raise max_batch_size"
            )
        want = num_tokens if num_tokens is not None else self.config.max_context_len

        def rank(slot: int) -> tuple[int, int, int, bool, bool, int]:
            usable = self._in_place(slot, prefix) if self._fences.is_open(slot) else prefix.count
            missing = lost = 0
            for band, blocks in zip(self._bands, prefix.blocks, strict=True):
                common = band.shared.common(slot, blocks)
                missing += max(0, min(usable, len(blocks)) - common)
                lost += len(band.shared[slot].blocks) - common
            waits = bool(lost or missing) and not self._fences.passed(slot)
            extent = min(band.extent(slot) for band in self._lasting)
            # Blocks that another request could find in place here are worth as much as those to be mapped.
            return (-usable, missing + lost, lost, waits, extent < want, extent if extent >= want else -extent)

        candidates = dict.fromkeys(self._candidates(prefix, want))
        return min(candidates, key=rank) if len(candidates) > 1 else next(iter(candidates))

    def _candidates(self, prefix: Prefix, tokens: int) -> Iterator[int]:
        """A few idle slots, the best one for a prefix and so many tokens nearly always among them."""
        blocks = prefix.blocks[self._bands.index(self._lasting[0])]
        for block in reversed(blocks):
            if slots := self._idle.ending_with(block.key, _CANDIDATES):
                yield from slots
                if block is blocks[-1] and not all(map(self._fences.is_open, slots)):
                    return
                break
        if blocks:
            holders = itertools.islice(blocks[-1].slots, 4 * _CANDIDATES)
            yield from itertools.islice(filter(self._idle.__contains__, holders), _CANDIDATES)
        for slot in self._idle.fitting(tokens, _CANDIDATES):
            yield slot
            if self._fences.passed(slot):
                break
        # A slot that is open can only be had as it is.
        yield from itertools.islice(filter(self._idle.__contains__, self._fences.open_slots), _CANDIDATES)

    def _take(self, change: Change, slot: int, length: int, start: int | None = None, origin: int = 0) -> None:
        """The slot is a request's."""
        known, leaving = self._known[slot], slot in self._leaving

        def undo() -> None:
            for books in (self._length, self._start, self._origin, self._limit):
                books.pop(slot, None)
            self._unzeroed.pop(slot, None)
            self._known[slot] = known
            if leaving:
                self._leaving[slot] = None

        change.on_revert(undo)
        private = self._idle.remove(slot).private
        if leaving and self.config.zero_on_free:
            self._unzeroed[slot] = None  # kernels may still come that read its pages
        self._leaving.pop(slot, None)
        self._length[slot] = length
        self._start[slot] = length if start is None else start
        if origin:
            self._origin[slot] = origin
        self._private_idle -= private
        self._private_active += private
        self._set_limit(slot)

    def _leave(self, change: Change, slot: int) -> None:
        """The slot is no request's any more."""
        length, start, origin = self._length[slot], self._start[slot], self._origin.get(slot, 0)
        unzeroed = slot in self._unzeroed

        def undo() -> None:
            self._length[slot], self._start[slot] = length, start
            _store(self._origin, slot, origin)
            if unzeroed:
                self._unzeroed[slot] = None
            self._leaving.pop(slot, None)

        change.on_revert(undo)
        self._use(change, slot, 0)
        self._know(change, slot, Known())
        del self._length[slot], self._limit[slot], self._start[slot]
        self._origin.pop(slot, None)
        facts = self._facts(slot)
        private = self._private_pages(slot)
        self._private_active -= private
        self._private_idle += private
        self._idle.add(slot, *facts)

    def _give_up(self, slot: int) -> None:
        """The call that took a slot ends without its number having been given to anybody."""
        if slot in self._length:
            self._leave(self._pool.change(), slot)

    def _facts(self, slot: int) -> tuple[int, int, int, int, Key | None]:
        """What `IdleSlots` wants to know of an idle slot."""
        count = pages = private = 0
        for band in self._bands:
            mapped, blocks = band.pages(slot), len(band.shared[slot].blocks)
            count += blocks
            pages += mapped
            private += mapped - blocks * band.shared.block_pages
        extent = min([band.extent(slot) for band in self._lasting])
        main = self._lasting[0].shared[slot].blocks
        return count, extent, pages, private, main[-1].key if main else None

    def _know(self, change: Change, slot: int, known: Known) -> None:
        """That is known of the slot's tokens from now on."""
        before = self._known[slot]
        if known is not before:
            change.on_revert(lambda: self._known.__setitem__(slot, before))
            self._known[slot] = known

    def _used(self, slot: int) -> int:
        """How many blocks the slot's request uses, those behind windows included."""
        return self._bands[0].shared[slot].end

    def _use(self, change: Change, slot: int, count: int) -> None:
        """The slot's request uses its first `count` blocks from now on."""
        for band in self._bands:
            if band.shared[slot].end != count:
                band.shared.use(change, slot, count)
        self._set_end(change, slot, count * self._block_tokens)

    def _set_end(self, change: Change, slot: int, end: int) -> None:
        before = self._ends.get(slot, 0)
        if end != before:
            change.on_revert(lambda: _store(self._ends, slot, before))
            _store(self._ends, slot, end)

    def _leftover(self, slot: int, target: int | None = None) -> bool:
        """Whether pages of the slot, which is active, must leave before anything is written behind its length; with a
        target, by a step to that length.
        """
        length, start = self._length[slot], self._start[slot]
        if target is not None and target < start:  # fewer tokens than announced: queries come from there on
            start = target
        if slot in self._unzeroed:
            return True
        return any(band.shared[slot].stop * self._block_tokens > length for band in self._bands) or (
            self._windowed and not all(band.sees(slot, start) for band in self._bands)
        )

    def _publish(self, change: Change, slot: int, token_ids: list[int]) -> None:
        """Publishes the whole blocks of these tokens, which are those of the slot's request up to some point.

        Raises:
            TokenMismatch: they cannot be.
        """
        known = self._known[slot]
        check_extension(known.tokens, token_ids, self._length[slot])
        count = len(token_ids) // self._block_tokens
        if count == len(known.keys):
            return
        parent = known.keys[-1] if known.keys else root_key(known.salt)
        keys = known.keys + list(block_keys(parent, token_ids[len(known.tokens) :], self._block_tokens))
        for band in self._bands:
            band.shared.check_keys(slot, keys)
        private = self._private_pages(slot)
        # In windows, tokens before the origin may never have been copied in.
        origin = -(-self._origin.get(slot, 0) // self._block_tokens)
        published = list(known.published)
        for band in self._bands:
            band.shared.adopt(change, slot, count)
            first = 0 if band.band.window is None else origin
            published += [(band.shared, block) for block in band.shared.publish(change, slot, keys, first)]
        self._private_active += self._private_pages(slot) - private
        self._set_end(change, slot, max(self._ends.get(slot, 0), count * self._block_tokens))
        tokens = token_ids[: count * self._block_tokens]
        self._know(change, slot, replace(known, tokens=tokens, keys=keys, published=tuple(published)))

    def _retract(self, change: Change, slot: int) -> None:
        """Takes out of the index what the slot's request was the first to commit; it can commit no more of it."""
        known = self._known[slot]
        for shared, block in known.published:
            if block.published:
                shared.retract(change, block)
        admitted = known.admitted
        self._know(
            change,
            slot,
            replace(
                known, tokens=known.tokens[: admitted * self._block_tokens], keys=known.keys[:admitted], published=()
            ),
        )

    def _put(self, change: Change, slot: int, prefix: Prefix) -> None:
        """Plans that the slot starts with a cached prefix."""
        if not prefix.count:
            return
        before = self._private_pages(slot)
        changed = False
        for band, blocks in zip(self._bands, prefix.blocks, strict=True):
            if not band.in_place(slot, blocks, prefix.count):
                self._fences.guard(change, slot)
                band.put(change, slot, blocks, prefix.count)
                changed = True
        if changed:
            self._changed(slot, before)

    def _cut(self, change: Change, slot: int, count: int, band: BandPages | None = None) -> None:
        """Plans to unmap all that the slot has, of one band or of all, but its first `count` blocks; the worker waits
        for its fences.
        """
        bands = [band] if band else self._bands
        if not any(each.reaches(slot, count) for each in bands):
            return
        self._fences.guard(change, slot)
        before = self._private_pages(slot)
        for each in bands:
            each.cut(change, slot, count)
        self._changed(slot, before)

    def _changed(self, slot: int, private_before: int) -> None:
        """Pages of the slot are planned to go."""
        self._count(slot, self._private_pages(slot) - private_before)
        self._ready[slot] = min(self._ready[slot], self._extent(slot))
        if slot in self._length:
            self._set_limit(slot)

    def _evict(
        self,
        change: Change,
        pages: int,
        *,
        wait: bool,
        running: bool = False,
        handle: int | None = None,
    ) -> int:
        """Plans to forget cached blocks until `pages` pages became free; returns how many did.

        Args:
            wait: also such as kernels of earlier requests may still read: the worker waits for them.
            running: also such as are left over in slots of running requests, of which kernels on stream `handle` may
                still read: the worker waits for all of those.
        """
        before = self._pool.free_pages

        def stuck(slot: int) -> bool:
            if slot in self._length:
                return not running or self._fences.is_open(slot)
            return not self._fences.passed(slot) if not wait else self._fences.is_open(slot)

        with contextlib.ExitStack() as stack:
            victims = [
                zip(itertools.repeat(band), stack.enter_context(contextlib.closing(band.shared.index.victims())))
                for band in self._bands
            ]
            for band, block in heapq.merge(*victims, key=lambda victim: PrefixIndex.order(victim[1])):
                if self._pool.free_pages - before >= pages:
                    break
                if any(map(stuck, block.slots)):
                    continue
                for slot in tuple(block.slots):
                    if self._known[slot].rewound:
                        self._fences.guard_running(change, handle)
                    self._cut(change, slot, block.depth, band)
                band.shared.evict(change, block)
        return self._pool.free_pages - before

    # Growing and shrinking slots

    def _await_growth(self, needs: Mapping[int, int]) -> bool:
        """Waits for growth in the background that these slots count on; whether it had to."""
        mapper, pending = self._pool.mapper, self._pending
        tickets = [pending[slot] for slot, tokens in needs.items() if slot in pending and tokens > self._ready[slot]]
        waited = bool(tickets) and not mapper.passed(max(tickets))
        if tickets:
            mapper.wait(max(tickets))
        if mapper.failed:
            self._pool.settle()
        for slot in needs:
            if slot in pending:
                self._note_growth(slot)
        return waited

    def _await_idle_growth(self, tokens: int) -> None:
        """Waits for growth in the background of idle slots that may be counted on for so many tokens."""
        slots = [slot for slot in self._pending if slot in self._idle]
        self._await_growth(dict.fromkeys(slots, tokens))

    def _note_growth(self, slot: int) -> None:
        """All that the slot has is in place, unless growth in the background is still under way."""
        if self._pool.mapper.passed(self._pending.get(slot, 0)):
            self._pending.pop(slot, None)
            self._ready[slot] = self._extent(slot)

    def _grow_all(
        self,
        change: Change,
        targets: Mapping[int, int],
        *,
        now: bool = False,
        handle: int | None = None,
    ) -> None:
        """Plans the growth of slots to their targets.

        If free pages are insufficient, out of parked and cached ones that no kernel reads any more. `now`, when a step
        cannot go on without them, also out of those that kernels still read, and out of what running requests have
        beyond their length, mapped ahead or left over from a longer request, or behind their windows.
        """
        need = sum(self._growth(slot, tokens) for slot, tokens in targets.items())
        missing = need - self._free()
        hopeless = missing > 0 and not now and missing > self._pool.spare_pages
        if missing > 0 and not hopeless:
            missing -= self.reclaim(change, missing, wait=now)
        if missing > 0 and now:
            missing -= self._reclaim_surplus(change, missing, handle)
            if missing > 0:
                missing -= self._evict(change, missing, wait=True, running=True, handle=handle)
            if missing > 0:  # what running requests gave up may be mapped in idle slots, too
                missing -= self.reclaim(change, missing, wait=True)
        if missing > 0 and not hopeless and need <= self._budget - self._held:
            missing -= self._pool.reclaim(change, missing, wait=now)
        if missing > 0:
            raise OutOfPages(
                f"{need} pages of {format_bytes(self.layout.page_size)} are needed and {need - missing} are left of a "
                f"budget of {self._budget}: {missing} ({format_bytes(missing * self.layout.page_size)}) are missing; "
                "free or preempt a request, or raise memory_budget",
                missing_pages=missing,
                missing_bytes=missing * self.layout.page_size,
            )
        for slot, tokens in targets.items():
            self._grow(change, slot, tokens)

    def _grow(self, change: Change, slot: int, tokens: int) -> None:
        pages = self._growth(slot, tokens)
        for band in self._bands:
            band.grow(change, slot, tokens, self._start.get(slot, 0))
        self._count(slot, pages)

    def _unmap(self, change: Change, slot: int, pages: int, *, cached: bool = False) -> int:
        """Plans to unmap what the slot has beyond its length until `pages` pages are free; returns how many are.

        The worker waits for the slot's fences. A slot without one yet keeps its pages.

        Args:
            cached: whether cached blocks at the start of an idle slot go as well (and are cached without being mapped).
        """
        if self._fences.is_open(slot):
            return 0
        before, needed = self._pool.free_pages, self._backed(self._length.get(slot, 0))
        for band in self._bands:
            missing = pages - (self._pool.free_pages - before)
            if missing > 0 or cached:
                self._unmap_band(change, band, slot, missing, needed, cached=cached)
        return self._pool.free_pages - before

    def _unmap_band(self, change: Change, band: BandPages, slot: int, pages: int, needed: int, *, cached: bool) -> None:
        shared = band.shared
        blocks, keep = shared[slot].blocks, len(shared[slot].used)
        if slot in self._idle and not cached:
            keep = shared.cached_prefix(slot)
        columns = band.surplus(slot, needed, pages)
        private = sum(count * space.lanes for count, space in zip(columns, band.spaces, strict=True))
        count, freed = len(blocks), private
        while count > keep and (freed < pages or cached):
            count -= 1
            block = blocks[count]
            if not block.users and not block.published and len(block.slots) == 1:
                freed += shared.block_pages
        if count < len(blocks):
            self._cut(change, slot, shared[slot].start + count, band)
        elif private:
            self._fences.guard(change, slot)
            before = self._private_pages(slot)
            band.drop(change, slot, columns)
            self._changed(slot, before)

    def _reclaim_parked(self, change: Change, pages: int, *, wait: bool) -> int:
        reclaimed = 0
        for slot in self._idle.mapped:
            if reclaimed >= pages:
                break
            if wait or self._fences.passed(slot):
                reclaimed += self._unmap(change, slot, pages - reclaimed)
        return reclaimed

    def _reclaim_surplus(self, change: Change, pages: int, handle: int | None) -> int:
        """Plans to unmap pages that active slots have beyond their lengths and behind their windows; returns how many.

        A length went down after kernels were launched that read up to the old one, and the last step's kernels read
        what has left a window since, so the worker waits for those.
        """
        before = self._pool.free_pages
        guarded = False
        for slot, length in self._length.items():
            if self._pool.free_pages - before >= pages:
                break
            backed, start = self._backed(length), self._start[slot]
            # By kind: a slot may have too many pages of one and too few of another.
            outlived = any(band.outlived(slot, start) for band in self._bands)
            if not outlived and not any(band.has_surplus(slot, backed) for band in self._bands):
                continue
            if not guarded:
                self._fences.guard_running(change, handle)
                guarded = True
            if outlived and not self._fences.is_open(slot):
                self._retire(change, slot)
            self._unmap(change, slot, pages - (self._pool.free_pages - before))
        return self._pool.free_pages - before

    def _retire(self, change: Change, slot: int) -> None:
        """Plans to unmap what has left the slot's windows."""
        before = self._private_pages(slot)
        for band in self._bands:
            if band.band.window is not None:
                band.retire(change, slot, self._start[slot])
        self._changed(slot, before)

    def _release_windows(self, slots: Sequence[int], handle: int | None) -> None:
        """Queues that what has left the windows of these slots is unmapped, once what was launched has ended."""
        slots = [slot for slot in slots if any(band.outlived(slot, self._start[slot]) for band in self._bands)]
        if not slots:
            return

        def plan(change: Change) -> None:
            self._fences.guard_running(change, handle)
            for slot in slots:
                self._retire(change, slot)

        self._in_background(plan)
        for slot in slots:
            self._set_limit(slot)

    def _look_ahead(self, crossing: list[int], lengths: Mapping[int, int], announced: Mapping[int, int]) -> None:
        """Queues what the next step will need: for slots at the end of what is backed, and where it is announced."""
        if not self.config.overlap:
            return
        most = self.config.max_context_len
        expected = {slot: lengths[slot] + 1 for slot in crossing} | dict(announced)
        needs = {
            slot: tokens
            for slot, length in expected.items()
            if (tokens := self._backed(min(length, most))) > self._extent(slot) and not self._leftover(slot)
        }
        if not needs:
            return
        # Without pages there is nothing to do ahead: the next step finds out, and says so.
        with contextlib.suppress(OutOfPages):
            ticket = self._pool.submit(lambda change: self._grow_all(change, needs))
            self._pending.update(dict.fromkeys(needs, ticket))

    def _maintain(self) -> None:
        """Keeps pages free, and an idle slot backed, for what comes next."""
        leaving = [slot for slot in self._leaving if self._fences.passed(slot)]
        if leaving:
            self._in_background(lambda change: self._vacate(change, leaving))
        low = self._low_water
        if self._parked and self._free() < low:
            self._in_background(lambda change: self._reclaim_parked(change, low - self._free(), wait=False))
        self._prepare_idle_slot()

    def _vacate(self, change: Change, slots: Sequence[int]) -> None:
        """Plans to unmap what idle slots have no use for: all of it, or what no request can begin with."""
        leaving = self._leaving
        change.on_revert(lambda: leaving.update(dict.fromkeys(slots)))
        for slot in slots:
            del leaving[slot]
            if not self.config.deferred_reclamation or self.config.zero_on_free:
                self._unmap(change, slot, self._budget, cached=not self.config.deferred_reclamation)
            for band in self._bands:
                if not band.begins(slot):
                    self._cut(change, slot, band.shared[slot].stop, band)

    def _prepare_idle_slot(self) -> None:
        """Backs the start of the best idle slot, so that the next request's prefill finds its pages mapped."""
        if not self.config.eager_pages:
            return
        empty = self._idle.largest_empty(_CANDIDATES)
        if empty and self._eager_tokens is not None and self._idle[empty[0]].extent >= self._eager_tokens:
            return
        slot = next((slot for slot in empty if all(band.begins(slot) for band in self._bands)), None)
        if slot is None:
            return
        pages = sum(band.eager_growth(slot, self.config.eager_pages) for band in self._bands)
        if not pages or self._free() - pages < self._low_water:
            return

        def plan(change: Change) -> None:
            for band in self._bands:
                band.grow_eagerly(change, slot, self.config.eager_pages)
            self._count(slot, pages)

        if ticket := self._in_background(plan):
            self._pending[slot] = ticket

    def _in_background(self, plan: Plan) -> int:
        """Queues what nobody waits for (does it at once without `overlap`); its ticket, or 0 if there is none."""
        if self.config.overlap:
            return self._pool.submit(plan)
        self._pool.commit()
        with contextlib.suppress(OutOfPages, DriverError):  # it is taken back, and counted
            return self._pool.execute(plan)
        return 0

    # Books

    def _backed(self, length: int) -> int:
        """Tokens to back for a slot of `length` tokens."""
        return length + self.config.guard_rows if length else 0

    def _growth(self, slot: int, tokens: int) -> int:
        """Pages that the slot lacks to back `tokens` tokens."""
        start = self._start.get(slot, 0)
        return sum(band.growth(slot, tokens, start) for band in self._bands)

    def _extent(self, slot: int) -> int:
        """Tokens that the slot's pages back, once the worker is done with them."""
        return min(band.extent(slot) for band in self._bands)

    def _stuck_pages(self) -> int:
        """Parked and cached pages that only a step of this cache can take: kernels that use them may not be launched
        yet, or they are left over in a slot of a running request.
        """
        open_slots = [slot for slot in self._fences.open_slots if slot in self._idle]
        pages = sum(map(self._private_pages, open_slots))
        for band in self._bands:
            slots = (band.shared[slot] for slot in (*open_slots, *self._length))
            unused = {block for slot in slots if slot.stop > slot.end for block in slot.blocks if not block.users}
            pages += band.shared.block_pages * len(unused)
        return pages

    def _slot_pages(self, slot: int) -> int:
        return sum(band.pages(slot) for band in self._bands)

    def _private_pages(self, slot: int) -> int:
        """Pages of the slot that are in no block."""
        return sum(band.private_pages(slot) for band in self._bands)

    def _recount(self) -> None:
        self._private_active = sum(map(self._private_pages, self._length))
        self._private_idle = sum(map(self._private_pages, self._idle))

    def _block_pages(self, state: State) -> int:
        return sum(band.shared.pages(state) for band in self._bands)

    @property
    def _owned(self) -> int:
        """Pages that running requests have."""
        return self._private_active + self._block_pages(State.USED)

    @property
    def _parked(self) -> int:
        """Pages that are mapped, and neither theirs nor cached."""
        return self._private_idle + self._block_pages(State.PARKED)

    @property
    def _cached(self) -> int:
        """Pages of cached blocks that no running request uses."""
        return self._block_pages(State.CACHED)

    @property
    def _held(self) -> int:
        """All of these."""
        held = self._private_active + self._private_idle
        for band in self._bands:
            held += band.shared.held_pages
        return held

    def _needed_pages(self) -> int:
        """Pages that running requests need for what is seen of their tokens."""
        lengths = self._length.items()
        return sum(self.layout.pages(self._needed_tokens(slot), length) for slot, length in lengths) - sum(
            band.saved_pages(lengths) for band in self._bands
        )

    def _needed_tokens(self, slot: int) -> int:
        """Tokens that an active slot needs to be backed: of blocks that its length went down into, all."""
        return max(self._backed(self._length[slot]), self._used(slot) * self._block_tokens)

    def _count(self, slot: int, pages: int) -> None:
        """The slot has that many private pages more."""
        if slot in self._length:
            self._private_active += pages
        else:
            self._private_idle += pages
            self._idle.update(slot, *self._facts(slot))
        self._peak = max(self._peak, self._held)

    def _free(self) -> int:
        """Pages that a slot can take without any being unmapped."""
        return min(self._budget - self._held, self._pool.free_pages)

    def _set_limit(self, slot: int) -> None:
        length = self._length[slot]
        ready = self._ready[slot] - self.config.guard_rows
        if self._leftover(slot):
            self._limit[slot] = min(length, ready)
            return
        most = self.config.max_context_len
        # With overlap the last backed token is already a reason to act: the next one has to be queued.
        limit = most if ready >= most else ready - self.config.overlap
        if self._windowed:
            for band in self._bands:
                limit = min(limit, band.outlives_at(slot, default=limit))
        self._limit[slot] = limit

    def _let_go(self) -> None:
        """Lets go of the virtual tensors, with nothing mapped in them."""
        self._bands.clear()
        self._lasting.clear()
        self._known.clear()

    def _give_back(self) -> Plan:
        """Plans to give up every page; knows nothing of the cache itself, which may be gone."""
        bands = self._bands

        def plan(change: Change) -> None:
            spaces = [space for band in bands for space in band.spaces]
            if any(space.columns(slot) > space.first(slot) for space in spaces for slot in range(space.slots)):
                change.transaction.wait_for(None)  # kernels that read them, on whichever stream
            for space in spaces:
                for slot in range(space.slots):
                    space.shrink(change.transaction, slot, space.columns(slot) - space.first(slot))
            for band in bands:
                band.shared.forget(change)

        return plan


def _store(books: dict[K, V], key: K, value: V) -> None:
    """Of books that list only what is not 0."""
    if value:
        books[key] = value
    else:
        books.pop(key, None)
