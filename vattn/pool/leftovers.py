"""What outlives its owner: the pools of the process, what dropped caches left behind in them, the exit, and forks."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol

from vattn.errors import VattnError


class Pool(Protocol):
    """A pool, as far as the process has to look after it."""

    def take_back(self) -> None:
        """Takes back what dropped caches left behind, as far as that is possible now."""

    def unstock(self) -> int:
        """Gives back what was created ahead of need; returns how many pages that was."""

    def refuse_in_child(self) -> None:
        """Refuses all calls: this process is a fork of the one that the pool works in."""


# The pools in which dropped caches left something behind that could not be given back yet. Nobody else may refer to
# them any more.
holding: dict[Pool, None] = {}

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def look_after(pool: Pool) -> None:
    """Adds a pool to those of the process."""
    _pools.add(pool)


def take_back() -> None:
    """Takes back what dropped caches left behind in all pools of the process, as far as that is possible now. What a
    pool cannot take back for another reason than a capture stays, and the pool's own calls raise the error.
    """
    for pool in list(holding):
        with contextlib.suppress(VattnError):
            pool.take_back()


def unstock() -> int:
    """Gives back what the pools of the process have created ahead of need; returns how many pages that was."""
    return sum(pool.unstock() for pool in list(_pools))


def _refuse_in_child() -> None:
    for pool in _pools:
        pool.refuse_in_child()


os.register_at_fork(after_in_child=_refuse_in_child)
atexit.register(take_back)
