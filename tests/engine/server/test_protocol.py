"""Bodies: a body of many wrong values is not answered with as many errors."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from vattn.engine.requests.sampling import RequestOutputKind, SamplingParams
from vattn.engine.server.errors import ApiError
from vattn.engine.server.params import sampling_params, structured_outputs
from vattn.engine.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MANY = 10_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": [[1.5]] * MANY}),
        (CompletionRequest, {"prompt": [[1.5] * MANY]}),
        (CompletionRequest, {"prompt": "w", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "w", "bad_words": [""] * MANY}),
        (CompletionRequest, {"prompt": "w", "stop_token_ids": ["a"] * MANY}),
        (CompletionRequest, {"prompt": "w", "allowed_token_ids": ["a"] * MANY}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatRequest, {"messages": [], "modalities": [1] * MANY}),
        (TokenizeRequest, {"messages": [{}] * MANY}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
    ],
)
def test_many_wrong_values_are_few_errors(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 6


def test_many_wrong_biases_are_one_error() -> None:
    body = CompletionRequest(prompt="w", logit_bias={str(token): "a" for token in range(MANY)})
    with pytest.raises(ApiError, match="logit_bias has a value") as caught:
        sampling_params(body, {}, max_tokens=1, logprobs=None, echo=False)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            {"json": {"type": "object"}},
        ),
        ({"response_format": {"type": "regex", "regex": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "choice", "choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, {"grammar": "root ::= 'a'"}),
    ],
)
def test_the_form_of_the_output(fields: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    assert structured_outputs(CompletionRequest.model_validate({"prompt": "w", **fields})) == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"response_format": {"type": "regex"}},
        {"response_format": {"type": "choice", "choice": []}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    ],
)
def test_a_form_that_is_not_whole(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        structured_outputs(CompletionRequest.model_validate({"prompt": "w", **fields}))


def test_fields_that_are_missing_are_those_of_the_generation_config() -> None:
    defaults = {"temperature": 0.25, "top_k": 7, "max_tokens": 50}

    def sampled(max_tokens: int | None, **fields: Any) -> SamplingParams:
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "w"}], **fields})
        return sampling_params(body, defaults, max_tokens=max_tokens, logprobs=None, echo=False)

    kind = RequestOutputKind.FINAL_ONLY
    assert sampled(None) == SamplingParams(temperature=0.25, top_k=7, max_tokens=50, output_kind=kind)
    assert sampled(20, top_k=3) == SamplingParams(temperature=0.25, top_k=3, max_tokens=20, output_kind=kind)
    assert sampled(60, temperature=0).max_tokens == 50, "a limit for all"
    assert sampled(60, temperature=0).temperature == 0
