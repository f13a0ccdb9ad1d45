"""Log probabilities in OpenAI's two shapes, and vLLM's for prompts.

Long lists are iterators, whose members are made as they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ..requests.logprobs import DecodeToken, Logprob

Report = Mapping[int, Logprob]

# JSON has no infinity; vLLM writes this for an impossible token.
_LEAST = -9999.0


class TextLogprobs:
    """Collects the `logprobs` of one choice of a completion, whose pieces know how far the text has come.

    Args:
        count: alternatives to report.
        decode: a token alone as text.
    """

    def __init__(self, count: int, decode: DecodeToken) -> None:
        self._count = count
        self._decode = decode
        self._offset = 0

    def piece(self, tokens: Iterable[tuple[int, Report | None]]) -> dict[str, Iterable[Any]]:
        """The next tokens, each with its report; None for the first one of a prompt.

        Of alternatives with the same text the most probable one is reported.
        """
        tokens = list(tokens)
        names = [self._decode(token) or "" for token, _ in tokens]
        *offsets, self._offset = accumulate(map(len, names), initial=self._offset)
        return {
            "tokens": names,
            "token_logprobs": [None if report is None else _value(report[token]) for token, report in tokens],
            "top_logprobs": (None if report is None else self._top(token, report) for token, report in tokens),
            "text_offset": offsets,
        }

    def _top(self, token: int, report: Report) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, entry in report.items():
            if other == token or entry.rank <= self._count:
                top[_name(entry)] = max(_value(entry), top.get(_name(entry), _LEAST))
        return top


def chat_logprobs(token_ids: Sequence[int], reports: Sequence[Report], count: int) -> dict[str, Any]:
    """The `logprobs` of some tokens of a chat's choice, each with `count` alternatives."""

    def entry(token: int, report: Report) -> dict[str, Any]:
        ranked = sorted(report.values(), key=lambda entry: entry.rank)
        top = [_chat_entry(entry) for entry in ranked if entry.rank <= count][:count]
        return {**_chat_entry(report[token]), "top_logprobs": top}

    return {"content": map(entry, token_ids, reports)}


def prompt_logprobs(reports: Sequence[Report | None], token_ids: Sequence[int], count: int) -> Iterator[Any]:
    """vLLM's `prompt_logprobs`: token id to logprob, rank and text; None for the first token."""
    return (
        None
        if report is None
        else {
            str(token): {"logprob": _value(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in report.items()
            if token == own or entry.rank <= count
        }
        for own, report in zip(token_ids, reports, strict=True)
    )


def _name(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _value(entry: Logprob) -> float:
    return max(_LEAST, entry.logprob)


def _chat_entry(entry: Logprob) -> dict[str, Any]:
    name = _name(entry)
    return {"token": name, "logprob": _value(entry), "bytes": list(name.encode("utf-8", "replace"))}
