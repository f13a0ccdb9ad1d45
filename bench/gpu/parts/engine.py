"""Whole decode steps of a model with random weights, as CUDA graphs: virtual, pre-allocated and paged.

The time is that of the engine's runner: memory, index tensors, model, logits. Sampling does not depend on the cache.
The caches that one kernel reads take turns, step by step; "static again" is a second pre-allocated cache: how far it is
from the first is noise. Without graphs Python's time would decide, which differs by half from run to run.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from bench.gpu import caches
from bench.gpu.caches import BLOCK_SIZE
from bench.gpu.device import empty_cache, synchronize
from bench.gpu.figures import MISSING, Figures
from bench.gpu.models import llama
from bench.gpu.sides import CACHES, Side, best_over_best, low, ratios, sides
from bench.harness.decode_loop import DecodeLoop
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave

ABOUT = "whole decode steps of a model, as CUDA graphs: virtual, pre-allocated and paged"
RANK = 10
SECONDS = 100


class Work(NamedTuple):
    """Requests of `context` tokens each, and the most tokens of a request."""

    requests: int
    context: int
    limit: int


_ROUNDS = 40
_ROOM = 2 * _ROUNDS  # tokens of a request, for all steps
# Up to 16 GiB in each cache.
_CASES = [
    Work(32, 1024, 1024 + _ROOM),
    Work(16, 8192, 8192 + _ROOM),
    Work(4, 32_768, 32_768 + _ROOM),
    Work(1, 4096, 131_072),
]
_AGAIN = "static again"
_AGAIN_TOKENS = 2**16  # of all requests, up to which it is measured: four caches of 16 GiB do not fit 80 GB
Times = dict[Work, dict[Side, float]]  # medians


def run(quick: bool) -> Report:
    layers = 2 if quick else 32
    rounds = 5 if quick else _ROUNDS
    model = llama(layers=layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    compared = sides(["flash_attn_3"], instead_of=["torch_flash"])
    figures = Figures()
    seconds: Times = {}
    uncaptured: set[str] = set()
    for work in [Work(2, 64, 4096)] if quick else _CASES:
        for kernel in {side.kernel.name: side.kernel for side in compared}.values():
            of_kernel = [side for side in compared if side.kernel is kernel]
            if work.requests * work.context <= _AGAIN_TOKENS:
                of_kernel += [replace(side, cache=_AGAIN) for side in of_kernel if side.cache == "static"]
            usable = [side for side in of_kernel if not side.refusal]
            with ExitStack() as stack:
                loops = {side: _loop(stack, model, side, layers, work) for side in usable}
                timed = interleave({side: partial(_step, loop) for side, loop in loops.items()}, rounds, warmup=3)
                captured = {side for side, loop in loops.items() if loop.captured}
            del loops
            empty_cache()
            for side in of_kernel:
                found = median(timed[side]) if side in timed else None
                figures.append(_row(work, side, found, side in captured))
            seconds.setdefault(work, {}).update({side: median(timed[side]) for side in captured})
            uncaptured |= {str(side) for side in usable if side not in captured}
    return Report(
        parameters={
            "layers": layers,
            "parameters": parameters,
            "steps": rounds,
            "block_size": BLOCK_SIZE,
            MISSING: [str(side) for side in compared if side.refusal],
        },
        figures=figures,
        goals=[*_goals(seconds), Goal("sides whose steps are no CUDA graphs", len(uncaptured), "==", 0)],
    )


def _loop(stack: ExitStack, model: PreTrainedModel, side: Side, layers: int, work: Work) -> DecodeLoop:
    """A loop over a cache of its own; both are closed by the stack."""
    make = caches.static if side.cache == _AGAIN else CACHES[side.cache]
    kv: Any = make(work.requests, work.limit, layers=layers)
    stack.callback(kv.close)
    loop = DecodeLoop(
        model,
        kv,
        batch=work.requests,
        length=work.context,
        max_length=work.context + _ROOM,
        attention=side.kernel,
        logits=True,
        graphs=True,
    )
    stack.callback(loop.close)
    return loop


def _step(loop: DecodeLoop) -> None:
    loop.step()
    synchronize()


def _row(work: Work, side: Side, seconds: float | None, captured: bool) -> Row:
    return {
        **work._asdict(),
        "cache": side.cache,
        "kernel": side.kernel.name,
        "graphs": "yes" if captured else "no" if seconds is not None else "-",
        "ms per step": 1e3 * seconds if seconds is not None else "MISSING",
        "tokens/s": work.requests / seconds if seconds is not None else "-",
    }


def _goals(seconds: Times) -> list[Goal]:
    """Of sides with graphs. Pre-allocated against virtual by the same kernel, beside what two pre-allocated ones differ
    by; paged against virtual, each by its fastest. Of many ratios the tenth percentile, since the least is noise.
    """
    noise = low(ratios(seconds, _AGAIN, "static"))
    goals = []
    for what, found, bound in (
        ("pre-allocated over virtual", ratios(seconds, "static", "virtual"), 0.99 * min(1.0, noise)),
        ("best paged over best virtual", best_over_best(seconds), 1.0),
    ):
        if found:
            goals.append(
                Goal(f"seconds per step, {what} (10th percentile of {len(found)} cases)", low(found), ">=", bound)
            )
    return goals
