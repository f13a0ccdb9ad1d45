"""What the worker does ahead of need: memory in stock, and prefixes mapped in idle slots."""

from __future__ import annotations

import time
from typing import Any

import pytest

import vattn
from tests.support.faults import FaultyTable
from tests.support.target import DEVICE
from tests.support.waiting import wait_until
from vattn.slots.prefixes import Prefixes

PAGE = 4096
COLUMN = 2  # pages of K and V that back 64 tokens


def make(budget: int, table: FaultyTable | None = None, **changes: Any) -> tuple[vattn.KVCache, vattn.PagePool]:
    pool = vattn.PagePool(budget * PAGE, device=DEVICE, page_size=PAGE, table=table.addresses if table else None)
    options: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 16,
        "dtype": "float32",
        "max_batch_size": 4,
        "max_context_len": 640,
        "device": DEVICE,
        "eager_pages": 0,
        "watermark": 0.5,
    }
    return vattn.KVCache(vattn.KVConfig(**options | changes), pool=pool), pool


def start(cache: vattn.KVCache, requests: int, length: int = 64) -> None:
    cache.step({cache.alloc_reqid(): length for _ in range(requests)})


def test_the_stock_is_a_column_for_every_request() -> None:
    cache, pool = make(64)
    start(cache, 3)
    wait_until(lambda: cache.stats().stocked_pages == 3 * COLUMN)
    stats = cache.stats()
    assert stats.free_pages == stats.budget_pages - stats.owned_pages  # the stock counts as free
    assert stats.created_pages == stats.owned_pages + 3 * COLUMN
    cache.check()
    assert cache.trim() == 3 * COLUMN * PAGE
    assert cache.stats().stocked_pages == 0
    cache.check()
    cache.close()
    pool.close()


@pytest.mark.parametrize(("watermark", "most"), [(0.0, 0), (0.25, 4)])
def test_the_watermark_bounds_the_stock(watermark: float, most: int) -> None:
    cache, pool = make(16, watermark=watermark)
    start(cache, 3)
    wait_until(lambda: cache.stats().stocked_pages == most)
    time.sleep(0.02)
    assert cache.stats().stocked_pages == most
    cache.check()
    cache.close()
    pool.close()


def test_without_overlap_nothing_is_in_stock() -> None:
    cache, pool = make(64, overlap=False)
    start(cache, 3)
    time.sleep(0.02)
    assert cache.stats().stocked_pages == 0
    cache.close()
    pool.close()


def test_the_whole_budget_can_be_used_whatever_is_in_stock() -> None:
    cache, pool = make(20)
    start(cache, 1)
    wait_until(lambda: cache.stats().stocked_pages == COLUMN)
    cache.step({0: 640})
    stats = cache.stats()
    assert (stats.owned_pages, stats.stocked_pages, stats.created_pages) == (20, 0, 20)
    cache.check()
    cache.close()
    pool.close()


def test_a_fill_that_fails_loses_nothing() -> None:
    table = FaultyTable()
    cache, pool = make(64, table)
    start(cache, 1)
    wait_until(lambda: cache.stats().stocked_pages == COLUMN)
    table.fail_always("cuMemCreate", code=2)
    start(cache, 1, length=1)  # from the stock; nothing can be added to it
    assert cache.stats().stocked_pages == 0
    with table.transparent():
        cache.check()
    table.heal()
    cache.step({0: 300, 1: 300})
    wait_until(lambda: cache.stats().stocked_pages == 2 * COLUMN)
    cache.check()
    cache.close()
    pool.close()


def test_what_is_in_stock_elsewhere_is_given_to_a_step_that_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    other, other_pool = make(64)
    start(other, 3)
    wait_until(lambda: other.stats().stocked_pages == 3 * COLUMN)
    table = FaultyTable()
    cache, pool = make(64, table, watermark=0)
    table.fail_always("cuMemCreate", code=2)
    unstock = vattn.pool.leftovers.unstock

    def found() -> int:
        table.heal()
        return unstock()

    monkeypatch.setattr(vattn.pool.leftovers, "unstock", found)
    start(cache, 1)
    assert other.stats().stocked_pages == 0
    cache.check()
    other.check()
    for each in (cache, other, pool, other_pool):
        each.close()


def test_a_prefix_that_requests_share_is_mapped_ahead() -> None:
    cache, pool = make(64)
    tokens = list(range(300))
    first = cache.alloc_reqid()
    cache.step({first: 256})
    cache.commit(first, tokens[:256])
    second = cache.admit(tokens)
    assert second.cached_tokens == 256
    held = cache.stats().mapped_pages
    cache.step({first: 257, second.reqid: 300})
    cache.check()  # waits for the worker
    before = cache.stats().calls["cuMemMap"].count
    third = cache.admit(tokens)
    assert third.cached_tokens == 256
    assert cache.stats().calls["cuMemMap"].count == before
    assert cache.stats().cached_pages == 0
    assert held <= cache.stats().mapped_pages
    cache.check()
    cache.step({third.reqid: 300})
    cache.check()
    cache.close()
    pool.close()


@pytest.mark.parametrize(("budget", "grows"), [(64, True), (16, False)])
def test_a_block_for_a_requests_own_tokens_follows_the_prefix(budget: int, grows: bool) -> None:
    """With `eager_pages`, as far as pages are left: the next request's first step then makes no driver call."""
    cache, pool = make(budget, eager_pages=1, watermark=0.25)
    tokens = list(range(300))
    first = cache.alloc_reqid()
    cache.step({first: 256})
    cache.commit(first, tokens[:256])
    cache.step({cache.admit(tokens).reqid: 300})
    cache.check()  # waits for the worker
    before, waits = cache.stats().calls["cuMemMap"].count, cache.stats().waits
    third = cache.admit(tokens)
    assert third.cached_tokens == 256
    cache.step({third.reqid: 300}, look_ahead=False)
    assert (cache.stats().calls["cuMemMap"].count == before) == grows
    assert (cache.stats().waits == waits) == grows
    cache.check()
    cache.close()
    pool.close()


def test_a_prefix_that_could_not_be_mapped_ahead_is_mapped_by_the_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    table = FaultyTable()
    cache, pool = make(64, table, watermark=0)
    tokens = list(range(300))
    first = cache.alloc_reqid()
    cache.step({first: 256})
    cache.commit(first, tokens[:256])
    second = cache.admit(tokens)
    ahead = Prefixes.look_ahead

    def failing(prefixes: Prefixes) -> None:
        table.fail_always("cuMemMap")
        ahead(prefixes)

    monkeypatch.setattr(Prefixes, "look_ahead", failing)
    cache.step({second.reqid: 300})
    with pytest.raises(vattn.DriverError):  # it waits for the worker, and is the first to map the prefix now
        cache.admit(tokens)
    table.heal()
    third = cache.admit(tokens)
    assert third.cached_tokens == 256
    assert cache.stats().failures >= 1
    cache.check()
    cache.close()
    pool.close()
