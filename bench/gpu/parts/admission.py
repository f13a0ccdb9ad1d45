"""The cost of admitting a request whose prefix is cached, by the prefix's length and layout.

A slot that has not the prefix gets it by mappings onto the pages that hold it, without a copy; the slot of somebody who
comes back has it already, and no driver call is made.
"""

from __future__ import annotations

import time
from statistics import median

from bench.gpu.device import DTYPE, HEAD_DIM, KV_HEADS
from bench.gpu.figures import Figures
from bench.harness.report import Goal, Report
from vattn import KVCache, KVConfig

ABOUT = "admission of requests whose prefix is cached, by length and layout"
RANK = 12
SECONDS = 30

_SLOTS = 8


def run(quick: bool) -> Report:
    layers = 8 if quick else 32
    token_bytes = 2 * layers * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    figures = Figures()
    for layout in ("sliced", "fused"):
        for prefix in (1024,) if quick else (1024, 8192, 32_768):
            config = KVConfig.from_options(
                num_layers=layers,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                dtype=DTYPE,
                max_batch_size=_SLOTS,
                max_context_len=2 * prefix,
                device="cuda",
                memory_budget=4 * prefix * token_bytes + 2**28,
                layout=layout,
                kv_order="NHD",  # a block of tokens is one of pages
                overlap=False,  # the page of the next token is no part of an admission
                eager_pages=0,
            )
            ids = list(range(prefix))
            with KVCache(config) as cache:
                first, _ = cache.admit(ids)
                cache.step({first: prefix})
                cache.commit(first, ids)
                fresh = [_admission(cache, ids) for _ in range(_SLOTS - 1)]
                for reqid, *_ in fresh:
                    cache.free_reqid(reqid)
                    cache.step({})
                again = [_admission(cache, ids) for _ in range(_SLOTS - 1)]
                tokens = cache.prefix_block_tokens
            for slot, found in (("another", fresh), ("its own", again)):
                _, cached, seconds, calls = zip(*found, strict=True)
                figures.append(
                    {
                        "layout": layout,
                        "prefix": prefix,
                        "tokens per block": tokens,
                        "slot": slot,
                        "tokens found": min(cached),
                        "driver calls": max(calls),
                        "us": 1e6 * median(seconds),
                        "us per 1K tokens": 1e6 * median(seconds) / (prefix / 1024),
                    }
                )
    own = [row for row in figures if row["slot"] == "its own"]
    least = min(int(row["tokens found"]) + int(row["tokens per block"]) - int(row["prefix"]) for row in figures)
    return Report(
        parameters={"layers": layers},
        figures=figures,
        goals=[
            Goal(
                "driver calls of an admission to a slot that has the prefix",
                max(int(r["driver calls"]) for r in own),
                "==",
                0,
            ),
            Goal("tokens found beyond all whole blocks but one (least)", least, ">=", 0),
            Goal("us to admit a prefix to a slot that has it (most)", max(float(r["us"]) for r in own), "<=", 1000),
        ],
    )


def _admission(cache: KVCache, ids: list[int]) -> tuple[int, int, float, int]:
    """The slot, the tokens found there, seconds, and calls that map; all of it with the step that follows."""
    before = _maps(cache)
    start = time.perf_counter()
    reqid, cached = cache.admit(ids)
    cache.step({reqid: cached})
    seconds = time.perf_counter() - start
    return reqid, cached, seconds, _maps(cache) - before


def _maps(cache: KVCache) -> int:
    calls = cache.stats().calls.get("cuMemMap")
    return calls.count if calls else 0
