"""Latency of the driver's calls, and the bandwidth at which steps allocate memory, with pages of 2 MiB by layout.

Reproduces "driver call latencies" (Table 3) and "allocation bandwidth" (Table 7/9). A step that maps everything at once
is timed from call to return, so it includes create, map and set access, and the handover to the worker.
"""

from __future__ import annotations

import time

from bench.gpu import PAGE
from bench.gpu.device import DTYPE, HEAD_DIM, KV_HEADS, over_stub
from bench.harness.report import Goal, Report, Row
from vattn import KVCache, KVConfig

ABOUT = "latency of driver calls, allocation bandwidth by layout"
RANK = 4
SECONDS = 60

_LAYERS = 32


def run(quick: bool) -> Report:
    stub = over_stub()
    budget = (1 if quick or stub else 16) * 2**30
    token_bytes = 2 * _LAYERS * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    figures: list[Row] = []
    bandwidths: list[float] = []
    for layout in ("layer", "sliced", "fused"):
        config = KVConfig.from_options(
            num_layers=_LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=DTYPE,
            max_batch_size=8,
            max_context_len=131_072,
            device="cuda",
            memory_budget=budget,
            layout=layout,
            overlap=False,
            deferred_reclamation=False,
            eager_pages=0,
            watermark=0,
        )
        length = budget // token_bytes // 8 // 1024 * 1024
        with KVCache(config) as cache:
            for what in ("step, new pages", "step, used pages"):
                slots = [cache.alloc_reqid() for _ in range(8)]
                start = time.perf_counter()
                cache.step(dict.fromkeys(slots, length))
                seconds = time.perf_counter() - start
                size = cache.stats().mapped_bytes
                figures.append(_row(layout, what, size // PAGE, seconds, size))
                if what == "step, new pages":
                    bandwidths.append(size / 1e9 / seconds)
                for slot in slots:
                    cache.free_reqid(slot)
                cache.step({})  # all is launched: what was freed may be unmapped
                cache.check()  # and is
            calls = cache.stats().calls
        figures += [_row(layout, name, call.count, call.seconds, 0) for name, call in calls.items() if call.count]
    return Report(
        parameters={
            "page_size": PAGE,
            "budget": budget,
            "stub": stub,
        },
        figures=figures,
        goals=[Goal("allocation of new pages in GB/s, slowest layout", min(bandwidths), ">=", 35)],
    )


def _row(layout: str, what: str, count: int, seconds: float, size: int) -> Row:
    bandwidth = f"{size / 1e9 / seconds:.1f}" if size else "-"
    return {"layout": layout, "what": what, "count": count, "us each": 1e6 * seconds / count, "GB/s": bandwidth}
