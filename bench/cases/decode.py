"""Decode throughput of the two backends of the engine: virtual, read in place, and paged, gathered first.

Reproduces the shape of "decode throughput at 16K" (Fig. 9): both backends run the same unmodified kernel under a model
of Qwen2's shape with few layers. Attention is the engine's own path in every layer: store the new rows, read, attend. A
step is `prepare` and the runner's forward pass. Both advance by one token per call, alternately. The paged blocks of a
request are contiguous here, which is paged's best case.
"""

from __future__ import annotations

from contextlib import closing
from statistics import median
from typing import Any

import torch

from bench.harness.decode_loop import DecodeLoop
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import KVConfig, packed
from vattn.engine.kv.base import KVBackend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV

ABOUT = "attention and whole decode steps, virtual against paged"

_BATCHES = (1, 8, 32)
_CONTEXTS = (256, 1024, 2048, 4096, 8192)
_MAX_LENGTH = 16_384
_LONG_CONTEXT = 2048
_WARMUP = 3
_MODEL = QWEN2 | {"num_hidden_layers": 4, "max_position_embeddings": _MAX_LENGTH}


def run(quick: bool) -> Report:
    sizes = _MODEL | (TINY if quick else {})
    model = qwen2(**sizes)
    shape = packed.kv_shape(model)
    batches, contexts = ((1, 4), (64, 256)) if quick else (_BATCHES, _CONTEXTS)
    long_context = contexts[-1] if quick else _LONG_CONTEXT
    rounds = 3 if quick else 40
    calls = rounds + _WARMUP

    figures: list[Row] = []
    geometry = ""
    for batch in batches:
        for context in contexts:
            config = KVConfig(
                groups=shape.groups(_MAX_LENGTH),
                dtype=model.dtype,
                max_batch_size=batch,
                max_context_len=_MAX_LENGTH,
                memory_budget="2GiB",
            )
            blocks = -(-(context + calls) // 16)
            paged = PagedKV(
                KVSpec(shape, max_num_seqs=batch, max_model_len=_MAX_LENGTH, dtype=model.dtype),
                num_blocks=batch * blocks,
            )
            with closing(VirtualKV(config)) as virtual, closing(paged):
                geometry = repr(virtual.cache)
                backends: dict[str, KVBackend] = {"virtual": virtual, "paged": paged}
                # Attention is timed on the way up to `context`, whole steps on the way on.
                loops = {
                    name: DecodeLoop(model, kv, batch=batch, length=context - calls, max_length=context + calls)
                    for name, kv in backends.items()
                }
                attention = interleave(
                    {name: loop.attention_steps(calls) for name, loop in loops.items()}, rounds, warmup=_WARMUP
                )
                steps = interleave({name: loop.step for name, loop in loops.items()}, rounds, warmup=_WARMUP)
            figures.append(_row(batch, context, attention, steps))

    long = [row for row in figures if int(row["context"]) >= long_context]
    return Report(
        parameters={
            "model": sizes,
            "layers": shape.num_layers,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "block_size": 16,
            "virtual (last case)": geometry,
            "calls": rounds,
        },
        figures=figures,
        goals=[
            _least("attention, paged over virtual", "attention ratio", figures, 1.0),
            _least("whole step, paged over virtual", "step ratio", figures, 1.0),
            _least(f"attention, paged over virtual, from {long_context} tokens", "attention ratio", long, 1.5),
        ],
    )


def _row(batch: int, context: int, attention: dict[str, list[float]], steps: dict[str, list[float]]) -> Row:
    ms = {(kind, name): 1e3 * median(t) for kind, s in (("a", attention), ("s", steps)) for name, t in s.items()}
    return {
        "batch": batch,
        "context": context,
        "attention virtual ms": ms["a", "virtual"],
        "attention paged ms": ms["a", "paged"],
        "attention ratio": ms["a", "paged"] / ms["a", "virtual"],
        "step virtual ms": ms["s", "virtual"],
        "step paged ms": ms["s", "paged"],
        "step ratio": ms["s", "paged"] / ms["s", "virtual"],
        "virtual tokens/s": batch * 1e3 / ms["s", "virtual"],
        "paged tokens/s": batch * 1e3 / ms["s", "paged"],
    }


def _least(what: str, column: str, rows: list[Row], bound: float) -> Goal:
    """A goal on the worst case, which it names."""
    worst = min(rows, key=lambda row: row[column])
    return Goal(f"{what} (least, at {worst['batch']} x {worst['context']})", float(worst[column]), ">=", bound)


def draw(axes: Any, record: Record) -> None:
    for batch in dict.fromkeys(row["batch"] for row in record["figures"]):
        rows = [row for row in record["figures"] if row["batch"] == batch]
        contexts = [row["context"] for row in rows]
        (line,) = axes.plot(contexts, [row["attention ratio"] for row in rows], marker="o", label=f"attention, {batch}")
        ratios = [row["step ratio"] for row in rows]
        axes.plot(contexts, ratios, marker="o", linestyle="--", color=line.get_color(), label=f"whole step, {batch}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens per request", ylabel="paged over virtual, time", ylim=(0, None))
