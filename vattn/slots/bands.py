"""All bands of a cache as one: the only place that loops over them.

A band is the virtual tensors of all layers with the same sliding window, or with none (`vattn.slots.band`). Blocks
have the same number of tokens in all bands, so a prefix is a number of blocks, and a request uses the same number of
them in every band.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from vattn import _native
from vattn.layout import Layout
from vattn.pool.core import Core
from vattn.pool.fences import guard_all
from vattn.pool.journal import GONE, Change
from vattn.prefix import Key, PrefixIndex
from vattn.slots.band import BandPages
from vattn.slots.blocks import PageBlock, SharedBlocks, State

Published = tuple[tuple[SharedBlocks, PageBlock], ...]


@dataclass(frozen=True)
class Prefix:
    """Whole blocks that a slot can start with.

    Attributes:
        count: number of blocks.
        blocks: per band, those of them that queries after the prefix see: the last ones.
    """

    count: int
    blocks: list[list[PageBlock]]


class SavedRows(NamedTuple):
    """Rows of a slot's tokens in one band, from token `start` on: per virtual tensor, `[runs, bytes]`."""

    start: int
    views: list[torch.Tensor]


class Facts(NamedTuple):
    """What is mapped under a slot.

    Attributes:
        blocks: number of blocks, over all bands.
        extent: number of tokens mapped from its start.
        pages: number of pages.
        private: how many of these pages are in no block.
        tail: the key of its last block, if it has one.
    """

    blocks: int
    extent: int
    pages: int
    private: int
    tail: Key | None


class Observer(Protocol):
    """Keeps other books in step with what is mapped."""

    def changed(self, slot: int) -> None:
        """The pages or blocks of a slot changed."""


class Bands:
    """The bands of one cache; used under the pool's lock.

    Args:
        layout: the geometry of the cache.
        core: the pool that pages come from.
        guard_rows: rows past a length that kernels read without using them.

    Attributes:
        block_tokens: tokens per block.
        kinds: the kinds of virtual tensors, over all bands.
        windowed: whether any band has a sliding window.
        used_tokens: per slot, the token at which the blocks that its request uses end; only for slots that use any.
        tenancy: per slot, how often it was taken and left: odd while a request has it. Pages are marked with it as they
            are mapped, which tells those of a request from those of the one before it.
    """

    def __init__(self, layout: Layout, core: Core, guard_rows: int) -> None:
        self.block_tokens = layout.bands[0].block_tokens
        self.windowed = any(band.window is not None for band in layout.bands)
        self.used_tokens: dict[int, int] = {}
        self.tenancy = [0] * layout.slots
        self.kinds = layout.kinds
        self._driver = core.driver
        self._observer: Callable[[], Observer | None] = lambda: None
        self._bands = [
            BandPages(band, layout.slots, core, self.used_tokens, self.tenancy, guard_rows) for band in layout.bands
        ]
        # The next request cannot use pages of a moved window, so bands without a window decide, if there are any.
        self._lasting = [band for band in self._bands if band.band.window is None] or self._bands.copy()

    def report_to(self, observer: Observer) -> None:
        """Reports every slot whose pages or blocks change from now on; keeps no reference, as the observer has one."""
        self._observer = weakref.ref(observer)

    def _changed(self, slot: int) -> None:
        if (observer := self._observer()) is not None:
            observer.changed(slot)

    # What is mapped

    @property
    def spaces(self) -> list[_native.AddressSpace]:
        """The virtual tensors, by kind."""
        return [space for band in self._bands for space in band.spaces]

    def extent(self, slot: int) -> int:
        """Tokens that the slot's pages back, once the worker has mapped them."""
        return min([band.extent(slot) for band in self._bands])

    def lasting_extent(self, slot: int) -> int:
        """`extent` in the bands whose pages the next request can use."""
        return min([band.extent(slot) for band in self._lasting])

    @property
    def column_pages(self) -> int:
        """Pages of one column of every kind."""
        return sum([space.lanes for space in self.spaces])

    def pages(self, slot: int) -> int:
        """Pages mapped under the slot."""
        return sum([band.pages(slot) for band in self._bands])

    def private_pages(self, slot: int) -> int:
        """Pages mapped under the slot that are in no block."""
        return sum([band.private_pages(slot) for band in self._bands])

    def facts(self, slot: int) -> Facts:
        """All facts about what is mapped under the slot, gathered in one pass."""
        count = pages = private = 0
        for band in self._bands:
            mapped, blocks = band.pages(slot), len(band.shared[slot].blocks)
            count += blocks
            pages += mapped
            private += mapped - blocks * band.shared.block_pages
        main = self._lasting[0].shared[slot].blocks
        return Facts(count, self.lasting_extent(slot), pages, private, main[-1].key if main else None)

    def growth(self, slot: int, tokens: int, start: int) -> int:
        """Pages that the slot lacks for those of tokens `[0, tokens)` that queries from token `start` on see."""
        return sum([band.growth(slot, tokens, start) for band in self._bands])

    def eager_growth(self, slot: int, columns: int) -> int:
        """Pages missing from the first `columns` columns of a slot whose mapped range begins with its first token."""
        return sum(band.eager_growth(slot, columns) for band in self._bands)

    def begins(self, slot: int) -> bool:
        """Whether the mapped range of the slot begins with its first token, or is empty, in every band."""
        return all(band.begins(slot) for band in self._bands)

    def sees(self, slot: int, start: int) -> bool:
        """Whether every band's mapped range of the slot can be grown to what queries from `start` on see."""
        return all(band.sees(slot, start) for band in self._bands)

    def outlived(self, slot: int, start: int) -> bool:
        """Whether blocks are mapped in the slot that queries from token `start` on do not see."""
        return any(band.outlived(slot, start) for band in self._bands)

    def outlives_at(self, slot: int, default: int) -> int:
        """The first token whose query no longer sees the first mapped block of some band; at most the default."""
        return min([band.outlives_at(slot, default) for band in self._bands] + [default])

    def inherited(self, slot: int) -> bool:
        """Whether the slot has pages, other than cached blocks, that an ended request may have written."""
        return any(band.inherited(slot) for band in self._bands)

    def has_surplus(self, slot: int, tokens: int) -> bool:
        """Whether the slot has pages past `tokens` tokens."""
        return any(band.has_surplus(slot, tokens) for band in self._bands)

    # Blocks

    def used(self, slot: int) -> int:
        """How many blocks the slot's request uses, including those that have left windows."""
        return self.used_tokens.get(slot, 0) // self.block_tokens

    def stop(self, slot: int) -> int:
        """The depth at which the slot's last block ends; 0 without any."""
        return max([band.shared[slot].stop for band in self._bands])

    def block_pages(self, state: State) -> int:
        """Pages of the blocks in this state, each counted once."""
        return sum([band.shared.pages(state) for band in self._bands])

    @property
    def held_pages(self) -> int:
        """Pages of all blocks, each counted once."""
        return sum([band.shared.held_pages for band in self._bands])

    @property
    def shared_pages(self) -> int:
        """Pages that several running requests use, each counted once."""
        return sum(band.shared.shared_pages() for band in self._bands)

    def shared_tokens(self, slot: int) -> int:
        """Tokens at the slot's start whose blocks several running requests use, in the bands without a window."""
        depths = [block.depth for block in self._lasting[0].shared.used(slot) if block.users > 1]
        return (max(depths, default=-1) + 1) * self.block_tokens

    def saved_pages(self, lengths: Collection[tuple[int, int]]) -> int:
        """Additional pages that slots would need if they shared nothing; `lengths` are pairs of slot and tokens."""
        return sum(band.saved_pages(lengths) for band in self._bands)

    def live_bytes(self, requests: Collection[tuple[int, int, int]]) -> int:
        """Bytes of K and V of the live tokens of slots; tokens of a shared block count once.

        Args:
            requests: slot, length in tokens, and the first token of coming queries.
        """
        return max(0, sum(band.live_bytes(requests) for band in self._bands))

    def replaced_pages(self, slot: int, depth: int) -> int:
        """Pages of used blocks from this depth on, which writing there would replace."""
        return sum(band.replaced_pages(slot, depth) for band in self._bands)

    def left_over_pages(self, slots: Collection[int]) -> int:
        """Pages of the blocks without users that are mapped in these slots, each counted once, without pinned ones."""
        pages = 0
        for band in self._bands:
            past = (slot for slot in slots if band.shared[slot].stop > self.used(slot))
            unused = {
                block
                for slot in past
                for block in band.shared[slot].blocks
                if block.state in (State.CACHED, State.PARKED) and not block.foreign
            }
            pages += band.shared.block_pages * len(unused)
        return pages

    # Prefixes

    @property
    def only(self) -> BandPages:
        """The band, of a cache that has one."""
        (band,) = self._bands
        return band

    def find(self, keys: Iterable[Key]) -> list[Key]:
        """The longest prefix of keys for which all blocks that queries after it see are cached."""
        whole = [band.shared.index for band in self._bands if band.band.window is None]
        cached = whole[0].get if len(whole) == 1 else lambda key: all(index.get(key) for index in whole)
        found = list(itertools.takewhile(cached, keys))
        windowed = [(band, band.cached_rows(found)) for band in self._bands if band.band.window is not None]
        count = len(found)
        while count and any(rows[count] < count - band.first_block(count) for band, rows in windowed):
            count -= 1
        return found[:count]

    def prefix(self, keys: Sequence[Key]) -> Prefix:
        """The prefix with these keys, as returned by `find`."""
        blocks = []
        for band in self._bands:
            found = map(band.shared.index.get, keys[band.first_block(len(keys)) :])
            blocks.append([block for block in found if block is not None])
        return Prefix(len(keys), blocks)

    def prefix_of(self, slot: int, count: int, start: int) -> Prefix:
        """Those of the first `count` blocks of the slot that queries from token `start` on see."""
        return Prefix(count, [band.seen_blocks(slot, count, start) for band in self._bands])

    def lasting_blocks(self, prefix: Prefix) -> list[PageBlock]:
        """The blocks of a prefix in the first band without a window, or else in the first band."""
        return prefix.blocks[self._bands.index(self._lasting[0])]

    def in_place(self, slot: int, prefix: Prefix) -> int:
        """How many blocks of a prefix the slot offers without any change to its mappings."""
        if not self.windowed:
            return self._bands[0].shared.common(slot, prefix.blocks[0])
        pairs = zip(self._bands, prefix.blocks, strict=True)
        return prefix.count if all(band.in_place(slot, blocks, prefix.count) for band, blocks in pairs) else 0

    def compare(self, slot: int, prefix: Prefix, usable: int) -> tuple[int, int]:
        """How many of the first `usable` blocks of a prefix the slot lacks, and how many other blocks it would lose."""
        missing = lost = 0
        for band, blocks in zip(self._bands, prefix.blocks, strict=True):
            common = band.shared.common(slot, blocks)
            missing += max(0, min(usable, len(blocks)) - common)
            lost += len(band.shared[slot].blocks) - common
        return missing, lost

    def first_copied(self, prefix: Prefix, start: int) -> list[int]:
        """Per band, the first token after a prefix that queries from token `start` on see."""
        return [
            prefix.count * self.block_tokens if blocks else band.band.floor(start)
            for band, blocks in zip(self._bands, prefix.blocks, strict=True)
        ]

    def check_keys(self, slot: int, keys: Sequence[Key]) -> None:
        """Raises TokenMismatch if a block of the slot, shared with other slots, already has a different key."""
        for band in self._bands:
            band.shared.check_keys(slot, keys)

    def victims(self) -> contextlib.closing[Generator[tuple[BandPages, PageBlock]]]:
        """Cached blocks without users and their bands, in order of eviction. The caller may `evict` the current one."""

        def merged() -> Generator[tuple[BandPages, PageBlock]]:
            with contextlib.ExitStack() as stack:
                streams = [
                    zip(itertools.repeat(band), stack.enter_context(contextlib.closing(band.shared.index.victims())))
                    for band in self._bands
                ]
                yield from heapq.merge(*streams, key=lambda victim: PrefixIndex.order(victim[1]))

        return contextlib.closing(merged())

    # Rows

    def save(self, slot: int, first: int, end: int, start: int) -> list[SavedRows]:
        """Copies, per band, the rows of those of tokens `[first, end)` that queries from token `start` on see."""
        starts = [min(end, max(first, band.band.floor(start))) for band in self._bands]
        return [
            SavedRows(at, [rows.clone() for rows in band.rows.views(slot, at, end)])
            for at, band in zip(starts, self._bands, strict=True)
        ]

    def write(self, slot: int, rows: Sequence[SavedRows]) -> None:
        """Writes saved rows back."""
        for band, (start, views) in zip(self._bands, rows, strict=True):
            band.write(slot, start, views)

    def copy(self, source: int, slot: int, first: Sequence[int], end: int) -> None:
        """Copies the rows of tokens `[first[band], end)` of each band from slot `source` to `slot`."""
        for band, start in zip(self._bands, first, strict=True):
            band.write(slot, start, band.rows.views(source, start, end))

    # Decisions

    def use(self, change: Change, slot: int, count: int) -> None:
        """Makes the first `count` blocks of the slot those that its request uses."""
        before = self.used_tokens.get(slot, 0)
        if count * self.block_tokens == before:
            return
        change.put(self.used_tokens, slot, count * self.block_tokens or GONE)
        for band in self._bands:
            band.shared.end_moved(slot, before // self.block_tokens)

    def turn(self, change: Change, slot: int) -> None:
        """Counts that a request takes or leaves the slot."""
        change.put(self.tenancy, slot, self.tenancy[slot] + 1)

    def adopt(self, change: Change, slot: int, count: int) -> None:
        """Turns private pages of the slot into blocks, so that its request uses at least the first `count` blocks."""
        for band in self._bands:
            band.shared.adopt(change, slot, count)
        self.use(change, slot, max(count, self.used(slot)))
        self._changed(slot)

    def publish(self, change: Change, slot: int, keys: Sequence[Key], known: int, origin: int) -> Published:
        """Publishes those of the used blocks for which there are keys.

        Args:
            keys: the keys of the slot's blocks, from depth 0 on.
            known: the depth up to which the blocks had their keys before.
            origin: the depth before which blocks of bands with windows may lack tokens that were never copied in.

        Returns:
            The newly published blocks, without those whose keys were in the index before.
        """
        published = tuple(
            (band.shared, block)
            for band in self._bands
            for block in band.shared.publish(change, slot, keys, 0 if band.band.window is None else origin)
        )
        # Idle slots that share blocks are found by the key of their last one.
        named = (block for band in self._bands for block in band.shared[slot].after(known))
        for other in {other for block in named for other in block.slots if other != slot}:
            self._changed(other)
        return published

    def committed(self, slot: int, first: int) -> Published:
        """The blocks of the slot's request that have keys, from depth `first` on."""
        return tuple(
            (band.shared, block)
            for band in self._bands
            for block in band.shared.used(slot)
            if block.depth >= first and block.key is not None
        )

    def with_keys(self, keys: Set[Key]) -> Published:
        """The blocks with one of these keys, in an index or in slots."""
        return tuple((band.shared, block) for band in self._bands for block in band.shared.with_keys(keys))

    def withdraw_hidden(self, keys: Set[Key]) -> None:
        """Has other processes learn that what they have still of evicted blocks with these keys is wrong."""
        for band in self._bands:
            band.shared.withdraw_hidden(keys)

    def keys(self) -> Iterator[Key]:
        """The keys of all blocks, in an index or in slots, or evicted while other processes had them."""
        return itertools.chain.from_iterable(band.shared.keys() for band in self._bands)

    def grow(self, change: Change, slot: int, tokens: int, start: int) -> None:
        """Plans the growth that `growth` counts."""
        for band in self._bands:
            band.grow(change, slot, tokens, start)
        self._changed(slot)

    def grow_eagerly(self, change: Change, slot: int, columns: int) -> None:
        """Plans the growth that `eager_growth` counts."""
        for band in self._bands:
            band.grow_eagerly(change, slot, columns)
        self._changed(slot)

    def put(self, change: Change, slot: int, prefix: Prefix, guard: Callable[[], object]) -> None:
        """Plans that the slot starts with a prefix.

        Args:
            guard: called before anything is planned.
        """
        pairs = zip(self._bands, prefix.blocks, strict=True)
        lacking = [(band, blocks) for band, blocks in pairs if not band.in_place(slot, blocks, prefix.count)]
        if prefix.count and lacking:
            guard()
            for band, blocks in lacking:
                band.put(change, slot, blocks, prefix.count)
            self._changed(slot)

    def cut(
        self, change: Change, slot: int, depth: int, guard: Callable[[], object], *, unseen_from: int | None = None
    ) -> None:
        """Plans to unmap everything in the slot from this depth on.

        Args:
            guard: called before anything is planned.
            unseen_from: if given, only in bands that have blocks from the depth on, or whose mapped range cannot be
                grown to what queries from this token on see.
        """
        cut = [
            band
            for band in self._bands
            if (unseen_from is None or band.shared[slot].stop > depth or not band.sees(slot, unseen_from))
            and band.reaches(slot, depth)
        ]
        self._cut(change, slot, [(band, depth) for band in cut], guard)

    def vacate(
        self, change: Change, slot: int, guard: Callable[[], object], *, keep_cached: bool, keep_parked: bool
    ) -> None:
        """Plans to unmap pages of an idle slot.

        Args:
            guard: called before anything is planned.
            keep_cached: cached blocks stay.
            keep_parked: so do all other pages with which a request can start; private pages behind a window are none.
        """

        def end(band: BandPages) -> int | None:
            if not keep_cached:
                return 0
            if not keep_parked:
                return band.kept(slot)
            return None if band.begins(slot) else band.shared[slot].stop

        ends = [(band, depth) for band in self._bands if (depth := end(band)) is not None and band.reaches(slot, depth)]
        self._cut(change, slot, ends, guard)

    def _cut(
        self, change: Change, slot: int, ends: Sequence[tuple[BandPages, int]], guard: Callable[[], object]
    ) -> None:
        if ends:
            guard()
            for band, depth in ends:
                band.cut(change, slot, depth)
            self._changed(slot)

    def unmap(
        self,
        change: Change,
        slot: int,
        missing: Callable[[], int],
        needed: int,
        guard: Callable[[], object],
        *,
        idle: bool,
    ) -> None:
        """Plans to unmap pages of the slot past `needed` tokens until none are missing.

        Args:
            missing: returns the number of pages that are still missing.
            guard: called before anything is planned.
            idle: no request has the slot, so blocks that are neither cached nor used are unmapped too.
        """
        unmapped = False
        for band in self._bands:
            pages = missing()
            if pages > 0:
                keep = band.shared.cached_prefix(slot) if idle else len(band.shared.used(slot))
                unmapped |= band.unmap(change, slot, pages, needed, keep, guard)
        if unmapped:
            self._changed(slot)

    def retire(self, change: Change, slot: int, start: int) -> None:
        """Plans to unmap, in bands with windows, the blocks that queries from token `start` on do not see."""
        for band in self._bands:
            if band.band.window is not None:
                band.retire(change, slot, start)
        self._changed(slot)

    def evict(self, change: Change, band: BandPages, block: PageBlock, guard: Callable[[int], object]) -> None:
        """Plans to unmap a block, and what follows it, wherever it is mapped, and to evict it if it is cached.

        Args:
            guard: called with each of these slots before anything is planned there.
        """
        for slot in tuple(block.slots):
            guard(slot)
            band.cut(change, slot, block.depth)
            self._changed(slot)
        if block.published:
            band.shared.evict(change, block)

    # Maintenance

    def refresh(self) -> None:
        """Recomputes all state derived from the books of blocks."""
        for band in self._bands:
            band.shared.refresh()

    def check(self, pool: _native.PagePool) -> None:
        """Asserts that mappings and blocks agree with the books."""
        for space in self.spaces:
            space.check()
        held = [pages for band in self._bands for pages in band.shared.held()]
        held += [pages for band in self._bands if band.shared.shares for pages in band.shared.shares.held]
        _native.check_references(pool, self.spaces, held)
        for band in self._bands:
            band.shared.check()
        assert all(used > 0 for used in self.used_tokens.values()), "a slot is listed that uses no blocks"

    def give_back(self) -> Callable[[Change], None]:
        """Returns a plan that gives up every page, as soon as no kernel reads it. It does not keep the cache alive, and
        raises StreamCapturing.
        """
        bands, driver = self._bands, self._driver

        def plan(change: Change) -> None:
            spaces = [space for band in bands for space in band.spaces]
            if any(space.columns(slot) > space.first(slot) for space in spaces for slot in range(space.slots)):
                guard_all(change, driver)
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
        """Drops the virtual tensors, in which nothing may be mapped any more."""
        self._bands.clear()
        self._lasting.clear()
