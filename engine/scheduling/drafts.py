"""Speculative decoding by prompt lookup: what followed the last tokens before is what follows them now, perhaps.

A draft of some tokens is computed together with a request's newest token, in one step. Each position is then sampled
as if it were alone, and the next one counts if its token is the drafted one: the output is the one without drafts,
whether greedy or drawn, since a request's random numbers depend on the token's number only. What is not accepted is
taken back by a lower length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

from vattn.engine.checks import checked_whole
from vattn.engine.requests.request import Request
from vattn.errors import ConfigError
from vattn.integers import shown

# A dictionary per length, and an entry per token in each.
MOST_LOOKED_UP = 64


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """What `LLM(speculative_config={...})` takes; names as in vLLM.

    Attributes:
        num_speculative_tokens: most tokens of a draft.
        method: "ngram": a draft is what followed an earlier occurrence, the newest, of the last tokens.
        prompt_lookup_max, prompt_lookup_min: how many last tokens are looked for: first the most, then fewer.

    Raises:
        ConfigError: a value out of its range.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(f"speculative method {self.method!r} is not known; there is 'ngram'")
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            object.__setattr__(self, name, checked_whole(f"speculative {name}", getattr(self, name), 1))
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigError(
                f"speculative prompt_lookup_max is {self.prompt_lookup_max}; give a whole number, at least "
                f"prompt_lookup_min ({self.prompt_lookup_min})"
            )
        if self.prompt_lookup_max > MOST_LOOKED_UP:
            raise ConfigError(
                f"speculative prompt_lookup_max is {self.prompt_lookup_max}; every length up to it is looked up for "
                f"every token: give at most {MOST_LOOKED_UP}"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """From a mapping, whose unknown keys raise a ConfigError."""
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"speculative_config is {shown(options)}; give a mapping, such as {{'method': 'ngram', ...}}"
            )
        known = {field.name for field in fields(cls)}
        if unknown := set(options) - known:
            raise ConfigError(
                f"speculative_config has no {sorted(map(str, unknown))}; it has {', '.join(sorted(known))}"
            )
        if "num_speculative_tokens" not in options:
            raise ConfigError("speculative_config needs num_speculative_tokens, the most tokens of a draft")
        return cls(**options)


@dataclass
class SpeculationStats:
    """What came of drafts so far.

    Attributes:
        num_drafts: steps of a request that had a draft.
        num_drafted_tokens, num_accepted_tokens: tokens of drafts, and those of them that were right.
    """

    num_drafts: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    def observe(self, drafted: int, accepted: int) -> None:
        """One draft, and how much of it was right."""
        self.num_drafts += 1
        self.num_drafted_tokens += drafted
        self.num_accepted_tokens += accepted

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that were right; 0 where there were none."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0

    @property
    def accepted_per_draft(self) -> float:
        """Tokens that a draft saved a step each, in the mean; 0 where there were none."""
        return self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0


class NgramProposer:
    """Drafts for requests, from their own tokens.

    What penalties, `bad_words` and `min_tokens` exclude depends on the tokens before, which a draft does not know to be
    right: such requests decode plainly, the last kind until it has its `min_tokens`.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self._known: WeakKeyDictionary[Request, _Occurrences] = WeakKeyDictionary()

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow the newest one of a decoding request; none is always right."""
        # The last token of all needs no draft: it is sampled from the position before.
        most = min(most, self.config.num_speculative_tokens, request.max_total_tokens - request.num_tokens - 1)
        if most < 1 or not request.takes_drafts or not request.may_stop:
            return ()
        if request.sampling.penalized or request.bad_words_ids:
            return ()
        known = self._known.get(request)
        if known is None:
            known = self._known[request] = _Occurrences(self.config.prompt_lookup_min, self.config.prompt_lookup_max)
        known.extend(request.token_ids(len(known.tokens), request.num_tokens))
        return known.continuation(most)


class _Occurrences:
    """The tokens of a request, and what has followed each run of `least` to `most` of them, the last time.

    A dictionary entry per token and length of run: constant time per token, however long the context is.
    """

    def __init__(self, least: int, most: int) -> None:
        self.tokens: list[int] = []
        self._followed: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(most, least - 1, -1)}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for n, places in self._followed.items():
                if n <= end:
                    places[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def continuation(self, count: int) -> tuple[int, ...]:
        """What followed the longest known run that the tokens end with; a text that repeats itself goes on doing so."""
        for n, places in self._followed.items():
            place = places.get(tuple(self.tokens[-n:]))
            if place is not None:
                period = len(self.tokens) - place
                return tuple(self.tokens[place + i % period] for i in range(count))
        return ()
