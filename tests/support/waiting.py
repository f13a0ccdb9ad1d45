"""Waiting for what another thread or process does, without a guess at how long that takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 600  # far beyond what anything takes on a busy machine: only what never comes takes as long


def wait_until(
    condition: Callable[[], object], what: Callable[[], object] = lambda: None, *, every: float = 0.001
) -> None:
    """Until it holds, asked every so many seconds; `what` is asked what is there instead where it never does."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(every)


def runs(pid: int) -> bool:
    """Whether there is such a process that does more than wait to be reaped, which may be for ever in a container."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter where it is reaped once the file is open
        return False


class Background:
    """A call on a thread of its own, which is expected to wait for something."""

    def __init__(self, body: Callable[[], object]) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                body()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def runs(self) -> bool:
        """Whether it has not returned."""
        return self.thread.is_alive()

    def finish(self) -> None:
        """Waits for its end, and raises what it raised."""
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        if self.error:
            raise self.error
