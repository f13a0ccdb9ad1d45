"""A queue of long requests through every backend, in a memory that cannot hold them all.

Reproduces "offline throughput" (Fig. 9 of the final version): requests with the log-normal lengths of the trace `long
offline`, prompts divided by 64 and outputs by 8, all there at once. A backend that wastes less of its memory runs more
of them at a time; one that runs short preempts. Backends take turns, round after round.
"""

from __future__ import annotations

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
from bench.harness.trace import log_normal
from bench.harness.traces import TRACES

ABOUT = "a queue of long requests through every backend, in a memory that cannot hold them all"
QUESTION = "How long does a queue of long requests take over each backend?"

_DIVISORS = (64, 8)
_LONGEST = 3072
_BUDGET = "24MiB"


def run(quick: bool) -> Report:
    sizes = MODEL | (SMALL if quick else {})
    model = qwen2(**sizes)
    trace = TRACES[0]
    requests, rounds, divisors = (4, 1, (1024, 64)) if quick else (16, 8, _DIVISORS)
    arrivals = log_normal(
        trace.prompt, trace.output, requests, sizes["vocab_size"], divisors=divisors, longest=_LONGEST
    )
    rows: dict[str, list[Row]] = {kv: [] for kv in BACKENDS}
    for number in range(rounds):
        for kv in turns(BACKENDS, number):
            rows[kv].append(as_row(serve(model, kv, arrivals, longest=_LONGEST, budget=_BUDGET)))
    rates = {kv: [float(row["output tokens/s"]) for row in each] for kv, each in rows.items()}
    figures: list[Row] = [
        {
            "backend": kv,
            **{column: median(float(row[column]) for row in each) for column in each[0]},
            "virtual over it": median(a / b for a, b in zip(rates["virtual"], rates[kv], strict=True)),
        }
        for kv, each in rows.items()
    ]
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "trace": f"{trace.name}, prompts / {divisors[0]}, outputs / {divisors[1]}, seed 0",
            "requests": requests,
            "prompt tokens": sum(len(arrival.prompt) for arrival in arrivals),
            "output tokens": sum(arrival.output for arrival in arrivals),
            "max_model_len": _LONGEST,
            "memory": _BUDGET,
            "rounds": rounds,
        },
        figures=figures,
        goals=[
            Goal("output tokens/s, virtual over paged (the paper's)", float(figures[1]["virtual over it"]), ">=", 1.13)
        ],
        series={f"{kv}, output tokens/s": each for kv, each in rates.items()},
    )


def compare(record: Record) -> list[Comparison]:
    names = {kv: f"{kv}, output tokens/s" for kv in BACKENDS}
    return [
        Comparison(
            f"`virtual` makes {{}} times as many tokens per second of a queue of long requests as `{kv}`",
            record,
            by_round(record, names["virtual"], names[kv]),
            of="rounds",
        )
        for kv in BACKENDS
        if kv != "virtual"
    ]


def draw(axes: Any, record: Record) -> None:
    rows = {row["backend"]: row for row in record["figures"]}
    theme.bars(axes, {kv: row["output tokens/s"] for kv, row in rows.items()}, ["virtual"])
    budget = record["parameters"]["memory"]
    running = {kv: f"{row['most running']:.0f}" for kv, row in rows.items()}
    paged = theme.more_time(rows["paged"]["virtual over it"])
    axes.set_title(
        f"In {budget}, virtual runs up to {running['virtual']} long requests at a time, static {running['static']}; "
        f"over paged, a queue takes {paged}"
    )
    axes.set_xlabel("output tokens per second; more is better")
