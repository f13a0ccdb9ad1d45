"""Core: a pool as its members see it: who belongs to it, and how they leave."""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod

from vattn.errors import CacheClosed, OutOfPages, VattnError
from vattn.pool import leftovers
from vattn.pool.calls import Calls
from vattn.pool.fences import any_capturing, sync_refusal
from vattn.pool.journal import Change, Plan
from vattn.pool.worker import Worker

MOST_PAGES = 2**31  # the native module's page indices have 32 bits, and half of them are for foreign pages


class Tenant(ABC):
    """What holds pages of a pool, as seen by it. By default it has none to give."""

    @property
    def spare_pages(self) -> int:
        """Pages that `reclaim` can give."""
        return 0

    @property
    def parked_pages(self) -> int:
        """Pages that it holds for no request, and in no cached block."""
        return 0

    @property
    def cached_pages(self) -> int:
        """Pages of cached blocks that no request uses."""
        return 0

    @property
    def oldest_use(self) -> int | None:
        """When the cached block to be evicted next was last used, in nanoseconds of the monotonic clock."""
        return None

    @property
    def coming_pages(self) -> int:
        """Pages that one step may have to create."""
        return 0

    def reclaim(self, change: Change, pages: int, *, wait: bool, cached: bool = True) -> int:
        """Plans to free up to `pages` pages that no request uses, or a few more; returns how many.

        With `wait`, this includes pages that kernels may still read: the worker waits for those kernels first. With
        `cached`, it includes cached blocks.
        """
        return 0

    @abstractmethod
    def refresh(self) -> None:
        """Recomputes derived state after decisions were reverted."""


class Core(Calls):
    """The pool of `PagePool`, for its members; most methods require its lock to be held.

    Attributes:
        driver, native, mapper: those of its worker.
        total_pages: the budget, in pages.
        kept_pages: free pages that stay in memory when a tenant leaves; None: all.
        takes_unused: before a call fails because the device lacks memory, what torch's allocator keeps unused is given
            back for it. Not for callers that preempt requests instead: pages stay in the pool, and torch's next
            allocation would fail.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.driver, self.native, self.mapper = worker.driver, worker.native, worker.mapper
        self.total_pages: int = worker.native.counts().budget
        self.kept_pages: int | None = None
        self.takes_unused = False
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._left: list[Plan] = []  # what dropped caches left behind
        self._unowned = False  # the cache whose own pool this is was dropped
        self._abandoned = False
        leftovers.look_after(self)

    @property
    def page_size(self) -> int:
        """Bytes per page."""
        return self.native.page_size

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        counts = self.native.counts()
        return counts.absent + counts.free

    @property
    def taken_pages(self) -> int:
        """Pages that somebody holds. Only calls change it, unlike what is free of memory that a broker lends."""
        taken: int = self.native.counts().taken
        return taken

    # What differs where a broker lends the memory (`LentCore`)

    @property
    def most_pages(self) -> int:
        """The most pages that there may be, as their owner wants it now."""
        return self.total_pages

    @property
    def low_water(self) -> int:
        """No tenant has to keep more pages free than this."""
        return self.total_pages

    @property
    def may_share(self) -> bool:
        """Whether other processes may map the blocks of the next cache."""
        return False

    @property
    def shortage(self) -> str:
        """Why there are no more pages although the budget has them; empty if that is not so."""
        return ""

    @property
    def may_get_more(self) -> bool:
        """Whether pages that are missing now may be there later, without anything that the tenants do."""
        return False

    @property
    def expects_more(self) -> bool:
        """Whether pages that are missing are likely to come, so that nothing is given up for what can wait."""
        return False

    def refill(self) -> None:
        """Has more pages come if few are left, as far as that is quick."""

    def borrow(self, pages: int, *, needed: bool, following: int = 0) -> int:
        """Has so many pages become free, or fewer, without taking them from a tenant; how many did. `needed`: a call
        fails without them. `following`: how many will be wanted next.
        """
        return 0

    @property
    def usable(self) -> bool:
        """Whether another tenant may join."""
        return self._refusal is None and not self.mapper.broken

    # Tenants

    @property
    def tenants(self) -> int:
        """How many caches hold pages."""
        return len(self._tenants)

    @property
    def spare_pages(self) -> int:
        """Pages that tenants hold but no request uses, and that `reclaim` can give."""
        return sum(tenant.spare_pages for tenant in self._tenants)

    @property
    def cached_pages(self) -> int:
        """Pages of cached blocks that no request uses."""
        return sum([tenant.cached_pages for tenant in self._tenants])

    def spare_beside(self, tenant: Tenant) -> int:
        """Pages that the other tenants hold but no request uses, and that `reclaim` can give."""
        return sum([each.spare_pages for each in self._tenants if each is not tenant]) if self.tenants > 1 else 0

    def reclaim(self, change: Change, pages: int, *, wait: bool) -> int:
        """Plans to free pages of any tenant that no request uses; returns how many. `wait` as in `Tenant.reclaim`."""
        reclaimed = 0
        for tenant in self._tenants:
            if reclaimed < pages:
                reclaimed += tenant.reclaim(change, pages - reclaimed, wait=wait)
        return reclaimed

    def make_room(self, change: Change, need: int) -> int:
        """Plans that at least `need` pages are free, which a call fails without: borrowed, or of tenants whose requests
        do not use them; returns how many are missing.
        """
        missing = need - self.free_pages
        if missing > 0 and need <= self.most_pages - self.taken_pages + self.spare_pages:
            self.borrow(missing, needed=True)
            missing = need - self.free_pages
        if missing > 0:
            missing -= self.reclaim(change, missing, wait=True)
        return max(0, missing)

    def execute_reclaiming(self, plan: Plan) -> int:
        """`execute`, which finds memory or mappings if the budget has the pages, but the machine lacks these for new
        ones: in torch's cache, where that may be, then in what no request uses.
        """
        sources = iter((self._take_unused, self._take_spare))
        while True:
            try:
                return self.execute(plan)
            except OutOfPages as error:
                if error.__cause__ is None or not any(take() for take in sources):
                    raise

    def _take_unused(self) -> int:
        """Has torch give memory back; returns the bytes."""
        return self.driver.device.empty_cache() if self.takes_unused and not any_capturing(self.driver) else 0

    def _take_spare(self) -> int:
        """Reclaims what no request uses, since pages that exist yield memory and mappings, and gives back what other
        pools have in stock; returns the pages.
        """
        spare = sum([tenant.parked_pages for tenant in self._tenants]) + self.cached_pages
        found = spare + leftovers.unstock()
        if spare:
            self.execute(lambda change: self.reclaim(change, spare, wait=True))
            self.commit()
        return found

    def release_free(self) -> int:
        """Gives the memory of free pages and of the stock back to the machine; returns its bytes."""
        free = self.native.counts().free

        def plan(change: Change) -> None:
            self.native.release_free(change.transaction, free)

        self.execute(plan)
        return (free + self.mapper.unstock()) * self.page_size

    def stock(self) -> None:
        """Has the worker create ahead of need what the tenants' next steps may have to, as far as no free page has the
        memory already.
        """
        self.worker.stock(max(0, sum([tenant.coming_pages for tenant in self._tenants]) - self.native.counts().free))

    def join(self, tenant: Tenant) -> None:
        """Adds a tenant."""
        self._tenants.add(tenant)

    def leave(self, tenant: Tenant, give_back: Plan) -> None:
        """Takes back what a tenant still holds, as planned by `give_back`, and removes it."""

        def plan(change: Change) -> None:
            change.on_revert(self._tenants.add, tenant)
            self._tenants.discard(tenant)
            self._give_up(change, give_back)

        self._execute_last(plan)
        self.worker.forget_last()

    def leave_broken(self, tenant: Tenant, give_back: Plan) -> None:
        """`leave` when mappings are unknown: clears the books; address spaces unmap what they have when destroyed. The
        pool refuses further calls.

        Raises:
            StreamCapturing, DriverError: as `abandon`. Nothing changed.
        """
        self.abandon()
        self._tenants.discard(tenant)
        give_back(Change(for_books=True))

    def abandon(self) -> None:
        """As in any pool; what dropped caches left behind leaves the books as well.

        Raises:
            StreamCapturing: a stream is capturing a CUDA graph. Nothing changed.
            DriverError: the driver does not say whether one is. Nothing changed.
        """
        if any_capturing(self.driver):  # the last call on the driver that may fail
            raise sync_refusal()
        super().abandon()
        self._abandoned = True
        self._clear_left()

    def _is_clearing(self) -> bool:
        """Whether what is left behind has yet to leave the books of a pool that its own process abandoned."""
        return self._abandoned and not self.inherited

    def _clear_left(self) -> None:
        while self._left:
            self._left[-1](Change(for_books=True))
            self._left.pop()

    def _execute_last(self, plan: Plan) -> None:
        """Executes the plan by which a tenant gives up what it holds for certain: what a transaction of its own brought
        back if it failed later, nobody would give up.
        """
        self.drain()
        self.execute(plan)

    def _give_up(self, change: Change, give_back: Plan) -> None:
        give_back(change)
        if self.kept_pages is not None:
            self.native.release_free(change.transaction, max(0, self.native.counts().free - self.kept_pages))

    def _refresh(self) -> None:
        for tenant in self._tenants:
            tenant.refresh()

    # The end

    def close(self) -> None:
        """Stops the worker and gives all memory back, unless a tenant is left.

        Raises:
            VattnError, ForkedProcess, StreamCapturing: as `PagePool.close`.
        """
        with self.lock:
            if self.inherited:
                self.check_usable()
            if tenants := self.tenants:
                raise VattnError(f"{tenants} caches still use the pool; close them first")
            self.take_back()
            if self._left:
                raise sync_refusal()
            self.shut()

    def shut(self) -> None:
        """`close`, even if a tenant is left; with the lock held, or when nobody else references the pool."""
        self.worker.stop()
        self._refusal = self._refusal or functools.partial(CacheClosed, "the pool is closed; make a new one")

    # What dropped caches left behind; without the lock

    def leave_behind(self, give_back: Plan, *, unowned: bool) -> None:
        """`leave` for a cache that was garbage-collected: at once, or with the next call on any pool if a call is in
        progress on this one, a stream captures a CUDA graph, or the driver fails. Finalisers call it, so it raises
        nothing.

        Args:
            give_back: it must not refer to the pool, which keeps it.
            unowned: whether nobody uses the pool any more, so that it is to be shut.
        """
        self._left.append(give_back)
        self._unowned |= unowned
        leftovers.holding[self] = None
        with contextlib.suppress(VattnError):
            self.take_back()

    def take_back(self) -> None:
        """Takes back what dropped caches left behind, unless a call is in progress or a stream captures.

        Raises:
            DriverError: a driver call failed; what is left stays.
        """
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self._is_clearing():
                self._clear_left()
            elif self._refusal is None and not self.is_inside():
                if (self._unowned or not self._tenants) and self.is_broken():
                    self.abandon()
                else:
                    self.atomically(self.worker.forget_last)
        finally:
            if self._refusal is not None and not self._is_clearing():  # address spaces unmap what they have
                self._left.clear()
            leftovers.holding.pop(self, None)
            if self._left:
                leftovers.holding[self] = None
            elif self._unowned and not self.is_inside():
                self.shut()
            self.lock.release()

    def unstock(self) -> int:
        """Gives back what was created ahead of need; returns how many pages that was."""
        return self.mapper.unstock() if self._refusal is None else 0

    def _take_leftovers(self) -> None:
        while self._left:
            self._execute_last(lambda change: self._give_up(change, self._left[0]))
            self.commit()
            del self._left[0]

    def _has_leftovers(self) -> bool:
        return bool(self._left) and not any_capturing(self.driver)
