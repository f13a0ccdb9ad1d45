"""LentCore: a pool whose pages count in the budget of a broker (`vattn.broker`).

Its native books have room for all that the broker has; a limit, in pages, follows the lease. Every decision looks at
`free_pages`, which is negative while there is more than the limit allows, so that whoever needs a page first gives up
others. The limit is raised by the borrower's thread at any time, and lowered by it between two calls.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from vattn import _native, drivers
from vattn.broker.borrower import Borrower, Loan, Usage
from vattn.drivers.failure import failure
from vattn.drivers.host import HostDevice
from vattn.errors import ConfigError, VattnError
from vattn.pool.core import MOST_PAGES, Core, Tenant
from vattn.pool.journal import Change
from vattn.pool.shares import Shares
from vattn.pool.worker import Worker
from vattn.units import format_bytes

_WAIT = 5.0  # seconds for memory without which a call fails: the broker itself waits for others (`books.PATIENCE`)
_GLANCE = 0.02  # seconds for memory without which something is preempted, or not admitted
_LOCK = 0.1  # seconds for a call to end that the borrower's thread waits for
_TENDED = 1.0  # seconds after which what is shared is looked after again


def lend(
    name: str,
    source: drivers.Device,
    page_size: int,
    *,
    label: str,
    at_least: int,
    at_most: int | None,
    guard: drivers.Guard,
    zero_on_free: bool,
    fingerprint: bytes | None = None,
) -> LentCore:
    """A pool of pages of a device that the broker called `name` counts; the arguments are those of `PagePool.connect`.

    Raises:
        ConfigError: as for `PagePool.connect`.
    """
    memory: Callable[[], int] | None = None
    forget: Callable[[], object] = _nothing
    borrower: Borrower | None = None
    worker: Worker | None = None
    if isinstance(source, HostDevice):
        file = _native.open_host_file(source.check_page_size(page_size))
        memory = partial(_native.host_file_descriptor, page_size, file)
        forget = partial(_native.close_host_file, page_size, file)
    try:
        if isinstance(source, HostDevice):
            driver = source.open(page_size, guard=guard, file=file)
        else:
            driver = source.open(page_size, guard=guard)
        borrower = Borrower(
            name,
            name=label,
            device=str(source.torch_device),
            page=page_size,
            at_least=at_least,
            at_most=at_most,
            memory=memory,
        )
        pages = borrower.budget // page_size
        if pages >= MOST_PAGES:
            raise ConfigError(
                f"the pool {name!r} has {pages} pages of {format_bytes(page_size)}, and fewer than {MOST_PAGES} are "
                "possible: give larger pages"
            )
        worker = Worker(driver, page_size, pages, zero_on_free=zero_on_free)
        return LentCore(worker, borrower, forget, fingerprint=fingerprint)
    except BaseException:
        if worker is not None:
            worker.stop()
        forget()
        if borrower is not None:
            borrower.close()
        raise


def _nothing() -> None:
    pass


class Sharing(Protocol):
    """A cache whose blocks other processes may map; used under the pool's lock."""

    @property
    def waits(self) -> bool:
        """Whether there is something to publish."""

    def publish(self) -> None:
        """Publishes some of what was offered."""

    def tend(self) -> None:
        """Gives others' blocks back that nobody uses, and takes back what others do not use."""


class LentCore(Core):
    """A pool with a lease.

    Args:
        forget: called once the memory is given back.

    Attributes:
        fingerprint: of what its first cache computes; None if that is not shared with other processes.
        shares: what is shared; None for nothing.
    """

    def __init__(
        self, worker: Worker, borrower: Borrower, forget: Callable[[], object], *, fingerprint: bytes | None = None
    ) -> None:
        # First what a child needs, which another thread may fork as soon as the process looks after the pool.
        self._forget = weakref.finalize(self, forget)
        self._forget.atexit = False
        self._stop_sharing: weakref.finalize[..., LentCore] | None = None
        self._met: deque[tuple[int, int]] = deque()
        super().__init__(worker)
        self.borrower = borrower
        self.fingerprint = fingerprint
        self.shares: Shares | None = None
        self._sharing: weakref.ref[Sharing] | None = None
        self._tended = 0.0
        self._usage = Usage()  # as it was last known
        self._chunk: int = max(1, borrower.chunk // self.page_size)
        self.native.limit = borrower.level // self.page_size
        try:
            borrower.start(self)
        except RuntimeError as error:
            raise failure("pthread_create", _native.HOST_ERRNO + errno.EAGAIN, "EAGAIN") from error
        self._look_ahead()

    @property
    def free_pages(self) -> int:
        """Pages that may be taken; negative while the lease is lower than what is taken."""
        counts = self.native.counts()
        free: int = min(counts.absent + counts.free, min(self.native.limit, self.most_pages) - counts.taken)
        return free

    @property
    def most_pages(self) -> int:
        return min(self.total_pages, self.borrower.at_most // self.page_size)

    @property
    def low_water(self) -> int:
        return self._chunk // 2

    @property
    def may_share(self) -> bool:
        return self.fingerprint is not None and self.shares is None

    @property
    def spare_pages(self) -> int:
        return super().spare_pages + (0 if self.shares is None else self.shares.spare_pages)

    @property
    def cached_pages(self) -> int:
        return super().cached_pages + (0 if self.shares is None else self.shares.left_pages)

    def spare_beside(self, tenant: Tenant) -> int:
        return super().spare_beside(tenant) + (0 if self.shares is None else self.shares.spare_pages)

    def reclaim(self, change: Change, pages: int, *, wait: bool) -> int:
        freed = 0 if self.shares is None else self.shares.reclaim(change, pages)
        return freed + super().reclaim(change, pages - freed, wait=wait)

    @property
    def shortage(self) -> str:
        if (trouble := self.borrower.trouble) or self.most_pages == self.total_pages:
            return trouble
        pool, name, most = self.borrower.pool, self.borrower.name, format_bytes(self.borrower.at_most)
        change = f"vattn pool limit {pool} {name} --at-most changes it"
        return f"the pool {pool!r} lets {name!r} have at most {most}: {change}"

    @property
    def may_get_more(self) -> bool:
        return self.borrower.reachable

    @property
    def expects_more(self) -> bool:
        return not self.borrower.trouble

    def stock(self) -> None:
        super().stock()
        self._look_ahead()

    def refill(self) -> None:
        if self.free_pages < self._chunk // 2:
            self.borrower.wait(self._wanted() * self.page_size, _GLANCE, needed=False)

    def borrow(self, pages: int, *, needed: bool, following: int = 0) -> int:
        before, limit = self.free_pages, self.native.limit
        if not self.borrower.comes_down:
            level = (limit + pages) * self.page_size
            want = level + following * self.page_size
            self.borrower.wait(level, _WAIT if needed else _GLANCE, needed=needed, want=want)
        return max(0, self.free_pages - before)

    @property
    def loan(self) -> Loan:
        """What the broker lends, and what of it is used: now, or as it was last known if a call is in progress."""
        return self.borrower.loan(self.usage(wait=False))

    def shut(self) -> None:
        super().shut()
        shares, self.shares = self.shares, None
        if self._stop_sharing is not None:
            self._stop_sharing()
        self._forget()
        self.borrower.close()
        if shares is not None:
            shares.directory.close()
        _close_all(self._met)

    def refuse_in_child(self) -> None:
        super().refuse_in_child()
        self._forget.detach()  # the file of this number is that of a pool of the child's own
        if self._stop_sharing is not None:
            self._stop_sharing.detach()
        _close_all(self._met)

    # Prefixes that processes share

    def share(self, shares: Shares, sharing: Sharing) -> None:
        """Has others find what a cache publishes, and the cache what they do."""
        self.shares, self._sharing = shares, weakref.ref(sharing)
        self._stop_sharing = weakref.finalize(self, _stop_sharing, self.worker.finalizer, shares, self._met)
        self._stop_sharing.atexit = False
        self.borrower.share(self, shares.directory)

    @property
    def publishing(self) -> bool:
        """Whether there is something to publish; for any thread."""
        sharing = None if self._sharing is None else self._sharing()
        return sharing is not None and sharing.waits

    def meet(self, memory: int, directory: int) -> None:
        self._met.append((memory, directory))

    def orphans(self, *, anew: bool) -> list[tuple[int, int]] | None:
        if self.shares is None:
            return []
        if not self.lock.acquire(timeout=_LOCK):
            return None
        try:
            return self.shares.orphans(anew=anew)
        finally:
            self.lock.release()

    def tend(self) -> bool:
        sharing = None if self._sharing is None else self._sharing()
        if self.shares is None or not self.usable or self.inherited:
            return False
        due = time.monotonic() - self._tended >= _TENDED
        if not (due or self._met or (sharing is not None and sharing.waits)):
            return False
        if not self.lock.acquire(timeout=_LOCK):
            return True
        try:
            if not self.usable:
                return False
            if not self.settled:  # growth ahead of need that failed, say; there may be no other call for long
                with contextlib.suppress(VattnError):
                    self.atomically(lambda: None)
                if not self.settled:
                    return False
            while self._met:
                self.shares.meet(*self._met.popleft())
            if due:
                self._tended = time.monotonic()
            if self.shares.alone:
                if due:
                    self._tend_alone(self.shares)
                return False
            if sharing is None:
                return False
            if due:
                sharing.tend()
            sharing.publish()
            return sharing.waits
        finally:
            self.lock.release()

    def _tend_alone(self, shares: Shares) -> None:
        """`Sharing.tend` once the cache is gone."""
        if shares.lingers:
            with contextlib.suppress(VattnError):  # a driver that fails, say: another time
                self.execute(shares.give_up_lingering)
        if self.mapper.passed(self.mapper.last) and not self.mapper.failed:
            shares.release_all_but({})
        shares.forget_ended()

    # For the borrower's thread

    def usage(self, *, wait: bool) -> Usage:
        if not self.lock.acquire(timeout=_LOCK if wait else 0):
            return self._usage
        try:
            size, tenants = self.page_size, list(self._tenants)
            parked = sum(tenant.parked_pages for tenant in tenants) * size
            cached = self.cached_pages * size
            oldest = [tenant.oldest_use for tenant in tenants]
            if self.shares is not None:
                oldest.append(self.shares.oldest_use)
            uses = [use for use in oldest if use is not None]
            owned = max(0, self.taken_pages * size - parked - cached)
            shared = 0 if self.shares is None else self.shares.foreign_pages * size
            self._usage = Usage(owned, parked, cached, min(uses, default=None), shared)
            return self._usage
        finally:
            self.lock.release()

    def raise_to(self, level: int) -> None:
        self.native.limit = max(self.native.limit, level // self.page_size)

    def come_down(self, level: int, stage: str) -> int | None:
        pages = level // self.page_size
        if stage == "all":
            self.native.limit = min(self.native.limit, pages)
        if not self.lock.acquire(timeout=_LOCK):
            return None
        try:
            if not self.usable or self.inherited:
                return self.borrower.level
            with contextlib.suppress(VattnError):  # a capture, say: another time
                self.atomically(lambda: self._give_back(pages, stage))
            counts = self.native.counts()
            self.native.limit = min(self.native.limit, max(pages, counts.taken))
            self.mapper.unstock()
            # What the books have may not be created yet, and what they have given up not be released.
            reached: int = max(self.native.limit, counts.taken + counts.free, self.mapper.created)
            return reached * self.page_size
        finally:
            self.lock.release()

    def _give_back(self, pages: int, stage: str) -> None:
        def plan(change: Change) -> None:
            over = self.taken_pages - pages
            if self.shares is not None and stage in ("cached", "all") and over > 0:
                self.shares.reclaim(change, over)
            for tenant in self._tenants:
                over = self.taken_pages - pages
                if stage != "free" and over > 0:
                    tenant.reclaim(change, over, wait=False, cached=stage != "parked")
            counts = self.native.counts()
            over = counts.taken + counts.free - max(pages, counts.taken)
            self.native.release_free(change.transaction, max(0, min(over, counts.free)))

        self.execute(plan)

    # Ahead of need

    def _wanted(self) -> int:
        """The limit that there should be, in whole chunks, so that few requests for it differ."""
        return (self.taken_pages // self._chunk + 2) * self._chunk

    def _look_ahead(self) -> None:
        if (wanted := self._wanted()) > self.native.limit:
            self.borrower.request(wanted * self.page_size)


def _stop_sharing(stop: Callable[[], object], shares: Shares, met: deque[tuple[int, int]]) -> None:
    """Gives up what a pool has of others, and leaves them what it has published; for one that is dropped, too."""
    stop()
    shares.close()
    _close_all(met)


def _close_all(met: deque[tuple[int, int]]) -> None:
    while met:
        for descriptor in met.popleft():
            os.close(descriptor)
