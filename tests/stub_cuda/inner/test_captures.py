"""Caches that are dropped or closed while a stream captures a graph: the context is not synchronised, which the stub
records as a violation, and everything is given back after the capture.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest

import vattn
from stub_cuda import Stub
from tests.support import one_layer, scripts
from tests.support.one_layer import PAGE, TOKENS
from vattn.engine.kv.virtual import VirtualKV

make = partial(one_layer.make, overlap=False)


def filled(stream: int, tokens: int, pool: vattn.PagePool | None = None) -> vattn.KVCache:
    cache = make(pool)
    cache.step({cache.alloc_reqid(): tokens}, stream=stream)
    return cache


def drop_in_a_cycle(caches: list[vattn.KVCache]) -> None:
    """Drops the only reference to a cache, which the garbage collector finds."""
    cycle: list[Any] = [caches.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()


@pytest.mark.parametrize("blocking", [False, True])
def test_a_cache_that_the_collector_finds_in_mid_capture(stub: Stub, blocking: bool) -> None:
    stream, captured = stub.stream(), stub.stream(blocking=blocking)
    with make() as other:
        empty = stub.usage().memory
        caches = [filled(stream, 2 * TOKENS)]
        before, waits = stub.usage().memory, stub.calls("cuCtxSynchronize")
        for tensor in caches[0].layer(0):
            stub.launch(stream, tensor.data_ptr(), TOKENS * 512)
        del tensor
        stub.capture(captured, True)
        drop_in_a_cycle(caches)
        assert stub.usage().memory == before
        reqid = other.alloc_reqid()  # calls go on, and leave the pages of the dropped cache alone
        other.step({reqid: TOKENS}, stream=stream)
        other.check()
        assert stub.usage().mappings == before[1] + 2
        assert stub.calls("cuCtxSynchronize") == waits
        assert stub.violations() == []
        assert stub.capture(captured, False) == 0
        stub.complete(stream)
        other.free_reqid(reqid, stream)
        assert stub.calls("cuCtxSynchronize") == waits + 1
        other.trim()
        other.check()
        assert stub.usage().memory == empty


def test_another_cache_on_the_pool_of_a_dropped_one(stub: Stub) -> None:
    stream, captured = stub.stream(), stub.stream()
    pool = vattn.PagePool(16 * PAGE, device="cuda")
    caches, other = [filled(stream, 6 * TOKENS, pool)], make(pool)
    stub.capture(captured, True)
    drop_in_a_cycle(caches)
    reqid = other.alloc_reqid()
    other.step({reqid: 2 * TOKENS}, stream=stream)
    assert (other.stats().free_pages, other.stats().other_pages) == (0, 12)
    with pytest.raises(vattn.OutOfPages):
        other.step({reqid: 3 * TOKENS}, stream=stream)
    stub.capture(captured, False)
    other.step({reqid: 8 * TOKENS}, stream=stream)
    assert other.stats().other_pages == 0
    other.check()
    other.close()
    pool.close()


def test_a_pool_is_not_closed_before_it_has_everything_back(stub: Stub) -> None:
    stream, captured = stub.stream(), stub.stream()
    pool = vattn.PagePool(16 * PAGE, device="cuda")
    caches = [filled(stream, TOKENS, pool)]
    stub.capture(captured, True)
    drop_in_a_cycle(caches)
    with pytest.raises(vattn.StreamCapturing, match="would invalidate the capture; close after the capture"):
        pool.close()
    stub.capture(captured, False)
    pool.close()


def test_closing_in_mid_capture_is_refused(stub: Stub) -> None:
    stream, captured = stub.stream(), stub.stream()
    cache = filled(stream, 2 * TOKENS)
    before, books = stub.usage(), cache.page_map()
    stub.capture(captured, True)
    for _ in range(2):
        with pytest.raises(vattn.StreamCapturing, match="would invalidate the capture; close after the capture"):
            cache.close()
    assert (stub.usage(), cache.page_map()) == (before, books)
    cache.check()
    stub.capture(captured, False)
    cache.step({0: 3 * TOKENS}, stream=stream)
    cache.close()
    with pytest.raises(vattn.CacheClosed):
        cache.step({})


def test_a_backend_that_closing_is_refused_to(stub: Stub) -> None:
    """It stays as it is, and gives everything back when it is closed after the capture."""
    stream, captured = stub.stream(), stub.stream()
    kv = VirtualKV(vattn.KVConfig(**one_layer.BASE, overlap=False))
    kv.cache.step({kv.allocate(10): 10}, stream=stream)
    before = stub.usage()
    stub.capture(captured, True)
    for _ in range(2):
        with pytest.raises(vattn.StreamCapturing):
            kv.close()
    assert stub.usage() == before
    assert kv.stored(0).key.shape[0] == 3
    kv.check()
    stub.capture(captured, False)
    kv.close()
    assert stub.usage().handles == 0


def test_a_cache_without_pages_is_closed_in_mid_capture(stub: Stub) -> None:
    captured, cache = stub.stream(), make()
    stub.capture(captured, True)
    cache.close()
    stub.capture(captured, False)


def test_a_capture_that_begins_before_the_worker_waits(stub: Stub) -> None:
    """The call has looked for captures when it planned; the worker looks again."""
    captured, pool = stub.stream(), vattn.PagePool(16 * PAGE, device="cuda")
    waits = stub.calls("cuCtxSynchronize")
    stub.capture(captured, True)
    with pytest.raises(vattn.StreamCapturing) as caught:
        pool._core.execute(lambda change: change.transaction.wait_for(None))
    assert isinstance(caught.value.__cause__, vattn.DriverError)
    assert caught.value.__cause__.name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert stub.calls("cuCtxSynchronize") == waits
    stub.capture(captured, False)
    pool._core.execute(lambda change: change.transaction.wait_for(None))
    pool.close()


EXIT = """
import atexit, stub_cuda
control = stub_cuda.Stub()
atexit.register(lambda: print(control.usage().memory, control.calls("cuCtxSynchronize"), control.violations()))
import vattn
stub_cuda.stand_in()
cache = vattn.KVCache(vattn.KVConfig(
    num_layers=1, num_kv_heads=1, head_dim=128, dtype="float32", max_batch_size=1, max_context_len=8192, device="cuda",
    memory_budget="16MiB", layout="layer", eager_pages=0, overlap=False))
stream = control.stream()
cache.step({cache.alloc_reqid(): 10}, stream=stream)
control.capture(stream, True)
del cache
"""


@pytest.mark.parametrize(
    ("script", "left"),
    [
        (EXIT + "control.capture(stream, False)", "(0, 0, 0, 0) 1 []"),
        (EXIT, "(2, 2, 2, 4194304) 0 []"),  # for the system
    ],
)
def test_the_end_of_the_process_gives_everything_back(stub: Stub, script: str, left: str) -> None:
    done = scripts.over_stub(script, to_the_end=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, left + "\n", "")


def test_look_ahead_in_mid_capture_waits_for_the_next_call(stub: Stub) -> None:
    stream = stub.stream()
    with one_layer.make(overlap=True) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 10}, {reqid: 3 * TOKENS}, stream=stream, look_ahead=False)
        cache.check()
        before = stub.usage().mappings
        stub.capture(stream, True)
        cache.look_ahead(stream=stream)
        assert stub.capture(stream, False) == 0
        cache.check()
        assert stub.usage().mappings == before
        cache.look_ahead(stream=stream)
        cache.check()
        assert stub.usage().mappings == before + 4
        assert stub.violations() == []
