"""Speculative decoding by prompt lookup: a draft is what followed an earlier occurrence of the last tokens.

The draft is computed together with the request's newest token, in one step. Each position is sampled as without a
draft, and a position counts if all drafted tokens before it match what was sampled. So the output does not depend on
drafts, whether greedy or sampled: a request's random numbers depend only on the index of the token. Rejected tokens are
dropped from the cache by lowering the slot's length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

from vattn.errors import ConfigError
from vattn.integers import shown

from ..checks import checked_whole, whole
from ..requests.request import Request

# Each length costs a dictionary with an entry per token.
MOST_LOOKED_UP = 64


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """What `LLM(speculative_config={...})` takes; names as in vLLM.

    Attributes:
        num_speculative_tokens: maximum length of a draft.
        method: "ngram": a draft is what followed the latest earlier occurrence of the last tokens.
        prompt_lookup_max, prompt_lookup_min: how many of the last tokens have to match; longer matches are tried first.
            If `from_options` gets only one, the default of the other gives way to it.

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
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if (length := getattr(self, name)) > MOST_LOOKED_UP:
                raise ConfigError(
                    f"speculative {name} is {length}; every length that may match is looked up for every token: give "
                    f"at most {MOST_LOOKED_UP}"
                )
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigError(
                f"speculative prompt_lookup_max is {self.prompt_lookup_max}; give a whole number, at least "
                f"prompt_lookup_min ({self.prompt_lookup_min})"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """From a mapping, where None is the default; raises a ConfigError for unknown keys."""
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"speculative_config is {shown(options)}; give a mapping, such as {{'method': 'ngram', ...}}"
            )
        known = {field.name for field in fields(cls)}
        if unknown := set(options) - known:
            raise ConfigError(
                f"speculative_config has no {sorted(map(str, unknown))}; it has {', '.join(sorted(known))}"
            )
        given = {name: value for name, value in options.items() if value is not None}
        if "num_speculative_tokens" not in given:
            raise ConfigError("speculative_config needs num_speculative_tokens, the most tokens of a draft")
        least, most = whole(given.get("prompt_lookup_min")), whole(given.get("prompt_lookup_max"))
        if least is not None:
            given.setdefault("prompt_lookup_max", max(least, cls.prompt_lookup_max))
        if most is not None and most > 0:
            given.setdefault("prompt_lookup_min", min(most, cls.prompt_lookup_min))
        return cls(**given)


@dataclass
class SpeculationStats:
    """Statistics of drafts so far.

    Attributes:
        num_drafts: drafts that were computed.
        num_drafted_tokens, num_accepted_tokens: their tokens, and how many of these were accepted.
        num_accepted_per_position: the latter by place in the draft, as far as the longest one so far reached.
    """

    num_drafts: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int) -> None:
        """Count one draft."""
        self.num_drafts += 1
        self.num_drafted_tokens += drafted
        self.num_accepted_tokens += accepted
        places = self.num_accepted_per_position
        places += [0] * (drafted - len(places))
        for place in range(accepted):
            places[place] += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of drafted tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0


class NgramProposer:
    """Drafts for requests, from their own tokens.

    Penalties, `bad_words`, `structured_outputs`, `logits_processors` and `min_tokens` make logits depend on earlier
    tokens, which may be wrong in a draft. Requests with `min_tokens` get no drafts until they have as many, those with
    any of the others none at all.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self._known: WeakKeyDictionary[Request, _Occurrences] = WeakKeyDictionary()

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow the newest one of a decoding request; possibly none."""
        # The last token of the output needs no draft: it is sampled from the position before it.
        most = min(most, self.config.num_speculative_tokens, request.max_total_tokens - request.num_tokens - 1)
        if most < 1 or not request.takes_drafts or not request.may_stop:
            return ()
        if request.sampling.penalized or request.sampling.logits_processors:
            return ()
        if request.bad_words or request.grammar is not None:
            return ()
        known = self._known.get(request)
        if known is None:
            known = self._known[request] = _Occurrences(self.config.prompt_lookup_min, self.config.prompt_lookup_max)
        known.extend(request.token_ids(len(known.tokens), request.num_tokens))
        return known.continuation(most)


class _Occurrences:
    """The tokens of a request, and where each n-gram of `least` to `most` of them last ended.

    One dictionary entry per token and n: constant time per token, however long the context.
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
        """What followed the last occurrence of the longest known n-gram at the end, repeated to `count` tokens."""
        for n, places in self._followed.items():
            place = places.get(tuple(self.tokens[-n:]))
            if place is not None:
                period = len(self.tokens) - place
                return tuple(self.tokens[place + i % period] for i in range(count))
        return ()
