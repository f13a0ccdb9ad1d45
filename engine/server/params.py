"""From a request's body to `SamplingParams`; what is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vattn.errors import ConfigError

from ..requests.request import InvalidRequest
from ..requests.sampling import RequestOutputKind, SamplingParams
from .errors import bad
from .protocol import REFUSED, ChatRequest, CompletionRequest, GenerateRequest, Sampling

# Fields with the name and meaning that they have in SamplingParams.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "prompt_logprobs",
)


def refuse(given: Mapping[str, Any]) -> None:
    """Raise an ApiError, 400, for the first of these fields that is one of `REFUSED` and asks for something."""
    for name, value in given.items():
        # Of thinking, 0 is a budget and -1 is none.
        nothing: tuple[Any, ...] = (None, -1) if name == "thinking_token_budget" else (None, False, "", [])
        if name in REFUSED and value not in nothing:
            raise bad(f"{name} is not supported: {REFUSED[name]}", name)


def check_supported(body: Sampling) -> None:
    """Refuse by name what would have to change the output, but is not supported."""
    given = dict(body.model_extra or {})
    if isinstance(body, CompletionRequest):
        given["suffix"] = body.suffix
    if isinstance(body, ChatRequest):
        if body.tool_choice not in (None, "none", "auto"):
            raise bad(f"tool_choice is not supported: {REFUSED['tools']}", "tool_choice")
        if body.modalities not in (None, ["text"]):
            raise bad(f"modalities is not supported: {REFUSED['audio']}", "modalities")
        if (body.model_extra or {}).get("add_special_tokens"):
            raise bad("add_special_tokens is not supported in a chat: the template writes them", "add_special_tokens")
        if (body.model_extra or {}).get("echo"):
            raise bad("echo is not supported in a chat; use /v1/completions", "echo")
    best_of = body.best_of if isinstance(body, CompletionRequest) else (body.model_extra or {}).get("best_of")
    if best_of not in (None, body.n or 1):
        raise bad("best_of is supported only where it equals n; set n, and choose among the choices", "best_of")
    refuse(given)
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        raise bad("stream_options is for streams; set stream", "stream_options")
    if isinstance(body, GenerateRequest) and body.prompt_logprobs is not None:
        raise bad("prompt_logprobs is not supported by /generate; use /v1/completions", "prompt_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise bad("prompt_logprobs is not supported in a stream; set stream to false", "prompt_logprobs")


def sampling_params(
    body: Sampling, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None, echo: bool
) -> SamplingParams:
    """How a body wants to be sampled.

    Args:
        defaults: for fields that the body does not have; `max_tokens` is a limit for every body.
        max_tokens: None for as many as the context holds.
        logprobs: alternatives that are reported with each output token; None for no report.
        echo: the prompt is part of the text, so it is reported as well.

    Raises:
        ApiError: 400, a field that is not supported.
        ConfigError: a value out of its range.
    """
    check_supported(body)
    options = dict(defaults)
    limit = options.pop("max_tokens", None)
    if limit is not None:
        max_tokens = limit if max_tokens is None else min(max_tokens, limit)
    options |= {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        options["logit_bias"] = _biases(body.logit_bias)
    if echo and logprobs is not None:
        options["prompt_logprobs"] = max(logprobs, options.get("prompt_logprobs", 0))
    options["structured_outputs"] = structured_outputs(body)
    try:
        return SamplingParams(
            **options,
            max_tokens=max_tokens,
            logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        )
    except ConfigError as error:
        raise as_asked(error, body) from error


def as_asked(error: ConfigError | InvalidRequest, body: Sampling) -> Exception:
    """An error of the engine in the words of the body: `structured_outputs` may have come as a `response_format`."""
    if error.param != "structured_outputs" or body.structured_outputs:
        return error
    return bad(str(error).replace("structured_outputs", "response_format", 1), "response_format")


def structured_outputs(body: Sampling) -> Mapping[str, Any] | None:
    """The form that the output must have, in the words of vLLM's `structured_outputs`; None for any."""
    form = body.response_format
    if body.structured_outputs:
        if form is not None and form.type != "text":
            raise bad("response_format and structured_outputs both give the output's form; send one", "response_format")
        return body.structured_outputs
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json": {"type": "object"}}
    value = {"json_schema": form.json_schema, "regex": form.regex, "choice": form.choice}[form.type]
    if form.type == "json_schema":
        if not isinstance(form.json_schema, dict) or not isinstance(form.json_schema.get("schema"), dict):
            raise bad("response_format.json_schema needs a schema: {'name': ..., 'schema': {...}}", "response_format")
        return {"json": form.json_schema["schema"]}
    if not value:
        raise bad(f"response_format of type {form.type!r} needs the field {form.type!r}", "response_format")
    return {form.type: value}


def _biases(logit_bias: Mapping[str, Any]) -> dict[int, Any]:
    if not all(token.isascii() and token.isdigit() for token in logit_bias):
        raise bad("logit_bias has a key that is no token id; keys are whole numbers, written as text", "logit_bias")
    try:
        biases = {int(token): bias for token, bias in logit_bias.items()}
    except ValueError:  # more digits than Python reads
        raise bad("logit_bias has a key that is larger than any token id", "logit_bias") from None
    if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in biases.values()):
        raise bad("logit_bias has a value that is no number from -100 to 100", "logit_bias")
    return biases
