"""Pools whose memory a broker lends: caches in several processes, each of which may end at any moment."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import vattn
from tests.campaign import borrowing
from tests.support import brokers, forks, scripts
from tests.support.effort import effort
from tests.support.target import DEVICE, host_only
from tests.support.waiting import SECONDS, Background, wait_until
from vattn.broker.borrower import Borrower
from vattn.broker.places import FOLDER_VARIABLE
from vattn.pool.lent import LentCore

pytestmark = pytest.mark.slow(1)

PAGE = 4096
PAGES = 256
TOKENS = 16  # of a page


@pytest.fixture
def broker() -> Iterator[brokers.Process]:
    with brokers.running(PAGES * PAGE, "cpu" if DEVICE == "cpu" else "cuda:0") as process:
        yield process


def connect(label: str, **share: Any) -> vattn.PagePool:
    return vattn.PagePool.connect(brokers.NAME, label=label, device=DEVICE, page_size=PAGE, **share)


def cache(pool: vattn.PagePool, **options: Any) -> vattn.KVCache:
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32}
    sizes = {"max_batch_size": 8, "max_context_len": PAGES * TOKENS, "layout": "layer", "device": DEVICE}
    return vattn.KVCache(vattn.KVConfig(**shape, **sizes, **options), pool=pool)


def held(broker: brokers.Process, name: str) -> int:
    """Bytes that a borrower has, by its file, or, on CUDA, by what it says."""
    told = broker.borrower(name) or dict.fromkeys(("found", "owned", "parked", "cached"), 0)
    return int(told["found"] if DEVICE == "cpu" else told["owned"] + told["parked"] + told["cached"])


def end(kv: vattn.KVCache, slot: int) -> None:
    """Frees a request whose kernels are launched."""
    kv.free_reqid(slot)
    kv.step({})


def pages(tokens_pages: int) -> int:
    """Tokens of one request that take so many pages of K, and as many of V."""
    return tokens_pages * TOKENS


def _open(what: str) -> list[str]:
    """What this process has open whose name has this in it."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [name for name in found if what in name]


def close(*both: Any) -> None:
    for each in both:
        each.close()


def test_a_cache_on_a_lent_pool_is_like_any_other(broker: brokers.Process) -> None:
    pool = connect("a")
    with cache(pool) as kv:
        slot = kv.alloc_reqid()
        kv.step({slot: pages(20)})
        keys, values = kv.layer(0)
        keys[slot, : pages(20)] = 3
        values[slot, : pages(20)] = 4
        kv.check()
        assert keys[slot, : pages(20)].eq(3).all()
        wait_until(lambda: held(broker, "a") >= 40 * PAGE)
        assert broker.problems() == []
        assert (pool.budget, kv.total_pages) == (PAGES * PAGE, PAGES)
    assert pool.free_pages > 0
    pool.close()
    wait_until(lambda: broker.borrower("a") is None)
    assert broker.ask("top")["free"] == PAGES * PAGE


def test_a_budget_below_the_pools_is_kept(broker: brokers.Process) -> None:
    pool = connect("a")
    with cache(pool, memory_budget=40 * PAGE) as kv:
        slots = [kv.alloc_reqid(), kv.alloc_reqid()]
        kv.step({slots[0]: pages(15)})
        wait_until(lambda: not kv.borrow_pages(100) and kv.available_pages() >= 10)
        assert kv.available_pages() == 10
        with pytest.raises(vattn.OutOfPages, match=r"10 .* are missing"):  # not in the pool: in the budget
            kv.step({slots[0]: pages(15), slots[1]: pages(10)})
        kv.check()
        kv.step({slots[0]: pages(15), slots[1]: pages(5)})
        assert kv.available_pages() == 0
        kv.check()
    pool.close()


def test_block_windows_borrow_what_they_back(broker: brokers.Process) -> None:
    blocks = 3 * PAGES // 4  # much more than a lease has at the start
    pool = connect("A", at_most=blocks * PAGE)
    windows = vattn.BlockWindows(
        num_layers=1,
        num_blocks=PAGES,
        block_size=TOKENS,
        row=(1, 64),
        dtype=torch.float32,
        num_windows=2,
        max_context_len=PAGES * TOKENS,
        device=DEVICE,
        pool=pool,
    )
    for block in range(blocks):
        assert windows.back([block]) == 1
    with pytest.raises(vattn.OutOfPages, match=f"64 more than the budget of {blocks} has left; the pool") as caught:
        windows.back(range(PAGES))
    assert not caught.value.may_pass
    windows.check()
    assert windows.stats().backed_blocks == blocks
    close(windows, pool)


def test_two_pools_of_a_process_have_files_of_their_own(broker: brokers.Process) -> None:
    first, second = connect("a"), connect("a")
    with cache(first) as one, cache(second) as two:
        for kv in (one, two):
            kv.step({kv.alloc_reqid(): pages(4)})
        wait_until(lambda: all(held(broker, name) >= 8 * PAGE for name in ("a", "a#2")))
    close(first, second)


def test_what_a_request_leaves_goes_to_whoever_needs_it(broker: brokers.Process) -> None:
    one, two = connect("a"), connect("b")
    with cache(one) as a, cache(two) as b:
        slot = a.alloc_reqid()
        a.step({slot: pages(100)})
        other = b.alloc_reqid()
        with pytest.raises(vattn.OutOfPages, match=r"the pool 'tested' has no more to lend") as refused:
            b.step({other: pages(60)})
        assert refused.value.may_pass
        end(a, slot)  # parked there, and given back when asked for
        b.step({other: pages(60)})
        b.layer(0)[0][other, : pages(60)] = 1
        a.check()
        b.check()
        assert broker.problems() == []
    close(one, two)


def test_cached_prefixes_are_given_back_before_a_request_fails(broker: brokers.Process) -> None:
    one, two = connect("a"), connect("b")
    with cache(one) as a, cache(two) as b:
        prompt = list(range(pages(100)))
        slot, _ = a.admit(prompt)
        a.step({slot: len(prompt)})
        a.commit(slot, prompt)
        end(a, slot)
        assert a.stats().cached_pages == 200
        other = b.alloc_reqid()
        b.step({other: pages(60)})
        a.check()
        assert 0 < a.stats().cached_pages < 200  # no more than was needed, or a part
        assert a.admit(prompt).cached_tokens > 0
    close(one, two)


def test_a_lease_that_grows_meanwhile_is_not_counted_as_freed(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = connect("a")
    with cache(pool, overlap=False) as kv:
        prompt = list(range(pages(3)))
        slot, _ = kv.admit(prompt)
        kv.step({slot: len(prompt)})
        kv.commit(slot, prompt)
        execute = pool._core.execute

        def late(plan: Any) -> Any:
            pool._core.native.limit += 5  # as the borrower's thread does at any moment
            return execute(plan)

        monkeypatch.setattr(pool._core, "execute", late)
        assert kv.evict_prefixes() == 0
        end(kv, slot)
        assert kv.evict_prefixes() == 6
    pool.close()


@host_only
def test_new_memory_is_zero_whoever_had_it(broker: brokers.Process) -> None:
    one, two = connect("a"), connect("b")
    with cache(one) as a, cache(two) as b:
        slot = a.alloc_reqid()
        a.step({slot: pages(120)})
        for side in a.layer(0):
            side[slot, : pages(120)] = float("nan")
        end(a, slot)
        other = b.alloc_reqid()
        b.step({other: pages(120)})
        assert all(side[other, : pages(120)].eq(0).all() for side in b.layer(0))
    close(one, two)


def test_a_guarantee_is_kept_at_the_cost_of_what_others_have_above_theirs(broker: brokers.Process) -> None:
    one, two = connect("a", at_least=32 * PAGE), connect("b", at_least=64 * PAGE)
    with cache(one) as a, cache(two) as b:
        slots = [a.alloc_reqid() for _ in range(4)]
        a.step(dict.fromkeys(slots, pages(30)))
        for slot in slots:
            a.layer(0)[0][slot, : pages(30)] = 7
        asking = threading.Thread(target=lambda: b.step({b.alloc_reqid(): pages(30)}))
        asking.start()
        wait_until(lambda: a.available_pages() < 0)  # an engine preempts now
        end(a, slots.pop())
        asking.join()
        assert b.stats().owned_pages >= 60
        assert a.layer(0)[0][slots[0], : pages(30)].eq(7).all()
        a.check()
        b.check()
    close(one, two)


def test_what_others_would_like_ahead_of_need_is_not_taken_from_a_call_that_needs_it(broker: brokers.Process) -> None:
    one, two = connect("a", at_least=32 * PAGE), connect("b", at_least=64 * PAGE)
    with cache(one) as a, cache(two) as b:
        for _ in range(20):  # b asks ahead for what a is about to need
            slots = [a.alloc_reqid() for _ in range(4)]
            a.step(dict.fromkeys(slots, pages(30)))
            for slot in slots:
                end(a, slot)
            two._core.stock()
            broker.ask("reclaim", name="a", stage="parked")
        b.check()
    close(one, two)


def test_a_limit_falls_and_rises_while_requests_run(broker: brokers.Process) -> None:
    pool = connect("a")
    with cache(pool) as kv:
        slots = [kv.alloc_reqid() for _ in range(4)]
        kv.step(dict.fromkeys(slots, pages(20)))
        broker.ask("limit", name="a", at_least=None, at_most=100 * PAGE)
        wait_until(lambda: kv.available_pages() < 0)
        assert kv.total_pages == 100
        kv.step(dict.fromkeys(slots, pages(20)))  # what runs goes on
        with pytest.raises(vattn.OutOfPages, match=r"a budget of 100: .*lets 'a' have at most .*pool limit tested a"):
            kv.step(dict.fromkeys(slots, pages(24)))  # more than was mapped ahead of need
        for slot in slots[:2]:
            end(kv, slot)
        wait_until(lambda: (broker.borrower("a") or {})["lease"] <= 100 * PAGE)
        kv.step({slots[2]: pages(25)})
        broker.ask("limit", name="a", at_least=None, at_most=PAGES * PAGE)
        wait_until(lambda: kv.total_pages == PAGES)
        kv.step({slots[2]: pages(80)})
        kv.check()
        assert broker.problems() == []
    pool.close()


def test_limits_are_told_although_nobody_wants_memory(broker: brokers.Process) -> None:
    pool = connect("a")
    with cache(pool) as kv:
        for most in (64, PAGES):
            broker.ask("limit", name="a", at_least=16 * PAGE, at_most=most * PAGE)
            wait_until(lambda most=most: kv.total_pages == most)
            assert pool.loan is not None
            assert (pool.loan.at_least, pool.loan.at_most) == (16 * PAGE, most * PAGE)
    pool.close()


def test_a_loan_is_what_the_broker_has_in_its_books(broker: brokers.Process) -> None:
    pool = connect("a", at_least=32 * PAGE, at_most=200 * PAGE)
    with cache(pool) as kv:
        slot = kv.alloc_reqid()
        kv.step({slot: pages(20)})
        prompt = list(range(pages(10)))
        other, _ = kv.admit(prompt)
        kv.step({other: len(prompt)})
        kv.commit(other, prompt)
        end(kv, other)

        def agreed() -> bool:  # each hears of the other's last word a moment later
            told, loan = broker.borrower("a") or {}, pool.loan
            assert loan is not None
            return (loan.lent, loan.usage.cached, loan.usage.owned) == (told["lease"], told["cached"], told["owned"])

        wait_until(lambda: (broker.borrower("a") or {})["cached"] == 20 * PAGE and agreed())
        loan = pool.loan
        assert loan is not None
        assert (loan.pool, loan.name, loan.reachable, loan.budget) == (brokers.NAME, "a", True, PAGES * PAGE)
        assert (loan.at_least, loan.at_most) == (32 * PAGE, 200 * PAGE)
        assert loan.usage.owned >= 40 * PAGE
        assert (loan.asked_back, loan.given_back) == (0, 0)
        broker.ask("reclaim", name="a", stage="cached")
        wait_until(lambda: (broker.borrower("a") or {})["asked_back"] > 0)
        wait_until(lambda: pool.loan and pool.loan.given_back == (broker.borrower("a") or {})["asked_back"])
        broker.ask("limit", name="a", at_least=0, at_most=20 * PAGE)
        wait_until(lambda: pool.loan is not None and pool.loan.asked_back >= 20 * PAGE)
        broker.kill()
        wait_until(lambda: pool.loan is not None and not pool.loan.reachable)
    pool.close()
    with contextlib.closing(vattn.PagePool("1MiB")) as own:
        assert own.loan is None


def test_trim_and_evict_take_back_what_they_say(broker: brokers.Process) -> None:
    pool = connect("a")
    with cache(pool) as kv:
        prompt = list(range(pages(40)))
        slot, _ = kv.admit(prompt)
        kv.step({slot: len(prompt)})
        kv.commit(slot, prompt)
        end(kv, slot)
        slot = kv.alloc_reqid()
        kv.step({slot: pages(20)})
        end(kv, slot)
        wait_until(lambda: (broker.borrower("a") or {})["parked"] > 0)
        broker.ask("reclaim", name=None, stage="parked")
        wait_until(lambda: kv.stats().parked_pages == 0)
        assert kv.stats().cached_pages == 80
        wait_until(lambda: (broker.borrower("a") or {})["asked"] == 0)
        broker.ask("reclaim", name="a", stage="cached")
        wait_until(lambda: kv.stats().cached_pages == 0)
        wait_until(lambda: held(broker, "a") == 0)
        slot = kv.alloc_reqid()
        kv.step({slot: pages(60)})
        wait_until(lambda: (broker.borrower("a") or {})["owned"] >= 60 * PAGE)
        end(kv, slot)

        def evicted() -> bool:
            broker.ask("reclaim", name="a", stage="cached")  # the broker may still think that the request runs
            return held(broker, "a") == 0

        # Asked again: pages of which the worker still maps or unmaps some are not taken back while it does.
        wait_until(evicted, every=0.05)
        kv.check()
    pool.close()


def test_without_its_broker_a_pool_goes_on_with_what_it_has(broker: brokers.Process) -> None:
    pool = connect("a", at_most=200 * PAGE)
    with cache(pool) as kv:
        slot = kv.alloc_reqid()
        kv.step({slot: pages(20)})
        kv.layer(0)[0][slot, : pages(20)] = 5
        broker.kill()
        kv.step({slot: pages(20)})
        with pytest.raises(vattn.OutOfPages, match=r"the broker of the pool 'tested' cannot be reached") as refused:
            kv.step({slot: pages(90)})
        assert not refused.value.may_pass
        kv.check()
        broker.start()
        assert (broker.borrower("a") or {})["lease"] >= 40 * PAGE  # it knows before the borrower is back
        wait_until(lambda: not (broker.borrower("a") or {})["lost"])
        wait_until(lambda: pool._core.may_get_more)  # the broker knows first
        kv.step({slot: pages(90)})
        assert kv.layer(0)[0][slot, : pages(20)].eq(5).all()
        assert broker.problems() == []
    pool.close()


def test_a_pool_that_closes_without_a_broker_is_charged_nothing_by_the_next(broker: brokers.Process) -> None:
    """Although its process lives on. One that was not closed has all that it had."""
    closed, other = connect("closed"), connect("other")
    for pool in (closed, other):
        with cache(pool) as kv:
            kv.step({kv.alloc_reqid(): pages(20)})
    broker.kill()
    closed.close()
    broker.start()
    wait_until(lambda: broker.borrower("closed") is None)
    wait_until(lambda: not (broker.borrower("other") or {"lost": True})["lost"])
    assert broker.problems() == []
    broker.kill()
    broker.start()
    assert broker.borrower("closed") is None
    assert not list(Path(os.environ[FOLDER_VARIABLE]).glob("*.left"))
    other.close()


def test_a_pool_that_is_dropped_leaves(broker: brokers.Process) -> None:
    kv = cache(connect("a"))
    kv.step({kv.alloc_reqid(): pages(20)})
    kv.close()
    del kv
    wait_until(lambda: broker.borrower("a") is None)


def test_a_pool_that_has_left_writes_to_no_descriptor(broker: brokers.Process) -> None:
    """Those that it had are somebody else's by then: one that gets its eight bytes loses its connection, say."""
    pools = [connect("a") for _ in range(4)]
    borrowers = [cast(LentCore, pool._core).borrower for pool in pools]
    for pool in pools:
        pool.close()
    files = [os.memfd_create("others") for _ in range(64)]
    for borrower in borrowers:
        borrower.request(PAGE)
    pools.clear()
    gc.collect()
    borrowers.clear()
    assert [os.fstat(file).st_size for file in files] == [0] * len(files)
    for file in files:
        os.close(file)


def borrower_of(pool: vattn.PagePool) -> Borrower:
    return cast(LentCore, pool._core).borrower


def test_an_interrupted_call_wants_nothing_any_more(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = connect("a", at_most=64 * PAGE)
    borrower = borrower_of(pool)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with cache(pool), monkeypatch.context() as patch:
        before = borrower._want
        patch.setattr(borrower._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            borrower.wait(64 * PAGE, 1.0, needed=True)
        assert (borrower._want, borrower._urgent) == (before, 0)
    pool.close()


def test_who_is_in_a_call_answers_after_it(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may take longer than an answer is waited for at first; what it is asked for, it has."""
    one, two = connect("a"), connect("b")
    with cache(one) as a, cache(two) as b:
        slot = a.alloc_reqid()
        a.step({slot: pages(100)})
        end(a, slot)
        core = cast(LentCore, one._core)
        asked, come_down = threading.Semaphore(0), core.come_down

        def count(level: int, stage: str) -> int | None:
            reached = come_down(level, stage)
            asked.release()
            return reached

        monkeypatch.setattr("vattn.pool.lent._LOCK", 0.001)
        monkeypatch.setattr("vattn.broker.borrower._BUSY", SECONDS)
        monkeypatch.setattr("vattn.broker.borrower._HEARTBEAT", SECONDS)
        monkeypatch.setattr(core, "come_down", count)
        with core.lock:
            asking = Background(lambda: b.step({b.alloc_reqid(): pages(60)}))
            for _ in range(3):
                assert asked.acquire(timeout=SECONDS)
        asking.finish()
        a.check()
        b.check()
    close(one, two)


def test_memory_that_comes_too_late_for_a_call_waits_for_its_engine(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = connect("a"), connect("b")
    with cache(one) as a, cache(two) as b:
        slot = a.alloc_reqid()
        a.step({slot: pages(120)})
        end(a, slot)
        core, late = cast(LentCore, one._core), threading.Event()
        come_down = core.come_down

        def slowly(level: int, stage: str) -> int | None:
            assert late.wait(SECONDS)
            return come_down(level, stage)

        monkeypatch.setattr(core, "come_down", slowly)
        monkeypatch.setattr("vattn.broker.borrower._STANDING", SECONDS)
        monkeypatch.setattr("vattn.broker.borrower._AGAIN", 0.0)
        assert two._core.borrow(100, needed=False) < 100
        late.set()
        wait_until(lambda: two._core.free_pages >= 100)  # and without another call
        b.check()
    close(one, two)


def test_what_will_be_wanted_next_is_asked_for_and_not_waited_for(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = connect("a")
    with cache(one):
        asked, limit = borrower_of(one), one._core.native.limit
        wanted: list[int] = []

        def reached(settled: Callable[[], bool], seconds: float) -> bool:
            wanted.append(asked._want)
            asked._lease.level = (limit + 10) * PAGE
            return settled()

        monkeypatch.setattr(asked._changed, "wait_for", reached)
        with asked._changed:
            one._core.borrow(10, needed=False, following=30)
        assert wanted == [(limit + 40) * PAGE]
        assert asked._lease.level == (limit + 10) * PAGE
    close(one)


def test_no_number_of_pages_is_too_much_to_wish_for(broker: brokers.Process) -> None:
    pool = connect("a")

    def has_all(kv: vattn.KVCache) -> bool:
        assert borrower_of(pool).reachable
        return kv.borrow_pages(2**70, following=2**70) + kv.available_pages() == PAGES

    with cache(pool) as kv:
        for number in (-1, "three", True):
            for wish in ((number, 0), (1, number)):
                with pytest.raises(vattn.InvalidLength, match="pages and following"):
                    kv.borrow_pages(*wish)  # type: ignore[arg-type]
        assert kv.available_pages() < PAGES
        pool._core.borrow(1, needed=False, following=2**70)
        wait_until(lambda: has_all(kv))
        kv.step({kv.alloc_reqid(): pages(PAGES // 2)})
        kv.check()
    close(pool)


def test_what_an_engine_wanted_is_forgotten_if_it_asks_no_more(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = connect("a"), connect("b")
    with cache(one) as a, cache(two):
        a.step({a.alloc_reqid(): pages(120)})
        monkeypatch.setattr("vattn.broker.borrower._STANDING", 0.0)
        monkeypatch.setattr("vattn.broker.borrower._AGAIN", 0.0)
        monkeypatch.setattr("vattn.broker.borrower._HEARTBEAT", 0.01)
        asked = borrower_of(two)
        with monkeypatch.context() as patch:
            patch.setattr(asked._changed, "wait_for", lambda *_: False)
            two._core.borrow(200, needed=False)
        assert asked._wish
        wait_until(lambda: asked._urgent == 0 and asked._want <= asked.level)
        wait_until(lambda: (broker.borrower("b") or {})["want"] <= asked.level)
    close(one, two)


def test_a_borrower_whose_thread_ends_says_so(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = connect("a", at_most=100 * PAGE)

    def broken(*, wait: bool) -> None:
        raise RuntimeError("broken")

    with cache(pool) as kv:
        kv.step({kv.alloc_reqid(): pages(20)})
        wait_until(lambda: held(broker, "a") >= 40 * PAGE)
        monkeypatch.setattr(pool._core, "usage", broken)
        pool._core.stock()
        borrower_of(pool)._dirty = True
        borrower_of(pool).wake()
        wait_until(lambda: not borrower_of(pool).reachable)
        with pytest.raises(vattn.OutOfPages, match="RuntimeError: broken"):
            kv.step({0: pages(49)})
        assert (broker.borrower("a") or {})["lease"] >= 40 * PAGE  # the memory is there
    pool.close()


def test_a_pool_closes_while_its_broker_hangs(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = connect("a")
    monkeypatch.setattr("vattn.broker.borrower._CONNECTING", 2.0 * SECONDS)
    borrower = borrower_of(pool)
    broker.process.send_signal(signal.SIGSTOP)
    borrower._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    wait_until(lambda: borrower._joining is not None)  # it waits for an answer
    Background(pool.close).finish()
    broker.process.send_signal(signal.SIGCONT)


def test_a_broker_that_has_just_been_joined_again_does_not_hang(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was unread before, and although what is sent first is no report."""
    pool = connect("a")
    borrower = borrower_of(pool)
    joined = borrower._connect
    seen = []

    def connect_again() -> None:
        joined()
        monkeypatch.setattr(borrower, "_unread", lambda: 1)
        seen.append(borrower.reachable)
        monkeypatch.undo()

    monkeypatch.setattr(borrower, "_connect", connect_again)
    borrower._unread_since = 0.0
    broker.kill()
    wait_until(lambda: not borrower.reachable)
    broker.start()
    wait_until(lambda: bool(seen))
    assert seen == [True]
    pool.close()


def test_a_broker_that_hangs_is_said_to(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.broker.borrower._HANGS", 0.5)
    pool = connect("a")
    with cache(pool) as kv:
        slot = kv.alloc_reqid()
        kv.step({slot: 1})
        wait_until(lambda: pool.loan.reachable)
        broker.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not pool.loan.reachable)
        with pytest.raises(vattn.OutOfPages, match="the broker of the pool 'tested' does not answer") as caught:
            kv.step({slot: pages(PAGES // 2)})
        assert not caught.value.may_pass
        broker.process.send_signal(signal.SIGCONT)
        wait_until(lambda: pool.loan.reachable)
        monkeypatch.undo()
        kv.step({slot: pages(PAGES // 2)})
        kv.check()
    pool.close()


@host_only
def test_a_child_that_is_forked_while_a_borrower_joins_keeps_nothing(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it kept would be memory that no broker counts, or a connection that seems to live."""
    made, forked, leaves = threading.Event(), threading.Event(), socket.send_fds

    def send(*arguments: Any) -> int:
        made.set()
        forked.wait(0.2)  # a fork comes after it
        return leaves(*arguments)

    def kept() -> list[int]:
        return [len(_open(what)) for what in ("memfd:vattn", "eventfd", "socket:")]

    before = kept()
    monkeypatch.setattr(socket, "send_fds", send)
    joining = Background(lambda: connect("a").close())
    assert made.wait(SECONDS)
    status = forks.status(lambda: any(now > was for now, was in zip(kept(), before, strict=True)))
    forked.set()
    joining.finish()
    assert status == 0


@host_only
def test_a_pool_that_is_dropped_keeps_no_descriptor(broker: brokers.Process) -> None:
    files = len(_open("memfd:vattn"))
    for _ in range(3):
        kv = cache(connect("a"))
        kv.step({kv.alloc_reqid(): pages(2)})
        kv.close()
        del kv
        gc.collect()
    wait_until(lambda: len(_open("memfd:vattn")) <= files)


@host_only
def test_a_child_is_no_borrower_and_keeps_nothing_of_the_parents(broker: brokers.Process) -> None:
    pool = connect("a")
    with cache(pool) as kv:
        slot = kv.alloc_reqid()
        kv.step({slot: pages(8)})

        def child() -> int:
            with pytest.raises(vattn.ForkedProcess):
                kv.step({slot: pages(9)})
            return bool(_open("memfd:vattn") or _open("eventfd"))

        assert forks.status(child) == 0
        kv.step({slot: pages(60)})
        assert broker.problems() == []
    pool.close()


@host_only
def test_a_child_has_a_pool_of_its_own_after_it_has_dropped_its_parents(broker: brokers.Process) -> None:
    """Both have a first file of memory, under the same number."""
    pool = connect("a")
    kv = cache(pool)
    kv.step({kv.alloc_reqid(): pages(8)})
    wait_until(lambda: (broker.borrower("a") or {})["owned"])  # its thread has said so, and has the pool no more

    def child() -> None:
        nonlocal pool, kv
        own = cache(connect("b"))
        del pool, kv
        gc.collect()
        own.step({own.alloc_reqid(): pages(8)})
        own.check()

    assert forks.status(child) == 0
    kv.check()
    kv.close()
    pool.close()


def test_a_folder_for_pools_that_cannot_be_is_a_wrong_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "folder"):
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
        with pytest.raises(vattn.ConfigError, match=f"{folder}, where pools are found, cannot be made"):
            connect("a")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"at_least": "2MiB"}, "more than at most"),
        ({"at_most": 1}, "below one page"),
        ({"label": "a b"}, "the name of a borrower"),
        ({"guard": "no"}, "guard"),
        ({"at_most": "x"}, "is not a size"),
    ],
)
def test_what_cannot_be_had_is_refused_and_leaves_nothing(
    broker: brokers.Process, arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(vattn.ConfigError, match=why):
        vattn.PagePool.connect(brokers.NAME, device=DEVICE, page_size=PAGE, **arguments)
    assert broker.ask("top")["borrowers"] == []


@host_only
def test_a_pool_without_a_thread_leaves_nothing(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, _open("memfd:vattn")

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "vattn borrower":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):  # the guarantee of the first is free again
        with pytest.raises(vattn.ProcessLimit, match="RLIMIT_NPROC"):
            connect("a", at_least=PAGES * PAGE)
    monkeypatch.undo()
    assert _open("memfd:vattn") == before
    wait_until(lambda: broker.ask("top")["borrowers"] == [])


def test_a_budget_of_more_pages_than_have_a_number_is_refused() -> None:
    with brokers.running(2**31 * PAGE, "cpu" if DEVICE == "cpu" else "cuda:0") as broker:
        with pytest.raises(vattn.ConfigError, match="give larger pages"):
            connect("a")
        wait_until(lambda: broker.ask("top")["borrowers"] == [])


def test_a_borrower_lives_through_a_time_without_descriptors(broker: brokers.Process) -> None:
    pool = connect("a")
    kv = cache(pool)
    borrower = cast(LentCore, pool._core).borrower
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []

    def fill() -> None:  # also what the thread has closed for a moment
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        for _ in range(2):
            due = borrower._due
            wait_until(lambda due=due: fill() or borrower._due > due or not borrower.reachable, every=1e-5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
    assert borrower.reachable
    kv.step({kv.alloc_reqid(): pages(PAGES // 2)})
    kv.close()
    pool.close()


def test_a_pool_without_a_broker_says_how_to_start_one(broker: brokers.Process) -> None:
    with pytest.raises(vattn.ConfigError, match="vattn pool serve other --budget SIZE"):
        vattn.PagePool.connect("other")


_BORROWER = """
import random, sys
from tests.campaign.borrowing import Borrowing
name, tag, seed = sys.argv[1], *map(int, sys.argv[2:])
rng = random.Random(seed)
borrowing = Borrowing("tested", name, tag, rng, stays=True)
print("ready", file=sys.stderr, flush=True)
while True:
    borrowing.turn()
    if rng.random() < 0.02:
        borrowing.check()
"""


@host_only
def test_processes_that_are_killed_at_random_lose_nothing_of_others(broker: brokers.Process) -> None:
    """Borrowers that write, share and check their pages; kills of them and of the broker; limits and evictions."""
    rng = random.Random(2026)
    running: dict[str, scripts.Process] = {}
    tags = itertools.cycle(borrowing.TAGS)
    kills = 0

    def start(name: str) -> None:
        running[name] = scripts.start(_BORROWER, name, str(next(tags)), str(rng.randrange(10**6)))
        error = running[name].stderr
        assert error is not None
        assert error.readline() == "ready\n", error.read()

    def gone(name: str) -> Any:
        return all(each["name"] != name for each in broker.ask("top")["borrowers"])

    try:
        for name in "abc":
            start(name)
        while kills < effort(4, 1000):
            event, name = rng.random(), rng.choice("abc")
            threading.Event().wait(rng.random() * 0.2)
            for other, process in running.items():
                if not os.path.exists(f"/proc/{process.pid}/exe"):
                    assert process.stderr is not None
                    pytest.fail(f"{other}: {process.stderr.read()}")
            kills += event < 0.6
            if event < 0.5:
                running[name].send_signal(signal.SIGKILL)
                running[name].wait()
                assert running[name].stderr is not None
                running[name].stderr.close()
                wait_until(lambda name=name: gone(name))
                start(name)
            elif event < 0.6:
                broker.kill()
                broker.start()
                wait_until(lambda: sum(not each["lost"] for each in broker.ask("top")["borrowers"]) == 3)
            elif event < 0.75 and broker.borrower(name):
                most = rng.randrange(PAGES // 4, PAGES + 1) * PAGE
                broker.ask("limit", name=name, at_least=None, at_most=most)
            elif event < 0.9:
                broker.ask("reclaim", name=None, stage=rng.choice(["free", "parked", "cached"]))
            else:
                running[name].send_signal(signal.SIGSTOP)
                threading.Event().wait(rng.random() * 0.3)
                running[name].send_signal(signal.SIGCONT)
            top = broker.ask("top")
            assert sum(each["lease"] for each in top["borrowers"]) <= PAGES * PAGE, top
            assert sum(each["found"] for each in top["borrowers"]) <= PAGES * PAGE, top
            assert broker.problems() == []
    finally:
        for process in running.values():
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
    # What has been published outlives its process.
    wait_until(lambda: broker.ask("reclaim", name=None, stage="cached")["free"] == PAGES * PAGE)
