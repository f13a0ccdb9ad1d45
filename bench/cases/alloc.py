"""Latency of each driver call, and the rate at which a cache gets memory, by page size and layout, on the host.

Reproduces "driver call latencies" (Table 3) and "allocation bandwidth" (Table 7/9), over Linux memory. Rows without a
layout are calls for one page each, made from Python, which adds about a microsecond; medians. The others are caches of
Llama-3-8B's shape with four slots that all need memory in one step, and the means per page of the calls that the caches
made for it (per tensor, of reserving). They set access to, and unmap, neighbouring pages at once. The rates are of

    caller   memory new from the system, on the thread of the step (`overlap=False`)
    reused   pages that ended requests left in the pool, on the thread of the step; the paper's are made in advance, too
    worker   memory new from the system, by the worker, while the step waits
    ahead    the same, but the worker was told in the step before; from that step to the end of the next

To create a page takes time in proportion to its size, because the system clears it. What serving asks for at most is
0.75 GB/s in the paper; `demand` measures it here.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

from bench.harness import allocation, theme
from bench.harness.driver_calls import MemoryCalls, time_range
from bench.harness.ratios import Comparison, columns, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from vattn import KVCache, KVConfig, _native
from vattn.stats import CallStats

ABOUT = "latency of the driver's calls and allocation bandwidth on the host, by page size and layout"
QUESTION = "How fast is memory allocated?"

_KIB = 2**10
_LAYOUTS = ("layer", "sliced", "fused")
_RATES = ("caller", "reused", "worker", "ahead")
_CALLS = {
    "cuMemAddressReserve": "reserve us",
    "cuMemCreate": "create us",
    "cuMemMap": "map us",
    "cuMemSetAccess": "set access us",
    "cuMemUnmap": "unmap us",
    "cuMemRelease": "release us",
    "cuMemAddressFree": "free us",
}
_SLOTS = 4
_MODEL: dict[str, Any] = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
_TOKEN_BYTES = 128 * _KIB
# MiB of a cache, by KiB of a page: at 2 MiB the least with which every tensor of the coarsest layout has a page in
# every slot, at 4 KiB well below the 65,530 mappings that Linux allows a process.
_MIB = {4: 32, 64: 256, 256: 256, 2048: 512}
# GB/s, by KiB of a page, and the most that serving asks for; all as published.
_RATES_OF_PAPER = {64: 7.6, 2048: 35.0}
_ASKED = 0.75


def run(quick: bool) -> Report:
    rounds = 1 if quick else 3
    sizes = {64: 64, 256: 64} if quick else _MIB
    figures: list[Row] = []
    for kib, mib in sizes.items():
        figures.append(_single_calls(kib, rounds))
        figures += [_cache(layout, kib, mib * 2**20, rounds) for layout in _LAYOUTS]
    return Report(
        parameters={
            "model": "Llama-3-8B, bfloat16",
            "slots": _SLOTS,
            "rounds": rounds,
            "MiB per step": {str(kib): mib for kib, mib in sizes.items()},
        },
        figures=figures,
        goals=[
            *(
                Goal(
                    f"pages of {kib} KiB in the pool, GB/s, slowest layout",
                    _slowest(figures, kib, "reused"),
                    ">=",
                    rate,
                )
                for kib, rate in _RATES_OF_PAPER.items()
                if kib in sizes
            ),
            *(
                Goal(
                    f"new memory ahead, GB/s, slowest layout, {kib} KiB", _slowest(figures, kib, "ahead"), ">=", _ASKED
                )
                for kib in _RATES_OF_PAPER
                if kib in sizes
            ),
        ],
    )


def _slowest(figures: list[Row], kib: int, by: str) -> float:
    return min(float(row[f"{by} GB/s"]) for row in figures if row["page KiB"] == kib and row["layout"] != "-")


def _single_calls(kib: int, rounds: int) -> Row:
    page = kib * _KIB
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    calls = MemoryCalls(_native.host_table(), _native.host_prop(page))
    for number in range(16 * rounds + 1):
        if number == 1:  # the first made the file
            seconds.clear()
        time_range(calls, page, 8, seconds)
        time_range(calls, page, 1, seconds)
    return {
        "page KiB": kib,
        "layout": "-",
        **{column: 1e6 * median(seconds[name, 1]) for name, column in _CALLS.items()},
        **{f"{by} GB/s": "-" for by in _RATES},
    }


def _cache(layout: str, kib: int, size: int, rounds: int) -> Row:
    length = size // _TOKEN_BYTES // _SLOTS
    rates: dict[str, list[float]] = {by: [] for by in _RATES}
    made: dict[str, CallStats] = {}
    per: dict[str, int] = {}
    for overlap in (False, True):
        config = KVConfig.from_options(
            **_MODEL,
            dtype="bfloat16",
            max_batch_size=_SLOTS,
            max_context_len=131_072,
            memory_budget=size,
            page_size=kib * _KIB,
            layout=layout,
            kv_order="NHD",
            overlap=overlap,
            deferred_reclamation=False,
            eager_pages=0,
            watermark=0,
        )
        with KVCache(config) as cache:
            for number in range(0 if rounds == 1 else -1, rounds):
                measured = (
                    {"worker": allocation.in_the_step(cache, length)}
                    if overlap
                    else {
                        "caller": allocation.in_the_step(cache, length),
                        "reused": allocation.in_the_step(cache, length),
                    }
                )
                cache.trim()
                if overlap:
                    measured["ahead"] = allocation.ahead(cache, length)
                    cache.trim()
                if number >= 0:
                    for by, row in measured.items():
                        rates[by].append(float(row["GB/s"]))
            if not overlap:
                made = cache.stats().calls
                per = {name: calls.count for name, calls in made.items()}
                per["cuMemSetAccess"] = per["cuMemUnmap"] = per["cuMemMap"]
    return {
        "page KiB": kib,
        "layout": layout,
        **{column: 1e6 * made[name].seconds / per[name] if per.get(name) else "-" for name, column in _CALLS.items()},
        **{f"{by} GB/s": median(found) for by, found in rates.items()},
    }


def compare(record: Record) -> list[Comparison]:
    small, large = 64, max(row["page KiB"] for row in record["figures"])
    return [
        Comparison(
            f"With pages of {large} KiB, memory comes {{}} times as fast as with pages of {small}",
            record,
            rows(record, "ahead GB/s", {"page KiB": large}, {"page KiB": small}, same=["layout"]),
        ),
        Comparison(
            "Memory comes {} times as fast ahead, from the worker, as in the step",
            record,
            columns(record, "ahead GB/s", "caller GB/s"),
        ),
    ]


def draw(axes: Any, record: Record) -> None:
    styles = dict(zip(_LAYOUTS, ("virtual", "other", "dynamic"), strict=True))
    figures = [row for row in record["figures"] if row["layout"] != "-"]
    sizes = sorted({row["page KiB"] for row in figures})
    for layout, name in styles.items():
        found = [row["ahead GB/s"] for row in figures if row["layout"] == layout]
        axes.plot(sizes, found, **theme.style(name), label=f"layout {layout}")
    theme.reference(axes, "the most that serving asks for, in the paper", _ASKED)
    least = [min(row["ahead GB/s"] for row in figures if row["page KiB"] == size) for size in (64, sizes[-1])]
    axes.set_title(
        f"The worker allocates {least[0]:.1f} GB/s in pages of 64 KiB and {least[1]:.1f} in pages of "
        f"{sizes[-1]} KiB, with the slowest layout"
    )
    axes.set(xlabel="KiB per page", ylabel="GB/s of new memory", yscale="log")
    theme.doublings(axes, sizes)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
