"""Running and reporting: what is common to all benchmarks."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

Row = dict[str, str | int | float]
Key = TypeVar("Key", bound=Hashable)

# Torch's threads wait for each other: with one of them descheduled, a copy of 50 us was seen to take 8 or 16 ms, a
# slice or two of the scheduler. Medians do not help then, so a run beside more load than this gives no figures.
MAX_FOREIGN_CORES = 0.1

_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Goal:
    """What a figure should be, and what it was."""

    what: str
    value: float
    relation: Literal["<=", ">=", "=="]
    bound: float

    @property
    def met(self) -> bool:
        if self.relation == "==":
            return self.value == self.bound
        return self.value <= self.bound if self.relation == "<=" else self.value >= self.bound

    def __str__(self) -> str:
        verdict = "met" if self.met else "NOT met"
        return f"goal {self.what}: {verdict}, {self.value:.4g} (asked {self.relation} {self.bound:.4g})"


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        parameters: what was run.
        figures: a table, one row per case; column names carry the unit.
        goals: what the figures should show.
        series: measurements one by one, for plots.
        timed: the figures are times, which other load on the machine falsifies.
    """

    parameters: dict[str, Any]
    figures: list[Row]
    goals: list[Goal]
    series: dict[str, list[float]] = field(default_factory=dict)
    timed: bool = True

    def contended(self, foreign_cores: float) -> bool:
        """Whether others kept the machine too busy for the figures to count."""
        return self.timed and foreign_cores > MAX_FOREIGN_CORES

    def text(self) -> str:
        """Parameters, table and goals for people."""
        lines = [f"{key}: {value}" for key, value in self.parameters.items()]
        lines += ["", *text_table(self.figures), "", *map(str, self.goals)]
        return "\n".join(lines)

    def record(self, name: str, *, quick: bool, foreign_cores: float) -> dict[str, Any]:
        """The same for machines, with what is needed to judge it later."""
        return {
            "name": name,
            "quick": quick,
            "foreign_cores": round(foreign_cores, 3),
            "contended": self.contended(foreign_cores),
            "parameters": self.parameters,
            "figures": self.figures,
            "goals": [{**asdict(goal), "met": goal.met} for goal in self.goals],
            "series": self.series,
            "hardware": hardware(),
            "kernel": f"{platform.system()} {platform.release()}",
            "versions": {"python": platform.python_version()}
            | {package: metadata.version(package) for package in ("torch", "transformers", "vattn")},
            **_commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


class LoadMeter:
    """How many cores others kept busy since it was made: other processes, and other guests of the host."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy = self._foreign_seconds()

    def foreign_cores(self) -> float:
        """The mean since the start; below 0 by no more than the clock's tick of 10 ms."""
        return (self._foreign_seconds() - self._busy) / (time.perf_counter() - self._start)

    @staticmethod
    def _foreign_seconds() -> float:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        own = os.times()
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        # Of children, those that have ended: a benchmark ends all that it starts.
        return busy - own.user - own.system - own.children_user - own.children_system


def interleave(actions: Mapping[Key, Callable[[], object]], rounds: int, *, warmup: int = 2) -> dict[Key, list[float]]:
    """Calls every action once per round, and returns the seconds of each call.

    What else the machine does then hits all of them alike, so that ratios between them hold. The order changes from
    round to round, so that none always finds the caches as the same other one left them.

    Args:
        actions: what to time.
        rounds: calls of each.
        warmup: further calls of each before, not timed.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in actions}
    order = list(actions)
    gc.collect()
    gc.disable()
    try:
        for number in range(-warmup, rounds):
            for key in order:
                action = actions[key]
                start = time.perf_counter()
                action()
                elapsed = time.perf_counter() - start
                if number >= 0:
                    seconds[key].append(elapsed)
            order = order[1:] + order[:1]
    finally:
        gc.enable()
    return seconds


def text_table(rows: Sequence[Row]) -> list[str]:
    """Aligned lines, a header first. All rows have the columns of the first."""
    cells = [list(rows[0]), *([format_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def format_cell(value: str | int | float) -> str:
    """A figure with the digits that count: ratios are near 1, times are not."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def hardware() -> dict[str, str | int]:
    """Model, cores that this process may use, and bytes of memory; the GPU and its driver where there is one."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    found: dict[str, str | int] = {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": str(torch.version.cuda),
            "nvidia_driver": _nvidia_driver(),
        }
    return found


def _nvidia_driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "unknown"


def _commit() -> dict[str, str | bool | None]:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=_REPOSITORY, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return {"commit": git("rev-parse", "--verify", "HEAD"), "dirty": git("status", "--porcelain") != ""}
