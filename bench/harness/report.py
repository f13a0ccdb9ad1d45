"""What a benchmark returns: parameters, a table, goals; as text and as a record."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Row = dict[str, str | int | float]


class Unavailable(Exception):
    """A benchmark needs something that this machine or environment does not have."""


# Torch's threads wait for each other: with one of them descheduled, a copy of 50 us was seen to take 8 or 16 ms, one or
# two time slices of the scheduler. Medians do not help then, so a run under more foreign load than this is void.
MAX_FOREIGN_CORES = 0.1

_REPOSITORY = Path(__file__).parents[2]
_CPU_NUMBERS = {"family": "cpu family", "model": "model"}


@dataclass(frozen=True)
class Goal:
    """A bound on a figure, and the value measured."""

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
    """The result of a benchmark.

    Attributes:
        parameters: what was run.
        figures: a table, one row per case; column names carry the unit.
        goals: bounds that the figures should keep.
        series: individual measurements, for plots.
        timed: the figures are times, which other load on the machine falsifies.
    """

    parameters: dict[str, Any]
    figures: list[Row]
    goals: list[Goal]
    series: dict[str, list[float]] = field(default_factory=dict)
    timed: bool = True

    def contended(self, foreign_cores: float) -> bool:
        """Whether other load makes the figures void."""
        return self.timed and foreign_cores > MAX_FOREIGN_CORES

    def text(self) -> str:
        """Parameters, table and goals, to be read by people."""
        lines = [f"{key}: {value}" for key, value in self.parameters.items()]
        lines += ["", *text_table(self.figures), "", *map(str, self.goals)]
        return "\n".join(lines)

    def record(self, name: str, *, quick: bool, foreign_cores: float, seconds: float = 0.0) -> dict[str, Any]:
        """The same as JSON values, with hardware, versions and commit.

        Args:
            foreign_cores: kept busy by others meanwhile.
            seconds: that the run has taken.
        """
        return {
            "name": name,
            "quick": quick,
            "seconds": round(seconds, 1),
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


def text_table(rows: Sequence[Row]) -> list[str]:
    """Aligned lines, the header first. All rows must have the columns of the first."""
    cells = [list(rows[0]), *([format_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def format_cell(value: str | int | float) -> str:
    """A figure with as many digits as matter: three decimals below 10, one below 1000, none above."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def hardware() -> dict[str, str | int]:
    """The CPU's name, family and model, cores that this process may use, bytes of memory; the GPU if there is one."""
    import torch  # here, so that the command line answers without it

    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    cpuinfo = {key.strip(): value.strip() for key, _, value in lines}
    found: dict[str, str | int] = {
        "cpu": cpuinfo.get("model name", platform.machine()),
        **{f"cpu_{key}": int(cpuinfo[name]) for key, name in _CPU_NUMBERS.items() if name in cpuinfo},
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
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            **{package: _version(package) for package in ("cuda-bindings", "flash-attn", "flashinfer-python")},
        }
    return found


def _nvidia_driver() -> str:
    with suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError, IndexError):
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _commit() -> dict[str, str | bool | None]:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=_REPOSITORY, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return {"commit": git("rev-parse", "--verify", "HEAD"), "dirty": git("status", "--porcelain") != ""}
