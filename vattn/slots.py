"""Which pages each slot has: all decisions about memory, taken on the caller's thread, under the pool's lock.

Every slot is contiguous address space for `max_context_len` tokens. What is backed is a prefix of it, less what has
left the windows of layers that have one (`vattn.bands`); the pool's worker executes what is decided. A slot is *active*
(a request has it) or *idle*; the pages of an idle slot are *parked*, save those of token blocks that are cached or that
other slots use (`vattn.sharing`).

    [0 ..... start ........ length ........ ready ........ extent ........ max_context_len)
     old queries  live tokens      backed          being backed    address space only

Queries come from `start` on, so that a window's width before it nothing may leave.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vattn import _native
from vattn.bands import BandPages
from vattn.config import KVConfig
from vattn.errors import DriverError, InvalidLength, NoFreeSlot, OutOfPages
from vattn.fences import Fences, refusal
from vattn.layout import Layout
from vattn.pool import PagePool, Plan
from vattn.prefix import Key, PrefixIndex, block_keys, check_extension, root_key
from vattn.sharing import PageBlock, State
from vattn.units import format_bytes


@dataclass
class Known:
    """What is known of the tokens that a slot's request holds: whole blocks of them.

    Attributes:
        tokens: their ids.
        keys: of the blocks.
        salt: what the keys start from.
        rewound: the length went down into blocks, so kernels were launched that read what will have to leave.
    """

    tokens: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
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

        self._length: dict[int, int] = {}  # of active slots
        self._start: dict[
            int, int
        ] = {}  # of active slots: queries to come are for tokens from here on; kept up only for windows
        self._limit: dict[int, int] = {}  # of active slots: up to here, a step has nothing to do
        self._idle: dict[int, None] = dict.fromkeys(range(layout.slots))  # longest idle first
        self._ready = [0] * layout.slots  # tokens whose backing is in place
        self._known = [Known() for _ in range(layout.slots)]
        self._ends: dict[int, int] = {}  # where the blocks end that a request uses, in tokens; of those that use any
        self._pending = dict.fromkeys(range(layout.slots), 0)  # ticket of the last growth in the background, or 0
        self._leaving: dict[int, None] = {}  # idle slots whose pages are to go as soon as no kernel reads them
        self._fences = Fences(self._pool.driver)
        self._private_active = 0  # pages of active slots that are in no block
        self._private_idle = 0
        self._peak = 0
        self._waits = 0  # times that a step waited for the driver
        self._wait_ns = 0

    # For the pool

    def refresh(self) -> None:
        """Derives counts and limits anew from the books, after decisions were taken back; under the pool's lock."""
        for slot in range(self.layout.slots):
            self._note_growth(slot)
            self._ready[slot] = min(self._ready[slot], self._extent(slot))
        self._recount()
        for slot in self._length:
            self._set_limit(slot)

    def reclaim(self, transaction: _native.Transaction, pages: int, *, wait: bool) -> int:
        """Plans to free parked pages, of the longest idle slot first, then cached ones; returns how many. Under the
        pool's lock.
        """
        reclaimed = self._reclaim_parked(transaction, pages, wait=wait)
        if reclaimed < pages:
            reclaimed += self._evict(transaction, pages - reclaimed, wait=wait)
        return reclaimed

    @property
    def spare_pages(self) -> int:
        """Pages that `reclaim` can give."""
        return self._parked + self._cached - self._stuck_pages()

    # Backing slots; all under the pool's lock

    def _back(self, targets: dict[int, int], lengths: Mapping[int, int], handle: int | None, capturing: bool) -> None:
        """Takes on the lengths, with every target backed when it returns; or changes nothing.

        Args:
            handle: the stream of the caller's kernels; `capturing`: it captures a graph.
        """
        for length in targets.values():
            if length > self.config.max_context_len:
                raise InvalidLength(
                    f"a length of {length} tokens is over max_context_len={self.config.max_context_len}; "
                    "stop the request, or make the cache with a longer context"
                )
        needs = {slot: self._backed(length) for slot, length in targets.items()}
        begin = time.perf_counter_ns()
        waited = self._await_growth(needs)
        leftover = [slot for slot in targets if self._leftover(slot)]
        short = {slot: n for slot, n in needs.items() if n > self._extent(slot) or slot in leftover}
        if short and capturing:
            raise refusal(f"step has to map memory for {len(short)} slots")
        before, begun = self._length.copy(), self._start
        if self._windowed:
            # What was computed before this step can be taken back by this step at the latest. A start past the length
            # is that of a request whose tokens are still to be copied in.
            starts = {slot: max(length, begun[slot]) for slot, length in before.items()}
            self._start = {slot: min(start, lengths.get(slot, start)) for slot, start in starts.items()}
        # The live tokens of the last block, where it is left over in part, go over to the pages that replace it.
        blocks = {slot: before[slot] // self._block_tokens for slot in leftover}
        saved = {
            slot: self._save(slot, count * self._block_tokens, before[slot])
            for slot, count in blocks.items()
            if before[slot] % self._block_tokens
        }
        self._length.update(lengths)
        if short:
            waited = True
            try:
                self._grow_now(short, handle, blocks)
            except BaseException:
                self._length, self._start = before, begun
                self.refresh()  # limits depend on lengths where blocks are left over
                raise
            for slot, rows in saved.items():
                for band, (start, views) in zip(self._bands, rows, strict=True):
                    band.rows.write(slot, start, views)
        if waited:
            self._waits += 1
            self._wait_ns += time.perf_counter_ns() - begin
        for slot in targets:
            self._set_limit(slot)

    def _save(self, slot: int, start: int, end: int) -> list[tuple[int, list[torch.Tensor]]]:
        """Copies of the rows of tokens `[start, end)`, as far as they are seen: per band from where on, and they."""
        starts = [min(end, max(start, band.band.floor(self._start[slot]))) for band in self._bands]
        return [
            (first, [rows.clone() for rows in band.rows.views(slot, first, end)])
            for first, band in zip(starts, self._bands, strict=True)
        ]

    def _grow_now(self, needs: dict[int, int], handle: int | None, blocks: dict[int, int]) -> None:
        """Backs slots. Of some only so many blocks stay: those behind are left over."""

        def plan(transaction: _native.Transaction) -> None:
            for slot, count in blocks.items():
                self._release(transaction, slot, count, handle)
            self._grow_all(transaction, needs, now=True, handle=handle)

        self._execute(plan)
        for slot in needs:
            self._known[slot].rewound = False
            self._ready[slot] = self._extent(slot)

    def _execute(self, plan: Plan) -> None:
        """Executes a plan for which memory has to be found."""
        try:
            self._pool.execute(plan)
        except OutOfPages as error:
            # The budget has the pages, but the machine has no memory or no mapping for new ones: those that no request
            # uses are both.
            if not self._parked + self._cached or error.__cause__ is None:
                raise
            self._pool.execute(lambda transaction: self.reclaim(transaction, self._budget, wait=True))
            self._pool.execute(plan)

    def _release(self, transaction: _native.Transaction, slot: int, count: int, handle: int | None) -> None:
        """Plans that the slot, which is to be written to, keeps only its first `count` blocks."""
        if self._fences.is_open(slot):
            raise refusal(f"slot {slot} needs other pages")
        if self._known[slot].rewound:
            self._fences.guard_running(transaction, handle)
        if self._used(slot) > count:
            self._use(slot, count, transaction)
        for band in self._bands:
            if band.shared[slot].stop > count or not band.sees(slot, self._start[slot]):
                self._cut(transaction, slot, count, band)

    def _rewind(self, slot: int) -> None:
        """The length went down into blocks that the slot's request uses."""
        known, length = self._known[slot], self._length[slot]
        blocks = -(-self._backed(length) // self._block_tokens)
        if self._used(slot) > blocks:
            self._use(slot, blocks)
        if slot in self._ends:
            self._ends[slot] = length
        whole = length // self._block_tokens
        del known.tokens[whole * self._block_tokens :], known.keys[whole:]
        known.rewound = True
        self._set_limit(slot)

    def _check_seen(self, slot: int, length: int) -> None:
        """Checks that the slot can have that length: where it goes down, what its windows show is still there.

        Raises:
            InvalidLength: it is not.
        """
        if 0 < length < self._length[slot] and not all(band.sees(slot, length) for band in self._bands):
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

        # What is mapped behind a window is of no use to the next request, so it says nothing where there is other.
        lasting = [band for band in self._bands if band.band.window is None] or self._bands

        def rank(slot: int) -> tuple[int, int, int, bool, bool, int]:
            usable = self._in_place(slot, prefix) if self._fences.is_open(slot) else prefix.count
            missing = lost = 0
            for band, blocks in zip(self._bands, prefix.blocks, strict=True):
                common = band.shared.common(slot, blocks)
                missing += max(0, min(usable, len(blocks)) - common)
                lost += len(band.shared[slot].blocks) - common
            waits = bool(lost or missing) and not self._fences.passed(slot)
            extent = min(band.extent(slot) for band in lasting)
            # Blocks that another request could find in place here are worth as much as those to be mapped.
            return (-usable, missing + lost, lost, waits, extent < want, extent if extent >= want else -extent)

        return min(self._idle, key=rank)

    def _take(self, slot: int, length: int, start: int | None = None) -> None:
        """The slot is a request's."""
        del self._idle[slot]
        self._leaving.pop(slot, None)
        self._length[slot] = length
        self._start[slot] = length if start is None else start
        private = self._private_pages(slot)
        self._private_idle -= private
        self._private_active += private
        self._set_limit(slot)

    def _leave(self, slot: int) -> None:
        """The slot is no request's any more."""
        del self._length[slot], self._limit[slot], self._start[slot]
        self._idle[slot] = None
        private = self._private_pages(slot)
        self._private_active -= private
        self._private_idle += private

    def _used(self, slot: int) -> int:
        """How many blocks the slot's request uses, those behind windows included."""
        return self._bands[0].shared[slot].end

    def _use(self, slot: int, count: int, transaction: _native.Transaction | None = None) -> None:
        """The slot's request uses its first `count` blocks from now on."""
        before = self._ends.get(slot, 0)
        if transaction is not None:
            transaction.on_revert(lambda: self._set_end(slot, before))
        for band in self._bands:
            band.shared.use(slot, count, transaction)
        self._set_end(slot, count * self._block_tokens)

    def _set_end(self, slot: int, end: int) -> None:
        if end:
            self._ends[slot] = end
        else:
            self._ends.pop(slot, None)

    def _leftover(self, slot: int) -> bool:
        """Whether pages of the slot, which is active, must leave before anything is written behind its length."""
        length = self._length[slot]
        return any(band.shared[slot].stop * self._block_tokens > length for band in self._bands) or (
            self._windowed and not all(band.sees(slot, self._start[slot]) for band in self._bands)
        )

    def _publish(self, slot: int, token_ids: list[int]) -> None:
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
        for band in self._bands:
            band.shared.adopt(slot, count)
            band.shared.publish(slot, keys)
        self._private_active += self._private_pages(slot) - private
        self._set_end(slot, max(self._ends.get(slot, 0), count * self._block_tokens))
        known.tokens, known.keys = token_ids[: count * self._block_tokens], keys

    def _put(self, transaction: _native.Transaction, slot: int, prefix: Prefix) -> None:
        """Plans that the slot starts with a cached prefix."""
        if not prefix.count:
            return
        before = self._private_pages(slot)
        for band, blocks in zip(self._bands, prefix.blocks, strict=True):
            if not band.in_place(slot, blocks, prefix.count):
                self._fences.guard(transaction, slot)
                band.put(transaction, slot, blocks, prefix.count)
        self._changed(slot, before)

    def _cut(self, transaction: _native.Transaction, slot: int, count: int, band: BandPages | None = None) -> None:
        """Plans to unmap all that the slot has, of one band or of all, but its first `count` blocks; the worker waits
        for its fences.
        """
        bands = [band] if band else self._bands
        if not any(each.reaches(slot, count) for each in bands):
            return
        self._fences.guard(transaction, slot)
        before = self._private_pages(slot)
        for each in bands:
            each.cut(transaction, slot, count)
        self._changed(slot, before)

    def _changed(self, slot: int, private_before: int) -> None:
        """Pages of the slot are planned to go."""
        self._count(slot, self._private_pages(slot) - private_before)
        self._ready[slot] = min(self._ready[slot], self._extent(slot))

    def _evict(
        self,
        transaction: _native.Transaction,
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
                        self._fences.guard_running(transaction, handle)
                    self._cut(transaction, slot, block.depth, band)
                band.shared.evict(transaction, block)
        return self._pool.free_pages - before

    # Growing and shrinking slots

    def _await_growth(self, needs: dict[int, int]) -> bool:
        """Waits for growth in the background that these slots count on; whether it had to."""
        mapper = self._pool.mapper
        tickets = [
            self._pending[slot] for slot, tokens in needs.items() if tokens > self._ready[slot] and self._pending[slot]
        ]
        waited = bool(tickets) and not mapper.passed(max(tickets))
        if tickets:
            mapper.wait(max(tickets))
        if mapper.failed:
            self._pool.settle()
        for slot in needs:
            if self._pending[slot]:
                self._note_growth(slot)
        return waited

    def _note_growth(self, slot: int) -> None:
        """All that the slot has is in place, unless growth in the background is still under way."""
        if self._pool.mapper.passed(self._pending[slot]):
            self._pending[slot] = 0
            self._ready[slot] = self._extent(slot)

    def _grow_all(
        self,
        transaction: _native.Transaction,
        targets: Mapping[int, int],
        *,
        now: bool = False,
        handle: int | None = None,
    ) -> None:
        """Plans the growth of slots to their targets.

        Where free pages do not do, out of parked and cached ones that no kernel reads any more. `now`, when a step
        cannot go on without them, also out of those that kernels still read, and out of what running requests have
        beyond their length, mapped ahead or left over from a longer request, or behind their windows.
        """
        need = sum(self._growth(slot, tokens) for slot, tokens in targets.items())
        missing = need - self._free()
        if missing > 0:
            missing -= self.reclaim(transaction, missing, wait=now)
        if missing > 0 and now:
            missing -= self._reclaim_surplus(transaction, missing, handle)
            if missing > 0:
                missing -= self._evict(transaction, missing, wait=True, running=True, handle=handle)
        if missing > 0 and need <= self._budget - self._held:
            missing -= self._pool.reclaim(transaction, missing, wait=now)
        if missing > 0:
            raise OutOfPages(
                f"{need} pages of {format_bytes(self.layout.page_size)} are needed and {need - missing} are left of a "
                f"budget of {self._budget}: {missing} ({format_bytes(missing * self.layout.page_size)}) are missing; "
                "free or preempt a request, or raise memory_budget",
                missing_pages=missing,
                missing_bytes=missing * self.layout.page_size,
            )
        for slot, tokens in targets.items():
            self._grow(transaction, slot, tokens)

    def _grow(self, transaction: _native.Transaction, slot: int, tokens: int) -> None:
        pages = self._growth(slot, tokens)
        for band in self._bands:
            band.grow(transaction, slot, tokens, self._start.get(slot, 0))
        self._count(slot, pages)

    def _unmap(self, transaction: _native.Transaction, slot: int, pages: int, *, cached: bool = False) -> int:
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
                self._unmap_band(transaction, band, slot, missing, needed, cached=cached)
        if slot in self._length:
            self._set_limit(slot)
        return self._pool.free_pages - before

    def _unmap_band(
        self, transaction: _native.Transaction, band: BandPages, slot: int, pages: int, needed: int, *, cached: bool
    ) -> None:
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
            self._cut(transaction, slot, shared[slot].start + count, band)
        elif private:
            self._fences.guard(transaction, slot)
            before = self._private_pages(slot)
            band.drop(transaction, slot, columns)
            self._changed(slot, before)

    def _reclaim_parked(self, transaction: _native.Transaction, pages: int, *, wait: bool) -> int:
        reclaimed = 0
        for slot in self._idle:
            if reclaimed >= pages:
                break
            if wait or self._fences.passed(slot):
                reclaimed += self._unmap(transaction, slot, pages - reclaimed)
        return reclaimed

    def _reclaim_surplus(self, transaction: _native.Transaction, pages: int, handle: int | None) -> int:
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
                self._fences.guard_running(transaction, handle)
                guarded = True
            if outlived and not self._fences.is_open(slot):
                self._retire(transaction, slot)
            self._unmap(transaction, slot, pages - (self._pool.free_pages - before))
        return self._pool.free_pages - before

    def _retire(self, transaction: _native.Transaction, slot: int) -> None:
        """Plans to unmap what has left the slot's windows."""
        before = self._private_pages(slot)
        for band in self._bands:
            if band.band.window is not None:
                band.retire(transaction, slot, self._start[slot])
        self._count(slot, self._private_pages(slot) - before)

    def _release_windows(self, slots: Sequence[int], handle: int | None) -> None:
        """Queues that what has left the windows of these slots is unmapped, once what was launched has ended."""
        slots = [slot for slot in slots if any(band.outlived(slot, self._start[slot]) for band in self._bands)]
        if not slots:
            return

        def plan(transaction: _native.Transaction) -> None:
            self._fences.guard_running(transaction, handle)
            for slot in slots:
                self._retire(transaction, slot)

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
            ticket = self._pool.submit(lambda transaction: self._grow_all(transaction, needs))
            self._pending.update(dict.fromkeys(needs, ticket))

    def _maintain(self) -> None:
        """Keeps pages free, and an idle slot backed, for what comes next."""
        leaving = [slot for slot in self._leaving if self._fences.passed(slot)]
        if leaving:
            for slot in leaving:
                del self._leaving[slot]
            self._in_background(lambda transaction: self._vacate(transaction, leaving))
        low = self._low_water()
        if self._parked and self._free() < low:
            self._in_background(lambda transaction: self._reclaim_parked(transaction, low - self._free(), wait=False))
        self._prepare_idle_slot()

    def _vacate(self, transaction: _native.Transaction, slots: Sequence[int]) -> None:
        """Plans to unmap what idle slots have no use for: all of it, or what no request can begin with."""
        for slot in slots:
            if not self.config.deferred_reclamation:
                self._unmap(transaction, slot, self._budget, cached=True)
                continue
            for band in self._bands:
                if not band.begins(slot):
                    self._cut(transaction, slot, band.shared[slot].stop, band)

    def _prepare_idle_slot(self) -> None:
        """Backs the start of the best idle slot, so that the next request's prefill finds its pages mapped."""
        if not self.config.eager_pages:
            return
        empty = [
            slot
            for slot in self._idle
            if all(band.begins(slot) and not band.shared[slot].blocks for band in self._bands)
        ]
        if not empty:
            return
        slot = max(empty, key=self._extent)
        pages = sum(band.eager_growth(slot, self.config.eager_pages) for band in self._bands)
        if not pages or self._free() - pages < self._low_water():
            return

        def plan(transaction: _native.Transaction) -> None:
            for band in self._bands:
                band.grow_eagerly(transaction, slot, self.config.eager_pages)
            self._count(slot, pages)

        if ticket := self._in_background(plan):
            self._pending[slot] = ticket

    def _in_background(self, plan: Plan) -> int:
        """Queues what nobody waits for (does it at once without `overlap`); its ticket, or 0 if there is none."""
        if self.config.overlap:
            return self._pool.submit(plan)
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
            pages += band.shared.block_pages * len(
                {block for slot in slots for block in slot.blocks if not block.users}
            )
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
        return self._owned + self._parked + self._cached

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
        self._peak = max(self._peak, self._held)

    def _free(self) -> int:
        """Pages that a slot can take without any being unmapped."""
        return min(self._budget - self._held, self._pool.free_pages)

    def _low_water(self) -> int:
        return int(self.config.watermark * self._budget)

    def _set_limit(self, slot: int) -> None:
        length = self._length[slot]
        if self._leftover(slot):
            self._limit[slot] = length
            return
        ready = self._ready[slot] - self.config.guard_rows
        most = self.config.max_context_len
        # With overlap the last backed token is already a reason to act: the next one has to be queued.
        limit = most if ready >= most else ready - self.config.overlap
        if self._windowed:
            for band in self._bands:
                limit = min(limit, band.outlives_at(slot, default=limit))
        self._limit[slot] = limit

    def _give_back(self) -> Plan:
        """Plans to give up every page; knows nothing of the cache itself, which may be gone."""
        bands = self._bands

        def plan(transaction: _native.Transaction) -> None:
            spaces = [space for band in bands for space in band.spaces]
            if any(space.columns(slot) > space.first(slot) for space in spaces for slot in range(space.slots)):
                transaction.wait_for(None)  # kernels that read them, on whichever stream
            for space in spaces:
                for slot in range(space.slots):
                    space.shrink(transaction, slot, space.columns(slot) - space.first(slot))
            for band in bands:
                band.shared.forget(transaction)

        return plan
