"""Sequences that fit a memory budget: each backend admits sequences until it refuses.

Reproduces the classic "contiguous against paged capacity in a memory budget" (TinyLlama's shape in float32, 2048 tokens
at most, 200 used: 45 sequences against 440 in 4 GB; 50 to 90 % wasted against less than 4 %) in a smaller budget.
Virtual is measured twice: in the layout that it chooses for so many requests, and in the coarsest layout, which
attention reads fastest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import repeat
from typing import Any

import torch

from bench.harness import theme
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from vattn.engine.kv.base import KVBackend
from vattn.engine.kv.make import make_backend
from vattn.engine.kv.spec import KVSpec
from vattn.errors import NoFreeSlot, OutOfPages
from vattn.packed import KVShape

ABOUT = "sequences that fit a memory budget, by backend"
QUESTION = "How many sequences fit a budget?"

_SHAPE = KVShape.uniform(num_layers=22, num_kv_heads=4, head_dim=64, v_head_dim=64)
_MAX_MODEL_LEN = 2048
_TOKENS = 200
_SIGMA = 0.6
_SEED = 0
_CASES = {
    "static": ("static", None),
    "dynamic": ("dynamic", None),
    "paged": ("paged", None),
    "virtual": ("virtual", None),
    "virtual, layer": ("virtual", {"layout": "layer"}),
}


def run(quick: bool) -> Report:
    # A quick run has one static sequence too, of fewer tokens.
    budget, max_model_len = ("32MiB", 512) if quick else ("1GiB", _MAX_MODEL_LEN)
    figures: list[Row] = []
    for name, (kv, options) in _CASES.items():
        row: Row = {"backend": name}
        for case, lengths in (("equal", repeat(_TOKENS)), ("mixed", _mixed(max_model_len))):
            backend = make_backend(
                kv,
                KVSpec(
                    _SHAPE,
                    dtype=torch.float32,
                    device=torch.device("cpu"),
                    max_num_seqs=512,
                    max_model_len=max_model_len,
                    memory_budget=budget,
                    kv_options=options,
                ),
            )
            with closing(backend):
                row[f"sequences, {case}"] = _fill(backend, lengths)
                stats = backend.stats()
                row[f"waste %, {case}"] = 100 * stats.waste_bytes / max(1, stats.used_bytes)
        figures.append(row)

    by_name = {row["backend"]: row for row in figures}

    def over_static(name: str) -> float:
        return float(by_name[name]["sequences, equal"]) / float(by_name["static"]["sequences, equal"])

    return Report(
        parameters={
            "shape": "22 layers, 4 KV heads of 64, float32: 44 KiB per token",
            "budget": budget,
            "max_model_len": max_model_len,
            "equal": f"{_TOKENS} tokens each",
            "mixed": f"log-normal, mean {_TOKENS}, sigma {_SIGMA}, seed {_SEED}",
            "block_size": 16,
        },
        figures=figures,
        goals=[
            Goal("static: waste %, equal", float(by_name["static"]["waste %, equal"]), ">=", 90),
            Goal("paged: waste %, equal", float(by_name["paged"]["waste %, equal"]), "<=", 4),
            Goal("sequences, paged over static", over_static("paged"), ">=", 9.5),
            Goal("sequences, virtual over static", over_static("virtual"), ">=", 9.5),
            Goal("sequences, virtual in its coarsest layout over static", over_static("virtual, layer"), ">=", 7),
        ],
        timed=False,
    )


def _mixed(most: int) -> Iterator[int]:
    draw = random.Random(_SEED)
    while True:
        length = draw.lognormvariate(math.log(_TOKENS) - _SIGMA**2 / 2, _SIGMA)
        yield min(most, math.ceil(length))


def _fill(backend: KVBackend, lengths: Iterable[int]) -> int:
    """The number of sequences prepared for their lengths, in order, before the first refusal."""
    count = 0
    for length in lengths:
        try:
            backend.prepare({backend.allocate(length): length})
        except (NoFreeSlot, OutOfPages):
            break
        count += 1
    return count


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            f"`virtual` holds {{}} times as many sequences as `{kv}`",
            record,
            tuple(
                pair
                for column in ("sequences, equal", "sequences, mixed")
                for pair in rows(record, column, {"backend": "virtual"}, {"backend": kv})
            ),
        )
        for kv in ("paged", "static", "dynamic")
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    names = {"virtual, layer": "virtual, a tensor per layer"}
    theme.bars(
        axes, {names.get(row["backend"], row["backend"]): row["sequences, mixed"] for row in rows}, ["virtual"], 0
    )
    fit = {row["backend"]: row["sequences, mixed"] for row in rows}
    budget = record["parameters"]["budget"].replace("GiB", " GiB")
    axes.set_title(
        f"{budget} holds {fit['virtual']} sequences of mixed lengths with virtual, {fit['static']} with static"
    )
    axes.set(xlabel=f"sequences that fit into {budget}")
