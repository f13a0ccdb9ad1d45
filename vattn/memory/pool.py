"""PagePool: the physical pages of one device, shared by one or more caches, and the worker that maps them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast

import torch

from vattn import _native, drivers
from vattn.drivers.failure import failure
from vattn.errors import (
    CacheClosed,
    ConfigError,
    DriverError,
    ForkedProcess,
    MappingLimit,
    NoFreeSlot,
    OutOfPages,
    StreamCapturing,
    VattnError,
)
from vattn.groups import check_choice, check_int
from vattn.memory.fences import any_capturing, sync_refusal
from vattn.memory.journal import Call, Change, Undo, revert
from vattn.units import format_bytes, parse_bytes

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_CAPTURE_UNSUPPORTED = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED

_MOST_PAGES = 2**32  # the native module's page indices have 32 bits

# Makes decisions: changes the books and adds operations to the transaction. Its result is ignored.
Plan = Callable[[Change], object]

P = ParamSpec("P")
R = TypeVar("R")

_pools: weakref.WeakSet[PagePool] = weakref.WeakSet()
# The pools in which dropped caches left something behind that could not be given back yet. Nobody else may refer to
# them any more.
_holding: dict[PagePool, None] = {}


class Tenant(Protocol):
    """A cache as seen by its pool."""

    @property
    def spare_pages(self) -> int:
        """Pages that `reclaim` can give."""

    @property
    def coming_pages(self) -> int:
        """Pages that one step may have to create."""

    def reclaim(self, change: Change, pages: int, *, wait: bool) -> int:
        """Plans to free up to `pages` pages that no request uses, or a few more; returns how many.

        With `wait`, this includes pages that kernels may still read: the worker waits for those kernels first.
        """

    def refresh(self) -> None:
        """Recomputes derived state after decisions were reverted."""


class Member(Protocol):
    """An object that belongs to a pool and whose calls are atomic."""

    @property
    def _pool(self) -> PagePool: ...

    def _check_open(self) -> None: ...


M = TypeVar("M", bound=Member)


def atomic(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Turns a method into an atomic call under its pool's lock.

    A call from inside another one on the same thread, in a signal handler or a finaliser, is refused.
    """

    @functools.wraps(method)
    def call(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
        if _holding:
            take_back()
        return self._pool.atomically(lambda: method(self, *args, **kwargs), self._check_open)

    return cast(Callable[Concatenate[M, P], R], call)


def reading(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Turns a read-only method into a call; inside another call it sees what that one has decided so far."""
    whole = atomic(method)

    @functools.wraps(method)
    def call(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
        pool = self._pool
        with pool.lock:
            return method(self, *args, **kwargs) if pool.is_inside() else whole(self, *args, **kwargs)

    return cast(Callable[Concatenate[M, P], R], call)


class PagePool:
    """Physical pages under a budget, which several caches may share.

    Every change is a transaction: decided in the books on the calling thread, and executed in order by one worker. The
    lock guards the books; some methods, marked below, require it to be held.

    Args:
        budget: the most physical memory that may exist, in bytes or as text ("4GiB").
        device: the device of the memory.
        page_size: bytes per page; "auto" is 64 KiB on the host, and the size of CUDA's own pages (2 MiB) on CUDA.
        guard: what a stray read past the mapped pages sees on the host: "zero" or "strict" (a fault).
        zero_on_free: whether the worker zeroes a page that nobody holds any more before it can be mapped again.
        handle_type: how CUDA can export the pages to other processes (docs/cuda.md says how, and what to heed):
            "posix_fd", file descriptors, within one machine; "fabric", across the machines of an NVLink fabric.
        peers: further CUDA devices whose kernels can read and write the pages, by ordinal.
        table: addresses of driver calls by CUDA's names, replacing the driver's own.

    Raises:
        ConfigError: an argument is not possible, the budget is below one page, no driver has that page size or
            device, or the device has no such handles or peers.
        DriverError: CUDA cannot use the device, or has no memory for a page.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        device: str | torch.device = "cpu",
        page_size: int | Literal["auto"] = "auto",
        guard: drivers.Guard = "zero",
        zero_on_free: bool = False,
        handle_type: drivers.HandleType = "none",
        peers: Sequence[int] = (),
        table: dict[str, int] | None = None,
    ) -> None:
        take_back()
        check_choice("guard", guard, ("zero", "strict"))
        check_choice("handle_type", handle_type, ("none", "posix_fd", "fabric"))
        check_choice("zero_on_free", zero_on_free, (True, False))
        source = drivers.find(device)
        if isinstance(page_size, str) and page_size == "auto":
            page_size = source.default_page_size
        page_size = check_int("page_size", page_size, at_least=1, at_most=2**40)
        self.driver = source.open(page_size, guard=guard, handle_type=handle_type, peers=peers, table=table)
        self.page_size = page_size
        self.guard = guard
        size = parse_bytes(budget, "budget")
        if size < page_size:
            raise ConfigError(f"budget={budget!r} is below one page of {format_bytes(page_size)}")
        if size // page_size >= _MOST_PAGES:
            raise ConfigError(
                f"budget={budget!r} is {size // page_size} pages of {format_bytes(page_size)}; a pool has fewer than "
                f"{_MOST_PAGES}: give less, or larger pages"
            )
        self.native = _native.PagePool(page_size, size // page_size, zero_on_free)
        self.mapper = _native.Mapper(self.driver.native, self.native)
        self.lock = threading.RLock()
        self.call: Call | None = None  # the call in progress
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._stock_wanted = 0
        # For transactions that may still fail, by ticket: how to revert them in the Python books.
        self._undo: dict[int, list[Undo]] = {}
        self._chores: list[Callable[[], object]] = []  # work deferred to the next call
        self._left: list[Plan] = []  # what dropped caches left behind
        self._unowned = False  # the cache whose own pool this is was dropped
        # Why no call is possible any more. Made anew for every call: an error that was raised refers to its callers.
        self._refusal: Callable[[], VattnError] | None = None
        self._owner = os.getpid()
        self.failures = 0  # transactions that failed in a driver call
        _pools.add(self)
        self._finalizer = weakref.finalize(self, _stop, self.mapper, self.native)
        self._finalizer.atexit = False  # daemon threads may still use the memory; the OS reclaims it

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
        """Stops the worker and gives all memory back. Caches on the pool must be closed first.

        Raises:
            VattnError: a cache still uses the pool.
            ForkedProcess: this is a child of the process that made the pool.
            StreamCapturing: a dropped cache left pages behind, and a stream is capturing a CUDA graph.
        """
        with self.lock:
            if self.inherited:
                self.check_usable()
            if tenants := list(self._tenants):
                raise VattnError(f"{len(tenants)} caches still use the pool; close them first")
            self.take_back()
            if self._left:
                raise sync_refusal()
            self.shut()

    def shut(self) -> None:
        """`close`, even if caches still use the pool; with the lock held, or when nobody else references the pool."""
        self._finalizer()
        self._refusal = self._refusal or functools.partial(CacheClosed, "the pool is closed; make a new one")

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child of the process that made the pool."""
        return os.getpid() != self._owner

    def check_usable(self) -> None:
        """Checks that calls are possible, and that what is mapped can be used; takes no lock.

        Raises:
            CacheClosed, ForkedProcess, DriverError: the pool is no longer usable.
        """
        if self._refusal is not None:
            raise self._refusal()

    def atomically(self, body: Callable[[], R], check: Callable[[], None] = lambda: None) -> R:
        """Runs the body of a call atomically, under the lock.

        Args:
            body: the body; it runs again if it lacks pages or slots that deferred work can free.
            check: runs first, under the lock; it may refuse the call.

        Returns:
            The result of the body.
        """
        done: Call | None = None
        try:
            with self.lock:
                while True:
                    check()
                    self.enter()
                    call = self.call = Call()
                    try:
                        self.catch_up()
                        result = body()
                        done, self.call = call, None
                        return result
                    except BaseException as error:
                        call.failed = True
                        self.recover(error)
                        # Finalisers may have given back what was missing in the meantime.
                        if not (isinstance(error, OutOfPages | NoFreeSlot) and self._has_deferred()):
                            raise
        except BaseException:
            if done is not None and done.repairs:  # interrupted while releasing the lock: the result is lost
                self._repair(done)
            raise

    def _repair(self, call: Call) -> None:
        """Runs the repairs of a call that completed but whose result was lost."""
        with contextlib.suppress(VattnError), self.lock:
            self.enter()
            call.change, call.failed = None, True
            self.call = call
            self.recover(None)

    @property
    def settled(self) -> bool:
        """Whether the books can be read without a call: none is in progress, and the next one has nothing to mend."""
        return self.call is None and self._refusal is None and not self._chores and not self.mapper.failed

    # With the lock held

    def is_inside(self) -> bool:
        """Whether this thread is already inside a call."""
        return self.call is not None and not self.call.failed

    def enter(self) -> None:
        """Prepares for a call: refuses it if the pool is unusable, and reverts what failed before.

        Raises:
            CacheClosed, ForkedProcess: the pool is no longer usable.
            DriverError: nor is it as long as mappings are unknown.
            VattnError: this thread is already inside a call.
        """
        self.check_usable()
        if self.call is not None:
            if not self.call.failed:
                raise VattnError(
                    "a cache was called from inside another call on the same pool: by a signal handler, or a finaliser "
                    "that ran in it. There only free_reqid, stats and other calls that just look are possible; do the "
                    "rest after the call has returned"
                )
            self.recover(None)
        if self.mapper.failed:
            self.settle()

    def catch_up(self) -> None:
        """Does the deferred work, at the start of a call."""
        while self._chores:
            self._chores[0]()
            self.commit()
            del self._chores[0]
        with contextlib.suppress(StreamCapturing):
            while self._left:
                self.execute(self._left[0])
                self.commit()
                del self._left[0]
        if self._undo:
            self._forget_done()

    def _has_deferred(self) -> bool:
        """Whether `catch_up` would do something."""
        return bool(self._chores) or (bool(self._left) and not any_capturing(self.driver))

    def postpone(self, chore: Callable[[], object]) -> None:
        """Defers a chore, which may run twice, to the start of the next call."""
        self._chores.append(chore)

    def change(self) -> Change:
        """The change of the call in progress, to which decisions are added."""
        assert self.call is not None
        if self.call.change is None:
            self.call.change = Change()
        return self.call.change

    def repair(self, undo: Undo) -> None:
        """Registers a function to run if the call fails although some of its changes are final."""
        assert self.call is not None
        self.call.repairs.append(undo)

    def commit(self) -> None:
        """Makes final what the call has decided so far, which must not include operations for the worker."""
        assert self.call is not None
        assert self.call.change is None or self.call.change.transaction.empty
        self.call.change = None

    def recover(self, error: BaseException | None) -> None:
        """Reverts those decisions of a failed call that are not final. If interrupted, the next call continues it."""
        call = self.call
        assert call is not None
        change = call.change
        if change is None and not call.repairs and isinstance(error, VattnError):
            self.call = None  # refused before anything was decided
            return
        if change is not None and not change.transaction.ticket:
            change.revert()
        # Submitted growth may not have been noted as pending, so it has to be complete before books are recomputed.
        self.mapper.wait(self.mapper.last)
        if self.mapper.failed:
            self.settle()
        call.change = None
        while call.repairs:
            call.repairs[-1]()
            call.change = None
            call.repairs.pop()
        self._refresh()
        self.call = None

    def settle(self) -> None:
        """Waits for the worker and reverts the decisions of every transaction that failed or was cancelled. If
        interrupted, it can be called again.

        Raises:
            DriverError: the worker could not undo what it did of them, and still cannot. Nothing is reverted.
        """
        failures = self.mapper.failures()
        if self.is_broken():
            raise self._unknown(failures[0])()
        for transaction in reversed(failures):
            revert(transaction, self._undo.get(transaction.ticket, []))
        self._refresh()
        self.failures += sum(t.status == _native.Status.FAILED for t in failures)
        self.mapper.resume()
        self._undo.clear()

    def is_broken(self) -> bool:
        """Whether mappings are unknown, because undoing a failed transaction failed too, and still does."""
        return self.mapper.broken and (self._refusal is not None or not self.mapper.mend())

    def _unknown(self, failed: _native.Transaction) -> Callable[[], DriverError]:
        """Makes the error for calls while mappings are unknown."""
        limit = self.driver.device.mapping_limit()
        lacking = "" if limit is None else f" (mappings, say, of which vm.max_map_count allows the process {limit})"
        again = f"every call tries to undo it again, and can once what is lacking is there{lacking}; or "
        return functools.partial(
            DriverError,
            "a driver call failed, and so did undoing what went before it: the mappings are unknown; "
            f"{'' if self.mapper.ruined else again}close the cache and make a new one",
            call=failed.failed_call,
            code=failed.failed_code,
            name=self.driver.native.result_name(failed.failed_code),
        )

    def _abandon(self) -> None:
        """Gives up a pool whose mappings are unknown: reverts the books, and refuses all further calls."""
        failures = self.mapper.failures()
        self._refusal = self._unknown(failures[0])
        for transaction in reversed(failures):
            revert(transaction, self._undo.get(transaction.ticket, []))

    def drain(self) -> None:
        """Waits until the worker has executed all transactions, and settles."""
        self.mapper.wait(self.mapper.last)
        if self.mapper.failed:
            self.settle()

    def submit(self, plan: Plan) -> int:
        """Hands the transaction that `plan` decides to the worker; returns its ticket, or 0 if it is empty.

        Earlier decisions of the call become final: they do not depend on the outcome of this transaction. A plan that
        raises a VattnError leaves the books as they were.
        """
        self.commit()
        return self._submit(plan).ticket

    def execute(self, plan: Plan) -> int:
        """Waits until the transaction that `plan` decides is executed; returns its ticket, or 0 if it is empty.

        Outside a call, this is a call of its own. `plan` is called again if an earlier failure in the background
        cancelled the first attempt, so the call must not have other decisions that are not final. An empty transaction
        is final when the call returns.

        Raises:
            OutOfPages: memory is exhausted below the budget. Nothing changed.
            MappingLimit: the table of mappings is full. Nothing changed.
            DriverError: another driver call failed. Nothing changed.
        """
        call = self.call
        if call is None:
            return self.atomically(lambda: self.execute(plan))
        assert call.change is None, "a plan has to hold all that depends on it"
        repairs = len(call.repairs)
        while True:
            transaction = self._submit(plan)
            if not transaction.ticket:
                return 0
            self.mapper.wait(transaction.ticket)
            if transaction.status == _native.Status.DONE:
                self._forget_done()
                return transaction.ticket
            self.settle()
            del call.repairs[repairs:]
            if transaction.status == _native.Status.FAILED:
                raise self._error(transaction)

    @property
    def spare_pages(self) -> int:
        """Pages that caches hold but no request uses, and that `reclaim` can give."""
        return sum(tenant.spare_pages for tenant in self._tenants)

    def reclaim(self, change: Change, pages: int, *, wait: bool) -> int:
        """Plans to free pages of any cache that no request uses; returns how many. `wait` as in `Tenant.reclaim`."""
        reclaimed = 0
        for tenant in self._tenants:
            if reclaimed < pages:
                reclaimed += tenant.reclaim(change, pages - reclaimed, wait=wait)
        return reclaimed

    def stock(self) -> None:
        """Has the worker create ahead of need what the caches' next steps may have to, as far as no free page has the
        memory already.
        """
        wanted = max(0, sum([tenant.coming_pages for tenant in self._tenants]) - self.native.counts().free)
        if wanted or self._stock_wanted:
            self.mapper.stock(wanted)
            self._stock_wanted = wanted

    def join(self, tenant: Tenant) -> None:
        """Adds a cache to the pool."""
        self._tenants.add(tenant)

    def leave(self, tenant: Tenant, give_back: Plan) -> None:
        """Takes back what a cache still holds, as planned by `give_back`, and removes the cache from the pool."""

        def plan(change: Change) -> None:
            change.on_revert(lambda: self._tenants.add(tenant))
            self._tenants.discard(tenant)
            give_back(change)

        self.execute(plan)

    def leave_broken(self, tenant: Tenant, give_back: Plan) -> None:
        """`leave` when mappings are unknown: clears the books; address spaces unmap what they have when destroyed. The
        pool refuses further calls.
        """
        if self._refusal is None:
            self._abandon()
        self._tenants.discard(tenant)
        give_back(Change())

    # Without the lock

    def leave_behind(self, give_back: Plan, *, unowned: bool) -> None:
        """`leave` for a cache that was garbage-collected: at once, or with the next call on any pool if a call is in
        progress on this one, a stream captures a CUDA graph, or the driver fails. Finalisers call it, so it raises
        nothing.

        Args:
            unowned: whether nobody uses the pool any more, so that it is to be shut.
        """
        self._left.append(give_back)
        self._unowned |= unowned
        _holding[self] = None
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
            if self._refusal is None and not self.is_inside():
                if (self._unowned or not self._tenants) and self.is_broken():
                    self._abandon()
                else:
                    self.atomically(lambda: None)
        finally:
            if self._refusal is not None:  # address spaces unmap what they have when destroyed
                self._left.clear()
            _holding.pop(self, None)
            if self._left:
                _holding[self] = None
            elif self._unowned and not self.is_inside():
                self.shut()
            self.lock.release()

    def _forget_done(self) -> None:
        """Drops the undo functions of executed transactions, which may keep objects alive."""
        last = self.mapper.last
        if self._undo and self.mapper.passed(last) and not self.mapper.failed:
            self._undo.clear()

    def _refresh(self) -> None:
        for tenant in self._tenants:
            tenant.refresh()

    def _submit(self, plan: Plan) -> _native.Transaction:
        """Returns the transaction that `plan` decides; it was submitted, and has a ticket, unless it is empty."""
        call = self.call
        assert call is not None
        change, repairs = Change(), len(call.repairs)
        call.change = change
        try:
            plan(change)
        except VattnError:
            if change.undo or not change.transaction.empty:
                change.revert()
                self._refresh()
            del call.repairs[repairs:]
            call.change = None
            raise
        transaction = change.transaction
        if not transaction.empty:
            self._undo[self.mapper.last + 1] = change.undo
            self.mapper.submit(transaction)
            call.change = None
        return transaction

    def _error(self, transaction: _native.Transaction) -> VattnError:
        call, code = transaction.failed_call, transaction.failed_code
        name = self.driver.native.result_name(code)
        cause = failure(call, code, name)
        if (call, code) == ("cuCtxSynchronize", _CAPTURE_UNSUPPORTED):
            refusal = sync_refusal()
            refusal.__cause__ = cause
            return refusal
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


def take_back() -> None:
    """Takes back what dropped caches left behind in all pools of the process, as far as that is possible now. What a
    pool cannot take back for another reason than a capture stays, and the pool's own calls raise the error.
    """
    for pool in list(_holding):
        with contextlib.suppress(VattnError):
            pool.take_back()


def unstock() -> int:
    """Gives back what the pools of the process have created ahead of need; returns how many pages that was."""
    return sum(pool.mapper.unstock() for pool in list(_pools) if pool._refusal is None)


def _stop(mapper: _native.Mapper, native: _native.PagePool) -> None:
    """Gives the memory of free pages back and stops the worker."""
    if mapper.failed:
        for failure in reversed(mapper.failures()):
            failure.revert()
        mapper.resume()
    transaction = _native.Transaction()
    if native.release_free(transaction, native.counts().free):
        mapper.submit(transaction)
    mapper.stop()


def _refuse_in_child() -> None:
    for pool in _pools:
        pool._finalizer.detach()
        pool.lock = threading.RLock()  # a thread that does not exist in this process may have held it
        pool.call = None
        pool._refusal = functools.partial(
            ForkedProcess,
            f"this cache belongs to process {pool._owner}, and this is a fork of it (process {os.getpid()}): mappings "
            "and their worker do not survive a fork; make a cache here, or start workers with 'spawn'",
        )


os.register_at_fork(after_in_child=_refuse_in_child)
atexit.register(take_back)
