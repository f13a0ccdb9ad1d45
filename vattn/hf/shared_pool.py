"""Page pools shared by the caches of `generate()`: one per device, page size and guard, kept for later caches.

With a shared pool, a cache per call does not start a thread per call. When a cache is freed, its memory returns to the
machine, except for a few pages (`KEPT_BYTES`) with which the next short call starts. An unused pool costs these pages
and a sleeping thread.
"""

from __future__ import annotations

import os
import threading

import torch

from vattn import _native, drivers
from vattn.memory.journal import Change
from vattn.memory.pool import PagePool, Plan, Tenant

KEPT_BYTES = 16 * 2**20  # free pages kept, since creating and releasing a page takes longer than mapping it

_pools: dict[tuple[torch.device, int, drivers.Guard], SharedPool] = {}
_lock = threading.Lock()


class SharedPool(PagePool):
    """A pool that keeps only a few pages of freed caches."""

    @property
    def usable(self) -> bool:
        """Whether another cache may join the pool."""
        return self._refusal is None and not self.mapper.broken

    def leave(self, tenant: Tenant, give_back: Plan) -> None:
        super().leave(tenant, _and_release(give_back, self.native))
        self._let_go()

    def leave_behind(self, give_back: Plan, *, unowned: bool) -> None:
        super().leave_behind(_and_release(give_back, self.native), unowned=unowned)

    def take_back(self) -> None:
        super().take_back()
        if self.lock.acquire(blocking=False):
            try:
                if self.usable and not self.is_inside():
                    self._let_go()
            finally:
                self.lock.release()

    def _let_go(self) -> None:
        """Submits an empty transaction, so that the worker drops the last one, which holds the address space of a freed
        cache.
        """
        self.mapper.submit(_native.Transaction())


def shared_pool(budget: int, device: str | torch.device, page_size: int, guard: drivers.Guard) -> SharedPool:
    """The shared pool, for at least `budget` bytes; each cache is limited by its own budget.

    Raises:
        ConfigError: for a device without a driver.
    """
    source = drivers.find(device)
    key = source.torch_device, page_size, guard
    with _lock:
        pool = _pools.get(key)
        if pool is None or not pool.usable or pool.total_pages * page_size < budget:
            # For all of the device's memory, since caches made later may have a larger budget.
            most = max(budget, source.available_memory())
            pool = _pools[key] = SharedPool(most, device=device, page_size=page_size, guard=guard)
        return pool


def _and_release(give_back: Plan, native: _native.PagePool) -> Plan:
    """`give_back`, followed by the release of all free pages but `KEPT_BYTES`. It must not refer to the pool, which
    keeps such plans.
    """
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
