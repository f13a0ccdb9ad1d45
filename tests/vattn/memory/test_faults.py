"""A driver call fails: the cache is as it was, and works on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from faults import FaultyTable
from target import DEVICE, host_only

import vattn
from vattn import drivers

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
            "eager_pages": 0,
            "watermark": 0,
        }
        self.cache = vattn.KVCache(vattn.KVConfig(**options | changes), pool=self.pool)

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
    for nth in range(1, calls + 1):
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
def test_the_mapping_limit_names_the_limit_and_what_to_change(setup: Setup) -> None:
    reqid = setup.cache.alloc_reqid()
    setup.table.fail_always("cuMemMap", code=2)
    with pytest.raises(vattn.MappingLimit) as caught:
        setup.cache.step({reqid: 1})
    for word in (str(drivers.find("cpu").mapping_limit()), "4.0 KiB", "page_size", "sliced", "sysctl"):
        assert word in str(caught.value)
    setup.check()


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
    setup.pool.mapper.wait(setup.pool.mapper.last)
    setup.table.heal()
    setup.cache.step({reqid: 65})
    setup.check()
    assert setup.cache.stats().failures == 1
    setup.close()


def test_when_undoing_fails_too_the_cache_says_so_and_gives_its_memory_back() -> None:
    setup = Setup(overlap=False)
    reqid = setup.cache.alloc_reqid()
    setup.table.fail_always("cuMemSetAccess", "cuMemUnmap")
    with pytest.raises(vattn.DriverError, match="make a new one"):
        setup.cache.step({reqid: 100})
    setup.table.heal()
    with pytest.raises(vattn.DriverError):
        setup.cache.step({reqid: 1})
    setup.close()


def test_address_space_that_cannot_be_reserved_is_an_error_and_leaves_nothing() -> None:
    table = FaultyTable()
    pool = vattn.PagePool(64 * PAGE, device=DEVICE, page_size=PAGE, table=table.addresses)
    table.fail(3, code=2)
    with pytest.raises(vattn.DriverError, match="cuMemAddressReserve") as caught:
        vattn.KVCache(
            vattn.KVConfig(
                num_layers=2,
                num_kv_heads=1,
                head_dim=16,
                dtype="float32",
                max_batch_size=3,
                max_context_len=640,
                device=DEVICE,
            ),
            pool=pool,
        )
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    pool.close()
