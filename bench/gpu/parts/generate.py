"""`generate()` of transformers: VirtualCache beside DynamicCache and StaticCache, by time and by memory.

StaticCache is measured at exactly the size that the request needs, and at twice that: its attention reads all of it.
Nothing is compiled, so that the model is the same. Memory is what the request took from the device, weights left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, KV_HEADS, STUB, empty_cache, synchronize
from bench.gpu.figures import Figures
from bench.gpu.models import llama
from bench.harness.models import CACHE
from bench.harness.report import Goal, Report, Row
from vattn import VirtualCache

ABOUT = "VirtualCache beside DynamicCache and StaticCache under generate()"
RANK = 18
SECONDS = 150


def run(quick: bool) -> Report:
    layers, new = (2, 4) if quick else (32, 32)
    model: Any = llama(layers=layers)
    model.set_attn_implementation("sdpa")
    # It plans anew for every shape, so that caches that grow would pay per token, and a StaticCache would not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    figures = Figures()
    by_case: dict[tuple[int, int, str], Row] = {}
    for batch, context in [(1, 32)] if quick else [(1, 8192), (8, 1024), (1, 32_768), (1, 1024)]:
        total = batch * (context + new)
        makers = _makers(model, context + new, "64MiB" if quick else "24GiB")
        ids = torch.randint(model.config.vocab_size, (batch, context), device=DEVICE)
        for name, make in makers.items():
            prefill = min(_generate(model, ids, make, 1)[0] for _ in range(2))  # the first warms up
            whole, cache_bytes, peak = _generate(model, ids, make, new)
            row: Row = {
                "batch": batch,
                "context": context,
                "cache": name,
                "prefill ms": 1e3 * prefill,
                "ms per token": 1e3 * (whole - prefill) / (new - 1),
                "cache MiB": cache_bytes / 2**20,
                "peak MiB": peak / 2**20,
                "least MiB": total * 2 * layers * KV_HEADS * HEAD_DIM * DTYPE.itemsize / 2**20,
            }
            figures.append(row)
            by_case[batch, context, name] = row

    def least(other: str, column: str, tokens: int = 0) -> float:
        """Over prompts of at least so many tokens together: shorter ones take the time of Python on the host."""
        return min(
            float(by_case[batch, context, other][column]) / float(row[column])
            for (batch, context, cache), row in by_case.items()
            if cache == "virtual" and batch * context >= tokens
        )

    long = 32 if quick else 8192
    return Report(
        parameters={"layers": layers, "new tokens": new, "attention": "sdpa"},
        figures=figures,
        goals=[
            Goal("ms per token, dynamic over virtual (least)", least("dynamic", "ms per token"), ">=", 1.0),
            Goal("ms per token, static over virtual (least)", least("static", "ms per token"), ">=", 0.99),
            Goal(
                f"prefill from {long} tokens, dynamic over virtual (least)",
                least("dynamic", "prefill ms", long),
                ">=",
                0.99,
            ),
            Goal("peak memory, dynamic over virtual (least)", least("dynamic", "peak MiB"), ">=", 1.0),
        ],
    )


def _makers(model: Any, tokens: int, budget: str) -> dict[str, Callable[[], Any]]:
    return {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(model.config, max_cache_len=tokens),
        "static, twice as long": lambda: StaticCache(model.config, max_cache_len=2 * tokens),
        "virtual": lambda: VirtualCache(model, memory_budget=budget),
    }


def _generate(model: Any, ids: torch.Tensor, make: Callable[[], Any], new: int) -> tuple[float, int, int]:
    """Seconds; bytes of the cache's own memory; bytes of all memory at its peak, without the weights."""
    cache = make()
    empty_cache()
    if not STUB:
        torch.cuda.reset_peak_memory_stats()
    before = 0 if STUB else torch.cuda.memory_allocated()
    synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{CACHE: cache},
            min_new_tokens=new,
            max_new_tokens=new,
            do_sample=False,
            disable_compile=True,
        )
    synchronize()
    seconds = time.perf_counter() - start
    peak = 0 if STUB else torch.cuda.max_memory_allocated() - before
    if isinstance(cache, VirtualCache):
        held = cache.stats().peak_mapped_bytes
        cache.close()
        return seconds, held, peak + held
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return seconds, held, max(peak, held)
