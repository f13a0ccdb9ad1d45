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
from bench.gpu.figures import MISSING, Figures
from bench.gpu.models import llama
from bench.gpu.sides import CACHES, Side, sides
from bench.harness.decode_loop import DecodeLoop
from bench.harness.report import Goal, Report, Row

ABOUT = "whole decode steps of a model: virtual, pre-allocated and paged, with and without graphs"
RANK = 10
SECONDS = 110


# (requests, context, the most tokens of a request where that is more than it needs)
_CASES: list[tuple[int, int, int | None]] = [
    (32, 1024, None),
    (32, 8192, None),
    (4, 32_768, None),
    (1, 4096, 131_072),
]
# Tokens per second by case and whether there are graphs.
Rates = dict[tuple[int, int, int, bool], dict[Side, float]]


def run(quick: bool) -> Report:
    layers = 2 if quick else 32
    rounds = 5 if quick else 40
    model = llama(layers=layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    compared = sides()
    figures = Figures()
    rates: Rates = {}
    for requests, context, most in [(2, 64, 4096)] if quick else _CASES:
        limit = most or context + 2 * rounds
        for side, graphs in product(compared, (False, True)):
            row: Row = {
                "requests": requests,
                "context": context,
                "limit": limit,
                "cache": side.cache,
                "kernel": side.kernel.name,
                "graphs": "yes" if graphs else "no",
                "ms per step": "MISSING",
                "tokens/s": "-",
            }
            if side.refusal:
                figures.append(row)
                continue
            with closing(CACHES[side.cache](requests, limit, layers=layers)) as kv:
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
                with closing(loop):
                    seconds = median(_seconds(loop) for _ in range(rounds + 3))
                    captured = loop.captured
            del loop, kv
            empty_cache()
            rates.setdefault((requests, context, limit, graphs), {})[side] = requests / seconds
            row |= {"ms per step": 1e3 * seconds, "tokens/s": requests / seconds}
            if graphs and not captured:
                row["graphs"] = "not possible"
            figures.append(row)
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
    """Virtual against the other caches by the same kernel, with graphs: without them Python's time decides, which
    differs by half from run to run, whatever the cache.
    """
    goals = []
    for other, bound in (("static", 0.99), ("paged", 1.0)):
        ratios = [
            (
                found[virtual] / rate,
                f"{requests} x {context} of {limit}, {side.kernel.name}",
            )
            for (requests, context, limit, graphs), found in rates.items()
            if graphs
            for side, rate in found.items()
            if side.cache == other and (virtual := replace(side, cache="virtual")) in found
        ]
        if ratios:
            ratio, case = min(ratios)
            goals.append(Goal(f"tokens/s, virtual over {other} (least, at {case})", ratio, ">=", bound))
    return goals
