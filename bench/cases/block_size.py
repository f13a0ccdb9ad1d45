"""The waste of a larger block, and the cost of a smaller one.

Reproduces the classic "block-size trade-off" (1, 16 and 128 tokens: about 0, 8 and 64 wasted at a request's tail; 8192,
512 and 64 table entries for 8K tokens), with the attention's time measured: paged by block size and virtual by page
size, relative to static's tensors. Blocks of a request are neighbours (`paged`), or lie as they do in a pool in which
requests have come and gone (`paged, used`). On a CPU all run vattn's own kernel, which follows a block table in place.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, closing
from statistics import mean, median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.decode_loop import DecodeLoop
from bench.harness.fragmented import fragment
from bench.harness.models import qwen2
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import packed
from vattn.engine.kv.base import KVBackend
from vattn.engine.kv.make import make_backend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV

ABOUT = "waste of larger blocks, cost of smaller ones"
QUESTION = "What does a larger block waste, and a smaller one cost?"

_BLOCK_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
_PAGE_SIZES = (4096, 16_384, 65_536)
_TABLE_TOKENS = 8192
_BATCH = 8
_WARMUP = 3
_SEED = 0
_MODEL = {
    "vocab_size": 1000,
    "hidden_size": 896,
    "intermediate_size": 896,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": _TABLE_TOKENS,
}


def run(quick: bool) -> Report:
    model = qwen2(**_MODEL)
    shape = packed.kv_shape(model)
    block_sizes, page_sizes = ((1, 16, 128), (4096,)) if quick else (_BLOCK_SIZES, _PAGE_SIZES)
    context, rounds = (256, 5) if quick else (4096, 40)
    calls = rounds + _WARMUP
    draw = random.Random(_SEED)
    lengths = [draw.randint(1, _TABLE_TOKENS) for _ in range(10_000)]

    with ExitStack() as stack:

        def make(kv: str, block_size: int = 16, **options: Any) -> KVBackend:
            backend = make_backend(
                kv,
                KVSpec(
                    shape,
                    dtype=model.dtype,
                    device=model.device,
                    max_num_seqs=_BATCH + 16,  # 16 to use a pool with
                    max_model_len=context + calls,
                    memory_budget="1GiB",
                    block_size=block_size,
                    kv_options=options,
                ),
            )
            stack.enter_context(closing(backend))
            return backend

        def used(block_size: int) -> KVBackend:
            backend = make("paged", block_size, num_blocks=_BATCH * -(-(context + calls) // block_size))
            assert isinstance(backend, PagedKV)
            fragment(backend, context)
            return backend

        backends = {("static", 0): make("static")}
        for size in block_sizes:
            backends["paged", size] = make("paged", size)
            backends["paged, used", size] = used(size)
        for size in page_sizes:
            virtual = make("virtual", page_size=size, layout="layer")
            assert isinstance(virtual, VirtualKV)
            backends["virtual", virtual.cache.layout.page_tokens] = virtual
        steps = {
            key: DecodeLoop(model, kv, batch=_BATCH, length=context, max_length=context + calls).attention_steps(calls)
            for key, kv in backends.items()
        }
        seconds = interleave(steps, rounds, warmup=_WARMUP)
    static = seconds.pop(("static", 0))
    figures: list[Row] = [
        {
            "backend": name,
            "block tokens": block,
            "mean unused rows": mean(-length % block for length in lengths),
            "blocks of 8192 tokens": _TABLE_TOKENS // block,
            "attention ms": 1e3 * median(taken),
            "over static": median(a / b for a, b in zip(taken, static, strict=True)),
        }
        for (name, block), taken in seconds.items()
    ]

    def find(name: str, block: int) -> Row:
        return next(row for row in figures if (row["backend"], row["block tokens"]) == (name, block))

    virtual_ms = [float(row["attention ms"]) for row in figures if row["backend"] == "virtual"]
    return Report(
        parameters={
            "model": _MODEL,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "batch": _BATCH,
            "context": context,
            "calls": rounds,
            "static, attention ms": round(1e3 * median(static), 3),
            "lengths for the unused rows": f"even, 1 to {_TABLE_TOKENS}, seed {_SEED}",
        },
        figures=figures,
        goals=[
            Goal("mean unused rows, 16 tokens", float(find("paged", 16)["mean unused rows"]), "<=", 8),
            Goal("mean unused rows, 128 tokens", float(find("paged", 128)["mean unused rows"]), "<=", 64),
            Goal(
                "attention, blocks of 1 over blocks of 16",
                float(find("paged", 1)["attention ms"]) / float(find("paged", 16)["attention ms"]),
                ">=",
                1.1,
            ),
            Goal("attention, virtual, slowest over fastest page size", max(virtual_ms) / min(virtual_ms), "<=", 1.05),
        ],
    )


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "Attention over scattered blocks of any size takes {} times as long as over static tensors",
            record,
            columns(record, "over static", where=lambda row: row["backend"] == "paged, used"),
        ),
        Comparison(
            "Attention over virtual tensors, with pages of any size, takes {} times as long as over static ones",
            record,
            columns(record, "over static", where=lambda row: row["backend"] == "virtual"),
            higher_is_better=False,
        ),
    ]


def draw(axes: Any, record: Record) -> None:
    labels = {"paged": "paged, fresh pool", "paged, used": "paged, pool in use", "virtual": "virtual"}
    sizes = sorted({row["block tokens"] for row in record["figures"]})
    for (backend, label), name in zip(labels.items(), ("other", "paged", "virtual"), strict=True):
        rows = [row for row in record["figures"] if row["backend"] == backend]
        if rows:
            times = [row["over static"] for row in rows]
            axes.plot([row["block tokens"] for row in rows], times, **theme.style(name), label=label)
    theme.reference(axes, "static reservation")
    paged = [row for row in record["figures"] if row["backend"].startswith("paged")]
    least, most = (pick(paged, key=lambda row: row["block tokens"]) for pick in (min, max))
    cost = max(row["over static"] for row in paged if row["block tokens"] == least["block tokens"])
    axes.set_title(
        f"Blocks of {least['block tokens']}: attention takes {theme.more_time(cost)} than with static; blocks of "
        f"{most['block tokens']}: {most['mean unused rows']:.0f} rows of a request are unused"
    )
    axes.set(xlabel="tokens per block", ylabel="time of attention, over static's", ylim=(0, None))
    theme.doublings(axes, sizes)
