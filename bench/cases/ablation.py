"""Each mechanism of the cache switched off alone, on one trace of requests.

Own result, beside the paper's of overlap (Fig. 10) and deferred reclamation (Fig. 11): requests that arrive at once,
with the log-normal lengths of the paper's trace `sample`, scaled down, and one beginning for all. Engines with the same
memory take turns:

    nothing        none: a K and a V tensor for all layers, everything else as by default
    overlap        nothing is mapped ahead by the worker
    deferred       ended requests leave no page mapped
    eager          no idle slot has pages for the next request
    stock          the worker creates no page before one is needed
    slicing        a K and a V tensor per layer: no tensor slicing, so a page covers four times as many tokens
    prefix         no prefix is found again
    everything     all of these at once

*on the path* are the calls that mapped a page while the engine waited: during an admission, or in a step that had to
wait for its memory.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.harness import theme
from bench.harness.critical_path import watching
from bench.harness.models import qwen2
from bench.harness.ratios import Comparison, Pair
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import turns
from bench.harness.trace import Arrival, log_normal, play
from bench.harness.traces import TRACES
from vattn.engine import LLM
from vattn.engine.scheduling.record import StepRecord

ABOUT = "each mechanism of the cache switched off alone, on one trace: throughput, p99 TPOT, map calls waited for"
QUESTION = "What does each mechanism bring?"

_MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
_LONGEST = 1024
_SLOTS = 8
_BUDGET = "28MiB"
_CACHE = {"page_size": 2**16, "layout": "sliced", "kv_order": "NHD"}
_OFF: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": False},
    "deferred": {"deferred_reclamation": False},
    "eager": {"eager_pages": 0},
    "stock": {"watermark": 0},
    "slicing": {"layout": "layer"},
    "prefix": {},
}
_NOTHING, _EVERYTHING = "nothing", "everything"
_NAMES = (_NOTHING, *_OFF, _EVERYTHING)
_SAYS = {
    "overlap": "overlap",
    "deferred": "deferred reclamation",
    "eager": "eager pages",
    "stock": "a stock of pages",
    "slicing": "tensor slicing",
    "prefix": "prefixes found again",
    _EVERYTHING: "all mechanisms",
}
_SHARED = 128  # tokens of the beginning
_DIVISORS = (32, 8)


def run(quick: bool) -> Report:
    sizes = _MODEL | ({"num_hidden_layers": 1, "vocab_size": 256} if quick else {})
    model = qwen2(**sizes)
    trace = TRACES[-1]
    count, rounds, names = (6, 1, (_NOTHING, "overlap", _EVERYTHING)) if quick else (12, 3, _NAMES)
    divisors = (256, 64) if quick else _DIVISORS
    arrivals = log_normal(
        trace.prompt,
        trace.output,
        count,
        sizes["vocab_size"],
        divisors=divisors,
        longest=_LONGEST,
        shared=[1] * _SHARED,
    )
    found: dict[str, list[Row]] = {name: [] for name in names}
    for number in range(0 if quick else -1, rounds):
        for name in turns(names, number):
            row = _play(model, name, arrivals)
            if number >= 0:
                found[name].append(row)

    figures: list[Row] = [
        {"off": name, **{column: median(float(row[column]) for row in each) for column in each[0]}}
        for name, each in found.items()
    ]
    rates = {name: [float(row["output tokens/s"]) for row in each] for name, each in found.items()}
    calls = {str(row["off"]): float(row["on the path"]) for row in figures}
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "trace": f"{trace.name}, prompts / {divisors[0]}, outputs / {divisors[1]}, seed 0",
            "requests": count,
            "tokens in common": _SHARED,
            "memory": _BUDGET,
            "rounds": rounds,
        },
        figures=figures,
        goals=[
            Goal(
                "map calls waited for, with everything over without anything",
                calls[_NOTHING] / max(1, calls[_EVERYTHING]),
                "<=",
                1,
            )
        ],
        series={f"{name}, output tokens/s": each for name, each in rates.items()},
    )


def _play(model: PreTrainedModel, name: str, arrivals: list[Arrival]) -> Row:
    options = dict(_CACHE)
    for mechanism, off in _OFF.items():
        if name in (mechanism, _EVERYTHING):
            options |= off
    steps: list[StepRecord] = []
    with LLM(
        model,
        skip_tokenizer_init=True,
        max_num_seqs=_SLOTS,
        max_model_len=_LONGEST,
        memory_budget=_BUDGET,
        enable_prefix_caching=name not in ("prefix", _EVERYTHING),
        num_threads=torch.get_num_threads(),
        kv_options=options,
        on_step=steps.append,
    ) as llm:
        before = llm.core.kv.stats().map_calls
        with watching(llm.core.kv) as waited:
            played = play(llm, arrivals)
        mapped = llm.core.kv.stats().map_calls - before
    summary = played.summary()
    used = sum(step.kv.used_bytes for step in steps)
    return {
        "output tokens/s": summary["output_throughput"],
        "median TPOT ms": summary["median_tpot_ms"],
        "p99 TPOT ms": summary["p99_tpot_ms"],
        "median TTFT ms": summary["median_ttft_ms"],
        "map calls": mapped,
        "on the path": waited.map_calls,
        "waited ms": 1e3 * waited.seconds,
        "preempted": sum(step.num_preempted for step in steps),
        "waste %": 100 * sum(step.kv.waste_bytes for step in steps) / used,
    }


def compare(record: Record) -> list[Comparison]:
    def pairs(name: str) -> tuple[Pair, ...]:
        above, below = f"{_NOTHING}, output tokens/s", f"{name}, output tokens/s"
        return tuple(
            (("series", above, number), ("series", below, number)) for number in range(len(record["series"][above]))
        )

    return [
        Comparison(
            f"With {_SAYS[name]}, the engine makes {{}} times as many tokens per second",
            record,
            pairs(name),
            of="rounds",
        )
        for row in record["figures"]
        if (name := row["off"]) != _NOTHING
    ]


def draw(axes: Any, record: Record) -> None:
    rows = {row["off"]: row for row in record["figures"]}
    names = {_NOTHING: "all mechanisms", **{name: f"without {said}" for name, said in _SAYS.items()}}
    theme.bars(axes, {names[name]: row["on the path"] for name, row in rows.items()}, [names[_NOTHING]], digits=0)
    whole, bare = rows[_NOTHING], rows[_EVERYTHING]
    axes.set_title(
        f"An engine waits for {whole['on the path']:,.0f} map calls instead of {bare['on the path']:,.0f}, and makes "
        f"{whole['output tokens/s'] / bare['output tokens/s']:.2f} times as many tokens per second"
    )
    axes.set(xlabel="map calls that the engine waited for")
