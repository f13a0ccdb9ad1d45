"""What an engine waits for while a cache maps memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vattn.engine.kv.base import KVBackend


@dataclass
class Waited:
    """While `watching` runs.

    Attributes:
        map_calls: calls that mapped a page during an admission, or during a `prepare` that waited.
        calls: of `prepare` that waited.
        seconds: that they waited.
    """

    map_calls: int = 0
    calls: int = 0
    seconds: float = 0.0


@contextmanager
def watching(kv: Any) -> Iterator[Waited]:
    """Counts what a backend of this engine maps while the engine waits for it."""
    backend: KVBackend = kv
    found = Waited()
    admit, prepare = kv.admit, kv.prepare

    def watched_admit(*args: Any) -> Any:
        before = backend.stats().map_calls
        admission = admit(*args)
        found.map_calls += backend.stats().map_calls - before
        return admission

    def watched_prepare(*args: Any, **options: Any) -> None:
        before = backend.stats()
        prepare(*args, **options)
        after = backend.stats()
        if after.waits > before.waits:
            found.map_calls += after.map_calls - before.map_calls
            found.calls += after.waits - before.waits
            found.seconds += after.wait_seconds - before.wait_seconds

    kv.admit, kv.prepare = watched_admit, watched_prepare
    try:
        yield found
    finally:
        del kv.admit, kv.prepare
