"""ShownBlocks: which blocks are backed, and which of them each window shows.

A block is a slot of the *homes*; a window is a slot of the *windows*, with the pages of the blocks that it shows,
mapped read-only. A window may show more blocks than its row has: what a row has lost at its end stays mapped until
something else is to be shown there.

The window of a row is found by what it shows, because a block table does not say which request a row belongs to: first
the window of the same row of the last batch, then those that end, or begin, with the same blocks as the row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from vattn import _native
from vattn.drivers import MemoryDriver, Stream
from vattn.pool.core import Tenant
from vattn.pool.fences import Fences, guard_all
from vattn.pool.journal import Change

Blocks = NDArray[np.int32]
Index = dict[int, dict[int, None]]  # windows by a block

# Windows that are compared with a row that begins with the same block, before one is taken.
_CANDIDATES = 8


class ShownBlocks(Tenant):
    """The books of one `BlockWindows`, and the decisions about them; used under the pool's lock.

    As a tenant of the pool it gives no pages: only the owner of a block table knows which blocks are of no use.

    Args:
        homes: one slot per block.
        windows: one slot per window, whose lanes are those of `homes`.
        block_pages: pages of a block in a lane.
        most_blocks: blocks that a window can show.

    Attributes:
        rows: the window of each row of the last batch.
        backed_blocks: blocks that have memory.
        attached, detached: mappings of blocks in windows that were made and taken away so far.
    """

    def __init__(
        self,
        driver: MemoryDriver,
        homes: _native.AddressSpace,
        windows: _native.AddressSpace,
        *,
        block_pages: int,
        most_blocks: int,
    ) -> None:
        self.homes = homes
        self.windows = windows
        self.most_blocks = most_blocks
        self.rows: list[int] = []
        self.backed_blocks = 0
        self.attached = 0
        self.detached = 0
        self._driver = driver
        self._block_pages = block_pages
        self._fences = Fences(driver)
        self._handle: int | None = None  # the stream of the kernels that read the windows of `rows`
        # The blocks that windows show, and how many.
        self._shown = np.zeros((windows.slots, most_blocks), np.int32)
        self._counts = np.zeros(windows.slots, np.int32)
        # Windows that no row of the last batch has, the longest unused first.
        self._idle: dict[int, None] = dict.fromkeys(range(windows.slots))
        # Windows by the first and the last block that they show, and where each of them is filed.
        self._first: Index = {}
        self._last: Index = {}
        self._filed: dict[int, tuple[int, int]] = {}

    def refresh(self) -> None:
        """Recomputes which windows are idle, how many blocks have memory, and the indices by first and last block."""
        self._idle = self._without_row()
        self.backed_blocks = len(self.homes.occupied())
        self._first, self._last, self._filed = self._files()

    def _without_row(self) -> dict[int, None]:
        """The windows that no row of the last batch has, those that are known to be idle first."""
        used = set(self.rows)
        known = dict.fromkeys((*self._idle, *range(self.windows.slots)))
        return {window: None for window in known if window not in used}

    def _files(self) -> tuple[Index, Index, dict[int, tuple[int, int]]]:
        """All windows by the first and by the last block that they show, and where each of them is filed."""
        by_first: Index = {}
        by_last: Index = {}
        filed: dict[int, tuple[int, int]] = {}
        for window in np.flatnonzero(self._counts).tolist():
            first, last = filed[window] = self._ends(window)
            by_first.setdefault(first, {})[window] = None
            by_last.setdefault(last, {})[window] = None
        return by_first, by_last, filed

    def _ends(self, window: int) -> tuple[int, int]:
        """The first and the last block that a window shows."""
        first, last = self._shown[window, [0, self.shown_in(window) - 1]].tolist()
        return first, last

    # Questions

    @property
    def pages(self) -> int:
        """Pages of a block, in all lanes."""
        return self.homes.lanes * self._block_pages

    def backed(self, block: int) -> bool:
        return self.homes.columns(block) > 0

    def shown_blocks(self) -> int:
        """Mappings of blocks in windows; a block that several windows show counts in each."""
        return int(self._counts.sum())

    def shown_in(self, window: int) -> int:
        """How many blocks the window shows."""
        return int(self._counts[window])

    def blocks_of(self, window: int) -> list[int]:
        """The blocks that the window shows, in order."""
        shown: list[int] = self._shown[window, : self.shown_in(window)].tolist()
        return shown

    def idle_showing(self) -> list[int]:
        """The windows that show something, but no row of the last batch."""
        return [window for window in self._idle if self._counts[window]]

    def match(self, table: Blocks, counts: Blocks) -> list[int]:
        """A window for every row, each a different one: those that show most of the rows, as far as a look at a few
        windows tells.
        """
        rows = range(len(counts))
        guesses = self.rows[: len(rows)]
        common = self.common(table, counts, rows[: len(guesses)], guesses)
        wanted: list[int] = counts.tolist()
        if common == wanted:
            return guesses
        has: list[int] = self._counts[guesses].tolist()
        found: list[int | None] = [None] * len(rows)
        for row, (guess, alike, shown) in enumerate(zip(guesses, common, has, strict=True)):
            if alike == wanted[row] or 0 < alike == shown:
                found[row] = guess
        taken = set(found) - {None}
        for row in rows:
            window = found[row]
            if window is None:
                window = self._closest(table, counts, row, taken)
                if window is None:
                    window = next(each for each in chain(self._idle, self.rows) if each not in taken)
                found[row] = window
                taken.add(window)
        return [window for window in found if window is not None]

    def common(self, table: Blocks, counts: Blocks, rows: Sequence[int], windows: Sequence[int]) -> list[int]:
        """For each pair of a row and a window, at how many blocks from the start they agree."""
        return _native.common_blocks(table, counts, self._shown, self._counts, rows, windows)

    def reading(self, windows: Collection[int]) -> bool:
        """Whether kernels of the last batch may read one of these windows."""
        return not set(self.rows).isdisjoint(windows)

    # Decisions

    def back(self, change: Change, blocks: Iterable[int]) -> None:
        """Plans to back blocks."""
        for block in blocks:
            self.homes.grow(change.transaction, block, self._block_pages)
            self.backed_blocks += 1

    def show(self, change: Change, window: int, keep: int, blocks: Sequence[int]) -> None:
        """Plans that a window shows `blocks` after the first `keep` that it shows, and nothing else."""
        self._cut(change, window, keep)
        pages = [self.homes.pages(block, 0, self._block_pages) for block in blocks]
        self.windows.attach(change.transaction, window, pages)
        end = keep + len(blocks)
        change.put(self._shown, (window, slice(keep, end)), blocks)
        change.put(self._counts, window, end)
        change.set(self, "attached", self.attached + len(blocks))
        self._file(window)

    def drop(self, change: Change, blocks: Sequence[int], handle: int | None) -> None:
        """Plans to unmap blocks, wherever they are, when no kernel uses them. Windows lose what they show after one.

        Args:
            handle: the stream of the kernels that wrote the blocks.
        """
        gone = np.zeros(self.homes.slots, np.bool_)
        gone[blocks] = True
        hit = gone[self._shown] & (np.arange(self.most_blocks) < self._counts[:, None])
        cut: list[int] = np.flatnonzero(hit.any(1)).tolist()
        self._fences.guard_running(change, handle)
        if handle != self._handle:
            self._fences.guard_running(change, self._handle)
        for window in cut:
            self._fences.guard(change, window)
            self._cut(change, window, int(hit[window].argmax()))
            self._file(window)
        for block in blocks:
            self.homes.shrink(change.transaction, block, self._block_pages)
            self.backed_blocks -= 1

    def clear(self, change: Change, windows: Collection[int]) -> None:
        """Plans that these windows show nothing."""
        self.guard(change, windows)
        for window in windows:
            self._cut(change, window, 0)
            self._file(window)

    def guard(self, change: Change, windows: Collection[int]) -> None:
        """Makes the rest of the transaction wait for the kernels that may read these windows."""
        if self.reading(windows):
            self._fences.guard_running(change, self._handle)
        for window in windows:
            self._fences.guard(change, window)

    def use(self, change: Change, windows: Sequence[int], handle: int | None) -> None:
        """Notes the windows of a batch whose kernels will be launched on this stream; those of the last batch have
        been.
        """
        if windows == self.rows and handle == self._handle:
            return
        now = set(windows)
        left = [window for window in self.rows if window not in now]
        # On another stream, kernels do not follow those of the last batch, whichever windows both read.
        self._fences.ended(left if handle == self._handle else self.rows, self._handle)
        change.set(self, "rows", list(windows))
        change.set(self, "_handle", handle)
        for window in windows:
            self._idle.pop(window, None)
        self._idle.update(dict.fromkeys(left))

    # Streams

    def handle(self, stream: Stream | None) -> int | None:
        """The handle of a stream, by default torch's current one; None on devices without streams."""
        return self._fences.handle(stream)

    def capturing(self, handle: int | None) -> bool:
        """Whether this stream, or that of the last batch, captures a CUDA graph."""
        return self._fences.capturing(handle) or self._fences.capturing(self._handle)

    def leaves_capture(self, handle: int | None) -> bool:
        """Whether the kernels of the last batch, whose windows have to be fenced if the next one is on this stream, are
        on another, which captures a CUDA graph.
        """
        return handle != self._handle and bool(self.rows) and self._fences.capturing(self._handle)

    def check(self, pool: _native.PagePool) -> None:
        """Asserts that what is mapped agrees with the books."""
        self.homes.check()
        self.windows.check()
        _native.check_references(pool, [self.homes, self.windows], [])
        backed = set(self.homes.occupied())
        assert all(self.homes.columns(block) == self._block_pages for block in backed), "a block is backed in part"
        for window in range(self.windows.slots):
            blocks = self.blocks_of(window)
            assert backed.issuperset(blocks), f"window {window} shows a block that is not backed"
            pages = [self.homes.pages(block, 0, self._block_pages) for block in blocks]
            assert self.windows.has(window, pages), f"window {window} shows other pages than those of its blocks"
        assert len(set(self.rows)) == len(self.rows), "two rows have the same window"
        assert (self._first, self._last, self._filed) == self._files(), "a window is filed under another block"
        assert list(self._idle) == list(self._without_row()), "a window is lost, or a row has an idle one"
        assert self.backed_blocks == len(backed), "backed blocks are miscounted"
        assert self.attached - self.detached == self.shown_blocks(), "mappings in windows are miscounted"

    def give_back(self) -> Callable[[Change], None]:
        """Returns a plan that gives up every page, as soon as no kernel uses it. It does not keep the owner alive, and
        raises StreamCapturing.
        """
        windows, homes, driver = self.windows, self.homes, self._driver

        def plan(change: Change) -> None:
            occupied = [(space, slot) for space in (windows, homes) for slot in space.occupied()]
            if occupied:
                guard_all(change, driver)
            for space, slot in occupied:
                space.shrink(change.transaction, slot, space.columns(slot))

        return plan

    def _closest(self, table: Blocks, counts: Blocks, row: int, taken: Collection[int | None]) -> int | None:
        """The free window that shows most of a row, among some that have a block in common with it; or None."""
        count = int(counts[row])
        if not count:
            return None
        first, *ends = table[row, [0, max(0, count - 2), count - 1]].tolist()
        near = [window for block in ends for window in self._last.get(block, ()) if window not in taken]
        near += islice((window for window in self._first.get(first, ()) if window not in taken), _CANDIDATES)
        near = list(dict.fromkeys(near))
        common = self.common(table, counts, [row] * len(near), near)
        alike, window = max(zip(common, near, strict=True), key=lambda pair: pair[0], default=(0, None))
        return window if alike else None

    def _cut(self, change: Change, window: int, keep: int) -> None:
        """Plans to unmap what a window shows after the first `keep` blocks."""
        count = self.shown_in(window)
        self.windows.shrink(change.transaction, window, (count - keep) * self._block_pages)
        change.put(self._counts, window, keep)
        change.set(self, "detached", self.detached + count - keep)

    def _file(self, window: int) -> None:
        """Files a window under the blocks that it shows now."""
        if (filed := self._filed.pop(window, None)) is not None:
            for index, block in zip((self._first, self._last), filed, strict=True):
                del index[block][window]
                if not index[block]:
                    del index[block]
        if self.shown_in(window):
            first, last = self._filed[window] = self._ends(window)
            self._first.setdefault(first, {})[window] = None
            self._last.setdefault(last, {})[window] = None
