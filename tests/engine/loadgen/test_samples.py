"""The requests of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.paths import ROOT
from tests.support.tiny_models import make_tokenizer
from vattn.engine.loadgen.samples import random_samples, read_samples
from vattn.errors import ConfigError


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    """Every token is a word, so text is read as the tokens that were written."""
    return make_tokenizer()


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ROOT / "demo" / "model")


def test_lengths_are_exact(words: PreTrainedTokenizerBase) -> None:
    for sample in random_samples(words, 20, input_len=13, output_len=5):
        assert len(words(sample.prompt)["input_ids"]) == sample.prompt_len == 13
        assert sample.output_len == 5


def test_bytes_that_merge_anew_are_nearly_as_many(bpe: PreTrainedTokenizerBase) -> None:
    samples = random_samples(bpe, 20, input_len=60, output_len=5)
    assert all(len(bpe(sample.prompt)["input_ids"]) == sample.prompt_len for sample in samples)
    assert np.mean([sample.prompt_len for sample in samples]) == pytest.approx(60, rel=0.05)


def test_lengths_vary_by_the_ratio(words: PreTrainedTokenizerBase) -> None:
    samples = random_samples(words, 500, input_len=20, output_len=10, range_ratio=0.5, prefix_len=4)
    assert {sample.prompt_len for sample in samples} == set(range(14, 35))
    assert {sample.output_len for sample in samples} == set(range(5, 16))


def test_prompts_share_the_prefix_and_nothing_else(words: PreTrainedTokenizerBase) -> None:
    texts = [sample.prompt.split() for sample in random_samples(words, 8, input_len=9, output_len=1, prefix_len=6)]
    assert len({tuple(text[:6]) for text in texts}) == 1
    assert len({tuple(text[6:]) for text in texts}) == 8


def test_the_seed_decides(words: PreTrainedTokenizerBase) -> None:
    once, again, other = (random_samples(words, 3, input_len=9, output_len=2, seed=seed) for seed in (5, 5, 6))
    assert once == again != other


@pytest.mark.parametrize(
    "wrong", [{"input_len": 0}, {"output_len": 0}, {"range_ratio": 1.0}, {"range_ratio": -0.1}, {"prefix_len": -1}]
)
def test_what_is_no_length(words: PreTrainedTokenizerBase, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"random_{next(iter(wrong))} is"):
        random_samples(words, 2, **{"input_len": 5, "output_len": 5, **wrong})


def test_a_file_of_prompts(words: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w5 w6", "output_tokens": 3}\n\n{"prompt": "w7", "output_tokens": 8}\n')
    samples = read_samples(path, words, 4)
    assert {(sample.prompt, sample.prompt_len, sample.output_len) for sample in samples} == {
        ("w5 w6", 2, 3),
        ("w7", 1, 8),
    }
    assert samples[:2] == samples[2:]
    assert {sample.output_len for sample in read_samples(path, words, 2, output_len=6)} == {6}


def test_a_file_of_conversations(words: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "w5 w6 w7"}, {"from": "gpt", "value": "w8 w9"}, {"from": "human", "value": "x"}]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"id": "a", "conversations": turns}]))
    (sample,) = read_samples(path, words, 1)
    assert (sample.prompt, sample.prompt_len, sample.output_len) == ("w5 w6 w7", 3, 2)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_strings_may_have_what_ends_lines_elsewhere(words: PreTrainedTokenizerBase, tmp_path: Path, end: str) -> None:
    records = [{"prompt": f"w{mark}w", "output_tokens": 4} for mark in "\x85\u2028\u2029"]
    path = tmp_path / "file.jsonl"
    path.write_bytes("".join(json.dumps(record, ensure_ascii=False) + end for record in records).encode())
    assert {sample.prompt for sample in read_samples(path, words, 3)} == {record["prompt"] for record in records}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no records"),
        ('{"prompt": "w5", "output_tokens": 1}\n{"prompt": ', "line 2 of"),
        ("[{]", "is no JSON"),
        ('{"text": "w5"}', "record 1 .* neither a prompt nor conversations"),
        ('{"conversations": [{"value": "w5"}]}', "neither a prompt nor conversations"),
        ("3", "neither a prompt nor conversations"),
        ('{"prompt": "w5"}', "has no output_tokens; add them, or give --output-len"),
        ('{"prompt": "w5", "output_tokens": "many"}', "output_tokens of record 1 of .* is 'many'"),
        ('{"prompt": "\\ud800", "output_tokens": 1}', "record 1 .* characters that are no text"),
        ('{"conversations": [{"value": 4}, {"value": "x"}]}', "neither a prompt nor conversations"),
        ("[" * 100_000, "is no JSON"),
        (b"\xff", "is no JSON"),
    ],
)
def test_files_that_are_refused(
    words: PreTrainedTokenizerBase, tmp_path: Path, text: str | bytes, message: str
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=message):
        read_samples(path, words, 1)
