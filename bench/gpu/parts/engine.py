"""Whole decode steps of a model with random weights: virtual, pre-allocated and paged, with and without CUDA graphs.

The time is that of the engine's runner: memory, index tensors, model, logits. Sampling does not depend on the cache.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from itertools import product
from statistics import median

from bench.gpu.caches import BLOCK_SIZE
from bench.gpu.device import empty_cache, synchronize
from bench.gpu.models import llama
from bench.gpu.parts import MISSING
from bench.gpu.sides import CACHES, Side, sides
from bench.harness.decode_loop import DecodeLoop
from bench.harness.report import Goal, Report, Row

ABOUT = "whole decode steps of a model: virtual, pre-allocated and paged, with and without graphs"
RANK = 8
SECONDS = 150


# Tokens per second by requests, context and whether there are graphs.
Rates = dict[tuple[int, int, bool], dict[Side, float]]


def run(quick: bool) -> Report:
    layers = 2 if quick else 32
    rounds = 5 if quick else 40
    model = llama(layers=layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    compared = sides()
    figures: list[Row] = []
    rates: Rates = {}
    for requests, context in [(2, 64)] if quick else [(32, 1024), (32, 8192), (4, 32_768)]:
        for side, graphs in product(compared, (False, True)):
            row: Row = {
                "requests": requests,
                "context": context,
                "cache": side.cache,
                "kernel": side.kernel.name,
                "graphs": "yes" if graphs else "no",
                "ms per step": "MISSING",
                "tokens/s": "-",
            }
            figures.append(row)
            if side.refusal:
                continue
            with closing(CACHES[side.cache](requests, context + 2 * rounds, layers=layers)) as kv:
                loop = DecodeLoop(
                    model,
                    kv,
                    batch=requests,
                    length=context,
                    max_length=context + 2 * rounds,
                    attention=side.kernel,
                    logits=True,
                    graphs=graphs,
                )
                seconds = median(_seconds(loop) for _ in range(rounds + 3))
                captured = loop.captured
            del loop, kv
            empty_cache()
            rates.setdefault((requests, context, graphs), {})[side] = requests / seconds
            row |= {"ms per step": 1e3 * seconds, "tokens/s": requests / seconds}
            if graphs and not captured:
                row["graphs"] = "not possible"
    return Report(
        parameters={
            "layers": layers,
            "parameters": parameters,
            "steps": rounds,
            "block_size": BLOCK_SIZE,
            MISSING: [str(side) for side in compared if side.refusal],
        },
        figures=figures,
        goals=_goals(rates),
    )


def _seconds(loop: DecodeLoop) -> float:
    synchronize()
    begin = time.perf_counter()
    loop.step()
    synchronize()
    return time.perf_counter() - begin


def _goals(rates: Rates) -> list[Goal]:
    """Virtual against the other caches by the same kernel."""
    goals = []
    for other, bound in (("static", 0.99), ("paged", 1.0)):
        ratios = [
            (
                found[virtual] / rate,
                f"{requests} x {context}, {side.kernel.name}, {'graphs' if graphs else 'no graphs'}",
            )
            for (requests, context, graphs), found in rates.items()
            for side, rate in found.items()
            if side.cache == other and (virtual := replace(side, cache="virtual")) in found
        ]
        if ratios:
            ratio, case = min(ratios)
            goals.append(Goal(f"tokens/s, virtual over {other} (least, at {case})", ratio, ">=", bound))
    return goals
