"""Waiting for what another process does, which it may never do."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 600.0  # far beyond what anything takes


def wait_until(condition: Callable[[], object], *, every: float) -> None:
    """Until it holds, asked every so many seconds.

    Raises:
        TimeoutError: it never does.
    """
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {SECONDS:.0f} s for another process")
        time.sleep(every)
