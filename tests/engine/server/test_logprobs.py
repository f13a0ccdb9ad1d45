"""Where the tokens of a completion begin in its text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.small_tokenizers import byte_fallback, byte_level
from vattn.engine import SamplingParams
from vattn.engine.requests.logprobs import Logprob
from vattn.engine.requests.text import TokenText
from vattn.engine.server.logprobs import TextLogprobs


def _reports(ids: list[int]) -> Iterable[tuple[int, Any]]:
    return [(token, {token: Logprob(-1.0, 1, None)}) for token in ids]


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("first", [[], ["<eos>"]], ids=["bare", "special"])
def test_offsets_are_places_in_the_text(make: Any, first: list[str]) -> None:
    """A prompt may have a special token before its text, and a space; special tokens of an output are not shown."""
    tokenizer = make()
    text = TokenText(tokenizer)
    sent, end = "Hello a é b", tokenizer.eos_token_id
    prompt = [*tokenizer.convert_tokens_to_ids(first), *_ids(tokenizer, sent)]
    rest = [*_ids(tokenizer, "a, b"), end, *_ids(tokenizer, "c")]
    detokenizer = text.detokenizer(SamplingParams(), prompt)
    assert detokenizer is not None
    for token in rest:
        detokenizer.push(token)
    whole = sent + detokenizer.text()
    logprobs = TextLogprobs(1, text, skip_special_tokens=True)
    pieces = [logprobs.prompt(_reports(prompt), len(sent)), *(logprobs.piece(_reports([token])) for token in rest)]
    offsets = [offset for piece in pieces for offset in piece["text_offset"]]
    names = [name for piece in pieces for name in piece["tokens"]]
    assert offsets == sorted(offsets)
    assert names.count("<eos>") == 1 + len(first)
    for place, (offset, name) in enumerate(zip(offsets, names, strict=True)):
        if name != "<eos>" and "\N{REPLACEMENT CHARACTER}" not in name:
            assert whole[offset:].startswith(name if place > len(first) else name.lstrip(" "))


def test_shown_special_tokens_have_their_length() -> None:
    tokenizer = byte_level()
    logprobs = TextLogprobs(1, TokenText(tokenizer), skip_special_tokens=False)
    ids = [*_ids(tokenizer, "ab"), tokenizer.eos_token_id, *_ids(tokenizer, "c")]
    assert logprobs.piece(_reports(ids))["text_offset"] == [0, 1, 2, 7]
