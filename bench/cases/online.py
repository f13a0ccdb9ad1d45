"""Requests that arrive at random times, through every backend, in a memory that cannot hold all of them.

Reproduces "online latency" (Fig. 10 of the final version): requests with the log-normal lengths of the trace `long
online`, prompts divided by 64 and outputs by 8, arrive by a Poisson process, at 0.7 times the rate at which `virtual`
serves the same requests where all are there at once. Every backend gets the same requests at the same times. A request
counts for goodput if it waits at most ten times as long for its first token, and at most five times as long for each
further one, as the same kind of request takes alone. Queues amplify what a machine does besides, so backends take
turns, and figures are medians over the rounds.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.models import qwen2
from bench.harness.ratios import Comparison, by_round
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.served import BACKENDS, MODEL, SMALL, as_row, serve
from bench.harness.timing import turns
from bench.harness.trace import Arrival, Played, log_normal
from bench.harness.traces import TRACES

ABOUT = "requests with Poisson arrivals through every backend: latencies, goodput, preemptions"
QUESTION = "How long do requests wait that come at random times?"

_DIVISORS = (64, 8)
_LONGEST = 1536
_BUDGET = "12MiB"
_LOAD = 0.7
_OBJECTIVES = {"ttft": 10, "tpot": 5}  # times what a request takes alone


def run(quick: bool) -> Report:
    sizes = MODEL | (SMALL if quick else {})
    model = qwen2(**sizes)
    trace = TRACES[1]
    requests, rounds, divisors = (6, 1, (512, 64)) if quick else (48, 4, _DIVISORS)

    def arrivals(rate: float, count: int = requests) -> list[Arrival]:
        return log_normal(
            trace.prompt,
            trace.output,
            count,
            sizes["vocab_size"],
            divisors=divisors,
            rate=rate,
            longest=_LONGEST,
        )

    def through(kv: str, rate: float, count: int = requests) -> Played:
        return serve(model, kv, arrivals(rate, count), longest=_LONGEST, budget=_BUDGET)

    at_once = through("virtual", math.inf)
    rate = _LOAD * requests / at_once.seconds
    alone = as_row(through("virtual", math.inf, 1))
    objectives = {metric: times * float(alone[f"median {metric.upper()} ms"]) for metric, times in _OBJECTIVES.items()}
    served: dict[str, list[Played]] = {kv: [] for kv in BACKENDS}
    for number in range(rounds):
        for kv in turns(BACKENDS, number):
            served[kv].append(through(kv, rate))
    rows = {kv: [as_row(each, objectives) for each in played] for kv, played in served.items()}
    figures: list[Row] = [
        {"backend": kv, **{column: median(float(row[column]) for row in each) for column in each[0]}}
        for kv, each in rows.items()
    ]
    latencies = {kv: [timing.e2el for each in played for timing in each.timings] for kv, played in served.items()}
    medians = {kv: [float(row["median latency ms"]) for row in each] for kv, each in rows.items()}
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "trace": f"{trace.name}, prompts / {divisors[0]}, outputs / {divisors[1]}, seed 0",
            "requests": requests,
            "requests per second": round(rate, 3),
            "objectives, ms": {metric: round(ms, 1) for metric, ms in objectives.items()},
            "max_model_len": _LONGEST,
            "memory": _BUDGET,
            "rounds": rounds,
        },
        figures=figures,
        goals=[
            Goal(
                "median latency, virtual over paged (the paper's)",
                median(
                    float(a["median latency ms"]) / float(b["median latency ms"])
                    for a, b in zip(rows["virtual"], rows["paged"], strict=True)
                ),
                "<=",
                0.72,
            )
        ],
        series={f"{kv}, latency s": each for kv, each in latencies.items()}
        | {f"{kv}, median latency ms": each for kv, each in medians.items()},
    )


def compare(record: Record) -> list[Comparison]:
    # Requests of one round wait for each other, so a round counts once.
    names = {kv: f"{kv}, median latency ms" for kv in BACKENDS}
    return [
        Comparison(
            f"The median request takes {{}} times as long over `{kv}` as over `virtual`",
            record,
            by_round(record, names[kv], names["virtual"]),
            of="rounds",
        )
        for kv in BACKENDS
        if kv != "virtual"
    ]


def draw(axes: Any, record: Record) -> None:
    for kv in reversed(BACKENDS):
        found = sorted(record["series"][f"{kv}, latency s"])
        shares = [100 * (number + 1) / len(found) for number in range(len(found))]
        axes.plot(found, shares, **{**theme.style(kv), "marker": ""}, label=kv)
    rows = {row["backend"]: row for row in record["figures"]}
    virtual, paged, static = (rows[kv]["median latency ms"] / 1e3 for kv in ("virtual", "paged", "static"))
    axes.set_title(
        f"At {100 * _LOAD:.0f} % of the load, the median request takes {virtual:.2f} s over virtual, {paged:.2f} over "
        f"paged, {static:.2f} over static"
    )
    axes.set(xlabel="seconds from arrival to end", ylabel="% of the requests", ylim=(0, None))
