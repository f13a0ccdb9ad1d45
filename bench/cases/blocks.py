"""Blocks used by each request, out of those that a static reservation would take.

Reproduces the classic "blocks used per request" (2 blocks for a short answer, 81 for a long one, 128 reserved for
either) over the demo's queue: the engine produces the tokens, and the backends say how much memory they need.
"""

from __future__ import annotations

from contextlib import closing
from statistics import median
from typing import Any

from bench.demo_queue import MAX_TOKENS, Queue, run_queue
from bench.harness import theme
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from vattn import packed
from vattn.engine.kv.make import make_backend
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV

ABOUT = "blocks that each request uses, of those that a reservation would take"
QUESTION = "How much of a reservation does a request use?"

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 2048


def run(quick: bool) -> Report:
    queue = Queue.load()
    if quick:
        queue = queue.first(6)
    done = run_queue(
        queue, max_tokens=40 if quick else MAX_TOKENS, kv="paged", max_num_seqs=8, max_num_batched_tokens=256
    )

    packed.register()
    queue.model.set_attn_implementation(packed.NAME)
    options: dict[str, Any] = {
        "dtype": queue.model.dtype,
        "device": queue.model.device,
        "max_num_seqs": 8,
        "max_model_len": _MAX_MODEL_LEN,
        "memory_budget": "64MiB",
        "block_size": _BLOCK_SIZE,
    }
    shape = packed.kv_shape(queue.model)
    reserved = _MAX_MODEL_LEN // _BLOCK_SIZE
    figures: list[Row] = []
    with (
        closing(make_backend("paged", KVSpec(shape, **options))) as paged,
        closing(make_backend("virtual", KVSpec(shape, **options))) as virtual,
    ):
        assert isinstance(virtual, VirtualKV)
        layout = virtual.cache.layout
        for index, tokens in enumerate(done.cached_tokens):
            blocks, pages = paged.needed(tokens), virtual.needed(tokens)
            mapped = pages * layout.page_size / layout.bytes_per_token
            figures.append(
                {
                    "prompt": queue.title(index),
                    "tokens": tokens,
                    "blocks": blocks,
                    "of reserved %": 100 * blocks / reserved,
                    "unused rows": blocks * _BLOCK_SIZE - tokens,
                    "virtual pages": pages,
                    "virtual unused rows": round(mapped - tokens),
                }
            )
        geometry = repr(virtual.cache)
        virtual_block = layout.page_tokens

    used = [int(row["blocks"]) for row in figures]
    return Report(
        parameters={
            "model": "demo/model, float32",
            "block_size": _BLOCK_SIZE,
            "static reservation in blocks": reserved,
            "virtual": geometry,
        },
        figures=figures,
        goals=[
            Goal("most unused rows, paged", max(int(row["unused rows"]) for row in figures), "<=", _BLOCK_SIZE - 1),
            Goal(
                "most unused rows, virtual",
                max(int(row["virtual unused rows"]) for row in figures),
                "<=",
                virtual_block - 1,
            ),
            Goal("mean blocks over those that static reserves", sum(used) / len(used) / reserved, "<=", 0.25),
            Goal("most blocks over fewest", max(used) / min(used), ">=", 4),
        ],
        timed=False,
    )


def draw(axes: Any, record: Record) -> None:
    rows = sorted(record["figures"], key=lambda row: row["tokens"])
    blocks = [row["blocks"] for row in rows]
    reserved = record["parameters"]["static reservation in blocks"]
    axes.bar(range(1, len(rows) + 1), blocks, color=theme.OURS, label="blocks that the request used")
    axes.axhline(reserved, color=theme.INK, linewidth=1.5, label="blocks that static reserves")
    axes.set_title(f"Half of the requests need at most {median(blocks):g} of the {reserved} blocks reserved for each")
    axes.set(xlabel="requests, from the shortest to the longest", ylabel="blocks", ylim=(0, 1.05 * reserved))
