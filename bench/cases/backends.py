"""Decode steps of all four backends, by batch size.

Reproduces the classic "naive batching sweep" (16 sequences produce 16 times the tokens of one, in the same time per
token) and "paged against dynamic throughput" (paged reached 0.84 to 0.97 of dynamic at 8 to 32 sequences, because it
gathered in Python), with the memory that each backend holds. Every backend runs the machine's default kernel under a
model of Qwen2's shape with few layers; all advance by one token per call, in turn.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from statistics import median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.decode_loop import DecodeLoop
from bench.harness.held import held_bytes
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import packed
from vattn.engine.kv.make import BACKENDS, make_backend
from vattn.engine.kv.spec import KVSpec

ABOUT = "decode steps of all four backends, by batch size"
QUESTION = "How fast is a decode step over each backend?"

_BATCHES = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (256, 2048)
_WARMUP = 3
_MODEL = QWEN2 | {"num_hidden_layers": 4, "max_position_embeddings": 4096}


def run(quick: bool) -> Report:
    sizes = _MODEL | (TINY if quick else {})
    model = qwen2(**sizes)
    shape = packed.kv_shape(model)
    batches, contexts, rounds = ((1, 4), (64,), 3) if quick else (_BATCHES, _CONTEXTS, 40)

    figures: list[Row] = []
    for context in contexts:
        for batch in batches:
            longest = context + rounds + _WARMUP
            with ExitStack() as stack:
                loops, backends = {}, {}
                for kv in BACKENDS:
                    backend = make_backend(
                        kv,
                        KVSpec(
                            shape,
                            dtype=model.dtype,
                            device=model.device,
                            max_num_seqs=batch,
                            max_model_len=longest,
                            memory_budget="2GiB",
                        ),
                    )
                    backends[kv] = stack.enter_context(closing(backend))
                    loops[kv] = DecodeLoop(model, backend, batch=batch, length=context, max_length=longest)
                times = interleave({kv: loop.step for kv, loop in loops.items()}, rounds, warmup=_WARMUP)
                held = {kv: held_bytes(kv, backend.stats()) / 2**20 for kv, backend in backends.items()}
            ms = {kv: 1e3 * median(times[kv]) for kv in ("static", "dynamic", "paged", "virtual")}
            figures.append(
                {
                    "context": context,
                    "batch": batch,
                    **{f"{kv} ms": value for kv, value in ms.items()},
                    **{f"{kv} tokens/s": batch * 1e3 / value for kv, value in ms.items()},
                    **{f"{kv} MiB": held[kv] for kv in ms},
                    "paged over dynamic": ms["dynamic"] / ms["paged"],
                    "virtual over paged": ms["paged"] / ms["virtual"],
                    "virtual over static": ms["static"] / ms["virtual"],
                }
            )

    def least(what: str, column: str, bound: float) -> Goal:
        worst = min(figures, key=lambda row: row[column])
        return Goal(
            f"tokens/s, {what} (least, at {worst['batch']} x {worst['context']})", float(worst[column]), ">=", bound
        )

    by_batch = {row["batch"]: row for row in figures if row["context"] == contexts[0]}
    few, many = batches[0], 4 if quick else 16
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "block_size": 16,
            "calls": rounds,
        },
        figures=figures,
        goals=[
            least("paged over dynamic", "paged over dynamic", 1.0),
            least("virtual over paged", "virtual over paged", 1.0),
            least("virtual over static", "virtual over static", 0.97),
            Goal(
                f"static: tokens/s of {many} sequences over those of {few}, {contexts[0]} tokens",
                float(by_batch[many]["static tokens/s"]) / float(by_batch[few]["static tokens/s"]),
                ">=",
                many / 4,
            ),
        ],
    )


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            f"A step over `{kv}` takes {{}} times as long as over `virtual`",
            record,
            columns(record, f"{kv} ms", "virtual ms"),
        )
        for kv in ("paged", "dynamic", "static")
    ]


def draw(axes: Any, record: Record) -> None:
    context = record["figures"][-1]["context"]
    rows = [row for row in record["figures"] if row["context"] == context]
    batches = [row["batch"] for row in rows]
    for kv in ("static", "dynamic", "paged"):
        axes.plot(batches, [row[f"{kv} ms"] / row["virtual ms"] for row in rows], **theme.style(kv), label=kv)
    theme.reference(axes, "virtual")
    last = rows[-1]
    paged, dynamic = (theme.more_time(last[f"{kv} ms"] / last["virtual ms"]) for kv in ("paged", "dynamic"))
    axes.set_title(
        f"A decode step of {last['batch']} requests of {context:,} tokens: paged takes {paged}, dynamic {dynamic}"
    )
    axes.set(xlabel="requests", ylabel="time of a step, over virtual's")
    theme.doublings(axes, batches)
