"""The four calls of vAttention, on the cache that `init` made last.

cache = vattn.init(...)
reqid = vattn.alloc_reqid()
vattn.step({reqid: 1000})
vattn.free_reqid(reqid)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vattn.cache import KVCache, Lengths
from vattn.config import KVConfig
from vattn.drivers import Stream
from vattn.errors import VattnError
from vattn.memory.pool import PagePool

_default: KVCache | None = None


def init(*, pool: PagePool | None = None, **options: Any) -> KVCache:
    """Makes a cache and lets the module's functions act on it. One made before goes on working by its own methods.

    Args:
        pool: physical pages to share with other caches.
        **options: the attributes of `vattn.KVConfig`.

    Raises:
        ConfigError: for options that are unknown, missing, contradictory, or do not fit.
    """
    global _default
    _default = KVCache(KVConfig.from_options(**options), pool=pool)
    return _default


def _cache() -> KVCache:
    if _default is None:
        raise VattnError("there is no cache yet; call vattn.init(...) first")
    return _default


def alloc_reqid(num_tokens: int | None = None) -> int:
    """`KVCache.alloc_reqid` of the cache made last."""
    return _cache().alloc_reqid(num_tokens)


def step(lengths: Lengths, next_lengths: Mapping[int, int] | None = None, *, stream: Stream | None = None) -> None:
    """`KVCache.step` of the cache made last."""
    _cache().step(lengths, next_lengths, stream=stream)


def free_reqid(reqid: int, stream: Stream | None = None) -> None:
    """`KVCache.free_reqid` of the cache made last."""
    _cache().free_reqid(reqid, stream)
