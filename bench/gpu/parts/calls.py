"""Latency of the driver's memory calls, per page and per range of pages, by page size.

Reproduces "driver call latencies" (Table 3), whose figures stand beside those of the smallest page. Every call is timed
by itself, from Python, which adds about a microsecond. A range is what a cache reserves, or gives access to, at once.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from bench.gpu.figures import Figures
from bench.gpu.raw import Calls
from bench.harness.driver_calls import PAPER, time_range
from bench.harness.report import Goal, Report

ABOUT = "latency of the driver's memory calls, per page and per range, by page size"
RANK = 3
SECONDS = 20

_RANGE_BYTES = 2 * 2**30


def run(quick: bool) -> Report:
    calls = Calls()
    figures = Figures()
    for factor in (1, 2) if quick else (1, 2, 8, 32):
        page = factor * calls.granularity
        count = 4 if quick else min(256, _RANGE_BYTES // page)
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(2 if quick else 6):
            time_range(calls, page, count, seconds)
            time_range(calls, page, 1, seconds)
        for (name, pages), measured in seconds.items():
            middle = 1e6 * median(measured)
            figures.append(
                {
                    "page MiB": page / 2**20,
                    "call": name,
                    "pages per call": pages,
                    "calls": len(measured),
                    "us per call": middle,
                    "us per page": middle / pages,
                    "slowest us": 1e6 * max(measured),
                    "paper us": PAPER[name] if pages == factor == 1 else "-",
                }
            )
    return Report(
        parameters={"granularity": calls.granularity},
        figures=figures,
        goals=[
            Goal(f"{row['call']} of one page, us (the paper's as bound)", float(row["us per call"]), "<=", bound)
            for name, bound in PAPER.items()
            for row in figures
            if row["call"] == name and row["paper us"] != "-"
        ],
    )
