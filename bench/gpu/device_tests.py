"""Files of tests/gpu as a part: the numbers of tests that passed, failed and were skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu.figures import OUT, Figures
from bench.gpu.lifetime import end_with
from bench.harness.report import Goal, Report

_ROOT = Path(__file__).parents[2]


def run(files: Sequence[str], *, at_once: int = 1) -> Report:
    """Runs the files one after another, each in a process: an access that poisons a context fails no other file.

    Args:
        at_once: so many tests of a file at a time, each in a process, if pytest-xdist is installed.
    """
    figures = Figures()
    for file in files:
        counts = _run(file, at_once)
        figures.append({"file": file, **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")}})
    return Report(
        parameters={},
        figures=figures,
        goals=[
            Goal("tests that failed", sum(int(row["failed"]) for row in figures), "==", 0),
            Goal("files without a test that passed", sum(row["passed"] == 0 for row in figures), "==", 0),
        ],
        timed=False,
    )


def _run(file: str, at_once: int) -> Counter[str]:
    results = Path(os.environ[OUT]) / f"{Path(file).stem}.xml"
    results.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        file,
        "-v",  # each test's name as it begins: that of a test that hangs is in the log
        "-rsfE",
        "-o",
        "faulthandler_timeout=45",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",  # it warns of processes side by side, and warnings are errors
        *(["-n", str(at_once)] if at_once > 1 and find_spec("xdist") else []),
        f"--junitxml={results}",
    ]
    # The tests decide for themselves what they run on; the stub is not it.
    environment = {key: value for key, value in os.environ.items() if key != "VATTN_STUB_CUDA"}
    paths = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if "stub_cuda" not in path)
    subprocess.run(command, cwd=_ROOT, env=environment, check=False, preexec_fn=partial(end_with, os.getpid()))
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase") if results.exists() else ():
        outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = outcomes.pop() if outcomes else "passed"
        counts["skipped" if outcome == "skipped" else "passed" if outcome == "passed" else "failed"] += 1
    if not counts:  # it did not get to its end
        counts["failed"] += 1
    return counts
