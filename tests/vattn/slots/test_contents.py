"""No request is ever served what it did not compute, or share knowingly: ways in which it once was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import vattn
from tests.support.faults import FaultyTable
from tests.support.target import DEVICE, host_only
from vattn.prefix import block_keys, root_key

WINDOW = 4
GLOBAL, LOCAL = 0, 1  # the layers
PAGE = 4096


def make(*, pool: vattn.PagePool | None = None, **options: Any) -> vattn.KVCache:
    plain: dict[str, Any] = {
        "groups": [
            vattn.TensorGroup(layers=[GLOBAL], num_kv_heads=1, head_dim=32),
            vattn.TensorGroup(layers=[LOCAL], num_kv_heads=1, head_dim=32, sliding_window=WINDOW),
        ],
        "dtype": "float32",
        "max_batch_size": 4,
        "max_context_len": 512,
        "memory_budget": "1MiB",
        "page_size": PAGE,
        "layout": "layer",
        "eager_pages": 0,
        "device": DEVICE,
    }
    return vattn.KVCache(vattn.KVConfig(**plain | options), pool=pool)


def fill(cache: vattn.KVCache, slot: int, start: int, end: int, value: float) -> None:
    for layer in cache.layers:
        for tensor in cache.layer(layer):
            tensor[slot, start:end] = value


def values(cache: vattn.KVCache, slot: int, start: int, end: int, layer: int = LOCAL) -> set[float]:
    return {float(value) for tensor in cache.layer(layer) for value in tensor[slot, start:end].flatten()}


@pytest.mark.parametrize(
    "bad", [2, -1, None, "0", 0.0, False, np.bool_(True), np.float32(0), [], {}, torch.tensor(0.0)]
)
def test_what_is_no_layer_is_refused(bad: Any) -> None:
    with make() as cache:
        with pytest.raises(IndexError, match="is not one of the cache's: 0, 1"):
            cache.layer(bad)
        assert cache.layer(np.int64(LOCAL))[0] is cache.layer(LOCAL)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0.0, False, np.array([0]), torch.tensor(0.0), complex(0), np.float32(3)])
def test_what_is_no_length_in_a_sequence_is_refused(bad: Any) -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        with pytest.raises(vattn.InvalidLength, match="not a whole number"):
            cache.step([bad if slot == reqid else 0 for slot in range(4)])
        cache.step([np.int8(3) if slot == reqid else 0 for slot in range(4)])
        assert cache.page_map()[reqid].length == 3


# Blocks that have left a window


@pytest.fixture
def behind() -> Any:
    """A request whose first block has left the window, and an idle slot with another request's pages."""
    with make() as cache:
        block = cache.prefix_block_tokens
        earlier, parent = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({earlier: block})
        fill(cache, earlier, 0, block, 666.0)
        cache.step({parent: block + 8})
        fill(cache, parent, 0, block + 8, 1.0)
        cache.step({parent: block + 9})
        fill(cache, parent, block + 8, block + 9, 1.0)
        cache.free_reqid(earlier)
        yield cache, parent, block


@host_only
def test_a_fork_does_not_take_parked_pages_for_blocks_that_have_left_its_window(behind: Any) -> None:
    cache, parent, block = behind
    child = cache.fork(parent)
    tokens = list(range(2 * block))
    cache.check()
    cache.commit(child, tokens[: block + 9])
    cache.check()
    other, cached = cache.admit([*tokens[:block], -5, -6])
    assert values(cache, other, max(0, cached - WINDOW + 1), cached) <= {1.0}
    with pytest.raises(vattn.InvalidLength, match="left the sliding window"):
        cache.step({child: block - 2})


@host_only
def test_the_fork_of_such_a_fork_can_be_refused(behind: Any) -> None:
    cache, parent, _ = behind
    child = cache.fork(parent)
    slots = [cache.alloc_reqid(), cache.alloc_reqid()]
    with pytest.raises(vattn.NoFreeSlot):
        cache.fork(child)
    cache.check()
    for slot in (child, *slots):
        cache.free_reqid(slot)
    cache.check()


@host_only
def test_rows_that_a_fork_did_not_copy_are_not_published() -> None:
    """The child starts in the middle of a block, of which the parent's window has only the rest."""
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32, sliding_window=WINDOW) as cache:
        block = cache.prefix_block_tokens
        tokens = list(range(4 * block))
        parent = cache.alloc_reqid(start=block + 5)
        cache.step({parent: block + 6})
        fill(cache, parent, block + 5 - WINDOW + 1, block + 6, 1.0)
        child = cache.fork(parent)
        for slot in (parent, child):
            cache.step({slot: 2 * block})
            fill(cache, slot, block + 6, 2 * block, 1.0)
            cache.commit(slot, tokens[: 2 * block])
            cache.check()
        hit, cached = cache.admit([*tokens[: 2 * block], 7])
        assert cached in (0, 2 * block)
        assert values(cache, hit, cached - WINDOW + 1, cached, layer=0) <= {1.0}


@host_only
def test_check_sees_pages_in_place_of_blocks_that_have_left(behind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vattn.slots.bands import BandPages

    cache, parent, _ = behind
    in_place = BandPages.in_place
    monkeypatch.setattr(
        BandPages, "in_place", lambda self, slot, blocks, end: not blocks or in_place(self, slot, blocks, end)
    )
    child = cache.fork(parent)
    with pytest.raises(AssertionError, match="in place of blocks"):
        cache.check()
    cache.free_reqid(child)


# Copies


@host_only
def test_a_fork_is_copied_to_pages_that_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle slot has just been emptied in the background, and backed anew for the next request."""
    from vattn.slots.rows import TokenRows

    write = TokenRows.write
    table = FaultyTable()
    pool = vattn.PagePool("1MiB", page_size=PAGE, table=table.addresses)
    in_place = []

    def watched(*arguments: Any) -> None:
        in_place.append(pool._core.mapper.passed(pool._core.mapper.last))
        write(*arguments)

    monkeypatch.setattr(TokenRows, "write", watched)
    with make(pool=pool, deferred_reclamation=False, eager_pages=1, max_batch_size=2) as cache:
        parent, earlier = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({parent: 1, earlier: 9})
        pool._core.drain()
        table.delay = 0.02
        cache.free_reqid(earlier)
        cache.fork(parent)
        assert in_place == [True] * len(cache.layers)
    pool.close()


# Tokens that are copied in


@host_only
def test_rows_before_a_window_that_were_never_copied_in_are_not_published() -> None:
    with make() as cache:
        block = cache.prefix_block_tokens
        earlier = cache.alloc_reqid()
        cache.step({earlier: 512})
        fill(cache, earlier, 0, 512, 666.0)
        cache.free_reqid(earlier)
        length, tokens = 2 * block + 2, list(range(3 * block))
        restored = cache.alloc_reqid(length + 1, start=length)
        cache.step({restored: length})
        for tensor in cache.layer(GLOBAL):
            tensor[restored, :length] = 1.0
        for tensor in cache.layer(LOCAL):
            tensor[restored, length - WINDOW + 1 : length] = 1.0
        cache.commit(restored, tokens[:length])
        cache.check()
        other, cached = cache.admit([*tokens[: 2 * block], 9999, 1, 2])
        assert values(cache, other, max(0, cached - WINDOW + 1), cached) <= {1.0}


@host_only
def test_what_is_computed_after_the_copied_tokens_is_published() -> None:
    with make() as cache:
        block = cache.prefix_block_tokens
        tokens = list(range(5 * block))
        restored = cache.alloc_reqid(start=2 * block + 2)
        for length in (2 * block + 2, 4 * block):
            cache.step({restored: length})
        for tensor in cache.layer(GLOBAL):
            tensor[restored, : 4 * block] = 1.0
        for tensor in cache.layer(LOCAL):
            tensor[restored, 2 * block + 2 - WINDOW + 1 : 4 * block] = 1.0
        cache.commit(restored, tokens[: 4 * block])
        other, cached = cache.admit(tokens)
        assert cached == 4 * block
        assert values(cache, other, cached - WINDOW + 1, cached) == {1.0}
        cache.check()


@host_only
def test_a_restored_request_does_not_go_back_behind_what_it_computed() -> None:
    with make() as cache:
        reqid = cache.alloc_reqid(start=100)
        cache.step({reqid: 110})
        with pytest.raises(vattn.InvalidLength):
            cache.step({reqid: 99})
        cache.step({reqid: 100})
        cache.step({reqid: 0})  # from the start again: then its windows hold what it computes
        for length in (20, 40, 90):
            cache.step({reqid: length})
        cache.step({reqid: 85})
        cache.check()


@host_only
def test_a_restored_request_may_be_shorter_than_announced() -> None:
    with make() as cache:
        reqid = cache.alloc_reqid(start=13)
        cache.step({reqid: 1})
        cache.check()
        cache.step({reqid: 3})
        cache.step({reqid: 2})  # what the last step computed can be taken back
        cache.check()


# Lengths


@pytest.mark.parametrize("announced", [None, "7", 5.5, -1, 10**30])
def test_a_step_with_a_bad_announcement_changes_nothing(announced: Any) -> None:
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32) as cache:
        block = cache.prefix_block_tokens
        reqid = cache.alloc_reqid()
        cache.step({reqid: 2 * block})
        k, _ = cache.layer(0)
        k[reqid, : 2 * block] = 1.0
        cache.commit(reqid, list(range(2 * block)))
        with pytest.raises(vattn.InvalidLength):
            cache.step({reqid: block // 2}, {reqid: announced})
        assert cache.page_map()[reqid].length == 2 * block
        cache.check()
        cache.step({reqid: block // 2})
        cache.step({reqid: block // 2 + 8})
        k[reqid, block // 2 : block // 2 + 8] = 666.0
        hit, cached = cache.admit(list(range(block + 1)))
        assert cached == block
        assert bool((k[hit, :block] == 1.0).all())
        with pytest.raises(vattn.InvalidSlot):
            cache.step({reqid: block}, {77: 3})


def test_check_sees_a_length_that_went_below_blocks_in_use() -> None:
    with make() as cache:
        block = cache.prefix_block_tokens
        reqid = cache.alloc_reqid()
        cache.step({reqid: 2 * block})
        cache.commit(reqid, list(range(2 * block)))
        cache._slots.length[reqid] = block // 2
        with pytest.raises(AssertionError, match="in use behind a length"):
            cache.check()
        cache._slots.length[reqid] = 2 * block


def small() -> vattn.KVCache:
    """20,000 tokens of it are more bytes than 32 bits count."""
    return make(
        groups=None,
        num_layers=8,
        num_kv_heads=8,
        head_dim=128,
        max_batch_size=2,
        max_context_len=65536,
        memory_budget="40MiB",
        layout="fused",
        page_size=65536,
        kv_order="NHD",
    )


@host_only
@pytest.mark.parametrize(
    "kind", [np.int16, np.int32, np.uint16, np.int64, lambda n: torch.tensor(n, dtype=torch.int16)]
)
def test_lengths_of_narrow_types_are_counted_in_full(kind: Callable[[int], Any]) -> None:
    with small() as cache:
        reqid = cache.alloc_reqid()
        with pytest.raises(vattn.OutOfPages, match=r"2000[01] pages"):
            cache.step({reqid: kind(20000)})
        cache.step({reqid: kind(300)})
        assert cache.page_map()[reqid].length == 300
        assert type(cache.page_map()[reqid].length) is int
        assert cache.page_map()[reqid].mapped >= 300
        cache.layer(0)[0][reqid, 299] = 1.0
        cache.step({kind(reqid): kind(301)})
        cache.free_reqid(kind(reqid))
        again = cache.alloc_reqid()
        assert type(again) is int
        cache.check()


def test_a_length_that_is_a_live_tensor_is_copied() -> None:
    with make() as cache:
        reqid, length = cache.alloc_reqid(), torch.tensor(9)
        cache.step({reqid: length})  # type: ignore[dict-item]
        length += 300
        cache.check()
        assert cache.page_map()[reqid].length == 9


BAD = [
    5.5,
    float("nan"),
    True,
    False,
    np.float32(7),
    np.bool_(True),
    torch.tensor(9.5),
    "7",
    None,
    [3],
    10**400,
    -1,
    -(2**70),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:20])
def test_what_is_no_length_is_refused_and_changes_nothing(bad: Any) -> None:
    with make() as cache:
        reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({reqid: 10, other: 20})
        for call in (
            lambda: cache.step({reqid: bad, other: 21}),
            lambda: cache.step({other: 22, reqid: bad}),
            lambda: cache.step([0, bad, 0, 0]),
            lambda: cache.step({other: 21}, {reqid: bad}),
            lambda: cache.alloc_reqid(bad) if bad is not None else cache.alloc_reqid(start=bad),
            lambda: cache.alloc_reqid(start=bad),
            lambda: cache.pages_needed(bad),
        ):
            try:
                call()
            except vattn.InvalidLength:
                pass
            else:
                # A hint may be any number, and a sequence says 0 for a slot that it does not name.
                assert bad == 10**400 or bad is False, f"{bad!r} was taken for a length"
            for active in [p for p in cache.page_map() if p.active and p.reqid not in (reqid, other)]:
                cache.free_reqid(active.reqid)
            assert {p.reqid: p.length for p in cache.page_map() if p.active} == {reqid: 10, other: 20}
            cache.check()


@pytest.mark.parametrize(
    "bad", [5.5, 1.0, True, "0", None, (0,), 10**400, -1, float("nan")], ids=lambda bad: str(bad)[:20]
)
def test_what_is_no_slot_is_refused_and_changes_nothing(bad: Any) -> None:
    with make() as cache:
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({first: 10, second: 20})
        for call in (
            lambda: cache.step({bad: 500}),
            lambda: cache.free_reqid(bad),
            lambda: cache.fork(bad),
            lambda: cache.commit(bad, [1]),
            lambda: cache.retract(bad),
            lambda: cache.pages_needed(5, bad) if bad is not None else cache.free_reqid(bad),
        ):
            with pytest.raises(vattn.InvalidSlot):
                call()
        assert {p.reqid: p.length for p in cache.page_map() if p.active} == {first: 10, second: 20}
        cache.check()


@pytest.mark.parametrize(
    "option",
    [
        {"max_batch_size": 10**9},
        {"max_batch_size": 2.0},
        {"max_batch_size": True},
        {"max_context_len": 10**12},
        {"memory_budget": "9" * 100},
        {"memory_budget": 10**100},
        {"guard_rows": 10**12},
        {"groups": None, "num_layers": 10**9, "num_kv_heads": 1, "head_dim": 8},
        {"groups": None, "num_layers": 1, "num_kv_heads": 10**9, "head_dim": 8},
        {"groups": [vattn.TensorGroup(layers=[0], num_kv_heads=1, head_dim=8)] * 2},
    ],
    ids=str,
)
def test_sizes_that_are_none_or_huge_are_refused_at_once(option: dict[str, Any]) -> None:
    with pytest.raises(vattn.ConfigError):
        make(**option)


def test_sizes_may_be_integers_of_other_libraries() -> None:
    with make(max_batch_size=np.int8(3), max_context_len=torch.tensor(100)) as cache:
        assert type(cache.config.max_batch_size) is int
        assert type(cache.config.max_context_len) is int


# What a request takes back


def test_what_was_retracted_is_not_found_again() -> None:
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32) as cache:
        block = cache.prefix_block_tokens
        tokens = list(range(3 * block))
        good, _ = cache.admit(tokens[: block + 1])
        cache.step({good: block})
        cache.commit(good, tokens[:block])
        bad, cached = cache.admit(tokens)
        assert cached == block
        cache.step({bad: 3 * block})
        cache.commit(bad, tokens)
        shares, cached = cache.admit([*tokens, 1])
        assert cached == 3 * block
        cache.retract(bad)
        cache.check()
        cache.step({shares: 3 * block + 1})
        cache.commit(shares, [*tokens, 1])  # the blocks that it shares stay out all the same
        cache.check()
        other, cached = cache.admit([*tokens, 2])
        assert cached == block, "what another request had committed stays"
        for slot in (good, bad, shares, other):
            cache.free_reqid(slot)
        cache.check()
        assert cache.stats().cached_pages == 2


def _filled(cache: vattn.KVCache, slot: int, first: int, end: int, value: float, ids: list[int]) -> None:
    cache.step({slot: end})
    for tensor in cache.layer(0):
        tensor[slot, first:end] = value
    cache.commit(slot, ids[:end])
    cache.check()


@pytest.mark.parametrize("window", [None, 20])
def test_what_was_computed_on_retracted_blocks_is_not_found_again(window: int | None) -> None:
    """Even if blocks between them have left a window, and the cache, before."""
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32, sliding_window=window) as cache:
        block = cache.prefix_block_tokens
        assert 3 * block < cache.config.max_context_len
        ids = [*range(3 * block)]
        wrong, _ = cache.admit(ids[: block + 1])
        _filled(cache, wrong, 0, block, math.nan, ids)
        misled, cached = cache.admit(ids)
        assert cached == block
        for end in (2 * block, 3 * block):
            _filled(cache, misled, end - block, end, math.nan, ids)
        cache.free_reqid(misled)
        cache.retract(wrong)
        cache.check()
        assert cache.find_prefix([*ids, 1]) == 0
        right, cached = cache.admit(ids)
        assert cached == 0
        _filled(cache, right, 0, block, 1.0, ids)
        assert cache.find_prefix([*ids, 1]) == block
        for end in (2 * block, 3 * block):
            _filled(cache, right, end - block, end, 1.0, ids)
        slot, cached = cache.admit([*ids, 1])
        assert cached == 3 * block
        shown = block if window is None else 20
        assert all(tensor[slot, 3 * block - shown : 3 * block].eq(1).all() for tensor in cache.layer(0))


def test_what_was_computed_on_retracted_blocks_is_not_found_again_if_the_request_computed_it_too() -> None:
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32) as cache:
        block = cache.prefix_block_tokens
        ids = [*range(2 * block)]
        wrong, _ = cache.admit(ids)
        _filled(cache, wrong, 0, block, math.nan, ids)
        misled, cached = cache.admit([*ids, 1])
        assert cached == block
        for slot in (misled, wrong):
            _filled(cache, slot, block, 2 * block, math.nan, ids)
        cache.retract(wrong)
        cache.check()
        right, cached = cache.admit(ids)
        assert cached == 0
        _filled(cache, right, 0, block, 1.0, ids)
        assert cache.find_prefix([*ids, 1]) == block


def test_ancestors_of_blocks_that_only_idle_slots_have_stay_known() -> None:
    """Two requests compute the same block; the index loses that of the first, and a slot may serve the other."""
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32, memory_budget=16 * PAGE) as cache:
        block = cache.prefix_block_tokens
        ids = [*range(block)]
        first, second = (cache.admit([*ids, 1]).reqid for _ in range(2))
        for slot in (first, second):
            _filled(cache, slot, 0, block, 1.0, ids)
        cache.free_reqid(first)
        other = cache.alloc_reqid()
        for length in range(block, cache.config.max_context_len, block):
            if not cache.find_prefix([*ids, 1]):
                break
            cache.step({other: length})
        assert not cache.find_prefix([*ids, 1])
        cache.free_reqid(second)
        assert set(block_keys(root_key(b""), ids, block)) <= set(cache._slots.live_keys())


def test_a_request_publishes_again_from_where_it_went_back() -> None:
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32) as cache:
        block = cache.prefix_block_tokens
        ids = [*range(3 * block)]
        slot, _ = cache.admit(ids)
        _filled(cache, slot, 0, block, math.nan, ids)
        cache.retract(slot)
        _filled(cache, slot, block, 2 * block, math.nan, ids)
        copy = cache.fork(slot)
        cache.unshare(copy)
        for each in (slot, copy):
            cache.commit(each, ids[: 2 * block])
        assert cache.find_prefix(ids) == 0
        cache.step({slot: 0})
        _filled(cache, slot, 0, 2 * block, 1.0, ids)
        assert cache.find_prefix(ids) == 2 * block


@pytest.mark.parametrize("admitted", [0, 1])
@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("fork", [False, True])
def test_a_request_that_committed_nothing_before_it_was_retracted_publishes_from_where_it_went_back(
    admitted: int, back: int, fork: bool
) -> None:
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32) as cache:
        block = cache.prefix_block_tokens
        ids = [*range(3 * block)]
        first, _ = cache.admit(ids)
        _filled(cache, first, 0, admitted * block, 1.0, ids)
        slot, cached = cache.admit(ids)
        assert cached == admitted * block
        cache.step({slot: 2 * block})
        cache.retract(slot)
        if fork:
            slot = cache.fork(slot)
        cache.step({slot: back * block})
        cache.check()
        _filled(cache, slot, back * block, 2 * block, 1.0, ids)
        assert cache.find_prefix(ids) == (2 * block if back <= admitted else admitted * block)
        cache.free_reqid(slot)
        assert slot not in cache._slots.sound


def test_a_wrong_block_does_not_stand_for_a_right_one_with_its_tokens() -> None:
    """Two requests compute the same block; the index has that of the first, and a slot may serve that of the other."""
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32) as cache:
        block = cache.prefix_block_tokens
        ids = [*range(2 * block)]
        right, wrong = (cache.admit(ids).reqid for _ in range(2))
        _filled(cache, right, 0, block, 1.0, ids)
        _filled(cache, wrong, 0, block, math.nan, ids)
        fork = cache.fork(wrong)
        _filled(cache, fork, block, 2 * block, math.nan, ids)
        cache.retract(wrong)
        for slot in (wrong, fork):
            cache.free_reqid(slot)
            cache.check()
        assert cache.find_prefix([*ids, 1]) == block
        cache.step({right: block})  # on GPUs, kernels may read the freed slots until then
        for _ in range(cache.config.max_batch_size - 1):
            slot, cached = cache.admit([*ids, 1])
            assert cached == block
            assert all(tensor[slot, :block].eq(1).all() for tensor in cache.layer(0))
        cache.check()


def test_what_a_request_wrote_in_place_of_blocks_that_it_found_is_not_served_once_it_is_retracted() -> None:
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32) as cache:
        block = cache.prefix_block_tokens
        ids = [*range(2 * block)]
        right, _ = cache.admit(ids)
        _filled(cache, right, 0, 2 * block, 1.0, ids)
        wrong, cached = cache.admit([*ids, 1])
        assert cached == 2 * block
        cache.unshare(wrong)
        _filled(cache, wrong, 0, 2 * block, math.nan, ids)
        cache.retract(wrong)
        cache.free_reqid(wrong)
        cache.check()
        slot, cached = cache.admit([*ids, 1])
        assert cached == 2 * block
        assert all(tensor[slot, : 2 * block].eq(1).all() for tensor in cache.layer(0))


# Promises


@host_only
def test_pages_that_two_forks_gave_up_are_found() -> None:
    config = vattn.KVConfig(
        num_layers=2,
        num_kv_heads=1,
        head_dim=128,
        v_head_dim=0,
        dtype="bfloat16",
        sliding_window=50,
        max_batch_size=4,
        max_context_len=90,
        page_size=PAGE,
        layout="sliced",
        kv_order="HND",
        eager_pages=0,
        memory_budget=12 * PAGE,
    )
    with vattn.KVCache(config) as cache:
        first = cache.alloc_reqid()
        cache.step({first: 80})
        second, third = cache.fork(first), cache.fork(first)
        cache.free_reqid(third)
        cache.step({first: 81})
        assert cache.pages_needed(90, second) <= cache.available_pages()
        cache.step({second: 90})
        cache.check()


@host_only
def test_no_more_bytes_are_live_than_owned() -> None:
    config = vattn.KVConfig(
        num_layers=2,
        num_kv_heads=1,
        head_dim=128,
        dtype="float64",
        sliding_window=9,
        max_batch_size=3,
        max_context_len=60,
        page_size=PAGE,
        layout="fused",
        kv_order="NHD",
        memory_budget=108 * PAGE,
    )
    with vattn.KVCache(config) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 10})
        cache.fork(cache.fork(reqid))
        stats = cache.stats()
        assert stats.live_bytes == 9 * PAGE
        assert 0 <= stats.waste < 1


@host_only
def test_no_more_bytes_are_live_than_owned_where_a_step_adds_nothing() -> None:
    """Then nothing but queries to come is left to see what is in the window, and they are a token further."""
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=128, sliding_window=9) as cache:
        row = 2 * PAGE // cache.prefix_block_tokens
        tokens = list(range(65))
        reqid, _ = cache.admit(tokens)
        cache.step({reqid: 64})
        assert cache.stats().live_bytes == 9 * row
        cache.commit(reqid, tokens[:64])
        cache.step({reqid: 64})
        assert cache.stats().live_bytes == 8 * row
        assert 0 <= cache.stats().waste < 1
        cache.free_reqid(reqid)
        reqid, cached = cache.admit(tokens)
        assert cached == 64
        assert cache.stats().live_bytes == 8 * row


@host_only
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_that_are_evicted_from_a_running_request_are_known_to_be_gone(overlap: bool) -> None:
    with make(groups=None, num_layers=1, num_kv_heads=1, head_dim=32, guard_rows=1, overlap=overlap) as cache:
        block = cache.prefix_block_tokens
        reqid, _ = cache.admit(list(range(2 * block)))
        cache.step({reqid: 2 * block})
        cache.commit(reqid, list(range(2 * block)))
        cache.step({reqid: 0})
        assert cache.evict_prefixes()
        cache.check()
        cache.step({reqid: 1})
        fill(cache, reqid, 0, 1, 1.0)
        cache.check()


@host_only
@pytest.mark.parametrize("less", [0, 1])
def test_guard_rows_are_backed_where_blocks_of_an_earlier_request_are_left_over(less: int) -> None:
    """In layers without a window they are, so that a step need not grow those; behind the window they are missing."""
    with make(guard_rows=5, max_batch_size=1) as cache:
        block = cache.prefix_block_tokens
        tokens = list(range(6 * block))
        earlier, _ = cache.admit(tokens)
        for length in (2 * block, 5 * block, 5 * block + 1):
            cache.step({earlier: length})
            cache.commit(earlier, tokens[:length])
        cache.free_reqid(earlier)
        reqid, cached = cache.admit(tokens[: 2 * block + 1])
        assert cached == 2 * block
        cache.step({reqid: cached - less})
        assert cache.page_map()[reqid].mapped >= cached - less + 5
        cache.check()
