"""What layers with a sliding window, and layers that differ, are promised."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import vattn
from tests.support.faults import FaultyTable
from tests.support.target import DEVICE, host_only

PAGE = 4096
BLOCK = 64  # tokens of a page, in every layer here
WINDOW = 100
BOUND = -(-(WINDOW + BLOCK - 1) // BLOCK)  # pages of a lane that a window can touch
GLOBAL, LOCAL = 0, 1  # the layers
HYBRID: dict[str, Any] = {
    "groups": [
        vattn.TensorGroup(layers=[GLOBAL], num_kv_heads=1, head_dim=16),
        vattn.TensorGroup(layers=[LOCAL], num_kv_heads=1, head_dim=16, sliding_window=WINDOW),
    ],
    "dtype": "float32",
    "max_batch_size": 3,
    "max_context_len": 640,
    "memory_budget": 60 * PAGE,
    "device": DEVICE,
    "page_size": PAGE,
    "layout": "layer",
    "overlap": False,
    "eager_pages": 0,
    "watermark": 0,
}
# On CUDA kernels read whole tiles before a window, and the windows here are shorter than a tile.
pytestmark = host_only


def make(**changes: Any) -> vattn.KVCache:
    return vattn.KVCache(vattn.KVConfig(**HYBRID | changes))


def only_local(**changes: Any) -> vattn.KVCache:
    plain = {"groups": None, "num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "sliding_window": WINDOW}
    return make(**plain | changes)


def local_pages(start: int, end: int) -> int:
    """Pages of one windowed layer whose last step computed tokens `[start, end)`."""
    return 2 * (-(-end // BLOCK) - max(0, start - WINDOW + 1) // BLOCK)


def write(cache: vattn.KVCache, reqid: int, start: int, end: int) -> None:
    """Its position, in every token."""
    for layer in cache.layers:
        for tensor in cache.layer(layer):
            tensor[reqid, start:end] = torch.arange(start, end).to(tensor.dtype)[:, None, None]


def found(cache: vattn.KVCache, layer: int, reqid: int, start: int, end: int) -> bool:
    """Whether the positions are still there."""
    expected = torch.arange(start, end)[:, None, None]
    return all(bool((tensor[reqid, start:end] == expected).all()) for tensor in cache.layer(layer))


def compute(cache: vattn.KVCache, reqid: int, start: int, end: int, chunk: int = 1) -> None:
    """Tokens `[start, end)`, some at a time, each of which sees its window."""
    for first in range(start, end, chunk):
        last = min(end, first + chunk)
        cache.step({reqid: last})
        write(cache, reqid, first, last)
        assert found(cache, LOCAL if LOCAL in cache.layers else 0, reqid, max(0, first - WINDOW + 1), last)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", ["layer", "sliced", "fused"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_request_in_a_window_takes_the_window_and_a_block(overlap: bool, layout: str, order: str) -> None:
    with only_local(overlap=overlap, layout=layout, kv_order=order) as cache:
        reqid = cache.alloc_reqid()
        block = cache.layout.bands[0].block_tokens
        for length in range(1, 641):
            cache.step({reqid: length})
            write(cache, reqid, length - 1, length)
            tokens = cache.stats().owned_pages * PAGE / cache.layout.bytes_per_token
            assert tokens <= WINDOW + 2 * block  # the second is mapped ahead
        assert found(cache, 0, reqid, 640 - WINDOW, 640)
        assert not cache.layer(0)[0][reqid, : 640 - WINDOW - 2 * block].any(), "what was released reads as zeros"
        cache.check()


def test_groups_of_one_cache_grow_and_shrink_apart() -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        compute(cache, reqid, 0, 640)
        assert found(cache, GLOBAL, reqid, 0, 640)
        assert cache.stats().owned_pages == 2 * 10 + local_pages(639, 640)
        assert cache.stats().live_bytes == 2 * 64 * (640 + WINDOW)
        cache.check()


def test_a_long_prompt_at_once_takes_all_of_it_until_the_next_step() -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        compute(cache, reqid, 0, 600, chunk=600)
        assert cache.stats().owned_pages == 4 * 10
        compute(cache, reqid, 600, 601)
        assert cache.stats().owned_pages == 2 * 10 + local_pages(600, 601)
        cache.check()


def test_chunks_take_the_window_and_the_chunk() -> None:
    with only_local() as cache:
        reqid = cache.alloc_reqid()
        most = 0
        for start in range(0, 640, 80):
            compute(cache, reqid, start, start + 80, chunk=80)
            most = max(most, cache.stats().owned_pages)
        assert most <= 2 * -(-(WINDOW + 80 + BLOCK) // BLOCK)


def test_the_budget_serves_more_with_a_window() -> None:
    """Three requests of 640 tokens need 60 pages without windows; here 20 are given to two windowed layers."""
    with only_local(memory_budget=3 * 2 * BOUND * PAGE) as cache:
        assert cache.capacity().tokens == 3 * 640
        requests = [cache.alloc_reqid() for _ in range(3)]
        for length in range(1, 641):
            assert sum(cache.pages_needed(length, r) for r in requests) <= cache.available_pages()
            cache.step(dict.fromkeys(requests, length))
        cache.check()


def test_what_was_computed_last_can_be_taken_back() -> None:
    """Speculation: drafts are verified, some rejected, always from where the last step began."""
    with make() as cache:
        reqid = cache.alloc_reqid()
        compute(cache, reqid, 0, 200, chunk=50)
        length = 200
        while length < 600:
            cache.step({reqid: length + 7})
            write(cache, reqid, length, length + 7)
            length += 3
            cache.step({reqid: length})
            assert found(cache, LOCAL, reqid, length - WINDOW + 1, length)
        cache.check()


def test_a_request_that_is_restored_backs_its_window_only() -> None:
    """Tokens [0, 500) are copied in, as far as they are seen; computation goes on from there."""
    with make() as cache:
        parked = cache.alloc_reqid()
        compute(cache, parked, 0, 90, chunk=30)
        cache.free_reqid(parked)  # what it leaves in the slot lies before the window
        reqid = cache.alloc_reqid(501, start=500)
        cache.step({reqid: 501})
        assert cache.stats().owned_pages == 2 * 8 + local_pages(500, 501)
        write(cache, reqid, 500 - WINDOW + 1, 501)
        compute(cache, reqid, 501, 600)
        cache.check()
        for start in (-1, 641):
            with pytest.raises(vattn.InvalidLength, match=f"start is {start}, but must be from 0 to max_context_len"):
                cache.alloc_reqid(start=start)


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1])
def test_a_request_that_is_shorter_than_announced_gets_its_window_back(length: int) -> None:
    """Short of memory, the cache takes what lies before the announced window from the slot; then less is computed."""
    with make(max_batch_size=2, memory_budget=14 * PAGE) as cache:
        parked = cache.alloc_reqid()
        cache.step({parked: 3 * BLOCK})
        cache.free_reqid(parked)
        reqid = cache.alloc_reqid(3 * BLOCK, start=200)
        assert reqid == parked
        other = cache.alloc_reqid()
        cache.step({other: 1})  # 4 pages, where 2 are free
        assert not cache._bands.sees(reqid, length)
        cache.free_reqid(other)
        cache.step({reqid: length})
        cache.check()
        write(cache, reqid, 0, length)
        assert found(cache, LOCAL, reqid, 0, length)


def test_going_back_behind_what_was_released_is_refused() -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        compute(cache, reqid, 0, 500)
        before = cache.stats()
        with pytest.raises(
            vattn.InvalidLength, match=r"cannot go back from 500 tokens to 200.*left the sliding window"
        ):
            cache.step({reqid: 200})
        assert cache.stats().live_tokens == before.live_tokens == 500
        cache.step({reqid: 490})  # the blocks of its window are there
        assert found(cache, LOCAL, reqid, 490 - WINDOW + 1, 490)
        cache.step({reqid: 0})
        compute(cache, reqid, 0, 300, chunk=30)
        assert found(cache, GLOBAL, reqid, 0, 300)
        cache.check()


def test_a_slot_that_was_behind_a_window_serves_the_next_request() -> None:
    with make() as cache:
        for _ in range(4):
            reqid = cache.alloc_reqid()
            compute(cache, reqid, 0, 400, chunk=25)
            cache.check()
            cache.free_reqid(reqid)
            cache.step({})
            # The windowed layer's pages begin in the middle: no request can start with them. The others stay parked.
            assert cache.stats().parked_pages == 2 * 7
            cache.check()


@pytest.mark.parametrize("deferred", [False, True])
def test_slots_are_reused_whatever_is_left_in_them(deferred: bool) -> None:
    with make(deferred_reclamation=deferred, max_batch_size=1) as cache:
        for length in (640, 30, 150, 640):
            reqid = cache.alloc_reqid()
            compute(cache, reqid, 0, length, chunk=40)
            assert found(cache, GLOBAL, reqid, 0, length)
            cache.free_reqid(reqid)
            cache.check()


def request(cache: vattn.KVCache, ids: list[int], chunk: int = 32) -> tuple[int, int]:
    """A request that is admitted, computed and committed as it goes."""
    reqid, cached = cache.admit(ids)
    for start in range(cached, len(ids), chunk):
        compute(cache, reqid, start, min(len(ids), start + chunk), chunk=chunk)
        cache.commit(reqid, ids[: start + chunk])
    return reqid, cached


PROMPT = list(range(330))  # 5 blocks and 10 tokens


def test_a_prefix_is_found_whose_window_is_cached() -> None:
    """The first request went on until the prefix's own window had left its slot; its blocks are cached."""
    with make() as cache:
        first, cached = request(cache, PROMPT)
        assert cached == 0
        compute(cache, first, len(PROMPT), 600)
        second, cached = request(cache, PROMPT[:320] + [7] * 100)
        assert cached == 320
        assert found(cache, GLOBAL, second, 0, 420)
        assert found(cache, LOCAL, second, 420 - WINDOW, 420)
        assert cache.stats().hit_tokens == 320
        cache.check()


def test_a_prefix_is_not_found_whose_window_is_gone() -> None:
    with make() as cache:
        first, _ = request(cache, PROMPT)
        compute(cache, first, len(PROMPT), 331)
        cache.evict_prefixes()  # what had left the first request's window; what it uses stays
        _, cached = cache.admit(PROMPT[:130])
        assert cached == 0
        reqid, cached = cache.admit([*PROMPT[:320], 1])
        assert cached == 320
        cache.step({reqid: 321})
        assert found(cache, LOCAL, reqid, 320 - WINDOW + 1, 320)
        cache.check()


def test_blocks_that_left_a_window_give_way_to_running_requests() -> None:
    with make(memory_budget=(4 * 6 + 2 * 10) * PAGE) as cache:
        first, _ = request(cache, PROMPT)
        compute(cache, first, len(PROMPT), 331)
        assert cache.stats().cached_pages == 2 * 3
        second = cache.alloc_reqid()
        compute(cache, second, 0, 600, chunk=20)
        assert found(cache, GLOBAL, first, 0, 331)
        assert found(cache, LOCAL, first, 331 - WINDOW, 331)
        cache.check()


def test_a_conversation_goes_on_where_it_ended() -> None:
    """Multi-turn: each turn finds all whole blocks of the turns before, although most have left the window."""
    with make() as cache:
        ids = list(range(150))
        for turn in range(4):
            reqid, cached = request(cache, ids)
            assert cached == (len(ids) - 100) // BLOCK * BLOCK * (turn > 0)
            assert found(cache, GLOBAL, reqid, 0, len(ids))
            cache.free_reqid(reqid)
            cache.check()
            ids += range(1000 * turn, 1000 * turn + 100)


@pytest.mark.parametrize("length", [40, 64, 128, 200, 256, 500])
def test_a_fork_sees_the_window(length: int) -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        compute(cache, reqid, 0, length, chunk=10)
        child = cache.fork(reqid)
        for each in (reqid, child):
            assert found(cache, GLOBAL, each, 0, length)
            assert found(cache, LOCAL, each, max(0, length - WINDOW + 1), length)
        cache.check()
        compute(cache, child, length, 560)
        compute(cache, reqid, length, 600, chunk=20)
        assert found(cache, GLOBAL, child, 0, 560)
        cache.check()
        owned = cache.stats().owned_pages
        assert owned == 2 * (9 + 10 - length // BLOCK) + local_pages(559, 560) + local_pages(580, 600)


def test_a_step_that_fails_leaves_the_window_where_it_was() -> None:
    with make(memory_budget=44 * PAGE) as cache:
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        compute(cache, first, 0, 500, chunk=50)
        with pytest.raises(vattn.OutOfPages):
            cache.step({second: 640, first: 501})
        assert found(cache, LOCAL, first, 500 - WINDOW + 1, 500)
        cache.step({first: 460})
        assert found(cache, LOCAL, first, 460 - WINDOW + 1, 460)
        cache.check()


def test_layers_without_values_and_of_several_types() -> None:
    """Latents of one tensor, 8-bit values with their scales in a group of their own, a layer that stores nothing."""
    groups = [
        vattn.TensorGroup(layers=[0, 3], num_kv_heads=1, head_dim=48, v_head_dim=0, dtype="bfloat16"),
        vattn.TensorGroup(layers=[1], num_kv_heads=2, head_dim=16, v_head_dim=8, dtype="int8", sliding_window=WINDOW),
        vattn.TensorGroup(layers=[4], num_kv_heads=2, head_dim=1, sliding_window=WINDOW),
    ]
    with make(groups=groups, memory_budget="1MiB") as cache:
        assert cache.layers == (0, 1, 3, 4)
        assert cache.layout.bytes_per_token == 2 * 48 * 2 + 2 * 24 + 2 * 2 * 4
        key, value = cache.layer(3)
        assert (key.shape, key.dtype, value.shape) == ((3, 640, 1, 48), torch.bfloat16, (3, 640, 1, 0))
        assert cache.layer(1)[0].dtype == torch.int8
        reqid = cache.alloc_reqid()
        for length in range(1, 641):
            cache.step({reqid: length})
            for layer in cache.layers:
                for tensor in cache.layer(layer):
                    tensor[reqid, length - 1] = (length - 1) % 100
        expected = torch.arange(640)[:, None, None] % 100
        for layer, first in ((0, 0), (3, 0), (1, 640 - WINDOW), (4, 640 - WINDOW)):
            for tensor in cache.layer(layer):
                assert torch.equal(
                    tensor[reqid, first:], expected[first:].expand_as(tensor[reqid, first:]).to(tensor.dtype)
                )
        with pytest.raises(IndexError, match="layer 2 is not one of the cache's: 0, 1, 3, 4"):
            cache.layer(2)
        cache.check()


@host_only
@pytest.mark.parametrize("length", [37, 52])
def test_pages_that_come_back_to_a_window_after_a_commit_are_blocks_of_its_request(length: int) -> None:
    table = FaultyTable()
    pool = vattn.PagePool(40 * 4096, page_size=4096, zero_on_free=True, table=table.addresses)
    config = vattn.KVConfig(
        num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", max_batch_size=2, max_context_len=64,
        page_size=4096, sliding_window=4, zero_on_free=True,
    )  # fmt: skip
    cache = vattn.KVCache(config, pool=pool)
    assert cache.prefix_block_tokens == 16
    slot = cache.alloc_reqid()
    cache.step({slot: length - 1})
    cache.check()
    table.fail(1, name="cuMemMap")  # which zeroing needs once the pages are unmapped
    table.delay = 0.1  # until the request has published them
    cache.step({slot: length})
    cache.commit(slot, list(range(length)))
    table.delay = 0.0
    cache.check()
    assert table.failed == "cuMemMap"
    cache.step({slot: 60})
    cache.commit(slot, list(range(60)))
    cache.free_reqid(slot)
    cache.evict_prefixes()
    cache.check()
    cache.close()
    pool.close()


def test_a_fork_that_is_refused_leaves_the_window_that_was_in_its_slot() -> None:
    """The fork finds blocks of the larger window there and has some unmapped, and other blocks of the smaller one."""
    text = list(range(600))
    windows = [
        vattn.TensorGroup(layers=[i], num_kv_heads=1, head_dim=16, sliding_window=n) for i, n in ((0, 400), (1, 100))
    ]
    refused = 0
    for pages in range(20, 60):
        with make(groups=windows, max_batch_size=2, memory_budget=pages * PAGE) as cache:
            first, _ = cache.admit(text)
            with contextlib.suppress(vattn.OutOfPages):
                cache.step({first: 300})
                write(cache, first, 0, 300)
                cache.commit(first, text[:300])
                second = cache.fork(first)
                cache.free_reqid(second)
                for end in (500, 600):
                    cache.step({first: end})
                    write(cache, first, end - 200, end)
                cache.commit(first, text[:590])
                cache.check()
                before = cache.page_map()
                try:
                    cache.fork(first)
                except vattn.OutOfPages:
                    refused += 1
                    assert cache.page_map() == before
            cache.check()
    assert refused
