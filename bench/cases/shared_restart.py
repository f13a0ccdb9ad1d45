"""The first token of a prompt whose start is on disk, after engine and broker have ended.

An engine on a pool, with a store, computes a prompt, which takes the cold time, and ends; so does the pool's broker. An
engine on a new broker gets a prompt with the same start and a tail of its own. The store's files are in the system's
page cache, as after a restart of the processes, or on the disk only, as after a reboot.

Times are by the request's own metrics, in engines that have computed another prompt before. Every length of a round has
a start, and engines that find it, of its own.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.harness import theme
from bench.harness.first_token import TAIL, beside_cold, engine, first_token, series_name, tokens
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.pools import serving_pool
from bench.harness.ratios import Comparison, by_round
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row, Unavailable
from vattn.engine import LLM

ABOUT = "time to first token of a prompt that is on disk, after engine and broker have ended"
QUESTION = "What does a prompt cost that was computed before a restart?"

_BUDGET = 2**32
_GOAL = 0.1
_CACHED, _DISK = "page cache", "disk"


def run(quick: bool) -> Report:
    if _in_memory(tempfile.gettempdir()):
        raise Unavailable(f"{tempfile.gettempdir()} is no disk; set TMPDIR to a folder on one")
    sizes = QWEN2 | {"num_hidden_layers": 4, "max_position_embeddings": 16384} | (TINY if quick else {})
    lengths, rounds = ((256,), 1) if quick else ((2048, 8192), 3)
    model = qwen2(**sizes)
    series: dict[str, list[float]] = {}
    found: dict[tuple[str, int], Row] = {}
    for number in range(rounds):
        _round(model, {length: _tokens(model, f"{number} {length}", length) for length in lengths}, series, found)
    figures: list[Row] = [
        {
            "files": files,
            "shared tokens": length,
            **beside_cold(series, files, length),
            **found[files, length],
        }
        for length in lengths
        for files in (_CACHED, _DISK)
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
                f"TTFT after a restart over a cold one, {row['shared tokens']} tokens", float(row["ratio"]), "<=", _GOAL
            )
            for row in figures
            if row["files"] == _CACHED
        ],
        series=series,
    )


def _round(
    model: PreTrainedModel,
    starts: dict[int, list[int]],
    series: dict[str, list[float]],
    found: dict[tuple[str, int], Row],
) -> None:
    """Adds a round's seconds to `series`, and what there was besides to `found`.

    Args:
        starts: what prompts of each length share.
    """
    stored = {}

    def first(llm: LLM, what: str, length: int) -> int:
        seconds, cached = first_token(llm, [*starts[length], *_tokens(model, f"{what} {length}", TAIL)])
        series.setdefault(series_name(what, length), []).append(seconds)
        return cached

    with tempfile.TemporaryDirectory() as folder:
        for length in starts:
            store = Path(folder, str(length))
            with _engine(model, length, store) as llm:
                assert first(llm, "cold", length) == 0
            stored[length] = sum(path.stat().st_size for path in store.glob("*.kv"))
        for files in (_CACHED, _DISK):
            for length in starts:
                store = Path(folder, str(length))
                if files == _DISK:
                    _leave_the_page_cache(store)
                with _engine(model, length, store) as llm:
                    found[files, length] = {
                        "tokens found": first(llm, files, length),
                        "MiB on disk": stored[length] / 2**20,
                    }


@contextmanager
def _engine(model: PreTrainedModel, length: int, store: Path) -> Iterator[LLM]:
    """An engine on the pool of a broker of its own."""
    with serving_pool(_BUDGET) as pool, engine(model, length, kv_pool=pool, kv_store=store) as llm:
        yield llm


def _in_memory(folder: str) -> bool:
    mounts = (line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines())
    above = [(len(place), kind) for place, kind in mounts if Path(folder).resolve().is_relative_to(place)]
    return max(above)[1] in ("tmpfs", "ramfs")


def _leave_the_page_cache(folder: Path) -> None:
    for path in folder.glob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _tokens(model: PreTrainedModel, seed: str, count: int) -> list[int]:
    return tokens(random.Random(seed), count, model.config.vocab_size)


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            f"After a restart, the first token of a prompt of which {row['shared tokens']:,} tokens are stored takes "
            f"{{}} times as long as one that is computed, if they are read from the {row['files']}",
            record,
            by_round(
                record, series_name(row["files"], row["shared tokens"]), series_name("cold", row["shared tokens"])
            ),
            higher_is_better=False,
            of="rounds",
        )
        for row in record["figures"]
    ]


def draw(axes: Any, record: Record) -> None:
    figures = record["figures"]
    for files, line in ((_CACHED, "-"), (_DISK, "--")):
        rows = [row for row in figures if row["files"] == files]
        lengths = [row["shared tokens"] for row in rows]
        axes.plot(lengths, [row["TTFT ms"] for row in rows], marker="o", linestyle=line, label=f"from the {files}")
    axes.plot(lengths, [row["cold TTFT ms"] for row in rows], **theme.style("paged"), label="computed")
    best = min(row["ratio"] for row in figures)
    axes.set_title(f"After a restart, a stored prompt's first token takes {best:.2f} times as long as a computed one's")
    axes.set(xlabel="tokens of the shared start", ylabel="ms to the first token", ylim=(0, None))
    axes.set_xticks(lengths)
