"""Runs of the benchmarks on this machine for a page: the most telling ones first, within a number of minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.harness.records import Record

_ROOT = Path(__file__).parents[2]

# In order of what they tell. Full runs of `threads`, `serving` and `throughput` take longer than a page may.
ORDER = (
    "decode",
    "cache",
    "overlap",
    "step",
    "fragmentation",
    "external",
    "kernels",
    "block_size",
    "table",
    "memory",
    "capacity",
    "backends",
    "prefix",
    "batching",
    "admission",
    "reserve",
    "blocks",
    "windows",
    "quantised",
    "mla",
    "speculate",
    "profile",
)
QUICK_MINUTES, MINUTES = 1.5, 9.0  # drawing the page takes the rest of two and of ten


def measure(*, quick: bool, names: tuple[str, ...] = ORDER, minutes: float | None = None) -> Mapping[str, Record]:
    """Records by benchmark. Runs that would end late are not begun, and one that hangs is stopped; both are printed.

    Args:
        minutes: for all runs; by default what a page may take.
    """
    if minutes is None:
        minutes = QUICK_MINUTES if quick else MINUTES
    deadline = time.monotonic() + 60 * minutes
    found: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names, start=1):
            left = deadline - time.monotonic()
            if left <= 0:
                print(f"out of time: not measured are {', '.join(names[number - 1 :])}", file=sys.stderr)
                break
            print(f"[{number}/{len(names)}] {name} ...", end=" ", file=sys.stderr, flush=True)
            start, file = time.monotonic(), Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", "bench", name, "--json", str(file), *(["--quick"] if quick else [])]
            try:
                done = subprocess.run(
                    command, cwd=_ROOT, env=os.environ, capture_output=True, text=True, check=False, timeout=left
                )
            except subprocess.TimeoutExpired:
                print("stopped: out of time", file=sys.stderr)
                continue
            if done.returncode:
                print(f"failed:\n{done.stderr[-2000:]}", file=sys.stderr)
                continue
            found[name] = json.loads(file.read_text())
            print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    return found
