"""PoolMember: what all that hold pages of a pool have in common: how they join it, are checked, and leave it."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NoReturn, Self

import torch

from vattn import drivers
from vattn.errors import CacheClosed, ConfigError, DriverError
from vattn.integers import shown
from vattn.pool import leftovers
from vattn.pool.calls import atomic
from vattn.pool.core import Core, Tenant
from vattn.pool.journal import Change, Plan
from vattn.pool.pool import PagePool


class PoolMember(ABC):
    """Belongs to a pool until `close`; one that is dropped without `close` gives its pages up as well."""

    _pool: PagePool
    _core: Core
    _owns_pool: bool

    @staticmethod
    def _check_pool(pool: PagePool | None, device: str | torch.device) -> None:
        """Checks a given pool, after what dropped caches left behind was taken back.

        Raises:
            ConfigError: it is none, or its memory is on another device.
        """
        leftovers.take_back()
        if not isinstance(pool, PagePool | None):
            raise ConfigError(f"pool={shown(pool)} is no vattn.PagePool")
        if pool is not None and pool.device != drivers.find(device).torch_device:
            raise ConfigError(f"the pool is on {pool.device}, not on {device}; they must agree")

    @contextlib.contextmanager
    def _joining(self, pool: PagePool | None, make: Callable[[], PagePool]) -> Iterator[Core]:
        """Joins a pool, or one of its own, after the context has made what holds the pages, under the pool's lock."""
        self._owns_pool = pool is None
        self._pool = make() if pool is None else pool
        self._core = core = self._pool._core
        with core.lock:
            core.enter()
            yield core
            self._closed = False
            self._finalizer = weakref.finalize(self, core.leave_behind, self._give_back(), unowned=self._owns_pool)
            self._finalizer.atexit = False  # daemon threads may still use the memory; the OS reclaims it
            core.join(self._tenant)

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

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosed(
                f"the {type(self).__name__} is closed; make a new one, and do not use the old one's tensors"
            )

    def _check_usable(self) -> None:
        """Checks that tensors can be handed out.

        Raises:
            CacheClosed, ForkedProcess, DriverError: they could not be used.
        """
        self._check_open()
        self._core.check_usable()

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        """Checks the pool, with no transaction in progress, then what is checked within the context.

        Raises:
            AssertionError: an invariant is violated.
        """
        with self._core.lock:
            self._check_open()
            self._core.enter()
            self._core.drain()
            try:
                self._core.native.check()
                self._core.mapper.check()
                yield
            except RuntimeError as error:
                raise AssertionError(str(error)) from error

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: its memory is mapped in this process")

    def close(self) -> None:
        """Unmaps all pages and gives the memory back. Idempotent; all other calls raise CacheClosed afterwards.

        The tensors must no longer be used; their address space is released with the last of them.

        Raises:
            StreamCapturing: pages are mapped, and a stream of the device is capturing a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        core = self._core
        with core.lock:
            if not self._finalizer.alive:
                return
            if core.inherited:
                core.check_usable()
            if not self._closed:
                self._leave_pool()
            self._forget()
            if self._owns_pool:
                core.shut()
            self._finalizer.detach()

    def _leave_pool(self) -> None:
        give_back = self._give_back()

        def plan(change: Change) -> None:
            change.set(self, "_closed", True)
            give_back(change)

        if self._core.is_broken():
            self._core.leave_broken(self._tenant, plan)
            return
        try:
            self._leave_by(plan)
        except DriverError:
            self._closed = False  # while mappings are unknown nothing is reverted, and `close` has to be called again
            raise

    @atomic
    def _leave_by(self, plan: Plan) -> None:
        self._core.leave(self._tenant, plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
