"""SamplingParams: what is refused, and how it says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from vattn.engine import RequestOutputKind, SamplingParams
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
    ({"stop": [5]}, "give a list of texts"),
    ({"stop": b"end"}, "stop is b'end'; give a list"),
    ({"stop": ["\ud800"]}, "stop has the lone surrogate '.ud800' at position 0"),
    ({"bad_words": ["ab\udfff"]}, "bad_words has the lone surrogate '.udfff' at position 2"),
    ({"detokenize": None}, "detokenize is None; give True or False"),
    ({"extra_args": [("a", 1)]}, r"extra_args is \[\('a', 1\)\]; give a mapping"),
    ({"detokenize": False, "stop": "end"}, "there is none to look at"),
    ({"n": 16385}, "n is 16385; it can be at most 16384"),
    ({"n": 10**100}, r"n is 1000.*\.\.\.; it can be at most"),
    ({"n": 10**5000}, "n is an integer of 16610 bits; it can be at most 16384"),
    ({"n": np.True_}, "n is np.True_"),
    ({"n": np.float64(2)}, "n is np.float64"),
    ({"max_tokens": 2**63}, "max_tokens is 9223372036854775808; it can be at most"),
    ({"max_tokens": False}, "max_tokens is False"),
    ({"min_tokens": torch.tensor([1, 2])}, "min_tokens is tensor"),
    ({"top_k": 10**30}, "top_k is 1000"),
    ({"temperature": 10**400}, "temperature is 1000"),
    ({"temperature": 1e300}, "temperature is 1e.300"),
    ({"temperature": True}, "temperature is True"),
    ({"repetition_penalty": 1e300}, "repetition_penalty is 1e.300"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300"),
    ({"logit_bias": {5: 1e300}}, r"logit_bias\[5\] is 1e.300; give a finite number of 32 bits"),
    ({"logit_bias": {True: 1.0}}, "logit_bias holds True"),
    ({"stop_token_ids": [10**5000]}, "stop_token_ids holds an integer of 16610 bits"),
    ({"stop_token_ids": [False]}, "stop_token_ids holds False"),
    ({"stop_token_ids": np.array(5)}, "stop_token_ids is array"),
    ({"allowed_token_ids": np.array([1.5])}, "allowed_token_ids holds"),
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
    ({"logprobs": False}, "logprobs is False"),
    ({"prompt_logprobs": 1.0}, "prompt_logprobs is 1.0"),
    ({"logits_processors": 5}, "logits_processors is 5; give a list"),
    ({"logits_processors": [max]}, "logits_processors holds .*; give objects of subclasses of transformers"),
    ({"structured_outputs": "a+"}, "structured_outputs is 'a.'; give StructuredOutputs, or a mapping"),
    ({"output_kind": "delta"}, "output_kind is 'delta'; give one of RequestOutputKind.CUMULATIVE"),
]


@pytest.mark.parametrize(("keywords", "message"), BAD)
def test_bad_parameters(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        SamplingParams(**keywords)
    assert raised.value.param in keywords


def test_every_parameter_has_a_bad_value_above() -> None:
    tested = {name for keywords, _ in BAD for name in keywords}
    assert tested == {field.name for field in dataclasses.fields(SamplingParams)}


def test_defaults_of_vllm_are_accepted() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, detokenize=True, logprobs=True)
    assert (params.stop, params.stop_token_ids, params.bad_words, params.logprobs) == ((), (), (), 1)


def test_numbers_of_numpy_and_torch_become_pythons() -> None:
    params = SamplingParams(
        n=np.int32(2),
        temperature=np.float32(0.5),
        seed=np.int64(1),
        max_tokens=torch.tensor(5),
        stop_token_ids=np.array([5, 6]),
        logit_bias={np.int64(3): np.float64(1.5)},
    )
    found = (params.n, params.temperature, params.seed, params.max_tokens, params.stop_token_ids, params.logit_bias)
    assert found == (2, 0.5, 1, 5, (5, 6), {3: 1.5})
    assert [type(value) for value in found[:4]] == [int, float, int, int]
    assert {type(token) for token in (*params.stop_token_ids, *params.logit_bias)} == {int}


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


@pytest.mark.parametrize("none", [-1, np.int64(-1), None])
def test_no_seed(none: Any) -> None:
    assert SamplingParams(seed=none).seed is None
    assert SamplingParams.from_optional(seed=none) == SamplingParams()
    assert SamplingParams(seed=7).clone(seed=none).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_a_clone_differs_where_asked_to() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={5: 1.0}, structured_outputs={"regex": "a"})
    assert params.clone() == params
    other = params.clone(temperature=0.25, max_tokens=3)
    assert (other.temperature, other.max_tokens, other.stop) == (0.25, 3, ("a",))
    assert params.temperature == 0.5
    with pytest.raises(ConfigError, match="temperature is -1"):
        params.clone(temperature=-1)
    with pytest.raises(ConfigError, match="SamplingParams has no best_of"):
        params.clone(best_of=2)


def test_optional_parameters() -> None:
    everything = {field.name: None for field in dataclasses.fields(SamplingParams) if field.name != "max_tokens"}
    assert SamplingParams.from_optional(**everything) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None) == SamplingParams(max_tokens=None)
    given = {"temperature": 0.5, "top_k": 5, "stop": ["end"], "max_tokens": 7}
    assert SamplingParams.from_optional(**given, seed=None) == SamplingParams(**given)
    bias = SamplingParams.from_optional(logit_bias={"5": 200, 7: -500.0, "9": 1}).logit_bias
    assert bias == {5: 100.0, 7: -100.0, 9: 1.0}
    for options, message in (
        ({"temprature": 1}, "SamplingParams has no temprature"),
        ({"logit_bias": {"five": 1}}, "logit_bias is {'five': 1}; give a mapping from token id"),
        ({"logit_bias": {"5": float("nan")}}, r"logit_bias\[5\] is nan; give a finite number"),
        ({"logit_bias": {"5": "1"}}, r"logit_bias\[5\] is '1'; give a finite number"),
        ({"logit_bias": {1.7: 2}}, r"logit_bias is \{1.7: 2\}; give a mapping from token id"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; give a mapping"),
        ({"n": 0}, "n is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            SamplingParams.from_optional(**options)  # type: ignore[arg-type]


def test_extra_arguments_are_kept() -> None:
    mine = {"trace": "abc"}
    params = SamplingParams(extra_args=mine)
    mine["trace"] = "changed"
    assert params.extra_args == params.clone(n=2).extra_args == {"trace": "abc"}
