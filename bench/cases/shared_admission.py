"""Admission of a prompt that lies in another process's memory, beside one that lies in another slot of the same cache.

A cache gets a prompt that another process has published, or, in turn, one that lies in another slot of its own. The
milliseconds are those of its admission and first step, in which nothing is computed. No prompt is admitted twice: it
would be in place.
"""

from __future__ import annotations

import gc
import random
import signal
import time
from contextlib import closing
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.pools import serving_pool
from bench.harness.processes import process
from bench.harness.ratios import Comparison, by_round
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.waiting import wait_until
from vattn import KVCache, KVConfig, PagePool
from vattn.pool.lent import LentCore

ABOUT = "time to admit a prompt that another process has published, beside one in another slot"
QUESTION = "What does it cost that a prefix is another process's?"

_LENGTH = 2048
_LAYERS = 8
_PAGES = (4096, 65536)
_BUDGET = 2**32
_HITS = {"slot": "another slot", "process": "another process"}  # whose pages they are
_GOAL_MS = 0.2
_REST = 0.05  # seconds in which what was mapped ahead, or is given back, comes to its end


def run(quick: bool) -> Report:
    rounds = 3 if quick else 40
    series: dict[str, list[float]] = {}
    for page_size in _PAGES[:1] if quick else _PAGES:
        for hit, seconds in _admissions(page_size, rounds).items():
            series[_name(hit, page_size // 1024)] = seconds
    figures: list[Row] = []
    for kib in (page_size // 1024 for page_size in _PAGES if _name("slot", page_size // 1024) in series):
        slot, foreign = (series[_name(hit, kib)] for hit in _HITS)
        figures.append(
            {
                "KiB of a page": kib,
                "tokens found": _LENGTH,
                "another slot ms": 1e3 * median(slot),
                "another process ms": 1e3 * median(foreign),
                "more ms": 1e3 * median(a - b for a, b in zip(foreign, slot, strict=True)),
                "ratio": median(a / b for a, b in zip(foreign, slot, strict=True)),
            }
        )
    return Report(
        parameters={"layers": _LAYERS, "layout": "layer", "rounds": rounds},
        figures=figures,
        goals=[
            Goal(
                f"ms that admission takes more if the prefix is another process's, pages of {row['KiB of a page']} KiB",
                float(row["more ms"]),
                "<=",
                _GOAL_MS,
            )
            for row in figures
        ],
        series=series,
    )


def _admissions(page_size: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of each hit, by whose it is."""
    prompts = {hit: [_prompt(hit, number) for number in range(rounds + 1)] for hit in _HITS}
    seconds: dict[str, list[float]] = {hit: [] for hit in _HITS}
    with (
        serving_pool(_BUDGET) as name,
        process(_publish, name, page_size, prompts["process"]),
        closing(_connect(name, page_size)) as pool,
        closing(_cache(pool, 3 * rounds + 3)) as cache,
    ):
        core = cache._core
        assert isinstance(core, LentCore)
        shares = core.shares
        assert shares is not None
        wait_until(lambda: shares.peers, every=_REST)
        for prompt in prompts["slot"]:
            cache.step({(slot := cache.admit(prompt).reqid): _LENGTH})
            cache.commit(slot, prompt)
        gc.collect()
        gc.freeze()  # as the server does: a collection goes over everything that was imported, and falls into any call
        for number in range(rounds + 1):
            for hit in _HITS if number % 2 else reversed(_HITS):
                prompt = [*prompts[hit][number], number]
                wait_until(lambda: not pool.publishing, every=_REST)
                time.sleep(_REST)
                began = time.perf_counter()
                slot, cached = cache.admit(prompt)
                cache.step({slot: len(prompt)})
                taken = time.perf_counter() - began
                assert cached == _LENGTH
                if number:  # the first one finds nothing prepared
                    seconds[hit].append(taken)
        gc.unfreeze()
    return seconds


def _publish(ready: Connection, name: str, page_size: int, prompts: list[list[int]]) -> None:
    """Publishes prompts, which nothing has computed, and does nothing more."""
    with closing(_connect(name, page_size)) as pool, closing(_cache(pool, len(prompts))) as cache:
        for prompt in prompts:
            cache.step({(slot := cache.admit(prompt).reqid): len(prompt)})
            cache.commit(slot, prompt)
        wait_until(lambda: not pool.publishing, every=_REST)
        ready.send(None)
        signal.pause()


def _connect(name: str, page_size: int) -> PagePool:
    return PagePool.connect(name, page_size=page_size, fingerprint=bytes(32))


def _cache(pool: PagePool, slots: int) -> KVCache:
    shape: dict[str, Any] = {"num_layers": _LAYERS, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    return KVCache(KVConfig(**shape, max_batch_size=slots, max_context_len=2 * _LENGTH, layout="layer"), pool=pool)


def _prompt(hit: str, number: int) -> list[int]:
    rng = random.Random(f"{hit} {number}")
    return [rng.randrange(10**5) for _ in range(_LENGTH)]


def _name(hit: str, kib: int) -> str:
    return f"in {_HITS[hit]}, pages of {kib} KiB, s"


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            f"Admitting a prompt of which {row['tokens found']:,} tokens are another process's takes {{}} times as "
            f"long as one that lies in another slot, with pages of {row['KiB of a page']} KiB",
            record,
            by_round(record, *(_name(hit, row["KiB of a page"]) for hit in reversed(_HITS))),
            higher_is_better=False,
            of="rounds",
        )
        for row in record["figures"]
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    values = {
        f"{where}, pages of {row['KiB of a page']} KiB": row[f"{where} ms"] for row in rows for where in _HITS.values()
    }
    theme.bars(axes, values, [name for name in values if "process" in name])
    most = max(row["more ms"] for row in rows)
    axes.set_title(f"A prefix of another process takes at most {most:.2f} ms more")
    axes.set(xlabel=f"ms of an admission, {rows[0]['tokens found']:,} tokens found")
