"""The rate at which a step gets memory for all slots of a cache at once."""

from __future__ import annotations

import time

from bench.harness.report import Row
from vattn import KVCache


def in_the_step(cache: KVCache, length: int) -> Row:
    """Every slot gets a request of `length` tokens, whose memory the step waits for."""
    slots = _all_slots(cache)
    start = time.perf_counter()
    cache.step(dict.fromkeys(slots, length))
    seconds = time.perf_counter() - start
    return _end(cache, slots, length, seconds)


def ahead(cache: KVCache, length: int) -> Row:
    """From the step that queues the pages of the next one, to the return of that one, which comes at once."""
    slots = _all_slots(cache)
    start = time.perf_counter()
    cache.step(dict.fromkeys(slots, 1), dict.fromkeys(slots, length))
    cache.step(dict.fromkeys(slots, length))
    seconds = time.perf_counter() - start
    return _end(cache, slots, length, seconds)


def _all_slots(cache: KVCache) -> list[int]:
    return [cache.alloc_reqid() for _ in range(cache.layout.slots)]


def _end(cache: KVCache, slots: list[int], length: int, seconds: float) -> Row:
    """Ends the requests, and has their pages unmapped. What was mapped ahead of the next token does not count."""
    for slot in slots:
        cache.free_reqid(slot)
    cache.step({})  # all is launched: what was freed may be unmapped
    cache.check()  # and is
    pages = len(slots) * cache.layout.pages(length)
    size = pages * cache.layout.page_size
    return {"pages": pages, "ms": 1e3 * seconds, "GB/s": size / 1e9 / seconds, "us per page": 1e6 * seconds / pages}
