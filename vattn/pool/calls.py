"""Calls on a pool: one at a time, and each happens wholly or not at all.

A call decides in the books on the calling thread; what it has decided is a `Change`, which the worker executes. Nothing
here knows what the books are about.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from vattn import _native
from vattn.errors import ForkedProcess, NoFreeSlot, OutOfPages, StreamCapturing, VattnError
from vattn.pool import leftovers
from vattn.pool.journal import Change, Plan
from vattn.pool.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class Call:
    """A call in progress, under the pool's lock.

    Attributes:
        change: decisions that are not final; None if there are none.
        repairs: functions to run if the call ends with an exception although some or all of its changes are final, for
            example to free a slot whose index was never returned. Like an undo function, each may run twice; it may
            also run after a call of another thread.
        failed: whether the call ended with an exception and is being reverted.
    """

    __slots__ = ("change", "failed", "repairs")

    def __init__(self) -> None:
        self.change: Change | None = None
        self.repairs: list[Callable[[], object]] = []
        self.failed = False


class Calls(ABC):
    """The calls on one pool. The lock guards the books; most methods require it to be held.

    Attributes:
        worker: executes what calls decide.
        lock: held during a call.
        call: the call in progress.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.lock = threading.RLock()
        self.call: Call | None = None
        self._chores: list[Callable[[], object]] = []  # work deferred to the next call
        # Why no call is possible any more. Made anew for every call: an error that was raised refers to its callers.
        self._refusal: Callable[[], VattnError] | None = None
        self._owner = os.getpid()

    @abstractmethod
    def _refresh(self) -> None:
        """Recomputes what is derived from the books, after decisions were reverted."""

    @abstractmethod
    def _take_leftovers(self) -> None:
        """Gives up what dropped caches left behind, each in a transaction; may raise StreamCapturing."""

    @abstractmethod
    def _has_leftovers(self) -> bool:
        """Whether `_take_leftovers` would do something."""

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
                    caught_up = False
                    try:
                        self._catch_up()
                        caught_up = True
                        result = body()
                        done, self.call = call, None
                        return result
                    except BaseException as error:
                        call.failed = True
                        self._recover(error)
                        # Finalisers may have given back what was missing in the meantime. What cannot be given back
                        # would fail again.
                        lacking = caught_up and isinstance(error, OutOfPages | NoFreeSlot)
                        if not (lacking and (self._chores or self._has_leftovers())):
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
            self._recover(None)

    @property
    def settled(self) -> bool:
        """Whether the books can be read without a call: none is in progress, and the next one has nothing to mend."""
        return self.call is None and self._refusal is None and not self._chores and not self.worker.mapper.failed

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
            self._recover(None)
        if self.worker.mapper.failed:
            self.settle()

    def _catch_up(self) -> None:
        """Does the deferred work, at the start of a call."""
        while self._chores:
            self._chores[0]()
            self.commit()
            del self._chores[0]
        with contextlib.suppress(StreamCapturing):
            self._take_leftovers()
        self.worker.forget_done()

    def postpone(self, chore: Callable[[], object]) -> None:
        """Defers a chore, which may run twice, to the start of the next call."""
        self._chores.append(chore)

    def change(self) -> Change:
        """The change of the call in progress, to which decisions are added."""
        assert self.call is not None
        if self.call.change is None:
            self.call.change = Change()
        return self.call.change

    def repair(self, repair: Callable[[], object]) -> None:
        """Registers a function to run if the call fails although some of its changes are final."""
        assert self.call is not None
        self.call.repairs.append(repair)

    def commit(self) -> None:
        """Makes final what the call has decided so far, which must not include operations for the worker."""
        assert self.call is not None
        assert self.call.change is None or self.call.change.transaction.empty
        self.call.change = None

    def _recover(self, error: BaseException | None) -> None:
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
        self.drain()
        self.worker.forget_done()  # it may be a cache's last call, which it would keep
        call.change = None
        while call.repairs:
            call.repairs[-1]()
            call.change = None
            call.repairs.pop()
        self._refresh()
        self.call = None

    # Transactions

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
            self.worker.mapper.wait(transaction.ticket)
            if transaction.status == _native.Status.DONE:
                self.worker.forget_done()
                return transaction.ticket
            self.settle()
            del call.repairs[repairs:]
            if transaction.status == _native.Status.FAILED:
                raise self.worker.error(transaction)

    def wait(self, ticket: int) -> None:
        """Waits for a transaction, and settles."""
        self.worker.mapper.wait(ticket)
        if self.worker.mapper.failed:
            self.settle()

    def drain(self) -> None:
        """Waits until the worker has executed all transactions, and settles."""
        self.wait(self.worker.mapper.last)

    def settle(self) -> None:
        """Waits for the worker and reverts the decisions of every transaction that failed or was cancelled. If
        interrupted, it can be called again.

        Raises:
            DriverError: the worker could not undo what it did of them, and still cannot. Nothing is reverted.
        """
        failures = self.worker.mapper.failures()
        if self.is_broken():
            raise (self._refusal or self.worker.unknown(failures[0]))()
        self.worker.revert(failures)
        self._refresh()
        self.worker.resume(failures)

    def is_broken(self) -> bool:
        """Whether mappings are unknown, because undoing a failed transaction failed too, and still does."""
        mapper = self.worker.mapper
        return mapper.broken and (self._refusal is not None or not mapper.mend())

    def abandon(self) -> None:
        """Gives up a pool whose mappings are unknown: reverts the books, and refuses all further calls."""
        if self._refusal is None:
            failures = self.worker.mapper.failures()
            self._refusal = self.worker.unknown(failures[0], abandoned=True)
            self.worker.revert(failures)

    def refuse_in_child(self) -> None:
        """Refuses all calls: this process is a fork of the one that the pool works in."""
        self.worker.detach()
        self.lock = threading.RLock()  # a thread that does not exist in this process may have held it
        self.call = None
        self._refusal = functools.partial(
            ForkedProcess,
            f"this cache belongs to process {self._owner}, and this is a fork of it (process {os.getpid()}): mappings "
            "and their worker do not survive a fork; make a cache here, or start workers with 'spawn'",
        )

    def _submit(self, plan: Plan) -> _native.Transaction:
        """Returns the transaction that `plan` decides; it was submitted, and has a ticket, unless it is empty."""
        call = self.call
        assert call is not None
        change, repairs = Change(), len(call.repairs)
        call.change = change
        try:
            plan(change)
        except VattnError:
            if not change.empty:
                change.revert()
                self._refresh()
            del call.repairs[repairs:]
            call.change = None
            raise
        if not change.transaction.empty:
            self.worker.submit(change)
            call.change = None
        return change.transaction


class Caller(Protocol):
    """An object on a pool whose calls are atomic."""

    @property
    def _core(self) -> Calls: ...

    def _check_open(self) -> None: ...


C = TypeVar("C", bound=Caller)


def atomic(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Turns a method into an atomic call under its pool's lock.

    A call from inside another one on the same thread, in a signal handler or a finaliser, is refused.
    """

    @functools.wraps(method)
    def call(self: C, *args: P.args, **kwargs: P.kwargs) -> R:
        if leftovers.holding:
            leftovers.take_back()
        return self._core.atomically(lambda: method(self, *args, **kwargs), self._check_open)

    return cast(Callable[Concatenate[C, P], R], call)


def reading(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Turns a read-only method into a call; inside another call it sees what that one has decided so far."""
    whole = atomic(method)

    @functools.wraps(method)
    def call(self: C, *args: P.args, **kwargs: P.kwargs) -> R:
        core = self._core
        with core.lock:
            if not core.is_inside():
                return whole(self, *args, **kwargs)
            self._check_open()
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate[C, P], R], call)
