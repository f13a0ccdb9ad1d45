"""Parts: what the decisions about one cache's slots are made from."""

from __future__ import annotations

from dataclasses import dataclass

from vattn.config import KVConfig
from vattn.layout import Layout
from vattn.pool.core import Core
from vattn.pool.fences import Fences
from vattn.slots.bands import Bands
from vattn.slots.ledger import Ledger
from vattn.slots.table import SlotTable


@dataclass(frozen=True)
class Parts:
    """The books of one cache, each with one owner, and its pool."""

    config: KVConfig
    slots: SlotTable
    bands: Bands
    ledger: Ledger
    fences: Fences
    core: Core

    @classmethod
    def of(cls, config: KVConfig, layout: Layout, budget: int, core: Core) -> Parts:
        """The parts of a new cache, which may hold up to `budget` pages."""
        bands = Bands(layout, core, config.guard_rows)
        slots = SlotTable(config, layout.slots, bands)
        if core.may_share and config.memory_budget == "auto":
            # Blocks that other processes have mapped may be in no slot here, so slots do not bound what is held.
            budget = core.total_pages
        ledger = Ledger(min(budget, core.total_pages), layout, slots, bands, core)
        bands.report_to(ledger)
        return cls(config, slots, bands, ledger, Fences(core.driver), core)


class Decisions:
    """Decides from parts; used under the pool's lock."""

    def __init__(self, parts: Parts) -> None:
        self._config = parts.config
        self._slots = parts.slots
        self._bands = parts.bands
        self._ledger = parts.ledger
        self._fences = parts.fences
        self._core = parts.core
