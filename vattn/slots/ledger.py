"""Ledger: how many pages a cache holds, by purpose.

owned    held by running requests
parked   mapped under a slot, but neither owned nor cached
cached   in cached blocks, which no running request uses
"""

from __future__ import annotations

from vattn.layout import Layout
from vattn.pool.core import Core
from vattn.slots.bands import Bands
from vattn.slots.blocks import State
from vattn.slots.table import SlotTable


class Ledger:
    """The page counts of one cache; used under the pool's lock. `check` compares them with the books.

    Attributes:
        budget: the most pages that the cache may hold.
        peak: the most pages that it has held so far.
    """

    def __init__(self, budget: int, layout: Layout, slots: SlotTable, bands: Bands, core: Core) -> None:
        self.budget = budget
        self.peak = 0
        self._layout = layout
        self._slots = slots
        self._bands = bands
        self._core = core
        self._private = [0] * layout.slots  # pages of each slot that are in no block
        self._private_pages = 0  # their sum

    def changed(self, slot: int) -> None:
        """Recounts a slot whose pages or blocks changed, and has the table of slots follow."""
        private = self._bands.private_pages(slot)
        self._private_pages += private - self._private[slot]
        self._private[slot] = private
        self._slots.changed(slot)
        self.peak = max(self.peak, self.held)

    @property
    def owned(self) -> int:
        """Pages that running requests hold."""
        idle = self._slots.idle.private_pages
        return self._private_pages - idle + self._bands.block_pages(State.USED)

    @property
    def parked(self) -> int:
        """Mapped pages used by no request and no cached block."""
        return self._slots.idle.private_pages + self._bands.block_pages(State.PARKED)

    @property
    def cached(self) -> int:
        """Pages of cached blocks, which no running request uses."""
        return self._bands.block_pages(State.CACHED) + self.pinned

    @property
    def pinned(self) -> int:
        """Those of the cached pages that other processes have mapped, as of a moment ago."""
        return self._bands.block_pages(State.PINNED)

    @property
    def held(self) -> int:
        """All pages that the cache holds: owned, parked and cached."""
        return self._private_pages + self._bands.held_pages

    @property
    def free(self) -> int:
        """Pages that a slot can take without unmapping any."""
        return min(self.budget - self.held, self._core.free_pages)

    @property
    def needed(self) -> int:
        """Pages that running requests need for those of their tokens that queries can see."""
        slots, lengths = self._slots, self._slots.length.items()
        apart = sum(self._layout.pages(slots.needed_tokens(slot), length) for slot, length in lengths)
        return apart - self._bands.saved_pages(lengths)

    def refresh(self) -> None:
        """Recounts the private pages of all slots."""
        self._private = self._counted()
        self._private_pages = sum(self._private)

    def _counted(self) -> list[int]:
        return [self._bands.private_pages(slot) for slot in range(self._layout.slots)]

    def check(self, *, alone: bool) -> None:
        """Asserts that the counts agree with the books.

        Args:
            alone: whether no other cache holds pages of the pool.
        """
        assert self._private == self._counted(), "private pages are miscounted"
        assert self._private_pages == sum(self._private), "the sum of private pages is miscounted"
        taken = self._core.taken_pages
        assert self.held <= taken, "more pages are held than taken"
        assert self.held <= self.budget, "more pages are held than the budget has"
        if alone:
            assert self.held == taken, "a page was lost"
