"""Decode attention and whole steps of the engine: virtual, and paged with a kernel that follows the block table.

Reproduces the shape of "decode throughput at 16K" (Fig. 9), on a CPU. All sides run a model of Qwen2's shape with few
layers; attention is the engine's own path in every layer: store the new rows, read, attend. A step is `prepare` and the
runner's forward pass. All sides advance by one token per call, alternately:

    virtual     contiguous rows; vattn's kernel, which knows no block table
    paged       the same kernel rewritten to follow a block table, over a pool as a server has it after a while:
                requests have come, grown and gone, so that a request's blocks lie anywhere
    neighbours  the same over a fresh pool, in which a request's blocks follow each other: paged's best case
    gathered    the pool of `paged` under a kernel that was not rewritten: blocks are first copied together
    torch       contiguous rows under torch's own kernel

The limit is the least time that this machine allows for as many bytes and products (`bench/harness/limits.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.harness import limits, theme
from bench.harness.decode_loop import DecodeLoop
from bench.harness.fragmented import fragment
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.ratios import Comparison, by_round, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import KVConfig, packed
from vattn.attention import Case
from vattn.attention import get as get_attention
from vattn.engine.kv.base import KVBackend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV

ABOUT = "attention and whole decode steps: virtual, and paged with a block table and with a gather"
QUESTION = "What does following a block table cost attention?"

_BATCHES = (1, 8, 32)
_CONTEXTS = (256, 1024, 2048, 4096, 8192)
_MAX_LENGTH = 16_384
_LONG_CONTEXT = 4096
_BLOCK_SIZE = 16
_WARMUP = 3
_ROUNDS = "paged over virtual, the largest case, by round"
_MODEL = QWEN2 | {"num_hidden_layers": 4, "max_position_embeddings": _MAX_LENGTH}
_KERNELS = {
    "virtual": "native",
    "paged": "native",
    "neighbours": "native",
    "gathered": "torch_sdpa",
    "torch": "torch_sdpa",
}


def run(quick: bool) -> Report:
    sizes = _MODEL | (TINY if quick else {})
    model = qwen2(**sizes)
    shape = packed.kv_shape(model)
    batches, contexts = ((1, 4), (64, 256)) if quick else (_BATCHES, _CONTEXTS)
    long_context = contexts[-1] if quick else _LONG_CONTEXT
    rounds = 3 if quick else 20
    calls = rounds + _WARMUP

    figures: list[Row] = []
    for batch in batches:
        for context in contexts:
            with ExitStack() as stack:
                loops = {}
                for side, kernel in _KERNELS.items():
                    kv = stack.enter_context(closing(_backend(side, shape, model.dtype, batch, context + calls)))
                    # Attention is timed on the way up to `context`, whole steps on the way on.
                    loops[side] = DecodeLoop(
                        model,
                        kv,
                        batch=batch,
                        length=context - calls,
                        max_length=context + calls,
                        attention=get_attention(kernel, Case(dtype=model.dtype)),
                    )
                attention = interleave(
                    {
                        **{side: loop.attention_steps(calls) for side, loop in loops.items()},
                        **_limits(shape, model, batch, context),
                    },
                    rounds,
                    warmup=_WARMUP,
                )
                steps = interleave({side: loop.step for side, loop in loops.items()}, rounds, warmup=_WARMUP)
            figures.append(_row(batch, context, attention, steps))

    long = [row for row in figures if int(row["context"]) >= long_context]
    middle = [row for row in figures if int(row["context"]) >= long_context // 2]
    largest = figures[-1]
    rounds_of_largest = [a / b for a, b in zip(attention["paged"], attention["virtual"], strict=True)]
    return Report(
        parameters={
            "model": sizes,
            "layers": shape.num_layers,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "block_size": _BLOCK_SIZE,
            "calls": rounds,
        },
        figures=figures,
        series={_ROUNDS: rounds_of_largest},
        goals=[
            _least("attention, paged over virtual", "paged over virtual", figures, 1.05),
            _least(f"attention, paged over virtual, from {long_context} tokens", "paged over virtual", long, 1.3),
            _least("attention, neighbours over virtual", "neighbours over virtual", figures, 1.0),
            _least(
                f"attention, neighbours over virtual, from {long_context} tokens", "neighbours over virtual", long, 1.15
            ),
            _least(
                f"attention, gathered over virtual, from {long_context // 2} tokens",
                "gathered over virtual",
                middle,
                2.0,
            ),
            _least(f"attention, virtual of the limit, from {long_context} tokens", "virtual of limit", long, 0.7),
            Goal(
                f"whole step, torch over virtual, at {largest['batch']} x {largest['context']}",
                float(largest["step torch ms"]) / float(largest["step virtual ms"]),
                ">=",
                2.5,
            ),
        ],
    )


def _backend(side: str, shape: packed.KVShape, dtype: torch.dtype, batch: int, tokens: int) -> KVBackend:
    if side in ("virtual", "torch"):
        return VirtualKV(
            KVConfig(
                groups=shape.groups(_MAX_LENGTH),
                dtype=dtype,
                max_batch_size=batch,
                max_context_len=_MAX_LENGTH,
                memory_budget="2GiB",
            )
        )
    spec = KVSpec(shape, max_num_seqs=batch + 16, max_model_len=_MAX_LENGTH, dtype=dtype, block_size=_BLOCK_SIZE)
    paged = PagedKV(spec, num_blocks=batch * -(-tokens // _BLOCK_SIZE))
    if side != "neighbours":
        fragment(paged, _MAX_LENGTH)
    return paged


def _limits(shape: packed.KVShape, model: PreTrainedModel, batch: int, context: int) -> dict[str, Callable[[], object]]:
    layers = shape.num_layers
    layer = shape.layers[0]
    dims = layer.head_dim + layer.v_head_dim
    # Pages of zeros that nobody has written would all be the same one.
    memory = torch.ones(layers * batch * context * layer.num_kv_heads * dims, dtype=model.dtype)
    products = layers * batch * context * model.config.num_attention_heads * dims
    return limits.actions([memory], products, model.dtype)


def _row(batch: int, context: int, attention: dict[str, list[float]], steps: dict[str, list[float]]) -> Row:
    row: Row = {"batch": batch, "context": context}
    for side, seconds in attention.items():
        row[f"{side} ms"] = 1e3 * median(seconds)
    row["virtual of limit"] = max(float(row[f"{side} ms"]) for side in limits.SIDES) / float(row["virtual ms"])
    for side in _KERNELS:
        if side != "virtual":
            ratios = (a / b for a, b in zip(attention[side], attention["virtual"], strict=True))
            row[f"{side} over virtual"] = median(ratios)
    for side in ("virtual", "paged", "gathered", "torch"):
        row[f"step {side} ms"] = 1e3 * median(steps[side])
    return row


def _least(what: str, column: str, rows: list[Row], bound: float) -> Goal:
    """A goal on the worst case, which it names."""
    worst = min(rows, key=lambda row: row[column])
    return Goal(f"{what} (least, at {worst['batch']} x {worst['context']})", float(worst[column]), ">=", bound)


def compare(record: Record) -> list[Comparison]:
    scattered = f"scattered blocks of {_BLOCK_SIZE} tokens"
    others = {
        "paged over virtual": f"Attention over {scattered} takes {{}} times as long as over contiguous rows",
        "neighbours over virtual": "Over blocks that happen to be neighbours it takes {} times as long",
        "gathered over virtual": "Copying blocks together first takes {} times as long",
        "torch over virtual": "torch's kernel takes {} times as long over the same contiguous rows",
    }
    found = [
        *(Comparison(says, record, columns(record, column)) for column, says in others.items()),
        Comparison(
            "A whole step of a small model over scattered blocks takes {} times as long",
            record,
            columns(record, "step paged ms", "step virtual ms"),
        ),
    ]
    last = record["figures"][-1]
    says = f"With {last['batch']} requests of {last['context']:,} tokens, scattered blocks take {{}} times as long"
    found.append(Comparison(says, record, by_round(record, _ROUNDS), of="rounds"))
    says = "Attention in a step reaches {} of the machine's roofline (read bandwidth or product rate)"
    found.append(Comparison(says, record, columns(record, "virtual of limit"), is_limit=True))
    return found


def draw(axes: Any, record: Record) -> None:
    batch = record["figures"][-1]["batch"]
    rows = [row for row in record["figures"] if row["batch"] == batch]
    contexts = [row["context"] for row in rows]
    sides = {
        "gathered": ("dynamic", "blocks gathered first"),
        "torch": ("static", "contiguous, torch's kernel"),
        "paged": ("paged", "block table"),
        "neighbours": ("other", "table, blocks in order"),
    }
    for side, (name, label) in sides.items():
        axes.plot(contexts, [row[f"{side} over virtual"] for row in rows], **theme.style(name), label=label)
    theme.reference(axes, "contiguous (vattn)")
    paged, gathered = (rows[-1][f"{side} over virtual"] for side in ("paged", "gathered"))
    axes.set_title(
        f"Attention for {batch} requests of {contexts[-1]:,} tokens: following a block table takes "
        f"{theme.more_time(paged)}, gathering its blocks {theme.more_time(gathered)}"
    )
    axes.set(xlabel=f"tokens per request, {batch} requests", ylabel="time of attention, over vattn's", ylim=(0, None))
    theme.doublings(axes, contexts)
