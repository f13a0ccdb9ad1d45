"""From output tokens to text, token by token.

A token need not be whole characters: byte-level and byte-fallback tokenizers split characters, and sentencepiece ones
strip the space before the first word. So a token is decoded together with a few tokens before it, and its text is what
it adds to theirs. Text that ends inside a character is held back until the rest comes, and text that may begin a stop
string until it is known not to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

Decode = Callable[[list[int]], str]

_WINDOW = 8  # tokens that are decoded together, and the maximum that waits for the end of a character
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_UNFINISHED = 3  # bytes of a character, each of which some tokenizers show as one


class Detokenizer:
    """The text of one output, at a cost per token that does not grow with its length.

    The whole text is what all tokens add to `decode` of those `after` which they come, up to a stop string and without
    a character that the last tokens leave unfinished. (If the output of a byte-fallback tokenizer is not valid UTF-8,
    the number of replacement characters may differ.)

    Args:
        decode: text of a list of tokens.
        stop: texts that end the output.
        after: tokens before the output, a few; their text ends with a whole character.
        include_stop: the stop string is part of the text.
    """

    def __init__(
        self, decode: Decode, stop: Sequence[str] = (), *, after: Sequence[int] = (), include_stop: bool = False
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._include_stop = include_stop
        # The first `length` characters of the window's text were handed out, the last ones for tokens before `piece`.
        self._window = list(after)
        self._piece = len(self._window)
        self._length = len(decode(self._window)) if after else 0
        self._pending = ""  # the window's text after those, which may end inside a character
        self._held = ""  # what may be the beginning of a stop string
        self._begun = [0] * len(stop)  # characters at the end of the text that each stop string begins with
        self._texts: list[str] = []

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Take one more token.

        Args:
            may_stop: whether a stop string that this token completes counts.

        Returns:
            The stop string that ends the output, after which nothing may be pushed; or None.
        """
        text = self._next(token_id)
        if not self._stop:
            self._texts.append(text)
            return None
        known, added = len(self._held), len(text)
        text = self._held + text
        if may_stop:
            # Only stop strings that this token completes count; those complete before were not allowed to.
            places = [
                (text.find(stop, max(0, known - len(stop) + 1)), stop)
                for stop, begun in zip(self._stop, self._begun, strict=True)
                if begun + added >= len(stop)
            ]
            found = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
            if found:
                end, start, stop = min(found, key=itemgetter(0))  # the first of the list, of those that end together
                self._texts.append(text[: end if self._include_stop else start])
                self._held = self._pending = ""
                return stop
        # Lengths that are tried in vain shorten what had begun, so that there are no more of them than characters.
        self._begun = [_overlap(text, stop, begun + added) for stop, begun in zip(self._stop, self._begun, strict=True)]
        held = max(self._begun)
        self._texts.append(text[: len(text) - held])
        self._held = text[len(text) - held :]
        return None

    def finish(self) -> None:
        """Release text that is held back, but for an unfinished character: no further token will come."""
        self._texts.append(self._held + self._pending.rstrip(_INCOMPLETE))
        self._held = self._pending = ""

    def text(self) -> str:
        """All text since the last `take`, without what is held back."""
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def take(self) -> str:
        """As `text`, and starts anew; an interrupt does so, or not."""
        text = "".join(self._texts)
        self._texts = []
        return text

    def _next(self, token_id: int) -> str:
        """The text that one more token completes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        before, self._pending = self._pending, text[self._length :]
        # A part of a character may add nothing either, nor a space that comes first; two of them alone are text.
        if self._pending == before and not self._decode([token_id, token_id]):
            self._window.pop()  # a special token, which is left out
            return ""
        if text.endswith(_INCOMPLETE):
            return "" if len(self._window) - self._piece < _WINDOW else self._next_of_many(text)
        new, self._pending = self._pending, ""
        self._length = len(text)
        if len(self._window) > _WINDOW:
            # Cut where the last text began, so at the border of a character.
            del self._window[: self._piece]
            self._length = len(self._decode(self._window))
        self._piece = len(self._window)
        return new

    def _next_of_many(self, text: str) -> str:
        """Of a window whose text ends inside a character after more tokens than one has bytes: what stands by now.

        Each token may end inside of a character that the next one completes, or no bytes may be any character. Either
        way only the last few replacement characters can still become something else.
        """
        unfinished = _INCOMPLETE * min(_MOST_UNFINISHED, len(text) - len(text.rstrip(_INCOMPLETE)))
        new = text[self._length : len(text) - len(unfinished)]
        if not new:
            return ""
        self._pending = unfinished
        # The window may be cut inside a character: what comes of that was handed out before.
        end = self._window[-_WINDOW // 2 :]
        if unfinished and (short := self._decode(end)).endswith(unfinished):
            self._window, text = end, short
        self._length = len(text) - len(unfinished)
        self._piece = len(self._window) - len(end)
        return new


def _overlap(text: str, stop: str, most: int) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`; it is known to be `most` at most."""
    length = min(len(stop) - 1, most)
    while length and not text.endswith(stop[:length]):
        length = stop.rfind(text[-1], 0, length - 1) + 1
    return length
