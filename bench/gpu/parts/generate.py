"""`generate()` of transformers: VirtualCache beside DynamicCache and StaticCache, by time and by memory.

StaticCache is measured at exactly the size that the request needs, and at twice that: its attention reads all of it.
Nothing is compiled, so that the model is the same. Memory is what the request took from the device, weights left out.
The caches take turns, three times. A token's time has no goal: it is Python's on the host, not the device's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, KV_HEADS, STUB, empty_cache, synchronize
from bench.gpu.figures import Figures
from bench.gpu.models import llama
from bench.harness.models import CACHE
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import turns
from vattn import VirtualCache

ABOUT = "VirtualCache beside DynamicCache and StaticCache under generate()"
RANK = 18
SECONDS = 180

_WARMUP = 4  # tokens: a prompt and decode steps
_BLOCK = 128  # tokens that "auto" covers with a block, of which a row has one that is not full


def run(quick: bool) -> Report:
    layers, new, rounds = (2, 4, 1) if quick else (32, 16, 3)
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
        prefills, wholes, memory = _rounds(model, ids, makers, new, rounds)
        for name in makers:
            prefill, whole = median(prefills[name]), median(wholes[name])
            cache_bytes, peak = memory[name]
            row: Row = {
                "batch": batch,
                "context": context,
                "cache": name,
                "prefill ms": 1e3 * prefill,
                "ms per token": 1e3 * (whole - prefill) / (new - 1),
                "cache MiB": cache_bytes / 2**20,
                "peak MiB": peak / 2**20,
                "least MiB": total * _token_bytes(layers) / 2**20,
            }
            figures.append(row)
            by_case[batch, context, name] = row

    waste = [
        (float(row["cache MiB"]) - float(row["least MiB"])) * 2**20 / _token_bytes(layers) / batch
        for (batch, _, cache), row in by_case.items()
        if cache == "virtual"
    ]

    def least(other: str, column: str, tokens: int = 0) -> float:
        """Over prompts of at least so many tokens together: shorter ones take the time of Python on the host."""
        return min(
            float(by_case[batch, context, other][column]) / float(row[column])
            for (batch, context, cache), row in by_case.items()
            if cache == "virtual" and batch * context >= tokens
        )

    long = 32 if quick else 8192
    return Report(
        parameters={"layers": layers, "new tokens": new, "rounds": rounds, "attention": "sdpa"},
        figures=figures,
        goals=[
            Goal(
                f"prefill from {long} tokens, dynamic over virtual (least)",
                least("dynamic", "prefill ms", long),
                ">=",
                0.99,
            ),
            Goal("tokens for which a row of the virtual cache has unused memory (most)", max(waste), "<=", _BLOCK),
        ],
    )


def _token_bytes(layers: int) -> int:
    return 2 * layers * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def _rounds(
    model: Any, ids: torch.Tensor, makers: Mapping[str, Callable[[], Any]], new: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, tuple[int, int]]]:
    """Of each cache the seconds to the first token and those of all tokens, and its bytes and those at the peak."""
    prefills: dict[str, list[float]] = {name: [] for name in makers}
    wholes: dict[str, list[float]] = {name: [] for name in makers}
    memory: dict[str, tuple[int, int]] = {}
    for make in makers.values():
        _generate(model, ids, make, _WARMUP)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for name in turns(makers, number):
                prefills[name].append(_generate(model, ids, makers[name], 1)[0])
                seconds, held, peak = _generate(model, ids, makers[name], new)
                wholes[name].append(seconds)
                memory[name] = held, peak
    finally:
        gc.enable()
    return prefills, wholes, memory


def _makers(model: Any, tokens: int, budget: str) -> dict[str, Callable[[], Any]]:
    return {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(model.config, max_cache_len=tokens),
        "static, twice as long": lambda: StaticCache(model.config, max_cache_len=2 * tokens),
        "virtual": lambda: VirtualCache(model, memory_budget=budget),
    }


def _generate(model: Any, ids: torch.Tensor, make: Callable[[], Any], new: int) -> tuple[float, int, int]:
    """Seconds; bytes of the cache's own memory; bytes of all memory at its peak, without the weights."""
    gc.collect()  # a cache in a cycle would keep its memory, with automatic collection off
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
