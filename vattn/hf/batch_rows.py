"""The rows of a batch in slots: row i is slot i, so K and V of a batch are one strided view, without a copy.

transformers' caches keep a batch in lockstep: every row has the same number of tokens, padding included. So all slots
are allocated from the start, which costs only address space, and a step gives all rows in use the same length.

Beams change rows at every token but share most of their tokens. For every pair of rows, the length of their common
prefix is tracked. The rest is copied if it is short, usually a few tokens; if it is longer than the tokens of a page,
the row becomes a fork of the other and maps the same pages. Measured with two threads, 8 layers of 4 heads of 64 in
float32, for a row of 2048, 4096 and 8192 tokens: a fork takes 7, 12 and 25 ms, a copy 3 to 7, 6 to 12 and 30 ms or
more; a tail of 8 tokens in three rows takes 0.2 ms. So from about 4096 tokens on a fork is no slower, and it always
saves the row's memory. Layers with a sliding window store only the window of a row, which is copied, since shared
blocks would have to be stepped back before they could be written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from vattn.cache import KVCache
from vattn.errors import InvalidLength, NoFreeSlot, VattnError


class BatchRows:
    """The slots of several caches; a row has the same slot in all of them.

    Attributes:
        capacity: most rows.
        count: rows in use, slots `[0, count)`.
        start: first token of the last step; later tokens can be taken back.
    """

    def __init__(self, capacity: int, count: int) -> None:
        self.capacity = capacity
        self.count = count
        self.start = 0
        self._caches: list[KVCache] = []
        self._claimed = True  # whether all slots are allocated
        self._first: dict[KVCache, int] = {}  # of caches with a window: the first token that is every row's own
        self._equal = [[0] * count for _ in range(count)]  # tokens from the start in which two rows are the same

    @property
    def slots(self) -> int:
        """Slots that a cache needs: the capacity, and a spare one for exchanging rows."""
        return self.capacity + (self.capacity > 1)

    @property
    def length(self) -> int:
        """The tokens of each row for which there is memory; the most of any cache, if a call was interrupted."""
        self._claim()
        return max((cache.length(0) for cache in self._caches), default=0)

    def prepare(self, cache: KVCache) -> None:
        """Allocates the slots of a new cache and backs the rows' tokens."""
        _claim(cache)
        if length := self.length:
            cache.step(self._all(length))

    def add(self, cache: KVCache) -> None:
        """Adds a cache that is prepared."""
        # Layers with windows last: a step that is taken back takes from them where they could go back to.
        self._caches = sorted([*self._caches, cache], key=lambda each: _window(each) is not None)

    def begin(self, start: int, rows: Iterable[int] | None = None) -> None:
        """Has empty rows, all in use if not given, begin with a copy: layers with a window back only those tokens of it
        that queries from `start` on see.
        """
        self._claimed = False
        rows = range(self.count) if rows is None else rows
        for (cache, _), row in itertools.product(self._windows(), rows):
            cache.free_reqid(row)
            begun = cache.alloc_reqid(start=start)
            assert begun == row, "another slot was idle"
        self._claimed = True

    def step(self, length: int, *, recording: bool = False) -> None:
        """Backs `length` tokens of every row, in all caches or none.

        Args:
            recording: the rows can still go back to where they could go before.

        Raises:
            OutOfPages, DriverError: tokens cannot be backed. Nothing changed.
            InvalidLength: as `go_back`.
        """
        before, done = self.length, 0
        if not before:  # whatever emptied them
            self.start = 0
            self._first.clear()
        if length < before:
            self.go_back(length)
        start = min(self.start, length) if recording else min(before, length)
        caches = [cache for cache in self._caches if length >= before or _window(cache) is None]
        held, self.start = self.start, max(self.start, start)  # from the first step on, whatever comes of it
        try:
            for cache in caches:
                self._step(cache, start, before, length)
                done += 1
        except BaseException as error:
            if length > before:
                for cache in caches[:done]:
                    self._take_back(cache, start, before, length)
            if isinstance(error, VattnError) and all(_window(cache) is None for cache in caches[:done]):
                self.start = held  # refused before a window moved
            raise
        self.start = start

    def go_back(self, length: int) -> None:
        """Takes layers with windows back to a lower length. Others are never refused it, and lose what their rows share
        beyond; these keep what is there until the rows change, and can be taken forth again, unless the length is 0.

        Raises:
            InvalidLength: a window there reaches tokens whose memory was given back. Nothing changed.
        """
        before, start, done = self.length, self.start, list[KVCache]()
        for cache, window in self._windows():
            if length and max(0, length - window + 1) < self._first.get(cache, 0):
                raise InvalidLength(
                    f"the rows cannot go back from {before} tokens to {length}: they were reordered, repeated or "
                    f"copied since, and got the last {window} tokens only in layers with that window; crop before, or "
                    "reset"
                )
        # From the first step on, whatever comes of it. A window that has gone back, and forth again or not, gives back
        # what was before it at this length; and rows may get different tokens from there on.
        equal = self._equal
        if length:
            self.start = max(start, length)
        self._equal = [[min(tokens, length) for tokens in row] for row in equal]
        try:
            for cache, _ in self._windows():
                cache.step(self._all(length))
                done.append(cache)
        except BaseException as error:
            if not done and isinstance(error, VattnError):  # refused
                self.start, self._equal = start, equal
            if length:
                for cache in done:
                    cache.step(self._all(before))
            raise

    def _step(self, cache: KVCache, start: int, before: int, length: int) -> None:
        """Backs `length` tokens of every row in a cache that backs `before`, which can go back to `start` then."""
        try:
            if start < before < length and _window(cache) is not None:
                cache.step(self._all(start))  # a step can be taken back to where it began
            cache.step(self._all(length))
        except BaseException:
            self._take_back(cache, start, before, length)
            raise

    def _take_back(self, cache: KVCache, start: int, before: int, length: int) -> None:
        """Undoes `_step`, how far it came. A window gives back what was before the last step began, also by a step that
        goes nowhere: so none is made without need, and others by way of the start.
        """
        if start < before < length and _window(cache) is not None:
            cache.step(self._all(start))
        if before < length and cache.length(0) != before:
            cache.step(self._all(before))

    def release_past(self) -> None:
        """Rows that are longer after the next step cannot go back behind their present length."""
        self.start = self.length

    def unshare(self) -> None:
        """Gives every row pages of its own, so that all of its tokens may be written. A failure changes no contents.

        Raises:
            OutOfPages: the budget does not have enough pages.
        """
        self._claim()
        for cache in self._caches:
            for row in range(self.count):
                cache.unshare(row)
        self._equal = [[0] * self.count for _ in range(self.count)]

    def check(self) -> None:
        """Asserts that no rows count as the same in tokens that they do not have."""
        most = max(itertools.chain.from_iterable(self._equal), default=0)
        assert most <= self.length, f"rows count as the same in {most} tokens, of {self.length}"

    def arrived(self, start: int) -> None:
        """Records that tokens were copied in: in layers with a window only those that queries from `start` on see."""
        self.start = start
        self._first = {cache: max(0, start - window + 1) for cache, window in self._windows()}

    def resize(self, count: int) -> None:
        """Changes the number of rows, which are empty."""
        assert not self.length
        assert count <= self.capacity
        self.count = count
        self._equal = [[0] * count for _ in range(count)]

    def select(self, sources: Sequence[int]) -> None:
        """Replaces row i by row `sources[i]`; afterwards there are as many rows as sources.

        Raises:
            OutOfPages, DriverError: a row could not be replaced; all rows are empty now.
        """
        assert len(sources) <= self.capacity
        length, old, count = self.length, self.count, len(sources)
        equal = [[length if a == b else self._equal[a][b] for b in sources] for a in sources]
        moves = {row: source for row, source in enumerate(sources) if row != source}
        start = min((self._equal[row][source] if row < old else 0 for row, source in moves.items()), default=length)
        try:
            if start < length:
                self.begin(self.start, range(old, len(sources)))
                for cache, window in self._windows():
                    if len(sources) > old:
                        cache.step(self._all(self.start))  # a step can be taken back to where it began
                        cache.step(dict.fromkeys(range(len(sources)), length))
                    first = max(start, self.start - window + 1)
                    _copy(_tails(cache, first, length), moves)
                    if start < first:
                        self._first[cache] = first
                whole = [cache for cache in self._caches if _window(cache) is None]
                if length - start < max((cache.layout.page_tokens for cache in whole), default=0):
                    self._copy(whole, moves, start, length)
                elif whole:
                    self._fork(whole, dict(moves))
            for cache in self._caches:
                cache.step(dict.fromkeys(range(len(sources), old), 0))
        except BaseException:
            self._abandon()
            raise
        self.count, self._equal = count, equal  # no call is between what was done and this: nor can a signal be

    def trim(self) -> int:
        """Returns the memory of unused and of empty rows to the machine, and the number of its bytes."""
        unused = range(self.count if self.length else 0, self.slots)
        given = 0
        self._claimed = False
        for cache in self._caches:
            for slot in unused:
                cache.free_reqid(slot)
            given += cache.trim()
        self._claim()
        return given

    def _all(self, length: int) -> dict[int, int]:
        """This length for every row."""
        return dict.fromkeys(range(self.count), length)

    def _claim(self) -> None:
        """Allocates the slots that a call may have left free."""
        if not self._claimed:
            for cache in self._caches:
                _claim(cache)
            self._claimed = True

    def _windows(self) -> Iterator[tuple[KVCache, int]]:
        for cache in self._caches:
            window = _window(cache)
            if window is not None:
                yield cache, window

    def _copy(self, caches: Sequence[KVCache], moves: dict[int, int], start: int, length: int) -> None:
        tails = [tail for cache in caches for tail in _tails(cache, start, length)]

        def own() -> None:
            # Stepping back and forth replaces shared pages by private ones without contents, after all were read.
            for cache in caches:
                cache.step(dict.fromkeys(moves, start))
                cache.step(dict.fromkeys(moves, length))

        _copy(tails, moves, own)

    def _fork(self, caches: Sequence[KVCache], moves: dict[int, int]) -> None:
        """Performs each move when no other move needs the row that it replaces; a cycle goes through the spare slot."""
        spare = self.capacity
        self._claimed = False
        while moves:
            needed = set(moves.values())
            row = next((row for row in moves if row not in needed), None)
            if row is None:
                row = next(iter(moves))
                _replace(caches, spare, row)
                moves = {r: spare if source == row else source for r, source in moves.items()}
            _replace(caches, row, moves.pop(row))
        for cache in caches:
            cache.step({spare: 0})
        self._claimed = True

    def _abandon(self) -> None:
        """Empties all rows after a failure in which some were lost."""
        self._claimed = False
        self._equal = [[0] * self.count for _ in range(self.count)]
        self._claim()
        for cache in self._caches:
            cache.step(dict.fromkeys(range(self.slots), 0))


def _tails(cache: KVCache, start: int, end: int) -> list[Tensor]:
    """All K and V of tokens `[start, end)`, `[slots, num_kv_heads, end - start, *]`."""
    return [tensor[:, start:end].transpose(1, 2) for layer in cache.layers for tensor in cache.layer(layer)]


def _copy(tails: Sequence[Tensor], moves: dict[int, int], before_writing: Callable[[], object] = lambda: None) -> None:
    """Copies rows to rows; all are read before any is written."""
    device = tails[0].device
    rows, sources = (torch.tensor(list(x), device=device) for x in (moves.keys(), moves.values()))
    with torch.no_grad():
        new = [tail[sources] for tail in tails]
        before_writing()
        for tail, values in zip(tails, new, strict=True):
            tail[rows] = values


def _replace(caches: Sequence[KVCache], row: int, source: int) -> None:
    for cache in caches:
        cache.free_reqid(row)
        forked = cache.fork(source)
        assert forked == row, "another slot was idle"


def _window(cache: KVCache) -> int | None:
    """The window of a cache's layers, the same in all of its groups."""
    return cache.config.tensor_groups[0].sliding_window


def _claim(cache: KVCache) -> None:
    """Allocates all free slots, so that row i is slot i whatever the order in which the cache allocates them."""
    with suppress(NoFreeSlot):
        while True:
            cache.alloc_reqid()
