"""PoolMember: what all that hold pages of a pool have in common: how they join it, are checked, and leave it."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from vattn.memory.journal import Change
from vattn.memory.pool import PagePool, Plan, Tenant, atomic


class PoolMember(ABC):
    """Belongs to a pool from `_join` to `close`; one that is dropped without `close` gives its pages up as well."""

    _pool: PagePool
    _owns_pool: bool

    def _join(self) -> None:
        """Joins the pool, with its lock held: the last act of a constructor."""
        self._closed = False
        self._finalizer = weakref.finalize(self, _collected, self._pool, self._give_back(), self._owns_pool)
        self._finalizer.atexit = False  # daemon threads may still use the memory; the OS reclaims it
        self._pool.join(self._tenant)

    @property
    @abstractmethod
    def _tenant(self) -> Tenant:
        """What the pool knows it by."""

    @abstractmethod
    def _give_back(self) -> Plan:
        """Returns a plan that gives up every page, as soon as no kernel uses it. It does not keep this object alive."""

    @abstractmethod
    def _forget(self) -> None:
        """Drops all that keeps address space reserved."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raises CacheClosed after `close`."""

    def _check_usable(self) -> None:
        """Checks that tensors can be handed out.

        Raises:
            CacheClosed, ForkedProcess, DriverError: they could not be used.
        """
        self._check_open()
        self._pool.check_usable()

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        """Checks the pool, with no transaction in progress, then what is checked within the context.

        Raises:
            AssertionError: an invariant is violated.
        """
        with self._pool.lock:
            self._check_open()
            self._pool.enter()
            self._pool.drain()
            try:
                self._pool.native.check()
                self._pool.mapper.check()
                yield
            except RuntimeError as error:
                raise AssertionError(str(error)) from error

    def close(self) -> None:
        """Unmaps all pages and gives the memory back. Idempotent; all other calls raise CacheClosed afterwards.

        The tensors must no longer be used; their address space is released with the last of them.

        Raises:
            StreamCapturing: pages are mapped, and a stream of the device is capturing a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        with self._pool.lock:
            if not self._finalizer.alive:
                return
            if self._pool.inherited:
                self._pool.check_usable()
            if not self._closed:
                self._leave_pool()
            self._forget()
            if self._owns_pool:
                self._pool.shut()
            self._finalizer.detach()

    def _leave_pool(self) -> None:
        give_back = self._give_back()

        def plan(change: Change) -> None:
            change.on_revert(lambda: setattr(self, "_closed", False))
            self._closed = True
            give_back(change)

        if self._pool.is_broken():
            self._pool.leave_broken(self._tenant, plan)
        else:
            self._leave_by(plan)

    @atomic
    def _leave_by(self, plan: Plan) -> None:
        self._pool.leave(self._tenant, plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _collected(pool: PagePool, give_back: Plan, owns_pool: bool) -> None:
    """Gives up the pages of a member that was dropped without `close`, and shuts its own pool."""
    pool.leave_behind(give_back, unowned=owns_pool)
