"""The next turn of long conversations: 32 of them, of 4,096 to 12,288 tokens, whose keys and values are in the cache.

Memory matters here: a turn is 32 new tokens and an answer of 128, so nearly all of its time are decode steps over long
contexts. Every engine has first served many other requests, so that its pages or blocks lie anywhere; for that, and to
fill the conversations in, its model was left out (`bench/harness/fabricated.py`). The engines take turns:

    virtual     contiguous rows; vattn's kernel, which knows no block table
    paged       the same kernel rewritten to follow a block table
    torch       contiguous rows; torch's kernel, unmodified
    gathered    block tables; torch's kernel, unmodified: blocks are first copied together
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.fabricated import without_model
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.ratios import Comparison, by_round
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import turns
from vattn.engine import LLM, SamplingParams

ABOUT = "the next turn of 32 long conversations, through the whole engine"
QUESTION = "What does a block table cost a whole engine at long contexts?"

_SIDES: dict[str, dict[str, Any]] = {
    "virtual": {"kv": "virtual"},
    "paged": {"kv": "paged"},
    "torch": {"kv": "virtual", "attention": "torch_sdpa"},
    "gathered": {"kv": "paged", "attention": "torch_sdpa"},
}
_REQUESTS, _LENGTHS, _QUESTION, _ANSWER = 32, (4096, 12_288), 32, 128
_MAX_LENGTH = 16_384
# What an engine has room for, over the tokens of the conversations; and what it has served before them, over its room.
_ROOM, _BEFORE = 1.5, 3


def run(quick: bool) -> Report:
    sizes = QWEN2 | {"max_position_embeddings": _MAX_LENGTH} | (TINY if quick else {})
    count, lengths, answer = (4, (64, 256), 4) if quick else (_REQUESTS, _LENGTHS, _ANSWER)
    # The sides that read plain tensors take several times as long, and their ratios are larger.
    rounds = (
        {"virtual": 1, "paged": 1, "torch": 1, "gathered": 1}
        if quick
        else {"virtual": 5, "paged": 5, "torch": 1, "gathered": 1}
    )
    rng = random.Random(0)
    conversations = [_tokens(rng, sizes, rng.randint(*lengths)) for _ in range(count)]
    live = sum(map(len, conversations))
    seconds: dict[str, list[float]] = {side: [] for side in _SIDES}
    cached: dict[str, float] = {}
    with ExitStack() as stack:
        engines = {}
        for side, options in _SIDES.items():
            engines[side] = stack.enter_context(_engine(sizes, count, live, options))
            _use(engines[side], sizes, conversations, lengths)
        held = dict.fromkeys(_SIDES, conversations)  # each goes on with the answers of its own engine
        for number in range(-1, max(rounds.values())):  # the first round warms up
            questions = [_tokens(rng, sizes, _QUESTION) for _ in conversations]
            for side in turns(_SIDES, number):
                if number < rounds[side]:
                    prompts = [tokens + question for tokens, question in zip(held[side], questions, strict=True)]
                    elapsed, cached[side], held[side] = _turn(engines[side], prompts, answer)
                    if number >= 0:
                        seconds[side].append(elapsed)
    ratios = {side: [a / b for a, b in zip(times, seconds["virtual"], strict=False)] for side, times in seconds.items()}
    figures: list[Row] = [
        {
            "engine": side,
            "seconds": median(times),
            "output tokens/s": count * answer / median(times),
            "over virtual": median(ratios[side]),
            "least": min(ratios[side]),
            "most": max(ratios[side]),
            "cached": cached[side],
        }
        for side, times in seconds.items()
    ]
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "requests": count,
            "tokens": live,
            "question and answer": f"{_QUESTION} and {answer} tokens",
            "rounds": ", ".join(f"{side} {number}" for side, number in rounds.items()),
        },
        figures=figures,
        goals=[
            Goal("paged over virtual", median(ratios["paged"]), ">=", 1.2),
            Goal("gathered over virtual", median(ratios["gathered"]), ">=", 2.0),
            Goal("gathered over torch, the same kernel", _median_ratio(seconds, "gathered", "torch"), ">=", 1.2),
        ],
        series={f"{side}, seconds": times for side, times in seconds.items()},
    )


def _tokens(rng: random.Random, sizes: dict[str, Any], count: int) -> list[int]:
    return [rng.randrange(sizes["vocab_size"]) for _ in range(count)]


def _median_ratio(seconds: dict[str, list[float]], a: str, b: str) -> float:
    return median(x / y for x, y in zip(seconds[a], seconds[b], strict=False))


def _engine(sizes: dict[str, Any], count: int, live: int, options: dict[str, Any]) -> LLM:
    model = qwen2(**sizes)
    shape = sizes["num_hidden_layers"] * sizes["num_key_value_heads"]
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    return LLM(
        model,
        skip_tokenizer_init=True,
        max_num_seqs=count,
        max_model_len=_MAX_LENGTH,
        max_num_batched_tokens=2048,
        memory_budget=int(_ROOM * live * 2 * shape * head_dim * model.dtype.itemsize),
        num_threads=torch.get_num_threads(),
        **options,
    )


def _use(llm: LLM, sizes: dict[str, Any], conversations: list[list[int]], lengths: tuple[int, int]) -> None:
    """Serves other requests, then the conversations."""
    rng = random.Random(1)
    tokens, others = 0, []
    while tokens < _BEFORE * _ROOM * sum(map(len, conversations)):
        others.append(_tokens(rng, sizes, rng.randint(16, lengths[1])))
        tokens += len(others[-1])
    with without_model(llm.core):
        for prompts, most in ((others, 64), (conversations, 1)):
            params = [SamplingParams(temperature=0, max_tokens=rng.randint(1, most), ignore_eos=True) for _ in prompts]
            llm.generate(prompts, params, use_tqdm=False)


def _turn(llm: LLM, prompts: list[list[int]], answer: int) -> tuple[float, float, list[list[int]]]:
    """Seconds of a turn, the share of its prompts that was in the cache, and the conversations with its answers."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True), use_tqdm=False)
    elapsed = time.perf_counter() - start
    found = sum(output.num_cached_tokens for output in outputs) / sum(map(len, prompts))
    held = [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)]
    return elapsed, found, held


def compare(record: Record) -> list[Comparison]:
    requests = record["parameters"]["requests"]
    says = {
        "paged": f"With a block table, the same turn of {requests} long conversations takes {{}} times as long",
        "gathered": "Gathering blocks for torch's kernel, it takes {} times as long",
        "torch": "With torch's kernel over contiguous rows, it takes {} times as long",
    }
    found = []
    for side, text in says.items():
        pairs = by_round(record, f"{side}, seconds", "virtual, seconds")
        found.append(Comparison(text, record, pairs, of="rounds"))
    return found


def draw(axes: Any, record: Record) -> None:
    names = {
        "virtual": "contiguous, vattn's kernel",
        "paged": "block table, vattn's kernel",
        "torch": "contiguous, torch's kernel",
        "gathered": "gathered blocks, torch's kernel",
    }
    rows = {row["engine"]: row for row in record["figures"]}
    theme.bars(axes, {names[side]: row["seconds"] for side, row in rows.items()}, [names["virtual"]])
    axes.set_title(
        f"{record['parameters']['requests']} long conversations, one more turn: following a block table takes "
        f"{theme.more_time(rows['paged']['over virtual'])}, gathering its blocks "
        f"{theme.more_time(rows['gathered']['over virtual'])}"
    )
    axes.set(xlabel="seconds; less is better")
