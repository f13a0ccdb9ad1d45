"""Worker: hands transactions to the thread that executes them, takes back those that failed, and names the errors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

from vattn import _native
from vattn.drivers import MemoryDriver
from vattn.drivers.failure import failure
from vattn.errors import DriverError, MappingLimit, OutOfPages, ProcessLimit, VattnError
from vattn.pool.fences import sync_refusal
from vattn.pool.journal import Change, Undo, revert
from vattn.units import format_bytes

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_CAPTURE_UNSUPPORTED = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED


class Worker:
    """The worker of one pool; used under the pool's lock. It executes transactions in order and decides nothing.

    Attributes:
        driver: the driver calls, and the device.
        native: the books of the pages.
        mapper: the thread, and its log.
        failures: transactions that failed in a driver call.
        finalizer: what `stop` does, for a worker that is dropped.
    """

    def __init__(self, driver: MemoryDriver, page_size: int, pages: int, *, zero_on_free: bool) -> None:
        self.driver = driver
        self.native = _native.PagePool(page_size, pages, zero_on_free)
        self.mapper = _native.Mapper(driver.native, self.native)
        self.failures = 0
        # For transactions that may still fail, by ticket: how to revert them in the Python books.
        self._undo: dict[int, list[Undo]] = {}
        self._wanted = 0
        self.finalizer = weakref.finalize(self, _stop, self.mapper, self.native)
        self.finalizer.atexit = False  # daemon threads may still use the memory; the OS reclaims it

    def submit(self, change: Change) -> None:
        """Hands over what a change has decided, which is final with that unless the transaction fails."""
        self._undo[self.mapper.last + 1] = change.undo
        self.mapper.submit(change.transaction)

    def revert(self, failures: Sequence[_native.Transaction]) -> None:
        """Reverts transactions that failed or were cancelled. If interrupted, it can be called again."""
        for transaction in reversed(failures):
            revert(transaction, self._undo.get(transaction.ticket, []))

    def resume(self, failures: Sequence[_native.Transaction]) -> None:
        """Goes on after all failures were reverted."""
        self.failures += sum(t.status == _native.Status.FAILED for t in failures)
        self.mapper.resume()
        self._undo.clear()

    def forget_done(self) -> None:
        """Drops the undo functions of executed transactions, which may keep objects alive."""
        if self._undo and self.mapper.passed(self.mapper.last) and not self.mapper.failed:
            self._undo.clear()

    def forget_last(self) -> None:
        """Drops what holds the address space of a cache that has left: undo functions, and the last transaction, which
        the thread drops for the next one, an empty one.
        """
        self.forget_done()
        self.mapper.submit(_native.Transaction())

    def stock(self, wanted: int) -> None:
        """Has the thread create so many pages ahead of need."""
        if wanted or self._wanted:
            self.mapper.stock(wanted)
            self._wanted = wanted

    def stop(self) -> None:
        """Ends the thread and gives the memory of free pages back. Idempotent, and goes on if it was interrupted."""
        if self.finalizer.alive:
            _stop(self.mapper, self.native)
            self.finalizer.detach()

    def detach(self) -> None:
        """Leaves the thread to another process, of which this one is a fork."""
        self.finalizer.detach()

    # Errors

    def unknown(self, failed: _native.Transaction, *, abandoned: bool = False) -> Callable[[], DriverError]:
        """Makes the error for calls while mappings are unknown, because undoing `failed` failed as well. `abandoned`:
        nothing will be undone any more.
        """
        limit = self.driver.device.mapping_limit()
        lacking = "" if limit is None else f" (mappings, say, of which vm.max_map_count allows the process {limit})"
        again = f"every call tries to undo it again, and can once what is lacking is there{lacking}; or "
        way_out = f"{'' if self.mapper.ruined else again}close the cache and make a new one"
        if abandoned:
            way_out = (
                "a cache has left its pool meanwhile, which can do no more; close the other ones, and make a new pool"
            )
        return functools.partial(
            DriverError,
            f"a driver call failed, and so did undoing what went before it: the mappings are unknown; {way_out}",
            call=failed.failed_call,
            code=failed.failed_code,
            name=self.driver.native.result_name(failed.failed_code),
        )

    def error(self, transaction: _native.Transaction) -> VattnError:
        """The error for a transaction of which a driver call failed."""
        call, code = transaction.failed_call, transaction.failed_code
        name = self.driver.native.result_name(code)
        cause = failure(call, code, name)
        if (call, code) == ("cuCtxSynchronize", _CAPTURE_UNSUPPORTED):
            refusal = sync_refusal()
            refusal.__cause__ = cause
            return refusal
        # Where that is unlimited, a reservation on the host lacks what a mapping does: an entry in the kernel's table.
        if code != _OUT_OF_MEMORY or (isinstance(cause, ProcessLimit) and cause.limit == "RLIMIT_AS"):
            return cause
        error: OutOfPages
        page_size, limit = self.native.page_size, self.driver.device.mapping_limit()
        if call == "cuMemCreate" or limit is None:
            free = self.driver.device.describe_memory()
            error = OutOfPages(
                f"the machine has no memory for another page on {self.driver.device.torch_device}, although the budget "
                f"of {self.native.counts().budget} pages does; {free}; lower memory_budget, or free memory elsewhere",
                missing_pages=1,
                missing_bytes=page_size,
            )
        else:
            error = MappingLimit(
                f"the kernel's table of mappings is full: vm.max_map_count is {limit}, and pages of "
                f"{format_bytes(page_size)} that are not neighbours need one each; use a larger page_size or a "
                "layout of fewer tensors ('fused'), or raise it: sysctl vm.max_map_count=262144",
                missing_pages=1,
                missing_bytes=page_size,
            )
        error.__cause__ = cause
        return error


def _stop(mapper: _native.Mapper, native: _native.PagePool) -> None:
    """Gives the memory of free pages back and stops the worker."""
    if mapper.failed:
        for failure in reversed(mapper.failures()):
            failure.revert()
        mapper.resume()
    transaction = _native.Transaction()
    try:
        if native.release_free(transaction, native.counts().free):
            mapper.submit(transaction)
    except BaseException:
        if not transaction.ticket:
            transaction.revert()
        raise
    mapper.stop()
