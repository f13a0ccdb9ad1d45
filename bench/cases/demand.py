"""What decoding asks of an allocator: bytes of new keys and values per second, by batch size.

Reproduces "batch size: throughput, latency, KV bytes per second" (Fig. 6 a, b, c): requests of 1,024 tokens decode at a
time, from one to 320 of them, through the engine's own runner over `virtual`. Every request takes a token per step, so
what is asked for is the tokens per second times the bytes of a token. Beyond some batch size, tokens per second grow no
more, and with them what is asked for. *waited* is the time of a step that mapping did not hide.

What the allocator can give is measured in the same cache: new memory from the worker, told one step ahead, as in
`alloc`.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from statistics import median
from typing import Any

import torch

from bench.harness import allocation, theme
from bench.harness.decode_loop import DecodeLoop
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import KVCache, KVConfig, packed
from vattn.engine.kv.virtual import VirtualKV

ABOUT = "KV bytes per second that decoding asks for, throughput and latency, by batch size up to 320"
QUESTION = "How much new memory does serving ask for?"

_BATCHES = (1, 4, 16, 32, 64, 128, 192, 256, 320)
_CONTEXT = 1024
_WARMUP = 2
_MODEL = QWEN2 | {"num_hidden_layers": 4}
_PAPER_MB = 750  # per second, at most


def run(quick: bool) -> Report:
    sizes = _MODEL | (TINY if quick else {})
    batches, context, rounds = ((1, 4, 8), 64, 3) if quick else (_BATCHES, _CONTEXT, 15)
    longest = context + rounds + _WARMUP
    model = qwen2(**sizes)
    shape = packed.kv_shape(model)

    def config(batch: int, tokens: int) -> KVConfig:
        return KVConfig(
            groups=shape.groups(tokens),
            dtype=model.dtype,
            max_batch_size=batch,
            max_context_len=tokens,
            memory_budget="4GiB",
        )

    with ExitStack() as stack:
        caches = {batch: stack.enter_context(closing(VirtualKV(config(batch, longest)))) for batch in batches}
        loops = {
            batch: DecodeLoop(model, kv, batch=batch, length=context, max_length=longest)
            for batch, kv in caches.items()
        }
        before = {batch: kv.stats().wait_seconds for batch, kv in caches.items()}
        seconds = interleave({batch: loop.step for batch, loop in loops.items()}, rounds, warmup=_WARMUP)
        waited = {batch: kv.stats().wait_seconds - before[batch] for batch, kv in caches.items()}
        token_bytes = caches[1].token_bytes
    with KVCache(config(batches[-1], context)) as cache:
        rates = []
        for _ in range(2 if quick else 4):
            rates.append(1e3 * float(allocation.ahead(cache, context)["GB/s"]))
            cache.trim()
    given = median(rates[1:])

    figures: list[Row] = []
    for batch, taken in seconds.items():
        rate = batch / median(taken)
        figures.append(
            {
                "batch": batch,
                "ms per step": 1e3 * median(taken),
                "tokens/s": rate,
                "asked MB/s": rate * token_bytes / 1e6,
                "waited ms": 1e3 * waited[batch] / (rounds + _WARMUP),
                "given over asked": given / (rate * token_bytes / 1e6),
            }
        )
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "context": context,
            "bytes per token": token_bytes,
            "given, MB/s": round(given),
            "calls": rounds,
        },
        figures=figures,
        goals=[
            Goal("most that is asked for, MB/s (the paper's most)", _most(figures, "asked MB/s"), "<=", _PAPER_MB),
            Goal("what the allocator gives, over the most", given / _most(figures, "asked MB/s"), ">=", 10),
        ],
    )


def _most(figures: list[Row], column: str) -> float:
    return max(float(row[column]) for row in figures)


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "The allocator gives new memory {} times as fast as decoding asks for it",
            record,
            columns(record, "given over asked"),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    figures = record["figures"]
    batches = [row["batch"] for row in figures]
    axes.plot(batches, [row["asked MB/s"] for row in figures], **theme.style("virtual"), label="asked for by decoding")
    theme.reference(axes, "given by the allocator", record["parameters"]["given, MB/s"])
    most = max(row["asked MB/s"] for row in figures)
    axes.set_title(
        f"Decoding asks for {theme.number(most)} MB of new memory per second at most; "
        f"the allocator gives {record['parameters']['given, MB/s']:,}"
    )
    axes.set(xlabel="requests", ylabel="MB of keys and values per second", yscale="log")
    axes.set_xticks(batches[:1] + batches[3:])
