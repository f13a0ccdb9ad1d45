"""Latency of decode iterations that need new memory: mapped ahead by the worker, and mapped on the spot.

Reproduces "decode latency with and without overlap" (Fig. 10/12). In the worst case, all requests reach the end of a
block in the same iteration, and each then needs a new page. There are three kinds of iteration:

    crossing  the new token is the first of a block, so this step is the first to need its page
    ahead     those before it in which the worker maps, with overlap: a cost that only moved shows here
    other     all others
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from statistics import mean, median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.decode_loop import DecodeLoop
from bench.harness.models import qwen2
from bench.harness.ratios import Comparison, columns, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import turns
from vattn import KVConfig, packed
from vattn.engine.kv.virtual import VirtualKV
from vattn.slots.table import most_ahead

ABOUT = "latency of decode iterations that need new memory, mapped ahead and mapped on the spot"
QUESTION = "Can new memory be mapped without a spike?"

_BATCH = 8
_MAX_LENGTH = 16_384
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
_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
_MODES = {"overlapped": True, "synchronous": False}
_PLOTTED_BLOCKS = 4


def run(quick: bool) -> Report:
    sizes = _MODEL | (_TINY if quick else {})
    page_size = _PAGE_SIZE // 32 if quick else _PAGE_SIZE
    model = qwen2(**sizes)
    shape = packed.kv_shape(model)
    batch, blocks = (2, 2) if quick else (_BATCH, 12)
    cores = torch.get_num_threads()
    thread_counts = sorted({cores, max(1, cores - 1)}, reverse=True)

    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, cores)
        backends: dict[tuple[int, str], VirtualKV] = {}
        for threads in thread_counts:
            for mode, overlap in _MODES.items():
                config = KVConfig(
                    groups=shape.groups(_MAX_LENGTH),
                    dtype=model.dtype,
                    max_batch_size=batch,
                    max_context_len=_MAX_LENGTH,
                    memory_budget=batch * (blocks + 3) * page_size,
                    page_size=page_size,
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
            for threads, mode in turns(loops, block - 1):
                loop = loops[threads, mode]
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
    ahead: dict[tuple[int, str], float] = {}
    for (threads, mode), measured in latencies.items():
        kinds: dict[str, list[float]] = {"crossing": [], "ahead": [], "other": []}
        for length, ms in measured:
            position = (length - 1) % block_tokens
            is_ahead = position >= block_tokens - most_ahead(block_tokens)
            kinds["crossing" if position == 0 else "ahead" if is_ahead else "other"].append(ms)
        other = median(kinds["other"])
        ratios[threads, mode] = median(kinds["crossing"]) / other
        ahead[threads, mode] = median(kinds["ahead"]) / other
        figures.append(
            {
                "threads": threads,
                "mapping": mode,
                "other ms": other,
                "crossing ms": median(kinds["crossing"]),
                "crossing / other": ratios[threads, mode],
                "ahead ms": median(kinds["ahead"]),
                "ahead / other": ahead[threads, mode],
                "mean ms": mean(ms for _, ms in measured),
                "waited ms": 1e3 * waits[threads, mode] / (blocks + 1),
            }
        )
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "batch": batch,
            "page_size": page_size,
            "layout": "fused NHD",
            "block_tokens": block_tokens,
            "crossings": blocks,
            "mapped MiB per crossing": batch * page_size // 2**20,
        },
        figures=figures,
        goals=[
            *(
                Goal(f"crossing over other, overlapped, {threads} threads", ratios[threads, "overlapped"], "<=", 1.05)
                for threads in thread_counts
            ),
            *(
                Goal(f"ahead over other, overlapped, {threads} threads", ahead[threads, "overlapped"], "<=", 1.10)
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


def compare(record: Record) -> list[Comparison]:
    sides = [{"mapping": mapping} for mapping in ("synchronous", "overlapped")]
    return [
        Comparison(
            "An iteration that maps its pages itself takes {} times as long as one whose pages were mapped ahead",
            record,
            rows(record, "crossing ms", sides[0], sides[1], same=["threads"]),
        ),
        Comparison(
            "An iteration whose pages were mapped ahead takes {} times as long as one that needs none",
            record,
            columns(record, "crossing / other", where=lambda row: row["mapping"] == "overlapped"),
            higher_is_better=False,
        ),
    ]


def draw(axes: Any, record: Record) -> None:
    threads = record["figures"][0]["threads"]
    crossing = {row["mapping"]: row["crossing / other"] for row in record["figures"] if row["threads"] == threads}
    series = {"synchronous": ("paged", "mapped when it is needed"), "overlapped": ("virtual", "mapped ahead")}
    for mapping, (name, label) in series.items():
        latencies = record["series"][f"{mapping}, {threads} threads"]
        axes.plot(latencies, color=theme.color(name), linewidth=1.3, label=label)
    axes.set_title(
        f"A step that needs new pages takes {theme.more_time(crossing['synchronous'])} than others if it maps them, "
        f"{theme.more_time(crossing['overlapped'])} if they were mapped ahead"
    )
    axes.set(xlabel=f"decode step, {threads} threads", ylabel="milliseconds", ylim=(0, None))
