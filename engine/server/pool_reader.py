"""What the broker of a pool says of it, asked on behalf of many, and never waited for."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from typing import Any

from vattn.broker.borrower import Loan
from vattn.broker.control import Control
from vattn.errors import VattnError

_AGE = 1.0  # seconds for which an answer is shown
_GLANCE = 0.1  # seconds for an answer to come; then the last one is shown again
_PATIENCE = 1.0  # seconds after which a broker does not answer
_BORROWER = (
    *("name", "at_least", "at_most", "lease", "owned", "parked", "cached", "shared", "asked", "asked_back", "lost"),
)


class PoolReader:
    """Asks the broker of a pool who has what, at most once a second, in a thread."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._top: dict[str, Any] | None = None
        self._at = -_AGE
        self._asking: asyncio.Task[None] | None = None

    async def read(self, loan: Loan) -> dict[str, Any]:
        """The pool, as JSON: `StateReader` says what is in it.

        Args:
            loan: of the engine that asks.
        """
        if time.monotonic() - self._at >= _AGE:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._ask())
            await asyncio.wait({self._asking}, timeout=_GLANCE)
        top = self._top
        return {
            "name": loan.pool,
            "borrower": loan.name,
            "reachable": loan.reachable and top is not None,
            "budget": loan.budget if top is None else top["budget"],
            "free": None if top is None else top["free"],
            "kept": 0 if top is None else top["kept"],
            "borrowers": [] if top is None else [{key: each[key] for key in _BORROWER} for each in top["borrowers"]],
        }

    async def _ask(self) -> None:
        def ask() -> dict[str, Any] | None:
            try:
                with closing(Control(self._pool, seconds=_PATIENCE)) as control:
                    return control.ask("top")
            except (VattnError, OSError):
                return None

        self._top = await asyncio.to_thread(ask)
        self._at = time.monotonic()
