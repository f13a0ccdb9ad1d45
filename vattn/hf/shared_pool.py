"""The pools that caches of `generate()` share: one per device, page size and guard, kept for caches to come.

A cache per call is then no thread per call. What a cache has goes back to the machine when the cache does, as from a
pool of its own, but for a few pages (`KEPT_BYTES`), with which the next short call starts: a pool that no cache uses is
a thread that sleeps.
"""

from __future__ import annotations

import os
import threading

import torch

from vattn import _native, drivers
from vattn.memory.journal import Change
from vattn.memory.pool import PagePool, Plan, Tenant

KEPT_BYTES = 16 * 2**20  # of pages that no cache has: to make a page and to give it back takes longer than to map it

_pools: dict[tuple[torch.device, int, drivers.Guard], SharedPool] = {}
_lock = threading.Lock()


class SharedPool(PagePool):
    """A pool that keeps few pages of caches that are gone."""

    @property
    def usable(self) -> bool:
        """Whether another cache may join."""
        return self._refusal is None and not self.mapper.broken

    def leave(self, tenant: Tenant, give_back: Plan) -> None:
        super().leave(tenant, _and_release(give_back, self.native))
        self._let_go()

    def leave_behind(self, give_back: Plan) -> None:
        super().leave_behind(_and_release(give_back, self.native))
        if self.lock.acquire(blocking=False):
            try:
                if self.usable and not self.is_inside():
                    self._let_go()
            finally:
                self.lock.release()

    def _let_go(self) -> None:
        """Has the worker let go of what it executed last, which is kept until the next transaction: with it goes the
        address space of a cache that is gone.
        """
        self.mapper.submit(_native.Transaction())


def shared_pool(budget: int, device: str | torch.device, page_size: int, guard: drivers.Guard) -> SharedPool:
    """The pool of such caches, for at least `budget` bytes; what a cache may take of it, its own budget says.

    Raises:
        ConfigError: for a device without a driver.
    """
    source = drivers.find(device)
    key = source.torch_device, page_size, guard
    with _lock:
        pool = _pools.get(key)
        if pool is None or not pool.usable or pool.total_pages * page_size < budget:
            # For all that the device has: a cache made later must not find a pool for this one's budget only.
            most = max(budget, source.available_memory())
            pool = _pools[key] = SharedPool(most, device=device, page_size=page_size, guard=guard)
        return pool


def _and_release(give_back: Plan, native: _native.PagePool) -> Plan:
    """`give_back`, then the free pages but for `KEPT_BYTES` go. It knows no pool, as pools keep such plans."""
    kept = KEPT_BYTES // native.page_size

    def plan(change: Change) -> None:
        give_back(change)
        native.release_free(change.transaction, max(0, native.counts().free - kept))

    return plan


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget_in_child)
