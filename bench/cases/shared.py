"""The first token of a prompt whose start others have computed, in an engine that has not.

    restart   an engine writes what it computes into a store, and ends. The next one gets a prompt with the same start
              and a tail of its own. Its files are in the system's page cache, as after a restart, or on the disk only,
              as after a reboot. Beside it an engine without a store, which computes all.

Times are to the first token, by the request's own metrics, in engines that have computed another prompt before.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.harness import theme
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.ratios import Comparison, by_round
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from vattn.engine import LLM, SamplingParams

ABOUT = "time to first token of a prompt that another engine has computed: after a restart, from a store on disk"
QUESTION = "What does a prompt cost that another engine has computed?"

_TAIL = 32
_GOAL = 0.1
_FILES = ("page cache", "disk")


def run(quick: bool) -> Report:
    sizes = QWEN2 | {"max_position_embeddings": 16384} | (TINY if quick else {})
    lengths, rounds = ((256,), 1) if quick else ((2048, 8192), 3)
    model = qwen2(**sizes)
    series: dict[str, list[float]] = {}
    figures: list[Row] = []
    for length in lengths:
        figures += _restart(model, length, rounds, series)
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "own tokens": _TAIL,
            "rounds": rounds,
        },
        figures=figures,
        goals=[
            Goal(
                f"TTFT after a restart over a cold one, {row['shared tokens']} tokens", float(row["ratio"]), "<=", _GOAL
            )
            for row in figures
            if row["files"] == _FILES[0]
        ],
        series=series,
    )


def _restart(model: PreTrainedModel, length: int, rounds: int, series: dict[str, list[float]]) -> list[Row]:
    """The rows of one length; `series` gets the seconds of each round."""
    seconds: dict[str, list[float]] = {name: [] for name in ("cold", "cold, stored", *_FILES)}
    stored_bytes = found = 0
    for number in range(rounds):
        rng = random.Random(number)
        shared = _tokens(model, rng, length)
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store")
            with _engine(model, length) as llm:
                seconds["cold"].append(_first_token(llm, [*shared, *_tokens(model, rng, _TAIL)])[0])
            with _engine(model, length, kv_store=store) as llm:
                seconds["cold, stored"].append(_first_token(llm, [*shared, *_tokens(model, rng, _TAIL)])[0])
            stored_bytes = sum(path.stat().st_size for path in store.glob("*.kv"))
            for files in _FILES:
                if files == "disk":
                    _leave_the_page_cache(store)
                with _engine(model, length, kv_store=store) as llm:
                    taken, found = _first_token(llm, [*shared, *_tokens(model, rng, _TAIL)])
                seconds[files].append(taken)
    for name, each in seconds.items():
        series[_series(name, length)] = each
    return [
        {
            "question": "restart",
            "shared tokens": length,
            "files": files,
            "cold TTFT ms": 1e3 * median(seconds["cold"]),
            "cold TTFT ms, written": 1e3 * median(seconds["cold, stored"]),
            "TTFT ms": 1e3 * median(seconds[files]),
            "ratio": median(a / b for a, b in zip(seconds[files], seconds["cold"], strict=True)),
            "tokens found": found,
            "MiB on disk": stored_bytes / 2**20,
        }
        for files in _FILES
    ]


@contextmanager
def _engine(model: PreTrainedModel, length: int, **options: Any) -> Iterator[LLM]:
    """An engine that has computed a prompt, of which nothing is stored."""
    options = {"max_model_len": length + 2 * _TAIL, "max_num_seqs": 8, "memory_budget": "2GiB", **options}
    with LLM(model, skip_tokenizer_init=True, **options) as llm:
        _first_token(llm, _tokens(model, random.Random(-1), 100))
        yield llm


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were found."""
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert output.metrics is not None
    assert output.metrics.time_to_first_token is not None
    return output.metrics.time_to_first_token, output.num_cached_tokens or 0


def _leave_the_page_cache(folder: Path) -> None:
    for path in folder.glob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _tokens(model: PreTrainedModel, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(model.config.vocab_size) for _ in range(count)]


def _series(name: str, length: int) -> str:
    return f"restart, {length} tokens, {name}, s"


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            f"After a restart, the first token of a prompt of which {row['shared tokens']:,} tokens are stored takes "
            f"{{}} times as long as one that is computed, if they are read from the {row['files']}",
            record,
            by_round(
                record,
                _series(row["files"], row["shared tokens"]),
                _series("cold", row["shared tokens"]),
            ),
            higher_is_better=False,
            of="rounds",
        )
        for row in record["figures"]
    ]


def draw(axes: Any, record: Record) -> None:
    figures = record["figures"]
    lengths = sorted({row["shared tokens"] for row in figures})
    for files in _FILES:
        times = [row["TTFT ms"] for row in figures if row["files"] == files]
        axes.plot(lengths, times, marker="o", linestyle="-" if files == _FILES[0] else "--", label=f"from the {files}")
    cold = [next(row["cold TTFT ms"] for row in figures if row["shared tokens"] == length) for length in lengths]
    axes.plot(lengths, cold, **theme.style("paged"), label="computed")
    best = min(row["ratio"] for row in figures)
    axes.set_title(f"After a restart, a stored prompt's first token takes {best:.2f} times as long as a computed one's")
    axes.set(xlabel="tokens of the shared start", ylabel="ms to the first token", ylim=(0, None))
    axes.set_xticks(lengths)
