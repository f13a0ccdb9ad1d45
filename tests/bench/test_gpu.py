"""The GPU's measurements without a GPU: over the stub driver, to their end; a part that fails costs no other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.harness.discovery import Case

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: bench/gpu.sh measures it")
@pytest.mark.skipif(not shutil.which("g++"), reason="the stub needs a C++ compiler (g++)")
def test_parts_run_over_the_stub(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed: pip install 'vattn[cuda]'")
    command = [sys.executable, "-m", "bench.gpu", "--quick", "--out", str(tmp_path), "strides", "attention"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "means nothing" in done.stdout.splitlines()[-2]
    strides, attention = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("strides", "attention"))
    assert (strides["stub"], strides["goals"][0]["met"]) == (True, True)
    assert attention == {"name": "attention", "skipped": "it computes, and there is no GPU"}


def test_parts_are_found_in_the_order_of_their_ranks() -> None:
    parts = gpu.find_parts()
    assert parts.keys() == {path.stem for path in (ROOT / "bench" / "gpu" / "parts").glob("[!_]*.py")}
    ranks = [part.constants["RANK"] for part in parts.values()]
    assert ranks == sorted(set(ranks)), "two parts have one rank"


@pytest.mark.parametrize(("limit", "failure"), [(0, "no time was left"), (30, "the process ended with 2")])
def test_a_part_that_fails_leaves_a_record(tmp_path: Path, limit: float, failure: str) -> None:
    part = Case("nothing", "bench.gpu.parts.nothing", {"ABOUT": "a part that does not exist"}, None)
    file = tmp_path / "nothing.json"
    record = gpu._run_apart(part, True, file, limit, {"PATH": ""})
    assert record == json.loads(file.read_text()) == {"name": "nothing", "failed": failure}
    row = gpu._summary("nothing", record, 1.0)[0]
    assert row["goal"] == f"failed: {failure}"
