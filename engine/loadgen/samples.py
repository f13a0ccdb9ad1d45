"""What a benchmark asks for: prompts with the lengths of their answers, synthetic or from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vattn.errors import ConfigError

from ..checks import checked_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Rounds of writing token ids as text and reading them back, until their number is right.
_ROUNDS = 10
# Of requests, and of tokens of one: more than any benchmark sends.
MOST = 2**24


@dataclass(frozen=True)
class Sample:
    """One request: a prompt, its tokens, and the most tokens of its answer."""

    prompt: str
    prompt_len: int
    output_len: int


def random_samples(
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[Sample]:
    """Prompts of random tokens.

    Args:
        input_len: tokens of a prompt behind the prefix, those that the tokenizer adds included.
        output_len: tokens of an answer.
        range_ratio: both vary, uniformly, by this share of themselves up and down; from 0 to below 1.
        prefix_len: tokens that all prompts begin with.

    Raises:
        ConfigError: a number that is not possible.
    """
    checked_whole("num_prompts", count, 1, MOST)
    checked_whole("random_input_len", input_len, 1, MOST)
    checked_whole("random_output_len", output_len, 1, MOST)
    checked_whole("random_prefix_len", prefix_len, 0, MOST)
    checked_whole("seed", seed, 0)
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"random_range_ratio is {range_ratio}; give a share from 0 to below 1")
    rng = np.random.default_rng(seed)
    special = tokenizer.num_special_tokens_to_add()
    special_ids = set(tokenizer.all_special_ids)
    vocabulary = np.array([token for token in range(tokenizer.vocab_size) if token not in special_ids])
    own_len = max(0, input_len - special)
    input_lens = rng.integers(
        math.floor(own_len * (1 - range_ratio)), math.ceil(own_len * (1 + range_ratio)) + 1, count
    )
    output_lens = rng.integers(
        max(1, math.floor(output_len * (1 - range_ratio))), math.ceil(output_len * (1 + range_ratio)) + 1, count
    )
    prefix = rng.choice(vocabulary, prefix_len).tolist()
    samples = []
    for own, out in zip(input_lens.tolist(), output_lens.tolist(), strict=True):
        text, tokens = _written(tokenizer, prefix, max(own, 1 - prefix_len), vocabulary, rng)
        samples.append(Sample(text, tokens + special, out))
    return samples


def _written(
    tokenizer: PreTrainedTokenizerBase,
    prefix: Sequence[int],
    length: int,
    vocabulary: np.ndarray[Any, Any],
    rng: np.random.Generator,
) -> tuple[str, int]:
    """A text that begins with `prefix`, of `length` random tokens more; and its number of tokens.

    Text of tokens need not be read as the same tokens, so it is cut or continued until their number is right, or
    nearly.
    """
    wanted = len(prefix) + length
    ids = [*prefix, *rng.choice(vocabulary, length).tolist()]
    for _ in range(_ROUNDS):
        text = str(tokenizer.decode(ids))
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) == wanted:
            break
        ids = [*ids[:wanted], *rng.choice(vocabulary, max(0, wanted - len(ids))).tolist()]
    else:
        text = str(tokenizer.decode(ids))
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return text, len(ids)


def read_samples(
    path: Path, tokenizer: PreTrainedTokenizerBase, count: int, *, output_len: int | None = None, seed: int = 0
) -> list[Sample]:
    """Prompts from a file: JSON lines or a JSON array, of records of either kind.

    `{"prompt": text, "output_tokens": n}`, or, as in ShareGPT, `{"conversations": [{"value": prompt}, {"value":
    answer}, ...]}`, whose answer's length counts. Records come in random order, and again if there are too few.

    Args:
        output_len: tokens of every answer, instead of what the file says.

    Raises:
        ConfigError: the file has no such record, or one without the length of its answer.
        OSError: it cannot be read.
    """
    checked_whole("num_prompts", count, 1, MOST)
    checked_whole("seed", seed, 0)
    found = []
    for number, record in _records(path):
        which = f"record {number} of {path}"
        prompt, answer, length = _texts_of(record)
        if prompt is None:
            raise ConfigError(f"{which} has neither a prompt nor conversations of two or more turns")
        try:
            prompt_len = len(tokenizer(prompt)["input_ids"])
            if answer is not None:
                length = len(tokenizer(answer, add_special_tokens=False)["input_ids"])
        except TypeError as error:  # of halves of surrogate pairs, which JSON can have
            raise ConfigError(f"{which} has characters that are no text; write it anew as UTF-8") from error
        length = length if output_len is None else output_len
        if length is None:
            raise ConfigError(f"{which} has no output_tokens; add them, or give --output-len")
        found.append(Sample(prompt, prompt_len, checked_whole(f"output_tokens of {which}", length, 1, MOST)))
    if not found:
        raise ConfigError(f"{path} has no records; give JSON lines with a prompt and output_tokens each")
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[order[index % len(found)]] for index in range(count)]


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """The records of a file, numbered from 1."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            yield from enumerate(json.loads(text), 1)
            return
    except (ValueError, RecursionError) as error:  # also of bytes that are no UTF-8
        raise ConfigError(f"{path} is no JSON: {error}") from error
    # Not by `splitlines`, which also splits at characters that JSON may have in its strings.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"line {number} of {path} is no JSON: {error}") from error
            yield number, record


def _texts_of(record: Any) -> tuple[str | None, str | None, Any]:
    """The prompt of a record, its answer, and what it says is the answer's number of tokens; None for what it lacks."""
    if isinstance(record, dict):
        if isinstance(record.get("prompt"), str):
            return record["prompt"], None, record.get("output_tokens")
        turns: Any = record.get("conversations")
        with suppress(TypeError, KeyError, IndexError):
            prompt, answer = turns[0]["value"], turns[1]["value"]
            if isinstance(prompt, str) and isinstance(answer, str):
                return prompt, answer, None
    return None, None, None
