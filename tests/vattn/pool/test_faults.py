"""A driver call fails: the cache is as it was, and works on."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

import vattn
from tests.support import scripts
from tests.support.effort import effort
from tests.support.faults import FaultyTable
from tests.support.paths import ROOT
from tests.support.target import DEVICE, host_only
from vattn import _native, drivers

PAGE = 4096


class Setup:
    def __init__(self, **changes: Any) -> None:
        self.table = FaultyTable()
        self.pool = vattn.PagePool(64 * PAGE, device=DEVICE, page_size=PAGE, table=self.table.addresses)
        options: dict[str, Any] = {
            "num_layers": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "dtype": "float32",
            "max_batch_size": 3,
            "max_context_len": 640,
            "device": DEVICE,
            "memory_budget": 64 * PAGE,
            "layout": "layer",
            "eager_pages": 0,
            "watermark": 0,
        }
        self.config = vattn.KVConfig(**options | changes)
        self.cache = vattn.KVCache(self.config, pool=self.pool)

    def check(self) -> None:
        with self.table.transparent():
            self.cache.check()

    def close(self) -> None:
        self.cache.close()
        self.pool.close()


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup(overlap=False)
    yield made
    made.table.heal()
    made.close()


Operation = tuple[str, dict[int, int]]

# Slot 0 is the first allocated, slot 1 the second. 4 pages to a column of 64 tokens, 64 pages in all.
SCENARIO: list[Operation] = [
    ("step", {0: 640, 1: 100}),
    ("free", {0: 0}),
    ("step", {1: 400}),  # takes parked pages of slot 0
    ("alloc", {0: 0}),
    ("step", {1: 640}),  # takes what slot 0 has beyond its length
    ("step", {0: 300}),
    ("free", {1: 0}),
    ("trim", {}),
    ("step", {0: 600}),
]


def play(setup: Setup) -> int:
    """Plays the scenario, every operation that fails once more; returns how many failed."""
    cache = setup.cache
    assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
    failures = 0
    for operation, lengths in SCENARIO:
        call = {
            "step": lambda lengths=lengths: cache.step(lengths),
            "free": lambda lengths=lengths: cache.free_reqid(*lengths),
            "alloc": lambda: cache.alloc_reqid(1),
            "trim": cache.trim,
        }[operation]
        before = cache.page_map()
        try:
            call()
        except vattn.DriverError as error:
            failures += 1
            assert error.call == setup.table.failed
            assert (error.code, error.name) == (999, "CUDA_ERROR_UNKNOWN")
            setup.check()
            if operation != "trim":
                assert cache.page_map() == before
            call()
        setup.check()
    return failures


def test_every_single_failure_is_taken_back_and_can_be_retried() -> None:
    setup = Setup(overlap=False)
    before = sum(setup.table.calls.values())
    assert play(setup) == 0
    calls = sum(setup.table.calls.values()) - before
    setup.close()
    assert calls > 100
    failed = set()
    # Above the table of addresses nothing depends on the device: a short run over the stub tries one call in three.
    for nth in range(1, calls + 1, 1 if DEVICE == "cpu" else effort(3, 1)):
        setup = Setup(overlap=False)
        setup.table.fail(nth)
        # Memory that is not released is no reason to take anything back: the worker tries again.
        assert play(setup) == (setup.table.failed != "cuMemRelease")
        failed.add(setup.table.failed)
        setup.close()
    memory = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"}
    fences = {"cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuStreamIsCapturing"}
    assert failed == (memory if DEVICE == "cpu" else memory | fences)


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventSynchronize"])
def test_pages_of_which_nobody_knows_whether_they_are_zeroed_yet_make_the_pool_unusable(call: str) -> None:
    """A memset that is still under way could hit whoever gets the pages next."""
    setup = Setup(overlap=False, guard_rows=3)
    reqid = setup.cache.alloc_reqid()
    setup.table.fail(1, name=call)
    for _ in range(2):
        with pytest.raises(vattn.DriverError, match="the mappings are unknown; close the cache and make a new one"):
            setup.cache.step({reqid: 1})
        assert setup.table.failed == call
    setup.cache.close()


def test_exhausted_memory_is_out_of_pages_with_the_driver_error_behind_it(setup: Setup) -> None:
    reqid = setup.cache.alloc_reqid()
    setup.table.fail_always("cuMemCreate", code=2)
    with pytest.raises(vattn.OutOfPages, match="the machine has no memory") as caught:
        setup.cache.step({reqid: 1})
    assert isinstance(caught.value.__cause__, vattn.DriverError)
    assert not isinstance(caught.value, vattn.MappingLimit)
    setup.check()
    setup.table.heal()
    setup.cache.step({reqid: 1})


@host_only
@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemMap"])
def test_the_mapping_limit_names_the_limit_and_what_to_change(call: str) -> None:
    setup = Setup(overlap=False, guard_rows=3)  # which are zeroed in a window
    reqid = setup.cache.alloc_reqid()
    setup.table.fail_always(call, code=2)
    with pytest.raises(vattn.MappingLimit) as caught:
        setup.cache.step({reqid: 1})
    for word in (str(drivers.find("cpu").mapping_limit()), "4.0 KiB", "page_size", "fused", "sysctl"):
        assert word in str(caught.value)
    setup.check()
    setup.table.heal()
    setup.close()


def test_a_dropped_cache_that_cannot_be_unmapped_is_an_error_of_the_next_call(setup: Setup) -> None:
    """Once: to try again at once would fail again, for ever."""
    dropped = vattn.KVCache(setup.config, pool=setup.pool)
    dropped.step({dropped.alloc_reqid(): 64})
    setup.table.fail_always("cuMemUnmap", code=2)
    del dropped
    gc.collect()
    with pytest.raises(vattn.OutOfPages):
        setup.cache.alloc_reqid()
    setup.table.heal()
    setup.cache.alloc_reqid()
    setup.check()
    assert setup.pool.free_pages == setup.pool.total_pages


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap"])
def test_where_the_machine_has_no_more_parked_pages_give_way(setup: Setup, call: str) -> None:
    first, second = setup.cache.alloc_reqid(), setup.cache.alloc_reqid()
    setup.cache.step({first: 300})
    setup.cache.free_reqid(first)
    setup.table.fail(1, code=2, name=call)
    setup.cache.step({second: 300})
    assert setup.table.failed == call
    assert setup.cache.stats().parked_pages == 0
    setup.check()


def test_a_failure_in_the_background_costs_nothing_but_a_wait() -> None:
    setup = Setup()
    reqid = setup.cache.alloc_reqid()
    setup.cache.step({reqid: 63})
    setup.table.fail_always("cuMemMap")
    setup.cache.step({reqid: 64})  # queues the next block, which fails
    setup.pool._core.mapper.wait(setup.pool._core.mapper.last)
    setup.table.heal()
    setup.cache.step({reqid: 65})
    setup.check()
    assert setup.cache.stats().failures == 1
    setup.close()


def test_growth_that_fails_as_a_step_begins_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticket passes when the step has seen that nothing failed before, and asks what has grown."""
    setup = Setup()
    reqid, worker = setup.cache.alloc_reqid(), setup.pool._core.worker
    setup.cache.step({reqid: 63})
    setup.check()

    def fail() -> None:
        monkeypatch.undo()
        setup.table.release()
        worker.mapper.wait(worker.mapper.last)

    with setup.table.holding("cuMemCreate", setup.table.ended["cuMemCreate"]):
        setup.table.fail(1, name="cuMemMap")
        setup.cache.step({reqid: 64})  # queues the next block
        monkeypatch.setattr(worker, "forget_done", fail)
        setup.cache.step({reqid: 65})
    assert setup.table.failed == "cuMemMap"
    setup.check()
    assert setup.cache.page_map()[reqid].mapped >= 65
    assert setup.cache.stats().failures == 1
    setup.close()


def break_undoing(setup: Setup) -> tuple[int, int]:
    """Makes a step fail, and what should undo it, in a cache with a request of 100 tokens; its slot, and another."""
    reqid, other = setup.cache.alloc_reqid(), setup.cache.alloc_reqid()
    setup.cache.step({reqid: 100})
    for layer in (0, 1):
        for tensor in setup.cache.layer(layer):
            tensor[reqid, :100] = 7.0
    setup.table.fail_always("cuMemSetAccess", "cuMemUnmap")
    with pytest.raises(vattn.DriverError, match="every call tries to undo it again"):
        setup.cache.step({other: 100})
    return reqid, other


@pytest.mark.parametrize("overlap", [False, True])
def test_when_undoing_fails_too_no_call_is_possible_until_it_succeeds(overlap: bool) -> None:
    setup = Setup(overlap=overlap)
    reqid, other = break_undoing(setup)
    for call in (lambda: setup.cache.step({reqid: 101}), setup.cache.stats, setup.cache.check, setup.cache.trim):
        with pytest.raises(vattn.DriverError, match="the mappings are unknown"):
            call()
    with pytest.raises(vattn.DriverError, match="the mappings are unknown"):
        vattn.KVCache(setup.cache.config, pool=setup.pool)
    setup.table.fail_always("cuMemUnmap")  # one of the calls works again, which is not enough
    with pytest.raises(vattn.DriverError, match="the mappings are unknown"):
        setup.cache.stats()
    setup.table.heal()
    assert setup.cache.stats().live_tokens == 100
    setup.check()
    setup.cache.step({reqid: 101, other: 300})
    assert all(bool((tensor[reqid, :100] == 7.0).all()) for tensor in setup.cache.layer(1))
    setup.check()
    setup.close()


@pytest.mark.parametrize("healed", [False, True])
def test_a_cache_with_unknown_mappings_can_be_closed_and_gives_its_memory_back(healed: bool) -> None:
    """If its calls fail still, the address space asks the driver what is mapped, once they work."""
    setup = Setup(overlap=False)
    another = vattn.KVCache(setup.cache.config, pool=setup.pool)
    break_undoing(setup)
    if healed:
        setup.table.heal()
        setup.cache.close()
        another.alloc_reqid()
        another.check()
    else:
        setup.cache.close()
        setup.table.heal()
        with pytest.raises(vattn.DriverError, match="the mappings are unknown"):
            another.alloc_reqid()
        with pytest.raises(vattn.DriverError, match="the mappings are unknown"):
            another.layer(0)
    another.close()
    setup.pool.close()


def test_a_dropped_cache_gives_its_pages_up_to_a_pool_whose_mappings_are_unknown() -> None:
    setup = Setup(overlap=False)
    another = vattn.KVCache(setup.config, pool=setup.pool)
    setup.cache.step({setup.cache.alloc_reqid(): 100})
    setup.table.fail(2, name="cuMemUnmap")
    setup.table.fail_always("cuMemMap")
    del setup.cache
    gc.collect()
    another.close()
    setup.table.heal()
    assert setup.pool.free_pages == setup.pool.total_pages
    with pytest.raises(vattn.DriverError, match=r"are unknown; a cache has left its pool .* make a new pool"):
        vattn.KVCache(setup.config, pool=setup.pool)
    setup.pool.close()


@host_only
def test_a_close_that_fails_does_not_give_up_a_pool_whose_mappings_are_unknown() -> None:
    setup = Setup(overlap=False)
    another = vattn.KVCache(setup.config, pool=setup.pool)
    setup.cache.step({setup.cache.alloc_reqid(): 100})
    another.step({another.alloc_reqid(): 100})
    setup.table.fail(2, name="cuMemUnmap")
    setup.table.fail_always("cuMemMap")
    del setup.cache
    gc.collect()
    setup.table.fail_always("cuMemMap", "cuStreamIsCapturing")
    with pytest.raises(vattn.DriverError, match="cuStreamIsCapturing"):
        another.close()
    setup.table.heal()
    assert another.stats().live_tokens == 100
    another.check()
    another.close()
    assert setup.pool.free_pages == setup.pool.total_pages
    setup.pool.close()


@host_only  # on CUDA the question is more than one call
def test_a_pool_is_given_up_wholly() -> None:
    """Once that has begun, no driver call is made that may fail: nobody executes what the cache plans."""
    setup = Setup(overlap=False)
    break_undoing(setup)
    tensors = setup.cache.layer(0)  # their address space goes with them
    setup.table.fail(2, name="cuStreamIsCapturing")
    setup.cache.close()
    setup.table.heal()
    del tensors
    assert setup.pool.free_pages == setup.pool.total_pages
    setup.pool.close()


def test_a_call_that_fails_while_a_pool_is_given_up_keeps_no_pages() -> None:
    setup = Setup(overlap=False)
    setup.cache.step({setup.cache.alloc_reqid(): 100})
    setup.table.fail(2, name="cuMemUnmap")
    setup.table.fail_always("cuMemMap")
    del setup.cache
    gc.collect()
    setup.table.fail_always("cuMemMap", "cuStreamIsCapturing")
    with pytest.raises(vattn.DriverError, match="cuStreamIsCapturing"):
        setup.pool._core.take_back()
    setup.table.heal()
    setup.pool._core.take_back()
    assert setup.pool.free_pages == setup.pool.total_pages
    setup.pool.close()


@pytest.mark.parametrize("healed", [False, True])
def test_a_close_whose_undoing_fails_can_be_repeated(healed: bool) -> None:
    setup = Setup(overlap=False)
    another = vattn.KVCache(setup.cache.config, pool=setup.pool)
    setup.cache.step({setup.cache.alloc_reqid(): 100})
    setup.table.fail(2, name="cuMemUnmap")
    setup.table.fail_always("cuMemMap")
    with pytest.raises(vattn.DriverError, match="the mappings are unknown"):
        setup.cache.close()
    with pytest.raises(vattn.DriverError, match="the mappings are unknown"):
        setup.cache.stats()  # the cache is not closed
    if healed:
        setup.table.heal()
        assert setup.cache.stats().live_tokens == 100
        setup.check()
    setup.cache.close()
    setup.table.heal()
    if healed:
        another.check()
        assert setup.pool.free_pages == setup.pool.total_pages
    another.close()
    setup.pool.close()


def test_a_cache_that_is_dropped_while_mappings_are_unknown_gives_its_memory_back() -> None:
    for own in (False, True):
        setup = Setup(overlap=False)
        break_undoing(setup)
        if own:
            setup.cache._owns_pool = True
        setup.table.heal()
        del setup.cache
        gc.collect()
        del setup


EXHAUSTED = """
import ctypes, sys, vattn
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PAGE, FIXED, ANONYMOUS = 4096, 0x10, 0x4022
from vattn import _native
most = _native.host_max_mappings()

def exhaust(left):
    # Pages with other rights than their neighbours, until the table is full, but for `left` of them.
    base = libc.mmap(None, 2 * most * PAGE, 0, ANONYMOUS, -1, 0)
    made = 0
    while libc.mmap(base + 2 * made * PAGE, PAGE, 1, ANONYMOUS | FIXED, -1, 0) not in (None, 2**64 - 1):
        made += 1
    for i in range(made - left, made):
        libc.mmap(base + 2 * i * PAGE, PAGE, 0, ANONYMOUS | FIXED, -1, 0)
    return base

found = []
for left in (0, 1, 4):
    for operation in ("copy", "trim"):
        cache = vattn.init(num_layers=2, num_kv_heads=1, head_dim=64, dtype="float32", max_batch_size=4, page_size=PAGE,
                           max_context_len=640, memory_budget=400 * PAGE, overlap=False, eager_pages=0, layout="layer")
        a = cache.alloc_reqid()
        cache.step({a: 100})
        for tensor in cache.layer(1):
            tensor[a, :100] = 7.0
        cache.commit(a, list(range(96)))
        b, _ = cache.admit(list(range(100)))
        cache.step({b: 100})
        parked = cache.alloc_reqid()
        cache.step({parked: 300})
        cache.free_reqid(parked)
        cache.step({b: 40})
        base = exhaust(left)
        try:
            cache.step({b: 200}) if operation == "copy" else cache.trim()
            found.append("ok")
        except (vattn.MappingLimit, vattn.DriverError) as error:
            found.append(type(error).__name__)
        libc.munmap(base, 2 * most * PAGE)
        cache.step({a: 110, b: 210})
        assert all(bool((tensor[a, :100] == 7.0).all()) for tensor in cache.layer(1))
        assert all(bool((tensor[b, :40] == 7.0).all()) for tensor in cache.layer(1))
        cache.check()
        cache.close()
assert set(found) - {"ok"}, "nothing was lacking"
"""


@host_only
@pytest.mark.slow
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer needs mappings of its own")
def test_a_process_that_had_used_up_its_mappings_goes_on_when_some_are_free_again() -> None:
    done = scripts.run(EXHAUSTED)
    assert (done.returncode, done.stderr) == (0, "")


def test_any_address_space_of_several_may_be_refused() -> None:
    """Those reserved before it go while the error is raised, by calls that are functions of Python here."""
    groups = [vattn.TensorGroup(layers=[i], num_kv_heads=1, head_dim=16, sliding_window=40 * i or None) for i in (0, 1)]
    table = FaultyTable()
    pool = vattn.PagePool(64 * PAGE, device=DEVICE, page_size=PAGE, table=table.addresses)
    config = vattn.KVConfig(
        groups=groups, dtype="float32", max_batch_size=3, max_context_len=640, device=DEVICE, layout="layer"
    )
    for nth in range(1, 5):
        table.fail(nth, name="cuMemAddressReserve")
        with pytest.raises(vattn.DriverError, match="cuMemAddressReserve failed"):
            vattn.KVCache(config, pool=pool)
    table.fail(5, name="cuMemAddressReserve")
    vattn.KVCache(config, pool=pool).close()
    pool.close()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_what_fails_in_the_background_while_a_cache_leaves_is_not_lost(how: str) -> None:
    """The last unmapping of a request that ended is executed, and fails, when the cache that planned it has gone."""
    setup = Setup(deferred_reclamation=False)
    slot = setup.cache.alloc_reqid()
    setup.cache.step({slot: 100})
    setup.table.fail(1, name="cuMemUnmap")
    setup.table.delay = 0.01  # as long as a cache takes to leave
    setup.cache.free_reqid(slot)
    if how == "close":
        try:
            setup.cache.close()
        except vattn.DriverError:  # where kernels were waited for, closing is the first to unmap
            setup.cache.close()
    del setup.cache
    gc.collect()
    assert setup.table.failed == "cuMemUnmap"
    setup.cache = vattn.KVCache(setup.config, pool=setup.pool)
    assert setup.cache.stats().free_pages == setup.pool.total_pages
    setup.close()


@host_only
def test_a_reference_that_a_check_cannot_release_is_released_later(setup: Setup) -> None:
    """A check asks the driver what is mapped, and gets a reference to it."""
    setup.cache.step({setup.cache.alloc_reqid(): 100})
    setup.table.fail(1, name="cuMemRelease")
    setup.cache.check()
    assert setup.table.failed == "cuMemRelease"
    setup.close()
    assert _native.host_usage().handles == 0


UNSTOPPED = """
import time
from vattn import _native, drivers
from tests.support.faults import FaultyTable
from tests.support.target import DEVICE

# Where the worker waits for the interpreter's lock, and its last owner, who has it, for the worker, this hangs.
table, source = FaultyTable(), drivers.find(DEVICE)
page = source.page_sizes[0]
mapper = _native.Mapper(source.open(page, table=table.addresses).native, _native.PagePool(page, 8))
mapper.stock(4)
while mapper.stocked < 4:
    time.sleep(0.001)
del mapper
assert table.ended["cuMemRelease"] == table.ended["cuMemCreate"] == 4, table.ended
"""


def test_a_worker_that_nobody_stopped_ends_with_its_last_reference() -> None:
    done = scripts.run(UNSTOPPED, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("also", [(), ((4, 999),), ((4, 999), (5, 999))])
def test_address_space_that_cannot_be_reserved_is_an_error_and_leaves_nothing(
    also: tuple[tuple[int, int], ...],
) -> None:
    """If what was reserved before it cannot be given back either, it goes with the next address space."""
    table = FaultyTable()
    pool = vattn.PagePool(64 * PAGE, device=DEVICE, page_size=PAGE, table=table.addresses)
    table.fail_several((3, 2), *also)
    config = vattn.KVConfig(
        num_layers=2,
        num_kv_heads=1,
        head_dim=16,
        dtype="float32",
        max_batch_size=3,
        max_context_len=640,
        device=DEVICE,
        layout="layer",
    )
    with pytest.raises(vattn.DriverError, match="cuMemAddressReserve") as caught:
        vattn.KVCache(config, pool=pool)
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    if also:
        vattn.KVCache(config, pool=pool).close()
    pool.close()


def test_an_interrupt_while_the_error_of_a_failed_call_is_made_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    setup = Setup(overlap=False)
    monkeypatch.setattr("vattn.drivers.failure.failure", interrupted)
    setup.table.fail(1, name="cuMemAddressReserve")
    with pytest.raises(KeyboardInterrupt):
        vattn.KVCache(setup.config, pool=setup.pool)
    setup.close()
