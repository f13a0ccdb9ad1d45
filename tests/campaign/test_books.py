"""The books of /proc see what is held: otherwise they would agree with everything."""

from __future__ import annotations

import os
import signal
import socket
import threading

import torch

import vattn
from tests.campaign import books
from tests.support import forks
from tests.support.waiting import SECONDS


def _cache() -> vattn.KVCache:
    return vattn.init(
        num_layers=2, num_kv_heads=1, head_dim=64, dtype="float32", max_batch_size=3, max_context_len=64,
        page_size=8192, memory_budget="1MiB",
    )  # fmt: skip


def test_what_a_cache_holds_is_seen_and_gone_after_it() -> None:
    _cache().close()  # from here on the file is open
    before = books.read()
    cache = _cache()
    slot = cache.alloc_reqid()
    cache.step({slot: 50})
    cache.check()
    held = books.read()
    assert held.page_bytes - before.page_bytes == cache.stats().created_pages * 8192 > 0
    assert held.page_ranges > before.page_ranges
    assert held.reservations > before.reservations
    assert held.threads == before.threads + 1
    assert not books.disagreement()
    found = books.left(before, seconds=0)
    assert all(name in found for name in ("page_bytes", "page_ranges", "reservations", "threads"))
    kept = cache.layer(0)[0]
    cache.close()
    assert "reservations" in books.left(before, seconds=0)
    del kept
    assert not books.left(before)


def test_windows_over_blocks_are_seen() -> None:
    before = books.read()
    with vattn.BlockWindows(
        num_layers=1, num_blocks=8, block_size=16, row=(64,), dtype=torch.float32, num_windows=2, max_context_len=64,
        page_size=4096, guard="strict",
    ) as windows:  # fmt: skip
        windows.back(range(4))
        windows.show([[0, 2], [2, 1]])
        held = books.read()
        # Four homes, and two windows that show 0, 2 and 2, 1: pages that are neighbours in both places are joined.
        assert held.page_bytes - before.page_bytes == 4 * 4096
        assert held.page_ranges - before.page_ranges == 1 + 4
        assert not books.disagreement()
    assert not books.left(before)


def test_descriptors_and_threads_are_seen() -> None:
    before = books.read()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    number = os.open("/dev/zero", os.O_RDONLY)
    assert "+1 of /dev/zero" in books.left(before, seconds=0, ignore=("threads",))
    assert "threads" in books.left(before, seconds=0)
    os.close(number)
    stop.set()
    thread.join()
    assert not books.left(before)


def test_another_process_can_be_read() -> None:
    here, there = socket.socketpair()
    here.settimeout(SECONDS)

    def body() -> None:
        there.send(b"1")
        signal.pause()

    with here, forks.running(body) as child:
        there.close()
        assert here.recv(1)
        found = books.read(child)
    assert found.threads == 1
    assert found.files == found.page_bytes == found.reservations == 0
    assert found.resident_bytes > 0
