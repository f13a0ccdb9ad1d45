"""The slots that no request has, in the orders in which they are chosen and reclaimed.

A slot is chosen among thousands in about a microsecond, so nothing here looks at all of them: one order is by what a
new request would lose and find in a slot, one index by the block that a slot's blocks end with, whose key stands for
all before it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator
from typing import NamedTuple

from vattn.prefix import Key


class Idle(NamedTuple):
    """What is known of an idle slot, in the order in which a request that finds nothing cached prefers it.

    Attributes:
        blocks: cached or left-over blocks that are mapped in it, which such a request would have to unmap.
        extent: tokens that are mapped from its start.
        since: the count of slots that became idle before it.
        pages: that are mapped in it, of which `private` are in no block.
        tail: the key of its last block, if it has one.
    """

    blocks: int
    extent: int
    since: int
    slot: int
    pages: int
    private: int
    tail: Key | None


class IdleSlots(Collection[int]):
    """Idle slots, iterated by how long they have been idle, the longest first.

    Attributes:
        private_pages: pages in all of them that are in no block.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Idle] = {}  # longest idle first
        self._order: list[Idle] = []  # sorted
        self._by_tail: dict[Key, dict[int, None]] = {}
        self._mapped: dict[int, None] = {}  # those with pages, longest idle first
        self._count = itertools.count()
        self.private_pages = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __contains__(self, slot: object) -> bool:
        return slot in self._slots

    @property
    def mapped(self) -> list[int]:
        """Those under which pages are mapped, the longest idle first."""
        return list(self._mapped)

    def __getitem__(self, slot: int) -> Idle:
        return self._slots[slot]

    def add(self, slot: int, blocks: int, extent: int, pages: int, private: int, tail: Key | None) -> None:
        """A slot became idle."""
        self._insert(Idle(blocks, extent, next(self._count), slot, pages, private, tail))

    def update(self, slot: int, blocks: int, extent: int, pages: int, private: int, tail: Key | None) -> None:
        """What is mapped of an idle slot changed."""
        before = self._slots[slot]
        now = Idle(blocks, extent, before.since, slot, pages, private, tail)
        if now == before:
            return
        self.private_pages -= before.private
        del self._order[bisect.bisect_left(self._order, before)]
        if before.tail is not None and before.tail != tail:
            self._drop_tail(before)
        self._insert(now)
        if before.pages and not pages:
            del self._mapped[slot]

    def remove(self, slot: int) -> Idle:
        """A request takes the slot; what was known of it."""
        entry = self._slots.pop(slot)
        del self._order[bisect.bisect_left(self._order, entry)]
        self._mapped.pop(slot, None)
        self._drop_tail(entry)
        self.private_pages -= entry.private
        return entry

    def fitting(self, tokens: int, limit: int) -> list[int]:
        """Up to `limit` slots in which the least would be lost: of those the smallest that back so many tokens, then
        the largest of the others.
        """
        if not self._order:
            return []
        least = self._order[0].blocks
        at = bisect.bisect_left(self._order, (least, tokens))
        found = [entry.slot for entry in self._order[at : at + limit] if entry.blocks == least]
        while at and len(found) < limit:
            # Of slots that back equally much, the longest idle comes first.
            first = bisect.bisect_left(self._order, self._order[at - 1][:2])
            found += [entry.slot for entry in self._order[first : min(at, first + limit - len(found))]]
            at = first
        return found

    def largest_empty(self, limit: int) -> list[int]:
        """Up to `limit` slots without blocks, of those that back most the longest idle."""
        end = bisect.bisect_left(self._order, (1,)) if self._order and self._order[-1].blocks else len(self._order)
        if not end:
            return []
        first = bisect.bisect_left(self._order, self._order[end - 1][:2])
        return [entry.slot for entry in self._order[first : min(end, first + limit)]]

    def ending_with(self, key: Key | None, limit: int) -> list[int]:
        """Up to `limit` slots whose last block has this key."""
        return list(itertools.islice(self._by_tail.get(key, ()), limit)) if key is not None else []

    def _insert(self, entry: Idle) -> None:
        self._slots[entry.slot] = entry
        self.private_pages += entry.private
        bisect.insort(self._order, entry)
        if entry.pages:
            self._mapped[entry.slot] = None
        if entry.tail is not None:
            self._by_tail.setdefault(entry.tail, {})[entry.slot] = None

    def _drop_tail(self, entry: Idle) -> None:
        if entry.tail is not None:
            slots = self._by_tail[entry.tail]
            del slots[entry.slot]
            if not slots:
                del self._by_tail[entry.tail]
