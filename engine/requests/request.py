"""A request: its tokens, its place in the cache, and the only legal ways from one state to the next.

    WAITING --admit--> PREFILLING --append--> DECODING --append--> DECODING
       ^                   |  ^                  |
       |                preempt  admit        preempt          any of them --finish--> DONE
       |                   v  |                  v
                          PREEMPTED <------------+

The request owns its transitions; any other raises `IllegalTransition`.
"""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass

from torch import Tensor

from vattn.errors import VattnError
from vattn.integers import shown
from vattn.prefix import TokenIds

from .bad_words import BadWords
from .detokenizer import Detokenizer
from .grammar import Grammar
from .logprobs import Logprob
from .sampling import SamplingParams


class InvalidRequest(VattnError, ValueError):
    """A request that can never run; it was not accepted, and nothing changed.

    Attributes:
        param: the name of the argument or field, where it is one that is wrong.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """A prompt that leaves no room for an output within `max_model_len`."""


def check_request_id(request_id: object) -> None:
    """Raise an InvalidRequest for a name that is no text."""
    if not isinstance(request_id, str):
        raise InvalidRequest(f"request_id is {shown(request_id)}; give text", param="request_id")


class IllegalTransition(VattnError, RuntimeError):
    """A transition that the request's state does not allow: a bug in the caller."""


class State(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    DONE = "done"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_LEGAL = {
    State.WAITING: {State.PREFILLING, State.DONE},
    State.PREFILLING: {State.DECODING, State.PREEMPTED, State.DONE},
    State.DECODING: {State.DECODING, State.PREEMPTED, State.DONE},
    State.PREEMPTED: {State.PREFILLING, State.DONE},
    State.DONE: set(),
}


@dataclass(frozen=True)
class SavedKV:
    """A copy of a preempted request's cache for tokens `[0, length)`.

    Attributes:
        layers: the backend's `copy_out` of each layer: of all tokens, or of those in the layer's window.
    """

    length: int
    layers: list[tuple[Tensor, ...]]
    num_bytes: int


@dataclass(frozen=True)
class Rest:
    """A copy of the cache for the tokens of a prompt that fill no block, for another engine.

    Attributes:
        rows: each tensor of each layer.
    """

    tokens: list[int]
    rows: list[Tensor]


class Request:
    """One prompt on its way to one completion.

    Invariants: a slot is held exactly while PREFILLING or DECODING; `0 <= num_computed_tokens < num_tokens` until
    DONE, since the newest token has never been through the model.

    Attributes:
        prompt_token_ids: not changed, since all completions of a prompt have the same list.
        parent_id, index: the id of the prompt's group, and which of `n` completions this is.
        seed: seed of its random numbers.
        stop_token_ids: tokens that end it; any but the end-of-sequence token is a `stop_reason`.
        held_token_ids: tokens that are not sampled before `min_tokens`.
        detokenizer: turns its output into text; None without a tokenizer.
        grammar: what its output may go on with; None for anything.
        bad_words: what the output must not have; None for nothing.
        logprobs: of its output tokens, if they were asked for; `cumulative_logprob` is their sum.
        prompt_logprobs: of the prompt tokens computed so far, if they were asked for.
        num_computed_tokens: tokens whose keys and values are in the cache.
        priority: lower runs earlier, under the scheduler's policy "priority".
        arrival_number: the scheduler's count of requests at its arrival.
        slot: the backend's slot; None while nothing is cached.
        saved: a copy of the cache from before a preemption, until it is back in a slot.
        rest: what the engine that asked for the prompt cannot find in blocks, once it is computed.
        cache_salt: whatever else its keys and values depend on; only requests with the same salt share prefixes.
        takes_drafts: whether it may get drafts; the next tokens of beams depend on the other beams.
        num_cached_tokens: tokens that were in the prefix cache when it was first admitted.
        num_shared_tokens: the fewest tokens that it found in the prefix cache when it was admitted to it: what was
            published of it behind these may be its own. None if it never was.
        publishes: whether later requests may find its prefix; its slot was then admitted by the prefix cache.
        scored: whether its next tokens are scored; it waits, perhaps without a slot, for the other beams of its search.
        error: the error behind the `finish_reason` ERROR.
        arrival_time, first_scheduled_time, first_token_time, last_token_time, finished_time: when, in seconds of
            `time.monotonic()`.
        num_preemptions: how often it was preempted.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        max_total_tokens: int,
        seed: int,
        stop_token_ids: frozenset[int] = frozenset(),
        held_token_ids: frozenset[int] = frozenset(),
        eos_token_id: int | None = None,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: bytes = b"",
        detokenizer: Detokenizer | None = None,
        grammar: Grammar | None = None,
        bad_words: BadWords | None = None,
        parent_id: str | None = None,
        index: int = 0,
        takes_drafts: bool = True,
    ) -> None:
        assert 0 < len(prompt_token_ids) <= max_total_tokens, "the engine admits no other prompt"
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids: list[int] = []
        self._prompt_ids: TokenIds | None = None
        self.sampling = sampling
        self.max_total_tokens = max_total_tokens
        self.seed = seed
        self.detokenizer = detokenizer
        self.grammar = grammar
        self.bad_words = bad_words
        self.parent_id = request_id if parent_id is None else parent_id
        self.index = index
        self.takes_drafts = takes_drafts
        self.stop_token_ids = stop_token_ids
        self.held_token_ids = held_token_ids
        self._eos_token_id = None if sampling.ignore_eos else eos_token_id
        self.logprobs: list[dict[int, Logprob]] | None = None if sampling.logprobs is None else []
        self.cumulative_logprob = 0.0
        # All completions of a prompt have the same; the first one computes them.
        scored = sampling.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if scored else None

        self.state = State.WAITING
        self.priority = priority
        self.arrival_number = 0
        self.slot: int | None = None
        self.saved: SavedKV | None = None
        self.rest: Rest | None = None
        self.cache_salt = cache_salt
        self.num_cached_tokens = 0
        self.num_shared_tokens: int | None = None
        self.publishes = False
        self.scored = False
        self.num_computed_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: BaseException | None = None

        self.arrival_time = time.monotonic()
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finished_time: float | None = None
        self.num_preemptions = 0

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, slot={self.slot}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def runs(self) -> bool:
        """Whether it has a slot and computes in it."""
        return self.slot is not None and self.state in (State.PREFILLING, State.DECODING)

    @property
    def queued(self) -> bool:
        """Whether it waits for a slot."""
        return self.slot is None and self.state in (State.WAITING, State.PREEMPTED)

    @property
    def may_stop(self) -> bool:
        """Whether the next token may end the output other than by reaching the length limit."""
        return len(self.output_token_ids) >= self.sampling.min_tokens

    @property
    def text(self) -> str:
        """The output as text, as far as it is certain; empty without a detokenizer."""
        return "" if self.detokenizer is None else self.detokenizer.text()

    def unscored(self, start: int, end: int) -> range:
        """Positions in `[start, end)` whose logits are asked for: they tell the next prompt token's probability."""
        if self.prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(end, len(self.prompt_token_ids) - 1))

    def first_ids(self, end: int) -> TokenIds:
        """Tokens `[0, end)` of prompt and output, as caches keep them."""
        if self._prompt_ids is None:
            self._prompt_ids = array("q", self.prompt_token_ids)
        ids = self._prompt_ids[:end]
        ids.extend(self.output_token_ids[: end - len(ids)])
        return ids

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens `[start, end)` of prompt and output."""
        split = len(self.prompt_token_ids)
        if end <= split:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:split] + self.output_token_ids[max(0, start - split) : end - split]

    def admit(self, slot: int, cached_tokens: int = 0) -> None:
        """WAITING or PREEMPTED -> PREFILLING: the request runs in `slot`.

        Args:
            cached_tokens: tokens that are there already, all of them in a fork of another request's slot; where a copy
                was `saved`, that is what counts as computed.
        """
        self._go(State.PREFILLING)
        self.slot = slot
        if self.saved is None:
            self.num_computed_tokens = cached_tokens
        if self.first_scheduled_time is None:
            self.num_cached_tokens = cached_tokens
            self.first_scheduled_time = time.monotonic()

    def advance(self, end: int) -> None:
        """Tokens `[0, end)` are in the cache now."""
        if self.state not in (State.PREFILLING, State.DECODING):
            raise IllegalTransition(f"{self!r} has no slot to compute tokens in")
        assert self.num_computed_tokens < end <= self.num_tokens
        self.num_computed_tokens = end

    def append(self, token_id: int) -> None:
        """PREFILLING or DECODING -> DECODING with one more output token, or DONE where that token ends it."""
        if self.num_uncomputed_tokens:
            raise IllegalTransition(f"{self!r} cannot take a token before all of its tokens are computed")
        self._go(State.DECODING)
        may_stop = self.may_stop
        self.output_token_ids.append(token_id)
        self.last_token_time = time.monotonic()
        if self.first_token_time is None:
            self.first_token_time = self.last_token_time
        stopped = False
        if may_stop and token_id in self.stop_token_ids:
            stopped = True
            self.stop_reason = None if token_id == self._eos_token_id else token_id
            if self.detokenizer is not None and self.sampling.include_stop_str_in_output:
                self.detokenizer.push(token_id, may_stop=False)
        elif self.detokenizer is not None:
            self.stop_reason = self.detokenizer.push(token_id, may_stop=may_stop)
            stopped = self.stop_reason is not None
        if self.grammar is not None and not stopped:
            self.grammar.accept(token_id)
            stopped = self.grammar.complete
        if stopped:
            self.finish(FinishReason.STOP)
        elif self.num_tokens >= self.max_total_tokens:
            self.finish(FinishReason.LENGTH)

    def preempt(self) -> None:
        """PREFILLING or DECODING -> PREEMPTED: the slot is gone; what is not `saved` will be computed again."""
        self._go(State.PREEMPTED)
        self.slot = None
        self.num_computed_tokens = 0 if self.saved is None else self.saved.length
        self.num_preemptions += 1

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Any state but DONE -> DONE. The slot stays noted until the scheduler has freed it."""
        self._go(State.DONE)
        self.finish_reason = reason
        self.error = error
        if self.detokenizer is not None:
            self.detokenizer.finish()
        self.finished_time = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """DONE by an error, from a state that a step left behind in its middle; the slot is gone."""
        self.state = State.DONE
        self.finish_reason = FinishReason.ERROR
        self.stop_reason = None
        self.error = error
        self.slot = None
        if self.finished_time is None:
            self.finished_time = time.monotonic()

    def _go(self, state: State) -> None:
        if state not in _LEGAL[self.state]:
            raise IllegalTransition(f"{self!r} cannot become {state.value}")
        self.state = state
