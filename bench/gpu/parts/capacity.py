"""Requests that fit a memory budget, in the shape of Llama-3-8B: each backend admits requests until it refuses.

The memory that is gone from the device by then is measured too, so that a budget is seen to be one.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from bench.gpu.caches import BLOCK_SIZE
from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, KV_HEADS, empty_cache
from bench.gpu.figures import Figures
from bench.harness.report import Goal, Report, Row
from vattn import drivers
from vattn.engine.kv.make import make_backend
from vattn.engine.kv.spec import KVSpec
from vattn.errors import NoFreeSlot, OutOfPages
from vattn.packed import KVShape

ABOUT = "requests that fit a memory budget, by backend and layout"
RANK = 17
SECONDS = 50

# The backend, and the options of `KVConfig`, by what the table calls them.
_CACHES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "static": ("static", None),
    "paged": ("paged", None),
    "virtual": ("virtual", None),
    "virtual, fused": ("virtual", {"layout": "fused"}),
    "virtual, sliced": ("virtual", {"layout": "sliced"}),
    "virtual, layer": ("virtual", {"layout": "layer"}),
}


def run(quick: bool) -> Report:
    layers, budget, longest = (8, 2**27, 512) if quick else (32, 2**35, 8192)
    mean = longest // 16
    figures = Figures()
    for name, (kv, options) in _CACHES.items():
        row: Row = {"cache": name}
        for case, length in (("equal", lambda mean=mean: mean), ("mixed", _lengths(mean, longest))):
            free = drivers.find("cuda").available_memory()
            spec = KVSpec(
                KVShape.uniform(layers, KV_HEADS, HEAD_DIM, HEAD_DIM),
                dtype=DTYPE,
                device=torch.device("cuda" if kv == "virtual" else DEVICE),
                max_num_seqs=1024,
                max_model_len=longest,
                memory_budget=budget,
                block_size=BLOCK_SIZE if kv == "paged" else 16,
                kv_options=options,
            )
            start = time.perf_counter()
            with closing(make_backend(kv, spec)) as backend:
                count = 0
                try:
                    while True:
                        tokens = length()
                        backend.prepare({backend.allocate(tokens): tokens})
                        count += 1
                except (NoFreeSlot, OutOfPages):
                    pass
                stats = backend.stats()
                row[f"requests, {case}"] = count
                row[f"waste %, {case}"] = 100 * stats.waste_bytes / max(1, stats.used_bytes)
                row[f"device GiB, {case}"] = (free - drivers.find("cuda").available_memory()) / 2**30
                row[f"s, {case}"] = time.perf_counter() - start
            empty_cache()
        figures.append(row)
    by_name = {row["cache"]: row for row in figures}

    def over_static(name: str, case: str) -> float:
        return float(by_name[name][f"requests, {case}"]) / max(1.0, float(by_name["static"][f"requests, {case}"]))

    virtual = [float(row[f"device GiB, {case}"]) for row in figures[2:] for case in ("equal", "mixed")]
    return Report(
        parameters={
            "layers": layers,
            "budget": budget,
            "max_model_len": longest,
            "equal": f"{mean} tokens each",
            "mixed": f"log-normal, mean {mean}, sigma 0.6, seed 0",
            "block_size": BLOCK_SIZE,
        },
        figures=figures,
        goals=[
            Goal("requests, virtual over static, equal", over_static("virtual", "equal"), ">=", 9.5),
            Goal("requests, virtual over static, mixed", over_static("virtual", "mixed"), ">=", 9.5),
            Goal("waste %, virtual, mixed", float(by_name["virtual"]["waste %, mixed"]), "<=", 10),
            Goal(
                "most memory gone from the device over the budget, virtual", max(virtual) * 2**30 / budget, "<=", 1.02
            ),
        ],
        timed=False,
    )


def _lengths(mean: int, longest: int) -> Callable[[], int]:
    draw = random.Random(0)
    return lambda: min(longest, math.ceil(draw.lognormvariate(math.log(mean) - 0.18, 0.6)))
