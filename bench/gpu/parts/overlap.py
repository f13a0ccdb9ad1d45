"""Latency of decode iterations that need new pages: mapped ahead by the worker, and mapped on the spot.

Reproduces "decode latency with and without overlap" (Fig. 10/12). All requests reach the end of a block in the same
iteration, and each then needs a new page. Steps are CUDA graphs, so that they are short.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from bench.gpu import PAGE
from bench.gpu.caches import virtual
from bench.gpu.device import best
from bench.gpu.models import llama
from bench.harness.decode_loop import DecodeLoop
from bench.harness.report import Goal, Report, Row

ABOUT = "decode iterations that need memory, mapped ahead and on the spot"
RANK = 7
SECONDS = 60
COMPUTES = True


def run(quick: bool) -> Report:
    layers, batch, blocks = (2, 4, 3) if quick else (16, 32, 8)
    model = llama(layers=layers)
    figures: list[Row] = []
    series: dict[str, list[float]] = {}
    for mode in ("overlapped", "synchronous"):
        kv = virtual(batch, 8192, layers=layers, layout="fused", overlap=mode == "overlapped")
        block = kv.cache.layout.page_tokens
        steps = blocks * block
        start = block // 2 + block
        loop = DecodeLoop(
            model, kv, batch=batch, length=start, max_length=8192, attention=best(), logits=True, graphs=True
        )
        kinds: dict[str, list[float]] = {"crossing": [], "other": []}
        milliseconds = []
        for number in range(steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            loop.step()
            torch.cuda.synchronize()
            if number < 4:  # the capture among them
                continue
            milliseconds.append(1e3 * (time.perf_counter() - begin))
            kinds["crossing" if (loop.length - 1) % block == 0 else "other"].append(milliseconds[-1])
        other = median(kinds["other"])
        figures.append(
            {
                "mapping": mode,
                "other ms": other,
                "crossing ms": median(kinds["crossing"]),
                "crossing / other": median(kinds["crossing"]) / other,
                "slowest ms": max(milliseconds),
                "slowest / median": max(milliseconds) / median(milliseconds),
                "waited ms": 1e3 * kv.stats().wait_seconds,
            }
        )
        series[mode] = milliseconds
        kv.close()
    overlapped = figures[0]
    return Report(
        parameters={
            "layers": layers,
            "requests": batch,
            "layout": "fused",
            "tokens per page": block,
            "crossings": blocks,
            "mapped MiB per crossing": batch * PAGE // 2**20,
        },
        figures=figures,
        goals=[
            Goal("crossing over other, overlapped", float(overlapped["crossing / other"]), "<=", 1.05),
            Goal("slowest over median, overlapped", float(overlapped["slowest / median"]), "<=", 1.05),
        ],
        series=series,
    )
