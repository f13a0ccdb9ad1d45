"""compute-sanitizer's memcheck over the cache's device tests: accesses outside of what is mapped and allocated.

CUDA's toolkit has it. Over the stub the tests only start, and are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from bench.gpu.device import STUB
from bench.gpu.figures import MISSING, OUT
from bench.gpu.lifetime import end_with
from bench.harness.report import Goal, Report

ABOUT = "compute-sanitizer over the cache's device tests"
RANK = 20
SECONDS = 60

_ROOT = Path(__file__).parents[3]
_TESTS = "tests/gpu/test_cache_device.py"
_PYTEST = """
import os, sys
from bench.gpu.lifetime import end_with
end_with(os.getppid())  # the tool, which would leave it running
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def run(quick: bool) -> Report:
    tool = _find()
    missing = [] if tool or STUB else ["compute-sanitizer: it is neither on PATH nor in CUDA_HOME or /usr/local/cuda"]
    errors, passed, output = -1, 0, ""
    if not missing:
        log = Path(os.environ.get(OUT, ".")) / "sanitizer.txt"
        # Not calls of the API that fail: `check()` asks on purpose about pages that are not mapped.
        options = [tool, "--tool", "memcheck", "--report-api-errors", "no"] if tool else []
        options += ["--error-exitcode", "9", "--log-file", str(log)] if tool else []
        tests = [sys.executable, "-c", _PYTEST, _TESTS, "-q", "-p", "no:cacheprovider", "-W", "default"]
        command = [*options, *tests, *(["-k", "growth"] if quick else [])]
        done = subprocess.run(
            command,
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            preexec_fn=partial(end_with, os.getpid()),
        )
        output = done.stdout
        print(output)
        found = re.search(r"ERROR SUMMARY: (\d+) error", log.read_text() if log.exists() else "")
        errors = int(found[1]) if found else -1
        counted = re.search(r"(\d+) passed", output)
        passed = int(counted[1]) if counted else 0
    return Report(
        parameters={"tool": tool or "none", "tests": _TESTS, MISSING: missing},
        figures=[{"tests passed": passed, "errors": errors, "last line": (output.splitlines() or ["-"])[-1]}],
        goals=[
            Goal("errors that memcheck finds (-1: it did not end)", errors, "==", 0),
            Goal("device tests that pass under it", passed, ">=", 1),
        ],
        timed=False,
    )


def _find() -> str | None:
    if STUB:  # nothing to check
        return None
    toolkit = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), toolkit]))
