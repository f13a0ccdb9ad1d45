"""Decode attention through all layers by layout: the cost of wider strides, and of their pages in the device's TLB.

A pass reads every layer's keys and values once, as a step of a model does. Pre-allocated tensors are the floor.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch

from bench.gpu import PAGE
from bench.gpu.caches import fill, static, virtual
from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, HEADS, KV_HEADS, best, empty_cache, random, times
from bench.gpu.figures import Figures
from bench.harness.report import Goal, Report
from vattn.attention import AttentionParams, PackedBatch, Span
from vattn.units import parse_bytes

ABOUT = "decode attention by layout, against pre-allocated tensors"
RANK = 15
SECONDS = 35


def run(quick: bool) -> Report:
    kernel = best()
    layers, requests, context = (2, 2, 512) if quick else (16, 16, 32_768)
    gigabytes = 2 * layers * requests * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize / 1e9
    query = random(requests, HEADS, HEAD_DIM)
    figures = Figures()
    # One after the other: two of them do not fit.
    for name in (
        *("static", "layer/NHD", "sliced/NHD", "sliced/NHD, 16 MiB", "fused/NHD", "fused/NHD, 16 MiB"),
        *("fused/NHD, 64 MiB", "layer/HND", "fused/HND", "fused/HND, 16 MiB", "static again"),
    ):
        layout, _, rest = name.partition("/")
        order, _, size = rest.partition(", ")
        make: Any
        if order:
            page_size = parse_bytes(size, "page_size") if size else PAGE
            make = virtual(requests, context, layers=layers, layout=layout, page_size=page_size, kv_order=order)
        else:
            make = static(requests, context, layers=layers)
        with closing(make) as kv:
            slots = fill(kv, [context] * requests, layers)
            batch = PackedBatch.pack([Span(slot, context - 1, context) for slot in slots], DEVICE)

            def one_pass(kv: Any = kv, batch: PackedBatch = batch) -> None:
                for layer in range(layers):
                    kernel(query, kv, layer, batch, AttentionParams())

            with torch.inference_mode():
                seconds = times({name: one_pass}, rounds=20)[name]
            block = kv.cache.layout.page_tokens if order else 0
        del kv, make, one_pass
        empty_cache()
        figures.append({"layout": name, "tokens per page": block, "ms": 1e3 * seconds, "GB/s": gigabytes / seconds})
    floor = min(float(row["ms"]) for row in figures if "static" in str(row["layout"]))
    for row in figures:
        row["static / this"] = floor / float(row["ms"])
    best_row = max((row for row in figures if row["tokens per page"]), key=lambda row: float(row["static / this"]))
    return Report(
        parameters={"kernel": kernel.name, "layers": layers, "requests": requests, "context": context, "GB": gigabytes},
        figures=figures,
        goals=[Goal(f"pre-allocated over {best_row['layout']}", float(best_row["static / this"]), ">=", 0.99)],
    )
