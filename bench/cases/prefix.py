"""The savings of a prefix cache: without one, over block tables, and over aliased pages.

    shared prompt   requests with one system prompt and a few tokens of their own: prefill tokens, time to first token
    chat            users in turn, with the whole conversation in every turn: hit rate, driver calls per admission
    tree            n completions of one prompt, forked: physical bytes held, over the least possible

Tokens, bytes and calls are counts; only the shared prompt's times are times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.harness import theme
from bench.harness.models import qwen2
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from vattn.engine import LLM, SamplingParams
from vattn.engine.scheduling.record import StepRecord

ABOUT = "savings of a prefix cache: shared prompts, chats, trees; paged and virtual"
QUESTION = "What does a prefix cache save?"

_MODEL = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


def _virtual(layout: str, page_size: int) -> dict[str, Any]:
    return {"kv": "virtual", "kv_options": {"layout": layout, "page_size": page_size, "kv_order": "NHD"}}


# Backend options by what the tables call them.
_CACHES: dict[str, dict[str, Any]] = {
    "none": {"kv": "virtual", "enable_prefix_caching": False},
    "paged": {"kv": "paged"},
    "virtual": {"kv": "virtual"},
    "virtual, fused": _virtual("fused", 2**15),
}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "paged": {"kv": "paged"},
    "virtual": {"kv": "virtual"},
    "virtual, fused": _virtual("fused", 2**15),
    "virtual, sliced": _virtual("sliced", 2**15),
    "virtual, layer": _virtual("layer", 2**16),
    "virtual, layer, 512 KiB": _virtual("layer", 2**19),
}


def run(quick: bool) -> Report:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is so small that a second one brings nothing
    try:
        return _run(quick)
    finally:
        torch.set_num_threads(threads)


def _run(quick: bool) -> Report:
    sizes = _MODEL | ({"num_hidden_layers": 1, "vocab_size": 256} if quick else {})
    model = qwen2(**sizes)
    goals: list[Goal] = []
    figures = [
        *_shared(model, goals, rounds=1 if quick else 9, requests=4 if quick else 64, prefix=256 if quick else 2048),
        *_chat(model, goals, users=2 if quick else 16, turns=3 if quick else 8),
        *_tree(model, goals, prefix=250 if quick else 2040),
    ]
    return Report(
        parameters={"model": sizes, "dtype": "bfloat16", "threads": torch.get_num_threads()},
        figures=figures,
        goals=goals,
    )


def _shared(model: PreTrainedModel, goals: list[Goal], *, rounds: int, requests: int, prefix: int) -> list[Row]:
    own, output = 128, 20  # so long that the first is there when the last is computed
    seconds: dict[str, list[float]] = {name: [] for name in _CACHES}
    waits: dict[str, list[float]] = {name: [] for name in _CACHES}
    computed: dict[str, int] = {}
    held: dict[str, int] = {}
    block: dict[str, int] = {}
    token_bytes = 0
    for number in range(rounds):
        rng = random.Random(number)
        system = _tokens(model, rng, prefix)
        prompts = [system + _tokens(model, rng, own) for _ in range(requests)]
        # What computes all of it takes twenty times as long as the others: once is enough.
        names = list(_CACHES) if number == 0 else [name for name in _CACHES if name != "none"]
        for name in reversed(names) if number % 2 else names:
            with _llm(model, max_num_seqs=requests, **_CACHES[name]) as llm:
                sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
                llm.generate([_tokens(model, rng, own) for _ in range(4)], sampling, use_tqdm=False)  # warms up
                llm.core.kv.evict_prefixes()
                outputs = llm.generate(prompts, sampling, use_tqdm=False)
                if number == 0:
                    # Again, to be counted: a record of a step takes time, and more of it over `virtual`.
                    llm.core.kv.evict_prefixes()
                    records: list[StepRecord] = []
                    llm.on_step = records.append
                    llm.generate(prompts, sampling, use_tqdm=False)
                    computed[name] = sum(record.prefill_tokens for record in records)
                    held[name] = max(record.kv.used_bytes for record in records)
                    token_bytes = llm.token_bytes
                    block[name] = llm.core.kv.prefix_block_tokens
            metrics = [output.metrics for output in outputs]
            start = min(m.arrival_time for m in metrics)
            seconds[name].append(max(m.finished_time or 0.0 for m in metrics) - start)
            waits[name].append(median(m.time_to_first_token or 0.0 for m in metrics))
    ideal = prefix + requests * own
    once = (ideal + requests * output) * token_bytes
    rows: list[Row] = [
        {
            "case": "shared prompt",
            "cache": name,
            "block": block[name],
            "prefill tokens": computed[name],
            "prefill over ideal": computed[name] / ideal,
            "TTFT s": median(waits[name]),
            "requests/s": requests / median(seconds[name]),
            "held MiB": held[name] / 2**20,
            "held over ideal": held[name] / once,
            "hit rate": 1 - computed[name] / (requests * (prefix + own)),
            "driver calls per admission": "-",
        }
        for name in _CACHES
    ]

    def ratio(values: dict[str, list[float]], over: str) -> float:
        return median(a / b for a, b in zip(values["virtual"], values[over], strict=False))

    goals += [
        Goal("shared prompt: prefill tokens over the ideal, virtual", computed["virtual"] / ideal, "<=", 1.02),
        Goal(
            "shared prompt: bytes held over the least possible, virtual, fused",
            held["virtual, fused"] / once,
            "<=",
            1.25,
        ),
        Goal("shared prompt: TTFT, virtual over no cache", ratio(waits, "none"), "<=", 0.2),
        Goal("shared prompt: TTFT, virtual over paged", ratio(waits, "paged"), "<=", 1.0),
        Goal("shared prompt: time, virtual over paged", ratio(seconds, "paged"), "<=", 1.0),
    ]
    return rows


def _chat(model: PreTrainedModel, goals: list[Goal], *, users: int, turns: int) -> list[Row]:
    rows: list[Row] = []
    for name, options in _LAYOUTS.items():
        rng = random.Random(0)
        said = [_tokens(model, rng, 48) for _ in range(users)]
        calls: list[int] = []
        records: list[StepRecord] = []
        with _llm(model, max_num_seqs=users, on_step=records.append, **options) as llm:
            for turn in range(turns):
                with _counting_admissions(llm) as admissions:
                    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
                    outputs = llm.generate(said, sampling, use_tqdm=False)
                if turn:  # somebody who comes back finds the slot as it was
                    calls += admissions
                said = [
                    old + output.outputs[0].token_ids + _tokens(model, rng, 40)
                    for old, output in zip(said, outputs, strict=True)
                ]
            block = llm.core.kv.prefix_block_tokens
            hit_rate = llm.core.scheduler.hit_tokens / llm.core.scheduler.query_tokens
        rows.append(
            {
                "case": "chat",
                "cache": name,
                "block": block,
                "prefill tokens": sum(record.prefill_tokens for record in records),
                "prefill over ideal": "-",
                "TTFT s": "-",
                "requests/s": "-",
                "held MiB": max(record.kv.used_bytes for record in records) / 2**20,
                "held over ideal": "-",
                "hit rate": hit_rate,
                "driver calls per admission": sum(calls) / len(calls),
            }
        )
        if name == "virtual, fused":
            goals.append(Goal("chat: driver calls per admission, virtual, fused", sum(calls) / len(calls), "==", 0))
    return rows


def _tree(model: PreTrainedModel, goals: list[Goal], *, prefix: int) -> list[Row]:
    rows: list[Row] = []
    count, output = 8, 32
    for name, options in _LAYOUTS.items():
        records: list[StepRecord] = []
        prompt = _tokens(model, random.Random(0), prefix)
        with _llm(model, max_num_seqs=count, on_step=records.append, **options) as llm:
            sampling = SamplingParams(n=count, temperature=1.0, seed=0, max_tokens=output, ignore_eos=True)
            llm.generate(prompt, sampling, use_tqdm=False)
            ideal = (prefix + count * output) * llm.token_bytes
            block = llm.core.kv.prefix_block_tokens
        held = max(record.kv.used_bytes for record in records)
        computed = sum(record.prefill_tokens for record in records)
        rows.append(
            {
                "case": "tree",
                "cache": name,
                "block": block,
                "prefill tokens": computed,
                "prefill over ideal": computed / prefix,
                "TTFT s": "-",
                "requests/s": "-",
                "held MiB": held / 2**20,
                "held over ideal": held / ideal,
                "hit rate": "-",
                "driver calls per admission": "-",
            }
        )
        if name == "virtual, fused":
            goals.append(Goal("tree: times that the prompt is computed, virtual, fused", computed / prefix, "==", 1))
            goals.append(Goal("tree: bytes held over the least possible, virtual, fused", held / ideal, "<=", 1.25))
    return rows


def _llm(model: PreTrainedModel, **options: Any) -> LLM:
    return LLM(model, skip_tokenizer_init=True, max_model_len=2560, memory_budget="1GiB", **options)


def _tokens(model: PreTrainedModel, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(model.config.vocab_size) for _ in range(count)]


def _map_calls(llm: LLM) -> int:
    return llm.core.kv.stats().map_calls


@contextmanager
def _counting_admissions(llm: LLM) -> Iterator[list[int]]:
    """Collects the number of mapping calls of each admission."""
    calls: list[int] = []
    admit = llm.core.kv.admit

    def counted(*args: Any) -> Any:
        before = _map_calls(llm)
        admission = admit(*args)
        calls.append(_map_calls(llm) - before)
        return admission

    kv: Any = llm.core.kv
    kv.admit = counted
    try:
        yield calls
    finally:
        kv.admit = admit


def compare(record: Record) -> list[Comparison]:
    sides = {"paged": "With the prefix cache of `paged`", "none": "Without one"}
    return [
        Comparison(
            f"{side}, the first token of 64 requests with one system prompt takes {{}} times as long",
            record,
            rows(record, "TTFT s", {"cache": cache}, {"cache": "virtual"}, same=["case"]),
        )
        for cache, side in sides.items()
    ]


def draw(axes: Any, record: Record) -> None:
    rows = [row for row in record["figures"] if row["case"] == "shared prompt"]
    names = {
        "none": "no prefix cache",
        "paged": "paged, blocks of 16",
        "virtual": "virtual, blocks of 128",
        "virtual, fused": "virtual fused, blocks of 16",
    }
    times = {names[row["cache"]]: row["TTFT s"] for row in rows}
    theme.bars(axes, times, [name for name in times if name.startswith("virtual")])
    first = {row["cache"]: row["TTFT s"] for row in rows}
    axes.set_title(
        f"64 prompts with one beginning: the first token after {first['virtual']:.2f} s instead of "
        f"{first['none']:.2f}, paged after {first['paged']:.2f}"
    )
    axes.set(xlabel="median time to the first token, in seconds")
