"""`SamplingParams`: how a request samples and when it stops; names and meanings as in vLLM."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from vattn.errors import ConfigError
from vattn.integers import as_int, shown

from ..checks import LARGEST, check_encodable, checked_whole, number, whole, wrong
from .structured import StructuredOutputs

if TYPE_CHECKING:
    from transformers import LogitsProcessor

# Most completions of a prompt, as in vLLM: each is a request of its own.
MAX_COMPLETIONS = 16384
# Parameters become float32 tensors.
_LARGEST_FLOAT = 3.4028234663852886e38


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

    Tokens are chosen in vLLM's order: `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias`, penalties,
    `logits_processors`, `structured_outputs`; then, unless greedy, `temperature`, `min_p`, `top_k`, `top_p`.

    Numbers may be NumPy's, and are stored as Python's own. None means no texts, or no token ids.

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
        seed: of the request's own random numbers; None or -1 to draw one from the engine's seed.
        stop: text or texts that end the output; cut off unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output; in its token ids, and in its text if `include_stop_str_in_output`.
        ignore_eos: go on after the model's end-of-sequence token.
        max_tokens: maximum number of output tokens; None for as many as the context holds, 0 to compute only the
            prompt, for its `prompt_logprobs`.
        min_tokens: no stop of any kind before this many: tokens that would end the output, and those that
            `ignore_eos` lets pass, are not sampled, and a stop string that is complete by then never counts.
        logprobs: report each output token's log probability and that many of the most probable; -1 for all of them,
            True for 1. They are the model's own, before any of the above; with `structured_outputs`, among the tokens
            that keep to the form, so a token that has to follow has 0, and one that cannot has -inf.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: turn output tokens into text.
        skip_special_tokens: leave special tokens out of the text.
        logits_processors: objects of transformers' `LogitsProcessor` classes, called in order for each token with
            prompt and output `[1, tokens]` and float32 logits `[1, vocab_size]`. All completions share them. What one
            raises fails its request alone.
        structured_outputs: a JSON schema, regular expression, list of choices or grammar that the output has to follow;
            see `StructuredOutputs`, or a mapping with its fields. The output ends where nothing can follow, even before
            `min_tokens`; until then it ends as any other, by an end-of-sequence or stop token where the form is
            complete.
        output_kind: what unfinished outputs hold; None for DELTA in an `AsyncEngine`, CUMULATIVE in `LLM.add_request`.
        extra_args: the caller's own; the engine does not read them.

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
    bad_words: Sequence[str] | None = ()
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logits_processors: Sequence[LogitsProcessor] | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    output_kind: RequestOutputKind | None = None
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._whole("n", 1, MAX_COMPLETIONS)
        self._number("temperature", 0, _LARGEST_FLOAT, "0 (greedy) or a positive number, of 32 bits")
        self._number("top_p", 0, 1, "a number above 0 and at most 1", above=True)
        self._whole("top_k", -1, what="0 or -1 (all tokens), or how many to keep")
        self._number("min_p", 0, 1, "a number from 0 to 1")
        self._number("presence_penalty", -2, 2, "a number from -2 to 2")
        self._number("frequency_penalty", -2, 2, "a number from -2 to 2")
        self._number("repetition_penalty", 1e-30, 1e30, "a positive number, from 1e-30 to 1e30")
        if self.seed is not None:
            seed = whole(self.seed)
            if seed is None or not -(2**63) <= seed < 2**64:
                raise wrong("seed", f"is {shown(self.seed)}; give an integer of 64 bits, or None")
            self._set("seed", None if seed == -1 else seed)
        if self.max_tokens is not None:
            self._whole("max_tokens", 0, what="how many tokens at most, or None for what the context holds")
        self._whole("min_tokens", 0)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is True:
                self._set(name, 1)
            elif count is not None:
                self._whole(name, -1, what="how many of the most probable tokens to report, -1 for all, or None")
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise wrong(name, f"is {shown(getattr(self, name))}; give True or False")
        if self.output_kind is not None and not isinstance(self.output_kind, RequestOutputKind):
            kinds = ", ".join(str(kind) for kind in RequestOutputKind)
            raise wrong("output_kind", f"is {shown(self.output_kind)}; give one of {kinds}, or None")
        if self.extra_args is not None:
            if not isinstance(self.extra_args, Mapping):
                raise wrong("extra_args", f"is {shown(self.extra_args)}; give a mapping")
            self._set("extra_args", dict(self.extra_args))
        if self.logits_processors is not None:
            self._set("logits_processors", _processors(self.logits_processors))
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        self._freeze_collections()

        if self.stop and not self.detokenize:
            raise wrong("stop", "is text, but with detokenize=False there is none to look at; set detokenize=True")
        if self.n > 1 and self.temperature == 0:
            raise wrong(
                "n", f"is {self.n} with temperature 0: greedy completions are all the same; set n=1 or a temperature"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong("min_tokens", f"is {self.min_tokens}, which is over max_tokens ({self.max_tokens})")

    @classmethod
    def from_optional(cls, **options: Any) -> SamplingParams:
        """Parameters of which each may be None for its default, as a request's optional fields are.

        `max_tokens=None` still means as many as the context holds. Keys of `logit_bias` may be token ids as text, and
        its values are clamped to -100 to 100, as in vLLM.

        Raises:
            ConfigError: as for `SamplingParams`, or an unknown name.
        """
        cls._check_names(options)
        given = {name: value for name, value in options.items() if value is not None or name == "max_tokens"}
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):
            try:
                given["logit_bias"] = {
                    int(token) if isinstance(token, str) else as_int(token): _clamped(value)
                    for token, value in bias.items()
                }
            except (TypeError, ValueError):
                raise wrong("logit_bias", f"is {shown(bias)}; give a mapping from token id to a number") from None
        return cls(**given)

    @classmethod
    def _check_names(cls, names: Iterable[str]) -> None:
        if unknown := set(names) - {field.name for field in fields(cls)}:
            raise ConfigError(f"SamplingParams has no {', '.join(sorted(unknown))}")

    def clone(self, **changes: Any) -> SamplingParams:
        """These parameters with some changed; they are immutable, so there is no other reason for a copy.

        Raises:
            ConfigError: as for `SamplingParams`.
        """
        self._check_names(changes)
        return replace(self, **changes)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def _freeze_collections(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _texts("stop", self.stop)
        if not all(stop):
            raise wrong("stop", f"is {shown(self.stop)}; give a text or a list of texts, none of them empty")
        self._set("stop", stop)
        bad_words = _texts("bad_words", self.bad_words)
        if not all(text.strip() for text in bad_words):
            raise wrong("bad_words", f"is {shown(self.bad_words)}; give a list of texts, none of them empty")
        self._set("bad_words", bad_words)
        for name, texts in (("stop", stop), ("bad_words", bad_words)):
            for text in texts:
                check_encodable(name, text, ConfigError, name)
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise wrong("allowed_token_ids", "is empty, so no token could be sampled; give some, or None")
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise wrong("logit_bias", f"is {shown(self.logit_bias)}; give a mapping from token id to a number")
            biases = {}
            for token, bias in zip(_token_ids("logit_bias", self.logit_bias), self.logit_bias.values(), strict=True):
                if (found := number(bias)) is None or abs(found) > _LARGEST_FLOAT:
                    message = f"logit_bias[{token}] is {shown(bias)}; give a finite number of 32 bits"
                    raise ConfigError(message, param="logit_bias")
                biases[token] = found
            self._set("logit_bias", biases or None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _whole(self, name: str, low: int, high: int = LARGEST, *, what: str | None = None) -> None:
        self._set(name, checked_whole(name, getattr(self, name), low, high, what=what))

    def _number(self, name: str, low: float, high: float, what: str, *, above: bool = False) -> None:
        """The field is a number in `[low, high]`, or in `(low, high]` with `above`."""
        found = number(value := getattr(self, name))
        if found is None or not low <= found <= high or (above and found == low):
            raise wrong(name, f"is {shown(value)}; give {what}")
        self._set(name, found)


def _clamped(bias: object) -> object:
    found = number(bias)
    return bias if found is None else min(100.0, max(-100.0, found))


def _items(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes | bytearray) or not hasattr(values, "__iter__"):
        raise wrong(name, f"is {shown(values)}; give a list")
    try:
        return tuple(values)
    except TypeError:  # an array without dimensions says that it can be iterated over
        raise wrong(name, f"is {shown(values)}; give a list") from None


def _processors(values: object) -> tuple[LogitsProcessor, ...]:
    # Here, so that `vattn --help` does not load transformers.
    from transformers import LogitsProcessor

    processors = _items("logits_processors", values)
    for processor in processors:
        if not isinstance(processor, LogitsProcessor):
            raise wrong(
                "logits_processors",
                f"holds {shown(processor)}; give objects of subclasses of transformers.LogitsProcessor",
            )
    return processors


def _texts(name: str, values: object) -> tuple[str, ...]:
    texts = _items(name, values)
    if not all(isinstance(text, str) for text in texts):
        raise wrong(name, f"is {shown(values)}; give a list of texts, none of them empty")
    return texts


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    tokens = []
    for value in _items(name, values):
        token = whole(value)
        if token is None or not 0 <= token <= LARGEST:
            raise wrong(name, f"holds {shown(value)}; token ids are whole numbers, at least 0")
        tokens.append(token)
    return tuple(tokens)
