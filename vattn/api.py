"""The four calls of vAttention, on the cache that `init` created most recently.

cache = vattn.init(...)
reqid = vattn.alloc_reqid()
vattn.step({reqid: 1000})
vattn.free_reqid(reqid)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, ParamSpec, TypeVar

import torch

from vattn.cache import KVCache, Lengths
from vattn.config import KVConfig
from vattn.drivers import Guard, Stream
from vattn.errors import VattnError
from vattn.groups import TensorGroup
from vattn.layout import KVOrder, LayoutName
from vattn.pool.pool import PagePool

P = ParamSpec("P")
R = TypeVar("R")

_default: KVCache | None = None


def _check_names(call: Callable[P, R]) -> Callable[P, R]:
    """Raises a ConfigError for unknown or missing keywords, for which Python would raise a TypeError."""

    @functools.wraps(call)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        KVConfig.check_names([name for name in options if name != "pool"])
        return call(*args, **options)

    return checked


@_check_names
def init(
    *,
    max_batch_size: int,
    max_context_len: int,
    num_layers: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    sliding_window: int | None = None,
    groups: Sequence[TensorGroup] | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    memory_budget: int | str = "auto",
    memory_utilization: float | Literal["auto"] = "auto",
    page_size: int | Literal["auto"] = "auto",
    layout: LayoutName | Literal["auto"] = "auto",
    kv_order: KVOrder | Literal["auto"] = "auto",
    block_tokens: int | None = None,
    guard_rows: int = 0,
    guard: Guard = "zero",
    overlap: bool = True,
    deferred_reclamation: bool = True,
    eager_pages: int = 1,
    zero_on_free: bool = False,
    watermark: float = 0.1,
    pool: PagePool | None = None,
) -> KVCache:
    """Creates a cache, on which the functions of this module then operate. Earlier caches remain usable through their
    methods.

    All keywords except `pool` are attributes of `vattn.KVConfig`, which documents them. `max_batch_size` and
    `max_context_len` are required, and so is either `groups` or all of `num_layers`, `num_kv_heads`, `head_dim` and
    `dtype`.

    Args:
        pool: a pool of physical pages to share with other caches; by default the cache creates its own.

    Raises:
        ConfigError: an option is unknown, missing, contradicts others, or does not fit.
    """
    global _default
    options = dict(locals())
    del options["pool"]
    _default = KVCache(KVConfig(**options), pool=pool)
    return _default


def _cache() -> KVCache:
    if _default is None:
        raise VattnError("there is no cache yet; call vattn.init(...) first")
    return _default


def alloc_reqid(num_tokens: int | None = None) -> int:
    """`KVCache.alloc_reqid` of the most recently created cache."""
    return _cache().alloc_reqid(num_tokens)


def step(
    lengths: Lengths,
    next_lengths: Mapping[int, int] | None = None,
    *,
    stream: Stream | None = None,
    look_ahead: bool = True,
) -> None:
    """`KVCache.step` of the most recently created cache."""
    _cache().step(lengths, next_lengths, stream=stream, look_ahead=look_ahead)


def look_ahead(*, stream: Stream | None = None) -> None:
    """`KVCache.look_ahead` of the most recently created cache."""
    _cache().look_ahead(stream=stream)


def free_reqid(reqid: int, stream: Stream | None = None, *, token_ids: Sequence[int] | None = None) -> None:
    """`KVCache.free_reqid` of the most recently created cache."""
    _cache().free_reqid(reqid, stream, token_ids=token_ids)
