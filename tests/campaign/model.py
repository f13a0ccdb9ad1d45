"""What the cache promises, without a page: requests, their tokens, and which of their rows queries may still see."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.campaign.contents import chain, rows, text

Side = tuple[int, int]  # of a layer: 0 for K, 1 for V
Piece = tuple[int, int, int]  # tokens `[start, end)` of a text: (text, start, end)


@dataclass
class Request:
    """A request.

    Attributes:
        salt: what its contents depend on besides its tokens.
        pieces: its tokens, those that are still to be computed included, as pieces of texts.
        numbers: one per token, of all tokens up to it; made when asked for.
        rendered: by layer and side, the rows of its first tokens; made when asked for.
        length: tokens whose rows are there.
        back: the least length above 0 that a step may go back to.
        restored_from: while its tokens are still to be copied in: the first of which all layers see what is before it.
        written: by window, the first row that was ever there.
        reached: the most tokens that it ever had.
        stepped: whether a step named it.
    """

    salt: bytes
    pieces: list[Piece]
    length: int
    back: int
    restored_from: int | None = None
    written: dict[int, int] = field(default_factory=dict)
    reached: int = 0
    stepped: bool = False
    numbers: list[int] = field(default_factory=list)
    rendered: dict[Side, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reached = max(self.reached, self.length)

    def copy(self) -> Request:
        """The same tokens in another slot."""
        return replace(
            self,
            reached=self.length,
            stepped=False,
            pieces=self.pieces.copy(),
            numbers=self.numbers.copy(),
            written=self.written.copy(),
            rendered=self.rendered.copy(),
        )

    @property
    def total(self) -> int:
        """Its tokens, those to be computed included."""
        return self.pieces[-1][2] if self.pieces else 0

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in text(*piece)]

    def upto(self, end: int) -> list[Piece]:
        """The pieces of its first tokens."""
        return [(t, first, min(last, end)) for t, first, last in self.pieces if first < end]

    def cut(self, length: int) -> None:
        """Forgets the tokens from `length` on."""
        self.pieces = self.upto(length)
        del self.numbers[length:]
        self.rendered.clear()

    def extend(self, length: int, stream: int) -> None:
        """Appends tokens of a text, where it has fewer."""
        if length > self.total:
            start = self.total
            if self.pieces and self.pieces[-1][0] == stream:
                start = self.pieces.pop()[1]
            self.pieces.append((stream, start, length))

    def chain(self) -> list[int]:
        if len(self.numbers) < self.total:
            self.numbers = chain(self.tokens, self.salt, self.numbers)
        return self.numbers

    def rows(self, side: Side, start: int, end: int, shape: tuple[int, int]) -> Any:
        """The rows of tokens `[start, end)` in one layer's K or V, of that many heads and bytes per head."""
        have = self.rendered.get(side)
        count = 0 if have is None else len(have)
        if count < end:
            made = rows(self.chain()[count:], *side, *shape)
            have = self.rendered[side] = made if have is None else np.concatenate((have, made))
        assert have is not None
        return have[start:end]

    def seen(self, window: int | None) -> int:
        """The first row that queries to come may see, in layers with that window."""
        if window is None:
            return 0
        return min(self.length, max(0, self.back - window + 1, self.written.get(window, 0)))


@dataclass
class Model:
    """One cache.

    Attributes:
        windows: of every layer.
        requests: by label, in the order in which they came.
        slots: their reqids.
        committed: numbers of tokens up to which somebody has committed.
    """

    windows: dict[int, int | None]
    requests: dict[int, Request] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    query_tokens: int = 0
    hit_tokens: int = 0

    def firsts(self, request: Request) -> dict[int, int]:
        """By layer, the first row that queries may see."""
        return {layer: request.seen(window) for layer, window in self.windows.items()}

    def lengths(self) -> dict[int, int]:
        """What the running slots hold, by reqid."""
        return {self.slots[label]: request.length for label, request in self.requests.items()}

    @property
    def windowed(self) -> bool:
        return any(window is not None for window in self.windows.values())

    def step(self, lengths: dict[int, tuple[int, int]]) -> dict[int, dict[int, int]]:
        """A step was made, to (length, text) by label; returns, by label and layer, the first row to be written."""
        before = {label: request.length for label, request in self.requests.items()}
        for request in self.requests.values():
            if request.restored_from is None:
                request.back = request.length
        written = {}
        for label, (length, stream) in lengths.items():
            request = self.requests[label]
            if length < before[label]:
                request.cut(length)
                request.back = min(request.back, length)
            else:
                request.extend(length, stream)
                start = before[label]
                firsts = dict.fromkeys(self.windows, start)
                if request.restored_from is not None and length:
                    begin = min(request.restored_from, length)
                    request.back, request.restored_from = begin, None
                    for layer, window in self.windows.items():
                        if window is not None:
                            firsts[layer] = request.written[window] = max(0, begin - window + 1)
                for window, first in request.written.items():
                    request.written[window] = min(first, start) if start else first
                written[label] = firsts
            request.length = length
            request.stepped = True
            if not length:
                request.written.clear()
        return written
