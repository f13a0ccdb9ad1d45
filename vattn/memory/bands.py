"""All bands of a cache as one: the only place that loops over them.

A band is the virtual tensors of layers with one sliding window, or none (`vattn.memory.band`). Blocks of all bands have
the same tokens, so a prefix is a number of blocks, and a request uses the same number of them in every band.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from vattn import _native
from vattn.layout import Layout
from vattn.memory.band import BandPages
from vattn.memory.journal import Change
from vattn.memory.pool import PagePool
from vattn.memory.sharing import PageBlock, SharedBlocks, State
from vattn.prefix import Key, PrefixIndex

K = TypeVar("K")
V = TypeVar("V")

Published = tuple[tuple[SharedBlocks, PageBlock], ...]


@dataclass(frozen=True)
class Prefix:
    """Whole blocks that a slot can start with.

    Attributes:
        count: how many.
        blocks: per band, those of them that are seen from behind: the last ones.
    """

    count: int
    blocks: list[list[PageBlock]]


class Rows(NamedTuple):
    """Rows of a slot's tokens in one band: from token `start` on, per virtual tensor `[runs, bytes]`."""

    start: int
    views: list[torch.Tensor]


class Facts(NamedTuple):
    """What is mapped under a slot.

    Attributes:
        blocks: how many blocks, in all bands.
        extent: tokens that are mapped from its start.
        pages: how many pages, of which `private` are in no block.
        tail: the key of its last block, if it has one.
    """

    blocks: int
    extent: int
    pages: int
    private: int
    tail: Key | None


class Bands:
    """The bands of one cache; used under the pool's lock.

    Args:
        layout: their geometry.
        pool: where pages come from.

    Attributes:
        block_tokens: tokens of a block.
        windowed: whether a band has a sliding window.
        used_tokens: per slot, the tokens up to which its request uses blocks; of those that use any.
    """

    def __init__(self, layout: Layout, pool: PagePool) -> None:
        self.block_tokens = layout.bands[0].block_tokens
        self.windowed = any(band.window is not None for band in layout.bands)
        self.used_tokens: dict[int, int] = {}
        self._bands = [BandPages(band, layout.slots, pool, self.used_tokens) for band in layout.bands]
        # What is mapped behind a window is of no use to the next request, so it says nothing where there is other.
        self._lasting = [band for band in self._bands if band.band.window is None] or self._bands.copy()

    # What is mapped

    @property
    def spaces(self) -> list[_native.AddressSpace]:
        """The virtual tensors, by kind."""
        return [space for band in self._bands for space in band.spaces]

    def extent(self, slot: int) -> int:
        """Tokens that the slot's pages back, once the worker is done with them."""
        return min([band.extent(slot) for band in self._bands])

    def lasting_extent(self, slot: int) -> int:
        """`extent` of what a next request can use."""
        return min([band.extent(slot) for band in self._lasting])

    def pages(self, slot: int) -> int:
        """Pages that are mapped under the slot."""
        return sum([band.pages(slot) for band in self._bands])

    def private_pages(self, slot: int) -> int:
        """Those of them that are in no block."""
        return sum([band.private_pages(slot) for band in self._bands])

    def facts(self, slot: int) -> Facts:
        """What there is of the slot, at once."""
        count = pages = private = 0
        for band in self._bands:
            mapped, blocks = band.pages(slot), len(band.shared[slot].blocks)
            count += blocks
            pages += mapped
            private += mapped - blocks * band.shared.block_pages
        main = self._lasting[0].shared[slot].blocks
        return Facts(count, self.lasting_extent(slot), pages, private, main[-1].key if main else None)

    def growth(self, slot: int, tokens: int, start: int) -> int:
        """Pages that the slot lacks for tokens `[0, tokens)`, as far as queries from token `start` on see them."""
        return sum([band.growth(slot, tokens, start) for band in self._bands])

    def eager_growth(self, slot: int, columns: int) -> int:
        """Pages that the slot, which begins with its first token, lacks to have so many columns."""
        return sum(band.eager_growth(slot, columns) for band in self._bands)

    def begins(self, slot: int) -> bool:
        """Whether what is mapped of the slot begins with its first token; or nothing is."""
        return all(band.begins(slot) for band in self._bands)

    def sees(self, slot: int, start: int) -> bool:
        """Whether what is mapped of the slot lies where it can be grown for queries from token `start` on."""
        return all(band.sees(slot, start) for band in self._bands)

    def outlived(self, slot: int, start: int) -> bool:
        """Whether blocks of the slot are mapped that queries from token `start` on do not see."""
        return any(band.outlived(slot, start) for band in self._bands)

    def outlives_at(self, slot: int, default: int) -> int:
        """The token from which on queries do not see a first block that is mapped, or the default if that is less."""
        return min([band.outlives_at(slot, default) for band in self._bands] + [default])

    def has_surplus(self, slot: int, tokens: int) -> bool:
        """Whether the slot has pages past `tokens` tokens."""
        return any(band.has_surplus(slot, tokens) for band in self._bands)

    # Blocks

    def used(self, slot: int) -> int:
        """How many blocks the slot's request uses, those behind windows included."""
        return self.used_tokens.get(slot, 0) // self.block_tokens

    def stop(self, slot: int) -> int:
        """The depth behind the last block that the slot has; 0 without any."""
        return max([band.shared[slot].stop for band in self._bands])

    def block_pages(self, state: State) -> int:
        """Pages of the blocks in that state, each counted once."""
        return sum([band.shared.pages(state) for band in self._bands])

    @property
    def held_pages(self) -> int:
        """Pages of all blocks, each counted once."""
        return sum([band.shared.held_pages for band in self._bands])

    @property
    def shared_pages(self) -> int:
        """Pages that several running requests use, each counted once."""
        return sum(band.shared.shared_pages() for band in self._bands)

    def saved_pages(self, lengths: Collection[tuple[int, int]]) -> int:
        """Pages more that slots would need if they shared nothing; `lengths` are pairs of slot and tokens."""
        return sum(band.saved_pages(lengths) for band in self._bands)

    def live_bytes(self, requests: Collection[tuple[int, int, int]]) -> int:
        """Bytes of K and V of the live tokens of slots; those of a block that several have count once.

        Args:
            requests: slot, tokens, and the first of the queries to come.
        """
        return max(0, sum(band.live_bytes(requests) for band in self._bands))

    def replaced_pages(self, slot: int, depth: int) -> int:
        """Pages of the blocks from that depth on that the slot's request uses, and that writing there would replace."""
        return sum(band.replaced_pages(slot, depth) for band in self._bands)

    def left_over_pages(self, slots: Collection[int]) -> int:
        """Pages of blocks without users in those of the slots that have blocks past what their requests use."""
        pages = 0
        for band in self._bands:
            past = (slot for slot in slots if band.shared[slot].stop > self.used(slot))
            unused = {block for slot in past for block in band.shared[slot].blocks if not block.users}
            pages += band.shared.block_pages * len(unused)
        return pages

    # Prefixes

    def find(self, keys: Iterable[Key]) -> list[Key]:
        """The longest prefix of keys whose blocks are all cached, as far as a request behind it sees them."""
        whole = [band.shared.index for band in self._bands if band.band.window is None]
        found = []
        for key in keys:
            if not all(index.get(key) for index in whole):
                break
            found.append(key)
        windowed = [(band, band.cached_rows(found)) for band in self._bands if band.band.window is not None]
        count = len(found)
        while count and any(rows[count] < count - band.first_block(count) for band, rows in windowed):
            count -= 1
        return found[:count]

    def prefix(self, keys: Sequence[Key]) -> Prefix:
        """The blocks with these keys, of which all that are seen are cached."""
        blocks = []
        for band in self._bands:
            found = map(band.shared.index.get, keys[band.first_block(len(keys)) :])
            blocks.append([block for block in found if block is not None])
        return Prefix(len(keys), blocks)

    def prefix_of(self, slot: int, count: int, start: int) -> Prefix:
        """The first `count` blocks of the slot, as far as queries from token `start` on see them."""
        return Prefix(count, [band.seen_blocks(slot, count, start) for band in self._bands])

    def lasting_blocks(self, prefix: Prefix) -> list[PageBlock]:
        """The blocks of a prefix in the first band without a window, or else in the first one."""
        return prefix.blocks[self._bands.index(self._lasting[0])]

    def in_place(self, slot: int, prefix: Prefix) -> int:
        """How many blocks of a prefix the slot can be used with as it is."""
        if not self.windowed:
            return self._bands[0].shared.common(slot, prefix.blocks[0])
        pairs = zip(self._bands, prefix.blocks, strict=True)
        return prefix.count if all(band.in_place(slot, blocks, prefix.count) for band, blocks in pairs) else 0

    def compare(self, slot: int, prefix: Prefix, usable: int) -> tuple[int, int]:
        """How many of the first `usable` blocks of a prefix the slot lacks, and how many others it would lose."""
        missing = lost = 0
        for band, blocks in zip(self._bands, prefix.blocks, strict=True):
            common = band.shared.common(slot, blocks)
            missing += max(0, min(usable, len(blocks)) - common)
            lost += len(band.shared[slot].blocks) - common
        return missing, lost

    def first_copied(self, prefix: Prefix, start: int) -> list[int]:
        """Per band, the first token behind a prefix that queries from token `start` on see."""
        return [
            prefix.count * self.block_tokens if blocks else band.band.floor(start)
            for band, blocks in zip(self._bands, prefix.blocks, strict=True)
        ]

    def check_keys(self, slot: int, keys: Sequence[Key]) -> None:
        """Raises TokenMismatch where a block of the slot, which others have as well, has another key than this one."""
        for band in self._bands:
            band.shared.check_keys(slot, keys)

    def victims(self) -> contextlib.closing[Generator[tuple[BandPages, PageBlock]]]:
        """Cached blocks without users, in the order of eviction, with their bands. Each may be evicted while it is the
        current one.
        """

        def merged() -> Generator[tuple[BandPages, PageBlock]]:
            with contextlib.ExitStack() as stack:
                streams = [
                    zip(itertools.repeat(band), stack.enter_context(contextlib.closing(band.shared.index.victims())))
                    for band in self._bands
                ]
                yield from heapq.merge(*streams, key=lambda victim: PrefixIndex.order(victim[1]))

        return contextlib.closing(merged())

    # Rows

    def save(self, slot: int, first: int, end: int, start: int) -> list[Rows]:
        """Copies of the rows of tokens `[first, end)`, per band, as far as queries from token `start` on see them."""
        starts = [min(end, max(first, band.band.floor(start))) for band in self._bands]
        return [
            Rows(at, [rows.clone() for rows in band.rows.views(slot, at, end)])
            for at, band in zip(starts, self._bands, strict=True)
        ]

    def write(self, slot: int, rows: Sequence[Rows]) -> None:
        """Writes rows back."""
        for band, (start, views) in zip(self._bands, rows, strict=True):
            band.rows.write(slot, start, views)

    def copy(self, source: int, slot: int, first: Sequence[int], end: int) -> None:
        """Copies the rows of tokens from `first`, per band, to `end`."""
        for band, start in zip(self._bands, first, strict=True):
            band.rows.write(slot, start, band.rows.views(source, start, end))

    # Decisions

    def use(self, change: Change, slot: int, count: int) -> None:
        """The slot's request uses its first `count` blocks from now on."""
        before = self.used_tokens.get(slot, 0)
        if count * self.block_tokens == before:
            return
        change.on_revert(lambda: store(self.used_tokens, slot, before))
        store(self.used_tokens, slot, count * self.block_tokens)
        for band in self._bands:
            band.shared.end_moved(slot, before // self.block_tokens)

    def adopt(self, change: Change, slot: int, count: int) -> None:
        """Makes blocks of the slot's private pages, and lets its request use the first `count` of its blocks, or more
        if it does already.
        """
        for band in self._bands:
            band.shared.adopt(change, slot, count)
        self.use(change, slot, max(count, self.used(slot)))

    def publish(self, change: Change, slot: int, keys: Sequence[Key], origin: int) -> Published:
        """Publishes the blocks that the slot's request uses and that have keys.

        Args:
            keys: from depth 0 on.
            origin: the depth before which blocks of windows may lack tokens that were never copied in.

        Returns:
            Those that were not published before, nor another one in their place.
        """
        return tuple(
            (band.shared, block)
            for band in self._bands
            for block in band.shared.publish(change, slot, keys, 0 if band.band.window is None else origin)
        )

    def grow(self, change: Change, slot: int, tokens: int, start: int) -> None:
        """Plans the growth that `growth` counts."""
        for band in self._bands:
            band.grow(change, slot, tokens, start)

    def grow_eagerly(self, change: Change, slot: int, columns: int) -> None:
        """Plans the growth that `eager_growth` counts."""
        for band in self._bands:
            band.grow_eagerly(change, slot, columns)

    def put(self, change: Change, slot: int, prefix: Prefix, guard: Callable[[], object]) -> bool:
        """Plans that the slot starts with a prefix; whether anything had to be.

        Args:
            guard: called before anything is planned.
        """
        pairs = zip(self._bands, prefix.blocks, strict=True)
        lacking = [(band, blocks) for band, blocks in pairs if not band.in_place(slot, blocks, prefix.count)]
        if prefix.count and lacking:
            guard()
            for band, blocks in lacking:
                band.put(change, slot, blocks, prefix.count)
            return True
        return False

    def cut(
        self, change: Change, slot: int, depth: int, guard: Callable[[], object], *, unseen_from: int | None = None
    ) -> bool:
        """Plans to unmap all that the slot has from that depth on; whether that was anything.

        Args:
            guard: called before anything is planned.
            unseen_from: only in bands that have blocks from that depth on, or whose pages do not begin where queries
                from this token on see them.
        """
        cut = [
            band
            for band in self._bands
            if (unseen_from is None or band.shared[slot].stop > depth or not band.sees(slot, unseen_from))
            and band.reaches(slot, depth)
        ]
        if cut:
            guard()
        for band in cut:
            band.cut(change, slot, depth)
        return bool(cut)

    def cut_behind_windows(self, change: Change, slot: int, guard: Callable[[], object]) -> bool:
        """Plans to unmap the pages of an idle slot with which no request can begin, all but cached blocks; whether
        there were any.
        """
        cut = [band for band in self._bands if not band.begins(slot)]
        cut = [band for band in cut if band.reaches(slot, band.shared[slot].stop)]
        if cut:
            guard()
        for band in cut:
            band.cut(change, slot, band.shared[slot].stop)
        return bool(cut)

    def unmap(
        self,
        change: Change,
        slot: int,
        missing: Callable[[], int],
        needed: int,
        guard: Callable[[], object],
        *,
        idle: bool,
        cached: bool,
    ) -> bool:
        """Plans to unmap what the slot has past `needed` tokens, until nothing is missing; whether there was anything.

        Args:
            missing: pages that are still missing.
            guard: called before anything is planned.
            idle: no request has the slot, so blocks that are neither cached nor used go as well.
            cached: so do cached blocks; they stay cached without being mapped. Goes on when nothing is missing.
        """
        unmapped = False
        for band in self._bands:
            pages = missing()
            if pages > 0 or cached:
                keep = band.shared.cached_prefix(slot) if idle else len(band.shared.used(slot))
                unmapped |= band.unmap(change, slot, pages, needed, None if cached else keep, guard)
        return unmapped

    def retire(self, change: Change, slot: int, start: int) -> None:
        """Plans to unmap the blocks of windows that queries from token `start` on do not see."""
        for band in self._bands:
            if band.band.window is not None:
                band.retire(change, slot, start)

    # As a whole

    def refresh(self) -> None:
        """Derives anew what follows from the books of blocks."""
        for band in self._bands:
            band.shared.refresh()

    def check(self, pool: _native.PagePool) -> None:
        """Asserts that mappings and blocks are where the books say."""
        for space in self.spaces:
            space.check()
        held = [pages for band in self._bands for pages in band.shared.held()]
        _native.check_references(pool, self.spaces, held)
        for band in self._bands:
            band.shared.check()
        assert all(used > 0 for used in self.used_tokens.values()), "a slot is listed that uses no blocks"

    def give_back(self) -> Callable[[Change], None]:
        """A plan to give up every page. It does not keep the cache alive."""
        bands = self._bands

        def plan(change: Change) -> None:
            spaces = [space for band in bands for space in band.spaces]
            if any(space.columns(slot) > space.first(slot) for space in spaces for slot in range(space.slots)):
                change.transaction.wait_for(None)  # kernels that read them, on whichever stream
            for space in spaces:
                for slot in range(space.slots):
                    space.shrink(change.transaction, slot, space.columns(slot) - space.first(slot))
            for band in bands:
                band.shared.forget(change)

        return plan

    @property
    def cleared(self) -> bool:
        """Whether `clear` was called."""
        return not self._bands

    def clear(self) -> None:
        """Lets go of the virtual tensors, with nothing mapped in them."""
        self._bands.clear()
        self._lasting.clear()


def store(books: dict[K, V], key: K, value: V) -> None:
    """Of books that list only what is not 0."""
    if value:
        books[key] = value
    else:
        books.pop(key, None)
