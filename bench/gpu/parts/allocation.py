"""Bandwidth at which steps allocate memory, with pages of 2 MiB, by layout: in the step, and ahead by the worker.

Reproduces "allocation bandwidth" (Table 7/9). Memory that a step needs at once is created, mapped and given access to
on the caller's thread without `overlap`, and on the worker's with it. Mapped ahead, a step finds it there.
"""

from __future__ import annotations

from bench.gpu import PAGE
from bench.gpu.device import DTYPE, HEAD_DIM, KV_HEADS
from bench.gpu.figures import Figures
from bench.harness import allocation
from bench.harness.report import Goal, Report
from vattn import KVCache, KVConfig

ABOUT = "allocation bandwidth by layout, with and without the worker"
RANK = 7
SECONDS = 40

_SLOTS = 8


def run(quick: bool) -> Report:
    layers, budget = (8, 2**28) if quick else (32, 2**34)
    length = budget // (2 * layers * KV_HEADS * HEAD_DIM * DTYPE.itemsize) // _SLOTS // 1024 * 1024
    figures = Figures()
    calls: dict[str, str] = {}
    for layout in ("layer", "sliced", "fused"):
        for overlap in (False, True):
            config = KVConfig.from_options(
                num_layers=layers,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                dtype=DTYPE,
                max_batch_size=_SLOTS,
                max_context_len=131_072,
                device="cuda",
                memory_budget=budget,
                layout=layout,
                overlap=overlap,
                deferred_reclamation=False,
                eager_pages=0,
                watermark=0,
            )
            who = "the worker" if overlap else "the caller"
            with KVCache(config) as cache:
                for what in ("new pages", "used pages"):
                    figures.append(
                        {"layout": layout, "by": who, "memory": what, **allocation.in_the_step(cache, length)}
                    )
                if overlap:
                    cache.trim()
                    figures.append(
                        {"layout": layout, "by": who, "memory": "new pages, ahead", **allocation.ahead(cache, length)}
                    )
                calls[f"calls, {layout}, by {who}"] = ", ".join(
                    f"{call.count} {name} of {1e6 * call.seconds / call.count:.1f} us"
                    for name, call in cache.stats().calls.items()
                    if call.count and name.startswith("cuMem")
                )

    def slowest(by: str, memory: str) -> float:
        return min(float(row["GB/s"]) for row in figures if (row["by"], row["memory"]) == (by, memory))

    return Report(
        parameters={"page_size": PAGE, "layers": layers, "budget": budget, **calls},
        figures=figures,
        goals=[
            Goal("new pages in GB/s, slowest layout, by the caller", slowest("the caller", "new pages"), ">=", 35),
            Goal("new pages in GB/s, slowest layout, by the worker", slowest("the worker", "new pages"), ">=", 35),
            Goal("new pages in GB/s, slowest layout, ahead", slowest("the worker", "new pages, ahead"), ">=", 35),
        ],
    )
