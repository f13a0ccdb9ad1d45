"""The clients that others measure servers with: vLLM's `bench serve`, and guidellm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import MODEL, Server

VLLM = os.environ.get("VATTN_VLLM_PYTHON")
needs_vllm = pytest.mark.skipif(VLLM is None, reason="VATTN_VLLM_PYTHON is not set")

# `vllm bench serve` without the rest of vLLM's command line, which imports its engine.
VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def vllm_bench(server: Server, folder: Path, *options: str) -> dict[str, Any]:
    """The JSON that it writes."""
    command = [str(VLLM), "-c", VLLM_BENCH, "--base-url", server.url, "--model", "tiny", "--tokenizer", MODEL]
    command += ["--dataset-name", "random", "--random-input-len", "60", "--random-output-len", "20", "--ignore-eos"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@needs_vllm
@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve(server: Server, tmp_path: Path, backend: str, endpoint: str) -> None:
    before = server.metric("vllm:generation_tokens_total")
    options = ["--backend", backend, "--endpoint", endpoint, "--num-prompts", "24", "--max-concurrency", "8"]
    found = vllm_bench(server, tmp_path, *options)
    assert (found["completed"], found["failed"]) == (24, 0)
    assert not any(found["errors"])
    assert found["output_lens"] == [20] * 24
    assert found["total_output_tokens"] == 480
    assert server.metric("vllm:generation_tokens_total") - before >= 480, "the first one is a trial"
    for name in ("ttft", "tpot", "itl"):
        assert 0 < found[f"median_{name}_ms"] <= found[f"p99_{name}_ms"]
    assert all(0 < len(gaps) <= 19 for gaps in found["itls"]), "a chunk has a token, or more where the client is late"


@needs_vllm
def test_vllm_bench_serve_at_a_rate(server: Server, tmp_path: Path) -> None:
    options = ["--backend", "vllm", "--num-prompts", "20", "--request-rate", "10", "--logprobs", "2"]
    found = vllm_bench(server, tmp_path, *options, "--goodput", "e2el:60000")
    assert found["completed"] == 20
    assert found["request_goodput"] > 0


@pytest.mark.parametrize(
    ("path", "profile"),
    [
        ("/v1/completions", "kind=concurrent,streams=4"),
        ("/v1/completions", "kind=poisson,rate=8"),
        ("/v1/chat/completions", "kind=throughput,max_concurrency=12"),
    ],
)
def test_guidellm(server: Server, tmp_path: Path, path: str, profile: str) -> None:
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console", "--profile", profile]
    command += ["--backend", f"kind=openai_http,target={server.url},request_format={path}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=60,output_tokens=20"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={MODEL}"]
    command += ["--constraint", "kind=max_requests,count=12", "--output", f"kind=json,path={tmp_path / 'result.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0)
    assert found["metrics"]["output_token_count"]["successful"]["mean"] == 20
