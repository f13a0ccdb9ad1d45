"""The library relies on nothing that a friendlier driver would do: memory that is zero, errors that come at once,
streams that wait for each other, memory for every call, a driver that outlives every object.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vattn
from stub_cuda import Stub
from tests.support import scripts
from tests.support.effort import covering, effort
from tests.support.one_layer import PAGE, TOKENS, make
from tests.support.waiting import Background, wait_until

FRESH = torch.full((4,), 0xA5, dtype=torch.uint8).view(torch.float32).item()


# New memory


def rows(cache: vattn.KVCache, reqid: int, begin: int, end: int) -> set[float]:
    """The values in these rows of K and V."""
    return {value for tensor in cache.layer(0) for value in tensor[reqid, begin:end].unique().tolist()}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero_on_free", [False, True])
def test_guard_rows_are_zero_whatever_memory_they_are_in(stub: Stub, overlap: bool, zero_on_free: bool) -> None:
    pool = vattn.PagePool(16 * PAGE, device="cuda", zero_on_free=zero_on_free)
    options = {"pool": pool, "overlap": overlap, "zero_on_free": zero_on_free}
    with make(**options, guard_rows=100) as cache, make(**options, dtype="float64", head_dim=64) as other:
        for dirty in (False, True):
            if dirty:
                filler = other.alloc_reqid()
                other.step({filler: 8 * TOKENS})
                for tensor in other.layer(0):
                    tensor[filler] = torch.nan
                other.free_reqid(filler)
                other.step({})
                other.trim()
            reqid = cache.alloc_reqid()
            for length in (1, 10, TOKENS - 50, TOKENS, TOKENS + 1, 3 * TOKENS - 100, 3 * TOKENS - 99):
                cache.step({reqid: length})
                assert rows(cache, reqid, length, length + 100) == {0}
            cache.free_reqid(reqid)
            cache.step({})
            cache.trim()
    pool.close()


def test_rows_before_the_window_of_a_restored_request_are_zero(stub: Stub) -> None:
    """Kernels read whole tiles, so some of them; nobody copies them in."""
    window, start = 64, TOKENS + 20
    with make(sliding_window=window, memory_budget=8 * PAGE) as cache:
        reqid = cache.alloc_reqid(start=start)
        cache.step({reqid: start + 1})
        assert rows(cache, reqid, start - window - 256 + 1, start + 1) == {0}


def test_memory_is_not_zeroed_for_a_cache_without_guard_rows(stub: Stub) -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 10})
        assert rows(cache, reqid, 0, TOKENS) == {FRESH}
        assert cache.stats().calls["cuMemsetD8Async"].count == 0


def test_guard_rows_that_cannot_be_zeroed_fail_the_step(stub: Stub) -> None:
    with make(guard_rows=100, overlap=False) as cache:
        reqid = cache.alloc_reqid()
        before = cache.page_map()
        stub.fail("cuMemsetD8Async")
        with pytest.raises(vattn.DriverError, match="cuMemsetD8Async"):
            cache.step({reqid: 10})
        assert cache.page_map() == before
        cache.check()
        cache.step({reqid: 10})
        assert rows(cache, reqid, 10, 110) == {0}


# Kernels that fail

SCRIPT = """
import atexit, gc, os, stub_cuda
control = stub_cuda.Stub()
import vattn
stub_cuda.stand_in()
config = vattn.KVConfig(num_layers=1, num_kv_heads=1, head_dim=128, dtype="float32", max_batch_size=2,
                        max_context_len=32768, device="cuda", memory_budget=16 * 2**21, zero_on_free={zero_on_free})
cache = vattn.KVCache(config)
def attempt(call, *arguments):
    try:
        call(*arguments)
    except vattn.VattnError as error:
        print(type(error).__name__, getattr(error, "code", ""))
    else:
        print("fine")
"""


@pytest.mark.parametrize("zero_on_free", [False, True])
@pytest.mark.parametrize("ending", ["attempt(cache.close)", "pass"])
def test_a_kernel_that_writes_to_a_shared_block_fails_every_later_call(zero_on_free: bool, ending: str) -> None:
    """What needs the driver says what it reports, what does not goes on, and the process ends in silence."""
    done = scripts.over_stub(
        SCRIPT.replace("{zero_on_free}", str(zero_on_free))
        + """
prompt = list(range(4097))
first, _ = cache.admit(prompt)
cache.step({first: 4097}, stream=0)
cache.commit(first, prompt)
second, cached = cache.admit(prompt)
cache.step({second: 4097}, stream=0)
k, v = cache.layer(0)
control.launch(0, k[second].data_ptr(), 8, writes=True)
print(cached)
attempt(cache.step, {first: 4098, second: 4098})
control.complete(0)
attempt(cache.step, {first: 4099, second: 4099})
attempt(cache.step, {first: 16000, second: 4100})
attempt(cache.free_reqid, first)
attempt(cache.trim)
"""
        + ending
    )
    said = ["4096", "fine", "fine", *3 * ["DriverError 700"], *(["DriverError 700"] if ending != "pass" else [])]
    assert (done.returncode, done.stdout.split("\n"), done.stderr) == (0, [*said, ""], "")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drop", ["del cache", "cycle = [cache]; cycle.append(cycle); del cycle, cache; gc.collect()"])
def test_a_cache_that_is_dropped_after_a_kernel_failed_stays_behind_in_silence(drop: str, overlap: bool) -> None:
    done = scripts.over_stub(
        SCRIPT.replace("{zero_on_free}", f"False, overlap={overlap}")
        + f"""
pool = vattn.PagePool(16 * 2**21, device="cuda")
cache = vattn.KVCache(config, pool=pool)
cache.step({{cache.alloc_reqid(): 4097}}, stream=0)
before = control.usage().mappings
control.launch(0, 2**40, 8)
control.complete(0)
{drop}
print(control.usage().mappings == before)
attempt(vattn.KVCache, config)
attempt(pool.close)
"""
    )
    said = "True\nDriverError 700\nDriverError 700\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


# Streams


def test_zeroing_waits_for_kernels_on_a_stream_that_does_not_block(stub: Stub) -> None:
    """The memset's stream waits for the legacy default stream only; a fence has to stand for the other."""
    with make(zero_on_free=True) as cache:
        first, stream = cache.alloc_reqid(), stub.stream()
        cache.step({first: 8 * TOKENS}, stream=stream)
        for tensor in cache.layer(0):
            stub.launch(stream, tensor[first].data_ptr(), 8 * TOKENS * 512)
        cache.free_reqid(first, stream)
        second = cache.alloc_reqid()
        before = stub.calls("cuMemsetD8Async")
        step = Background(lambda: cache.step({second: TOKENS}, stream=stream))
        wait_until(stub.waiters)
        assert stub.calls("cuMemsetD8Async") == before
        stub.complete(stream)
        step.finish()
        assert stub.calls("cuMemsetD8Async") > before


@pytest.mark.parametrize("options", [{}, {"zero_on_free": True}, {"guard_rows": 8}, {"sliding_window": 64}])
def test_a_capture_elsewhere_stays_valid(stub: Stub, options: dict[str, Any]) -> None:
    """Whatever the library does meanwhile; torch's streams do not block, and it captures in global mode."""
    with make(**options) as cache:
        captured, stream = stub.stream(), stub.stream()
        stub.capture(captured, True, mode=0)
        for _ in range(2):
            pair = cache.alloc_reqid(), cache.alloc_reqid()
            for length in (10, TOKENS, TOKENS + 1, 2 * TOKENS + 1, TOKENS):
                cache.step(dict.fromkeys(pair, length), stream=stream)
            for reqid in pair:
                cache.free_reqid(reqid, stream)
            cache.step({}, stream=stream)
            cache.trim()
            cache.check()
        assert stub.capture(captured, False) == 0


# A lock in the driver


def test_mapping_ahead_may_stall_launches_and_nothing_else(stub: Stub) -> None:
    """A launch waits while the worker's call has the driver's lock; the step that queued the call does not."""
    with make() as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: TOKENS - 1})
        cache.check()
        stub.locking(True)
        k, _ = cache.layer(0)
        stub.hold("cuMemSetAccess")
        cache.step({reqid: TOKENS})  # returns while the call is held
        wait_until(stub.held)
        launch = Background(lambda: stub.launch(0, k[reqid].data_ptr(), 8))
        wait_until(stub.stalls)
        assert launch.runs()
        stub.hold(None)
        launch.finish()
        stub.complete(0)
        cache.step({reqid: TOKENS + 1})
        cache.check()


# Memory that runs out

# As CUDA's headers list them, and cuMemSetAccess, which needs memory for its tables.
MAY_RUN_OUT = ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuEventCreate"]


def use(attempt: Callable[[Callable[[], Any]], Any], options: dict[str, Any]) -> None:
    """A cache's life, every call of which goes through `attempt`."""
    cache = attempt(lambda: make(**options))
    with cache:
        for round_ in range(2):
            pair = attempt(cache.alloc_reqid), attempt(cache.alloc_reqid)
            for length in (10, TOKENS, TOKENS + 1, 3 * TOKENS):
                attempt(lambda pair=pair, length=length: cache.step(dict.fromkeys(pair, length)))
                cache.check()
            for reqid in pair:
                attempt(lambda reqid=reqid: cache.free_reqid(reqid))
            if round_:
                attempt(lambda: cache.step({}))
                attempt(cache.trim)
        cache.check()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("call", MAY_RUN_OUT)
def test_memory_runs_out_in_every_call_that_may_report_it(stub: Stub, call: str, overlap: bool) -> None:
    """Once in each (a short run: in half a dozen): the library says so, or does without, and succeeds the next time."""
    options = {"overlap": overlap, "guard_rows": 8, "zero_on_free": True}

    def attempt(body: Callable[[], Any]) -> Any:
        try:
            return body()
        except vattn.OutOfPages as error:
            cause = error.__cause__
            assert isinstance(cause, vattn.DriverError)
            assert (cause.call, cause.code) == (call, 2)
        except vattn.DriverError as error:
            assert (error.call, error.code) == (call, 2)
        said.append(call)
        return body()

    said: list[str] = []
    before = stub.calls(call)
    use(attempt, options)
    calls = stub.calls(call) - before
    assert not said
    assert calls
    for nth in range(1, calls + 1, effort(max(1, calls // 3), 1)):
        before = stub.calls(call)
        stub.fail(call, nth, 2)
        use(attempt, options)
        stub.heal()
        assert stub.calls(call) - before >= nth
    assert said  # not for every one: background work that fails is done again when it is needed


# The end of the driver


@pytest.mark.parametrize(
    ("body", "first", "zero_on_free"),
    covering(
        [
            "pass",
            "tensors = cache.layer(0)",
            "cache.free_reqid(reqid)",
            "other = vattn.KVCache(config); other.close(); tensors = cache.layer(0); cache.close()",
            "tensors = cache.layer(0); del cache",
            "cycle = [cache]; cycle.append(cycle); del cycle, cache",
        ],
        [False, True],
        [False, True],
    ),
)
def test_the_driver_ends_before_the_objects(body: str, first: bool, zero_on_free: bool) -> None:
    """At the exit of a process: before Python's own end, or with the libraries. Nothing crashes, hangs or prints."""
    end = "atexit.register(control.end)\n"
    script = SCRIPT.replace("{zero_on_free}", str(zero_on_free)) + (end if first else "")
    script += f"reqid = cache.alloc_reqid(); cache.step({{reqid: 9000}})\n{body}"
    done = scripts.over_stub(script, to_the_end=True)
    assert (done.returncode, done.stdout, without_leaks_of_triton(done.stderr)) == (0, "", "")


def without_leaks_of_triton(said: str) -> str:
    """Without nanobind's reports of leaks in which all types are triton's; some CUDA builds of torch print one at exit.

    A report's functions have no module in their names, so they are taken to be of the same.
    """

    def kept(report: re.Match[str]) -> str:
        types = re.findall(r'leaked (?:type|instance \S+ of type) "(.*)"', report[0])
        return "" if types and all("triton" in name for name in types) else report[0]

    return re.sub(r"nanobind: leaked .*?/refleaks\.html\n?", kept, said, flags=re.DOTALL)


def test_leaks_of_others_than_triton_are_seen() -> None:
    report = (
        "nanobind: leaked 1 instances!\n"
        ' - leaked instance 0x7f of type "{0}.context"\n'
        'nanobind: leaked 2 types!\n - leaked type "{0}.context"\n - leaked type "{1}.module"\n'
        'nanobind: leaked 1 functions!\n - leaked function "__init__"\n'
        "nanobind: this is likely caused by a reference counting issue in the binding code.\n"
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html"
    )
    functions = "nanobind: leaked 1 functions!\n" + report.partition("functions!\n")[2]
    triton = report.format("triton._C.libtriton.ir", "triton._C.libtriton")
    assert without_leaks_of_triton(triton) == ""
    for other in (report.format("vattn._native", "triton._C"), report.format("triton._C", "vattn._native"), functions):
        assert without_leaks_of_triton(other) == other
        assert without_leaks_of_triton(f"before\n{triton}{other}\nafter") == f"before\n{other}\nafter"
        assert without_leaks_of_triton(f"before\n{other}{triton}\nafter") == f"before\n{other}after"


@pytest.mark.parametrize("zero_on_free", [False, True])
def test_calls_after_the_end_of_the_driver_say_so(zero_on_free: bool) -> None:
    done = scripts.over_stub(
        SCRIPT.replace("{zero_on_free}", str(zero_on_free))
        + """
reqid = cache.alloc_reqid()
cache.step({reqid: 4096})
cache.check()
control.end()
attempt(cache.step, {reqid: 16000})
attempt(cache.free_reqid, reqid)
attempt(cache.trim)
attempt(vattn.KVCache, config)
attempt(cache.close)
"""
    )
    said = "DriverError 4\nDriverError 4\nDriverError 4\nConfigError \nDriverError 4\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
