"""Measuring time: alternating calls, and how busy others kept the machine meanwhile."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


class LoadMeter:
    """Cores kept busy by others since the meter was made: by other processes, and by other guests of the host."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._foreign = _busy_seconds() - _own_seconds()

    def foreign_seconds(self) -> float:
        """CPU seconds of others since the start; below 0 by no more than the clock's tick of 10 ms."""
        return _busy_seconds() - _own_seconds() - self._foreign

    def foreign_cores(self) -> float:
        """The mean since the start."""
        return self.foreign_seconds() / (time.perf_counter() - self._start)


def _busy_seconds() -> float:
    """CPU seconds of the whole machine since it booted."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """CPU seconds of this process and of its children that have ended: a benchmark ends every process it starts."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system


def turns(sides: Iterable[Key], number: int) -> list[Key]:
    """The order of the sides in a round.

    It differs from round to round: each side comes first, and after each of the others, as often as any other. One that
    always followed the same other would find the caches, and threads that still spin, always as that one left them.

    Args:
        number: of the round; -1 and less for those that warm up.
    """
    # Williams' design: 0, 1, -1, 2, -2, ..., then all numbers plus 1; of an odd number of sides, then also backwards.
    sides = list(sides)
    count = len(sides)
    order = [sides[((i + 1) // 2 * (1 if i % 2 else -1) + number) % count] for i in range(count)]
    return order[::-1] if count % 2 and number // count % 2 else order


def interleave(
    actions: Mapping[Key, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    before: Callable[[Callable[[], object]], object] | None = None,
) -> dict[Key, list[float]]:
    """Calls every action once per round and returns the seconds of each call.

    Other load on the machine then affects all actions alike, so the ratios between them hold. The order is that of
    `turns`.

    Args:
        actions: what to time.
        rounds: timed calls of each action.
        warmup: calls of each action before them that are not timed.
        before: is called with an action before each of its calls and is not timed: it leaves the caches as they are to
            be.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in actions}
    gc.collect()
    gc.disable()
    try:
        for number in range(-warmup, rounds):
            for key in turns(actions, number):
                action = actions[key]
                if before is not None:
                    before(action)
                start = time.perf_counter()
                action()
                elapsed = time.perf_counter() - start
                if number >= 0:
                    seconds[key].append(elapsed)
    finally:
        gc.enable()
    return seconds
