"""Another cache on the pool of an engine's cache, which holds what the engine then lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import vattn
from vattn.engine import LLM
from vattn.engine.kv.virtual import VirtualKV


@contextmanager
def tenant(llm: LLM, leaving: int) -> Iterator[vattn.KVCache]:
    """Holds all but some units of the memory of an engine with the backend `virtual`."""
    assert isinstance(llm.core.kv, VirtualKV)
    cache = llm.core.kv.cache
    pool = cache._pool
    config = vattn.KVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=pool.page_size // 64,
        v_head_dim=0,
        dtype="float64",
        max_batch_size=1,
        max_context_len=8 * pool.total_pages,
        page_size=pool.page_size,
    )
    cache._owns_pool = False  # so that it does not take the pages of another for lost ones
    with vattn.KVCache(config, pool=pool) as other:
        other.step({other.alloc_reqid(): 8 * (pool.total_pages - leaving)})
        yield other
    cache._owns_pool = True
