"""A cache of one layer on CUDA, in which few tokens are many pages; for tests over the stub."""

from __future__ import annotations

from typing import Any

import vattn

PAGE = 2**21
TOKENS = 4096  # per page: one layer, one head of 128 float32 in K and V each
BASE: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_dim": 128,
    "dtype": "float32",
    "max_batch_size": 3,
    "max_context_len": 8 * TOKENS,
    "device": "cuda",
    "memory_budget": 16 * PAGE,  # one slot at full length
    "layout": "layer",
    "eager_pages": 0,
    "watermark": 0,
}


def make(pool: vattn.PagePool | None = None, **changes: Any) -> vattn.KVCache:
    return vattn.KVCache(vattn.KVConfig(**BASE | changes), pool=pool)
