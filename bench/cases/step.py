"""The cost of virtual memory when nothing needs to be mapped: `step()` against filling a padded block table.

Own result, beside "lines changed to swap a kernel" (Fig. 12): before every iteration, a paged engine copies the block
tables of all requests into one padded tensor; vattn does not. All requests have the same length, which grows by one
token per call and never reaches the end of a block. Every length has its own, really mapped cache, and the calls for
all lengths are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

import vattn
from bench.harness import theme
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.packed import KVShape
from vattn.slots.table import most_ahead

ABOUT = "time of step() with 256 running requests, against filling a padded block table"
QUESTION = "What does a step cost when nothing has to be mapped?"

_SLOTS = 256
_MAX_CONTEXT = 131_072
_BLOCK_SIZE = 16
_PAGE_SIZE = 64 * 1024
_JUDGED_CONTEXT = 65_536
# One layer, one head, eight elements: 32 bytes per token, so that 256 requests of 128K tokens fit into 1 GiB.
_SHAPE: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
_TOKEN_BYTES = 32
_WARMUP = 5


def run(quick: bool) -> Report:
    contexts = [1024, 8192] if quick else [1024, 8192, _JUDGED_CONTEXT, _MAX_CONTEXT]
    judged = contexts[-1] if quick else _JUDGED_CONTEXT
    rounds = 20 if quick else 200
    calls = rounds + _WARMUP
    # Up to where the next block is queued.
    starts = {context: context - most_ahead(_PAGE_SIZE // _TOKEN_BYTES) - calls for context in contexts}

    with ExitStack() as stack:
        caches = {context: stack.enter_context(_mapped(start - 1)) for context, start in starts.items()}
        before = {context: cache.stats() for context, cache in caches.items()}
        actions = {context: _advance(cache, starts[context], calls) for context, cache in caches.items()}
        seconds = interleave(actions, rounds, warmup=_WARMUP)
        after = {context: cache.stats() for context, cache in caches.items()}
        for context in contexts:
            assert after[context].calls["cuMemMap"] == before[context].calls["cuMemMap"], "a block boundary was crossed"
            assert after[context].waits == before[context].waits, "a step waited"

    fills = {context: _fill_seconds(context, rounds // 4) for context in contexts}
    steps = {context: median(times) for context, times in seconds.items()}
    figures: list[Row] = [
        {
            "context": context,
            "step us": 1e6 * steps[context],
            "block table us": 1e6 * fills[context],
            "mapped MiB": after[context].mapped_bytes / 2**20,
            "pages": after[context].mapped_pages,
        }
        for context in contexts
    ]
    return Report(
        parameters={
            "requests": _SLOTS,
            "max_context_len": _MAX_CONTEXT,
            "page_size": _PAGE_SIZE,
            "bytes_per_token": _TOKEN_BYTES,
            "block_tokens": caches[contexts[0]].layout.page_tokens,
            "block_size": _BLOCK_SIZE,
            "calls": rounds,
        },
        figures=figures,
        goals=[
            Goal("slowest over fastest context, step()", max(steps.values()) / min(steps.values()), "<=", 1.2),
            Goal(
                f"step() over filling the block table at {judged} tokens",
                steps[judged] / fills[judged],
                "<=",
                0.2,
            ),
        ],
    )


def _mapped(length: int) -> vattn.KVCache:
    """A cache in which every slot is active and has `length` tokens, backed by memory."""
    cache = vattn.KVCache(
        vattn.KVConfig(
            **_SHAPE,
            dtype=torch.bfloat16,
            max_batch_size=_SLOTS,
            max_context_len=_MAX_CONTEXT,
            memory_budget="2GiB",
            page_size=_PAGE_SIZE,
            layout="layer",
        )
    )
    cache.step({cache.alloc_reqid(): length for _ in range(_SLOTS)})
    return cache


def _advance(cache: vattn.KVCache, start: int, calls: int) -> Callable[[], None]:
    """Each call gives every slot one more token, from `start` on."""
    steps = iter([dict.fromkeys(range(_SLOTS), start + call) for call in range(calls)])
    return lambda: cache.step(next(steps))


def _fill_seconds(length: int, rounds: int) -> float:
    """Seconds to fill a padded block table for requests of `length` tokens, at the best thread count for it."""
    spec = KVSpec(
        KVShape.uniform(1, _SHAPE["num_kv_heads"], _SHAPE["head_dim"], _SHAPE["head_dim"]),
        max_num_seqs=_SLOTS,
        max_model_len=_MAX_CONTEXT,
        block_size=_BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    kv = PagedKV(spec, num_blocks=_SLOTS * -(-length // _BLOCK_SIZE))
    slots = [kv.allocate(length) for _ in range(_SLOTS)]
    kv.prepare(dict.fromkeys(slots, length))
    table = torch.zeros((_SLOTS, kv.max_blocks), dtype=torch.int32)
    best = float("inf")
    threads = torch.get_num_threads()
    try:
        for count in {1, threads}:
            torch.set_num_threads(count)
            times = interleave({"fill": lambda: kv.fill_block_tables(slots, table)}, rounds, warmup=_WARMUP)
            best = min(best, median(times["fill"]))
    finally:
        torch.set_num_threads(threads)
    return best


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "Filling a padded block table takes {} times as long as `step()`",
            record,
            columns(record, "block table us", "step us"),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    contexts = [row["context"] for row in rows]
    for column, name, label in (
        ("block table us", "paged", "filling a block table"),
        ("step us", "virtual", "vattn's step()"),
    ):
        axes.plot(contexts, [row[column] for row in rows], **theme.style(name), label=label)
    axes.set_title(
        f"Preparing a step of 256 requests takes {rows[-1]['step us']:.0f} us at any length; filling a block table "
        f"{rows[0]['block table us']:.0f} to {rows[-1]['block table us']:.0f}"
    )
    axes.set(xlabel="tokens per request", ylabel="microseconds per step", ylim=(0, None))
    theme.doublings(axes, contexts)
