"""The pages of one band of a cache: what is mapped under its slots, and how that grows and shrinks at both ends.

Each slot has one range of columns mapped, from the first block that queries still see to a little past the last token.
Which slots have requests, how long these are and which pages kernels may still read is not known here.

    [0 ...... floor ................... length .......... ]
     released        mapped: blocks, then private pages    address space only
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from vattn import _native
from vattn.layout import Band, TensorKind
from vattn.pool.core import Core
from vattn.pool.journal import Change
from vattn.prefix import Key
from vattn.slots.blocks import PageBlock, SharedBlocks
from vattn.slots.rows import TokenRows


class BandPages:
    """One band's virtual tensors; used under the pool's lock.

    Args:
        band: the kinds of tensors of the band, and its window.
        slots: number of slots.
        used_tokens: as in `SharedBlocks`.
        tenancy: as in `Bands`; all bands of a cache share this list, and none of them changes it.
        guard_rows: as in `Bands`.

    Attributes:
        spaces: the virtual tensors, by kind.
        shared: the blocks mapped in each slot.
        rows: access to the tensors as plain bytes.
    """

    def __init__(
        self,
        band: Band,
        slots: int,
        core: Core,
        used_tokens: Mapping[int, int],
        tenancy: Sequence[int],
        guard_rows: int,
    ) -> None:
        self.band = band
        self._tenancy = tenancy
        self.spaces = [
            _native.AddressSpace(
                core.driver.native,
                core.native,
                tensors=kind.tensors,
                slots=slots,
                runs=kind.runs,
                run_pages=kind.run_pages,
                # A kernel multiplies what it reads without using it by zero, and memory may hold NaN. Nobody writes
                # guard rows, nor those before the window of a request whose first tokens were copied in.
                zeroed=guard_rows > 0 or band.window_guard > 0,
            )
            for kind in band.kinds
        ]
        self._lanes = [(space, space.lanes) for space in self.spaces]
        self.shared = SharedBlocks(band, slots, core.native, self.spaces, used_tokens)
        self.rows = TokenRows(band.kinds, self.spaces, core.driver.dlpack_device)

    # Queries

    def begins(self, slot: int) -> bool:
        """Whether the mapped range of the slot begins with its first token, or is empty."""
        return self.sees(slot, 0)

    def sees(self, slot: int, start: int) -> bool:
        """Whether the mapped range of the slot can be grown to what queries from token `start` on see."""
        if self.band.window is None:
            return True
        floor = self.band.floor(start)
        return all(
            self._empty(space, slot) or space.first(slot) <= kind.columns(floor) <= space.columns(slot)
            for kind, space in self._kinds()
        )

    def outlived(self, slot: int, start: int) -> bool:
        """Whether blocks are mapped in the slot that queries from token `start` on do not see."""
        if self.band.window is None:
            return False
        floor = self.band.floor(start)
        return any(
            not self._empty(space, slot) and space.first(slot) < kind.columns(floor) for kind, space in self._kinds()
        )

    def outlives_at(self, slot: int, default: int) -> int:
        """The first token whose query no longer sees the first mapped block; the default if there is none."""
        if self.band.window is None or self._empty(self.spaces[0], slot):
            return default
        block = self.spaces[0].first(slot) // self.shared.columns[0]
        return (block + 1) * self.band.block_tokens + self.band.window - 1

    def extent(self, slot: int) -> int:
        """The token up to which the slot is mapped; 0 if nothing is."""
        least = None
        for kind, space in zip(self.band.kinds, self.spaces, strict=True):
            columns = space.columns(slot)
            tokens = kind.tokens(columns) if columns > space.first(slot) else 0
            least = tokens if least is None or tokens < least else least
        assert least is not None
        return least

    def reaches(self, slot: int, depth: int) -> bool:
        """Whether anything is mapped in the slot from this depth on."""
        return any(space.columns(slot) > max(space.first(slot), depth * columns) for space, columns in self._spaces())

    def pages(self, slot: int) -> int:
        """Pages mapped under the slot."""
        pages = 0
        for space, lanes in self._lanes:
            pages += lanes * (space.columns(slot) - space.first(slot))
        return pages

    def private_pages(self, slot: int) -> int:
        """Pages mapped under the slot that are in no block."""
        return self.pages(slot) - len(self.shared[slot].blocks) * self.shared.block_pages

    def growth(self, slot: int, tokens: int, start: int) -> int:
        """Pages that the slot lacks for those of tokens `[0, tokens)` that queries from token `start` on see."""
        return sum(
            space.lanes * count for space, count in zip(self.spaces, self._lacking(slot, tokens, start), strict=True)
        )

    def eager_growth(self, slot: int, columns: int) -> int:
        """Pages missing from the first `columns` columns of a slot whose mapped range begins with its first token."""
        return sum(space.lanes * count for space, count in zip(self.spaces, self._eager(slot, columns), strict=True))

    def replaced_pages(self, slot: int, depth: int) -> int:
        """Pages of used blocks from this depth on, which writing there would replace."""
        return self.shared.block_pages * sum(block.depth >= depth for block in self.shared.used(slot))

    def saved_pages(self, lengths: Iterable[tuple[int, int]]) -> int:
        """Additional pages that slots would need if they shared nothing; `lengths` are pairs of slot and tokens."""
        if self.band.window is None:
            return self.shared.saved_pages
        seen = [
            block
            for slot, length in lengths
            for block in self.shared.used(slot)
            if block.depth * self.band.block_tokens >= self.band.floor(length)
        ]
        return self.shared.block_pages * (len(seen) - len(set(seen)))

    def live_bytes(self, requests: Iterable[tuple[int, int, int]]) -> int:
        """Bytes of K and V of the live tokens of slots; tokens of a shared block count once.

        Args:
            requests: slot, length in tokens, and the first token of coming queries.
        """
        block_tokens, token_bytes = self.band.block_tokens, self.band.token_bytes
        spans = {slot: (self.band.first_live(length, start), length) for slot, length, start in requests}
        live = sum(length - first for first, length in spans.values())
        if self.band.window is None:
            return (live - self.shared.saved_pages // self.shared.block_pages * block_tokens) * token_bytes
        most: dict[PageBlock, int] = {}
        several = 0
        for slot, (first, length) in spans.items():
            for block in self.shared.used(slot):
                start = block.depth * block_tokens
                tokens = min(length, start + block_tokens) - max(start, first)
                if tokens > 0:
                    before = most.get(block, 0)
                    several += min(before, tokens)
                    most[block] = max(before, tokens)
        return (live - several) * token_bytes

    def has_surplus(self, slot: int, tokens: int) -> bool:
        """Whether the slot has pages past `tokens` tokens."""
        return any(space.columns(slot) > max(space.first(slot), kind.columns(tokens)) for kind, space in self._kinds())

    def surplus(self, slot: int, tokens: int, pages: int) -> list[int]:
        """How many private columns of each kind, past `tokens` tokens, make up `pages` pages or a few more."""
        stop, counts = self.shared[slot].stop, []
        for (kind, space), block_columns in zip(self._kinds(), self.shared.columns, strict=True):
            keep = max(kind.columns(tokens), stop * block_columns, space.first(slot))
            counts.append(max(0, min(space.columns(slot) - keep, -(-pages // space.lanes))))
            pages -= counts[-1] * space.lanes
        return counts

    def first_block(self, count: int) -> int:
        """The depth of the first block that queries after `count` blocks see."""
        return self.band.floor(count * self.band.block_tokens) // self.band.block_tokens

    def cached_rows(self, keys: Iterable[Key]) -> list[int]:
        """For every depth from 0 on, the number of consecutive cached blocks that end there."""
        rows = [0]
        for key in keys:
            rows.append(rows[-1] + 1 if self.shared.index.get(key) else 0)
        return rows

    def kept(self, slot: int) -> int:
        """The depth at which the cached blocks end that the idle slot begins with; 0 without any."""
        mine = self.shared[slot]
        cached = self.shared.published_prefix(slot)
        return mine.start + cached if cached else 0

    def inherited(self, slot: int) -> bool:
        """Whether the slot has pages, other than cached blocks, that an ended request may have written: private pages
        from before its current use and the pause ahead of that, or blocks that are not cached if it is idle.
        """
        tenancy = self._tenancy[slot]
        idle = tenancy % 2 == 0
        if idle and self.shared.published_prefix(slot) < len(self.shared[slot].blocks):
            return True
        stop = self.shared[slot].stop
        since = tenancy if idle else tenancy - 1
        return any(space.has_older(slot, stop * columns, since) for space, columns in self._spaces())

    def seen_blocks(self, slot: int, end: int, start: int) -> list[PageBlock]:
        """Blocks of the slot before depth `end` that queries from token `start` on see."""
        first = self.band.floor(start) // self.band.block_tokens
        return [block for block in self.shared[slot].blocks if first <= block.depth < end]

    def in_place(self, slot: int, blocks: Sequence[PageBlock], end: int) -> bool:
        """Whether the slot holds exactly these blocks, which end at depth `end`, before that depth."""
        if blocks:
            return self.shared.common(slot, blocks) == len(blocks)
        return all(space.first(slot) >= end * columns for space, columns in self._spaces())

    # Rows

    def write(self, slot: int, start: int, rows: Sequence[torch.Tensor]) -> None:
        """Copies rows to the slot's tokens from `start` on, which must be in no block: other slots may have its pages,
        and not every driver turns a write there into a fault.
        """
        assert start >= self.shared[slot].stop * self.band.block_tokens, "rows go to pages that slots may share"
        self.rows.write(slot, start, rows)

    # Plans

    def grow(self, change: Change, slot: int, tokens: int, start: int) -> None:
        """Plans the growth that `growth` counts."""
        for (kind, space), count in zip(self._kinds(), self._lacking(slot, tokens, start), strict=True):
            if count:
                self._place(change, space, slot, kind.columns(self.band.floor(start)))
                space.grow(change.transaction, slot, count, self._tenancy[slot])

    def grow_eagerly(self, change: Change, slot: int, columns: int) -> None:
        """Plans the growth that `eager_growth` counts."""
        for space, count in zip(self.spaces, self._eager(slot, columns), strict=True):
            if count:
                self._place(change, space, slot, 0)
                space.grow(change.transaction, slot, count, self._tenancy[slot])

    def put(self, change: Change, slot: int, blocks: Sequence[PageBlock], end: int) -> None:
        """Plans that the slot holds these blocks, the last of which ends at depth `end`, and nothing after them."""
        kept = self.shared.common(slot, blocks)
        self.cut(change, slot, blocks[0].depth + kept if kept else 0)
        for space, columns in self._spaces():
            self._place(change, space, slot, (end - len(blocks)) * columns)
        if kept < len(blocks):
            self.shared.attach(change, slot, blocks[kept:])

    def cut(self, change: Change, slot: int, depth: int) -> None:
        """Plans to unmap everything in the slot from this depth on, which no request may use."""
        for space, columns in self._spaces():
            count = space.columns(slot) - max(space.first(slot), depth * columns)
            space.shrink(change.transaction, slot, max(0, count))
        self.shared.detach(change, slot, max(0, depth - self.shared[slot].start))

    def drop(self, change: Change, slot: int, columns: Sequence[int]) -> None:
        """Plans to unmap this many of the slot's last columns of each kind, all of them private."""
        for space, count in zip(self.spaces, columns, strict=True):
            space.shrink(change.transaction, slot, count)

    def unmap(self, change: Change, slot: int, pages: int, needed: int, keep: int, guard: Callable[[], object]) -> bool:
        """Plans to unmap `pages` pages of the slot past `needed` tokens, starting with the last: a few more, or fewer
        if there are not enough.

        Args:
            keep: how many of its blocks stay.
            guard: called before anything is planned.

        Returns:
            Whether anything was planned.
        """
        shared = self.shared
        blocks = shared[slot].blocks
        count = len(blocks)
        columns = self.surplus(slot, needed, pages)
        freed = private = sum(columns[i] * space.lanes for i, space in enumerate(self.spaces))
        while count > keep and freed < pages:
            count -= 1
            block = blocks[count]
            if not block.users and not block.published and len(block.slots) == 1 and not block.foreign:
                freed += shared.block_pages
        if count < len(blocks):
            guard()
            self.cut(change, slot, shared[slot].start + count)
        elif private:
            guard()
            self.drop(change, slot, columns)
        else:
            return False
        return True

    def retire(self, change: Change, slot: int, start: int) -> None:
        """Plans to unmap the blocks that queries from token `start` on do not see."""
        floor = self.band.floor(start)
        self.shared.retire(change, slot, max(0, floor // self.band.block_tokens - self.shared[slot].start))
        for kind, space in self._kinds():
            count = min(kind.columns(floor), space.columns(slot)) - space.first(slot)
            space.retire(change.transaction, slot, max(0, count))

    def _kinds(self) -> Iterator[tuple[TensorKind, _native.AddressSpace]]:
        return zip(self.band.kinds, self.spaces, strict=True)

    def _spaces(self) -> Iterator[tuple[_native.AddressSpace, int]]:
        """The spaces, each with its number of columns per block."""
        return zip(self.spaces, self.shared.columns, strict=True)

    @staticmethod
    def _empty(space: _native.AddressSpace, slot: int) -> bool:
        return space.first(slot) == space.columns(slot)

    def _place(self, change: Change, space: _native.AddressSpace, slot: int, column: int) -> None:
        """Plans that an empty slot's mapped range will begin with this column."""
        if self._empty(space, slot) and space.first(slot) != column:
            space.place(change.transaction, slot, column)

    def _lacking(self, slot: int, tokens: int, start: int) -> list[int]:
        """Columns of each kind that `growth` counts."""
        floor = self.band.floor(start)
        return [
            max(0, kind.columns(tokens) - (kind.columns(floor) if self._empty(space, slot) else space.columns(slot)))
            for kind, space in self._kinds()
        ]

    def _eager(self, slot: int, columns: int) -> list[int]:
        """Columns of each kind that `eager_growth` counts."""
        return [
            max(0, min(columns, kind.run_pages) - (0 if self._empty(space, slot) else space.columns(slot)))
            for kind, space in self._kinds()
        ]
