"""Reclaimer: which pages are taken back, and in which order, when a slot needs pages.

`make_room` proceeds from cheap to expensive:

1. free pages;
2. parked pages, longest idle slot first, then cached blocks, least recently used first, with the rows kept behind them;
3. if a step could not continue otherwise: surplus of running requests and pages that have left their windows, and
   cached blocks that are left over in their slots;
4. parked and cached pages of other caches on the pool.

Pages that kernels may still read are taken only if a step could not continue otherwise; the worker then waits for those
kernels. The reclaimer has no state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vattn.errors import OutOfPages
from vattn.pool.core import Tenant
from vattn.pool.journal import Change
from vattn.slots.band import BandPages
from vattn.slots.blocks import PageBlock
from vattn.slots.parts import Decisions
from vattn.units import format_bytes


class Reclaimer(Decisions, Tenant):
    """Takes pages back, for its cache and for the other caches on the pool."""

    # For the pool

    @property
    def spare_pages(self) -> int:
        """Pages that `reclaim` can give."""
        return self._ledger.parked + self._ledger.cached - self._ledger.pinned - self._stuck_pages()

    @property
    def parked_pages(self) -> int:
        return self._ledger.parked

    @property
    def cached_pages(self) -> int:
        return self._ledger.cached

    @property
    def oldest_use(self) -> int | None:
        with self._bands.victims() as victims:
            return next((block.last_use for _, block in victims), None)

    @property
    def coming_pages(self) -> int:
        """Pages that one step may have to create: a column for every request, within the watermark."""
        if not self._config.overlap:
            return 0
        most = min(self._config.watermark * self._ledger.budget, self._ledger.free)
        return min(int(most), len(self._slots.length) * self._bands.column_pages)

    def reclaim(self, change: Change, pages: int, *, wait: bool, cached: bool = True) -> int:
        """Plans to free parked pages, longest idle slot first, then cached pages; returns how many."""
        freed = self.unpark(change, pages, wait=wait)
        if not cached:
            return freed
        if freed < pages:
            freed += self.evict(change, pages - freed, wait=wait)
        if freed < pages:
            freed += self.unpark(change, pages - freed, wait=wait, kept=True)
        return freed

    def refresh(self) -> None:
        """Recomputes derived state after decisions were reverted."""
        if self._bands.cleared:
            return
        self._bands.refresh()
        self._slots.refresh(self._core.mapper.passed)
        self._ledger.refresh()

    # For a slot that needs pages

    def make_room(self, change: Change, need: int, *, now: bool, handle: int | None) -> None:
        """Plans that at least `need` pages are free.

        Args:
            now: a step cannot continue without them.
            handle: the stream of the kernels that read pages of running requests.

        Raises:
            OutOfPages: too few pages can be freed.
        """
        # What the cache's own budget lacks comes only from its own pages, and is not borrowed.
        room = self._ledger.budget - self._ledger.held
        absent = min(need, room) - self._core.free_pages
        if absent > 0:
            self._core.borrow(absent, needed=now)
        missing = need - self._ledger.free
        if missing <= 0:
            return
        expected = need <= room and self._core.expects_more
        hopeless = not now and (missing > self._core.spare_pages or expected)
        if not hopeless:
            missing -= self.reclaim(change, missing, wait=now)
        if missing > 0 and now:
            missing -= self._reclaim_surplus(change, missing, handle)
            if missing > 0:
                missing -= self.evict(change, missing, wait=True, running=True, handle=handle)
            if missing > 0:  # blocks that running requests gave up may be mapped in idle slots too
                missing -= self.reclaim(change, missing, wait=True)
        if missing > 0 and not hopeless and need <= self._ledger.budget - self._ledger.held:
            missing -= self._core.reclaim(change, missing, wait=now)
        if missing > 0:
            page_size, why = self._core.page_size, self._core.shortage
            budget = min(self._ledger.budget, self._core.most_pages)
            raise OutOfPages(
                f"{need} pages of {format_bytes(page_size)} are needed and {max(0, need - missing)} are left of a "
                f"budget of {budget}: {missing} ({format_bytes(missing * page_size)}) are missing; "
                f"{f'{why}; ' if why else ''}free or preempt a request, or raise memory_budget, or "
                "the budget of a given pool",
                missing_pages=missing,
                missing_bytes=missing * page_size,
                may_pass=self._core.may_get_more or self._ledger.pinned > 0,
            )

    def unpark(self, change: Change, pages: int, *, wait: bool, kept: bool = False) -> int:
        """Plans to unmap parked pages, longest idle slot first; returns how many become free.

        Args:
            kept: include those of kept rows. They are worth as much as the block before them, with which they go.
        """
        freed = 0
        for slot in self._slots.idle.mapped:
            if freed >= pages:
                break
            if wait or self._fences.passed(slot):
                freed += self._unmap(change, slot, pages - freed, 0 if kept else self._slots.kept_tokens(slot))
        return freed

    def evict(
        self,
        change: Change,
        pages: int,
        *,
        wait: bool,
        running: bool = False,
        handle: int | None = None,
        everything: bool = False,
    ) -> int:
        """Plans to evict cached blocks until `pages` pages are freed; returns how many become free.

        Args:
            wait: include blocks that kernels of earlier requests may still read: the worker waits for these kernels.
            running: include blocks left over in slots of running requests, which kernels on stream `handle` may still
                read: the worker waits for all of these kernels.
            handle: the stream of the running requests' kernels.
            everything: include blocks that free no page, as they are other processes', or mapped there.
        """
        before = self._core.taken_pages

        def stuck(slot: int) -> bool:
            if slot in self._slots.length:
                return not running or self._fences.is_open(slot)
            return not self._fences.passed(slot) if not wait else self._fences.is_open(slot)

        def clear(slot: int) -> None:
            if self._slots.known[slot].rewound:
                self._fences.guard_running(change, handle)
            self._guard(change, slot)()

        with self._bands.victims() as victims:
            for band, block in victims:
                if before - self._core.taken_pages >= pages:
                    break
                if any(map(stuck, block.slots)) or not (everything or band.shared.yields(block)):
                    continue
                self._bands.evict(change, band, block, clear)
        return before - self._core.taken_pages

    def let_go(self, change: Change, band: BandPages, block: PageBlock) -> None:
        """Plans to give up a block of another process that no slot of a request has mapped."""
        self._bands.evict(change, band, block, lambda slot: self._guard(change, slot)())

    def _reclaim_surplus(self, change: Change, pages: int, handle: int | None) -> int:
        """Plans to unmap surplus of active slots and pages that have left their windows; returns how many become free.

        Kernels launched before a length decreased read up to the old length, and the last step's kernels read what has
        left a window since, so the worker waits for these kernels.
        """
        before = self._core.taken_pages
        guarded = False
        for slot, length in self._slots.length.items():
            if before - self._core.taken_pages >= pages:
                break
            # Checked per kind of tensor: a slot may have surplus pages of one kind and lack pages of another.
            outlived = self._bands.outlived(slot, self._slots.start[slot])
            if not outlived and not self._bands.has_surplus(slot, self._slots.backed(length)):
                continue
            if not guarded:
                self._fences.guard_running(change, handle)
                guarded = True
            if outlived and not self._fences.is_open(slot):
                self.retire(change, slot)
            self._unmap(change, slot, pages - (before - self._core.taken_pages), self._slots.backed(length))
        return before - self._core.taken_pages

    # For one slot

    def cut(self, change: Change, slot: int, count: int) -> None:
        """Plans that a slot about to be written to keeps only its first `count` blocks.

        This unmaps the rest in bands that have more blocks, or whose mapped range cannot be grown to what the slot's
        queries see. If the slot's pages have to be zeroed, it applies to all bands.
        """
        start = None if slot in self._slots.leaving else self._slots.start[slot]
        self._bands.cut(change, slot, count, self._guard(change, slot), unseen_from=start)
        self._slots.vacated(change, slot)

    def retire(self, change: Change, slot: int) -> None:
        """Plans to unmap the pages that have left the slot's windows. The worker waits for the slot's fences, as some
        may be pages of the request before.
        """
        self._fences.guard(change, slot)
        self._bands.retire(change, slot, self._slots.start[slot])

    def vacate(self, change: Change, slots: Sequence[int]) -> None:
        """Plans to unmap what has to leave idle slots, whose fences have passed."""
        for slot in slots:
            self._slots.vacated(change, slot)
            self._bands.vacate(
                change,
                slot,
                self._guard(change, slot),
                keep_cached=self._config.deferred_reclamation,
                keep_parked=not self._config.zero_on_free,
            )

    def _stuck_pages(self) -> int:
        """Parked and cached pages that only a step of this cache can take, because kernels that use them may not be
        launched yet, or because they are left over in the slot of a running request.
        """
        open_slots = [slot for slot in self._fences.open_slots if slot in self._slots.idle]
        private = sum(map(self._bands.private_pages, open_slots))
        return private + self._bands.left_over_pages([*open_slots, *self._slots.length])

    def _unmap(self, change: Change, slot: int, pages: int, needed: int) -> int:
        """Plans to unmap pages past `needed` tokens until `pages` pages are freed; returns how many become free.

        The worker waits for the slot's fences. An open slot keeps its pages.
        """
        if self._fences.is_open(slot):
            return 0
        before = self._core.taken_pages
        self._bands.unmap(
            change,
            slot,
            lambda: pages - (before - self._core.taken_pages),
            needed,
            self._guard(change, slot),
            idle=slot in self._slots.idle,
        )
        return before - self._core.taken_pages

    def _guard(self, change: Change, slot: int) -> Callable[[], None]:
        """A function to be called before anything is unmapped in the slot: the worker waits for the slot's fences, and
        what has to leave has to do so again if it comes back.
        """

        def guard() -> None:
            self._fences.guard(change, slot)
            if slot in self._slots.leaving:
                self._slots.vacate(change, slot)

        return guard
