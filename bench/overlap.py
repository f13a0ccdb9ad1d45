"""Latency of decode iterations that need new memory: mapped ahead by the worker, and mapped on the spot.

Reproduces "decode latency with and without overlap" (Fig. 10/12). All requests reach the end of a block in the same
iteration, which is the worst case, and each then needs a page that did not exist before. Three kinds of iteration:

    crossing  the new token is the first of a block: its page was needed by this step and by none before
    ahead     the one before: with overlap, the worker maps while this one computes, so a cost moved is seen here
    other     all others
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from statistics import mean, median

import torch

from bench.common import Goal, Report, Row
from bench.decoding import DecodeLoop, qwen2
from vattn import KVConfig, packed
from vattn.engine.kv.virtual import VirtualKV

_BATCH = 8
_PAGE_SIZE = 2 * 2**20
_MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_MODES = {"overlapped": True, "synchronous": False}
_PLOTTED_BLOCKS = 4


def run(quick: bool) -> Report:
    sizes = _MODEL | ({"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64} if quick else {})
    model = qwen2(**sizes)
    shape = packed.kv_shape(model)
    layer = shape.layers[0]
    batch, blocks = (2, 2) if quick else (_BATCH, 12)
    cores = torch.get_num_threads()
    thread_counts = sorted({cores, max(1, cores - 1)}, reverse=True)

    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, cores)
        backends: dict[tuple[int, str], VirtualKV] = {}
        for threads in thread_counts:
            for mode, overlap in _MODES.items():
                config = KVConfig(
                    num_layers=shape.num_layers,
                    num_kv_heads=layer.num_kv_heads,
                    head_dim=layer.head_dim,
                    dtype=model.dtype,
                    max_batch_size=batch,
                    max_context_len=16_384,
                    memory_budget=batch * (blocks + 3) * _PAGE_SIZE,
                    page_size=_PAGE_SIZE,
                    layout="fused",
                    kv_order="NHD",
                    overlap=overlap,
                    deferred_reclamation=False,
                    eager_pages=0,
                )
                backends[threads, mode] = stack.enter_context(closing(VirtualKV(config)))
        block_tokens = next(iter(backends.values())).cache.layout.page_tokens
        # Turns begin and end in the middle of a block, far from the iterations that are looked for.
        start = block_tokens // 2
        most = start + (blocks + 1) * block_tokens
        loops = {key: DecodeLoop(model, kv, batch=batch, length=start, max_length=most) for key, kv in backends.items()}
        latencies: dict[tuple[int, str], list[tuple[int, float]]] = {key: [] for key in loops}
        for block in range(blocks + 1):
            for (threads, mode), loop in loops.items():
                torch.set_num_threads(threads)
                for _ in range(block_tokens):
                    begin = time.perf_counter()
                    loop.step()
                    elapsed = time.perf_counter() - begin
                    if block:  # the first turn warms up
                        latencies[threads, mode].append((loop.length, 1e3 * elapsed))
        waits = {key: kv.stats().wait_seconds for key, kv in backends.items()}

    figures: list[Row] = []
    ratios: dict[tuple[int, str], float] = {}
    for (threads, mode), measured in latencies.items():
        kinds: dict[str, list[float]] = {"crossing": [], "ahead": [], "other": []}
        for length, ms in measured:
            position = (length - 1) % block_tokens
            kinds["crossing" if position == 0 else "ahead" if position == block_tokens - 1 else "other"].append(ms)
        other = median(kinds["other"])
        ratios[threads, mode] = median(kinds["crossing"]) / other
        figures.append(
            {
                "threads": threads,
                "mapping": mode,
                "other ms": other,
                "crossing ms": median(kinds["crossing"]),
                "crossing / other": ratios[threads, mode],
                "ahead ms": median(kinds["ahead"]),
                "ahead / other": median(kinds["ahead"]) / other,
                "mean ms": mean(ms for _, ms in measured),
                "waited ms": 1e3 * waits[threads, mode] / (blocks + 1),
            }
        )
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "batch": batch,
            "page_size": _PAGE_SIZE,
            "layout": "fused NHD",
            "block_tokens": block_tokens,
            "crossings": blocks,
            "mapped MiB per crossing": batch * _PAGE_SIZE // 2**20,
        },
        figures=figures,
        goals=[
            *(
                Goal(f"crossing over other, overlapped, {threads} threads", ratios[threads, "overlapped"], "<=", 1.05)
                for threads in thread_counts
            ),
            Goal(f"the spike to hide: synchronous, {cores} threads", ratios[cores, "synchronous"], ">=", 1.05),
            Goal(
                f"shortest iteration in ms, {cores} threads",
                min(float(row["other ms"]) for row in figures if row["threads"] == cores),
                ">=",
                10,
            ),
        ],
        series={
            f"{mode}, {threads} threads": [ms for _, ms in measured[-_PLOTTED_BLOCKS * block_tokens :]]
            for (threads, mode), measured in latencies.items()
        },
    )
