"""Prompts through the engine: prefill tokens/s of Llama-3-8B's shape with random weights, over each backend.

Reproduces "prefill throughput" (Fig. 8): one request at a time, computed in chunks, from its arrival to its first
token. Pages of the virtual cache are parked, which the prompt before has left mapped in the slot, or new: given back to
the device before the prompt, so that the driver creates and maps all of them meanwhile.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from bench.gpu.engines import engine, kernels
from bench.gpu.figures import MISSING, Figures
from bench.gpu.models import llama
from bench.harness.report import Goal, Report
from vattn.engine import LLM, SamplingParams

ABOUT = "prefill tokens/s of a model through the engine: virtual, pre-allocated and paged"
RANK = 16
SECONDS = 90

_PARKED, _NEW, _ALL = "parked", "new", "all there"
_SAMPLING = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def run(quick: bool) -> Report:
    model = llama(layers=2 if quick else 32)
    lengths, chunk, rounds = ([64], 32, 1) if quick else ([1024, 8192, 32_768, 65_536], 8192, 2)
    used, missing = kernels()
    figures = Figures()
    rates: dict[tuple[str, str, int], float] = {}
    for kv, attention in used.items():
        longest = max(lengths) + 1
        options: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": 1, "max_num_batched_tokens": chunk}
        with engine(model, kv, attention, memory_budget="64MiB" if quick else "24GiB", **options) as llm:
            rng = random.Random(0)
            for length in lengths:
                prompt = [rng.randrange(model.config.vocab_size) for _ in range(length)]
                _first_token(llm, prompt)  # warms up, and leaves the pages that are then parked
                for pages in (_PARKED, _NEW) if kv == "virtual" else (_ALL,):
                    seconds = []
                    for _ in range(rounds if length < 2**16 else 1):
                        if pages == _NEW:
                            llm.core.kv.trim()
                        seconds.append(_first_token(llm, prompt))
                    rates[kv, pages, length] = length / median(seconds)
                    figures.append(
                        {
                            "cache": kv,
                            "kernel": attention.name,
                            "pages": pages,
                            "prompt": length,
                            "ms": 1e3 * median(seconds),
                            "tokens/s": rates[kv, pages, length],
                        }
                    )
    bounds = {"static": 0.99, "paged": 1.0}
    # Short prompts take the time of Python on the host: the same one took 34 ms, and 42.
    compared = [length for length in lengths if quick or length >= 8192]
    return Report(
        parameters={"layers": 2 if quick else 32, "chunk": chunk, "rounds": rounds, MISSING: missing},
        figures=figures,
        goals=[
            Goal(
                f"prefill tokens/s from {compared[0]}, pages {pages}, virtual over {other} (least)",
                min(rates["virtual", pages, length] / rates[other, _ALL, length] for length in compared),
                ">=",
                bound,
            )
            for pages in (_PARKED, _NEW)
            for other, bound in bounds.items()
            if other in used
        ],
    )


def _first_token(llm: LLM, prompt: list[int]) -> float:
    return llm.generate(prompt, _SAMPLING, use_tqdm=False)[0].metrics.time_to_first_token or 0.0
