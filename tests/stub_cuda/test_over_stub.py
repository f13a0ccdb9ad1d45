"""Runs, in processes that have the stub libcuda.so.1 on their path: the tests in inner/, and those of the library that
hold on any device.

By hand, for one of them:
    python -m tests.stub_cuda.test_over_stub tests/stub_cuda/inner/test_fences.py -k name
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stub_cuda
from tests.support.effort import effort
from tests.support.paths import ROOT
from tests.support.target import EXAMPLES
from tests.support.waiting import SECONDS

INNER = "tests/stub_cuda/inner"
LIBRARY = "tests/vattn"
# Each is a process. The library's tests count in pages of 4 KiB, and know nothing of CUDA's.
PARTS = {
    "driver": [
        f"{INNER}/test_{name}.py"
        for name in ("captures", "driver", "fences", "handles_and_peers", "preconditions", "reality", "vmm_stub")
    ],
    "calls": [
        f"{LIBRARY}/test_block_windows.py",
        f"{LIBRARY}/test_cache.py",
        *(f"{LIBRARY}/pool/test_{name}.py" for name in ("faults", "lent", "pool")),
        *(f"{LIBRARY}/slots/test_{name}.py" for name in ("contents", "sharing", "zero_on_free")),
        f"{INNER}/test_random_kernels.py",
        f"{LIBRARY}/windows/test_block_windows_machine.py",
        *(f"{LIBRARY}/slots/test_{name}.py" for name in ("sharing_machine", "state_machine")),
    ],
    "calls without read-only mappings": [f"{LIBRARY}/slots/test_{name}.py" for name in ("contents", "sharing")],
}


def run(arguments: list[str], **options: int) -> subprocess.CompletedProcess[str]:
    small = any(LIBRARY in argument or "test_random_kernels" in argument for argument in arguments)
    environment = stub_cuda.environment(**options, **({"granularity_log2": 12} if small else {"devices": 2}))
    if small:
        environment["VATTN_TEST_DEVICE"] = "cuda"
        environment.setdefault("VATTN_TEST_EXAMPLES", str(effort(10, EXAMPLES)))  # the host's run tries more
    options = ["-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=300"]  # which test hangs, if one does
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.skipif(not shutil.which("g++"), reason="the stub needs a C++ compiler (g++)")
@pytest.mark.slow(40)
@pytest.mark.parametrize("part", PARTS)
def test_over_the_stub(part: str) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed: pip install 'vattn[cuda]'")
    assert stub_cuda.ACTIVE not in os.environ, "already over the stub"
    done = run(PARTS[part], read_only=int("without" not in part))
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


def test_every_file_is_in_a_part() -> None:
    inner = {f"{INNER}/{path.name}" for path in Path(__file__).with_name("inner").glob("test_*.py")}
    assert inner <= {file for files in PARTS.values() for file in files}


if __name__ == "__main__":
    result = run(sys.argv[1:])
    print(result.stdout, result.stderr)
    sys.exit(result.returncode)
