"""Several caches on one pool of pages, processes that fork, and interpreters that end."""

from __future__ import annotations

import os
import subprocess
import threading
from functools import partial
from typing import Any

import pytest
import torch

import vattn
from tests.support import forks, scripts
from tests.support.faults import FaultyTable
from tests.support.target import DEVICE, host_only
from tests.support.waiting import Background
from vattn import drivers

PAGE = 4096


def make(pool: vattn.PagePool, **changes: Any) -> vattn.KVCache:
    options: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 16,
        "dtype": "float32",
        "max_batch_size": 4,
        "max_context_len": 640,
        "device": DEVICE,
        "eager_pages": 0,
        "watermark": 0,
    }
    return vattn.KVCache(vattn.KVConfig(**options | changes), pool=pool)


def test_caches_share_a_budget_and_take_each_others_parked_pages() -> None:
    pool = vattn.PagePool(24 * PAGE, device=DEVICE, page_size=PAGE)
    with make(pool) as one, make(pool, num_kv_heads=2) as two:
        first = one.alloc_reqid()
        one.step({first: 640})  # 20 pages
        assert one.stats().free_pages == two.stats().free_pages == 4
        assert two.stats().other_pages == 20
        second = two.alloc_reqid()
        with pytest.raises(vattn.OutOfPages) as caught:
            two.step({second: 128})
        assert caught.value.missing_pages == 4
        one.free_reqid(first)
        one.step({})  # on CUDA: its kernels are launched
        two.step({second: 128})
        k, _ = two.layer(0)
        k[second, :128] = 1
        one.check()
        two.check()
        with pytest.raises(vattn.VattnError, match="2 caches"):
            pool.close()
    pool.close()
    pool.close()
    with pytest.raises(vattn.CacheClosed):
        make(pool)


def test_a_pool_decides_the_page_size() -> None:
    pool = vattn.PagePool("1MiB", device=DEVICE, page_size=8192)
    with make(pool) as cache:
        assert cache.layout.page_size == 8192
    with pytest.raises(vattn.ConfigError, match="contradicts"):
        make(pool, page_size=4096)
    pool.close()
    with pytest.raises(vattn.ConfigError, match="below one page"):
        vattn.PagePool(100)


@pytest.mark.parametrize("memory_budget", ["auto", "1MiB"])
def test_a_pool_has_room_for_a_first_token(memory_budget: str) -> None:
    for pages in range(1, 4):
        pool = vattn.PagePool(pages * PAGE, device=DEVICE, page_size=PAGE)
        with pytest.raises(vattn.ConfigError, match=r"the pool's budget .* is below one token block: .* needs 4 pages"):
            make(pool, memory_budget=memory_budget, layout="layer", guard_rows=64)
        pool.close()
    pool = vattn.PagePool(4 * PAGE, device=DEVICE, page_size=PAGE)
    with make(pool, memory_budget=memory_budget, layout="layer", guard_rows=64) as cache:
        cache.step({cache.alloc_reqid(): 1})
        cache.check()
    pool.close()


def test_a_share_of_free_memory_makes_no_sense_beside_a_pool() -> None:
    pool = vattn.PagePool(64 * PAGE, device=DEVICE, page_size=PAGE)
    with pytest.raises(vattn.ConfigError, match=r"memory_utilization=0.5 .* of a pool; leave it out, or give"):
        make(pool, memory_budget="auto", memory_utilization=0.5)
    pool.close()


def test_a_cache_can_be_used_from_several_threads() -> None:
    pool = vattn.PagePool(512 * PAGE, device=DEVICE, page_size=PAGE)
    with make(pool, max_batch_size=8) as cache:

        def work(seed: int) -> None:
            k, _ = cache.layer(0)
            for round_ in range(30):
                reqid = cache.alloc_reqid(seed)
                for length in range(1, 640, 90):
                    cache.step({reqid: length})
                    k[reqid, :length] = seed
                    assert (k[reqid, :length] == seed).all(), round_
                cache.free_reqid(reqid)

        for each in [Background(partial(work, seed)) for seed in range(4)]:
            each.finish()
        cache.check()
    pool.close()


@host_only
def test_a_fork_is_refused_and_the_child_can_make_its_own() -> None:
    cache = vattn.KVCache(
        vattn.KVConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=16,
            dtype="float32",
            max_batch_size=2,
            max_context_len=640,
            memory_budget="1MiB",
        )
    )
    reqid = cache.alloc_reqid()
    cache.step({reqid: 100})
    k, _ = cache.layer(0)
    k[reqid, :100] = 3

    def child() -> None:
        with pytest.raises(vattn.ForkedProcess, match="spawn"):
            cache.step({reqid: 101})
        with vattn.KVCache(cache.config) as own:
            other = own.alloc_reqid()
            own.step({other: 64})
            own.check()
            own.layer(0)[0][other, :64] = 1

    assert forks.status(child) == 0
    assert (k[reqid, :100] == 3).all()
    cache.check()
    cache.close()


def run(script: str) -> subprocess.CompletedProcess[str]:
    setup = (
        "import torch, vattn\n"
        "cache = vattn.init(num_layers=2, num_kv_heads=1, head_dim=16, dtype='float32', max_batch_size=2,\n"
        "                   max_context_len=64000, memory_budget='64MiB', guard=GUARD)\n"
        "k, v = cache.layer(0)\n"
        "reqid = vattn.alloc_reqid()\n"
        "vattn.step({reqid: 60000})\n"
    )
    guard = "'strict'" if "strict" in script else "'zero'"
    return scripts.run(setup.replace("GUARD", guard) + script, to_the_end=True)


@host_only
@pytest.mark.parametrize(
    "script",
    [
        "",
        "vattn.step({reqid: 1}, next_lengths={reqid: 64000})",
        "cache.close(); k2 = k",
        "del cache",
        "import os; pid = os.fork()\nif pid: os.waitpid(pid, 0)",
    ],
)
def test_the_interpreter_ends_cleanly(script: str) -> None:
    done = run(script)
    assert (done.returncode, done.stderr) == (0, "")


@host_only
def test_an_error_does_not_keep_the_interpreter_from_ending() -> None:
    done = run("raise SystemExit(7)")
    assert (done.returncode, done.stderr) == (7, "")


@host_only
def test_a_write_past_the_mapped_pages_faults_and_a_strict_guard_faults_on_reads_too() -> None:
    assert run("k[1, 5000] = 1").returncode == -11
    assert run("print(k[1, 5000].sum())").stdout == "tensor(0.)\n"
    assert run("'strict'; print(k[1, 5000].sum())").returncode == -11
    assert run("'strict'; print(k[reqid, 59999].sum())").stdout == "tensor(0.)\n"


@host_only
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer needs mappings of its own")
def test_the_kernels_table_of_mappings_is_never_filled() -> None:
    """Pages that cannot merge, up to the limit: a typed error comes first, and the process goes on."""
    pool = vattn.PagePool(70_000 * PAGE, page_size=PAGE)
    cache = vattn.KVCache(
        vattn.KVConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1024,
            dtype="float32",
            max_batch_size=2,
            max_context_len=40_000,
            layout="layer",
            eager_pages=0,
            watermark=0,
            overlap=False,
            memory_budget=70_000 * PAGE,
        ),
        pool=pool,
    )
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    with pytest.raises(vattn.MappingLimit, match=str(drivers.find("cpu").mapping_limit())):
        # One token is a page in each of two tensors: taken in turns, no two pages of a run are neighbours.
        for length in range(1, 40_000):
            cache.step({first: length, second: length})
    cache.check()
    assert cache.stats().kernel_mappings > drivers.find("cpu").mapping_limit() * 0.9
    torch.zeros(10_000_000)
    threading.Thread(target=lambda: None).start()
    cache.close()
    pool.close()


def test_a_cache_and_a_pool_may_be_closed_by_several_threads() -> None:
    """Each call returns when everything is given back, whichever thread did it."""
    for _ in range(20):
        pool = vattn.PagePool(64 * PAGE, device=DEVICE, page_size=PAGE)
        cache = make(pool)
        cache.step({cache.alloc_reqid(): 64})
        problems: list[BaseException | int] = []

        def close(
            it: vattn.KVCache | vattn.PagePool, pool: vattn.PagePool, problems: list[BaseException | int]
        ) -> None:
            try:
                it.close()
                if it is pool and pool._core.native.counts().absent != 64:
                    problems.append(pool._core.native.counts().absent)
            except BaseException as error:
                problems.append(error)

        for it in (cache, pool):
            threads = [threading.Thread(target=close, args=(it, pool, problems)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not problems


@pytest.mark.parametrize("options", [{"handle_type": "posix_fd"}, {"peers": [1]}])
def test_handles_and_peers_are_for_cuda(options: dict[str, Any]) -> None:
    with pytest.raises(vattn.ConfigError, match="is for pages on CUDA, and these are on the CPU"):
        vattn.PagePool("1MiB", device="cpu", **options)
    vattn.PagePool("1MiB", handle_type="none", peers=[]).close()


def test_a_call_that_finds_no_memory_takes_what_requests_of_other_caches_left() -> None:
    table = FaultyTable()
    pool = vattn.PagePool(512 * PAGE, device=DEVICE, page_size=PAGE, table=table.addresses)
    cache, other = (make(pool, layout="layer", overlap=False) for _ in range(2))
    windows = vattn.BlockWindows(
        num_layers=1,
        num_blocks=8,
        block_size=16,
        row=(1, PAGE // 64),
        dtype=torch.float32,
        num_windows=1,
        max_context_len=128,
        device=DEVICE,
        pool=pool,
    )
    slot = cache.alloc_reqid()
    cache.step({slot: 192})
    cache.free_reqid(slot)
    cache.step({})
    parked = cache.stats().parked_pages
    assert parked == 6
    table.fail_always("cuMemCreate", code=2)
    needed = other.alloc_reqid()
    other.step({needed: 16})
    assert other.stats().owned_pages == 2
    windows.back(range(parked - 2))
    with pytest.raises(vattn.OutOfPages, match="no memory for another page"):
        windows.back(range(8))
    for each in (cache, other, windows):
        each.check()
        each.close()
    table.heal()
    pool.close()
