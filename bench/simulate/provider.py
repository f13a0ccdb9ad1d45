"""Pages without memory, and clocks that driver calls advance.

All driver calls of a pool are made by its worker, in order; a step waits for some of them and leaves others to be made
while the model computes. Here the worker is done at once, and a `Clock` says when it would have been: a transaction
begins when it was submitted and the one before it has ended, takes what its calls take, and whoever waits for it waits
until then.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from vattn import _native
from vattn.pool.core import Core
from vattn.pool.journal import Plan
from vattn.pool.pool import PagePool
from vattn.pool.worker import Worker

_ROOT = Path(__file__).parents[2]
_SOURCE = Path(__file__).with_name("provider.cpp")
_LIBRARY = _ROOT / "build" / "simulate" / "provider.so"
_CALLS = ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess")  # in the order of provider.cpp
_REMEMBERED = 4096  # tickets that somebody may still wait for

# Microseconds of a call on 2 MiB: Table 3 of the paper.
PAPER = {"cuMemCreate": 29.0, "cuMemRelease": 23.0, "cuMemMap": 2.0, "cuMemUnmap": 34.0, "cuMemSetAccess": 38.0}


class Clock:
    """The time of one simulated machine, in seconds.

    Attributes:
        now: of the engine.
        waited: how much of it the engine has waited for driver calls.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.waited = 0.0
        self._idle_from = 0.0  # the worker
        self._ends: dict[int, float] = {}

    def submit(self, ticket: int, seconds: float) -> None:
        """The worker has got a transaction whose calls take so long."""
        self._idle_from = max(self._idle_from, self.now) + seconds
        self._ends[ticket] = self._idle_from
        if len(self._ends) > _REMEMBERED:
            for old in list(self._ends)[: _REMEMBERED // 2]:
                del self._ends[old]

    def wait(self, ticket: int) -> None:
        """The engine waits for a transaction."""
        wait = self._ends.get(ticket, 0.0) - self.now
        if wait > 0:
            self.now += wait
            self.waited += wait


class SimulatedPool(PagePool):
    """A pool of pages that have no memory; one per process at a time.

    Args:
        microseconds: of each driver call.
        clocks: those that the calls advance.
    """

    def __init__(
        self, budget: int, page_size: int, *, clocks: Sequence[Clock] = (), microseconds: Mapping[str, float] = PAPER
    ) -> None:
        library = _library()
        prices = (ctypes.c_uint64 * len(_CALLS))(*(round(1e3 * microseconds[name]) for name in _CALLS))
        library.simulate_begin(page_size, prices)
        table = {name: library.simulate_call(number) for number, name in enumerate(_CALLS)}
        super().__init__(budget, page_size=page_size, table={**_native.host_table(), **table})
        self._core = _TimedCore(self._core.worker, clocks)

    @property
    def spent(self) -> float:
        """Seconds that all driver calls so far would have taken."""
        return _spent()


class _TimedCore(Core):
    """A pool that tells clocks when the worker would be done."""

    def __init__(self, worker: Worker, clocks: Sequence[Clock]) -> None:
        super().__init__(worker)
        self._clocks = clocks
        self._told = _spent()

    def submit(self, plan: Plan) -> int:
        ticket = super().submit(plan)
        if ticket:
            self._tell(ticket)
        return ticket

    def execute(self, plan: Plan) -> int:
        ticket = super().execute(plan)
        if ticket:
            self._tell(ticket)
            self._wait(ticket)
        return ticket

    def wait(self, ticket: int) -> None:
        super().wait(ticket)
        self._wait(ticket)

    def stock(self) -> None:
        """Nothing is created ahead: how far the worker would come depends on the real time that it has."""

    def _tell(self, ticket: int) -> None:
        super().wait(ticket)
        spent = _spent()
        for clock in self._clocks:
            clock.submit(ticket, spent - self._told)
        self._told = spent

    def _wait(self, ticket: int) -> None:
        for clock in self._clocks:
            clock.wait(ticket)


def _spent() -> float:
    return float(_library().simulate_spent()) * 1e-9


@functools.cache
def _library() -> ctypes.CDLL:
    """The provider, built if its sources are newer."""
    headers = (_ROOT / "csrc").glob("*.h")
    newest = max(path.stat().st_mtime for path in (_SOURCE, *headers))
    if not _LIBRARY.exists() or _LIBRARY.stat().st_mtime < newest:
        _LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        fresh = _LIBRARY.with_suffix(f".{os.getpid()}")
        options = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-Wall", "-Wextra"]
        if os.environ.get("VATTN_WERROR") == "ON":
            options.append("-Werror")
        subprocess.run(["g++", *options, f"-I{_ROOT / 'csrc'}", "-o", str(fresh), str(_SOURCE)], check=True)
        fresh.replace(_LIBRARY)
    library = ctypes.CDLL(str(_LIBRARY))
    library.simulate_spent.restype = ctypes.c_uint64
    library.simulate_begin.argtypes = (ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64))
    library.simulate_call.restype = ctypes.c_size_t
    return library
