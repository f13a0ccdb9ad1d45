"""Two models that take turns in one budget, and what it costs a cache that a broker lends its memory.

bursts   each of two engines gets bursts of requests, in turn. Either each of them has half of the memory, or a
         broker lends both all of it. The engine that waits keeps its prefixes until the other one needs the memory.
steps    `step()` over a private pool, and over one that a broker lends: where nothing has to be mapped, and where
         one of the requests gets pages. Between two steps the worker has time, as in a forward pass.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np
import torch

import vattn
from bench.harness import theme
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.pools import serving_pool
from bench.harness.ratios import Comparison, by_round
from bench.harness.records import Record
from bench.harness.report import Goal, Report
from bench.harness.timing import interleave
from vattn.engine import LLM, SamplingParams

ABOUT = "two models with alternating bursts in one budget, beside a static split; steps over memory that a broker lends"
QUESTION = "What does one memory for two models bring, and what does it cost?"

_MODEL = QWEN2 | {"num_hidden_layers": 4}
_APART, _TOGETHER = "static split", "one budget"
_PRIVATE, _LENT = "private pool", "lent pool"
_STEPS = ("step without growth us", "step with growth us")
# Of each figure, with memory of its own and with memory that is lent.
_SIDES = dict.fromkeys(("requests/s", "p99 TTFT ms"), (_APART, _TOGETHER)) | dict.fromkeys(_STEPS, (_PRIVATE, _LENT))
_PROMPTS, _OUTPUT = (32, 96), 32  # tokens; of prompts at least and at most
_AT_A_TIME = 6  # requests of a usual length for which the whole budget has memory
_BURST = 2 * _AT_A_TIME  # requests
_PAGE = 4096  # small, as these requests are short
_PAUSE = 0.002  # seconds between two steps
_SLOTS = 64
_CALLS = 10  # steps of a round


def run(quick: bool) -> Report:
    series: dict[str, list[float]] = {}
    budget, preempted = _bursts(series, quick)
    _steps(series, rounds=3 if quick else 20)
    return Report(
        parameters={
            "model": _MODEL | (TINY if quick else {}),
            "prompts": list(_PROMPTS),
            "output": _OUTPUT,
            "requests of a burst": _BURST,
            "budget": budget,
            "page_size": _PAGE,
            "threads": torch.get_num_threads(),
            "preempted": preempted,
            "slots of a step": _SLOTS,
        },
        figures=[
            {
                "memory": memory,
                **{figure: median(series[_series(figure, sides[of])]) for figure, sides in _SIDES.items()},
            }
            for of, memory in enumerate(("of its own", "lent"))
        ],
        goals=[
            Goal("requests per second, one budget over a static split", _ratio(series, "requests/s"), ">=", 1.5),
            Goal("p99 TTFT, one budget over a static split", _ratio(series, "p99 TTFT ms"), "<=", 0.5),
            Goal("step without growth, lent over private", _ratio(series, "step without growth us"), "<=", 1.02),
            Goal("step with growth, lent over private", _ratio(series, "step with growth us"), "<=", 1.1),
        ],
        series=series,
    )


def _bursts(series: dict[str, list[float]], quick: bool) -> tuple[int, dict[str, int]]:
    """The bytes of the budget, and how often requests were preempted; `series` gets each round's figures."""
    config = _MODEL | (TINY if quick else {})
    rows = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]  # of a token, each in pages of its own
    page_tokens = _PAGE // (2 * config["hidden_size"] // config["num_attention_heads"])
    budget = _AT_A_TIME * -(-(sum(_PROMPTS) // 2 + _OUTPUT) // page_tokens) * rows * _PAGE
    rng = random.Random(0)
    preempted = dict.fromkeys((_APART, _TOGETHER), 0)
    with ExitStack() as stack:
        pool = stack.enter_context(serving_pool(budget))
        memory: dict[str, dict[str, Any]] = {
            _APART: {"memory_budget": budget // 2},
            _TOGETHER: {"kv_pool": pool},
        }
        engines: dict[str, list[LLM]] = {side: [] for side in memory}
        for model in (qwen2(**config) for _ in range(2)):
            for side, options in memory.items():
                llm = stack.enter_context(
                    LLM(
                        model,
                        skip_tokenizer_init=True,
                        kv_options={"page_size": _PAGE},
                        max_num_seqs=32,
                        max_model_len=_PROMPTS[1] + _OUTPUT,
                        num_threads=torch.get_num_threads(),
                        **options,
                    )
                )

                def note(step: Any, side: str = side) -> None:
                    preempted[side] += step.num_preempted

                llm.on_step = note
                engines[side].append(llm)

        for number in range(-1, 1 if quick else 4):  # the first round warms up
            seconds = dict.fromkeys(engines, 0.0)
            firsts: dict[str, list[float]] = {side: [] for side in engines}
            for turn in range(2):
                prompts = [_prompt(rng, config["vocab_size"]) for _ in range(_BURST)]
                for side in list(engines) if (number + turn) % 2 else [*engines][::-1]:
                    begin = time.perf_counter()
                    firsts[side] += _serve(engines[side][turn], prompts)
                    seconds[side] += time.perf_counter() - begin
            if number >= 0:
                for side in engines:
                    rate, p99 = 2 * _BURST / seconds[side], 1e3 * float(np.percentile(firsts[side], 99))
                    series.setdefault(_series("requests/s", side), []).append(rate)
                    series.setdefault(_series("p99 TTFT ms", side), []).append(p99)
                    series.setdefault(_series("TTFT ms", side), []).extend(1e3 * first for first in firsts[side])
    return budget, preempted


def _prompt(rng: random.Random, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(rng.randint(*_PROMPTS))]


def _serve(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """Seconds to each request's first token."""
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.metrics.time_to_first_token or 0.0 for output in outputs if output.metrics is not None]


def _steps(series: dict[str, list[float]], rounds: int) -> None:
    """`series` gets the median of each round."""
    budget = 2**29
    with ExitStack() as stack:
        name = stack.enter_context(serving_pool(2 * budget))
        actions: dict[tuple[str, str], Callable[[], None]] = {}
        for side in (_PRIVATE, _LENT):
            for kind in _STEPS:
                pool = vattn.PagePool(budget) if side == _PRIVATE else vattn.PagePool.connect(name)
                stack.callback(pool.close)
                cache = stack.enter_context(vattn.KVCache(_config(budget), pool=pool))
                actions[kind, side] = _growing(cache) if kind == _STEPS[1] else _steady(cache)
        for _ in range(rounds):
            seconds = interleave(actions, _CALLS, warmup=1, before=lambda _: time.sleep(_PAUSE))
            for (kind, side), each in seconds.items():
                series.setdefault(_series(kind, side), []).append(1e6 * median(each))


def _config(budget: int) -> vattn.KVConfig:
    return vattn.KVConfig(
        num_layers=4,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
        max_batch_size=_SLOTS,
        max_context_len=4096,
        memory_budget=budget,
        layout="layer",
    )


def _growing(cache: vattn.KVCache) -> Callable[[], None]:
    """A step in which one request gets a page in every tensor, another one each time."""
    ahead = cache.layout.page_tokens // _SLOTS
    lengths = {cache.alloc_reqid(): 1 + number * ahead for number in range(_SLOTS)}

    def step() -> None:
        for slot in lengths:
            lengths[slot] += ahead
        cache.step(lengths)

    return step


def _steady(cache: vattn.KVCache) -> Callable[[], None]:
    """A step in which every request gets a token for which it has memory."""
    slots = [cache.alloc_reqid() for _ in range(_SLOTS)]
    cache.step(dict.fromkeys(slots, cache.layout.page_tokens))
    lengths = dict.fromkeys(slots, 1)

    def step() -> None:
        for slot in lengths:
            lengths[slot] = lengths[slot] % cache.layout.page_tokens + 1
        cache.step(lengths)

    return step


def _series(figure: str, side: str) -> str:
    return f"{figure}, {side}"


def _ratio(series: dict[str, list[float]], figure: str) -> float:
    """With memory that is lent, over memory of its own: the median of the rounds' ratios."""
    own, lent = (series[_series(figure, side)] for side in _SIDES[figure])
    return median(a / b for a, b in zip(lent, own, strict=True))


def compare(record: Record) -> list[Comparison]:
    def lent_over_own(says: str, figure: str, *, higher_is_better: bool = False) -> Comparison:
        own, lent = (_series(figure, side) for side in _SIDES[figure])
        return Comparison(says, record, by_round(record, lent, own), higher_is_better, of="rounds")

    return [
        lent_over_own(
            "Two models with alternating bursts serve {} times as many requests per second in one budget as with half "
            "of it each",
            "requests/s",
            higher_is_better=True,
        ),
        lent_over_own(
            "The 99th percentile of the time to a burst's first tokens is {} times as long in one budget as with half "
            "of it each",
            "p99 TTFT ms",
        ),
        lent_over_own(
            "A step that maps nothing takes {} times as long over a pool that a broker lends as over a private one",
            "step without growth us",
        ),
        lent_over_own(
            "A step in which a request gets pages takes {} times as long over a pool that a broker lends as over a "
            "private one",
            "step with growth us",
        ),
    ]


def draw(axes: Any, record: Record) -> None:
    for side, name in ((_APART, "static"), (_TOGETHER, "virtual")):
        times = sorted(record["series"][_series("TTFT ms", side)])
        shares = [100 * (number + 1) / len(times) for number in range(len(times))]
        axes.plot(times, shares, **(theme.style(name) | {"marker": ""}), label=side)
    ratio = _ratio(record["series"], "requests/s")
    axes.set_title(f"Two models with alternating bursts: one budget serves {ratio:.2f} times the requests of a split")
    axes.set(xlabel="ms to the first token", ylabel="% of the requests", xlim=(0, None), ylim=(0, 100))
