"""Bandwidth at which steps allocate memory, by layout and page size: in the step, and ahead by the worker.

Reproduces "allocation bandwidth" (Table 7/9). Memory that a step needs at once is created, mapped and given access to
on the caller's thread without `overlap`, and on the worker's with it. Mapped ahead, a step finds it there.
"""

from __future__ import annotations

from bench.gpu import PAGE
from bench.gpu.device import DTYPE, HEAD_DIM, KV_HEADS
from bench.gpu.figures import Figures
from bench.harness import allocation
from bench.harness.report import Goal, Report, Row
from vattn import KVCache, KVConfig

ABOUT = "allocation bandwidth by layout and page size, with and without the worker"
RANK = 8
SECONDS = 30

_SLOTS = 8
_CASES = (("layer", PAGE), ("sliced", PAGE), ("sliced", 8 * PAGE), ("fused", PAGE), ("fused", 8 * PAGE))


def run(quick: bool) -> Report:
    layers, budget = (8, 2**28) if quick else (32, 2**34)
    length = budget // (2 * layers * KV_HEADS * HEAD_DIM * DTYPE.itemsize) // _SLOTS // 1024 * 1024
    figures = Figures()
    calls: dict[str, str] = {}
    for layout, page in _CASES:
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
                page_size=page,
                layout=layout,
                overlap=overlap,
                deferred_reclamation=False,
                eager_pages=0,
                watermark=0,
            )
            who = "the worker" if overlap else "the caller"
            case: Row = {"layout": layout, "page MiB": page / 2**20, "by": who}
            with KVCache(config) as cache:
                for what in ("new pages", "used pages"):
                    figures.append({**case, "memory": what, **allocation.in_the_step(cache, length)})
                if overlap:
                    cache.trim()
                    figures.append({**case, "memory": "new pages, ahead", **allocation.ahead(cache, length)})
                calls[f"calls, {layout}, {page // 2**20} MiB, by {who}"] = ", ".join(
                    f"{call.count} {name} of {1e6 * call.seconds / call.count:.1f} us"
                    for name, call in cache.stats().calls.items()
                    if call.count and name.startswith("cuMem")
                )

    def slowest(by: str, memory: str) -> float:
        wanted = (PAGE / 2**20, by, memory)
        return min(float(row["GB/s"]) for row in figures if (row["page MiB"], row["by"], row["memory"]) == wanted)

    return Report(
        parameters={"layers": layers, "budget": budget, **calls},
        figures=figures,
        goals=[
            Goal(f"new pages of 2 MiB, GB/s, slowest layout, {what}", slowest(by, memory), ">=", 35)
            for what, by, memory in (
                ("by the caller", "the caller", "new pages"),
                ("by the worker", "the worker", "new pages"),
                ("ahead", "the worker", "new pages, ahead"),
            )
        ],
    )
