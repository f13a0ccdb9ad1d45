"""What a forked child has of its parent's caches: nothing."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import vattn
from tests.support import forks, target
from tests.support.waiting import wait_until

pytestmark = target.host_only

# A parent with memory in its cache forks a worker that never touches vattn, says its pid and sleeps.
OWNER = """
import os, signal, sys, time
import vattn
signal.alarm(120)
cache = vattn.init(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", max_batch_size=2,
                   max_context_len=32768, memory_budget="128MiB")
reqid = cache.alloc_reqid()
cache.step({reqid: 32768})
cache.layer(0)[0][reqid] = 42.0
worker = os.fork()
if worker == 0:
    time.sleep(120)
    os._exit(0)
print(worker, flush=True)
time.sleep(120)
"""


def memfds(process: int | str) -> list[str]:
    """The memory of caches that a process can reach, through files and through mappings."""
    files = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            files.append(os.readlink(entry))
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [name for name in (*files, *maps) if "memfd:vattn" in name]


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process whose cache has memory, and a child of it that never touches vattn."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        yield owner.pid, worker
        owner.kill()
    os.kill(worker, signal.SIGKILL)


def test_a_child_that_never_touches_vattn_keeps_no_memory(family: tuple[int, int]) -> None:
    """Whoever has the file open, or a part of it mapped, keeps all of it after its owner has gone, and can read it."""
    owner, worker = family
    assert memfds(owner)
    wait_until(lambda: not memfds(worker))  # fork() returns in the owner before the worker has let go


def config() -> vattn.KVConfig:
    return vattn.KVConfig(
        num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", max_batch_size=2, max_context_len=64,
        memory_budget="1MiB", page_size=4096,
    )  # fmt: skip


def blocks(pool: vattn.PagePool | None = None) -> vattn.BlockWindows:
    return vattn.BlockWindows(
        num_layers=1, num_blocks=8, block_size=16, row=(64,), dtype=torch.float32, num_windows=3, max_context_len=64,
        page_size="auto" if pool else 4096, pool=pool,
    )  # fmt: skip


# What only describes the object, and says the same in a child.
DESCRIBES = {
    vattn.KVCache: {"layers", "total_pages", "prefix_block_tokens", "capacity"},
    vattn.BlockWindows: set[str](),
}


def public(kind: type) -> set[str]:
    """Methods and properties that users call."""
    return {
        name
        for name, member in inspect.getmembers(kind, lambda each: callable(each) or isinstance(each, property))
        if not name.startswith("_")
    }


def test_every_call_in_a_child_says_that_it_is_one() -> None:
    pool = vattn.PagePool("1MiB", page_size=4096)
    cache, windows = vattn.KVCache(config()), blocks()
    shared_cache, shared_windows = vattn.KVCache(config(), pool=pool), blocks(pool)
    slot = cache.alloc_reqid()
    cache.step({slot: 10})
    cache.layer(0)
    windows.back([0, 1])
    windows.show([[0, 1]])
    calls: dict[str, Callable[[], object]] = {
        "KVCache.alloc_reqid": cache.alloc_reqid,
        "KVCache.admit": lambda: cache.admit([1, 2]),
        "KVCache.find_prefix": lambda: cache.find_prefix([1, 2]),
        "KVCache.commit": lambda: cache.commit(slot, []),
        "KVCache.retract": lambda: cache.retract(slot),
        "KVCache.retract_tokens": lambda: cache.retract_tokens([1, 2]),
        "KVCache.take_withdrawn": cache.take_withdrawn,
        "KVCache.fork": lambda: cache.fork(slot),
        "KVCache.unshare": lambda: cache.unshare(slot),
        "KVCache.evict_prefixes": cache.evict_prefixes,
        "KVCache.stop_sharing": cache.stop_sharing,
        "KVCache.step": lambda: cache.step({slot: 11}),
        "KVCache.look_ahead": cache.look_ahead,
        "KVCache.free_reqid": lambda: cache.free_reqid(slot),
        "KVCache.layer": lambda: cache.layer(0)[0][slot, :10].sum(),
        "KVCache.lend": lambda: cache.lend(0, None)[0][slot, :10].sum(),
        "KVCache.length": lambda: cache.length(slot),
        "KVCache.available_pages": cache.available_pages,
        "KVCache.borrow_pages": lambda: cache.borrow_pages(1),
        "KVCache.pages_needed": lambda: cache.pages_needed(1),
        "KVCache.stats": cache.stats,
        "KVCache.page_map": cache.page_map,
        "KVCache.trim": cache.trim,
        "KVCache.check": cache.check,
        "KVCache.close": cache.close,
        "BlockWindows.back": lambda: windows.back([2]),
        "BlockWindows.show": lambda: windows.show([[0, 1]]),
        "BlockWindows.trim": lambda: windows.trim([]),
        "BlockWindows.backed": windows.backed,
        "BlockWindows.home": lambda: windows.home(0)[0].sum(),
        "BlockWindows.window": lambda: windows.window(0)[0].sum(),
        "BlockWindows.shown": lambda: windows.shown(0),
        "BlockWindows.stats": windows.stats,
        "BlockWindows.check": windows.check,
        "BlockWindows.close": windows.close,
    }
    for kind, describes in DESCRIBES.items():
        assert {f"{kind.__name__}.{name}" for name in public(kind) - describes} == {
            name for name in calls if name.startswith(f"{kind.__name__}.")
        }
    calls |= {
        "KVCache.pages_needed of a slot": lambda: cache.pages_needed(11, slot),
        "PagePool.close": pool.close,
        "KVCache(pool=)": lambda: vattn.KVCache(config(), pool=pool),
        "BlockWindows(pool=)": lambda: blocks(pool),
        "KVCache.layer, the first time": lambda: shared_cache.layer(0)[0][0].sum(),
        "the close of a pool's member": shared_windows.close,
    }

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(vattn.ForkedProcess):
            call()

    for name, call in calls.items():
        assert forks.status(partial(refused, call)) == 0, name
    cache.check()
    windows.check()
    for each in (cache, windows, shared_cache, shared_windows, pool):
        each.close()
