"""What users of the four calls are promised."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import itertools
import random
from collections.abc import Iterator
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import vattn
from tests.support.target import DEVICE, host_only, memory_calls

BASE: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "dtype": "float32",
    "max_batch_size": 4,
    "max_context_len": 1000,
    "memory_budget": "4MiB",
    "device": DEVICE,
    "layout": "layer",
    "kv_order": "HND",
    "page_size": 4096,  # 64 tokens of a head ("layer", HND), 8 pages to a column
}
COLUMN = 8


def make(**changes: Any) -> vattn.KVCache:
    return vattn.KVCache(vattn.KVConfig(**BASE | changes))


@pytest.fixture
def cache() -> Iterator[vattn.KVCache]:
    with make() as made:
        yield made
        made.check()


def fill(cache: vattn.KVCache, reqid: int, tokens: int, seed: int) -> None:
    for layer in cache.layers:
        for side, tensor in enumerate(cache.layer(layer)):
            tensor[reqid, :tokens] = content(tensor, tokens, seed + 10 * layer + side)


def content(like: torch.Tensor, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 100, (tokens, *like.shape[2:]), generator=generator)
    return values.to(like.dtype)


def assert_holds(cache: vattn.KVCache, reqid: int, tokens: int, seed: int) -> None:
    for layer in cache.layers:
        for side, tensor in enumerate(cache.layer(layer)):
            expected = content(tensor, tokens, seed + 10 * layer + side)
            assert torch.equal(tensor[reqid, :tokens].float(), expected.float())


@pytest.mark.parametrize(
    ("layout", "order", "v_head_dim"), list(itertools.product(("layer", "sliced", "fused"), ("NHD", "HND"), (None, 8)))
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_tokens_survive_growth_beside_other_slots(layout: str, order: str, v_head_dim: int | None, dtype: str) -> None:
    with make(layout=layout, kv_order=order, v_head_dim=v_head_dim, dtype=dtype, page_size=4096) as cache:
        slots = [cache.alloc_reqid() for _ in range(4)]
        lengths = dict.fromkeys(slots, 0)
        for grow in (1, 63, 500, 436):
            for slot in slots:
                lengths[slot] += grow
            cache.step(lengths)
            for slot in slots:
                fill(cache, slot, lengths[slot], slot)
            for slot in slots:
                assert_holds(cache, slot, lengths[slot], slot)
            cache.check()
        k, v = cache.layer(1)
        assert k.shape == (4, 1000, 2, 16)
        assert v.shape == (4, 1000, 2, v_head_dim or 16)
        assert k.stride(-1) == v.stride(-1) == 1


@pytest.mark.parametrize(("head_dim", "context"), [(20, 1000), (3, 77), (80, 4097), (257, 333)])
@pytest.mark.parametrize("layout", ["layer", "sliced", "fused"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_sizes_that_do_not_divide_a_page(head_dim: int, context: int, layout: str, order: str) -> None:
    with make(
        head_dim=head_dim, max_context_len=context, layout=layout, kv_order=order, memory_budget="64MiB"
    ) as cache:
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({first: context, second: context})
        fill(cache, first, context, 1)
        fill(cache, second, context, 2)
        assert_holds(cache, first, context, 1)
        assert_holds(cache, second, context, 2)
        cache.check()


def test_a_token_larger_than_a_page() -> None:
    with make(layout="fused", kv_order="NHD", num_layers=40, head_dim=128, max_context_len=8) as cache:
        assert cache.layout.kinds[0].page_tokens == 0
        reqid = cache.alloc_reqid()
        for n in range(1, 9):
            cache.step({reqid: n})
            fill(cache, reqid, n, n)
            assert_holds(cache, reqid, n, n)
        cache.check()


def test_physical_memory_follows_the_tokens(cache: vattn.KVCache) -> None:
    assert cache.stats().owned_pages == 0
    reqid = cache.alloc_reqid()
    for tokens, columns in ((1, 1), (64, 1), (65, 2), (640, 10)):
        cache.step({reqid: tokens})
        cache.check()
        stats = cache.stats()
        assert columns * COLUMN <= stats.owned_pages <= (columns + 1) * COLUMN  # one block ahead at the most
        assert stats.live_bytes == tokens * 2 * 2 * 2 * 16 * 4


def test_a_sequence_of_lengths_names_the_slots_that_are_not_zero(cache: vattn.KVCache) -> None:
    slots = {cache.alloc_reqid() for _ in range(2)}
    lengths = [100 if slot in slots else 0 for slot in range(4)]
    cache.step(lengths)
    cache.step(torch.tensor(lengths))
    assert {p.reqid for p in cache.page_map() if p.length == 100} == slots
    with pytest.raises(vattn.InvalidLength, match="3 lengths for 4 slots"):
        cache.step([1, 2, 3])


def test_a_length_may_go_down_and_loses_nothing_below(cache: vattn.KVCache) -> None:
    reqid = cache.alloc_reqid()
    cache.step({reqid: 500})
    fill(cache, reqid, 500, 7)
    cache.step({reqid: 100})
    owned = cache.stats().owned_pages
    assert_holds(cache, reqid, 500, 7)
    cache.step({reqid: 500})
    assert cache.stats().owned_pages == owned
    assert_holds(cache, reqid, 500, 7)


def test_the_length_of_a_slot_is_that_of_the_last_step(cache: vattn.KVCache) -> None:
    tokens = list(range(200))
    reqid, cached = cache.admit(tokens)
    assert cache.length(reqid) == cached == 0
    for length in (200, 150):
        cache.step({reqid: length})
        assert cache.length(reqid) == length
    cache.commit(reqid, tokens[:150])
    assert cache.length(cache.fork(reqid)) == 150
    other, cached = cache.admit(tokens)
    assert cache.length(other) == cached > 0
    cache.free_reqid(reqid)
    with pytest.raises(vattn.InvalidSlot):
        cache.length(reqid)


def test_steady_state_makes_no_driver_call() -> None:
    with make(watermark=0) as cache:  # nothing in stock, which fills whenever the worker has time
        reqid = cache.alloc_reqid()
        cache.step({reqid: 10})
        cache.check()
        before = cache.stats().calls
        for tokens in range(10, 60):
            cache.step({reqid: tokens})
        assert cache.stats().calls == before


def test_overlap_maps_the_next_block_before_it_is_needed() -> None:
    with make(eager_pages=0, watermark=0) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 63})
        cache.check()
        assert cache.stats().owned_pages == COLUMN
        cache.step({reqid: 64})  # the last token of its block: the next is queued
        cache.check()  # waits for the worker
        assert cache.stats().owned_pages == 2 * COLUMN
        waits = cache.stats().waits
        cache.step({reqid: 65})
        assert cache.stats().waits == waits


@pytest.mark.parametrize(("block", "ahead"), [(4, 1), (8, 2), (16, 4), (64, 8), (128, 8)])
def test_slots_that_grow_alike_are_mapped_in_different_steps(block: int, ahead: int) -> None:
    with make(head_dim=1024 // block, max_batch_size=8, eager_pages=0, watermark=0) as cache:
        slots = [cache.alloc_reqid() for _ in range(8)]
        cache.step(dict.fromkeys(slots, block // 2))
        cache.check()
        waits = cache.stats().waits
        grown = {}
        for tokens in range(block // 2 + 1, 5 * block // 2):
            before = cache.stats().owned_pages
            cache.step(dict.fromkeys(slots, tokens))
            cache.check()  # waits for the worker
            if more := cache.stats().owned_pages - before:
                grown[tokens] = more
        each = 8 // ahead * COLUMN
        assert grown == {n * block - early: each for n in (1, 2) for early in range(ahead)}
        assert cache.stats().waits == waits


def test_next_lengths_are_mapped_ahead() -> None:
    with make(eager_pages=0, watermark=0) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 10}, next_lengths={reqid: 300})
        cache.check()
        waits = cache.stats().waits
        cache.step({reqid: 300})
        assert cache.stats().waits == waits
        with pytest.raises(vattn.InvalidSlot):
            cache.step({reqid: 300}, next_lengths={3: 1})
        with pytest.raises(vattn.InvalidLength, match="must be a mapping from reqid, not ndarray"):
            cache.step({reqid: 301}, next_lengths=np.array([400, 0, 0, 0]))  # type: ignore[arg-type]


def test_what_is_no_stream_is_refused_whatever_a_step_has_to_do() -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 10})
        for length in (11, 300):
            with pytest.raises(vattn.ConfigError, match="neither a stream"):
                cache.step({reqid: length}, stream="x")  # type: ignore[arg-type]
        assert cache.stats().live_tokens == 10


def test_look_ahead_queues_what_a_step_left_out() -> None:
    with make(eager_pages=0, watermark=0) as cache:
        announced, near = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({announced: 10, near: 63}, {announced: 300}, look_ahead=False)
        cache.check()
        assert cache.stats().owned_pages == 2 * COLUMN
        cache.look_ahead()
        cache.check()
        mapped, waits = cache.stats().owned_pages, cache.stats().waits
        assert mapped == (5 + 2) * COLUMN
        cache.step({announced: 300, near: 65}, look_ahead=False)
        assert cache.stats().waits == waits
        cache.step({announced: 301, near: 66}, look_ahead=False)
        cache.look_ahead()
        cache.look_ahead()
        cache.check()
        assert cache.stats().owned_pages == mapped


def test_look_ahead_leaves_out_requests_that_ended_since() -> None:
    with make(eager_pages=0, watermark=0, deferred_reclamation=False) as cache:
        announced, near = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({announced: 10, near: 63}, {announced: 300}, look_ahead=False)
        cache.free_reqid(announced)
        cache.free_reqid(near)
        cache.look_ahead()
        again = cache.alloc_reqid()
        cache.look_ahead()
        cache.step({again: 1})
        cache.check()
        assert cache.stats().owned_pages == COLUMN


def test_without_overlap_the_worker_is_never_ahead() -> None:
    with make(overlap=False, eager_pages=0) as cache:
        reqid = cache.alloc_reqid()
        for tokens in range(1, 200):
            cache.step({reqid: tokens}, next_lengths={reqid: tokens + 100})
            assert cache.stats().owned_pages == -(-tokens // 64) * COLUMN


def test_deferred_reclamation_gives_the_slot_that_fits_best() -> None:
    with make(eager_pages=0, watermark=0) as cache:
        slots = [cache.alloc_reqid() for _ in range(3)]
        cache.step(dict(zip(slots, (600, 100, 300), strict=True)))
        for slot in slots:
            cache.free_reqid(slot)
        cache.check()
        mapped = cache.stats().calls["cuMemMap"].count
        assert cache.alloc_reqid(200) == slots[2]
        assert cache.alloc_reqid(90) == slots[1]
        assert cache.alloc_reqid(10_000) == slots[0]  # none is enough: the largest
        cache.step({slots[2]: 200, slots[1]: 90, slots[0]: 600})
        cache.check()
        assert cache.stats().calls["cuMemMap"].count == mapped


def test_without_deferred_reclamation_pages_leave_at_once() -> None:
    with make(deferred_reclamation=False, eager_pages=0) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 500})
        cache.free_reqid(reqid)
        cache.step({})  # on CUDA: its kernels are launched
        cache.check()
        assert cache.stats().mapped_pages == 0


def test_eager_pages_wait_for_the_next_request() -> None:
    with make(eager_pages=3, watermark=0) as cache:
        first = cache.alloc_reqid()
        cache.step({first: 1})
        cache.check()
        waits = cache.stats().waits
        second = cache.alloc_reqid()
        cache.step({second: 3 * 64 - 1})
        assert cache.stats().waits == waits


def test_the_watermark_replenishes_free_pages() -> None:
    budget = 64 * COLUMN
    with make(eager_pages=0, watermark=0.5, memory_budget=budget * 4096) as cache:
        for length in (900, 900, 900):
            reqid = cache.alloc_reqid(1)
            cache.step({reqid: length})
        for reqid in range(4):
            if cache.page_map()[reqid].active:
                cache.free_reqid(reqid)
        cache.step({})  # on CUDA: their kernels are launched
        cache.check()
        assert cache.stats().free_pages >= budget // 2


def test_parked_pages_go_to_whoever_needs_them() -> None:
    with make(eager_pages=0, watermark=0, memory_budget=16 * COLUMN * 4096) as cache:
        first = cache.alloc_reqid()
        cache.step({first: 900})  # 15 of 16 columns
        cache.free_reqid(first)
        second = cache.alloc_reqid(1)
        third = cache.alloc_reqid(1)
        cache.step({second: 64})
        cache.step({third: 14 * 64})
        cache.check()
        fill(cache, third, 14 * 64, 3)
        assert_holds(cache, third, 14 * 64, 3)


def test_pages_beyond_a_running_requests_length_can_be_taken_back() -> None:
    with make(eager_pages=0, watermark=0, memory_budget=16 * COLUMN * 4096) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 900})
        cache.free_reqid(reqid)
        short = cache.alloc_reqid(100)
        assert short == reqid
        cache.step({short: 100})
        fill(cache, short, 100, 1)
        long = cache.alloc_reqid()
        assert cache.available_pages() == 14 * COLUMN
        cache.step({short: 128, long: 14 * 64})
        cache.check()
        assert_holds(cache, short, 100, 1)
        with pytest.raises(vattn.OutOfPages):
            cache.step({short: 129})
        cache.check()


def test_a_failed_step_changes_nothing_and_says_what_is_missing() -> None:
    with make(eager_pages=0, watermark=0, memory_budget=8 * COLUMN * 4096) as cache:
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({first: 200, second: 100})
        fill(cache, first, 200, 1)
        before = cache.stats()
        with pytest.raises(vattn.OutOfPages, match="preempt") as caught:
            cache.step({first: 300, second: 400})
        assert caught.value.missing_pages == (5 + 7 - 8) * COLUMN
        assert caught.value.missing_bytes == caught.value.missing_pages * 4096
        assert isinstance(caught.value, MemoryError)
        cache.check()
        after = cache.stats()
        assert (after.owned_pages, after.parked_pages, after.live_tokens, memory_calls(after)) == (
            before.owned_pages,
            before.parked_pages,
            before.live_tokens,
            memory_calls(before),
        )
        assert_holds(cache, first, 200, 1)
        cache.free_reqid(second)
        cache.step({first: 500})
        assert_holds(cache, first, 200, 1)


def test_pages_needed_and_available_agree_with_step() -> None:
    with make(eager_pages=0, watermark=0, memory_budget=8 * COLUMN * 4096) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 100})
        cache.check()
        fits = cache.available_pages()
        assert cache.pages_needed(8 * 64, reqid) == fits
        assert cache.pages_needed(8 * 64 + 1, reqid) > fits
        assert cache.pages_needed(100) == 2 * COLUMN
        assert cache.total_pages == 8 * COLUMN
        cache.step({reqid: 8 * 64})


@pytest.mark.parametrize("guard_rows", [0, 100])
@pytest.mark.parametrize("sliding_window", [None, 100])
def test_pages_needed_is_the_same_with_and_without_a_look_at_the_books(
    guard_rows: int, sliding_window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most calls ask for a request that just grows, or begins, and are answered without a call to the pool."""
    looks = 0
    rng = random.Random(0)
    with make(guard_rows=guard_rows, sliding_window=sliding_window, max_batch_size=6) as cache:
        look = cache._pages_needed

        def counted(*args: Any) -> int:
            nonlocal looks
            looks += 1
            return look(*args)

        monkeypatch.setattr(cache, "_pages_needed", counted)
        tokens = list(range(700))
        first, _ = cache.admit(tokens)
        cache.step({first: 650})
        cache.commit(first, tokens[:650])
        slots = [first, cache.admit(tokens)[0], cache.fork(first)]
        for _ in range(300):
            slot, before = rng.choice(slots), looks
            length = next(each.length for each in cache.page_map() if each.reqid == slot)
            asked = max(0, length + rng.choice((-200, -1, 0, 1, 1, 1, 2, 100)))
            chunk = rng.choice((None, 1, 64))
            assert cache.pages_needed(asked, slot, chunk) == look(asked, slot, chunk)
            if sliding_window is not None or asked < length:
                assert looks == before + 1
            new = rng.randrange(1001)
            assert cache.pages_needed(new, chunk_tokens=chunk) == look(new, None, chunk)
            if rng.random() < 0.5 and not (sliding_window and asked < length):
                cache.step({slot: min(asked, 890)})
        assert looks == 600 if sliding_window else looks < 200
        with pytest.raises(vattn.InvalidSlot):
            cache.pages_needed(1, 5)
        with pytest.raises(vattn.InvalidLength):
            cache.pages_needed(1001, first)


def test_misuse_is_refused_by_type(cache: vattn.KVCache) -> None:
    reqid = cache.alloc_reqid()
    for slot in (reqid + 1, -1, 4, "a", None):
        with pytest.raises(vattn.InvalidSlot):
            cache.step({slot: 1})  # type: ignore[dict-item]
        with pytest.raises(KeyError):
            cache.free_reqid(slot)  # type: ignore[arg-type]
    with pytest.raises(vattn.InvalidLength, match="max_context_len=1000"):
        cache.step({reqid: 1001})
    with pytest.raises(vattn.InvalidLength):
        cache.step({reqid: -1})
    with pytest.raises(IndexError):
        cache.layer(2)
    for _ in range(3):
        cache.alloc_reqid()
    with pytest.raises(vattn.NoFreeSlot, match="max_batch_size"):
        cache.alloc_reqid()
    cache.free_reqid(reqid)
    with pytest.raises(vattn.InvalidSlot, match="not allocated"):
        cache.free_reqid(reqid)
    cache.check()


def test_the_full_context_fits_and_no_more(cache: vattn.KVCache) -> None:
    reqid = cache.alloc_reqid()
    for tokens in (999, 1000, 1000):
        cache.step({reqid: tokens})
    fill(cache, reqid, 1000, 5)
    assert_holds(cache, reqid, 1000, 5)


def test_guard_rows_are_backed_past_every_length() -> None:
    with make(guard_rows=64, eager_pages=0, overlap=False) as cache:
        reqid = cache.alloc_reqid()
        for tokens in (1, 64, 65, 1000):
            cache.step({reqid: tokens})
            assert cache.page_map()[reqid].mapped >= tokens + 64
            cache.check()


@pytest.mark.parametrize("call", ["alloc_reqid", "available_pages", "stats", "check", "page_map", "trim"])
def test_every_call_after_close_is_refused(call: str) -> None:
    cache = make()
    cache.close()
    cache.close()
    with pytest.raises(vattn.CacheClosed):
        getattr(cache, call)()
    with pytest.raises(vattn.CacheClosed):
        cache.step({0: 1})
    with pytest.raises(vattn.CacheClosed):
        cache.layer(0)
    assert "closed" in repr(cache)


@host_only
def test_tensors_that_outlive_the_cache_read_as_zeros() -> None:
    cache = make()
    reqid = cache.alloc_reqid()
    cache.step({reqid: 10})
    k, _ = cache.layer(0)
    k[reqid, :10] = 1
    cache.close()
    assert k[reqid, :10].abs().sum() == 0


def test_a_dropped_cache_gives_everything_back() -> None:
    cache = make()
    reqid = cache.alloc_reqid()
    cache.step({reqid: 500})
    del cache  # the fixture finds what is lost


@host_only
def test_reads_past_the_mapped_pages_see_zeros(cache: vattn.KVCache) -> None:
    k, v = cache.layer(0)
    assert k.abs().sum() == 0
    assert v[3, 999].abs().sum() == 0


def test_trim_gives_memory_back_to_the_machine() -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 900})
        cache.free_reqid(reqid)
        other = cache.alloc_reqid(1)
        cache.step({other: 10})
        fill(cache, other, 10, 1)
        assert cache.trim() > 0
        cache.check()
        stats = cache.stats()
        assert stats.created_pages == stats.owned_pages
        assert_holds(cache, other, 10, 1)


def test_writable_outside_inference_mode_and_inside() -> None:
    with torch.inference_mode():
        cache = make()
    reqid = cache.alloc_reqid()
    cache.step({reqid: 1})
    k, _ = cache.layer(0)
    k[reqid, 0] = 1
    with torch.inference_mode():
        k[reqid, 0] = 2
    cache.close()


def test_module_functions_act_on_the_cache_made_last() -> None:
    options = BASE | {"num_layers": 1}
    older = vattn.init(**options)
    cache = vattn.init(**options)
    reqid = vattn.alloc_reqid()
    vattn.step({reqid: 5})
    assert cache.stats().live_tokens == 5
    assert older.stats().live_tokens == 0
    vattn.free_reqid(reqid)
    older.close()
    cache.close()
    with pytest.raises(vattn.CacheClosed):
        vattn.alloc_reqid()
    with pytest.raises(vattn.ConfigError, match="unknown option layers"):
        vattn.init(**options, layers=3)
    with pytest.raises(vattn.ConfigError, match="max_batch_size, max_context_len must be given"):
        vattn.init(num_layers=1)  # type: ignore[call-arg]


def test_init_takes_what_a_config_has() -> None:
    """Every option with its type and default, spelled out for editors; and a pool."""
    hints, of_config = get_type_hints(vattn.init), get_type_hints(vattn.KVConfig)
    parameters = inspect.signature(vattn.init).parameters
    keywords = [(name, of_config[name], field.default) for name, field in vattn.KVConfig.__dataclass_fields__.items()]
    given = [
        (name, hints[name], dataclasses.MISSING if p.default is p.empty else p.default)
        for name, p in parameters.items()
    ]
    assert given == [*keywords, ("pool", vattn.PagePool | None, None)]


@host_only
def test_public_names() -> None:
    """All of them are there, those that are imported on first use too."""
    assert set(vattn.__all__) <= set(dir(vattn))
    assert "__version__" in dir(vattn)
    assert vattn.__version__ == importlib.metadata.version("vattn")
    for name in vattn.__all__:
        assert getattr(vattn, name).__name__.rpartition(".")[2] == name
    assert vattn.LLM is vattn.engine.LLM
    with pytest.raises(AttributeError, match="no attribute 'Cache'"):
        _ = vattn.Cache  # type: ignore[attr-defined]


def test_surplus_of_one_kind_is_found_where_the_other_is_short() -> None:
    """K and V rows of different sizes: a slot may have pages of V beyond its length, and lack pages of K."""
    changes = {"head_dim": 64, "v_head_dim": 32, "max_context_len": 40, "memory_budget": 40 * 4096, "kv_order": "NHD"}
    changes |= {"layout": "sliced", "overlap": False, "deferred_reclamation": False, "eager_pages": 0, "guard_rows": 3}
    with make(**changes) as cache:
        for _ in range(4):
            cache.alloc_reqid()
        cache.step({3: 15})
        cache.step({3: 0, 0: 1, 1: 34, 2: 38})
        cache.step({3: 10})  # all 40 pages
        assert cache.available_pages() == 0
        cache.check()


def test_check_changes_nothing(cache: vattn.KVCache) -> None:
    """What is wrong is wrong the second time too."""
    slot = cache.alloc_reqid()
    cache.step({slot: 100})
    cache._slots.limit[slot] += 1
    for _ in range(2):
        with pytest.raises(AssertionError, match="a step would not see"):
            cache.check()
    cache._slots.limit[slot] -= 1
    for wrong in (1, -1):
        cache._ledger._private[slot] += wrong
        if wrong == 1:
            for _ in range(2):
                with pytest.raises(AssertionError, match="private pages are miscounted"):
                    cache.check()


def test_flags_are_bools() -> None:
    for name in ("overlap", "deferred_reclamation", "zero_on_free"):
        with pytest.raises(vattn.ConfigError, match=f"{name}=1 is not one of True, False"):
            make(**{name: 1})
