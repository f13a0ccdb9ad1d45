"""SamplingParams: what is refused, and how it says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine import RequestOutputKind, SamplingParams
from vattn.errors import ConfigError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n is 0; give a whole number, at least 1"),
    ({"n": True}, "n is True"),
    ({"n": 2, "temperature": 0}, "n is 2 with temperature 0"),
    ({"temperature": -1.0}, r"temperature is -1.0; give 0 \(greedy\) or a positive number"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": float("inf")}, "temperature is inf"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": None}, "temperature is None"),
    ({"top_p": 0}, "top_p is 0; give a number above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_k": -2}, "top_k is -2; give 0 or -1"),
    ({"top_k": 2.5}, "top_k is 2.5"),
    ({"min_p": -0.1}, "min_p is -0.1; give a number from 0 to 1"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1; give a number from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; give a positive number"),
    ({"logit_bias": [1]}, r"logit_bias is \[1\]; give a mapping"),
    ({"logit_bias": {"a": 1}}, "logit_bias holds 'a'"),
    ({"logit_bias": {5: float("inf")}}, r"logit_bias\[5\] is inf; give a finite number"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": 5}, "allowed_token_ids is 5; give a list"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids holds -1"),
    ({"bad_words": "one"}, "bad_words is 'one'; give a list"),
    ({"bad_words": [" "]}, "none of them empty"),
    ({"seed": 2**64}, "64 bits"),
    ({"seed": 1.5}, "64 bits"),
    ({"stop": [""]}, "none of them empty"),
    ({"stop": ""}, "none of them empty"),
    ({"stop": [5]}, "give a text or a list of texts"),
    ({"stop": 5}, "stop is 5; give a list"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a'"),
    ({"stop_token_ids": "12"}, "stop_token_ids is '12'; give a list"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1; give True or False"),
    ({"ignore_eos": "yes"}, "ignore_eos is 'yes'"),
    ({"skip_special_tokens": None}, "skip_special_tokens is None"),
    ({"max_tokens": -1}, "max_tokens is -1; give how many tokens at most, or None"),
    ({"min_tokens": -1}, "min_tokens is -1"),
    ({"min_tokens": 17}, r"min_tokens is 17, which is over max_tokens \(16\)"),
    ({"logprobs": -2}, "logprobs is -2; give how many"),
    ({"logprobs": True}, "logprobs is True"),
    ({"prompt_logprobs": 1.0}, "prompt_logprobs is 1.0"),
    ({"output_kind": "delta"}, "output_kind is 'delta'; give one of RequestOutputKind.CUMULATIVE"),
]


@pytest.mark.parametrize(("keywords", "message"), BAD)
def test_bad_parameters(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**keywords)


def test_every_parameter_has_a_bad_value_above() -> None:
    tested = {name for keywords, _ in BAD for name in keywords}
    assert tested == {field.name for field in dataclasses.fields(SamplingParams)}


def test_extremes_are_accepted() -> None:
    params = SamplingParams(
        top_k=-1,
        top_p=1,
        seed=-(2**63),
        stop="end",
        logit_bias={5: -100},
        max_tokens=None,
        min_tokens=500,
        logprobs=-1,
        prompt_logprobs=0,
        output_kind=RequestOutputKind.DELTA,
    )
    assert (params.stop, params.logit_bias, params.max_tokens) == (("end",), {5: -100}, None)
