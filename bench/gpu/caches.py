"""The caches to compare, filled with random tokens: virtual, pre-allocated, and paged with scattered blocks."""

from __future__ import annotations

import random as host_random
from collections.abc import Sequence
from typing import Literal

from bench.gpu import PAGE
from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, KV_HEADS, random
from bench.gpu.static import StaticKV
from vattn import KVConfig
from vattn.attention import Blocks, Contiguous, whole_layer
from vattn.engine.kv.base import KVBackend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV
from vattn.packed import KVShape

BLOCK_SIZE = 256  # the smallest that FlashAttention 2 takes


def virtual(
    slots: int,
    tokens: int,
    *,
    layers: int = 1,
    layout: str = "auto",
    page_size: int | Literal["auto"] = "auto",
    kv_order: str = "NHD",
    overlap: bool = True,
) -> VirtualKV:
    """A cache with address space for `tokens` tokens in each slot, and a budget that backs all of them."""
    row = 2 * layers * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    page = PAGE if isinstance(page_size, str) else page_size
    config = KVConfig.from_options(
        num_layers=layers,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        max_batch_size=slots,
        max_context_len=tokens,
        device="cuda",
        memory_budget=slots * (tokens * row + 2 * layers * KV_HEADS * page),
        layout=layout,
        page_size=page_size,
        kv_order=kv_order,
        overlap=overlap,
        eager_pages=0,
    )
    return VirtualKV(config)


def aged(slots: int, tokens: int, *, layers: int = 1, layout: str = "auto") -> VirtualKV:
    """A virtual cache whose pages are in use in another order than they were created in, as in a server after a while:
    all slots have grown page by page, in random order, and their pages wait for the next requests.
    """
    kv = virtual(slots, tokens, layers=layers, layout=layout)
    page = kv.cache.layout.page_tokens
    lengths = dict.fromkeys((kv.allocate(1) for _ in range(slots)), 0)
    growing = [slot for slot in lengths for _ in range(-(-tokens // page))]
    host_random.Random(0).shuffle(growing)
    for slot in growing:
        lengths[slot] = min(tokens, lengths[slot] + page)
        kv.prepare(lengths)
    for slot in lengths:
        kv.free(slot)
    kv.prepare({})
    return kv


def static(slots: int, tokens: int, *, layers: int = 1) -> StaticKV:
    return StaticKV(
        num_layers=layers, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, slots=slots, tokens=tokens, dtype=DTYPE
    )


def paged(slots: int, tokens: int, *, layers: int = 1, block_size: int = BLOCK_SIZE) -> PagedKV:
    """A paged cache whose free blocks are in random order, as in a server after a while."""
    kv = PagedKV(
        KVSpec(
            KVShape.uniform(layers, KV_HEADS, HEAD_DIM, HEAD_DIM),
            max_num_seqs=slots,
            max_model_len=tokens,
            block_size=block_size,
            dtype=DTYPE,
            device=DEVICE,
        ),
        num_blocks=slots * -(-tokens // block_size),
    )
    host_random.Random(0).shuffle(kv._free)
    return kv


def fill(kv: KVBackend, lengths: Sequence[int], layers: int, *, shared: bool = False) -> list[int]:
    """Takes a slot for each length and stores random tokens in all layers; returns the slots.

    Args:
        shared: all have the tokens of the first, and its memory where the cache can share; the lengths are equal.
    """
    if shared and not isinstance(kv, StaticKV):
        first, *_ = fill(kv, lengths[:1], layers)
        forks = [kv.fork(first) for _ in lengths[1:]]
        kv.prepare(dict.fromkeys((first, *forks), lengths[0]))
        return [first, *forks]
    slots = [kv.allocate(length) for length in lengths]
    kv.prepare(dict(zip(slots, lengths, strict=True)))
    # One block of random rows, repeated: what they are does not matter, only that they are no constant.
    rows = random(8192, KV_HEADS, HEAD_DIM)
    for layer in range(layers):
        stored = whole_layer(kv, layer)
        for side in (stored.key, stored.value):
            if isinstance(stored, Blocks):
                side.copy_(rows[: side.shape[1]].expand_as(side))
                continue
            assert isinstance(stored, Contiguous)
            for slot, length in zip(slots, lengths, strict=True):
                for start in range(0, length, len(rows)):
                    part = min(len(rows), length - start)
                    side[slot, start : start + part] = rows[:part]
    return slots
