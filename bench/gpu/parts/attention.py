"""Attention of one layer in Llama-3-8B's shapes: virtual, pre-allocated and paged, each by the same kernels.

Reproduces "decode throughput at 16K" (Fig. 9) and "paged against contiguous prefill kernels" (Fig. 2/4). The bytes of
keys and values read per second of a decode stand beside those of a copy on the device. Calls go through as many layers
as the device's caches cannot hold, as a model's steps do. "virtual, aged" has its pages in a random order; "static
again" is a second pre-allocated cache: how far it is from the first is noise.
"""

from __future__ import annotations

import math
import random as host_random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch

from bench.gpu import caches
from bench.gpu.caches import BLOCK_SIZE, fill
from bench.gpu.device import (
    DEVICE,
    DTYPE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    STUB,
    copy_bandwidth,
    empty_cache,
    random,
    times,
)
from bench.gpu.figures import MISSING, Figures
from bench.gpu.sides import CACHES, Side, best_over_best, low, ratios, sides
from bench.harness.report import Goal, Report, Row
from vattn.attention import AttentionParams, PackedBatch, Span

ABOUT = "decode and prefill attention: virtual, pre-allocated and paged"
RANK = 5
SECONDS = 120

_TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
_COLD_BYTES = 0 if STUB else 2**28  # well beyond a second-level cache of 50 MB


@dataclass(frozen=True)
class Work:
    """Requests with `new` tokens each.

    Attributes:
        context: tokens of each, the new ones included; their mean where they are ragged.
        kind: lengths that are equal; log-normal ones; or one prompt that all share.
    """

    requests: int
    new: int
    context: int
    kind: Literal["even", "ragged", "shared"] = "even"

    @property
    def lengths(self) -> list[int]:
        if self.kind != "ragged":
            return [self.context] * self.requests
        drawn = [host_random.Random(i).lognormvariate(0, 0.8) for i in range(self.requests)]
        scale = self.context * self.requests / sum(drawn)
        return [max(self.new, math.floor(scale * length)) for length in drawn]

    def __str__(self) -> str:
        return f"{self.requests} x {self.new} at {self.context}" + (f", {self.kind}" if self.kind != "even" else "")


_DECODE = [
    Work(requests, 1, context)
    for context in (1024, 4096, 16_384, 32_768, 131_072)
    for requests in (1, 4, 16, 64)
    if requests * context <= 2**21  # 8 GiB in each of five caches
] + [Work(64, 1, 4096, "ragged"), Work(32, 1, 16_384, "ragged"), Work(32, 1, 16_384, "shared")]
_PREFILL = [
    Work(1, new, context)
    for new, context in ((1024, 1024), (8192, 8192), (32_768, 32_768), (8192, 131_072), (131_072, 131_072))
]
_QUICK = [Work(4, 1, 512), Work(3, 1, 300, "ragged"), Work(3, 1, 300, "shared"), Work(1, 300, 512)]

SMALL_BLOCKS = "paged, blocks of 16"
# The layout that a model of many layers gets: with one or two, as here, "auto" takes another one.
_LAYOUT = "sliced"
MAKE: dict[str, Callable[..., Any]] = {
    **CACHES,
    "virtual": partial(caches.virtual, layout=_LAYOUT),
    "virtual, aged": partial(caches.aged, layout=_LAYOUT),
    "static again": caches.static,
    SMALL_BLOCKS: partial(caches.paged, block_size=16),
}
Times = dict[Work, dict[Side, float]]


def run(quick: bool) -> Report:
    compared = list(_sides())
    seconds: Times = {}
    figures = Figures()
    ceiling = copy_bandwidth()
    for work in _QUICK if quick else _DECODE + _PREFILL:
        seconds[work] = measure(work, [side for side in compared if not side.refusal], quick)
        for side in compared:
            figures.append(row(work, side, seconds[work], ceiling))
        empty_cache()
    return Report(
        parameters={
            MISSING: [str(side) for side in compared if side.refusal],
            "block_size": BLOCK_SIZE,
            "dtype": str(DTYPE),
            "heads": f"{HEADS} on {KV_HEADS} of {HEAD_DIM}",
            "copy GB/s": ceiling / 1e9,
        },
        figures=figures,
        goals=_goals(seconds),
    )


def _sides() -> Iterator[Side]:
    for side in sides():
        yield side
        if side.cache == "virtual":
            yield replace(side, cache="virtual, aged")
        if side.cache == "static" and not side.refusal:
            yield replace(side, cache="static again")


def measure(work: Work, usable: Sequence[Side], quick: bool) -> dict[Side, float]:
    """Seconds of a call by each side."""
    lengths = work.lengths
    layers = min(64, max(1, -(-_COLD_BYTES // (sum(lengths) * _TOKEN_BYTES)))) if work.new == 1 else 1
    query = random(work.requests * work.new, HEADS, HEAD_DIM)
    with ExitStack() as stack:
        actions: dict[Side, Callable[[], object]] = {}
        for cache in dict.fromkeys(side.cache for side in usable):
            kv = stack.enter_context(closing(MAKE[cache](work.requests, max(lengths), layers=layers)))
            slots = fill(kv, lengths, layers, shared=work.kind == "shared")
            spans = [Span(slot, n - work.new, n) for slot, n in zip(slots, lengths, strict=True)]
            batch = PackedBatch.pack(spans, DEVICE)
            actions |= {side: _call(side, query, kv, layers, batch) for side in usable if side.cache == cache}
        rounds = 5 if work.requests * work.new * work.context > 2**30 else 10 if quick else 30
        with torch.inference_mode():
            return times(actions, rounds=rounds)


def _call(side: Side, query: torch.Tensor, kv: Any, layers: int, batch: PackedBatch) -> Callable[[], object]:
    layer = cycle(range(layers))
    kernel = type(side.kernel)()  # a kernel may keep a plan for the batch that it saw last
    return lambda: kernel(query, kv, next(layer), batch, AttentionParams())


def row(work: Work, side: Side, seconds: Mapping[Side, float], ceiling: float) -> Row:
    """A row of the table.

    Args:
        seconds: of the sides that were measured.
        ceiling: bytes per second of a copy.
    """
    own = seconds.get(side)
    virtual = seconds.get(replace(side, cache="virtual"))
    rate = sum(work.lengths) * _TOKEN_BYTES / own if own else 0.0
    return {
        "requests": work.requests,
        "new": work.new,
        "context": work.context,
        "lengths": work.kind,
        "cache": side.cache,
        "kernel": side.kernel.name,
        "us": 1e6 * own if own else "MISSING",
        "over virtual": own / virtual if own and virtual else "-",
        "KV GB/s": rate / 1e9 if own else "-",
        "of a copy": rate / ceiling if own else "-",
    }


def _goals(seconds: Times) -> list[Goal]:
    """Pre-allocated against virtual by the same kernel, beside what two pre-allocated ones differ by; paged against
    virtual, each by its fastest. Of many ratios the tenth percentile, since the least of them is noise.
    """
    decode = {work: found for work, found in seconds.items() if work.new == 1 and work.kind != "shared"}
    prefill = {work: found for work, found in seconds.items() if work.new > 1 and work.context >= 32_768}
    noise = low(ratios(decode, "static again", "static"))
    goals = []
    for what, found, bound in (
        ("decode, pre-allocated over virtual", ratios(decode, "static", "virtual"), 0.99 * min(1.0, noise)),
        ("decode, pre-allocated over aged virtual", ratios(decode, "static", "virtual, aged"), 0.99 * min(1.0, noise)),
        ("decode, best paged over best virtual", best_over_best(decode), 1.0),
        ("prefill from 32K, best paged over best virtual", best_over_best(prefill), 1.0),
    ):
        if found:
            goals.append(Goal(f"{what} (10th percentile of {len(found)} cases)", low(found), ">=", bound))
    return goals
