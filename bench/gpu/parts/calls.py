"""Latency of the driver's memory calls, per page and per range of pages, by page size.

Reproduces "driver call latencies" (Table 3), whose figures stand beside those of the smallest page. Every call is timed
by itself, from Python, which adds about a microsecond. A range is what a cache reserves, or gives access to, at once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import TypeVar

from bench.gpu.figures import Figures
from bench.gpu.raw import Calls
from bench.harness.report import Goal, Report

ABOUT = "latency of the driver's memory calls, per page and per range, by page size"
RANK = 3
SECONDS = 30

Result = TypeVar("Result")

# Microseconds for a page of 2 MiB, as the paper measured them.
PAPER = {
    "cuMemAddressReserve": 2,
    "cuMemCreate": 29,
    "cuMemMap": 2,
    "cuMemSetAccess": 38,
    "cuMemUnmap": 34,
    "cuMemRelease": 23,
    "cuMemAddressFree": 1,
}
_RANGE_BYTES = 2 * 2**30


def run(quick: bool) -> Report:
    calls = Calls()
    figures = Figures()
    for factor in (1, 2) if quick else (1, 2, 8, 32):
        page = factor * calls.granularity
        count = 4 if quick else min(256, _RANGE_BYTES // page)
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(2 if quick else 6):
            _one_range(calls, page, count, seconds)
            _one_range(calls, page, 1, seconds)
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


def _one_range(calls: Calls, page: int, count: int, seconds: dict[tuple[str, int], list[float]]) -> None:
    """Reserves a range, backs it page by page, and takes all of it down again; adds to `seconds` by call and pages."""

    def timed(name: str, pages: int, call: Callable[..., Result], *arguments: int) -> Result:
        start = time.perf_counter()
        result = call(*arguments)
        seconds[name, pages].append(time.perf_counter() - start)
        return result

    size = count * page
    base = timed("cuMemAddressReserve", count, calls.reserve, size, page)
    addresses = range(base, base + size, page)
    handles = [timed("cuMemCreate", 1, calls.create, page) for _ in addresses]
    for access_per_page in (True, False):
        for address, handle in zip(addresses, handles, strict=True):
            timed("cuMemMap", 1, calls.map, address, page, handle)
        if access_per_page:
            for address in addresses:
                timed("cuMemSetAccess", 1, calls.set_access, address, page)
        else:
            timed("cuMemSetAccess", count, calls.set_access, base, size)
        for address in addresses:
            timed("cuMemUnmap", 1, calls.unmap, address, page)
    for handle in handles:
        timed("cuMemRelease", 1, calls.release, handle)
    timed("cuMemAddressFree", count, calls.free, base, size)
