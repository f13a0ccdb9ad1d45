"""What requests that share token blocks are promised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import vattn
from tests.support import scripts
from tests.support.faults import FaultyTable
from tests.support.target import DEVICE, host_only, memory_calls

PAGE = 4096
BLOCK = 64  # tokens; 4 pages
PAGES = 4
BASE: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "dtype": "float32",
    "max_batch_size": 4,
    "max_context_len": 640,
    "memory_budget": 96 * PAGE,
    "device": DEVICE,
    "page_size": PAGE,
    "layout": "layer",
    "overlap": False,
    "eager_pages": 0,
    "watermark": 0,
}
PROMPT = list(range(200))  # 3 blocks and 8 tokens


def make(pool: vattn.PagePool | None = None, **changes: Any) -> vattn.KVCache:
    return vattn.KVCache(vattn.KVConfig(**BASE | changes), pool=pool)


@pytest.fixture
def cache() -> Iterator[vattn.KVCache]:
    with make() as made:
        yield made
        made.check()


def run(cache: vattn.KVCache, ids: list[int], salt: bytes = b"", value: float = 1) -> int:
    """A request that is admitted, computed (`value` in every token that has to be) and committed."""
    reqid, cached = cache.admit(ids, salt)
    cache.step({reqid: len(ids)})
    for layer in range(2):
        for tensor in cache.layer(layer):
            tensor[reqid, cached : len(ids)] = value
    cache.commit(reqid, ids)
    return reqid


def holds(cache: vattn.KVCache, reqid: int, start: int, end: int, value: float) -> bool:
    return all(bool((t[reqid, start:end] == value).all()) for layer in range(2) for t in cache.layer(layer))


def test_find_prefix_says_what_admit_would_find_and_changes_nothing(cache: vattn.KVCache) -> None:
    assert cache.find_prefix(PROMPT) == 0
    first = run(cache, PROMPT, b"salt")
    assert cache.find_prefix(PROMPT, b"salt") == 3 * BLOCK
    assert cache.find_prefix(PROMPT[: 3 * BLOCK], b"salt") == 2 * BLOCK, "a token is left to compute"
    assert cache.find_prefix(PROMPT) == cache.find_prefix([5, *PROMPT[1:]], b"salt") == 0
    cache.free_reqid(first)
    before = cache.stats().query_tokens
    assert cache.find_prefix(PROMPT, b"salt") == 3 * BLOCK
    assert cache.stats().query_tokens == before
    assert cache.admit(PROMPT, b"salt").cached_tokens == 3 * BLOCK
    with pytest.raises(vattn.InvalidLength, match="0 tokens"):
        cache.find_prefix([])
    with pytest.raises(vattn.InvalidTokens, match="bytes"):
        cache.find_prefix(PROMPT, "salt")  # type: ignore[arg-type]


def launched(cache: vattn.KVCache) -> None:
    """On CUDA, kernels are launched by now; the next step says so."""
    cache.step({})


def test_a_prefix_is_there_in_whole_blocks_and_held_once(cache: vattn.KVCache) -> None:
    first = run(cache, PROMPT, value=7)
    others = [cache.admit(PROMPT) for _ in range(3)]
    assert [cached for _, cached in others] == [3 * BLOCK] * 3
    for reqid, cached in others:
        assert holds(cache, reqid, 0, cached, 7)
    stats = cache.stats()
    assert stats.owned_pages == 4 * PAGES
    assert stats.shared_pages == 3 * PAGES
    assert (stats.query_tokens, stats.hit_tokens) == (800, 9 * BLOCK)
    assert first not in {reqid for reqid, _ in others}


def test_the_page_map_shows_what_is_shared(cache: vattn.KVCache) -> None:
    first = run(cache, PROMPT)
    assert [slot.shared for slot in cache.page_map()] == [0] * len(cache.page_map())
    second, _ = cache.admit([*PROMPT[:100], 1000])
    shared = {slot.reqid: slot.shared for slot in cache.page_map() if slot.shared}
    assert shared == {first: BLOCK, second: BLOCK}
    cache.free_reqid(first)
    assert not any(slot.shared for slot in cache.page_map())


@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (64, 0), (65, 64), (128, 64), (129, 128), (640, 192)])
def test_at_least_one_token_is_left_to_compute(cache: vattn.KVCache, tokens: int, cached: int) -> None:
    run(cache, PROMPT)
    assert cache.admit([*PROMPT, *range(1000, 1440)][:tokens]).cached_tokens == cached


def test_tenants_with_different_salts_never_share(cache: vattn.KVCache) -> None:
    run(cache, PROMPT, salt=b"one")
    for salt in (b"", b"two", b"one ", b"on"):
        reqid, cached = cache.admit(PROMPT, salt)
        assert cached == 0
        cache.free_reqid(reqid)
        launched(cache)
    assert cache.stats().shared_pages == 0


def test_a_conversation_goes_on_without_a_driver_call(cache: vattn.KVCache) -> None:
    system = [9] * BLOCK
    talks = [[*system, *([user] * 100)] for user in range(3)]
    for ids in talks:
        cache.free_reqid(run(cache, ids))
        launched(cache)
    calls = memory_calls(cache.stats())
    for turn in range(2):
        for user, ids in enumerate(talks):
            longer = ids + [user] * 20 * (turn + 1)
            assert cache.admit(longer).cached_tokens == 2 * BLOCK
        for reqid in range(4):
            if cache.page_map()[reqid].active:
                cache.free_reqid(reqid)
        launched(cache)
    assert memory_calls(cache.stats()) == calls


def test_elsewhere_access_is_set_once_per_lane(cache: vattn.KVCache) -> None:
    run(cache, PROMPT)
    before = memory_calls(cache.stats())
    cache.admit(PROMPT)
    after = memory_calls(cache.stats())
    assert after["cuMemSetAccess"].count - before["cuMemSetAccess"].count == 4
    assert after["cuMemMap"].count - before["cuMemMap"].count == 12
    assert after["cuMemUnmap"] == before["cuMemUnmap"]


def test_a_fork_shares_blocks_and_copies_the_rest(cache: vattn.KVCache) -> None:
    parent = run(cache, PROMPT, value=3)
    child = cache.fork(parent)
    assert holds(cache, child, 0, 200, 3)
    assert cache.stats().shared_pages == 3 * PAGES
    for layer in range(2):
        for tensor in cache.layer(layer):
            tensor[child, 192:200] = 5
    assert holds(cache, parent, 0, 200, 3)
    grandchild = cache.fork(child)
    cache.free_reqid(parent)
    cache.free_reqid(child)
    assert holds(cache, grandchild, 0, 192, 3)
    assert holds(cache, grandchild, 192, 200, 5)


def test_a_fork_needs_nothing_committed_and_what_it_shares_may_be_committed_later(cache: vattn.KVCache) -> None:
    parent = cache.alloc_reqid()
    cache.step({parent: 130})
    child = cache.fork(parent)
    cache.commit(child, PROMPT[:130])
    with pytest.raises(vattn.TokenMismatch, match="shares it"):
        cache.commit(parent, [5] * 130)
    cache.commit(parent, PROMPT[:130])
    assert cache.admit(PROMPT).cached_tokens == 2 * BLOCK


def test_writing_anew_below_the_blocks_end_copies_first(cache: vattn.KVCache) -> None:
    first = run(cache, PROMPT, value=1)
    second = run(cache, PROMPT, value=1)
    for reqid, value in ((second, 2), (first, 3)):
        cache.step({reqid: 100})
        cache.step({reqid: 200})
        assert holds(cache, reqid, 0, 100, 1)
        for layer in range(2):
            for tensor in cache.layer(layer):
                tensor[reqid, 100:200] = value
        cache.check()
    assert holds(cache, second, 100, 200, 2)
    third = cache.admit(PROMPT)
    assert third.cached_tokens == 3 * BLOCK
    assert holds(cache, third.reqid, 0, 3 * BLOCK, 1)


def test_cached_pages_go_before_a_step_is_refused(cache: vattn.KVCache) -> None:
    for value in range(4):
        cache.free_reqid(run(cache, [value] * 200))
        launched(cache)
    assert cache.stats().cached_pages == 12 * PAGES
    total = cache.total_pages
    assert cache.available_pages() == total
    slots = [cache.alloc_reqid() for _ in range(3)]
    cache.step(dict.fromkeys(slots, 512))
    assert cache.stats().owned_pages == total
    assert cache.stats().cached_pages == 0
    with pytest.raises(vattn.OutOfPages):
        cache.step({slots[0]: 513})


def test_the_least_recently_used_goes_first_and_of_it_the_end(cache: vattn.KVCache) -> None:
    for value in range(3):
        cache.free_reqid(run(cache, [value] * 200))
        launched(cache)
    cache.free_reqid(cache.admit([0] * 200).reqid)  # used again
    launched(cache)
    slots = [cache.alloc_reqid(), cache.alloc_reqid()]
    blocks = (cache.total_pages - cache.stats().cached_pages) // PAGES + 1  # one more than without eviction
    cache.step({slots[0]: 640, slots[1]: blocks * BLOCK - 640})
    for reqid in slots:
        cache.free_reqid(reqid)
    launched(cache)
    cached = [cache.admit([value] * 200).cached_tokens for value in range(3)]
    assert cached == [3 * BLOCK, 2 * BLOCK, 3 * BLOCK]


def test_with_everything_referenced_nothing_is_evicted(cache: vattn.KVCache) -> None:
    reqid = run(cache, PROMPT)
    assert cache.evict_prefixes() == 0
    assert cache.admit(PROMPT).cached_tokens == 3 * BLOCK
    cache.free_reqid(reqid)
    assert cache.evict_prefixes() == 0


@pytest.mark.parametrize("whose", ["first", "second"])
def test_what_is_unshared_is_written_by_one_alone(cache: vattn.KVCache, whose: str) -> None:
    first = run(cache, PROMPT, value=7)
    second, cached = cache.admit(PROMPT)
    cache.step({second: 200})
    mine, other = (first, second) if whose == "first" else (second, first)
    cache.unshare(mine)
    assert cache.page_map()[mine].shared == 0
    assert cache.stats().owned_pages == 8 * PAGES
    assert holds(cache, mine, 0, cached, 7)
    for layer in range(2):
        for tensor in cache.layer(layer):
            tensor[mine, :cached] = 5
    assert holds(cache, other, 0, cached, 7)
    cache.unshare(mine)  # again, which is nothing
    assert holds(cache, mine, 0, cached, 5)
    assert cache.admit(PROMPT).cached_tokens == cached, "what was committed stays"
    cache.commit(mine, PROMPT)  # the same tokens are cached already: its own pages are not published


def test_no_budget_to_unshare_changes_nothing() -> None:
    with make(memory_budget=(4 + 4) * PAGES * PAGE - PAGE) as cache:
        first = run(cache, PROMPT, value=7)
        second, cached = cache.admit(PROMPT)
        cache.step({second: 200})
        before = cache.page_map()
        with pytest.raises(vattn.OutOfPages, match=r"1 .* are missing"):
            cache.unshare(second)
        assert cache.page_map() == before
        assert holds(cache, second, 0, cached, 7)
        cache.check()
        cache.free_reqid(first)
        launched(cache)
        cache.unshare(second)
        cache.check()
    with make() as cache, pytest.raises(vattn.InvalidSlot):
        cache.unshare(0)


def test_evict_prefixes_frees_what_nobody_uses(cache: vattn.KVCache) -> None:
    cache.free_reqid(run(cache, PROMPT))
    launched(cache)
    assert cache.evict_prefixes() >= 3 * PAGES
    assert cache.stats().cached_pages == 0
    assert cache.admit(PROMPT).cached_tokens == 0


def test_cached_pages_need_not_be_mapped() -> None:
    with make(deferred_reclamation=False) as cache:
        cache.free_reqid(run(cache, PROMPT, value=4))
        launched(cache)
        assert sum(slot.pages for slot in cache.page_map()) == 0
        assert cache.stats().cached_pages == 3 * PAGES
        reqid, cached = cache.admit(PROMPT)
        assert holds(cache, reqid, 0, cached, 4)
        cache.check()


def test_bad_input_changes_nothing(cache: vattn.KVCache) -> None:
    reqid = run(cache, PROMPT)
    for ids in (PROMPT[:100], [*PROMPT, 1], [5, *PROMPT[1:]]):
        with pytest.raises(vattn.TokenMismatch):
            cache.commit(reqid, ids)
    for ids in ([], [0] * 641):
        with pytest.raises(vattn.InvalidLength):
            cache.admit(ids)
    salt: Any = "text"
    with pytest.raises(vattn.InvalidTokens):
        cache.admit(PROMPT, salt)
    for call in (lambda: cache.fork(3), lambda: cache.fork(99), lambda: cache.commit(3, [])):
        with pytest.raises(vattn.InvalidSlot):
            call()
    for _ in range(3):
        cache.fork(reqid)
    with pytest.raises(vattn.NoFreeSlot):
        cache.fork(reqid)
    with pytest.raises(vattn.NoFreeSlot):
        cache.admit(PROMPT)


def test_every_failure_in_the_middle_of_sharing_changes_nothing() -> None:
    def play(fail_at: int | None) -> tuple[int, bool]:
        table = FaultyTable()
        pool = vattn.PagePool(96 * PAGE, device=DEVICE, page_size=PAGE, table=table.addresses)
        cache = make(pool)
        parent = run(cache, PROMPT, value=2)
        cache.free_reqid(run(cache, [5] * 200, value=5))
        launched(cache)
        calls = sum(table.calls.values())
        failures = 0
        if fail_at is not None:
            table.fail(fail_at)
        for call in (lambda: cache.admit(PROMPT), lambda: cache.fork(parent), lambda: cache.admit([5] * 130)):
            before = cache.page_map(), cache.stats().owned_pages, cache.stats().cached_pages, cache.stats().hit_tokens
            try:
                call()
            except vattn.DriverError:
                failures += 1
                with table.transparent():
                    cache.check()
                after = (
                    cache.page_map(),
                    cache.stats().owned_pages,
                    cache.stats().cached_pages,
                    cache.stats().hit_tokens,
                )
                assert after == before
                call()
            with table.transparent():
                cache.check()
        calls = sum(table.calls.values()) - calls
        assert holds(cache, parent, 0, 200, 2)
        table.heal()
        cache.close()
        pool.close()
        return calls, failures == 1

    calls, failed = play(None)
    assert not failed
    assert calls > 30
    for nth in range(1, calls + 1):
        assert play(nth)[1]


STRAY_WRITE = """
import vattn
cache = vattn.KVCache(vattn.KVConfig(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32", max_batch_size=2,
    max_context_len=640, memory_budget="1MiB", page_size=4096, layout="layer"))
ids = list(range(200))
first, _ = cache.admit(ids)
cache.step({first: 200})
cache.commit(first, ids)
second, cached = cache.admit(ids)
cache.step({second: 200})
k, _ = cache.layer(0)
k[second, cached:200] = 1
assert cached == 192 and float(k[second, :cached].sum()) == 0
print("so far", flush=True)
k[second, cached - 1] = 1
print("too far", flush=True)
"""


@host_only
def test_a_stray_write_through_a_sharer_faults() -> None:
    done = scripts.run(STRAY_WRITE)
    assert done.stdout == "so far\n", done.stderr
    assert done.returncode == -11


@pytest.mark.parametrize("how", ["admit", "fork"])
def test_a_slot_whose_memory_is_still_being_mapped_is_waited_for(how: str) -> None:
    """A request took the slot of another, for which pages were queued ahead, and needs no others at first."""
    table = FaultyTable()
    pool = vattn.PagePool(96 * PAGE, device=DEVICE, page_size=PAGE, table=table.addresses)
    with make(pool, overlap=True) as cache:
        parent, first = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({parent: 40})
        with table.holding("cuMemCreate", after=8):  # which the step needs; the other four are ahead of need
            cache.step({first: 64})
            cache.free_reqid(first)
            slot = cache.fork(parent) if how == "fork" else cache.admit(PROMPT).reqid
            assert slot == first
            cache.step({slot: 64})
            assert table.ended["cuMemMap"] == 8
            table.delay = 0.01
        cache.step({slot: 100})
        assert table.ended["cuMemSetAccess"] == 12
        for tensor in cache.layer(0):
            tensor[slot, :100] = 1
        table.delay = 0


@host_only
@pytest.mark.parametrize("failing", ["cuMemUnmap", "cuMemSetAccess"])
def test_blocks_that_come_back_while_a_step_waits_are_not_written_to(failing: str) -> None:
    """The step was planned when they were believed to have been evicted, for what another request will need."""
    table = FaultyTable()
    pool = vattn.PagePool(20 * PAGE, device=DEVICE, page_size=PAGE, table=table.addresses)
    with make(pool, overlap=True, memory_budget=20 * PAGE, max_batch_size=2) as cache:
        other = cache.alloc_reqid()
        cache.step({other: BLOCK})
        first = run(cache, PROMPT[: 2 * BLOCK])
        cache.free_reqid(first)
        pool._core.drain()
        table.delay = 0.03
        table.fail({"cuMemUnmap": 2, "cuMemSetAccess": 1}[failing], name=failing)
        cache.step({other: BLOCK}, {other: 5 * BLOCK})
        assert cache.stats().cached_pages == 0
        second = cache.alloc_reqid()
        assert second == first
        cache.step({second: BLOCK})
        assert table.failed == failing
        table.delay = 0.0
        for layer in range(2):
            for tensor in cache.layer(layer):
                tensor[second, :BLOCK] = 2
        cache.free_reqid(other)
        third, cached = cache.admit(PROMPT)
        assert cached >= BLOCK
        assert holds(cache, third, 0, cached, 1)
        cache.check()
    pool.close()


def test_token_ids_may_be_a_tensor(cache: vattn.KVCache) -> None:
    run(cache, PROMPT)
    ids: Any = torch.tensor(PROMPT)
    assert cache.admit(ids).cached_tokens == 3 * BLOCK


def test_rows_that_do_not_divide_pages_have_blocks_of_several() -> None:
    with make(head_dim=24, v_head_dim=40) as cache:  # rows of 96 and of 160 bytes
        run(cache, list(range(300)), value=6)
        reqid, cached = cache.admit(list(range(300)))
        assert cached == 256
        cache.check()
        cache.step({reqid: 300})
        cache.check()


def test_what_is_available_knows_that_a_block_stays_whole() -> None:
    """K and V rows of different sizes: a block is two pages of K and one of V, a token one of each, in two layers."""
    with make(v_head_dim=8) as cache:
        cache.free_reqid(run(cache, PROMPT))
        reqid, cached = cache.admit(PROMPT)
        assert cached == cache.prefix_block_tokens == 128
        cache.step({reqid: 1})
        assert cache.available_pages() == 96 - 6
        other = cache.alloc_reqid()
        most = max(n for n in range(641) if cache.pages_needed(n, other) <= cache.available_pages())
        cache.step({other: most})
        cache.check()


def test_guard_rows_of_a_step_do_not_lie_in_blocks_that_may_be_evicted() -> None:
    """A request admitted with the first block of an earlier one, whose others are left over in its slot, goes back."""
    with make(max_batch_size=1, guard_rows=5, overlap=False, eager_pages=0, watermark=0) as cache:
        ids = list(range(4 * BLOCK))
        cache.free_reqid(run(cache, ids))
        launched(cache)
        reqid, cached = cache.admit([*ids[:BLOCK], *[7] * BLOCK])
        assert cached == BLOCK
        cache.step({reqid: BLOCK - 1})
        cache.evict_prefixes()
        cache.check()
        (mapped,) = [entry.mapped for entry in cache.page_map() if entry.active]
        assert mapped >= BLOCK - 1 + 5
