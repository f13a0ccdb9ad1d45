"""What a request asks of sampling and of its end: `SamplingParams`, names and meanings as in vLLM."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vattn.errors import ConfigError


class RequestOutputKind(enum.Enum):
    """What an output of an unfinished request holds.

    CUMULATIVE: all tokens so far. DELTA: those since the last output. FINAL_ONLY: no output before the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples, when it stops, and what is reported.

    Tokens are chosen in vLLM's order: `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias`, penalties; then,
    unless greedy, `temperature`, `min_p`, `top_k`, `top_p`.

    Attributes:
        n: completions of the prompt, each with random numbers of its own.
        temperature: 0 for greedy; the logits are divided by it otherwise.
        top_p: keep the most probable tokens up to this share; 1 keeps all.
        top_k: keep this many of the most probable tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this many times as probable as the most probable one.
        presence_penalty: taken off the logit of every token that the output has.
        frequency_penalty: taken off once for each time that the output has it.
        repetition_penalty: divides the logit, where positive, of every token of prompt or output; multiplies it else.
        logit_bias: token id to what is added to its logit.
        allowed_token_ids: only these are sampled.
        bad_words: texts that the output must not have: the last token of each is never sampled where it would complete
            it.
        seed: of the request's own random numbers; None to draw one from the engine's seed.
        stop: text or texts that end the output; cut off unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output; in its token ids, and in its text if `include_stop_str_in_output`.
        ignore_eos: go on after the model's end-of-sequence token.
        max_tokens: most output tokens; None for as many as the context holds, 0 to compute the prompt only, for its
            `prompt_logprobs`.
        min_tokens: no stop of any kind before this many.
        logprobs: report each output token's log probability and that many of the most probable; -1 for all of them.
            They are the model's own, before any of the above.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what unfinished outputs hold; None for what suits the call.

    Raises:
        ConfigError: a value out of its range, or values that contradict each other.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind | None = None

    def __post_init__(self) -> None:
        _whole("n", self.n, 1)
        _number("temperature", self.temperature, 0, math.inf, "0 (greedy) or a positive number")
        _number("top_p", self.top_p, 0, 1, "a number above 0 and at most 1", above=True)
        _whole("top_k", self.top_k, -1, what="0 or -1 (all tokens), or how many to keep")
        _number("min_p", self.min_p, 0, 1, "a number from 0 to 1")
        _number("presence_penalty", self.presence_penalty, -2, 2, "a number from -2 to 2")
        _number("frequency_penalty", self.frequency_penalty, -2, 2, "a number from -2 to 2")
        _number("repetition_penalty", self.repetition_penalty, 0, math.inf, "a positive number", above=True)
        if self.seed is not None and not (_is_whole(self.seed) and -(2**63) <= self.seed < 2**64):
            raise ConfigError(f"seed is {self.seed!r}; give an integer of 64 bits, or None")
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, what="how many tokens at most, or None for what the context holds")
        _whole("min_tokens", self.min_tokens, 0)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _whole(name, count, -1, what="how many of the most probable tokens to report, -1 for all, or None")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give True or False")
        if self.output_kind is not None and not isinstance(self.output_kind, RequestOutputKind):
            kinds = ", ".join(str(kind) for kind in RequestOutputKind)
            raise ConfigError(f"output_kind is {self.output_kind!r}; give one of {kinds}, or None")
        self._freeze_collections()

        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"n is {self.n} with temperature 0: greedy completions are all the same; set n=1 or a temperature"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens is {self.min_tokens}, which is over max_tokens ({self.max_tokens})")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def _freeze_collections(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(f"stop is {self.stop!r}; give a text or a list of texts, none of them empty")
        object.__setattr__(self, "stop", stop)
        bad_words = _items("bad_words", self.bad_words)
        if not all(isinstance(text, str) and text.strip() for text in bad_words):
            raise ConfigError(f"bad_words is {self.bad_words!r}; give a list of texts, none of them empty")
        object.__setattr__(self, "bad_words", bad_words)
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ConfigError("allowed_token_ids is empty, so no token could be sampled; give some, or None")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ConfigError(f"logit_bias is {self.logit_bias!r}; give a mapping from token id to a number")
            biases = dict(zip(_token_ids("logit_bias", self.logit_bias), self.logit_bias.values(), strict=True))
            for token, bias in biases.items():
                _number(f"logit_bias[{token}]", bias, -math.inf, math.inf, "a finite number")
            object.__setattr__(self, "logit_bias", biases or None)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(name: str, value: object, low: int, *, what: str | None = None) -> None:
    if not (isinstance(value, int) and _is_whole(value) and value >= low):
        raise ConfigError(f"{name} is {value!r}; give {what or f'a whole number, at least {low}'}")


def _number(name: str, value: object, low: float, high: float, what: str, *, above: bool = False) -> None:
    """Raise unless `low <= value <= high`, or `low < value` with `above`, and value is finite."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (number and low <= value <= high) or (above and value == low):  # type: ignore[operator]
        raise ConfigError(f"{name} is {value!r}; give {what}")


def _items(name: str, values: object) -> tuple[object, ...]:
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise ConfigError(f"{name} is {values!r}; give a list")
    return tuple(values)


def _token_ids(name: str, values: object) -> tuple[object, ...]:
    tokens = _items(name, values)
    for token in tokens:
        if not (isinstance(token, int) and _is_whole(token) and token >= 0):
            raise ConfigError(f"{name} holds {token!r}; token ids are whole numbers, at least 0")
    return tokens
