"""Decode iterations around the ends of pages: mapped ahead by the worker, and mapped on the spot.

Reproduces "decode latency with and without overlap" (Fig. 10/12). All requests reach the end of a page in the same
iteration, and each then needs a new one. Overlapped, the iterations before that map ahead, and have a row of their
own: the driver's calls may slow them down in the place of the next one. Over a static cache nothing is ever mapped.
Steps are CUDA graphs, so that they are short.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any

from bench.gpu import PAGE
from bench.gpu.caches import static, virtual
from bench.gpu.device import best, synchronize
from bench.gpu.figures import Figures
from bench.gpu.models import llama
from bench.harness.decode_loop import DecodeLoop
from bench.harness.report import Goal, Report, Row
from vattn.slots.table import most_ahead

ABOUT = "decode iterations around the ends of pages, mapped ahead and on the spot"
RANK = 9
SECONDS = 60

# Iterations around the first token of a page that have rows of their own.
_AHEAD, _FIRST, _AFTER = "before, map ahead", "0, first token of a page", "+1"


@dataclass(frozen=True)
class _Iteration:
    length: int
    ms: float
    pages: int  # mapped during it


def run(quick: bool) -> Report:
    layers, batch, pages = (8, 2, 1) if quick else (16, 32, 8)
    model = llama(layers=layers)
    traces: dict[str, list[_Iteration]] = {}
    captured = False
    block = 0
    for mode in ("overlapped", "synchronous", "static"):
        kv: Any
        if mode == "static":
            kv = static(batch, 8192, layers=layers)
        else:
            kv = virtual(batch, 8192, layers=layers, layout="fused", overlap=mode == "overlapped")
            block = kv.cache.layout.page_tokens
        loop = DecodeLoop(
            model, kv, batch=batch, length=block // 2, max_length=8192, attention=best(), logits=True, graphs=True
        )
        for _ in range(block):  # the capture among them, and first uses of everything
            loop.step()
        traces[mode] = []
        for _ in range(pages * block):
            synchronize()
            mapped = kv.stats().map_calls
            begin = time.perf_counter()
            loop.step()
            synchronize()
            milliseconds = 1e3 * (time.perf_counter() - begin)
            traces[mode].append(_Iteration(loop.length, milliseconds, kv.stats().map_calls - mapped))
        captured = loop.captured
        loop.close()
        kv.close()

    figures = Figures()
    ratios: dict[tuple[str, str], float] = {}
    for name in ("others", _AHEAD, _FIRST, _AFTER):
        row: Row = {"iteration": name}
        for mode, trace in traces.items():
            chosen = [iteration for iteration in trace if _kind(iteration.length, block) == name]
            milliseconds = median(iteration.ms for iteration in chosen)
            row[f"{mode} ms"] = milliseconds
            others = row if name == "others" else figures[0]
            row[f"{mode} / others"] = ratios[mode, name] = milliseconds / float(others[f"{mode} ms"])
            row[f"{mode}: pages mapped"] = mean(iteration.pages for iteration in chosen)
        figures.append(row)
    overlapped, preallocated = ([iteration.ms for iteration in traces[mode]] for mode in ("overlapped", "static"))
    tail = max(1.05, 1.02 * _tail(preallocated))
    return Report(
        parameters={
            "layers": layers,
            "requests": batch,
            "layout": "fused",
            "graphs": captured,
            "tokens per page": block,
            "borders": pages,
            "mapped MiB per border": batch * PAGE // 2**20,
        },
        figures=figures,
        goals=[
            Goal("first token of a page over others, overlapped", ratios["overlapped", _FIRST], "<=", 1.05),
            Goal("iterations that map ahead over others", ratios["overlapped", _AHEAD], "<=", 1.05),
            Goal("the spike to hide: first token of a page, synchronous", ratios["synchronous", _FIRST], ">=", 1.05),
            Goal("99th percentile over median, overlapped", _tail(overlapped), "<=", tail),
            Goal("iterations, overlapped over static (median)", median(overlapped) / median(preallocated), "<=", 1.02),
        ],
        series={f"{mode} ms": [iteration.ms for iteration in trace] for mode, trace in traces.items()}
        | {f"{mode}: pages mapped": [float(iteration.pages) for iteration in trace] for mode, trace in traces.items()},
    )


def _tail(milliseconds: list[float]) -> float:
    """The 99th percentile over the median: some iterations are slow on any machine, whatever the cache."""
    return quantiles(milliseconds, n=100, method="inclusive")[98] / median(milliseconds)


def _kind(length: int, block: int) -> str:
    position = (length - 1) % block
    if position <= 1:
        return _AFTER if position else _FIRST
    return _AHEAD if position >= block - most_ahead(block) else "others"
