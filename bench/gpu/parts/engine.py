"""Whole decode steps of a model with random weights: virtual, pre-allocated and paged, with and without CUDA graphs.

The time is that of the engine's runner: memory, index tensors, model, logits. Sampling does not depend on the cache.
"""

from __future__ import annotations

import time
from contextlib import closing
from statistics import median
from typing import Any

from bench.gpu.caches import BLOCK_SIZE, paged, static, virtual
from bench.gpu.device import best, empty_cache, paged_kernels, synchronize
from bench.gpu.models import llama
from bench.gpu.parts import MISSING
from bench.harness.decode_loop import DecodeLoop
from bench.harness.report import Goal, Report, Row

ABOUT = "whole decode steps of a model: virtual, pre-allocated and paged, with and without graphs"
RANK = 8
SECONDS = 120


def run(quick: bool) -> Report:
    layers = 2 if quick else 32
    rounds = 5 if quick else 40
    model = llama(layers=layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    scattered, missing = paged_kernels(BLOCK_SIZE)
    makers: dict[str, Any] = {"virtual": virtual, "static": static}
    if scattered:
        makers["paged"] = paged
    figures: list[Row] = []
    rates: dict[tuple[int, int, str, bool], float] = {}
    for requests, context in [(2, 64)] if quick else [(32, 1024), (32, 8192), (4, 32_768)]:
        for name, make in makers.items():
            for graphs in (False, True):
                kernel = scattered[0] if name == "paged" else best()
                with closing(make(requests, context + 2 * rounds, layers=layers)) as kv:
                    loop = DecodeLoop(
                        model,
                        kv,
                        batch=requests,
                        length=context,
                        max_length=context + 2 * rounds,
                        attention=kernel,
                        logits=True,
                        graphs=graphs,
                    )
                    seconds = median(_seconds(loop) for _ in range(rounds + 3))
                    captured = loop.captured
                del loop, kv
                empty_cache()
                rates[requests, context, name, graphs] = requests / seconds
                figures.append(
                    {
                        "requests": requests,
                        "context": context,
                        "cache": name,
                        "kernel": kernel.name,
                        "graphs": "no" if not graphs else "yes" if captured else "not possible",
                        "ms per step": 1e3 * seconds,
                        "tokens/s": requests / seconds,
                    }
                )
        if missing:
            nothing: Row = dict.fromkeys(figures[-1], "-")
            figures.append(nothing | {"requests": requests, "context": context, "cache": "paged", "kernel": "MISSING"})
    goals = [_least(rates, "static", 0.99)] + ([_least(rates, "paged", 1.0)] if scattered else [])
    return Report(
        parameters={
            "layers": layers,
            "parameters": parameters,
            "steps": rounds,
            "block_size": BLOCK_SIZE,
            MISSING: missing,
        },
        figures=figures,
        goals=goals,
    )


def _seconds(loop: DecodeLoop) -> float:
    synchronize()
    begin = time.perf_counter()
    loop.step()
    synchronize()
    return time.perf_counter() - begin


def _least(rates: dict[tuple[int, int, str, bool], float], other: str, bound: float) -> Goal:
    ratios = {key: rate / rates[(*key[:2], other, key[3])] for key, rate in rates.items() if key[2] == "virtual"}
    worst = min(ratios, key=lambda key: ratios[key])
    case = f"{worst[0]} x {worst[1]}, {'graphs' if worst[3] else 'no graphs'}"
    return Goal(f"tokens/s, virtual over {other} (least, at {case})", ratios[worst], ">=", bound)
