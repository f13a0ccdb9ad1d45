"""The idle slots, in the orders in which they are chosen and reclaimed.

Choosing among thousands of slots takes about a microsecond, so nothing here scans all of them. Slots are sorted by what
a new request would lose and find there, and indexed by the key of their last block, which stands for all blocks before
it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator
from typing import NamedTuple

from vattn.prefix import Key


class Idle(NamedTuple):
    """An idle slot, comparable by how well it suits a request without a cached prefix: the least suits best.

    Attributes:
        blocks: number of cached or left-over blocks mapped in it, which such a request would have to unmap.
        extent: number of tokens mapped from its start.
        since: how many slots had become idle before it.
        slot: its index.
        pages: number of pages mapped in it.
        private: how many of these pages are in no block.
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
    """The idle slots; iteration starts with the slot that has been idle longest.

    Attributes:
        private_pages: pages of all idle slots that are in no block.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Idle] = {}  # longest idle first
        self._order: list[Idle] = []  # sorted
        self._by_tail: dict[Key, dict[int, None]] = {}
        self._mapped: dict[int, None] = {}  # slots with pages, longest idle first
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
        """The idle slots with mapped pages, longest idle first."""
        return list(self._mapped)

    def __getitem__(self, slot: int) -> Idle:
        return self._slots[slot]

    def add(self, slot: int, blocks: int, extent: int, pages: int, private: int, tail: Key | None) -> None:
        """Adds a slot that became idle."""
        self._insert(Idle(blocks, extent, next(self._count), slot, pages, private, tail))

    def update(self, slot: int, blocks: int, extent: int, pages: int, private: int, tail: Key | None) -> None:
        """Updates what is mapped in an idle slot."""
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
        """Removes a slot that a request takes; returns its entry."""
        entry = self._slots.pop(slot)
        del self._order[bisect.bisect_left(self._order, entry)]
        self._mapped.pop(slot, None)
        self._drop_tail(entry)
        self.private_pages -= entry.private
        return entry

    def fitting(self, tokens: int, limit: int) -> list[int]:
        """Up to `limit` slots with the fewest blocks to lose: first the smallest ones that back `tokens` tokens, then
        the largest of the others.
        """
        if not self._order:
            return []
        least = self._order[0].blocks
        at = bisect.bisect_left(self._order, (least, tokens))
        found = [entry.slot for entry in self._order[at : at + limit] if entry.blocks == least]
        while at and len(found) < limit:
            # Among slots of equal extent, the longest idle comes first.
            first = bisect.bisect_left(self._order, self._order[at - 1][:2])
            found += [entry.slot for entry in self._order[first : min(at, first + limit - len(found))]]
            at = first
        return found

    def largest_empty(self, limit: int) -> list[int]:
        """Up to `limit` slots without blocks: those with the largest extent, longest idle first."""
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
