"""Page pools shared by the caches of `generate()`: one per device, page size and guard, kept for later caches.

With a shared pool, a cache per call does not start a thread per call. When a cache is freed, its memory returns to the
machine, except for a few pages (`KEPT_BYTES`) with which the next short call starts. An unused pool costs these pages
and a sleeping thread.
"""

from __future__ import annotations

import os
import threading

import torch

from vattn import drivers
from vattn.pool.pool import PagePool

KEPT_BYTES = 16 * 2**20  # free pages kept, since creating and releasing a page takes longer than mapping it

_pools: dict[tuple[torch.device, int, drivers.Guard], PagePool] = {}
_lock = threading.Lock()


def shared_pool(budget: int, device: str | torch.device, page_size: int, guard: drivers.Guard) -> PagePool:
    """The shared pool, for at least `budget` bytes; each cache is limited by its own budget.

    Raises:
        ConfigError: for a device without a driver.
    """
    source = drivers.find(device)
    key = source.torch_device, page_size, guard
    with _lock:
        pool = _pools.get(key)
        if pool is None or not pool._core.usable or pool.budget < budget:
            # For all of the device's memory, since caches made later may have a larger budget.
            most = max(budget, source.available_memory())
            pool = _pools[key] = PagePool(most, device=device, page_size=page_size, guard=guard)
        pool._core.kept_pages = -(-KEPT_BYTES // page_size)
        return pool


def is_shared(pool: PagePool) -> bool:
    """Whether a pool is one of these, so that its budget is no cache's."""
    return pool._core.kept_pages is not None


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget_in_child)
