"""Serving on cards that are not here: the real allocator and the real scheduler, under a simulated clock.

Llama-3-8B on 1 to 8 cards of 80 GB, 64 slots, steps of up to 8,192 tokens; 100,000 requests over all rows. What decides
about memory is the library's own: `KVCache` and its worker, the paged backend's blocks and prefix cache, the engine's
scheduler. The pages have no memory, and nothing is computed. Requests wait in the engine's queue, so the schedule does
not depend on how long a step takes, and is the same on both cards.

What is assumed:

- a step takes as long as its multiplications or its reads of memory, whichever takes longer, plus 1 ms; published
  peaks (A100 SXM: 312 TFLOP/s, 2.04 TB/s; H100 SXM: 989 TFLOP/s, 3.35 TB/s; NVIDIA's datasheets), of which 60 % and 80
  % are reached; with several cards, two all-reduces a layer of 10 us each and over NVLink (300 and 450 GB/s a
  direction). The shares, the 1 ms and the 10 us are no published figures;
- attention takes equally long over contiguous rows and over a block table: what a block table costs is not in it, nor
  what filling it costs. So what differs is memory alone, and what mapping it costs;
- driver calls take what Table 3 of the paper says for 2 MiB (create 29 us, release 23, map 2, unmap 34, set access 38),
  for every page, on both cards, and no longer while kernels run; the cards make theirs side by side;
- 90 % of 80 GB, less the weights and 2 GB, are for keys and values; blocks have 16 tokens, pages 2 MiB, requests up to
  131,072 tokens;
- `log-normal` are the paper's sample trace, `long context` its long offline trace, cut off at 131,072 tokens, and
  `chat` turns of 8 that begin with one system prompt of 1,024 tokens, with the mean lengths of ShareGPT, log-normal; of
  four conversations per slot, one turn each is in the queue. Only `chat` has prefixes in common.

"Waited" is the time for which the engine waited for driver calls, "hidden" the rest of what they took. The goals check
one small case: a real run of the engine on this CPU and the replay of the same requests have to count the same steps,
preemptions, wasted memory and map calls.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import os
import sys
from contextlib import closing
from typing import Any, get_args

from bench.harness import theme
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.simulate.checked import real_and_replayed
from bench.simulate.gpus import A100, H100, LLAMA_3_8B, OnGpus
from bench.simulate.provider import Clock
from bench.simulate.replay import Replay
from bench.simulate.stores import PagedStore, Store, VirtualStore
from bench.simulate.traces import CHAT, LOG_NORMAL, LONG, LONGEST
from vattn.layout import LayoutName
from vattn.model_shapes import find_shape

ABOUT = "64 slots on 1 to 8 simulated cards: throughput, preemptions, waste and driver calls, paged and virtual"
QUESTION = "What would serving on GPUs look like, as far as memory decides?"

_SLOTS, _TOKENS_PER_STEP = 64, 8192
_CARD_BYTES, _SHARE, _ACTIVATION_BYTES = 80e9, 0.9, 2e9
_GPUS = (1, 2, 4, 8)
_CARDS = (A100, H100)
_MODEL = LLAMA_3_8B
_STORES = ("paged", *(f"virtual, {layout}" for layout in get_args(LayoutName)))
# Requests of each trace, in every row: those of a chat take a tenth of the time to replay.
_REQUESTS = {LOG_NORMAL: 1000, CHAT: 5000, LONG: 250}
_HOUR = 3600


def run(quick: bool) -> Report:
    requests = {LOG_NORMAL: 20, CHAT: 40, LONG: 4} if quick else _REQUESTS
    gpus = (1,) if quick else _GPUS
    cells = list(itertools.product([trace.name for trace in requests], gpus, _STORES))
    counts = {trace.name: count for trace, count in requests.items()}
    if quick:
        figures = [_row(*cell, counts[cell[0]]) for cell in cells]
    else:
        # Several at a time: the clocks are simulated, and a pool of pages without memory has its process to itself.
        workers, spawn = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            done = [pool.submit(_row, *cell, counts[cell[0]]) for cell in cells]
            for number, _ in enumerate(concurrent.futures.as_completed(done), start=1):
                print(f"\r{number} of {len(done)} replays", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            figures = [each.result() for each in done]
    goals: list[Goal] = []
    layouts: tuple[LayoutName, ...] = ("sliced",) if quick else get_args(LayoutName)
    for layout in layouts:
        real, replayed = real_and_replayed(12 if quick else 64, layout)
        for what in ("steps", "preemptions", "map_calls", "waste"):
            asked = getattr(real, what)
            name = f"check on this CPU, {layout}: {what.replace('_', ' ')}, as in the real run"
            goals.append(Goal(name, getattr(replayed, what), "==", asked))
    return Report(
        parameters={
            "model": _MODEL.name,
            "slots": _SLOTS,
            "tokens per step": _TOKENS_PER_STEP,
            "cards": {card.name: card.source for card in _CARDS},
            "requests in all": sum(counts[trace] for trace, _, _ in cells),
        },
        figures=figures,
        goals=goals,
        timed=False,
    )


def _store(name: str, gpus: int, clocks: list[Clock]) -> Store:
    shape = find_shape(_MODEL.name, tensor_parallel=gpus)
    budget = int(_SHARE * _CARD_BYTES - _MODEL.weight_bytes / gpus - _ACTIVATION_BYTES)
    common: dict[str, Any] = {
        "budget": budget,
        "slots": _SLOTS,
        "max_context_len": LONGEST,
        "chunk_tokens": _TOKENS_PER_STEP,
    }
    if name == "paged":
        return PagedStore(shape, **common)
    layouts: dict[str, LayoutName] = {f"virtual, {layout}": layout for layout in get_args(LayoutName)}
    return VirtualStore(shape, layouts[name], clocks=clocks, **common)


def _row(trace: str, gpus: int, name: str, requests: int) -> Row:
    """Replays a trace."""
    machines = {card.name: (OnGpus(card, _MODEL, gpus), Clock()) for card in _CARDS}
    with closing(_store(name, gpus, [clock for _, clock in machines.values()])) as store:
        kind = next(each for each in _REQUESTS if each.name == trace)
        replay = Replay(store, kind, machines, requests=requests, slots=_SLOTS, tokens_per_step=_TOKENS_PER_STEP)
        found = replay.run()
    row: Row = {"trace": trace, "GPUs": gpus, "memory": name, "requests": found.requests}
    row |= {f"{card} output tokens/s": found.output_tokens / seconds for card, seconds in found.seconds.items()}
    row |= {
        "running": found.running / found.steps,
        "preemptions": found.preemptions,
        "waste %": 100 * found.waste,
        "map calls per 1000 tokens": 1000 * found.map_calls / found.computed_tokens,
    }
    for card, seconds in found.seconds.items():
        waited = found.waited[card]
        row |= {
            f"{card} hidden s/h": _HOUR * (found.driver_seconds - waited) / seconds,
            f"{card} waited s/h": _HOUR * waited / seconds,
        }
    return row


def compare(record: Record) -> list[Comparison]:
    card = _CARDS[0].name
    kinds = {"with prompts that have nothing in common": False, "in a chat": True}
    return [
        Comparison(
            f"Were kernels equally fast, `virtual` in layout `{layout}` would make {{}} times as many tokens per "
            f"second as paged, {kind}, on {card}s",
            record,
            tuple(
                pair
                for trace in _REQUESTS
                if trace.shares == shares
                for pair in rows(
                    record,
                    f"{card} output tokens/s",
                    {"memory": f"virtual, {layout}", "trace": trace.name},
                    {"memory": "paged", "trace": trace.name},
                    same=["GPUs"],
                )
            ),
        )
        for layout in ("sliced", "layer")
        for kind, shares in kinds.items()
    ]


def draw(axes: Any, record: Record) -> None:
    card, memory = _CARDS[0].name, "virtual, sliced"
    figures = [row for row in record["figures"] if row["memory"] == memory]
    shares: dict[str, list[float]] = {trace: [] for trace in dict.fromkeys(row["trace"] for row in figures)}
    for row in figures:
        shares[row["trace"]].append(100 * row[f"{card} waited s/h"] / _HOUR)
    gpus = list(dict.fromkeys(row["GPUs"] for row in figures))
    for style, (trace, percent) in zip(("virtual", "other", "another"), shares.items(), strict=False):
        axes.plot(gpus, percent, **theme.style(style), label=trace)
    most = max(map(max, shares.values()))
    axes.set_title(f"Simulated {card}s wait for driver calls for up to {most:.1f} % of the time, with {memory}")
    axes.set(xlabel="GPUs", ylabel="time waited for driver calls, %", ylim=(0, None))
    theme.doublings(axes, gpus)
