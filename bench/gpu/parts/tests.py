"""tests/gpu as a part: the numbers of tests that passed, failed and were skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu.parts import OUT
from bench.harness.report import Goal, Report, Row

ABOUT = "tests/gpu: the contract on the real driver, kernels, fences, graphs"
RANK = 1
SECONDS = 230

_ROOT = Path(__file__).parents[3]


def run(quick: bool) -> Report:
    file = Path(os.environ[OUT]) / "tests.xml"
    file.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-v",  # each test's name as it begins: that of a test that hangs is in the log
        "-rs",
        "-p",
        "no:cacheprovider",
        "-W",  # a warning of another version of torch must not fail a test here
        "default",
        f"--junitxml={file}",
    ]
    # The tests decide for themselves what they run on; the stub is not it.
    environment = {key: value for key, value in os.environ.items() if key != "VATTN_STUB_CUDA"}
    paths = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if "stub_cuda" not in path)
    status = subprocess.run(command, cwd=_ROOT, env=environment, check=False).returncode
    cases = list(ElementTree.parse(file).iter("testcase")) if file.exists() else []
    counts: Counter[tuple[str, str]] = Counter()
    for case in cases:
        outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
        counts[case.get("classname", ""), outcomes.pop() if outcomes else "passed"] += 1
    modules = sorted({module for module, _ in counts})
    figures: list[Row] = [
        {
            "module": module,
            "passed": counts[module, "passed"],
            "failed": counts[module, "failure"] + counts[module, "error"],
            "skipped": counts[module, "skipped"],
        }
        for module in modules
    ]
    failed = sum(int(row["failed"]) for row in figures)
    return Report(
        parameters={"exit status": status},
        figures=figures or [{"module": "none", "passed": 0, "failed": 0, "skipped": 0}],
        goals=[
            Goal("tests that failed", failed + (not cases), "==", 0),
            Goal("tests that passed", sum(int(row["passed"]) for row in figures), ">=", 1),
        ],
        timed=False,
    )
