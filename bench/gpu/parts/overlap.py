"""Decode iterations around the ends of pages: mapped ahead by the worker, and mapped on the spot.

Reproduces "decode latency with and without overlap" (Fig. 10/12). All requests reach the end of a page in the same
iteration, and each then needs a new one. Overlapped, the iterations before that map ahead, and have a row of their
own: the driver's calls may slow them down in the place of the next one. Over a static cache nothing is ever mapped.
Steps are CUDA graphs, so that they are short. The three caches take turns, iteration by iteration: ratios between them
are medians of those of single iterations. The worker of the overlapped one may also map while others have their turn.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any

from bench.gpu.caches import static, virtual
from bench.gpu.device import best, synchronize
from bench.gpu.figures import Figures
from bench.gpu.models import llama
from bench.harness.decode_loop import DecodeLoop
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import turns
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
    pages: int  # mapped since the one before


def run(quick: bool) -> Report:
    layers, batch, pages = (8, 2, 1) if quick else (16, 32, 6)
    model = llama(layers=layers)
    caches: dict[str, Any] = {
        mode: virtual(batch, 8192, layers=layers, layout="fused", overlap=mode == "overlapped")
        for mode in ("overlapped", "synchronous")
    }
    layout = caches["overlapped"].cache.layout
    block: int = layout.page_tokens
    caches["static"] = static(batch, 8192, layers=layers)
    with ExitStack() as stack:
        loops: dict[str, DecodeLoop] = {}
        for mode, kv in caches.items():
            stack.callback(kv.close)
            loops[mode] = DecodeLoop(
                model, kv, batch=batch, length=block // 2, max_length=8192, attention=best(), logits=True, graphs=True
            )
            stack.callback(loops[mode].close)
        traces = _traces(loops, caches, block, pages * block)
        uncaptured = [mode for mode, loop in loops.items() if not loop.captured]

    figures = Figures()
    ratios: dict[tuple[str, str], float] = {}
    for name in ("others", _AHEAD, _FIRST, _AFTER):
        row: Row = {"iteration": name}
        chosen = [at for at, iteration in enumerate(traces["static"]) if _kind(iteration.length, block) == name]
        for mode, trace in traces.items():
            milliseconds = median(trace[at].ms for at in chosen)
            row[f"{mode} ms"] = milliseconds
            others = row if name == "others" else figures[0]
            row[f"{mode} / others"] = ratios[mode, name] = milliseconds / float(others[f"{mode} ms"])
            if mode != "static":
                row[f"{mode} / static"] = _over(trace, traces["static"], chosen)
            row[f"{mode}: pages mapped"] = mean(trace[at].pages for at in chosen)
        figures.append(row)
    overlapped, preallocated = ([iteration.ms for iteration in traces[mode]] for mode in ("overlapped", "static"))
    tail = max(1.05, 1.02 * _tail(preallocated))
    over_static = _over(traces["overlapped"], traces["static"], range(pages * block))
    return Report(
        parameters={
            "layers": layers,
            "requests": batch,
            "layout": "fused",
            "graphs": not uncaptured,
            "tokens per page": block,
            "borders": pages,
            "mapped MiB per border": batch * layout.page_size // 2**20,
        },
        figures=figures,
        goals=[
            Goal("first token of a page over others, overlapped", ratios["overlapped", _FIRST], "<=", 1.05),
            Goal("iterations that map ahead over others", ratios["overlapped", _AHEAD], "<=", 1.05),
            Goal("the spike to hide: first token of a page, synchronous", ratios["synchronous", _FIRST], ">=", 1.05),
            Goal("99th percentile over median, overlapped", _tail(overlapped), "<=", tail),
            Goal("iterations, overlapped over static (median of the ratios)", over_static, "<=", 1.02),
            Goal("caches whose steps are no CUDA graphs", len(uncaptured), "==", 0),
        ],
        series={f"{mode} ms": [iteration.ms for iteration in trace] for mode, trace in traces.items()}
        | {f"{mode}: pages mapped": [float(iteration.pages) for iteration in trace] for mode, trace in traces.items()},
    )


def _traces(
    loops: Mapping[str, DecodeLoop], caches: Mapping[str, Any], warmup: int, iterations: int
) -> dict[str, list[_Iteration]]:
    """The same iterations of all loops, in turns, so that what changes on the device meanwhile concerns all alike."""
    traces: dict[str, list[_Iteration]] = {mode: [] for mode in loops}
    mapped = dict.fromkeys(loops, 0)
    gc.collect()
    gc.disable()
    try:
        # The captures, and first uses of everything, come before 0: lengths stay below 1,024, where graphs are new.
        for number in range(-warmup, iterations):
            for mode in turns(loops, number):
                synchronize()
                begin = time.perf_counter()
                loops[mode].step()
                synchronize()
                milliseconds = 1e3 * (time.perf_counter() - begin)
                # What the worker has mapped while others had their turn counts for the next iteration of its own.
                before, mapped[mode] = mapped[mode], caches[mode].stats().map_calls
                if number >= 0:
                    traces[mode].append(_Iteration(loops[mode].length, milliseconds, mapped[mode] - before))
    finally:
        gc.enable()
    return traces


def _over(trace: Sequence[_Iteration], other: Sequence[_Iteration], places: Iterable[int]) -> float:
    """The median of the ratios of iterations that followed each other."""
    return median(trace[at].ms / other[at].ms for at in places)


def _tail(milliseconds: list[float]) -> float:
    """The 99th percentile over the median: some iterations are slow on any machine, whatever the cache."""
    return quantiles(milliseconds, n=100, method="inclusive")[98] / median(milliseconds)


def _kind(length: int, block: int) -> str:
    position = (length - 1) % block
    if position <= 1:
        return _AFTER if position else _FIRST
    return _AHEAD if position >= block - most_ahead(block) else "others"
