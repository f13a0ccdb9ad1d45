"""One sequence, step by step: its block table beside its pages.

Reproduces the classic "table demo" (a prompt of 24 tokens and 61 generated ones, in blocks of 16), with a second
sequence that grows at the same time, so that blocks are taken in turn. At each boundary of a block: which physical
blocks the sequence has, how full the last one is, and how far the virtual tensor is backed. The paged backend's kernel
finds a token by the list of blocks; the virtual tensor's by its position, since its rows are one range of addresses.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack, closing
from typing import Any

import torch

from bench.harness import theme
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from vattn.engine.kv.make import make_backend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV
from vattn.packed import KVShape

ABOUT = "one sequence step by step: its block table beside its pages"
QUESTION = "How does a sequence lie in blocks, and how in pages?"

_BLOCK = 16
_SHAPE = KVShape.uniform(4, 2, 32, 32)


def run(quick: bool) -> Report:
    prompt, generated = (24, 20) if quick else (24, 61)
    spec = KVSpec(
        _SHAPE, dtype=torch.float32, max_num_seqs=2, max_model_len=128, memory_budget="1MiB", block_size=_BLOCK
    )
    figures: list[Row] = []
    with ExitStack() as stack:
        paged = stack.enter_context(closing(make_backend("paged", spec)))
        virtual = stack.enter_context(closing(make_backend("virtual", spec)))
        assert isinstance(paged, PagedKV)
        assert isinstance(virtual, VirtualKV)
        slots = {kv: (kv.allocate(prompt), kv.allocate(prompt)) for kv in (paged, virtual)}
        for tokens in (_BLOCK, *range(prompt, prompt + generated + 1)):
            for kv, pair in slots.items():
                for slot in pair:
                    kv.prepare({slot: tokens})
            if tokens % _BLOCK and tokens not in (prompt, prompt + generated):
                continue
            own = slots[virtual][0]
            mapped = next(each for each in virtual.cache.page_map() if each.reqid == own)
            count = -(-tokens // _BLOCK)
            table: list[int] = paged.block_table[slots[paged][0], :count].tolist()
            figures.append(
                {
                    "after": "prefill"
                    if tokens == prompt
                    else "the end"
                    if tokens == prompt + generated
                    else "a block",
                    "tokens": tokens,
                    "blocks": count,
                    "block table": " ".join(map(str, table)),
                    "last block": f"{tokens - (count - 1) * _BLOCK}/{_BLOCK}",
                    "pages": virtual.needed(tokens),
                    "needed rows": virtual.needed(tokens) * virtual.cache.layout.page_size // virtual.token_bytes,
                    "backed rows": mapped.mapped,
                }
            )
        geometry = repr(virtual.cache)
    last = [int(block) for block in str(figures[-1]["block table"]).split()]
    neighbours = sum(b == a + 1 for a, b in itertools.pairwise(last))
    return Report(
        parameters={"prompt": prompt, "generated": generated, "block_size": _BLOCK, "virtual": geometry},
        figures=figures,
        goals=[
            Goal("blocks that follow their predecessor, with two sequences in turn", neighbours, "==", 0),
            Goal("backed rows below the tokens", sum(row["backed rows"] < row["tokens"] for row in figures), "==", 0),  # type: ignore[operator]
        ],
        timed=False,
    )


def draw(axes: Any, record: Record) -> None:
    last = record["figures"][-1]
    size = record["parameters"]["block_size"]
    table = [int(block) for block in last["block table"].split()]
    for logical, physical in enumerate(table):
        filled = min(size, last["tokens"] - logical * size)
        for row, start, text in ((1, logical * size, str(physical)), (0, physical * size, str(logical))):
            axes.barh(row, size, left=start, height=0.55, color=theme.GROUND, edgecolor=theme.color("paged"))
            axes.barh(row, filled, left=start, height=0.55, color=theme.color("paged"), alpha=0.45)
            axes.text(start + size / 2, row, text, ha="center", va="center", fontsize=8)
    axes.barh(2, last["needed rows"], height=0.55, color=theme.GROUND, edgecolor=theme.OURS)
    axes.barh(2, last["tokens"], height=0.55, color=theme.OURS, alpha=0.45)
    axes.set_yticks([0, 1, 2], ["blocks, in the pool", "blocks, in order", "virtual rows"])
    axes.grid(visible=False, axis="y")
    axes.set_title(
        f"{last['tokens']} tokens lie in blocks {', '.join(map(str, table))} of the pool, "
        f"or in rows 0 to {last['tokens'] - 1} of a virtual tensor"
    )
    axes.set_xlabel("tokens from the start of the pool, or of the sequence")
