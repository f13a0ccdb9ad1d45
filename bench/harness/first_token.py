"""The time to the first token of a prompt, in an engine that has computed another one before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from bench.harness.report import Row
from vattn.engine import LLM, SamplingParams

# Tokens that follow the shared start of a prompt.
TAIL = 32


@contextmanager
def engine(model: PreTrainedModel, length: int, **options: Any) -> Iterator[LLM]:
    """An engine for prompts that share so many tokens. What it has computed is too short to be published or stored."""
    options = {"max_model_len": length + 2 * TAIL, "max_num_seqs": 8, "memory_budget": "2GiB", **options}
    with LLM(model, skip_tokenizer_init=True, **options) as llm:
        first_token(llm, tokens(random.Random(-1), 100, model.config.vocab_size))
        yield llm


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, by the request's own metrics, and how many tokens of the prompt were found."""
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert output.metrics is not None
    assert output.metrics.time_to_first_token is not None
    return output.metrics.time_to_first_token, output.num_cached_tokens or 0


def tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(vocabulary) for _ in range(count)]


def series_name(what: str, length: int) -> str:
    """Of the seconds to the first token after a start of so many tokens, by round."""
    return f"{what}, {length} tokens, s"


def beside_cold(series: Mapping[str, Sequence[float]], what: str, length: int) -> Row:
    """A row's times to the first token, of a prompt that is computed and of one whose start is found."""
    cold, found = series[series_name("cold", length)], series[series_name(what, length)]
    return {
        "cold TTFT ms": 1e3 * median(cold),
        "TTFT ms": 1e3 * median(found),
        "ratio": median(a / b for a, b in zip(found, cold, strict=True)),
    }
