"""Runs, in processes that have the stub libcuda.so.1 on their path: the tests in inner/, and those of the library that
hold on any device.

By hand, for one of them: python tests/stub_cuda/test_over_stub.py tests/stub_cuda/inner/test_fences.py -k name
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stub

INNER = sorted(path.name for path in Path(__file__).with_name("inner").glob("test_*.py"))
LIBRARY = [
    "test_cache.py",
    "memory/test_contents.py",
    "memory/test_faults.py",
    "memory/test_pool.py",
    "memory/test_sharing.py",
    "memory/test_sharing_machine.py",
    "memory/test_state_machine.py",
    "memory/test_zero_on_free.py",
]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    # The library's tests count in pages of 4 KiB, and know nothing of CUDA's.
    small = any("tests/vattn" in argument or "test_random_kernels" in argument for argument in arguments)
    environment = stub.environment(granularity_log2=12) if small else stub.environment(devices=2)
    if small:
        environment["VATTN_TEST_DEVICE"] = "cuda"
    options = ["-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]  # which test hangs, if one does
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return subprocess.run(command, env=environment, cwd=stub.ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not shutil.which("g++"), reason="the stub needs a C++ compiler (g++)")
@pytest.mark.parametrize(
    "file", [f"tests/stub_cuda/inner/{name}" for name in INNER] + [f"tests/vattn/{name}" for name in LIBRARY]
)
def test_over_the_stub(file: str) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed: pip install 'vattn[cuda]'")
    assert stub.ACTIVE not in os.environ, "already over the stub"
    done = run([file])
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


if __name__ == "__main__":
    result = run(sys.argv[1:])
    print(result.stdout, result.stderr)
    sys.exit(result.returncode)
