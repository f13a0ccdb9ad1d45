"""Streams beside long prompts: one engine with all cores, or one engine that decodes and one that prefills.

Eight streams decode. Beside them long prompts arrive one after the other, each when the one before has ended, after a
few tokens. Either one engine does everything, with all cores; or half of the cores are those of an engine that decodes,
the others those of one that computes its prompts, and both are on one pool. Every side runs in processes of its own.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.harness import theme
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.pools import serving_pool
from bench.harness.processes import process
from bench.harness.ratios import Comparison, by_round
from bench.harness.records import Record
from bench.harness.report import Goal, Report
from bench.harness.waiting import wait_until
from vattn.engine import LLM, AsyncEngine, SamplingParams

ABOUT = "time between tokens of streams beside long prompts: prefill in another process, or in the same engine"
QUESTION = "What do long prompts cost the streams beside them?"

_TOGETHER, _APART = "one engine", "prefill apart"
_STREAMS, _STREAM_PROMPT = 8, 128
_LONG_OUTPUT = 8
_POOL_BUDGET = 2**32
_GAP, _RATE, _FIRST = "ms between tokens", "tokens/s", "TTFT of a long prompt s"


def run(quick: bool) -> Report:
    sizes = QWEN2 | {"num_hidden_layers": 2} | (TINY if quick else {})
    length = 512 if quick else 4096
    rounds, prompts = (1, 2) if quick else (3, 2)
    series: dict[str, list[float]] = {}
    for number in range(rounds):
        for side in (_TOGETHER, _APART) if number % 2 else (_APART, _TOGETHER):
            gaps, rate, firsts = _play(side, sizes, length, prompts, number)
            for name, values in (
                (f"p99 {_GAP}", [float(np.percentile(gaps, 99))]),
                (f"median {_GAP}", [median(gaps)]),
                (_RATE, [rate]),
                (_FIRST, [median(firsts)]),
                (_GAP, gaps),
            ):
                series.setdefault(f"{name}, {side}", []).extend(values)
    figures: list[dict[str, str | int | float]] = [
        {
            "side": side,
            f"median {_GAP}": median(series[f"median {_GAP}, {side}"]),
            f"p99 {_GAP}": median(series[f"p99 {_GAP}, {side}"]),
            f"longest {_GAP}": max(series[f"{_GAP}, {side}"]),
            _RATE: median(series[f"{_RATE}, {side}"]),
            _FIRST: median(series[f"{_FIRST}, {side}"]),
        }
        for side in (_TOGETHER, _APART)
    ]
    p99 = [a / b for a, b in zip(*(series[f"p99 {_GAP}, {side}"] for side in (_APART, _TOGETHER)), strict=True)]
    return Report(
        parameters={
            "model": sizes,
            "streams": _STREAMS,
            "tokens of a stream's prompt": _STREAM_PROMPT,
            "tokens of a long prompt": length,
            "tokens after it": _LONG_OUTPUT,
            "long prompts": prompts,
            "threads": torch.get_num_threads(),
        },
        figures=figures,
        goals=[Goal("p99 time between tokens, prefill apart over one engine", median(p99), "<=", 0.5)],
        series=series,
    )


def _play(
    side: str, sizes: dict[str, Any], length: int, prompts: int, seed: int
) -> tuple[list[float], float, list[float]]:
    """Milliseconds between tokens of a stream; tokens per second, of all; seconds to each long prompt's first one."""
    cores = sorted(os.sched_getaffinity(0))
    mine, other = cores[: (len(cores) + 1) // 2], cores[len(cores) // 2 :]
    with ExitStack() as stack:
        if side == _TOGETHER:
            options: dict[str, Any] = {"memory_budget": "2GiB"}
            mine = cores
        else:
            pool = stack.enter_context(serving_pool(_POOL_BUDGET))
            stack.enter_context(process(_prefill, other, sizes, length, {"kv_pool": pool, "role": "prefill"}))
            options = {"kv_pool": pool, "role": "decode"}
        _, answers = stack.enter_context(process(_decode, mine, sizes, length, options, prompts, seed))
        gaps, rate, firsts = answers.recv()
        return gaps, rate, firsts


def _engine(cores: list[int], sizes: dict[str, Any], length: int, options: dict[str, Any]) -> LLM:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    most: dict[str, Any] = {"max_num_seqs": 2 * _STREAMS, "max_model_len": length + 2 * _STREAM_PROMPT, **options}
    return LLM(qwen2(**sizes), skip_tokenizer_init=True, num_threads=len(cores), **most)


def _prefill(ready: Connection, cores: list[int], sizes: dict[str, Any], length: int, options: dict[str, Any]) -> None:
    async def serve() -> None:
        async with AsyncEngine(_engine(cores, sizes, length, options)):
            ready.send(None)
            await asyncio.Event().wait()

    asyncio.run(serve())


def _decode(
    ready: Connection,
    cores: list[int],
    sizes: dict[str, Any],
    length: int,
    options: dict[str, Any],
    prompts: int,
    seed: int,
) -> None:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(sizes["vocab_size"]) for _ in range(count)]

    def greedy(most: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)

    with _engine(cores, sizes, length, options) as llm:
        if options.get("role"):
            wait_until(lambda: llm.core.remote and llm.core.remote.prefillers, every=0.01)
        llm.generate([tokens(length)], greedy(_LONG_OUTPUT), use_tqdm=False)
        ready.send(None)
        for stream in range(_STREAMS):
            llm.add_request(f"stream {stream}", tokens(_STREAM_PROMPT), greedy(length))
        counts: dict[str, int] = {}
        while len(counts) < _STREAMS or min(counts.values()) < 4:
            counts |= {output.request_id: len(output.outputs[0].token_ids) for output in llm.step()}
        last: dict[str, float] = {}
        gaps: list[float] = []
        firsts: list[float] = []
        began = time.perf_counter()
        for number in range(prompts):
            name = f"long {number}"
            asked, first, ended = time.perf_counter(), None, False
            llm.add_request(name, tokens(length), greedy(_LONG_OUTPUT))
            while not ended:
                outputs, now = llm.step(), time.perf_counter()
                for output in outputs:
                    if output.request_id != name:
                        if output.request_id in last:
                            gaps.append(1e3 * (now - last[output.request_id]))
                        last[output.request_id] = now
                    else:
                        first, ended = first or now, output.finished
            assert first is not None
            firsts.append(first - asked)
        seconds = time.perf_counter() - began
        ready.send((gaps, (len(gaps) + prompts * _LONG_OUTPUT) / seconds, firsts))
        ready.poll(None)


def _ratio(record: Record, figure: str, says: str, *, higher_is_better: bool = False) -> Comparison:
    rounds = by_round(record, f"{figure}, {_APART}", f"{figure}, {_TOGETHER}")
    return Comparison(says, record, rounds, higher_is_better, of="rounds")


def compare(record: Record) -> list[Comparison]:
    return [
        _ratio(
            record,
            f"p99 {_GAP}",
            "Beside long prompts, the 99th percentile of the time between a stream's tokens is {} times as long where "
            "another process on half of the cores computes the prompts as in one engine with all cores",
        ),
        _ratio(
            record,
            _RATE,
            "An engine whose prompts are computed apart decodes {} times as many tokens per second beside them",
            higher_is_better=True,
        ),
        _ratio(
            record,
            _FIRST,
            "The first token of a long prompt takes {} times as long if half of the cores compute the prompt, apart",
        ),
    ]


def draw(axes: Any, record: Record) -> None:
    for side, name in ((_TOGETHER, "static"), (_APART, "virtual")):
        gaps = sorted(record["series"][f"{_GAP}, {side}"])
        shares = [100 * (number + 1) / len(gaps) for number in range(len(gaps))]
        axes.plot(gaps, shares, **(theme.style(name) | {"marker": ""}), label=side)
    before, after = (median(record["series"][f"p99 {_GAP}, {side}"]) for side in (_TOGETHER, _APART))
    axes.set_title(f"Beside long prompts: prefill apart has a p99 of {after:.0f} ms between tokens, not {before:.0f}")
    axes.set(xlabel="ms between two tokens of a stream", ylabel="% of the tokens", xscale="log", ylim=(0, 100))
