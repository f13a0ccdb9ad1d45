"""The time to compute a prompt, by how its memory is mapped: in its step, or before it comes.

Reproduces "prefill with deferred reclamation, small pages" (Fig. 11/13): one prompt at a time, computed in one step,
through the engine's own runner over `virtual`, in the layout of the paper. Its pages exist, as in the paper; what
differs is when they are mapped:

    synchronous  in the step, which waits; they are unmapped when the request ends
    deferred     not at all: they stay mapped, for the next request in the same slot (`deferred_reclamation`)
    eager        in an idle slot, ahead of the next request (`eager_pages`, as many as a prompt takes)

Between two prompts, the worker ends what it was given. *over ideal* is the time of a prompt over the same time without
`prepare`, which is where a step maps its memory or waits for it.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.models import qwen2
from bench.harness.prefill_loop import PrefillLoop
from bench.harness.ratios import Comparison, columns, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import KVConfig, packed
from vattn.config import build_layout
from vattn.engine.kv.virtual import VirtualKV

ABOUT = "time to compute a prompt: memory mapped in its step, left mapped, and mapped in advance"
QUESTION = "Can a prompt be computed without waiting for its memory?"

_PAGES = (16, 64, 256, 2048)  # KiB
_MODES = ("synchronous", "deferred", "eager")
# 64 KiB per token, as Yi-6B, in few weights: 2,048 tokens need 128 MiB, and a second of time.
_MODEL = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
_WARMUP = 1


def run(quick: bool) -> Report:
    sizes = _MODEL | ({"num_hidden_layers": 2} if quick else {})
    model = qwen2(**sizes)
    shape = packed.kv_shape(model)
    length, pages, rounds = (128, (64,), 2) if quick else (2048, _PAGES, 3)
    times: dict[tuple[int, str], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        actions = {}
        for kib in pages:
            for mode in _MODES:
                kv = stack.enter_context(closing(VirtualKV(_config(shape, length, kib, mode))))
                loop = stack.enter_context(closing(PrefillLoop(model, kv)))
                times[kib, mode] = []
                actions[kib, mode] = partial(_prompt, loop, kv, length, times[kib, mode])
        interleave(actions, rounds, warmup=_WARMUP)

    figures: list[Row] = []
    for (kib, mode), measured in times.items():
        counted = measured[_WARMUP:]
        figures.append(
            {
                "page KiB": kib,
                "mapping": mode,
                "ms": 1e3 * median(whole for whole, _ in counted),
                "in prepare ms": 1e3 * median(preparing for _, preparing in counted),
                "over ideal": median(whole / (whole - preparing) for whole, preparing in counted),
            }
        )

    def most(mode: str) -> float:
        return max(float(row["over ideal"]) for row in figures if row["mapping"] == mode)

    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "prompt": length,
            "layout": "layer NHD",
            "MiB per prompt": length * shape.token_elements * model.dtype.itemsize // 2**20,
            "prompts of each": rounds,
        },
        figures=figures,
        goals=[Goal(f"over ideal, {mode}, any page size", most(mode), "<=", 1.005) for mode in ("deferred", "eager")],
    )


def _config(shape: packed.KVShape, length: int, kib: int, mode: str) -> KVConfig:
    page_size = kib * 2**10
    config = KVConfig(
        groups=shape.groups(length),
        dtype=torch.bfloat16,
        max_batch_size=2,
        max_context_len=length,
        memory_budget="1GiB",
        page_size=page_size,
        layout="layer",
        kv_order="NHD",
        overlap=mode == "eager",  # the worker maps them
        deferred_reclamation=mode == "deferred",
        eager_pages=0,
        watermark=0,
    )
    if mode != "eager":
        return config
    page_tokens = build_layout(config, "layer", page_size).page_tokens
    return replace(config, eager_pages=-(-length // page_tokens))


def _prompt(loop: PrefillLoop, kv: VirtualKV, length: int, times: list[tuple[float, float]]) -> None:
    times.append(loop.prefill(length))
    kv.prepare({})  # all is launched: what the request had may be unmapped, and an idle slot be backed
    kv.check()  # waits for what was queued


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "A prompt whose step maps its memory takes {} times as long as without",
            record,
            columns(record, "over ideal", where=lambda row: row["mapping"] == "synchronous"),
        ),
        *(
            Comparison(
                f"It takes {{}} times as long as a prompt that {finds}",
                record,
                rows(record, "ms", {"mapping": "synchronous"}, {"mapping": mode}, same=["page KiB"]),
            )
            for mode, finds in (
                ("deferred", "finds what an earlier request left mapped"),
                ("eager", "finds what was mapped in an idle slot"),
            )
        ),
    ]


def draw(axes: Any, record: Record) -> None:
    styles = {"synchronous": "paged", "deferred": "virtual", "eager": "other"}
    labels = {"synchronous": "mapped in the step", "deferred": "left mapped", "eager": "mapped in advance"}
    figures = record["figures"]
    sizes = sorted({row["page KiB"] for row in figures})
    for mode, name in styles.items():
        found = [row["in prepare ms"] for row in figures if row["mapping"] == mode]
        axes.plot(sizes, found, **theme.style(name), label=labels[mode])
    waits = [row for row in figures if row["mapping"] == "synchronous"]
    first = waits[0]
    left = max(row["in prepare ms"] for row in figures if row["mapping"] == "deferred")
    axes.set_title(
        f"Mapping {record['parameters']['MiB per prompt']} MiB in pages of {first['page KiB']} KiB makes a prompt take "
        f"{theme.more_time(first['over ideal'])}; where they were left mapped, it waits {left:.2f} ms at most"
    )
    axes.set(xlabel="KiB per page", ylabel="ms until a prompt's memory is there")
    theme.doublings(axes, sizes)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
