"""Cores: how many this process may use, how many are free, and how many threads are worth a trial."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

_SHORTEST_LOOK = 0.05  # seconds; the system counts idle time in hundredths


def cores() -> int:
    """Cores that this process may use: those of its affinity, and no more than its control groups' quota."""
    available = float(len(os.sched_getaffinity(0)))
    for quota in _quotas():
        available = min(available, quota)
    return max(1, math.ceil(available))


def _quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[float]:
    """The quotas of the control groups around this process, version 2 and 1, in cores."""
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / "cpu" if controllers else root
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(top):
                    break
                with contextlib.suppress(OSError, ValueError):
                    if controllers:
                        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                    else:
                        quota, period = (folder / "cpu.max").read_text().split()
                    if int(quota) > 0:
                        yield int(quota) / int(period)


class FreeCores:
    """Cores that other programs left to this process since the last look: idle ones, and those that it used itself.

    Which threads are ready at one moment would say less: steps begin when the process has just answered its clients,
    which then read.
    """

    def __init__(self) -> None:
        self._free = os.cpu_count() or 1
        self._seen = _left_seconds()

    def __call__(self) -> int:
        """Their number; that of the last look if it is hardly over, and all cores if the system hides what they do."""
        (now, left), (before, left_before) = _left_seconds(), self._seen
        if now - before >= _SHORTEST_LOOK:
            self._free, self._seen = round((left - left_before) / (now - before)), (now, left)
        return self._free


def _left_seconds() -> tuple[float, float]:
    """The time, and seconds of cores that were idle or computed for this process until then."""
    now = time.monotonic()
    try:
        idle = float(Path("/proc/uptime").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        idle = now * (os.cpu_count() or 1)
    return now, idle + time.process_time()


def thread_counts(cores: int, threads: int) -> tuple[int, ...]:
    """The numbers of threads that are worth a trial: powers of two, and the most.

    With more than two cores, one is left to the worker that maps memory, and with more than four another one to the
    server.

    Args:
        cores: those that this process may use.
        threads: those of torch, which `OMP_NUM_THREADS` and `torch.set_num_threads` limit.
    """
    most = max(1, min(threads, cores - (cores > 2) - (cores > 4)))
    return tuple(sorted({*(2**power for power in range(most.bit_length())), most}))
