"""Prompt-lookup drafts: tokens per step, and the speed-up over plain decoding on the same engine.

There are two models. The demo's shows real text: stories, in which there is nothing to look up, and conversations that
repeat a question, whose first answer is then in the prompt. A model of Qwen2's shape with random weights shows what a
given acceptance rate is worth at a realistic cost of a step: its tokens are drawn uniformly from the first 1, 2 or 8 of
the vocabulary, so that one in 1, 2 or 8 drafted tokens is right. Rounds with and without drafts alternate; the speed-up
is the median of quotients within a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from demo.corpus import prompt
from vattn.engine import LLM, RequestOutput, SamplingParams
from vattn.engine.scheduling.drafts import NgramProposer

ABOUT = "decoding with prompt-lookup drafts: tokens per step and speed-up, by how often drafts are right"
QUESTION = "What do prompt-lookup drafts bring?"

_DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_STORIES = [
    f"Write a long story about {who}."
    for who in (
        "a bear named Hugo",
        "a duck named Simon",
        "a wolf named Ada",
        "a frog named Ella",
        "a fox named Tom",
        "an owl named Nora",
        "a goat named Uma",
        "a horse named Max",
    )
]
_AGAIN = ["Write the 7 times table.", "Count from 3 to 60.", "Say the alphabet.", *_STORIES[:5]]
_CHOICES = (1, 2, 8)  # tokens to draw from
_BATCHES = (1, 8)
_TOKENS = 32


class _Case:
    """One set of requests; `plain` and `drafted` run them through the same engine."""

    def __init__(
        self,
        llm: LLM,
        proposer: NgramProposer | None,
        prompts: Sequence[str] | Sequence[list[int]],
        params: Sequence[SamplingParams],
        names: Row,
    ) -> None:
        self.names = names
        self.outputs: dict[str, list[RequestOutput]] = {}
        self._llm, self._prompts, self._params = llm, prompts, params
        self._proposer = proposer

    def run(self, name: str) -> None:
        """Runs all requests to the end, `"plain"` or `"drafted"`."""
        self._llm.core.scheduler.proposer = self._proposer if name == "drafted" else None
        stats = self._llm.speculation
        before = stats.num_drafted_tokens, stats.num_accepted_tokens
        self.outputs[name] = self._llm.generate(self._prompts, self._params, use_tqdm=False)
        if name == "drafted":
            self.drafted, self.accepted = stats.num_drafted_tokens - before[0], stats.num_accepted_tokens - before[1]

    def measure(self, rounds: int) -> tuple[Row, float]:
        """The row of the table, and the share of requests whose tokens were the same both ways."""
        seconds = interleave({name: partial(self.run, name) for name in ("plain", "drafted")}, rounds, warmup=0)
        plain, drafted = (
            [output.outputs[0].token_ids for output in self.outputs[name]] for name in ("plain", "drafted")
        )
        total = sum(map(len, drafted))
        # The first token comes from the prompt's step; of the others each step gives one, and what was accepted.
        decoded = total - len(drafted)
        row: Row = {
            **self.names,
            "plain tokens/s": sum(map(len, plain)) / median(seconds["plain"]),
            "drafted tokens/s": total / median(seconds["drafted"]),
            "speed-up": median(a / b for a, b in zip(seconds["plain"], seconds["drafted"], strict=True)),
            "tokens per step": decoded / (decoded - self.accepted),
            "right %": 100 * self.accepted / max(1, self.drafted),
        }
        return row, sum(a == b for a, b in zip(plain, drafted, strict=True)) / len(plain)


def run(quick: bool) -> Report:
    rounds, tokens = (1, 8) if quick else (3, _TOKENS)
    figures: list[Row] = []
    same: list[float] = []
    options: dict[str, Any] = {"speculative_config": _DRAFTS, "enable_prefix_caching": False, "memory_budget": "256MiB"}
    for kv in ("virtual", "paged"):
        for batch in _BATCHES if kv == "virtual" else _BATCHES[1:]:
            with LLM("demo/model", kv=kv, max_num_seqs=batch, max_model_len=1024, **options) as llm:
                proposer = llm.core.scheduler.proposer
                count = max(4, batch)
                params = [SamplingParams(temperature=0, max_tokens=2 * tokens)] * count
                for name, prompts in (
                    ("again", _again(llm, count, params)),
                    ("stories", [prompt(story) for story in _STORIES[:count]]),
                ):
                    row, share = _Case(llm, proposer, prompts, params, _names("demo", name, kv, batch)).measure(rounds)
                    figures.append(row)
                    same.append(share)
    sizes = QWEN2 | (TINY if quick else {})
    model = qwen2(**sizes)
    for kv in ("virtual", "paged"):
        with LLM(model, kv=kv, max_num_seqs=8, max_model_len=1024, skip_tokenizer_init=True, **options) as llm:
            proposer = llm.core.scheduler.proposer
            for batch in _BATCHES:
                for choice in _CHOICES if kv == "virtual" else _CHOICES[:1]:
                    params = [
                        SamplingParams(
                            temperature=1e6, seed=i, max_tokens=tokens, allowed_token_ids=range(choice), ignore_eos=True
                        )
                        for i in range(batch)
                    ]
                    heads = [[10 + i] * 64 for i in range(batch)]
                    names = _names("Qwen2 shape", f"drawn from {choice}", kv, batch)
                    figures.append(_Case(llm, proposer, heads, params, names).measure(rounds)[0])
    return Report(
        parameters={
            "models": "demo/model in float32; Qwen2 shape in bfloat16: " + str(sizes),
            "threads": torch.get_num_threads(),
            "drafts": _DRAFTS,
            "rounds": rounds,
        },
        figures=figures,
        goals=[
            Goal("demo: share of answers that are the same with drafts", min(same), "==", 1.0),
            Goal("speed-up, a question that comes again, one at a time", _speed_up(figures, "again", 1), ">=", 1.3),
            Goal(
                "speed-up, Qwen2 shape, always right, one at a time", _speed_up(figures, "drawn from 1", 1), ">=", 2.0
            ),
            Goal("speed-up, Qwen2 shape, always right, 8 at a time", _speed_up(figures, "drawn from 1", 8), ">=", 1.5),
            Goal(
                "speed-up, stories, 8 at a time: what useless drafts cost", _speed_up(figures, "stories", 8), ">=", 0.95
            ),
        ],
    )


def _again(llm: LLM, count: int, params: Sequence[SamplingParams]) -> list[str]:
    """Conversations whose last question repeats the first."""
    first = llm.generate([prompt(question) for question in _AGAIN[:count]], params, use_tqdm=False)
    return [
        prompt(question, history=[(question, output.outputs[0].text.strip())])
        for question, output in zip(_AGAIN, first, strict=False)
    ]


def _names(model: str, text: str, kv: str, batch: int) -> Row:
    return {"model": model, "text": text, "kv": kv, "requests at a time": batch}


def _speed_up(figures: Sequence[Row], text: str, batch: int) -> float:
    return next(
        float(row["speed-up"])
        for row in figures
        if (row["text"], row["requests at a time"], row["kv"]) == (text, batch, "virtual")
    )


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "With drafts, decoding is {} times as fast",
            record,
            columns(record, "drafted tokens/s", "plain tokens/s"),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    cases = list(dict.fromkeys((row["model"], row["requests at a time"]) for row in record["figures"]))
    for (model, batch), name in zip(cases, ("virtual", "paged", "other", "dynamic"), strict=False):
        rows = [row for row in record["figures"] if (row["model"], row["requests at a time"]) == (model, batch)]
        style = {**theme.style(name), "linestyle": ""}
        tokens, speeds = ([row[column] for row in rows] for column in ("tokens per step", "speed-up"))
        axes.plot(tokens, speeds, **style, label=f"{model}, {batch} at a time")
    theme.reference(axes, "without drafts")
    speeds = [row["speed-up"] for row in record["figures"]]
    axes.set_title(
        f"Drafts make decoding up to {max(speeds):.1f} times as fast; useless ones cost up to "
        f"{100 * (1 - min(speeds)):.0f} %"
    )
    axes.set(xlabel="tokens per step of a request", ylabel="speed, over plain decoding", ylim=(0, None))
