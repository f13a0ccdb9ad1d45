"""Prompts by length over every backend, in whole steps: tokens per second, and time to the first token.

Reproduces "prefill throughput and TTFT" (Fig. 8, Table 6): one prompt at a time, computed in chunks of 2,048 tokens as
there, through the engine's own runner, over a model of Qwen2's kind that is small enough for 16K tokens. The time of a
prompt is from its arrival to the logits of its first token, its memory included. Sides take turns:

    virtual   contiguous rows, mapped as the prompt grows; vattn's kernel, which knows no block table
    paged     the same kernel rewritten to follow a block table, over a pool in use (`bench/harness/fragmented.py`)
    static    contiguous rows, allocated in advance; vattn's kernel
    dynamic   rows that are copied together as they grow, as in transformers' DynamicCache; vattn's kernel
    gathered  the pool of `paged` under torch's kernel, which was not rewritten: blocks are first copied together
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.fragmented import fragment
from bench.harness.models import qwen2
from bench.harness.prefill_loop import PrefillLoop
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import packed
from vattn.attention import Case
from vattn.attention import get as get_attention
from vattn.engine.kv.base import KVBackend
from vattn.engine.kv.make import make_backend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec

ABOUT = "prompts of up to 16K tokens over every backend: tokens per second, time to the first token"
QUESTION = "How fast are prompts computed over each backend?"

_MODEL = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16_384,
}
# Prompts of each length, and side.
_CONTEXTS = {1024: 9, 2048: 7, 4096: 5, 8192: 4, 16_384: 3}
_CHUNK = 2048
_BLOCK_SIZE = 16
_SIDES = ("virtual", "paged", "static", "dynamic", "gathered")


def run(quick: bool) -> Report:
    model = qwen2(**_MODEL)
    contexts: Mapping[int, int] = {64: 2, 256: 2} if quick else _CONTEXTS
    chunk = 128 if quick else _CHUNK
    figures: list[Row] = []
    with ExitStack() as stack:
        loops = {}
        for side in _SIDES:
            kv = stack.enter_context(closing(_backend(side, packed.kv_shape(model), model.dtype, max(contexts))))
            kernel = get_attention("torch_sdpa" if side == "gathered" else "auto", Case(dtype=model.dtype))
            loops[side] = stack.enter_context(closing(PrefillLoop(model, kv, chunk=chunk, attention=kernel)))
        for context, rounds in contexts.items():
            prompts = {side: partial(loop.prefill, context) for side, loop in loops.items()}
            seconds = interleave(prompts, rounds, warmup=1)
            middle = {side: median(taken) for side, taken in seconds.items()}
            figures.append(
                {
                    "context": context,
                    **{f"{side} TTFT ms": 1e3 * taken for side, taken in middle.items()},
                    **{f"{side} tokens/s": context / taken for side, taken in middle.items()},
                    "paged over virtual": _ratio(seconds, "paged"),
                    "gathered over virtual": _ratio(seconds, "gathered"),
                }
            )
    last = figures[-1]
    return Report(
        parameters={
            "model": _MODEL,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "chunk": chunk,
            "block_size": _BLOCK_SIZE,
            "prompts of each": {str(context): rounds for context, rounds in contexts.items()},
        },
        figures=figures,
        goals=[
            Goal(
                "TTFT, paged over virtual (least)",
                min(float(row["paged over virtual"]) for row in figures),
                ">=",
                1.0,
            ),
            Goal(
                f"TTFT, paged over virtual, {last['context']} tokens (the paper's at 192K)",
                float(last["paged over virtual"]),
                ">=",
                1.17,
            ),
        ],
    )


def _ratio(seconds: Mapping[str, list[float]], side: str) -> float:
    return median(a / b for a, b in zip(seconds[side], seconds["virtual"], strict=True))


def _backend(side: str, shape: packed.KVShape, dtype: torch.dtype, longest: int) -> KVBackend:
    if side in ("paged", "gathered"):
        spec = KVSpec(shape, max_num_seqs=17, max_model_len=longest, dtype=dtype, block_size=_BLOCK_SIZE)
        paged = PagedKV(spec, num_blocks=-(-longest // _BLOCK_SIZE))
        fragment(paged, longest)
        return paged
    return make_backend(side, KVSpec(shape, max_num_seqs=1, max_model_len=longest, dtype=dtype, memory_budget="1GiB"))


def compare(record: Record) -> list[Comparison]:
    says = {
        "paged": "With a block table, the first token of a prompt takes {} times as long",
        "gathered": "With a kernel that cannot follow one, and gathered blocks, it takes {} times as long",
        "static": "Over tensors that were allocated in advance, it takes {} times as long",
        "dynamic": "Over `dynamic`, it takes {} times as long",
    }
    return [
        Comparison(text, record, columns(record, f"{side} TTFT ms", "virtual TTFT ms")) for side, text in says.items()
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    contexts = [row["context"] for row in rows]
    styles = {"gathered": "another", **{side: side for side in ("static", "dynamic", "paged", "virtual")}}
    for side, name in styles.items():
        axes.plot(contexts, [row[f"{side} tokens/s"] for row in rows], **theme.style(name), label=side)
    last = rows[-1]
    paged, gathered = (theme.more_time(last[f"{side} over virtual"]) for side in ("paged", "gathered"))
    axes.set_title(
        f"The first token of a prompt of {last['context']:,} takes {paged} over a block table, {gathered} over "
        "gathered blocks"
    )
    axes.set(xlabel="tokens of the prompt", ylabel="prompt tokens per second", ylim=(0, None))
    theme.doublings(axes, contexts)
