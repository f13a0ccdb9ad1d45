"""The first token of a prompt whose start another engine has in its memory.

    replica   two engines, each a process, share the prefixes of one pool. The first computes a prompt, which takes the
              cold time. The second gets a prompt with the same start and a tail of its own.
    killed    the first engine is killed, and a new one gets such a prompt.

Times are by the request's own metrics, in engines that have computed another prompt before. Every length of a round has
a start, and engines of the second kind, of its own. The memory of a prompt that two processes have mapped is the sum of
their proportional shares.
"""

from __future__ import annotations

import os
import random
import re
import signal
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.harness import theme
from bench.harness.first_token import TAIL, beside_cold, engine, first_token, series_name, tokens
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.pools import serving_pool
from bench.harness.processes import process
from bench.harness.ratios import Comparison, by_round
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.waiting import wait_until
from vattn.broker.control import Control
from vattn.engine import LLM
from vattn.engine.kv.virtual import VirtualKV
from vattn.pool.lent import LentCore
from vattn.pool.shares import Shares

ABOUT = "time to first token of a prompt that another engine has in its memory"
QUESTION = "What does a prompt cost that another engine has in its memory?"

_BUDGET = 2**32
_WHERE = {"replica": "a second replica", "killed": "an engine after the first was killed"}
_GOALS = {("replica", 8192): 0.05}  # by question and tokens
_GOAL = 0.1
_MEMORY_GOAL = 1.1
_MOMENT = 0.001  # seconds


def run(quick: bool) -> Report:
    sizes = QWEN2 | {"num_hidden_layers": 4, "max_position_embeddings": 16384} | (TINY if quick else {})
    lengths, rounds = ((256,), 1) if quick else ((2048, 8192), 3)
    series: dict[str, list[float]] = {}
    found: dict[tuple[str, int], Row] = {}
    for number in range(rounds):
        _round(sizes, {length: _start(sizes, number, length) for length in lengths}, series, found)
    figures: list[Row] = [
        {
            "question": question,
            "shared tokens": length,
            **beside_cold(series, question, length),
            **found[question, length],
        }
        for length in lengths
        for question in _WHERE
    ]
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "own tokens": TAIL,
            "rounds": rounds,
        },
        figures=figures,
        goals=[
            Goal(
                f"TTFT of {_WHERE[str(row['question'])]} over a cold one, {row['shared tokens']} tokens",
                float(row["ratio"]),
                "<=",
                _GOALS.get((str(row["question"]), int(row["shared tokens"])), _GOAL),
            )
            for row in figures
        ]
        + [
            Goal(
                f"memory of both processes over the shared prompt's, {row['shared tokens']} tokens",
                float(row["MiB of both"]) / float(row["MiB of the prompt"]),
                "<=",
                _MEMORY_GOAL,
            )
            for row in figures
            if row["question"] == "replica"
        ],
        series=series,
    )


def _round(
    sizes: dict[str, Any],
    starts: dict[int, list[int]],
    series: dict[str, list[float]],
    found: dict[tuple[str, int], Row],
) -> None:
    """Adds a round's seconds to `series`, and what there was besides to `found`.

    Args:
        starts: what prompts of each length share.
    """
    model = qwen2(**sizes)

    def first(question: str, length: int, pids: list[int]) -> None:
        # As long a context as the other's: pages and layout follow from it, and only equal ones can be shared.
        with engine(model, max(starts), kv_pool=pool, kv_share_prefixes=True) as llm:
            shares = _shares(llm)
            wait_until(lambda: shares.peers, every=_MOMENT)
            tail = tokens(random.Random(f"{question} {length}"), TAIL, sizes["vocab_size"])
            seconds, cached = first_token(llm, [*starts[length], *tail])
            series.setdefault(series_name(question, length), []).append(seconds)
            prompt = shares.foreign_pages * shares.directory.shape.page_size
            found[question, length] = {
                "tokens found": cached,
                "MiB of the prompt": prompt / 2**20,
                "MiB of both": sum(map(_shared_bytes, pids)) / 2**20 if len(pids) > 1 else "",
            }

    with serving_pool(_BUDGET) as pool, process(_compute, pool, sizes, starts) as (pid, answers):
        for length, seconds in answers.recv().items():
            series.setdefault(series_name("cold", length), []).append(seconds)
        for length in starts:
            first("replica", length, [os.getpid(), pid])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _kept(pool), every=_MOMENT)
        for length in starts:
            first("killed", length, [os.getpid()])


def _compute(ready: Connection, pool: str, sizes: dict[str, Any], starts: dict[int, list[int]]) -> None:
    """Sends the seconds to the first token of a prompt of each length, once others find them; and does nothing more."""
    with engine(qwen2(**sizes), max(starts), kv_pool=pool, kv_share_prefixes=True) as llm:
        seconds = {}
        for length, start in starts.items():
            tail = tokens(random.Random(f"cold {length}"), TAIL, sizes["vocab_size"])
            seconds[length], cached = first_token(llm, [*start, *tail])
            assert cached == 0
        wait_until(lambda: not _core(llm).publishing, every=_MOMENT)
        ready.send(None)
        ready.send(seconds)
        signal.pause()


def _start(sizes: dict[str, Any], number: int, length: int) -> list[int]:
    return tokens(random.Random(f"{number} {length}"), length, sizes["vocab_size"])


def _kept(pool: str) -> bool:
    """Whether the broker has what an engine has left."""
    with closing(Control(pool)) as control:
        return bool(control.ask("top")["kept"])


def _core(llm: LLM) -> LentCore:
    assert isinstance(llm.core.kv, VirtualKV)
    core = llm.core.kv.cache._core
    assert isinstance(core, LentCore)
    return core


def _shares(llm: LLM) -> Shares:
    shares = _core(llm).shares
    assert shares is not None
    return shares


def _shared_bytes(pid: int) -> int:
    """A process's proportional share of those pages of caches that several processes have mapped."""
    total, sizes = 0, dict[str, int]()
    cache = False
    for line in [*Path(f"/proc/{pid}/smaps").read_text().splitlines(), "0-0 end"]:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            if cache and sizes["Pss"] < sizes["Rss"]:
                total += 1024 * sizes["Pss"]
            cache = "/memfd:vattn" in line
        elif line.startswith(("Pss:", "Rss:")):
            sizes[line[:3]] = int(line.split()[1])
    return total


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            f"The first token of a prompt of which {row['shared tokens']:,} tokens are in another engine's memory "
            f"takes {{}} times as long as one that is computed, in {_WHERE[row['question']]}",
            record,
            by_round(
                record, series_name(row["question"], row["shared tokens"]), series_name("cold", row["shared tokens"])
            ),
            higher_is_better=False,
            of="rounds",
        )
        for row in record["figures"]
    ]


def draw(axes: Any, record: Record) -> None:
    figures = record["figures"]
    for question, marker in (("replica", "o"), ("killed", "s")):
        rows = [row for row in figures if row["question"] == question]
        lengths = [row["shared tokens"] for row in rows]
        axes.plot(lengths, [row["TTFT ms"] for row in rows], marker=marker, label=f"in {_WHERE[question]}")
    axes.plot(lengths, [row["cold TTFT ms"] for row in rows], **theme.style("paged"), label="computed")
    best = min(row["ratio"] for row in figures)
    axes.set_title(
        f"In another engine's memory, a prompt's first token takes {best:.2f} times as long as a computed one's"
    )
    axes.set(xlabel="tokens of the shared start", ylabel="ms to the first token", ylim=(0, None))
    axes.set_xticks(lengths)
