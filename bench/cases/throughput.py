"""Offline throughput: 32 requests that arrive at once, through every backend and through other engines.

Each engine runs in its own process; the engines take turns, round after round, so that other load on the machine
affects all of them. Ratios are medians over rounds of quotients within a round. After a few rounds with all engines,
those that are close to each other go on until the intervals of their ratios are narrow. Engines are tuned: each has the
best of the settings tried, which stand beside the chosen one.

`floor` is no engine: it repeats what vattn's cannot do without, the products of every step, and attention at the
machine's limit (`bench/peers/floor.py`).

vLLM's CPU build and llama.cpp need environments of their own; `VATTN_VLLM_PYTHON` and `VATTN_LLAMACPP_PYTHON` name
their interpreters. Without them they have no rows, and the parameters say so.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.harness import theme, vllm_cpu
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.ratios import Comparison, Pair, by_round, interval
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import turns
from bench.harness.workload import make_requests
from bench.peers import Peer, Workload

ABOUT = "offline throughput of every backend, of transformers, of vLLM and of llama.cpp"
QUESTION = "How long does a queue of requests take?"

# Prompt lengths; outputs have 16 to 128 tokens.
_SETS = {"short": (32, 512), "long": (1024, 3072)}
# Rounds with all engines, and rounds at most.
_ROUNDS = {"short": (3, 6), "long": (1, 3)}
# Those after the first ones: until the 95 % interval of each one's ratio to virtual is at most so wide.
_CLOSE, _WIDTH = ("paged", "vllm"), 0.04
# Seconds before a run: OpenMP's threads of the one before it may spin for as long.
_PAUSE = 0.5
_REQUESTS = 32
_MAX_MODEL_LEN = 4096
_BACKENDS = ("virtual", "paged", "static", "dynamic")
# Too slow to run in every round, and with the long prompts; their one round is compared with the round before.
_ONCE = ("generate_batch", "generate")


def run(quick: bool) -> Report:
    sizes = QWEN2 | (TINY if quick else {})
    count = 2 if quick else _REQUESTS
    sets = ["short"] if quick else list(_SETS)
    figures: list[Row] = []
    goals: list[Goal] = []
    series: dict[str, list[float]] = {}
    notes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = qwen2(**sizes)
        model.save_pretrained(directory)
        del model
        for name in sets:
            requests = make_requests(count, _SETS[name], sizes["vocab_size"])
            notes[f"KV of all tokens, {name}"] = f"{_kv_bytes(sizes, requests) / 2**20:.1f} MiB"
            seconds: dict[str, list[float]] = {}
            with ExitStack() as stack:
                peers = {}
                for key, arguments in _engines(name, quick):
                    peers[key] = stack.enter_context(Peer(*arguments[:2], Path(directory), *arguments[2:]))
                    notes[f"{key}, {name}"] = f"{peers[key].version}, {arguments[2]}"
                every = [key for key in peers if key not in _ONCE]
                least, most = (1, 1) if quick else _ROUNDS[name]
                for key in every:
                    peers[key].run(requests if key == "floor" else requests[:1])  # the floor learns what there is to do
                number = 0
                while number < least or (number < most and not _is_narrow(seconds)):
                    if number == least:
                        every = [key for key in every if key in ("virtual", "floor", *_CLOSE)]
                    for key in turns(every, number):
                        seconds.setdefault(key, []).append(_seconds(peers[key], requests))
                    number += 1
                for key in _ONCE:
                    if key in peers:
                        peers[key].run(requests[:1])
                        seconds[key] = [_seconds(peers[key], requests)]
            figures += [_row(name, key, requests, seconds) for key in seconds]
            goals += _goals(name, seconds)
            series |= {f"{key}, {name}, seconds": times for key, times in seconds.items()}
    for key, variable, package in (
        ("vllm", "VATTN_VLLM_PYTHON", "vllm-cpu"),
        ("llamacpp", "VATTN_LLAMACPP_PYTHON", "llama-cpp-python"),
    ):
        if variable not in os.environ:
            notes[key] = f"not measured: set {variable} to an interpreter that has {package}"
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "requests": count,
            "rounds": ", ".join(f"{name} {len(series[f'virtual, {name}, seconds'])}" for name in sets),
            **notes,
        },
        figures=figures,
        goals=goals,
        series=series,
    )


def _seconds(peer: Peer, requests: Workload) -> float:
    """How long an engine takes that computes all that is asked for."""
    time.sleep(_PAUSE)
    elapsed, tokens = peer.run(requests)
    assert tokens == sum(request["max_tokens"] for request in requests), f"{tokens} tokens"
    return elapsed


def _engines(workload: str, quick: bool) -> Iterator[tuple[str, tuple[str, str, dict[str, Any], dict[str, str]]]]:
    """Keys, and the arguments of `Peer` except the model."""
    ours = {
        "max_num_seqs": _REQUESTS,
        "max_num_batched_tokens": 2048,  # of 256, 512, 1024, 2048
        "max_model_len": _MAX_MODEL_LEN,
        "memory_budget": "1GiB",
    }
    for kv in _BACKENDS[:2] if quick else _BACKENDS:
        yield kv, (sys.executable, "vattn_engine", {"kv": kv, **ours}, {})
    yield "floor", (sys.executable, "floor", ours, {})
    llamacpp = os.environ.get("VATTN_LLAMACPP_PYTHON")
    if llamacpp is not None:
        context = {
            "n_ctx": _REQUESTS * _MAX_MODEL_LEN,
            "n_seq_max": _REQUESTS,  # of 8, 32
            "n_batch": 512,  # of 512, 2048
            "n_ubatch": 512,  # of 512, 2048
            "kv_unified": False,  # of False, True
            "type_k": "F16",  # of F16, BF16
            "type_v": "F16",
            "n_threads": torch.get_num_threads(),
            "n_threads_batch": torch.get_num_threads(),
        }
        yield "llamacpp", (llamacpp, "llamacpp", context, {})
    if quick:
        return
    vllm = os.environ.get("VATTN_VLLM_PYTHON")
    if vllm is not None:
        options = {
            "dtype": "bfloat16",
            "max_num_seqs": _REQUESTS,
            "max_num_batched_tokens": 1024,  # of 512, 1024, 2048, 4096
            "max_model_len": _MAX_MODEL_LEN,
        }
        yield "vllm", (vllm, "vllm_cpu", options, vllm_cpu.environment(vllm))
    if workload == "short":
        blocks = {"max_batch_tokens": 512, "page_size": 256, "num_blocks": 512}  # of 128, 512; pages of 16, 256
        yield "generate_batch", (sys.executable, "transformers_generate", {"batch": True, **blocks}, {})
        yield "generate", (sys.executable, "transformers_generate", {"batch": False}, {})


def _kv_bytes(sizes: dict[str, int], requests: Workload) -> int:
    """Bytes of all keys and values of the requests, which no engine holds at once."""
    tokens = sum(len(request["prompt_token_ids"]) + request["max_tokens"] for request in requests)
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    per_layer: int = 2 * sizes["num_key_value_heads"] * head_dim * tokens * torch.bfloat16.itemsize
    return sizes["num_hidden_layers"] * per_layer


def _ratios(seconds: dict[str, list[float]], key: str) -> list[float]:
    """Seconds of `key` over those of virtual in the same round; or in the last one, if `key` came after all rounds."""
    virtual = seconds["virtual"]
    of = virtual[-1:] if key in _ONCE else virtual
    return [a / b for a, b in zip(seconds[key], of, strict=False)]


def _ratio(seconds: dict[str, list[float]], key: str) -> float:
    return median(_ratios(seconds, key))


def _is_narrow(seconds: dict[str, list[float]]) -> bool:
    """Whether the ratios that are close are known well enough."""
    for key in _CLOSE:
        if key in seconds:
            ratios = _ratios(seconds, key)
            low, high = interval(ratios)
            if len(ratios) < 3 or high - low > _WIDTH:
                return False
    return True


def _row(name: str, key: str, requests: Workload, seconds: dict[str, list[float]]) -> Row:
    middle = median(seconds[key])
    return {
        "set": name,
        "engine": key,
        "seconds": middle,
        "fastest": min(seconds[key]),
        "slowest": max(seconds[key]),
        "output tokens/s": sum(request["max_tokens"] for request in requests) / middle,
        "all tokens/s": sum(request["max_tokens"] + len(request["prompt_token_ids"]) for request in requests) / middle,
        "over virtual": _ratio(seconds, key),
    }


def _goals(name: str, seconds: dict[str, list[float]]) -> list[Goal]:
    long = name == "long"
    bounds = {"paged": 1.3 if long else 1.0, "static": 0.97, "dynamic": 2.0, "vllm": 1.25 if long else 1.15}
    bounds |= {"generate_batch": 3.0, "generate": 4.0}
    return [
        *(
            Goal(f"{key} over virtual, {name}", _ratio(seconds, key), ">=", bound)
            for key, bound in bounds.items()
            if key in seconds
        ),
        Goal(f"virtual over its floor, {name}", 1 / _ratio(seconds, "floor"), "<=", 1.18),
    ]


def compare(record: Record) -> list[Comparison]:
    says = {
        "paged": "vattn's engine over `paged` takes {} times as long as over `virtual`",
        "static": "Over `static` it takes {} times as long",
        "dynamic": "Over `dynamic` it takes {} times as long",
        "vllm": "vLLM's CPU build takes {} times as long",
        "llamacpp": "llama.cpp takes {} times as long",
        "generate_batch": "transformers' `generate_batch` takes {} times as long",
        "generate": "transformers' `generate`, one request after another, takes {} times as long",
    }
    share = "Matrix products alone, with attention at the machine's roofline, would take {} of the engine's time"
    found = []
    for engine, text in (*says.items(), ("floor", share)):
        for name in _SETS:
            says_so, limit = f"{text}, {name} prompts", engine == "floor"
            found.append(Comparison(says_so, record, _rounds(record, engine, name), of="rounds", is_limit=limit))
    return [comparison for comparison in found if comparison.pairs]


def _rounds(record: Record, engine: str, workload: str) -> tuple[Pair, ...]:
    """The seconds of an engine, and of virtual in the same round; in the last one if it came after all."""
    above, below = f"{engine}, {workload}, seconds", f"virtual, {workload}, seconds"
    if above not in record["series"]:
        return ()
    if engine in _ONCE:
        return ((("series", above, 0), ("series", below, len(record["series"][below]) - 1)),)
    return by_round(record, above, below)


def draw(axes: Any, record: Record) -> None:
    names = {
        "virtual": "vattn, virtual",
        "paged": "vattn, paged",
        "static": "vattn, static",
        "dynamic": "vattn, dynamic",
        "vllm": "vLLM (CPU build)",
        "llamacpp": "llama.cpp",
        "generate_batch": "transformers, generate_batch",
        "generate": "transformers, generate",
        "floor": "vattn's products, and memory",
    }
    rows = [row for row in record["figures"] if row["set"] == "short"]
    seconds = {names[row["engine"]]: row["seconds"] for row in rows}
    theme.bars(axes, seconds, ["vattn, virtual"])
    times = {row["engine"]: theme.number(row["seconds"]) for row in rows}
    short = {"vllm": "vLLM", "llamacpp": "llama.cpp", "generate": "generate()"}
    others = [f"{name} {times[key]}" for key, name in short.items() if key in times]
    axes.set_title(
        f"{record['parameters']['requests']} short requests: vattn takes {times['virtual']} s, {', '.join(others)}"
    )
    axes.set(xlabel="seconds; less is better")
