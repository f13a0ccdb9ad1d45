"""Decode attention of one layer on a CPU: vattn's kernels, torch's, and the least time that the machine allows.

32 requests of Qwen2-0.5B's shape, 14 query heads on two KV heads of 64, bfloat16, heads first; every kernel is called
in turn over plain tensors. `torch` is `scaled_dot_product_attention`, called once per request with the query heads of a
KV head folded into rows, which is the fastest way to call it.

The limit is the larger of two times, measured in the same rounds on the same threads: reading all keys and values by
plain loads of vectors, and the products alone, with operands in registers. Before each call, either the caches are
filled with other memory ("cold", as in a step, where the weights of a layer come between), or the same call is made
once ("warm"), where what is read fits into them.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.harness import limits, theme
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import cpu
from vattn.attention import decode
from vattn.quantised import quantise

ABOUT = "decode attention of one layer: vattn's kernels for CPUs, torch's, and what the machine allows"
QUESTION = "How fast are vattn's attention kernels?"

_LENGTHS = {330: 6.0, 1024: 6.0, 4096: 4.0, 16_384: 3.0}  # and what torch's time over ours is to be
_REQUESTS, _KV_HEADS, _GROUP, _DIM = 32, 2, 7, 64
_LONG = 4096
_CACHED = 32 * 2**20  # bytes of keys and values that caches may hold
_OF_LIMIT, _OF_LIMIT_LONG = 0.6, 0.7  # the limit over the kernel's time is to be this, below and from `_LONG` on


def run(quick: bool) -> Report:
    lengths = [16, 64] if quick else list(_LENGTHS)
    rounds = 3 if quick else 15
    threads = torch.get_num_threads()
    figures: list[Row] = []
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        try:
            figures += [
                _row(length, count, rounds, caches)
                for length in lengths
                for caches in ("cold", "warm")
                if caches == "cold" or _bytes(length) <= _CACHED
            ]
        finally:
            torch.set_num_threads(threads)
    long = [row for row in figures if quick or int(row["tokens"]) >= _LONG]
    return Report(
        parameters={
            "requests": _REQUESTS,
            "heads": f"{_KV_HEADS * _GROUP} on {_KV_HEADS} of {_DIM}",
            "dtype": "bfloat16",
            "kernels": cpu.chosen().name,
            "calls": rounds,
        },
        figures=figures,
        goals=[
            *(
                Goal(
                    f"torch over native, {_name(row)}",
                    float(row["torch over native"]),
                    ">=",
                    _LENGTHS.get(int(row["tokens"]), 1.0),
                )
                for row in figures
            ),
            *(
                Goal(
                    f"{side} of the limit, {_name(row)}",
                    float(row[f"{side} of limit"]),
                    ">=",
                    _OF_LIMIT_LONG if int(row["tokens"]) >= _LONG else _OF_LIMIT,
                )
                for side in ("native", "int8")
                for row in figures
            ),
            *(
                Goal(
                    f"native over int8, {_name(row)}",
                    float(row["native us"]) / float(row["int8 us"]),
                    ">=",
                    1.4,
                )
                for row in long
            ),
        ],
    )


def _name(row: Row) -> str:
    return f"{row['tokens']} tokens, {row['threads']} threads, {row['caches']}"


def _bytes(length: int) -> int:
    return 2 * 2 * _REQUESTS * _KV_HEADS * length * _DIM


def _row(length: int, threads: int, rounds: int, caches: str) -> Row:
    def rows(*dims: int) -> torch.Tensor:
        return torch.randn(_REQUESTS, _KV_HEADS, *dims, dtype=torch.bfloat16)

    keys, values = rows(length, _DIM), rows(length, _DIM)
    key, value = keys.transpose(1, 2), values.transpose(1, 2)
    (key_codes, key_scales), (value_codes, value_scales) = quantise(keys), quantise(values)
    coded = [key_codes, value_codes, key_scales, value_scales]
    key_codes, value_codes = key_codes.transpose(1, 2), value_codes.transpose(1, 2)
    scales = key_scales.transpose(1, 2), value_scales.transpose(1, 2)
    query = torch.randn(_REQUESTS, _KV_HEADS * _GROUP, _DIM, dtype=torch.bfloat16)
    folded = query.view(_REQUESTS, 1, _KV_HEADS, _GROUP, _DIM).unbind()
    lengths = torch.full((_REQUESTS,), length, dtype=torch.int32)
    products = 2 * query.numel() * length

    def torch_calls() -> None:
        for i in range(_REQUESTS):
            scaled_dot_product_attention(folded[i], keys[i : i + 1], values[i : i + 1])

    actions: dict[str, Callable[[], object]] = {
        "native": lambda: decode(query, key, value, lengths),
        "int8": lambda: decode(query, key_codes, value_codes, lengths, scales=scales),
        "torch": torch_calls,
        **limits.actions([keys, values], products, torch.bfloat16),
        **{f"int8 {side}": call for side, call in limits.actions(coded, products, torch.int8).items()},
    }
    before = limits.warm if caches == "warm" else limits.cold()
    seconds = interleave(actions, rounds, warmup=2, before=before)
    us = {name: 1e6 * median(s) / _REQUESTS for name, s in seconds.items()}
    limit, int8_limit = (max(us[f"{kind}{side}"] for side in limits.SIDES) for kind in ("", "int8 "))
    return {
        "threads": threads,
        "tokens": length,
        "caches": caches,
        "native us": us["native"],
        "int8 us": us["int8"],
        "torch us": us["torch"],
        "torch over native": us["torch"] / us["native"],
        "products us": us["products"],
        "reading us": us["reading"],
        "native of limit": limit / us["native"],
        "int8 products us": us["int8 products"],
        "int8 reading us": us["int8 reading"],
        "int8 of limit": int8_limit / us["int8"],
    }


def compare(record: Record) -> list[Comparison]:
    says = "vattn's kernel reaches {} of the machine's roofline (read bandwidth or product rate)"
    limit = Comparison(says, record, columns(record, "native of limit"), is_limit=True)
    return [
        Comparison(
            "torch's kernel takes {} times as long as vattn's",
            record,
            columns(record, "torch us", "native us"),
        ),
        limit,
    ]


def draw(axes: Any, record: Record) -> None:
    figures = [row for row in record["figures"] if row["caches"] == "cold"]
    for threads, name in zip(sorted({row["threads"] for row in figures}), ("virtual", "paged"), strict=False):
        rows = [row for row in figures if row["threads"] == threads]
        tokens, ratios = ([row[column] for row in rows] for column in ("tokens", "torch over native"))
        axes.plot(tokens, ratios, **theme.style(name), label=f"{threads} thread{'s' if threads > 1 else ''}")
    theme.reference(axes, "vattn's kernel")
    ratios = [row["torch over native"] for row in figures]
    axes.set_title(
        f"torch's decode attention takes {min(ratios):.1f} to {max(ratios):.1f} times as long as vattn's kernel"
    )
    axes.set(xlabel="tokens per request", ylabel="time of torch's, over vattn's", ylim=(0, None))
    theme.doublings(axes, sorted({row["tokens"] for row in figures}))
