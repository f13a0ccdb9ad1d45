"""The cost of a short request by the number of slots: admit, one step, free.

Own result: choosing an idle slot looks at only a few of them, however many there are. Caches of all sizes exist at once
and take turns; each is measured before any slot was used, and again when all slots hold parked pages of old requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

import vattn
from bench.harness import theme
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave

ABOUT = "time to admit, step and free a short request, by the number of slots"
QUESTION = "Does admitting a request cost more with more slots?"

_PROMPT = list(range(8))
_BATCH = 20  # requests per measured call


def run(quick: bool) -> Report:
    sizes = [8, 512] if quick else [8, 64, 512, 4096]
    rounds = 10 if quick else 60
    figures: list[Row] = []
    with ExitStack() as stack:
        caches = {slots: stack.enter_context(_cache(slots)) for slots in sizes}
        requests: dict[int, Callable[[], None]] = {slots: _requests(cache) for slots, cache in caches.items()}
        fresh = interleave(requests, rounds, warmup=2)
        for cache in caches.values():
            reqids = [cache.admit([token])[0] for token in range(cache.layout.slots)]
            cache.step(dict.fromkeys(reqids, 1))
            for reqid in reqids:
                cache.free_reqid(reqid)
        parked = interleave(requests, rounds, warmup=2)
        for slots in sizes:
            figures.append(
                {
                    "slots": slots,
                    "never used us": 1e6 * median(fresh[slots]) / _BATCH,
                    "with parked pages us": 1e6 * median(parked[slots]) / _BATCH,
                }
            )
    times = [float(row[column]) for row in figures for column in ("never used us", "with parked pages us")]
    return Report(
        parameters={"prompt_tokens": len(_PROMPT), "rounds": rounds, "layers": 5},
        figures=figures,
        goals=[
            Goal("slowest over fastest, by slots and by what they hold", max(times) / min(times), "<=", 1.3),
            Goal("slowest, in us", max(times), "<=", 60),
        ],
    )


def _cache(slots: int) -> vattn.KVCache:
    return vattn.KVCache(
        vattn.KVConfig(
            num_layers=5,
            num_kv_heads=2,
            head_dim=32,
            dtype=torch.float32,
            max_batch_size=slots,
            max_context_len=2048,
            memory_budget="512MiB",
            page_size=4096,
            layout="fused",
        )
    )


def _requests(cache: vattn.KVCache) -> Callable[[], None]:
    def serve() -> None:
        for _ in range(_BATCH):
            reqid, _ = cache.admit(_PROMPT)
            cache.step({reqid: len(_PROMPT)})
            cache.free_reqid(reqid)

    return serve


def compare(record: Record) -> list[Comparison]:
    most, fewest = (pick(row["slots"] for row in record["figures"]) for pick in (max, min))
    return [
        Comparison(
            f"With {most:,} slots, admitting a short request takes {{}} times as long as with {fewest:,}",
            record,
            tuple(
                pair
                for column in ("never used us", "with parked pages us")
                for pair in rows(record, column, {"slots": most}, {"slots": fewest})
            ),
            higher_is_better=False,
        )
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    slots = [row["slots"] for row in rows]
    columns = {"never used us": "slots that were never used", "with parked pages us": "slots with parked pages"}
    for (column, label), name in zip(columns.items(), ("virtual", "paged"), strict=True):
        axes.plot(slots, [row[column] for row in rows], **theme.style(name), label=label)
    times = [row[column] for row in rows for column in columns]
    axes.set_title(
        f"Admitting a short request takes {min(times):.0f} to {max(times):.0f} us, "
        f"with {slots[0]} slots as with {slots[-1]:,}"
    )
    axes.set(xlabel="slots of the cache", ylabel="microseconds per request", ylim=(0, 1.2 * max(times)))
    theme.doublings(axes, slots)
