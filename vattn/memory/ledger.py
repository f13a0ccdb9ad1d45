"""Ledger: how many pages a cache holds, by what they are for.

owned    running requests have them
parked   mapped under an idle slot, in no block that is cached or in use
cached   in cached blocks that no running request uses
"""

from __future__ import annotations

from vattn.layout import Layout
from vattn.memory.bands import Bands
from vattn.memory.pool import PagePool
from vattn.memory.sharing import State
from vattn.memory.slots import SlotTable


class Ledger:
    """The counts of one cache; used under the pool's lock. `check` compares them with the books that they are about.

    Attributes:
        budget: the most pages that the cache may hold.
        peak: the most that it has held.
    """

    def __init__(self, budget: int, layout: Layout, slots: SlotTable, bands: Bands, pool: PagePool) -> None:
        self.budget = budget
        self.peak = 0
        self._layout = layout
        self._slots = slots
        self._bands = bands
        self._pool = pool
        self._private = [0] * layout.slots  # pages of each slot that are in no block
        self._private_pages = 0  # their sum

    def count(self, slot: int) -> None:
        """Other pages than before are planned to be under the slot, or in its blocks."""
        private = self._bands.private_pages(slot)
        self._private_pages += private - self._private[slot]
        self._private[slot] = private
        self._slots.resized(slot)
        self.peak = max(self.peak, self.held)

    @property
    def owned(self) -> int:
        """Pages that running requests have."""
        idle = self._slots.idle.private_pages
        return self._private_pages - idle + self._bands.block_pages(State.USED)

    @property
    def parked(self) -> int:
        """Mapped pages that neither a running request nor a cached block has."""
        return self._slots.idle.private_pages + self._bands.block_pages(State.PARKED)

    @property
    def cached(self) -> int:
        """Pages of cached blocks that no running request uses."""
        return self._bands.block_pages(State.CACHED)

    @property
    def held(self) -> int:
        """All of these."""
        return self._private_pages + self._bands.held_pages

    @property
    def free(self) -> int:
        """Pages that a slot can take without any being unmapped."""
        return min(self.budget - self.held, self._pool.free_pages)

    @property
    def needed(self) -> int:
        """Pages that running requests need for what is seen of their tokens."""
        slots, lengths = self._slots, self._slots.length.items()
        apart = sum(self._layout.pages(slots.needed_tokens(slot), length) for slot, length in lengths)
        return apart - self._bands.saved_pages(lengths)

    def refresh(self) -> None:
        """Counts anew."""
        self._private = [self._bands.private_pages(slot) for slot in range(self._layout.slots)]
        self._private_pages = sum(self._private)

    def check(self, *, alone: bool) -> None:
        """Asserts that the counts are those of the books.

        Args:
            alone: no other cache has pages of the pool.
        """
        counted = self._private
        self.refresh()
        assert counted == self._private, "private pages are miscounted"
        taken = self._pool.native.counts().taken
        assert self.held <= taken, "more pages are held than taken"
        assert self.held <= self.budget, "more pages are held than the budget has"
        if alone:
            assert self.held == taken, "a page was lost"
