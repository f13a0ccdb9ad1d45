"""PagePool: the physical pages of one device, which one cache or several draw on, and the worker that maps them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Literal, Protocol

import torch

from vattn import _native, drivers
from vattn.drivers.failure import failure
from vattn.errors import (
    CacheClosed,
    ConfigError,
    DriverError,
    ForkedProcess,
    MappingLimit,
    OutOfPages,
    VattnError,
)
from vattn.units import format_bytes, parse_bytes

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

# Decides: changes the books and adds operations to the transaction. What it returns is not used.
Plan = Callable[[_native.Transaction], object]

_pools: weakref.WeakSet[PagePool] = weakref.WeakSet()


class Tenant(Protocol):
    """A cache, as its pool knows it."""

    @property
    def spare_pages(self) -> int:
        """Pages that `reclaim` can give."""

    def reclaim(self, transaction: _native.Transaction, pages: int, *, wait: bool) -> int:
        """Plans to free up to `pages` pages that no request has, or a few more; returns how many.

        With `wait`, also pages that kernels may still read: the worker waits for those kernels first.
        """

    def refresh(self) -> None:
        """Decisions were taken back: derives anew what was derived from the books."""


class PagePool:
    """Physical pages under a budget, which several caches may share.

    Every change is a transaction: decided in the books on the calling thread, executed by one worker in order. The lock
    guards the books; methods marked so need it held.

    Args:
        budget: the most physical memory that may exist, in bytes or as text ("4GiB").
        device: the device whose memory it is.
        page_size: bytes of a page; "auto" is 64 KiB on the host, and CUDA's own pages (2 MiB) there.
        guard: what a stray read past the mapped pages sees on the host: "zero" or "strict" (a fault).
        table: addresses of driver calls by CUDA's names, in place of the driver's own.

    Raises:
        ConfigError: for a budget below one page, or a page size or device without a driver.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        device: str | torch.device = "cpu",
        page_size: int | Literal["auto"] = "auto",
        guard: drivers.Guard = "zero",
        table: dict[str, int] | None = None,
    ) -> None:
        source = drivers.find(device)
        if page_size == "auto":
            page_size = source.default_page_size
        self.driver = source.open(page_size, guard=guard, table=table)
        self.page_size = page_size
        size = parse_bytes(budget, "budget")
        if size < page_size:
            raise ConfigError(f"budget={budget!r} is below one page of {format_bytes(page_size)}")
        self.native = _native.PagePool(page_size, size // page_size)
        self.mapper = _native.Mapper(self.driver.native, self.native)
        self.lock = threading.Lock()
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._left_behind: list[Plan] = []
        self._refusal: VattnError | None = None
        self.failures = 0  # transactions that a driver call failed
        _pools.add(self)
        self._finalizer = weakref.finalize(self, _stop, self.mapper, self.native)
        self._finalizer.atexit = False  # daemon threads may still use the memory; the system takes it back

    @property
    def total_pages(self) -> int:
        """The budget, in pages."""
        return self.native.counts().budget

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        counts = self.native.counts()
        return counts.absent + counts.free

    def close(self) -> None:
        """Ends the worker and gives all memory back. Caches on the pool must be closed first.

        Raises:
            VattnError: if a cache still holds pages.
        """
        with self.lock:
            if tenants := list(self._tenants):
                raise VattnError(f"{len(tenants)} caches still use the pool; close them first")
            self.shut()

    def shut(self) -> None:
        """`close`, whoever still uses the pool; with the lock held, or when nobody else has the pool any more."""
        self._finalizer()
        self._refusal = self._refusal or CacheClosed("the pool is closed; make a new one")

    # With the lock held:

    def enter(self) -> None:
        """Starts an operation: refuses what can no longer work, and takes back what failed in the background.

        Raises:
            CacheClosed, ForkedProcess, DriverError: the pool cannot be used any more.
        """
        if self._refusal is not None:
            raise self._refusal
        if self.mapper.failed:
            self.settle()
        while self._left_behind:
            give_back = self._left_behind.pop()
            try:
                self.execute(give_back)
            except BaseException:
                self._left_behind.append(give_back)
                raise

    def settle(self) -> None:
        """Waits for the worker, and takes back the decisions of every transaction that did not happen."""
        failures = self.mapper.collect_failures()
        for transaction in reversed(failures):
            transaction.revert()
        if self.mapper.broken:
            self._refusal = DriverError(
                "a driver call failed, and so did undoing what went before it: the mappings are unknown; close the "
                "cache and make a new one",
                call=failures[0].failed_call,
                code=failures[0].failed_code,
                name=self.driver.native.result_name(failures[0].failed_code),
            )
            raise self._refusal
        if failures:
            self.failures += sum(t.status == _native.Status.FAILED for t in failures)
            self._refresh()

    def drain(self) -> None:
        """Waits until the worker has executed everything, and settles."""
        self.mapper.wait(self.mapper.last)
        if self.mapper.failed:
            self.settle()

    def submit(self, plan: Plan) -> int:
        """Decides a transaction by `plan` and hands it to the worker; returns its ticket, 0 if there is nothing to do.

        A plan that raises leaves the books as they were.
        """
        return self._submit(plan)[0]

    def execute(self, plan: Plan) -> int:
        """Decides a transaction by `plan` and waits until it is executed; returns its ticket, 0 if it was empty.

        `plan` is called again where an earlier failure in the background cancelled the first attempt.

        Raises:
            OutOfPages: memory is exhausted below the budget (MappingLimit: the table of mappings is).
            DriverError: another driver call failed. Nothing has changed in either case.
        """
        while True:
            ticket, transaction = self._submit(plan)
            self.mapper.wait(ticket)
            if not ticket or transaction.status == _native.Status.DONE:
                return ticket
            self.settle()
            if transaction.status == _native.Status.FAILED:
                raise self._error(transaction)

    @property
    def spare_pages(self) -> int:
        """Pages that caches hold without a request for them."""
        return sum(tenant.spare_pages for tenant in self._tenants)

    def reclaim(self, transaction: _native.Transaction, pages: int, *, wait: bool) -> int:
        """Plans to free pages of any cache that no request has; returns how many. `wait` as in `Tenant.reclaim`."""
        reclaimed = 0
        for tenant in self._tenants:
            if reclaimed < pages:
                reclaimed += tenant.reclaim(transaction, pages - reclaimed, wait=wait)
        return reclaimed

    def join(self, tenant: Tenant) -> None:
        """Adds a cache."""
        self._tenants.add(tenant)

    def leave(self, tenant: Tenant, give_back: Plan) -> None:
        """Takes back what a cache still holds, as `give_back` plans it; the cache is gone afterwards.

        On a pool that is broken only the books are cleared: an address space that goes unmaps whatever it finds mapped.
        """
        self._tenants.discard(tenant)
        if self.mapper.broken:
            give_back(_native.Transaction())
        else:
            self.enter()
            self.execute(give_back)

    # Without the lock:

    def leave_behind(self, give_back: Plan) -> None:
        """`leave` for a cache that was collected: at once, or at the next operation if one is under way."""
        self._left_behind.append(give_back)
        if self.lock.acquire(blocking=False):
            try:
                if self._refusal is None:
                    self.enter()
            finally:
                self.lock.release()

    def _refresh(self) -> None:
        for tenant in self._tenants:
            tenant.refresh()

    def _submit(self, plan: Plan) -> tuple[int, _native.Transaction]:
        transaction = _native.Transaction()
        try:
            plan(transaction)
        except BaseException:
            transaction.revert()
            self._refresh()
            raise
        return (0 if transaction.empty else self.mapper.submit(transaction)), transaction

    def _error(self, transaction: _native.Transaction) -> VattnError:
        call, code = transaction.failed_call, transaction.failed_code
        name = self.driver.native.result_name(code)
        cause = failure(call, code, name)
        if code != _OUT_OF_MEMORY:
            return cause
        error: OutOfPages
        limit = self.driver.device.mapping_limit()
        if call == "cuMemCreate" or limit is None:
            free = self.driver.device.describe_memory()
            error = OutOfPages(
                f"the machine has no memory for another page on {self.driver.device.torch_device}, although the budget "
                f"of {self.total_pages} pages does; {free}; lower memory_budget, or free memory elsewhere",
                missing_pages=1,
                missing_bytes=self.page_size,
            )
        else:
            error = MappingLimit(
                f"the kernel's table of mappings is full: vm.max_map_count is {limit}, and pages of "
                f"{format_bytes(self.page_size)} that are not neighbours need one each; use a larger page_size or a "
                "finer layout ('sliced', 'fused'), or raise it: sysctl vm.max_map_count=262144",
                missing_pages=1,
                missing_bytes=self.page_size,
            )
        error.__cause__ = cause
        return error


def _stop(mapper: _native.Mapper, native: _native.PagePool) -> None:
    """Gives the memory of free pages back and ends the worker."""
    if mapper.failed:
        for failure in reversed(mapper.collect_failures()):
            failure.revert()
    transaction = _native.Transaction()
    if native.release_free(transaction, native.counts().free):
        mapper.submit(transaction)
    mapper.stop()


def _refuse_in_child() -> None:
    for pool in _pools:
        pool._finalizer.detach()
        pool._refusal = ForkedProcess(
            f"this cache belongs to process {os.getppid()}, and this is a fork of it (process {os.getpid()}): mappings "
            "and their worker do not survive a fork; make a cache here, or start workers with 'spawn'"
        )


os.register_at_fork(after_in_child=_refuse_in_child)
