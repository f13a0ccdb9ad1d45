"""A trace of requests through the engine, end to end: virtual, pre-allocated and paged in the same memory.

Reproduces "online and offline serving" (Fig. 10/11): requests of mixed lengths arrive at random times (seed 0). What is
limited is the memory of the cache, so a cache that wastes less runs more of them at a time. The series are the trace:
running requests and memory in use, step by step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

from transformers import PreTrainedModel

from bench.gpu.engines import engine, kernels
from bench.gpu.figures import MISSING, Figures
from bench.gpu.models import llama
from bench.harness.report import Goal, Report, Row
from bench.harness.trace import Arrival, Played, play
from vattn.attention import Attention
from vattn.engine.scheduling.record import StepRecord

ABOUT = "a trace of requests through the engine, end to end"
RANK = 13
SECONDS = 130


def run(quick: bool) -> Report:
    model = llama(layers=2 if quick else 32)
    arrivals = _arrivals(model, 4 if quick else 48, rate=1000.0 if quick else 8.0, prompt=40 if quick else 1024)
    budget, longest = ("64MiB", 512) if quick else ("16GiB", 16_384)
    used, missing = kernels()
    figures = Figures()
    series: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    options: dict[str, Any] = {"memory_budget": budget, "max_model_len": longest, "max_num_batched_tokens": 2048}
    for kv, attention in used.items():
        steps: list[StepRecord] = []
        with engine(model, kv, attention, on_step=steps.append, **options) as llm:
            # Graphs are captured when their batch size and length are first met: by the same trace, whose prompts no
            # prefix cache keeps.
            play(llm, arrivals)
            steps.clear()
            played = play(llm, arrivals)
            captured = llm.core.runner.graphs is not None and llm.core.runner.graphs.captured
        row = _row(kv, attention, played, steps)
        rates[kv] = float(row["output tokens/s"])
        figures.append(row | {"graphs": "yes" if captured else "no"})
        series[f"running, {kv}"] = [float(step.num_running) for step in steps]
        series[f"used MiB, {kv}"] = [step.kv.used_bytes / 2**20 for step in steps]
    return Report(
        parameters={
            "layers": 2 if quick else 32,
            "requests": len(arrivals),
            "budget": budget,
            "max_model_len": longest,
            MISSING: missing,
        },
        figures=figures,
        goals=[
            Goal(f"output tokens/s, virtual over {other}", rates["virtual"] / rates[other], ">=", bound)
            for other, bound in {"static": 1.0, "paged": 1.0}.items()
            if other in rates
        ],
        series=series,
    )


def _arrivals(model: PreTrainedModel, count: int, *, rate: float, prompt: int) -> list[Arrival]:
    """Requests with log-normal lengths, at the times of a Poisson process of `rate` per second."""
    rng = random.Random(0)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        length = min(8 * prompt, math.ceil(prompt * rng.lognormvariate(0, 0.8)))
        tokens = [rng.randrange(model.config.vocab_size) for _ in range(length)]
        arrivals.append(Arrival(at, tokens, rng.randint(prompt // 8, prompt // 4)))
    return arrivals


def _row(
    name: str,
    attention: Attention,
    played: Played,
    steps: list[StepRecord],
) -> Row:
    tokens = sum(timing.output_tokens for timing in played.timings)
    firsts = [timing.ttft for timing in played.timings]
    decodes = [step for step in steps if not step.prefill_tokens] or steps

    def milliseconds(of: Callable[[StepRecord], float]) -> float:
        return 1e3 * median(map(of, decodes))

    return {
        "cache": name,
        "kernel": attention.name,
        "seconds": played.seconds,
        "output tokens/s": tokens / played.seconds,
        "TTFT s": median(firsts),
        "TTFT s, 90th percentile": quantiles(firsts, n=10)[8],
        "steps": len(steps),
        "of decodes only": len(decodes),
        "their schedule ms": milliseconds(lambda step: step.schedule_seconds),
        "prepare ms": milliseconds(lambda step: step.prepare_seconds),
        "forward ms": milliseconds(lambda step: step.forward_seconds),
        "most running": max(step.num_running for step in steps),
        "preempted": sum(step.num_preempted for step in steps),
        "used GiB": max(step.kv.used_bytes for step in steps) / 2**30,
        "waste %": 100 * sum(s.kv.waste_bytes for s in steps) / max(1, sum(s.kv.used_bytes for s in steps)),
    }
