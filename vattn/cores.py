"""Cores: how many this process may use, how many are free, and how many threads are worth a trial."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path


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


def free_cores() -> int:
    """Cores of the machine that no other thread wants at this moment, from the scheduler's queues; all if these are
    hidden.
    """
    every = os.cpu_count() or 1
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return every
    return every - running + 1  # this thread is one of them


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
