"""No page leaves a slot while a kernel may still read it, and nobody but the worker waits for kernels.

Kernels are launched and completed by the test; to unmap what a running one reads is a violation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import vattn
from stub_cuda import Stub
from tests.support.one_layer import BASE, PAGE, TOKENS, make
from tests.support.waiting import Background, wait_until
from vattn.drivers import cuda
from vattn.slots.bands import Bands


@pytest.fixture
def cache(stub: Stub) -> Iterator[vattn.KVCache]:
    with make() as made:
        yield made
        made.check()


def launch(stub: Stub, stream: int, cache: vattn.KVCache, reqid: int, tokens: int) -> None:
    """A kernel that reads a slot's first tokens, in K and V."""
    for tensor in cache.layer(0):
        stub.launch(stream, tensor[reqid].data_ptr(), tokens * 512)


def wait_for_a_waiter(stub: Stub, call: Background) -> None:
    """Until the call waits for an event."""

    def waits() -> bool:
        if not call.runs():
            call.finish()
            pytest.fail("it does not wait")
        return stub.waiters() > 0

    wait_until(waits)


def test_pages_of_a_finished_request_wait_for_its_kernels(stub: Stub, cache: vattn.KVCache) -> None:
    first, stream = cache.alloc_reqid(), stub.stream()
    cache.step({first: 8 * TOKENS}, stream=stream)
    launch(stub, stream, cache, first, 8 * TOKENS)
    cache.free_reqid(first, stream)
    second = cache.alloc_reqid(1)
    assert second == first  # the parked pages fit; the next is the one that needs them
    third = cache.alloc_reqid(1)
    cache.free_reqid(second, stream)
    before = stub.calls("cuMemUnmap")
    step = Background(lambda: cache.step({third: TOKENS}, stream=stream))
    wait_for_a_waiter(stub, step)
    assert stub.calls("cuMemUnmap") == before
    stub.complete(stream)
    step.finish()
    assert stub.calls("cuMemUnmap") > before


def test_a_step_that_is_prepared_but_not_launched_counts(stub: Stub, cache: vattn.KVCache) -> None:
    """The request ends between the step and the launch of its kernels: an event recorded then does not cover them."""
    first, stream = cache.alloc_reqid(), stub.stream()
    cache.step({first: 8 * TOKENS}, stream=stream)
    cache.free_reqid(first, stream)
    launch(stub, stream, cache, first, 8 * TOKENS)
    cache.alloc_reqid()
    second = cache.alloc_reqid()
    step = Background(lambda: cache.step({second: TOKENS}, stream=stream))
    wait_for_a_waiter(stub, step)
    stub.complete(stream)
    step.finish()


def test_until_the_next_step_the_pages_stay(stub: Stub) -> None:
    """Without deferred reclamation too: they leave when the next step begins and the kernels have ended."""
    with make(deferred_reclamation=False, overlap=False) as cache:
        reqid, stream = cache.alloc_reqid(), stub.stream()
        cache.step({reqid: TOKENS})
        launch(stub, stream, cache, reqid, TOKENS)
        cache.free_reqid(reqid, stream)
        cache.check()
        assert cache.stats().parked_pages == 2
        cache.step({})
        cache.check()
        assert cache.stats().parked_pages == 2
        stub.complete(stream)
        cache.step({})
        cache.check()
        assert cache.stats().parked_pages == 0


def test_other_caches_get_the_pages_once_everything_is_launched(stub: Stub) -> None:
    pool = vattn.PagePool(16 * PAGE, device="cuda")
    options = BASE | {"max_batch_size": 1}
    with (
        vattn.KVCache(vattn.KVConfig(**options), pool=pool) as one,
        vattn.KVCache(vattn.KVConfig(**options), pool=pool) as two,
    ):
        first, second = one.alloc_reqid(), two.alloc_reqid()
        one.step({first: 8 * TOKENS})
        one.free_reqid(first)
        assert one.available_pages() == 16
        assert two.available_pages() == 0
        with pytest.raises(vattn.OutOfPages):
            two.step({second: TOKENS})
        one.step({})
        assert two.available_pages() == 16
        two.step({second: TOKENS})
    pool.close()


def test_available_pages_are_what_a_step_can_take(stub: Stub, cache: vattn.KVCache) -> None:
    reqid, stream = cache.alloc_reqid(), stub.stream()
    cache.step({reqid: 8 * TOKENS})
    cache.free_reqid(reqid, stream)
    assert cache.available_pages() == 16
    cache.alloc_reqid()
    other = cache.alloc_reqid()
    assert cache.available_pages() == 16
    cache.step({other: 8 * TOKENS})


def test_reusing_parked_pages_waits_for_nothing(stub: Stub, cache: vattn.KVCache) -> None:
    stream = stub.stream()
    for _ in range(5):
        reqid = cache.alloc_reqid()
        cache.step({reqid: 8 * TOKENS}, stream=stream)
        launch(stub, stream, cache, reqid, 8 * TOKENS)
        cache.free_reqid(reqid, stream)
    assert stub.waiters() == 0
    assert cache.stats().calls["cuEventSynchronize"].count == 0
    assert cache.stats().calls["cuMemMap"].count == 16
    stub.complete(stream)


def test_what_a_running_request_has_beyond_its_length_waits_for_launched_kernels(
    stub: Stub, cache: vattn.KVCache
) -> None:
    first, stream = cache.alloc_reqid(), stub.stream()
    cache.step({first: 8 * TOKENS}, stream=stream)
    launch(stub, stream, cache, first, 8 * TOKENS)
    second = cache.alloc_reqid()
    step = Background(lambda: cache.step({first: TOKENS, second: TOKENS}, stream=stream))
    wait_for_a_waiter(stub, step)
    stub.complete(stream)
    step.finish()
    assert cache.page_map()[first].pages >= 2


def test_a_request_that_begins_anew_waits_for_the_kernels_that_read_its_window(stub: Stub) -> None:
    with make(sliding_window=64, overlap=False, memory_budget=32 * PAGE) as cache:
        reqid, stream = cache.alloc_reqid(), stub.stream()
        end = 3 * TOKENS + 500
        for length in (end, end + 1, 4 * TOKENS + 1):
            cache.step({reqid: length}, stream=stream)
        assert cache.stats().calls["cuMemUnmap"].count > 0, "the first blocks have left the window"
        stub.launch(stream, cache.layer(0)[0][reqid, end].data_ptr(), 512)
        cache.step({reqid: 0}, stream=stream)
        before = stub.calls("cuMemUnmap")
        step = Background(lambda: cache.step({reqid: 10}, stream=stream))
        wait_for_a_waiter(stub, step)
        assert stub.calls("cuMemUnmap") == before
        stub.complete(stream)
        step.finish()
        assert stub.calls("cuMemUnmap") > before
        cache.check()


def test_what_a_request_behind_a_window_finds_in_its_slot_waits_for_the_kernels_of_the_one_before(stub: Stub) -> None:
    """On another stream, too, and as long as a capture keeps the event from being recorded, it stays."""
    with make(sliding_window=64, overlap=False, memory_budget=32 * PAGE, max_batch_size=1) as cache:
        first, streams = cache.alloc_reqid(), [stub.stream(), stub.stream()]
        cache.step({first: 2 * TOKENS}, stream=streams[0])
        launch(stub, streams[0], cache, first, 2 * TOKENS)
        cache.free_reqid(first, streams[0])
        second, end = cache.alloc_reqid(start=2 * TOKENS), 3 * TOKENS - 10
        assert second == first
        stub.capture(streams[0], True)
        cache.step({second: end}, stream=streams[1])
        stub.capture(streams[0], False)
        before = stub.calls("cuMemUnmap")
        step = Background(lambda: cache.step({second: end + 1}, stream=streams[1]))
        wait_for_a_waiter(stub, step)
        assert stub.calls("cuMemUnmap") == before
        stub.complete(streams[0])
        step.finish()
        assert cache.stats().mapped_pages == 2
        cache.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_succeeds_where_what_left_a_window_cannot_be_fenced(stub: Stub, overlap: bool) -> None:
    with make(sliding_window=64, overlap=overlap, memory_budget=32 * PAGE) as cache:
        reqid, end = cache.alloc_reqid(), 3 * TOKENS + 500
        cache.step({reqid: end})
        stub.fail("cuEventRecord", 1, 999)
        cache.step({reqid: end + 1})
        cache.check()
        assert (cache.length(reqid), cache.stats().mapped_pages) == (end + 1, 8)
        cache.step({reqid: end + 2})
        cache.check()
        assert cache.stats().mapped_pages == 2


def test_a_slot_waits_for_every_stream_that_used_it(stub: Stub, cache: vattn.KVCache) -> None:
    streams = [stub.stream(), stub.stream()]
    for stream in streams:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 8 * TOKENS}, stream=stream)
        launch(stub, stream, cache, reqid, 8 * TOKENS)
        cache.free_reqid(reqid, stream)
    cache.alloc_reqid()
    other = cache.alloc_reqid()
    step = Background(lambda: cache.step({other: TOKENS}))
    for stream in reversed(streams):
        wait_for_a_waiter(stub, step)
        stub.complete(stream)
    step.finish()


def test_the_background_takes_only_what_no_kernel_reads(stub: Stub) -> None:
    """A high watermark, and kernels that run: the step does not wait, nor does the worker, for whom others wait."""
    with make(watermark=0.9, memory_budget=32 * PAGE, overlap=False) as cache:
        first, second, stream = cache.alloc_reqid(), cache.alloc_reqid(), stub.stream()
        cache.step({first: 4 * TOKENS, second: TOKENS})
        launch(stub, stream, cache, first, 4 * TOKENS)
        cache.free_reqid(first, stream)
        cache.step({second: TOKENS + 1})
        cache.check()
        assert cache.stats().calls["cuMemUnmap"].count == 0
        stub.complete(stream)
        cache.step({second: 2 * TOKENS + 1})
        cache.check()
        assert cache.stats().calls["cuMemUnmap"].count == 8
        assert cache.stats().calls["cuEventSynchronize"].count == 0


def test_trim_waits_for_the_kernels(stub: Stub, cache: vattn.KVCache) -> None:
    reqid, stream = cache.alloc_reqid(), stub.stream()
    cache.step({reqid: TOKENS})
    launch(stub, stream, cache, reqid, TOKENS)
    cache.free_reqid(reqid, stream)
    trim = Background(cache.trim)
    wait_for_a_waiter(stub, trim)
    stub.complete(stream)
    trim.finish()
    assert cache.stats().mapped_pages == 0


@pytest.mark.parametrize("dropped", [False, True])
def test_a_cache_that_goes_waits_for_every_kernel(stub: Stub, dropped: bool) -> None:
    """Also those of running requests, on streams that it never heard of."""
    caches = [make(overlap=False)]
    reqid, stream = caches[0].alloc_reqid(), stub.stream()
    caches[0].step({reqid: TOKENS})
    launch(stub, stream, caches[0], reqid, TOKENS)
    mapped = stub.usage().mappings
    close = Background(caches.pop if dropped else caches[0].close)
    time.sleep(0.05)
    assert close.runs()
    assert stub.usage().mappings == mapped
    stub.complete(stream)
    close.finish()
    caches.clear()


def test_a_kernel_that_fails_fails_the_step_that_waits_for_it(stub: Stub, cache: vattn.KVCache) -> None:
    reqid = cache.alloc_reqid()
    cache.step({reqid: 8 * TOKENS})
    cache.free_reqid(reqid)
    cache.alloc_reqid()
    other = cache.alloc_reqid()
    before = cache.page_map()
    stub.fail("cuEventSynchronize", 1, 700)
    with pytest.raises(vattn.DriverError, match=r"cuEventSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        cache.step({other: TOKENS})
    assert cache.page_map() == before
    cache.check()
    cache.step({other: TOKENS})


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuStreamIsCapturing"])
def test_a_fence_that_cannot_be_set_leaves_the_request_running(stub: Stub, cache: vattn.KVCache, call: str) -> None:
    reqid = cache.alloc_reqid()
    cache.step({reqid: TOKENS})
    stub.fail(call, 1, 999)
    with pytest.raises(vattn.DriverError, match=call):
        cache.free_reqid(reqid)
    assert cache.page_map()[reqid].active
    cache.check()
    cache.free_reqid(reqid)


def test_events_are_used_again_and_none_is_lost(stub: Stub) -> None:
    before = stub.usage().events
    with make() as cache:
        for round_ in range(50):
            first = cache.alloc_reqid()
            cache.step({first: 8 * TOKENS})
            cache.free_reqid(first)
            if round_ % 5 == 0:  # a step fails half way through, with the fence already waited for
                pair = cache.alloc_reqid(), cache.alloc_reqid()
                stub.fail("cuMemMap", 1)
                with pytest.raises(vattn.DriverError):
                    cache.step({pair[1]: TOKENS})
                for slot in pair:
                    cache.free_reqid(slot)
        assert stub.usage().events - before <= 8
    del cache
    gc.collect()
    assert stub.usage().events == before


# Graphs


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_step_that_would_map_inside_a_capture_is_refused(stub: Stub, cache: vattn.KVCache, mode: int) -> None:
    reqid, stream = cache.alloc_reqid(), stub.stream()
    cache.step({reqid: 2 * TOKENS - 10}, stream=stream)
    cache.check()
    before, books, calls = stub.usage(), cache.page_map(), stub.calls("cuMemMap")
    stub.capture(stream, True, mode)
    with pytest.raises(vattn.StreamCapturing, match=r"step has to map memory for 1 slots .*before the capture"):
        cache.step({reqid: 2 * TOKENS + 1}, stream=stream)
    assert (stub.usage(), cache.page_map()) == (before, books)
    for tokens in range(2 * TOKENS - 9, 2 * TOKENS + 1):  # mapped already; the last would queue the next block
        cache.step({reqid: tokens}, stream=stream)
    cache.check()
    assert stub.calls("cuMemMap") == calls
    with pytest.raises(vattn.StreamCapturing, match="free_reqid"):
        cache.free_reqid(reqid, stream)
    assert cache.page_map()[reqid].active
    stub.capture(stream, False)
    cache.step({reqid: 2 * TOKENS + 1}, stream=stream)
    cache.free_reqid(reqid, stream)


def test_a_slot_freed_before_a_capture_gets_its_fence_after_it(stub: Stub, cache: vattn.KVCache) -> None:
    """An event recorded on the capturing stream would become part of the graph, and could never be waited for."""
    first, second, stream = cache.alloc_reqid(), cache.alloc_reqid(), stub.stream()
    cache.step({first: 4 * TOKENS, second: TOKENS}, stream=stream)
    cache.free_reqid(first, stream)
    stub.capture(stream, True)
    cache.step({second: TOKENS}, stream=stream)
    stub.capture(stream, False)
    parked = cache.stats().parked_pages
    assert parked
    assert cache.trim() >= parked * PAGE  # the worker waits for a fence that is no part of the graph
    assert cache.stats().parked_pages == 0


def test_others_may_capture_while_the_worker_maps(stub: Stub, cache: vattn.KVCache) -> None:
    """torch captures in global mode, which forbids every thread what the capture might miss, unless it opts out."""
    captured, stream = stub.stream(), stub.stream()
    reqid = cache.alloc_reqid()
    stub.capture(captured, True, mode=0)
    cache.step({reqid: 3 * TOKENS}, stream=stream)
    cache.free_reqid(reqid, stream)
    cache.step({}, stream=stream)
    cache.check()
    assert stub.capture(captured, False) == 0
    cache.trim()


def test_the_legacy_stream_cannot_be_used_while_another_captures(stub: Stub, cache: vattn.KVCache) -> None:
    captured, reqid = stub.stream(blocking=True), cache.alloc_reqid()
    cache.step({reqid: 10})
    stub.capture(captured, True)
    with pytest.raises(vattn.StreamCapturing):
        cache.free_reqid(reqid, 0)
    with pytest.raises(vattn.StreamCapturing):
        cache.trim()
    assert stub.capture(captured, False) == 0
    cache.free_reqid(reqid, 0)


PROMPT = list(range(2 * TOKENS + 1))  # two blocks and a token


def admit(stub: Stub, cache: vattn.KVCache, stream: int) -> int:
    """A request whose kernels run."""
    reqid, _ = cache.admit(PROMPT)
    cache.step({reqid: len(PROMPT)}, stream=stream)
    launch(stub, stream, cache, reqid, len(PROMPT))
    cache.commit(reqid, PROMPT)
    return reqid


def test_pages_that_kernels_use_are_shared_without_waiting(stub: Stub, cache: vattn.KVCache) -> None:
    stream = stub.stream()
    admit(stub, cache, stream)
    reqid, cached = cache.admit(PROMPT)
    assert cached == 2 * TOKENS
    cache.step({reqid: len(PROMPT)}, stream=stream)
    assert not stub.waiters()
    stub.complete(stream)


def test_copy_on_write_waits_for_the_kernels_that_read_the_shared_pages(stub: Stub, cache: vattn.KVCache) -> None:
    stream = stub.stream()
    admit(stub, cache, stream)
    reqid = admit(stub, cache, stream)
    cache.step({reqid: TOKENS}, stream=stream)
    before = stub.calls("cuMemUnmap")
    step = Background(lambda: cache.step({reqid: TOKENS + 1}, stream=stream))
    wait_for_a_waiter(stub, step)
    assert stub.calls("cuMemUnmap") == before
    stub.complete(stream)
    step.finish()
    assert stub.calls("cuMemUnmap") > before


def test_copy_on_write_waits_where_the_step_that_went_back_mapped_guard_rows(stub: Stub) -> None:
    with make(guard_rows=2) as cache:
        stream = stub.stream()
        admit(stub, cache, stream)
        stub.complete(stream)
        reqid, cached = cache.admit(PROMPT)
        assert cached == cache.page_map()[reqid].mapped == 2 * TOKENS
        cache.step({reqid: 2 * TOKENS - 1}, stream=stream)  # its guard rows are the first tokens of another page
        launch(stub, stream, cache, reqid, 2 * TOKENS - 1)
        before = stub.calls("cuMemUnmap")
        step = Background(lambda: cache.step({reqid: 2 * TOKENS}, stream=stream))
        wait_for_a_waiter(stub, step)
        assert stub.calls("cuMemUnmap") == before
        stub.complete(stream)
        step.finish()
        assert stub.calls("cuMemUnmap") > before
        cache.check()


def test_copy_on_write_copies_on_the_stream_of_the_step(
    stub: Stub, cache: vattn.KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that the copy reads leave only after it: its kernel, launched here where torch would, holds them."""
    stream = stub.stream()
    admit(stub, cache, stream)
    reqid = admit(stub, cache, stream)
    cache.step({reqid: TOKENS + 10}, stream=stream)
    stub.complete(stream)
    copies: list[int] = []

    def copied(method: Callable[..., Any]) -> Callable[..., Any]:
        def copy(*arguments: Any) -> Any:
            copies.append(cuda.current_stream(torch.device("cuda", 0)))
            launch(stub, copies[-1], cache, reqid, TOKENS + 10)
            return method(*arguments)

        return copy

    monkeypatch.setattr(Bands, "save", copied(Bands.save))
    monkeypatch.setattr(Bands, "write", copied(Bands.write))
    step = Background(lambda: cache.step({reqid: TOKENS + 11}, stream=stream))
    wait_for_a_waiter(stub, step)
    stub.complete(stream)
    step.finish()
    assert copies == [stream, stream]
    assert cuda.current_stream(torch.device("cuda", 0)) == 0
    stub.complete(stream)


def test_eviction_waits_for_the_kernels_that_read_the_blocks(stub: Stub, cache: vattn.KVCache) -> None:
    stream = stub.stream()
    first = admit(stub, cache, stream)
    cache.free_reqid(first, stream)
    other = cache.alloc_reqid()
    assert other != first
    step = Background(lambda: cache.step({other: 8 * TOKENS}, stream=stream))
    wait_for_a_waiter(stub, step)
    stub.complete(stream)
    step.finish()
    assert cache.stats().cached_pages == 0


def test_a_slot_whose_kernels_may_not_be_launched_yet_takes_no_pages(stub: Stub) -> None:
    with make(max_batch_size=2) as cache:
        stream = stub.stream()
        admit(stub, cache, stream)
        second = cache.alloc_reqid()
        cache.step({second: 1}, stream=stream)
        cache.free_reqid(second, stream)
        launch(stub, stream, cache, second, 1)
        reqid, cached = cache.admit(PROMPT)
        assert (reqid, cached) == (second, 0)
        stub.complete(stream)
        cache.free_reqid(reqid, stream)
        cache.step({}, stream=stream)
        assert cache.admit(PROMPT).cached_tokens == 2 * TOKENS
        cache.check()


# Windows over blocks: two megabytes are 4096 tokens of 512 bytes.


@pytest.fixture
def windows(stub: Stub) -> Iterator[vattn.BlockWindows]:
    with vattn.BlockWindows(
        num_layers=1,
        num_blocks=8,
        block_size=TOKENS,
        row=(128,),
        dtype=torch.float32,
        num_windows=2,
        max_context_len=2 * TOKENS,
        device="cuda",
    ) as made:
        made.back(range(6))
        yield made
        made.check()


def read(stub: Stub, stream: int, windows: vattn.BlockWindows, window: int) -> None:
    """A kernel that reads two blocks in a window."""
    stub.launch(stream, windows.window(0)[window].data_ptr(), 2 * TOKENS * 512)


def test_a_window_waits_for_the_kernels_that_read_it(stub: Stub, windows: vattn.BlockWindows) -> None:
    stream = stub.stream()
    first, second = windows.show([[0, 1], [2, 3]], stream=stream)
    read(stub, stream, windows, first)
    read(stub, stream, windows, second)
    assert windows.show([[0, 1]], stream=stream) == [first]
    change = Background(lambda: windows.show([[0, 1], [4, 5]], stream=stream))
    wait_for_a_waiter(stub, change)
    stub.complete(stream)
    change.finish()
    assert windows.show([[0, 1], [4, 5]], stream=stream) == [first, second]


def test_a_window_in_use_that_changes_waits_too(stub: Stub, windows: vattn.BlockWindows) -> None:
    stream = stub.stream()
    (window,) = windows.show([[0, 1]], stream=stream)
    read(stub, stream, windows, window)
    change = Background(lambda: windows.show([[0, 2]], windows=[window], stream=stream))
    wait_for_a_waiter(stub, change)
    stub.complete(stream)
    change.finish()


@pytest.mark.parametrize("change", ["show", "trim"])
def test_a_window_waits_for_each_stream_on_which_its_row_was_read(
    stub: Stub, windows: vattn.BlockWindows, change: str
) -> None:
    first, second = stub.stream(), stub.stream()
    (window,) = windows.show([[0, 1]], stream=first)
    read(stub, first, windows, window)
    assert windows.show([[0, 1]], stream=second) == [window]
    changing = Background(
        (lambda: windows.show([[0, 2]], windows=[window], stream=second))
        if change == "show"
        else (lambda: windows.trim([0]))
    )
    wait_for_a_waiter(stub, changing)
    stub.complete(first)
    changing.finish()


def test_a_row_that_grows_waits_for_nothing(stub: Stub, windows: vattn.BlockWindows) -> None:
    stream = stub.stream()
    (window,) = windows.show([[0]], stream=stream)
    stub.launch(stream, windows.window(0)[window].data_ptr(), TOKENS * 512)
    assert windows.show([[0, 1], [2]], stream=stream)[0] == window
    stub.complete(stream)


def test_blocks_that_are_given_back_wait_for_their_kernels(stub: Stub, windows: vattn.BlockWindows) -> None:
    stream = stub.stream()
    (window,) = windows.show([[0, 1]], stream=stream)
    read(stub, stream, windows, window)
    trim = Background(lambda: windows.trim([0]))
    wait_for_a_waiter(stub, trim)
    stub.complete(stream)
    trim.finish()
    assert windows.stats().backed_blocks == 1


def test_a_window_does_not_change_while_its_stream_captures(stub: Stub, windows: vattn.BlockWindows) -> None:
    stream = stub.stream()
    (window,) = windows.show([[0, 1]], stream=stream)
    stub.capture(stream, on=True)
    assert windows.show([[0, 1]], stream=stream) == [window]
    for call in (lambda: windows.show([[0, 2]], stream=stream), lambda: windows.show([], stream=stream)):
        with pytest.raises(vattn.StreamCapturing):
            call()
    assert stub.capture(stream, on=False) == 0
    assert windows.show([[0, 1]], stream=stream) == [window]


def test_a_batch_moves_into_a_capture_but_not_out_of_it(stub: Stub, windows: vattn.BlockWindows) -> None:
    """Its windows are fenced on the stream that it leaves, and an event recorded in a capture is part of the graph."""
    stream, captured = stub.stream(), stub.stream()
    (window,) = windows.show([[0, 1]], stream=stream)
    stub.capture(captured, on=True)
    assert windows.show([[0, 1]], stream=captured) == [window]
    with pytest.raises(vattn.StreamCapturing, match="another stream"):
        windows.show([[0, 1]], stream=stream)
    assert stub.capture(captured, on=False) == 0
    assert windows.show([[0, 1]], stream=stream) == [window]
