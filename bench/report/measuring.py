"""Runs of the benchmarks on this machine for a page: the most telling ones first, within a number of minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.harness.records import Record, Records
from bench.report.sections import SECTIONS

_ROOT = Path(__file__).parents[2]

# Those that tell most come first; the others follow in the order of the page.
_FIRST = ("decode", "cache", "overlap", "step", "fragmentation", "external", "kernels", "block_size", "table", "memory")
# Full runs take longer than a page may, need another environment, or compute the same on every machine.
LEFT_OUT = ("threads", "serving", "throughput", "conversations", "roles", "plugin", "shared_budget", "simulate")
ORDER = tuple(
    name
    for name in dict.fromkeys([*_FIRST, *(name for names in SECTIONS.values() for name in names)])
    if name not in LEFT_OUT
)
_GRACE = 5.0  # seconds in which processes end by themselves
QUICK_MINUTES, MINUTES = 1.5, 9.0  # drawing the page takes the rest of two and of ten


def expected_seconds(committed: Records) -> dict[str, float]:
    """What a full run of each benchmark has taken, by the committed records that say so; the longest of several."""
    return {
        name: max(seconds)
        for name, by_machine in committed.items()
        if (seconds := [record["seconds"] for record in by_machine.values() if "seconds" in record])
    }


def measure(
    *,
    quick: bool,
    names: Sequence[str] = ORDER,
    minutes: float | None = None,
    expected: Mapping[str, float] | None = None,
) -> dict[str, Record]:
    """Records by benchmark. Runs that would end late are not begun, and one that hangs is stopped; both are printed.

    Args:
        minutes: for all runs; by default what a page may take.
        expected: seconds of a full run, where they are known.
    """
    if minutes is None:
        minutes = QUICK_MINUTES if quick else MINUTES
    known = {} if quick or expected is None else expected
    deadline = time.monotonic() + 60 * minutes
    found: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names, start=1):
            left = deadline - time.monotonic()
            if left <= 0:
                _say(f"out of time: not measured are {', '.join(names[number - 1 :])}")
                break
            about = f", about {known[name]:.0f} s" if name in known else ""
            _say(f"[{number}/{len(names)}] {name}{about}, of {left:.0f} s left ...", end=" ")
            if known.get(name, 0) > left:
                _say("left out: it would end late")
                continue
            start, file = time.monotonic(), Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", "bench", name, "--json", str(file), *(["--quick"] if quick else [])]
            status, errors = _run(command, left)
            if status is None:
                _say("stopped: out of time")
                continue
            if status:
                _say(f"failed:\n{errors[-2000:]}")
                continue
            found[name] = json.loads(file.read_text())
            _say(f"{time.monotonic() - start:.0f} s")
    return found


def _run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit status of a command, and what it wrote to stderr.

    After so many seconds it is stopped with all processes that it has started, and the status is None.
    """
    with subprocess.Popen(
        command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=seconds)
            return process.returncode, errors
        except BaseException as error:
            for sign in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_GRACE)
            if isinstance(error, subprocess.TimeoutExpired):
                return None, ""
            raise


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
