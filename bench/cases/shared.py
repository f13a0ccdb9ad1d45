"""The first token of a prompt whose start others have computed, in an engine that has not.

    restart   an engine writes what it computes into a store, and ends. The next one gets a prompt with the same start
              and a tail of its own. Its files are in the system's page cache, as after a restart, or on the disk only,
              as after a reboot. Beside it an engine without a store, which computes all.
    replica   two engines, each a process, share the prefixes of one pool. The second gets a prompt with the same start.
    killed    the first engine is killed, and a new one gets such a prompt.
    admission a cache gets a prompt that another process has published, or, in turn, one that lies in another slot of
              its own: the milliseconds of its admission and first step, in which nothing is computed.

Other times are to the first token, by the request's own metrics, in engines that have computed another prompt before.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.harness import theme
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.pools import serving_pool
from bench.harness.processes import process
from bench.harness.ratios import Comparison, by_round
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from vattn import KVCache, KVConfig, PagePool
from vattn.broker.control import Control
from vattn.engine import LLM, SamplingParams
from vattn.engine.kv.virtual import VirtualKV
from vattn.pool.lent import LentCore
from vattn.pool.shares import Shares

ABOUT = "time to first token of a prompt that another engine has computed: in its memory, or on disk after a restart"
QUESTION = "What does a prompt cost that another engine has computed?"

_TAIL = 32
_GOAL = 0.1
_FILES = ("page cache", "disk")
_POOL_BUDGET = 2**32
_WHERE = {"replica": "a second replica", "killed": "an engine after the first was killed"}
_SHARED_GOALS = {2048: 0.1, 8192: 0.05}  # by tokens
_HITS = {"foreign": "another process", "local": "another slot"}  # whose pages they are
_HIT_TOKENS, _HIT_PAGES = 2048, (65536, 4096)
_HIT_GOAL_MS = 0.2
_REST = 0.05  # seconds in which what was mapped ahead, or is given back, comes to its end


def run(quick: bool) -> Report:
    sizes = QWEN2 | {"max_position_embeddings": 16384} | (TINY if quick else {})
    lengths, rounds = ((256,), 1) if quick else ((2048, 8192), 3)
    model = qwen2(**sizes)
    series: dict[str, list[float]] = {}
    figures: list[Row] = []
    for length in lengths:
        figures += _restart(model, length, rounds, series)
    for length in lengths:
        figures += _replicas(model, sizes, length, rounds, series)
    for page_size in _HIT_PAGES:
        figures += _admissions(page_size, 3 if quick else 40, series)
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
        ]
        + [
            Goal(
                f"TTFT of {_WHERE[str(row['question'])]} over a cold one, {row['shared tokens']} tokens",
                float(row["ratio"]),
                "<=",
                _SHARED_GOALS.get(int(row["shared tokens"]), _GOAL),
            )
            for row in figures
            if row["question"] in _WHERE
        ]
        + [
            Goal(
                f"memory of both processes over the shared prompt's, {row['shared tokens']} tokens",
                float(row["MiB of both"]) / float(row["MiB of the prompt"]),
                "<=",
                1.1,
            )
            for row in figures
            if row["question"] == "replica"
        ]
        + [
            Goal(
                f"ms that {foreign['question']} takes more if the prefix is another process's",
                float(foreign["TTFT ms"]) - float(local["TTFT ms"]),
                "<=",
                _HIT_GOAL_MS,
            )
            for foreign, local in itertools.pairwise(figures)
            if (foreign["files"], local["files"]) == tuple(_HITS.values())
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
            "MiB of the prompt": stored_bytes / 2**20,
            "MiB of both": 0.0,
        }
        for files in _FILES
    ]


def _replicas(
    model: PreTrainedModel, sizes: dict[str, Any], length: int, rounds: int, series: dict[str, list[float]]
) -> list[Row]:
    seconds: dict[str, list[float]] = {name: [] for name in ("cold", *_WHERE)}
    rows: dict[str, Row] = {}
    for number in range(rounds):
        rng = random.Random(number)
        shared = _tokens(model, rng, length)
        with _engine(model, length) as llm:
            seconds["cold"].append(_first_token(llm, [*shared, *_tokens(model, rng, _TAIL)])[0])
        with serving_pool(_POOL_BUDGET) as pool, process(_publish, pool, sizes, length, shared) as (pid, _):
            for name in _WHERE:
                if name == "killed":
                    os.kill(pid, signal.SIGKILL)
                    while not _top(pool)["kept"]:
                        time.sleep(0.001)
                with _engine(model, length, kv_pool=pool, kv_share_prefixes=True) as llm:
                    while not _shares(llm).peers:
                        time.sleep(0.001)
                    taken, found = _first_token(llm, [*shared, *_tokens(model, rng, _TAIL)])
                    seconds[name].append(taken)
                    prompt = _shares(llm).foreign_pages * _shares(llm).directory.shape.page_size
                    both = sum(map(_shared_bytes, (os.getpid(), pid))) if name == "replica" else 0
                rows[name] = {
                    "tokens found": found,
                    "MiB on disk": 0.0,
                    "MiB of the prompt": prompt / 2**20,
                    "MiB of both": both / 2**20,
                }
    for name, each in seconds.items():
        series[f"{name}, {length} tokens, s"] = each
    return [
        {
            "question": name,
            "shared tokens": length,
            "files": "none",
            "cold TTFT ms": 1e3 * median(seconds["cold"]),
            "cold TTFT ms, written": 1e3 * median(seconds["cold"]),
            "TTFT ms": 1e3 * median(seconds[name]),
            "ratio": median(a / b for a, b in zip(seconds[name], seconds["cold"], strict=True)),
            **rows[name],
        }
        for name in _WHERE
    ]


def _admissions(page_size: int, rounds: int, series: dict[str, list[float]]) -> list[Row]:
    """What a hit of another process costs beside a local one. No prompt is admitted twice: it would be in place."""
    length = _HIT_TOKENS
    prompts = {name: [_numbered(name, number, length) for number in range(rounds + 1)] for name in _HITS}
    seconds: dict[str, list[float]] = {name: [] for name in _HITS}
    with (
        serving_pool(_POOL_BUDGET) as pool,
        process(_publish_rows, pool, page_size, prompts["foreign"]),
        closing(_connect(pool, page_size)) as connected,
        closing(_cache(connected, 3 * rounds + 3, length)) as cache,
    ):
        core = cache._core
        assert isinstance(core, LentCore)
        assert core.shares is not None
        while not core.shares.peers:
            time.sleep(_REST)
        for prompt in prompts["local"]:
            cache.step({(slot := cache.admit(prompt).reqid): length})
            cache.commit(slot, prompt)
        for number in range(rounds + 1):
            for name in _HITS if number % 2 else reversed(_HITS):
                prompt = [*prompts[name][number], number]
                while core.publishing:
                    time.sleep(_REST)
                time.sleep(_REST)
                began = time.perf_counter()
                slot, cached = cache.admit(prompt)
                cache.step({slot: len(prompt)})
                seconds[name].append(time.perf_counter() - began)
                assert cached == length
    for name, each in seconds.items():
        del each[0]  # the first one finds nothing prepared
        series[f"{name} hit, pages of {page_size // 1024} KiB, {length} tokens, s"] = each
    return [
        {
            "question": f"admission, pages of {page_size // 1024} KiB",
            "shared tokens": length,
            "files": where,
            "cold TTFT ms": 0.0,
            "cold TTFT ms, written": 0.0,
            "TTFT ms": 1e3 * median(seconds[name]),
            "ratio": median(a / b for a, b in zip(seconds[name], seconds["local"], strict=True)),
            "tokens found": length,
            "MiB on disk": 0.0,
            "MiB of the prompt": 0.0,
            "MiB of both": 0.0,
        }
        for name, where in _HITS.items()
    ]


def _numbered(name: str, number: int, length: int) -> list[int]:
    rng = random.Random(f"{name} {number}")
    return [rng.randrange(10**5) for _ in range(length)]


def _connect(pool: str, page_size: int) -> PagePool:
    return PagePool.connect(pool, page_size=page_size, fingerprint=bytes(32))


def _cache(pool: PagePool, slots: int, length: int) -> KVCache:
    shape: dict[str, Any] = {"num_layers": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    return KVCache(KVConfig(**shape, max_batch_size=slots, max_context_len=2 * length, layout="layer"), pool=pool)


def _publish_rows(ready: Connection, name: str, page_size: int, prompts: list[list[int]]) -> None:
    """Publishes prompts, which nothing has computed, and does nothing more."""
    with closing(_connect(name, page_size)) as pool, closing(_cache(pool, len(prompts), len(prompts[0]))) as cache:
        for prompt in prompts:
            cache.step({(slot := cache.admit(prompt).reqid): len(prompt)})
            cache.commit(slot, prompt)
        while pool.publishing:
            time.sleep(_REST)
        ready.send(None)
        signal.pause()


def _top(pool: str) -> dict[str, Any]:
    with closing(Control(pool)) as control:
        return control.ask("top")


def _publish(ready: Connection, pool: str, sizes: dict[str, Any], length: int, shared: list[int]) -> None:
    """Publishes a prompt, and does nothing more."""
    with _engine(qwen2(**sizes), length, kv_pool=pool, kv_share_prefixes=True) as llm:
        _first_token(llm, shared)
        directory = _shares(llm).directory
        while sum(1 for _ in directory.entries()) < length // directory.shape.block_tokens:
            time.sleep(0.01)
        ready.send(None)
        signal.pause()


def _shares(llm: LLM) -> Shares:
    assert isinstance(llm.core.kv, VirtualKV)
    core = llm.core.kv.cache._core
    assert isinstance(core, LentCore)
    assert core.shares is not None
    return core.shares


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
        if row["question"] == "restart"
    ] + [
        Comparison(
            f"The first token of a prompt of which {row['shared tokens']:,} tokens are in another engine's memory "
            f"takes {{}} times as long as one that is computed, in {_WHERE[row['question']]}",
            record,
            by_round(
                record,
                f"{row['question']}, {row['shared tokens']} tokens, s",
                f"cold, {row['shared tokens']} tokens, s",
            ),
            higher_is_better=False,
            of="rounds",
        )
        for row in record["figures"]
        if row["question"] in _WHERE
    ]


def draw(axes: Any, record: Record) -> None:
    figures = [row for row in record["figures"] if row["question"] in ("restart", *_WHERE)]
    lengths = sorted({row["shared tokens"] for row in figures})
    for files in _FILES:
        times = [row["TTFT ms"] for row in figures if row["files"] == files]
        axes.plot(lengths, times, marker="o", linestyle="-" if files == _FILES[0] else "--", label=f"from the {files}")
    for name in _WHERE:
        found = [row for row in figures if row["question"] == name]
        if found:
            axes.plot(
                [row["shared tokens"] for row in found], [row["TTFT ms"] for row in found], marker="s", label=name
            )
    cold = [next(row["cold TTFT ms"] for row in figures if row["shared tokens"] == length) for length in lengths]
    axes.plot(lengths, cold, **theme.style("paged"), label="computed")
    best = min(row["ratio"] for row in figures if row["question"] == "restart")
    axes.set_title(f"After a restart, a stored prompt's first token takes {best:.2f} times as long as a computed one's")
    axes.set(xlabel="tokens of the shared start", ylabel="ms to the first token", ylim=(0, None))
    axes.set_xticks(lengths)
