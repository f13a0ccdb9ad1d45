"""Log probabilities in OpenAI's two shapes, and vLLM's for prompts.

Long lists are iterators, whose members are made as they are written.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ..requests.logprobs import Logprob
from ..requests.text import TokenText

Report = Mapping[int, Logprob]

# JSON has no infinity; vLLM writes this for an impossible token.
_LEAST = -9999.0


class TextLogprobs:
    """Collects the `logprobs` of one choice of a completion, whose pieces know how far the text has come.

    Args:
        count: alternatives to report.
        text: of single tokens.
        skip_special_tokens: they are not in the text of the output.
    """

    def __init__(self, count: int, text: TokenText, *, skip_special_tokens: bool) -> None:
        self._count = count
        self._text = text
        self._skips = skip_special_tokens
        self._offset = 0
        # A character begins where its first token does, however many tokens have parts of it.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, tokens: Iterable[tuple[int, Report | None]], length: int) -> dict[str, Iterable[Any]]:
        """The tokens of a prompt that is shown before the output, as a text of so many characters.

        Each has its report, the first one None.
        """
        tokens = list(tokens)
        *offsets, end = accumulate((self._length(token) for token, _ in tokens), initial=0)
        # What the tokens have more is what was put before the text: a special token, a space.
        offsets = [max(0, offset - max(0, end - length)) for offset in offsets]
        self._offset = length
        self._characters.reset()
        return self._piece(tokens, offsets)

    def piece(self, tokens: Iterable[tuple[int, Report]]) -> dict[str, Iterable[Any]]:
        """The next tokens of the output, each with its report.

        Of alternatives with the same text the most probable one is reported.
        """
        tokens = list(tokens)
        lengths = (0 if self._skips and self._text.is_special(token) else self._length(token) for token, _ in tokens)
        *offsets, self._offset = accumulate(lengths, initial=self._offset)
        return self._piece(tokens, offsets)

    def _piece(self, tokens: Sequence[tuple[int, Report | None]], offsets: list[int]) -> dict[str, Iterable[Any]]:
        return {
            "tokens": [self._text.of_token(token) or "" for token, _ in tokens],
            "token_logprobs": [None if report is None else _value(report[token]) for token, report in tokens],
            "top_logprobs": (None if report is None else self._top(token, report) for token, report in tokens),
            "text_offset": offsets,
        }

    def _length(self, token: int) -> int:
        return len(self._characters.decode(self._text.bytes_of(token)))

    def _top(self, token: int, report: Report) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, entry in report.items():
            if other == token or entry.rank <= self._count:
                top[_name(entry)] = max(_value(entry), top.get(_name(entry), _LEAST))
        return top


def chat_logprobs(token_ids: Sequence[int], reports: Sequence[Report], count: int, text: TokenText) -> dict[str, Any]:
    """The `logprobs` of some tokens of a chat's choice, each with `count` alternatives."""

    def entry(token: int, report: Report) -> dict[str, Any]:
        ranked = sorted(report.items(), key=lambda item: item[1].rank)
        top = [_chat_entry(other, entry, text) for other, entry in ranked if entry.rank <= count][:count]
        return {**_chat_entry(token, report[token], text), "top_logprobs": top}

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


def _chat_entry(token: int, entry: Logprob, text: TokenText) -> dict[str, Any]:
    return {"token": _name(entry), "logprob": _value(entry), "bytes": list(text.bytes_of(token))}
