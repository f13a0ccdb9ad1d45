"""What a backend holds for the requests that run."""

from __future__ import annotations

from vattn.engine.kv.base import KVStats


def held_bytes(kv: str, stats: KVStats) -> int:
    """Bytes that nothing else can use while these requests run, of the backend called `kv`.

    Static holds its slots, and dynamic its copies, whether or not a request has a use for them.
    """
    return stats.peak_physical_bytes if kv in ("static", "dynamic") else stats.used_bytes
