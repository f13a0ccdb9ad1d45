"""Attention of one layer in Llama-3-8B's shapes: virtual and pre-allocated by the same kernel, and the best paged one.

Reproduces "decode throughput at 16K" (Fig. 9) and "paged against contiguous prefill kernels" (Fig. 2/4). The bytes of
keys and values read per second of a decode show how close it comes to the bandwidth of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import torch

from bench.gpu.caches import BLOCK_SIZE, fill, paged, static, virtual
from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, HEADS, KV_HEADS, best, empty_cache, paged_kernels, random, times
from bench.gpu.parts import MISSING
from bench.harness.report import Goal, Report, Row
from vattn.attention import AttentionParams, PackedBatch, Span

ABOUT = "decode and prefill attention: virtual, pre-allocated and paged"
RANK = 7
SECONDS = 120

_TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
# (requests, new tokens of each, context)
_DECODE = [
    (requests, 1, context)
    for context in (1024, 4096, 16_384, 32_768, 131_072)
    for requests in (1, 4, 16, 64)
    if requests * context <= 2**21  # 8 GiB in each of three caches
]
_PREFILL = [(1, 1024, 1024), (1, 8192, 8192), (1, 32_768, 32_768), (1, 8192, 131_072), (1, 131_072, 131_072)]
_QUICK = [(4, 1, 512), (1, 300, 512)]


def run(quick: bool) -> Report:
    kernel = best()
    scattered, missing = paged_kernels(BLOCK_SIZE)
    figures = []
    for requests, new, context in _QUICK if quick else _DECODE + _PREFILL:
        with ExitStack() as stack:
            makers: dict[str, Any] = {"virtual": virtual, "static": static}
            if scattered:
                makers["paged"] = paged
            batches = {}
            caches: dict[str, Any] = {}
            for name, make in makers.items():
                caches[name] = kv = stack.enter_context(closing(make(requests, context)))
                slots = fill(kv, [context] * requests, 1)
                batches[name] = PackedBatch.pack([Span(slot, context - new, context) for slot in slots], DEVICE)
            query = random(requests * new, HEADS, HEAD_DIM)
            actions: dict[str, Callable[[], object]] = {}
            for name, kv in caches.items():
                for adapter in scattered if name == "paged" else [kernel]:
                    actions[f"{name} {adapter.name}"] = _call(adapter, query, kv, batches[name])
            with torch.inference_mode():
                work = requests * new * context
                seconds = times(actions, rounds=5 if work > 2**30 else 10 if quick else 30)
            figures.append(_row(requests, new, context, kernel.name, seconds))
            caches.clear()
            actions.clear()
        empty_cache()
    decode = [row for row in figures if row["new"] == 1]
    long = [row for row in figures if int(row["new"]) > 1 and int(row["context"]) >= 32_768]
    goals = [_least("decode, pre-allocated over virtual", "static / virtual", decode, 0.99)]
    if scattered:
        goals.append(_least("decode, best paged over virtual", "paged / virtual", decode, 1.0))
        if long:
            goals.append(_least("prefill from 32K, best paged over virtual", "paged / virtual", long, 1.0))
    return Report(
        parameters={
            "kernel": kernel.name,
            "paged kernels": ", ".join(other.name for other in scattered) or "MISSING",
            MISSING: missing,
            "block_size": BLOCK_SIZE,
            "dtype": str(DTYPE),
            "heads": f"{HEADS} on {KV_HEADS} of {HEAD_DIM}",
        },
        figures=figures,
        goals=goals,
    )


def _call(adapter: Any, query: torch.Tensor, kv: Any, batch: PackedBatch) -> Callable[[], object]:
    return lambda: adapter(query, kv, 0, batch, AttentionParams())


def _row(requests: int, new: int, context: int, kernel: str, seconds: dict[str, float]) -> Row:
    virtual_seconds, static_seconds = seconds[f"virtual {kernel}"], seconds[f"static {kernel}"]
    paged_seconds = {name.removeprefix("paged "): s for name, s in seconds.items() if name.startswith("paged ")}
    fastest = min(paged_seconds, key=lambda name: paged_seconds[name], default="MISSING")
    return {
        "requests": requests,
        "new": new,
        "context": context,
        "virtual us": 1e6 * virtual_seconds,
        "static us": 1e6 * static_seconds,
        "paged us": 1e6 * paged_seconds[fastest] if paged_seconds else "-",
        "paged kernel": fastest,
        "static / virtual": static_seconds / virtual_seconds,
        "paged / virtual": paged_seconds[fastest] / virtual_seconds if paged_seconds else "-",
        "virtual KV GB/s": requests * context * _TOKEN_BYTES / 1e9 / virtual_seconds,
    }


def _least(what: str, column: str, rows: list[Row], bound: float) -> Goal:
    worst = min(rows, key=lambda row: float(row[column]))
    case = f"{worst['requests']} x {worst['context']}"
    return Goal(f"{what} (least, at {case})", float(worst[column]), ">=", bound)
