"""The cost of a batch that waits for its slowest request: wasted slots, and latency of the short requests.

Reproduces the classic "waste demo" (steps needed and wasted per prompt: 95 and 87 % of the steps of short answers)
and "static against continuous latency" (short prompts answered 15 to 36 times sooner, long ones 0.4 to 1.2 times) on
one engine, over the demo's queue. Our static batching computes no padding, so it does not slow long requests down; it
wastes slots: the steps for which a slot is kept after its request has ended.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from bench.demo_queue import MAX_TOKENS, Pass, Queue, run_queue
from bench.harness import theme
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave

ABOUT = "static against continuous batching: waste per request, latency of short ones behind long ones"
QUESTION = "What does waiting for the slowest request cost?"

_SLOTS = 4
_SCHEDULING = ("static", "continuous")


def run(quick: bool) -> Report:
    queue = Queue.load()
    max_tokens = MAX_TOKENS
    if quick:
        queue, max_tokens = queue.first(6), 40
    passes: dict[str, list[Pass]] = {name: [] for name in _SCHEDULING}

    def once(name: str) -> None:
        options = {"kv": "virtual", "scheduling": name, "max_num_seqs": _SLOTS, "max_num_batched_tokens": 256}
        passes[name].append(run_queue(queue, max_tokens=max_tokens, **options))

    interleave({name: partial(once, name) for name in _SCHEDULING}, 1 if quick else 5, warmup=0)

    static, continuous = (passes[name][-1] for name in _SCHEDULING)
    assert static.output_tokens == continuous.output_tokens, "the scheduling changed an answer"
    latency = {
        name: [median(_latency(each, index) for each in runs) for index in range(len(queue.texts))]
        for name, runs in passes.items()
    }
    first = {
        name: [median(_first_token(each, index) for each in runs) for index in range(len(queue.texts))]
        for name, runs in passes.items()
    }
    figures: list[Row] = []
    for index, tokens in enumerate(static.output_tokens):
        idle = static.idle_steps[index]
        slow, fast = (1e3 * latency[name][index] for name in _SCHEDULING)
        figures.append(
            {
                "prompt": queue.title(index),
                "output tokens": tokens,
                "idle steps": idle,
                "waste %": 100 * idle / (idle + tokens),
                "static ms": slow,
                "continuous ms": fast,
                "speedup": slow / fast,
                **{f"{name} TTFT ms": 1e3 * first[name][index] for name in _SCHEDULING},
            }
        )

    by_length = sorted(figures, key=lambda row: row["output tokens"])
    short = by_length[: len(by_length) // 2]
    seconds = {name: median(p.seconds for p in runs) for name, runs in passes.items()}
    return Report(
        parameters={
            "model": "demo/model, float32, one thread",
            "slots": _SLOTS,
            "runs of each": len(passes["static"]),
            "steps": {name: len(passes[name][-1].records) for name in _SCHEDULING},
            "slots that gave a token, share": {name: round(_slot_use(passes[name][-1]), 3) for name in _SCHEDULING},
            "peak MiB held": {
                name: round(max(step.kv.used_bytes for step in passes[name][-1].records) / 2**20, 2)
                for name in _SCHEDULING
            },
            "seconds for the queue": {name: round(value, 3) for name, value in seconds.items()},
        },
        figures=figures,
        goals=[
            Goal(
                "static: waste % of the shorter half of the requests, median",
                median(float(row["waste %"]) for row in short),
                ">=",
                75,
            ),
            Goal(
                "static over continuous, latency of the shorter half, median",
                median(float(row["speedup"]) for row in short),
                ">=",
                1.5,
            ),
            Goal("static over continuous, the whole queue", seconds["static"] / seconds["continuous"], ">=", 1.0),
            Goal(
                "continuous over static, share of slots that gave a token",
                _slot_use(continuous) / _slot_use(static),
                ">=",
                1.5,
            ),
        ],
    )


def _latency(run: Pass, index: int) -> float:
    latency = run.outputs[index].metrics.latency
    assert latency is not None
    return latency


def _first_token(run: Pass, index: int) -> float:
    seconds = run.outputs[index].metrics.time_to_first_token
    assert seconds is not None
    return seconds


def _slot_use(run: Pass) -> float:
    return sum(run.output_tokens) / (_SLOTS * len(run.records))


def compare(record: Record) -> list[Comparison]:
    middle = median(row["output tokens"] for row in record["figures"])
    return [
        Comparison(
            "With static batching, the shorter half of the requests takes {} times as long",
            record,
            columns(record, "static ms", "continuous ms", where=lambda row: row["output tokens"] <= middle),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    tokens = [row["output tokens"] for row in rows]
    for scheduling, name in (("static", "static"), ("continuous", "virtual")):
        style = {**theme.style(name), "linestyle": ""}
        axes.plot(tokens, [row[f"{scheduling} ms"] for row in rows], **style, label=f"{scheduling} batching")
    earlier = sum(row["continuous ms"] < row["static ms"] for row in rows)
    faster = median(row["static ms"] / row["continuous ms"] for row in rows)
    axes.set_title(
        f"Continuous batching ends {earlier} of {len(rows)} requests earlier; the median request takes "
        f"{100 / faster:.0f} % of its time"
    )
    axes.set(xscale="log", xlabel="output tokens of a request", ylabel="milliseconds from arrival to end")
    axes.set_ylim(0, None)
    ticks = [tick for tick in (5, 10, 20, 50, 100, 200, 500) if min(tokens) <= tick <= max(tokens)] or tokens
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
