"""Attention of one layer in Llama-3-8B's shapes: virtual, pre-allocated and paged, each by the same kernels.

Reproduces "decode throughput at 16K" (Fig. 9) and "paged against contiguous prefill kernels" (Fig. 2/4). The bytes of
keys and values read per second of a decode show how close it comes to the bandwidth of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.caches import BLOCK_SIZE, fill
from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, HEADS, KV_HEADS, empty_cache, random, times
from bench.gpu.parts import MISSING
from bench.gpu.sides import CACHES, Side, sides
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


Work = tuple[int, int, int]
Times = dict[Work, dict[Side, float]]


def run(quick: bool) -> Report:
    compared = sides()
    seconds: Times = {}
    for work in _QUICK if quick else _DECODE + _PREFILL:
        requests, new, context = work
        with ExitStack() as stack:
            query = random(requests * new, HEADS, HEAD_DIM)
            actions: dict[Side, Callable[[], object]] = {}
            usable = [side for side in compared if not side.refusal]
            for cache in dict.fromkeys(side.cache for side in usable):
                kv = stack.enter_context(closing(CACHES[cache](requests, context)))
                slots = fill(kv, [context] * requests, 1)
                batch = PackedBatch.pack([Span(slot, context - new, context) for slot in slots], DEVICE)
                actions |= {side: _call(side, query, kv, batch) for side in usable if side.cache == cache}
            rounds = 5 if requests * new * context > 2**30 else 10 if quick else 30
            with torch.inference_mode():
                seconds[work] = times(actions, rounds=rounds)
            actions.clear()
            del kv
        empty_cache()
    return Report(
        parameters={
            MISSING: [str(side) for side in compared if side.refusal],
            "block_size": BLOCK_SIZE,
            "dtype": str(DTYPE),
            "heads": f"{HEADS} on {KV_HEADS} of {HEAD_DIM}",
        },
        figures=[_row(work, side, found) for work, found in seconds.items() for side in compared],
        goals=_goals(seconds),
    )


def _call(side: Side, query: torch.Tensor, kv: Any, batch: PackedBatch) -> Callable[[], object]:
    return lambda: side.kernel(query, kv, 0, batch, AttentionParams())


def _row(work: Work, side: Side, seconds: Mapping[Side, float]) -> Row:
    requests, new, context = work
    own = seconds.get(side)
    virtual = seconds.get(replace(side, cache="virtual"))
    return {
        "requests": requests,
        "new": new,
        "context": context,
        "cache": side.cache,
        "kernel": side.kernel.name,
        "us": 1e6 * own if own else "MISSING",
        "over virtual": own / virtual if own and virtual else "-",
        "KV GB/s": requests * context * _TOKEN_BYTES / 1e9 / own if own else "-",
    }


def _goals(seconds: Times) -> list[Goal]:
    """Pre-allocated against virtual by the same kernel; paged against virtual, each by its fastest."""
    decode = {work: found for work, found in seconds.items() if work[1] == 1}
    prefill = {work: found for work, found in seconds.items() if work[1] > 1 and work[2] >= 32_768}
    static = [
        (own / found[virtual], f"{_case(work)}, {side.kernel.name}")
        for work, found in decode.items()
        for side, own in found.items()
        if side.cache == "static" and (virtual := replace(side, cache="virtual")) in found
    ]
    goals = []
    for what, ratios, bound in (
        ("decode, pre-allocated over virtual", static, 0.99),
        ("decode, best paged over best virtual", _best_over_best(decode), 1.0),
        ("prefill from 32K, best paged over best virtual", _best_over_best(prefill), 1.0),
    ):
        if ratios:
            ratio, case = min(ratios)
            goals.append(Goal(f"{what} (least, at {case})", ratio, ">=", bound))
    return goals


def _best_over_best(seconds: Times) -> list[tuple[float, str]]:
    ratios = []
    for work, found in seconds.items():
        paged, virtual = ([own for side, own in found.items() if side.cache == cache] for cache in ("paged", "virtual"))
        if paged and virtual:
            ratios.append((min(paged) / min(virtual), _case(work)))
    return ratios


def _case(work: Work) -> str:
    return "{} x {} at {}".format(*work)
