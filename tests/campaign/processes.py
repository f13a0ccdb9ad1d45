"""Threads, forks, signals and collections in the midst of calls: what must not hang, and must not mix up anything.

Each scenario is a function that stands alone, and is played in a process of its own.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable

from tests.campaign.contents import put, see, text
from tests.campaign.isolation import Ended, Send, in_child
from tests.campaign.play import Played

_QUIET = 20.0


def forks(seed: int) -> int:
    """Forks while another thread is in calls: every call in the child raises ForkedProcess, and the parent goes on."""
    import os
    import random
    import signal
    import threading
    import time

    import vattn

    rng = random.Random(seed)
    config = vattn.KVConfig(
        num_layers=2, num_kv_heads=1, head_dim=32, dtype="float32", max_batch_size=3, max_context_len=300,
        page_size=4096, memory_budget=4096 * 200, overlap=rng.random() < 0.5,
        sliding_window=rng.choice((None, 20)),
    )  # fmt: skip
    cache = vattn.KVCache(config)
    stop = False
    calls = 0
    failed: list[BaseException] = []

    def hammer() -> None:
        nonlocal calls
        try:
            drawn = random.Random(seed)
            while not stop:
                reqid, _ = cache.admit(text(0, 0, 200))
                for n in (drawn.randint(200, 300), 0, 250):
                    cache.step({reqid: n})
                cache.commit(reqid, text(0, 0, 100))
                cache.free_reqid(reqid)
                cache.trim()
                calls += 7
        except BaseException as error:
            failed.append(error)

    def child() -> int:
        signal.alarm(5)
        public = [
            cache.stats, cache.page_map, cache.available_pages, cache.trim, cache.evict_prefixes, cache.alloc_reqid,
            lambda: cache.admit([1]), lambda: cache.step({}), lambda: cache.fork(0), lambda: cache.commit(0, []),
            lambda: cache.free_reqid(0), cache.check, lambda: vattn.KVCache(config, pool=cache._pool),
        ]  # fmt: skip
        for call in public:
            try:
                call()
            except vattn.ForkedProcess:
                continue
            except BaseException:
                return 3
            return 2
        return 0

    thread = threading.Thread(target=hammer, daemon=True)
    thread.start()
    for _ in range(8):
        time.sleep(rng.random() * 0.004)
        pid = os.fork()
        if pid == 0:
            os._exit(child())
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            raise AssertionError("DEFECT: a call hangs in a forked child")
        code = os.WEXITSTATUS(status)
        assert code == 0, f"DEFECT: a call in a forked child {'succeeds' if code == 2 else 'fails otherwise'}"
        calls += 1
    stop = True
    thread.join(10)
    assert not thread.is_alive(), "DEFECT: the parent's thread hangs after a fork"
    if failed:
        raise failed[0]
    cache.check()
    cache.close()
    return calls


def threads(seed: int) -> int:
    """Threads with requests of their own on one cache, and others that make and close caches on its pool."""
    import random
    import sys
    import threading
    from dataclasses import replace

    import vattn

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    rng = random.Random(seed)
    window = rng.choice((None, 20))
    pool = vattn.PagePool(4096 * rng.choice((60, 200)), page_size=4096)
    config = vattn.KVConfig(
        num_layers=2, num_kv_heads=1, head_dim=32, dtype="float32", max_batch_size=4, max_context_len=200,
        page_size=4096, overlap=rng.random() < 0.5,
    )  # fmt: skip
    # Without windows: a step of one thread says that the kernels of the step before are launched, those of others too.
    shared = vattn.KVCache(config, pool=pool)
    config = replace(config, sliding_window=window)
    others = [vattn.KVCache(replace(config, max_batch_size=1), pool=pool) for _ in range(30)]
    failed: list[BaseException] = []
    calls = 0

    def firsts(length: int) -> dict[int, int]:
        first = 0 if window is None else max(0, length - window + 1)
        return {0: first, 1: first}

    def request(cache: vattn.KVCache, drawn: random.Random) -> int:
        stream = drawn.randrange(3)
        length = drawn.randint(40, 150)
        reqid, cached = cache.admit(text(stream, 0, length), bytes([stream]))
        try:
            see(cache, reqid, text(stream, 0, cached), bytes([stream]), firsts(cached))
            cache.step({reqid: length})
            put(cache, reqid, text(stream, 0, length), bytes([stream]), {0: cached, 1: cached})
            cache.commit(reqid, text(stream, 0, length))
            see(cache, reqid, text(stream, 0, length), bytes([stream]), firsts(length))
            cache.available_pages()
            cache.stats()
        finally:
            cache.free_reqid(reqid)
        return 6

    def work(number: int) -> None:
        nonlocal calls
        drawn = random.Random(f"{seed}/{number}")
        try:
            for _ in range(25):
                try:
                    if number < 2:
                        calls += request(shared, drawn)
                    else:
                        with vattn.KVCache(config, pool=pool) as own:
                            calls += request(own, drawn) + 2
                except (vattn.OutOfPages, vattn.NoFreeSlot):
                    pass
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(15)
        assert not worker.is_alive(), "DEFECT: a thread hangs"
    sys.setswitchinterval(before)
    if failed:
        raise failed[0]
    shared.check()
    for cache in (shared, *others):
        cache.close()
    pool.close()
    return calls


def collections(seed: int) -> int:
    """Requests that free their slot when they are collected, which a call may set off."""
    import gc
    import random

    import vattn

    rng = random.Random(seed)
    config = vattn.KVConfig(
        num_layers=1, num_kv_heads=1, head_dim=32, dtype="float32", max_batch_size=16, max_context_len=200,
        page_size=4096, memory_budget=4096 * 200, overlap=rng.random() < 0.5,
    )  # fmt: skip
    cache = vattn.KVCache(config)

    class Request:
        def __init__(self, reqid: int) -> None:
            self.reqid = reqid
            self.me = self

        def __del__(self) -> None:
            cache.free_reqid(self.reqid)

    before = gc.get_threshold()
    gc.set_threshold(rng.choice((10, 30, 50)))
    calls = 0
    for i in range(400):
        try:
            made = Request(cache.alloc_reqid())
            cache.step({made.reqid: i % 199 + 1})
            cache.stats()
            calls += 3
        except vattn.NoFreeSlot:
            gc.collect()
    gc.set_threshold(*before)
    made = None  # type: ignore[assignment]
    gc.collect()
    cache.check()
    assert cache.stats().live_tokens == 0, "DEFECT: a slot was not freed"
    cache.close()
    return calls


def signals(seed: int) -> int:
    """A signal handler that makes calls of its own."""
    import random
    import signal

    import vattn

    rng = random.Random(seed)
    config = vattn.KVConfig(
        num_layers=1, num_kv_heads=1, head_dim=32, dtype="float32", max_batch_size=4, max_context_len=200,
        page_size=4096, memory_budget=4096 * 200, overlap=rng.random() < 0.5,
    )  # fmt: skip
    cache = vattn.KVCache(config)
    seen = 0
    over = False

    def handler(number: int, frame: object) -> None:
        nonlocal seen
        assert cache.stats().live_tokens >= 0
        cache.page_map()
        seen += 1
        if not over:
            signal.setitimer(signal.ITIMER_REAL, 0.0003)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0003)
    reqid = cache.alloc_reqid()
    calls = 0
    while seen < 100 and calls < 100_000:
        cache.step({reqid: calls % 199 + 1})
        calls += 1
    over = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    cache.check()
    cache.close()
    return calls


SCENARIOS: tuple[Callable[[int], int], ...] = (forks, threads, collections, signals)


def scenario(rng: random.Random) -> Played:
    """One of them, drawn."""
    function, seed = rng.choice(SCENARIOS), rng.randrange(1 << 30)
    played = Played(lines=[inspect.getsource(function), f"{function.__name__}({seed})"])
    played.counts[function.__name__] += 1

    def work(send: Send) -> None:
        try:
            send((function(seed), ""))
        except Exception as error:
            send((0, f"{type(error).__name__}: {error}"))

    try:
        for played.calls, played.detail in in_child(work, quiet_seconds=_QUIET):
            pass
    except Ended as ended:
        played.detail = str(ended)
    if played.detail:
        played.kind = f"{function.__name__}: {played.detail.split(':')[0]}"
        played.detail = f"{function.__name__}: {played.detail}"
    return played
