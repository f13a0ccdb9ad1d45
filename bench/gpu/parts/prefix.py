"""Requests with one long prompt in common, through the engine: time to first token with and without a prefix cache.

The first request computes the prompt, the others find it: over block tables, or over aliased pages, which are mapped in
slots that have not the prompt ("cold"). A second wave of requests ("again") finds slots in which the prompt is mapped.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from bench.gpu import PAGE
from bench.gpu.device import STUB
from bench.gpu.engines import engine, kernels
from bench.gpu.figures import MISSING, Figures
from bench.gpu.models import llama
from bench.harness.report import Goal, Report
from vattn.engine import SamplingParams
from vattn.engine.scheduling.record import StepRecord

ABOUT = "requests with a prompt in common: time to first token, memory"
RANK = 11
SECONDS = 80

_FUSED = "virtual, fused"
_FUSED_PAGE = PAGE if STUB else 8 * PAGE  # the host, in the place of the device, has none above 2 MiB


def run(quick: bool) -> Report:
    layers = 8 if quick else 32
    model = llama(layers=layers)
    requests, common, own, output = (2, 300, 8, 4) if quick else (16, 8192, 128, 32)
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(model.config.vocab_size) for _ in range(count)]

    system = tokens(common)
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    used, missing = kernels()
    figures = Figures()
    for name, kv, prefixes, more in (
        ("none", "virtual", False, {}),
        ("virtual", "virtual", True, {}),
        ("virtual, pages of 2 MiB", "virtual", True, {"layout": "sliced", "page_size": PAGE}),
        (_FUSED, "virtual", True, {"layout": "fused", "page_size": _FUSED_PAGE}),  # half as many mappings
        ("paged", "paged", True, {}),
    ):
        if kv not in used:
            continue
        steps: list[StepRecord] = []
        options: dict[str, Any] = {"max_model_len": 2 * common, "memory_budget": "256MiB" if quick else "24GiB"}
        options |= {"max_num_seqs": requests, "max_num_batched_tokens": 2048}
        if kv == "virtual":
            options["kv_options"] = {"kv_order": "NHD", **more}
        with engine(model, kv, used[kv], prefixes=prefixes, on_step=steps.append, **options) as llm:
            llm.generate([tokens(own) for _ in range(requests)], sampling, use_tqdm=False)  # warms up
            llm.core.kv.evict_prefixes()
            alone = llm.generate(system, sampling, use_tqdm=False)
            steps.clear()
            outputs = llm.generate([system + tokens(own) for _ in range(requests)], sampling, use_tqdm=False)
            first_steps = list(steps)
            again = llm.generate([system + tokens(own) for _ in range(requests)], sampling, use_tqdm=False)
            block = llm.core.kv.prefix_block_tokens
        figures.append(
            {
                "prefix cache": name,
                "tokens per block": block,
                "TTFT of the prompt s": alone[0].metrics.time_to_first_token or 0.0,
                "TTFT s": median(out.metrics.time_to_first_token or 0.0 for out in outputs),
                "TTFT again s": median(out.metrics.time_to_first_token or 0.0 for out in again),
                "prefill tokens": sum(step.prefill_tokens for step in first_steps),
                "used GiB": max(step.kv.used_bytes for step in first_steps) / 2**30,
                "ms in prepare": 1e3 * sum(step.prepare_seconds for step in first_steps),
            }
        )
    by_name = {row["prefix cache"]: row for row in figures}

    def over(other: str, column: str, name: str = "virtual") -> float:
        return float(by_name[name][column]) / float(by_name[other][column])

    goals = [
        Goal("TTFT in cold slots, virtual over no prefix cache", over("none", "TTFT s"), "<=", 0.2),
        Goal("TTFT again, virtual over no prefix cache", over("none", "TTFT again s"), "<=", 0.2),
        Goal("bytes held, virtual over no prefix cache", over("none", "used GiB"), "<=", 0.2),
    ]
    if "paged" in by_name:
        for name in ("virtual", _FUSED):
            goals.append(Goal(f"TTFT in cold slots, {name} over paged", over("paged", "TTFT s", name), "<=", 1.0))
            goals.append(Goal(f"TTFT again, {name} over paged", over("paged", "TTFT again s", name), "<=", 1.0))
    return Report(
        parameters={
            "layers": layers,
            "requests": requests,
            "common": common,
            "own": own,
            "fused page MiB": _FUSED_PAGE // 2**20,
            MISSING: missing,
        },
        figures=figures,
        goals=goals,
    )
