"""A call happens wholly or not at all: where it is interrupted, called from inside another, or its cache is dropped."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch

import vattn
from tests.campaign import injection
from tests.support.effort import effort
from tests.support.faults import FaultyTable
from tests.support.interruption import entries, interrupted
from tests.support.target import DEVICE, host_only
from tests.support.waiting import wait_until

PAGE = 4096
BUDGET = 70 * PAGE
Result = TypeVar("Result")


def make(**options: Any) -> vattn.KVCache:
    pool = options.pop("pool", None)
    plain: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 64,
        "dtype": "float32",
        "max_batch_size": 4,
        "max_context_len": 400,
        "device": DEVICE,
        "memory_budget": BUDGET,
        "page_size": PAGE,
        "layout": "layer",
    }
    return vattn.KVCache(vattn.KVConfig(**plain | options), pool=pool)


class Scene:
    """Two requests that share a prefix and an idle slot with parked pages, at the limit of the budget."""

    def __init__(self, window: int | None, overlap: bool) -> None:
        self.cache = make(sliding_window=window, overlap=overlap)
        self.ids = list(range(400))
        self.first, _ = self.cache.admit(self.ids[:100])
        self.write({self.first: 100})
        self.cache.commit(self.first, self.ids[:100])
        self.second, _ = self.cache.admit(self.ids[:90])
        self.write({self.second: 90})
        parked = self.cache.alloc_reqid()
        self.write({parked: 150})
        self.cache.free_reqid(parked)

    def write(self, lengths: dict[int, int]) -> None:
        """A step, and its tokens: in each its position."""
        before = {p.reqid: p.length for p in self.cache.page_map()}
        self.cache.step(lengths)
        for slot, length in lengths.items():
            for tensor in self.cache.layer(0):
                rows = torch.arange(before[slot], length, dtype=torch.float32)
                tensor[slot, before[slot] : length] = rows[:, None, None]

    def state(self) -> tuple[dict[int, int], dict[int, list[float]]]:
        """Lengths, and what the last tokens hold, as far as every window shows them."""
        lengths = {p.reqid: p.length for p in self.cache.page_map() if p.active}
        k, _ = self.cache.layer(0)
        return lengths, {slot: k[slot, max(0, n - 20) : n, 0, 0].tolist() for slot, n in lengths.items()}


CALLS: dict[str, Callable[[Scene], object]] = {
    "alloc_reqid": lambda s: s.cache.alloc_reqid(30),
    "admit": lambda s: s.cache.admit([*s.ids[:80], 7]),
    "admit_nothing_cached": lambda s: s.cache.admit([9] * 50),
    "step": lambda s: s.cache.step({s.first: 180, s.second: 200}),
    "step_announced": lambda s: s.cache.step({s.first: 110}, {s.first: 160}),
    "step_down": lambda s: s.cache.step({s.second: 85}),
    "step_refused": lambda s: s.cache.step({s.first: 400, s.second: 400}),
    "commit": lambda s: s.cache.commit(s.second, s.ids[:90]),
    "retract": lambda s: s.cache.retract(s.first),
    "retract_tokens": lambda s: s.cache.retract_tokens(s.ids, since=20),
    "fork": lambda s: s.cache.fork(s.first),
    "unshare": lambda s: s.cache.unshare(s.second),
    "free_reqid": lambda s: s.cache.free_reqid(s.second),
    "evict_prefixes": lambda s: s.cache.evict_prefixes(),
    "trim": lambda s: s.cache.trim(),
}


@host_only
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_anywhere_has_happened_or_not(name: str, window: int | None, overlap: bool) -> None:
    scene = Scene(window, overlap)
    before = scene.state()
    try:
        CALLS[name](scene)
    except vattn.OutOfPages:
        assert name == "step_refused"
    after = scene.state()
    scene.cache.close()

    # All function entries of short calls, and evenly spread ones of long ones.
    total = count_entries(name, window, overlap)
    for entry in range(0, total, max(1, total // effort(10, 60))):
        scene = Scene(window, overlap)
        ended = interrupted(lambda scene=scene: CALLS[name](scene), entry)  # type: ignore[misc]
        scene.cache.check()
        lengths, rows = scene.state()
        if name in ("alloc_reqid", "admit", "admit_nothing_cached", "fork"):
            # None: beside the worker it had fewer entries this time, and was not interrupted.
            assert lengths == (before if ended is False else after)[0], "a slot whose number nobody got"
        else:
            assert lengths in (before[0], after[0])
        if "step" not in name:
            assert all(rows[slot] == before[1][slot] for slot in rows.keys() & before[1].keys())
        for slot in lengths:
            scene.cache.free_reqid(slot)
        scene.cache.evict_prefixes()
        scene.cache.step({})
        scene.cache.check()
        assert scene.cache.stats().owned_pages == 0
        scene.cache.close()


def count_entries(name: str, window: int | None, overlap: bool) -> int:
    """Entries of functions of vattn in a call."""
    scene = Scene(window, overlap)
    count = entries(lambda: CALLS[name](scene))
    scene.cache.close()
    return count


class InterruptedLock:
    """A lock behind whose release SIGINT is handled, once."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.armed = True

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["alloc_reqid", "admit", "admit_nothing_cached", "fork", "step", "free_reqid"])
def test_a_call_that_is_interrupted_as_it_returns_leaves_no_slot_behind(name: str) -> None:
    scene = Scene(None, overlap=True)
    before, hits = scene.state(), scene.cache.stats().query_tokens
    core = scene.cache._core
    core.lock, lock = InterruptedLock(core.lock), core.lock  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        CALLS[name](scene)
    core.lock = lock
    scene.cache.check()
    if name in ("step", "free_reqid"):
        assert scene.state()[0] != before[0]
    else:
        assert scene.state() == before
        assert scene.cache.stats().query_tokens == hits
    scene.cache.close()


@host_only
def test_tokens_that_move_to_pages_of_their_own_survive_an_interrupt() -> None:
    """Copy-on-write: the rows of a shared block that stay are copied into the page that replaces it."""
    points = 0
    while True:
        scene = Scene(None, overlap=True)
        scene.cache.step({scene.second: 70})  # into a block that the other request has as well
        k, _ = scene.cache.layer(0)
        ended = interrupted(lambda: scene.cache.step({scene.second: 75}), points)  # noqa: B023
        scene.cache.check()
        assert k[scene.second, :70, 0, 0].tolist() == list(range(70))
        assert k[scene.first, :100, 0, 0].tolist() == list(range(100))
        scene.cache.close()
        if ended is None:
            break
        points += 1
    assert points > 50


def test_a_cache_that_is_dropped_is_collected_whatever_it_did_last() -> None:
    def drop(last: str) -> weakref.ref[vattn.KVCache]:
        cache = make(eager_pages=0)
        reqid = cache.alloc_reqid()
        block = cache.prefix_block_tokens
        cache.step({reqid: block + 5})
        if last == "fork":
            cache.fork(reqid)
        if last == "copy-on-write":
            cache.commit(reqid, list(range(block + 5)))
            cache.step({reqid: block - 3})
            cache.step({reqid: block + 2})
        if last == "grow":
            cache.step({reqid: 4 * block})
        return weakref.ref(cache)

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    for last in ("step", "fork", "copy-on-write", "grow"):
        dropped = [drop(last) for _ in range(5)]
        gc.collect()
        assert [ref() for ref in dropped] == [None] * 5, last
    wait_until(lambda: threads() <= before)  # one that has ended is listed a moment longer


def test_a_closed_cache_leaves_no_address_space_whatever_the_worker_was_at() -> None:
    """Its last pages go in the background; on a pool that nobody calls for a while."""
    table = FaultyTable()
    pool = vattn.PagePool(BUDGET, device=DEVICE, page_size=PAGE, table=table.addresses)
    cache = make(pool=pool, sliding_window=16, deferred_reclamation=False, eager_pages=0)
    reqid = cache.alloc_reqid()
    cache.step({reqid: 100})
    table.delay = 0.01
    cache.step({reqid: 200})
    cache.free_reqid(reqid)
    cache.close()
    wait_until(lambda: table.ended["cuMemAddressFree"] == table.calls["cuMemAddressReserve"] > 0)
    pool.close()


def test_a_finaliser_that_runs_inside_a_call_frees_its_slot_with_the_next_one() -> None:
    with make() as cache:
        mine, its = cache.alloc_reqid(), cache.alloc_reqid()
        refused: list[Exception] = []

        def finalise() -> None:
            cache.free_reqid(its)
            cache.stats()
            for call in (lambda: cache.free_reqid(its), lambda: cache.alloc_reqid(), lambda: cache.step({mine: 5})):
                try:
                    call()
                except vattn.VattnError as error:
                    refused.append(error)

        class Garbage:
            def __del__(self) -> None:
                finalise()

        inside(cache, Garbage)
        assert [type(error) for error in refused] == [vattn.InvalidSlot, vattn.VattnError, vattn.VattnError]
        assert "from inside another call" in str(refused[1])
        assert [p.reqid for p in cache.page_map() if p.active] == [mine]
        cache.check()


def test_a_slot_that_a_finaliser_frees_inside_the_call_that_lacks_it_is_had() -> None:
    with make(max_batch_size=1) as cache:
        its = cache.alloc_reqid()

        class Garbage:
            def __del__(self) -> None:
                cache.free_reqid(its)

        assert inside(cache, Garbage) == its
        cache.check()


@pytest.mark.parametrize("closed_by", ["before", "around"])
def test_a_finaliser_that_frees_a_slot_of_a_closed_cache_disturbs_no_other_on_the_pool(closed_by: str) -> None:
    pool = vattn.PagePool(2 * BUDGET, device=DEVICE, page_size=PAGE)
    with make(pool=pool) as cache:
        cache.alloc_reqid()
        closed = make(pool=pool)
        its = closed.alloc_reqid()
        errors: list[vattn.VattnError] = []

        class Garbage:
            def __del__(self) -> None:
                try:
                    closed.free_reqid(its)
                except vattn.VattnError as error:
                    errors.append(error)

        if closed_by == "before":
            closed.close()
            inside(cache, Garbage)
            assert [type(error) for error in errors] == [vattn.CacheClosed]
        else:
            amid(closed.close, ("leave",), Garbage)
            assert not errors
        assert cache.stats().steps == (closed_by == "before")
        cache.check()
    pool.close()


def test_a_closed_cache_says_so_inside_a_call_of_another_on_the_pool() -> None:
    pool = vattn.PagePool(2 * BUDGET, device=DEVICE, page_size=PAGE)
    with make(pool=pool) as cache:
        cache.alloc_reqid()
        closed = make(pool=pool)
        its = closed.alloc_reqid()
        windows = vattn.BlockWindows(
            num_layers=1,
            num_blocks=1,
            block_size=PAGE // 256,
            row=(64,),
            dtype=torch.float32,
            num_windows=1,
            max_context_len=16,
            device=DEVICE,
            pool=pool,
        )
        reads: list[Callable[[], object]] = [
            closed.available_pages,
            closed.page_map,
            closed.stats,
            lambda: closed.length(its),
            lambda: closed.pages_needed(5),
            lambda: closed.find_prefix([1]),
            windows.backed,
            windows.stats,
        ]
        closed.close()
        windows.close()
        refused: list[type[Exception]] = []

        class Garbage:
            def __del__(self) -> None:
                for read in reads:
                    try:
                        read()
                    except Exception as error:
                        refused.append(type(error))

        inside(cache, Garbage)
        assert refused == [vattn.CacheClosed] * len(reads)
    pool.close()


def inside(cache: vattn.KVCache, garbage: Callable[[], object]) -> int | None:
    """`alloc_reqid` or, where there is a slot, `step`, in the middle of which garbage is collected."""
    places = ("_choose", "set_lengths", "set_limit")
    active = [p.reqid for p in cache.page_map() if p.active]
    if len(active) == cache.layout.slots:
        return amid(cache.alloc_reqid, places, garbage)
    amid(lambda: cache.step({active[0]: 100}), places, garbage)
    return None


def amid(call: Callable[[], Result], functions: Collection[str], garbage: Callable[[], object]) -> Result:
    """A call, in the first of these functions of which garbage is collected."""
    done = False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal done
        if event == "call" and frame.f_code.co_name in functions and not done:
            done = True
            garbage()  # goes at once, in here

    sys.setprofile(profile)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    assert done
    return result


@host_only
def test_a_signal_handler_may_look_at_the_cache() -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        seen: list[int] = []
        before = signal.signal(signal.SIGALRM, lambda *_: seen.append(cache.stats().live_tokens))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            for length in range(1, 4000):
                cache.step({reqid: length % 399 + 1})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert seen
        cache.check()


def test_caches_join_and_leave_a_pool_that_is_in_use() -> None:
    pool = vattn.PagePool(512 * PAGE, device=DEVICE, page_size=PAGE)
    cache = make(pool=pool, max_context_len=64)
    failed: list[BaseException] = []
    done = threading.Event()

    def use() -> None:
        reqid = cache.alloc_reqid()
        try:
            while not done.is_set():
                for length in range(1, 64):
                    cache.available_pages()
                    cache.step({reqid: length})
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(150):
            make(pool=pool, max_context_len=64).close()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not failed
    cache.check()
    cache.close()
    pool.close()


def test_a_step_whose_copy_fails_leaves_the_request_as_it_was() -> None:
    table = FaultyTable()
    pool = vattn.PagePool(BUDGET, device=DEVICE, page_size=PAGE, table=table.addresses)
    with make(pool=pool, eager_pages=0, overlap=False) as cache:
        reqid, block = cache.alloc_reqid(), cache.prefix_block_tokens
        cache.step({reqid: 2 * block})
        cache.commit(reqid, list(range(2 * block)))
        cache.step({reqid: block + 3})
        table.fail(1, name="cuMemMap")
        with pytest.raises(vattn.DriverError):
            cache.step({reqid: block + 4})
        table.heal()
        cache.check()
        assert cache.page_map()[reqid].length == block + 3
        cache.step({reqid: block + 4})
        cache.check()
    pool.close()


def test_a_fork_waits_for_pages_that_its_slot_gets_in_the_background() -> None:
    table = FaultyTable()
    pool = vattn.PagePool(BUDGET, device=DEVICE, page_size=PAGE, table=table.addresses)
    with make(pool=pool, eager_pages=4, max_batch_size=2) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 10})
        for tensor in cache.layer(0):
            tensor[reqid, :10] = 1.0
        cache.trim()
        table.delay = 0.01
        cache.alloc_reqid()  # makes no slot ready, as there is no other
        cache.free_reqid(1)  # makes this one ready
        child = cache.fork(reqid)
        assert all(bool((tensor[child, :10] == 1.0).all()) for tensor in cache.layer(0))
        table.delay = 0.0
        cache.check()
    pool.close()


def test_the_work_of_an_admission_does_not_depend_on_the_number_of_slots() -> None:
    def calls(slots: int) -> int:
        with make(max_batch_size=slots, max_context_len=64, memory_budget=64 * PAGE) as cache:
            count = 0

            def profile(frame: FrameType, event: str, argument: object) -> None:
                nonlocal count
                count += event in ("call", "c_call")

            def request() -> None:
                reqid, _ = cache.admit([1, 2, 3])
                cache.step({reqid: 3})
                cache.free_reqid(reqid)

            for _ in range(3):
                request()
            sys.setprofile(profile)
            try:
                request()
            finally:
                sys.setprofile(None)
            return count

    assert calls(512) == calls(8)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of generators that are interrupted
def test_a_cache_whose_close_was_interrupted_anywhere_is_collected() -> None:
    config = vattn.KVConfig(
        num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", max_batch_size=2, max_context_len=64, page_size=4096
    )

    def is_collected(nth: int) -> bool:
        cache = vattn.KVCache(config, pool=pool)
        cache.step({cache.alloc_reqid(): 60})
        ref = weakref.ref(cache)
        with contextlib.suppress(KeyboardInterrupt):
            injection.interrupted(cache.close, "call", nth)
        del cache
        gc.collect()
        return ref() is None

    pool = vattn.PagePool(40 * 4096, page_size=4096)
    is_collected(1 << 30)
    places = range(1, injection.events() + 1)
    assert [nth for nth in places if not is_collected(nth)] == []
    pool.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_close_that_was_interrupted_anywhere_is_completed_by_another() -> None:
    config = vattn.KVConfig(
        num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", max_batch_size=2, max_context_len=64, page_size=4096
    )

    def close_twice(nth: int) -> None:
        before = len(os.listdir("/proc/self/task"))
        cache = vattn.KVCache(config)  # with a pool of its own, and so a thread
        cache.step({cache.alloc_reqid(): 60})
        with contextlib.suppress(KeyboardInterrupt):
            injection.interrupted(cache.close, "check", nth)
        cache.close()
        # The kernel lists a thread for a moment after it was joined.
        wait_until(lambda: len(os.listdir("/proc/self/task")) <= before, lambda: f"a thread is left: {nth}")

    close_twice(1 << 30)
    for nth in range(1, injection.events() + 1):
        close_twice(nth)
