"""`zero_on_free`: what is freed is zero before anybody has it, in a native pool on any provider and in a cache.

Likewise what a native address space that is `zeroed` grows by.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

import vattn
from tests.support import target
from tests.support.faults import FaultyTable
from vattn import _native, drivers
from vattn.slots.table import SlotTable

PAGES = 4
PAGE = 4096


class World:
    """Two slots of `PAGES` columns in one lane."""

    def __init__(self, zero_on_free: bool, *, zeroed: bool = False) -> None:
        page = drivers.find(target.DEVICE).page_sizes[0]
        self.table = FaultyTable()
        driver = drivers.find(target.DEVICE).open(page, table=self.table.addresses)
        self.page_words = page // 8
        self.pool = _native.PagePool(page, PAGES, zero_on_free=zero_on_free)
        self.space = _native.AddressSpace(
            driver.native, self.pool, tensors=1, slots=2, runs=1, run_pages=PAGES, zeroed=zeroed
        )
        self.mapper = _native.Mapper(driver.native, self.pool)
        # On both providers memory is the host's, so that a pointer reads it.
        self.base = self.space.tensor(0, 1, 0).data_ptr()

    def run(self, *decide: Callable[[Any], object], fails: bool = False) -> None:
        transaction = _native.Transaction()
        for part in decide:
            part(transaction)
        self.mapper.wait(self.mapper.submit(transaction))
        assert transaction.status == (_native.Status.FAILED if fails else _native.Status.DONE)
        if fails:
            transaction.revert()
            self.mapper.resume()

    def words(self, slot: int, column: int) -> Any:
        where = self.base + (slot * PAGES + column) * self.page_words * 8
        return (ctypes.c_uint64 * self.page_words).from_address(where)

    def close(self) -> None:
        for slot in (0, 1):
            self.run(lambda t, slot=slot: self.space.shrink(t, slot, self.space.columns(slot)))
        self.run(lambda t: self.pool.release_free(t, PAGES))
        self.mapper.stop()


@pytest.mark.parametrize("zero_on_free", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_pages_that_another_slot_gets(zero_on_free: bool, at_once: bool) -> None:
    world = World(zero_on_free)
    assert world.pool.zero_on_free == zero_on_free
    world.run(lambda t: world.space.grow(t, 0, PAGES))
    for column in range(PAGES):
        world.words(0, column)[:] = [column + 1] * world.page_words
    shrink, grow = (lambda t: world.space.shrink(t, 0, PAGES)), (lambda t: world.space.grow(t, 1, PAGES))
    if at_once:
        world.run(shrink, grow)
    else:
        world.run(shrink)
        world.run(grow)
    found = {value for column in range(PAGES) for value in world.words(1, column)}
    assert found == ({0} if zero_on_free else set(range(1, PAGES + 1)))
    world.close()


def test_pages_that_somebody_holds_are_left_alone_until_they_are_let_go() -> None:
    world = World(True)
    world.run(lambda t: world.space.grow(t, 0, 2))
    for column in (0, 1):
        world.words(0, column)[:] = [7] * world.page_words
    held = world.space.pages(0, 0, 1)
    world.run(lambda t: world.pool.hold(t, [held]), lambda t: world.space.shrink(t, 0, 2))
    world.run(lambda t: world.space.attach(t, 1, [held]))
    assert set(world.words(1, 0)) == {7}
    world.run(lambda t: world.space.shrink(t, 1, 1))
    world.run(lambda t: world.pool.let_go(t, held))
    assert world.pool.counts().taken == 0
    world.run(lambda t: world.space.grow(t, 1, 2))
    assert set(world.words(1, 0)) == set(world.words(1, 1)) == {0}
    world.close()


@pytest.mark.parametrize("zero_on_free", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_what_a_zeroed_space_grows_by(zero_on_free: bool, at_once: bool) -> None:
    world = World(zero_on_free, zeroed=True)
    world.run(lambda t: world.space.grow(t, 0, 2))
    for column in range(2):
        assert set(world.words(0, column)) == {0}
        world.words(0, column)[:] = [7] * world.page_words
    shrink, grow = (lambda t: world.space.shrink(t, 0, 1)), (lambda t: world.space.grow(t, 1, 3))
    if at_once:
        # The page is the first slot's again, with what it held.
        world.table.fail(1, name="cuMemsetD8Async")
        world.run(shrink, grow, fails=True)
        assert set(world.words(0, 0)) == set(world.words(0, 1)) == {7}
        world.run(shrink, grow)
    else:
        world.run(shrink)
        world.run(grow)
    assert set(world.words(0, 0)) == {7}
    assert {value for column in range(3) for value in world.words(1, column)} == {0}
    held = world.space.pages(0, 0, 1)
    world.run(lambda t: world.space.shrink(t, 1, 3), lambda t: world.space.attach(t, 1, [held]))
    assert set(world.words(1, 0)) == {7}
    world.close()


def cache(**options: Any) -> vattn.KVCache:
    plain: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 32,
        "dtype": "float32",
        "max_batch_size": 2,
        "max_context_len": 1024,
        "memory_budget": 66 * PAGE,
        "page_size": PAGE,
        "layout": "layer",
        "device": target.DEVICE,
        "zero_on_free": True,
    }
    pool = options.pop("pool", None)
    return vattn.KVCache(vattn.KVConfig(**plain | options), pool=pool)


@target.host_only
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_no_request_reads_what_another_one_wrote(overlap: bool, deferred: bool, window: int | None) -> None:
    pool = vattn.PagePool(66 * PAGE, page_size=PAGE, zero_on_free=True)
    options = {"overlap": overlap, "deferred_reclamation": deferred, "sliding_window": window, "pool": pool}
    with cache(**options) as mine, cache(**options) as theirs:
        k, v = mine.layer(0)
        for length in (1000, 33, 400):
            reqid, _ = mine.admit([length] * length)
            for tokens in range(32, length + 1, 32):
                mine.step({reqid: tokens})
            mine.step({reqid: length})
            k[reqid, max(0, length - 30) : length] = v[reqid, max(0, length - 30) : length] = 1234.5
            mine.commit(reqid, [length] * length)
            mine.step({reqid: length - length % 32})
            mine.free_reqid(reqid)
            mine.check()
            other = theirs.alloc_reqid()
            theirs.step({other: 300})
            assert not any(bool((tensor[other, :300] == 1234.5).any()) for tensor in theirs.layer(0))
            theirs.free_reqid(other)
            for salt in (b"another tenant", b"a third"):
                next_one, _ = mine.admit([7] * 500, salt)
                mine.step({next_one: 500})
                assert not bool((k[next_one] == 1234.5).any())
                assert not bool((v[next_one] == 1234.5).any())
                mine.free_reqid(next_one)
                mine.check()
    pool.close()


@target.host_only
def test_cached_blocks_stay_in_place_until_they_are_evicted() -> None:
    with cache(eager_pages=0) as mine:
        reqid = mine.alloc_reqid()
        mine.step({reqid: 200})
        k, _ = mine.layer(0)
        k[reqid, :200] = 1.0
        mine.commit(reqid, list(range(200)))
        mine.free_reqid(reqid)
        mine.check()
        assert mine.stats().parked_pages == 0
        maps = mine.stats().calls["cuMemMap"].count
        again, cached = mine.admit(list(range(200)))
        assert (again, cached) == (reqid, 192)
        assert mine.stats().calls["cuMemMap"].count == maps
        assert bool((k[again, :cached] == 1.0).all())
        mine.free_reqid(again)
        mine.evict_prefixes()
        other = mine.alloc_reqid()
        mine.step({other: 200})
        assert not bool(k[other, :200].any())
        mine.check()


def test_a_cache_that_zeroes_needs_a_pool_that_does() -> None:
    pool = vattn.PagePool(66 * PAGE, device=target.DEVICE, page_size=PAGE)
    with pytest.raises(vattn.ConfigError, match="zero_on_free=True needs a pool"):
        cache(pool=pool)
    with pytest.raises(vattn.ConfigError, match="guard='strict' needs a pool"):
        cache(pool=pool, zero_on_free=False, guard="strict")
    pool.close()


SECRET = 1234.5


def faulty(**options: Any) -> tuple[vattn.KVCache, FaultyTable, vattn.PagePool]:
    """A cache whose driver calls can fail; 16 tokens per page in each of two tensors."""
    table = FaultyTable()
    pages = options.pop("pages", 24)
    pool = vattn.PagePool(pages * PAGE, page_size=PAGE, zero_on_free=True, table=table.addresses)
    plain = {"head_dim": 64, "max_context_len": 64, "eager_pages": 0, "watermark": 0, "memory_budget": pages * PAGE}
    return cache(pool=pool, **plain | options), table, pool


def secrets(mine: vattn.KVCache, slot: int, length: int) -> int:
    """Tokens of a slot in which another request's rows are seen."""
    return sum(int((tensor[slot, :length] == SECRET).any((1, 2)).sum()) for tensor in mine.layer(0))


@target.host_only
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("eager_pages", [0, 1])
@pytest.mark.parametrize("lengths", [(32, 5), (32, 20), (48, 40)])
@pytest.mark.parametrize("nth", range(1, 6))
def test_what_failed_in_the_background_shows_nobody_anothers_rows(
    nth: int, lengths: tuple[int, int], eager_pages: int, overlap: bool
) -> None:
    mine, table, pool = faulty(overlap=overlap, eager_pages=eager_pages)
    before, after = lengths
    other = mine.alloc_reqid()
    mine.step({other: 16})
    first = mine.alloc_reqid()
    mine.step({first: before})
    for tensor in mine.layer(0):
        tensor[first, :before] = SECRET
    table.fail(nth, code=2, name="cuMemMap")
    mine.free_reqid(first)
    second = mine.alloc_reqid()
    assert second == first
    mine.check()
    try:
        mine.step({second: after})
    except vattn.OutOfPages:
        mine.step({second: after})
    table.heal()
    assert secrets(mine, second, after) == 0
    mine.check()
    mine.close()
    pool.close()


@target.host_only
def test_pages_that_come_back_after_their_slot_was_forgotten_leave_again() -> None:
    """They were to go to another slot ahead of its growth. That fails after nothing was left in theirs."""
    mine, table, pool = faulty(overlap=True, pages=8)
    other = mine.alloc_reqid()
    mine.step({other: 16})
    pool._core.drain()
    first = mine.alloc_reqid()
    mine.step({first: 16})
    for tensor in mine.layer(0):
        tensor[first, :16] = SECRET
    pool._core.drain()
    table.fail(1, name="cuMemUnmap")
    mine.free_reqid(first)
    pool._core.mapper.wait(pool._core.mapper.last)
    table.fail(1, name="cuMemMap")
    mine.step({other: 17}, {other: 64})  # ahead of 64 tokens, it takes the pages that could not leave
    second = mine.alloc_reqid()
    assert second == first
    mine.check()
    mine.step({second: 16})
    assert secrets(mine, second, 16) == 0
    mine.check()
    mine.close()
    pool.close()


@target.host_only
@pytest.mark.parametrize("failing", ["cuMemUnmap", "cuMemSetAccess"])
@pytest.mark.parametrize("length", [0, 16])
@pytest.mark.parametrize("cached", [False, True])
def test_what_comes_back_while_a_slot_is_given_away_leaves_with_the_first_step(
    cached: bool, length: int, failing: str
) -> None:
    """Pages of the request before, or its cached blocks, which another request's look-ahead evicts; also with a step
    that needs no page, and would wait for nothing.
    """
    mine, table, pool = faulty(overlap=True, pages=8)
    other, first = mine.alloc_reqid(), mine.alloc_reqid()
    mine.step({other: 16, first: 32})
    for tensor in mine.layer(0):
        tensor[first, :32] = SECRET
    if cached:
        mine.commit(first, list(range(32)))
        mine.free_reqid(first)
    pool._core.drain()
    table.delay = 0.03
    # An unmapping that fails at once is known when the slot is given away.
    table.fail({"cuMemUnmap": 2, "cuMemSetAccess": 1}[failing], name=failing)
    if cached:
        mine.step({other: 16}, {other: 64})
    else:
        mine.free_reqid(first)
    second = mine.alloc_reqid()
    assert second == first
    mine.step({second: length})
    pool._core.drain()
    assert table.failed == failing
    table.delay = 0.0
    table.heal()
    assert secrets(mine, second, 32) == 0
    mine.check()
    mine.close()
    pool.close()


@target.host_only
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ended_first", ["parent", "child"])
def test_blocks_that_requests_shared_leave_with_the_last_of_them(overlap: bool, ended_first: str) -> None:
    with cache(overlap=overlap, eager_pages=0) as mine:
        parent = mine.alloc_reqid()
        mine.step({parent: 100})
        for tensor in mine.layer(0):
            tensor[parent, :100] = SECRET
        child = mine.fork(parent)
        for reqid in (parent, child) if ended_first == "parent" else (child, parent):
            mine.free_reqid(reqid)
            mine.check()
        assert mine.stats().parked_pages == 0
        assert secrets(mine, parent, 128) == secrets(mine, child, 128) == 0


@target.host_only
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_that_are_retracted_leave_idle_slots(overlap: bool) -> None:
    with cache(overlap=overlap, eager_pages=0) as mine:
        first = mine.alloc_reqid()
        mine.step({first: 100})
        for tensor in mine.layer(0):
            tensor[first, :96] = SECRET
        mine.commit(first, list(range(96)))
        second, cached = mine.admit(list(range(100)))
        assert cached == 96
        mine.free_reqid(second)
        mine.retract(first)
        mine.check()
        assert secrets(mine, second, 128) == 0
        mine.free_reqid(first)
        mine.check()
        assert mine.stats().parked_pages == 0
        assert secrets(mine, first, 128) == 0


@target.host_only
def test_the_first_step_removes_what_came_back_even_if_it_adds_no_token() -> None:
    mine, table, pool = faulty(overlap=True)
    other = mine.alloc_reqid()
    first = mine.alloc_reqid()
    mine.step({first: 48, other: 1})
    for tensor in mine.layer(0):
        tensor[first, :48] = SECRET
    mine.commit(first, list(range(16)))
    table.delay = 0.03  # the worker is still busy with what comes after 16 tokens of the other request
    mine.step({other: 16})
    table.fail(1, name="cuMemUnmap")
    mine.free_reqid(first)
    second, cached = mine.admit(list(range(20)))
    assert (second, cached) == (first, 16)
    table.delay = 0
    pool._core.mapper.wait(pool._core.mapper.last)
    mine.step({second: 16})
    assert secrets(mine, second, 48) == 2 * 16, "of the prefix that it was admitted with, and of no more"
    mine.check()
    mine.close()
    pool.close()


@target.host_only
def test_check_sees_pages_of_an_ended_request(monkeypatch: pytest.MonkeyPatch) -> None:
    true = SlotTable.refresh
    monkeypatch.setattr(SlotTable, "refresh", lambda self, passed: (self.leaving.clear(), true(self, passed)))
    mine, table, pool = faulty(overlap=True, max_batch_size=2)
    first = mine.alloc_reqid()
    mine.step({first: 48})
    pool._core.drain()
    table.fail(1, name="cuMemUnmap")
    mine.free_reqid(first)
    with pytest.raises(AssertionError, match="has ended"):
        mine.check()
    mine.alloc_reqid()
    with pytest.raises(AssertionError, match="has ended"):
        mine.check()
    mine.close()
    pool.close()


@target.host_only
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("same", "length"), [(32, 0), (32, 10), (32, 32), (32, 40), (0, 0), (0, 1)])
def test_the_first_step_removes_cached_blocks_that_its_request_does_not_use(
    overlap: bool, same: int, length: int
) -> None:
    with cache(overlap=overlap, max_batch_size=1, eager_pages=0) as mine:
        first = mine.alloc_reqid()
        mine.step({first: 96})
        for tensor in mine.layer(0):
            tensor[first, :96] = SECRET
        mine.commit(first, list(range(96)))
        mine.free_reqid(first)
        mine.check()
        second, cached = mine.admit([*range(same), *range(1000, 1020)])
        assert (second, cached) == (first, same)
        mine.step({second: length})
        assert not any(bool(tensor[second, max(same, length) : 96].any()) for tensor in mine.layer(0))
        mine.check()
