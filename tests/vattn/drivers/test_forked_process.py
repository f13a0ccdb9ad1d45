"""What a forked child has of its parent's caches: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import target
from waiting import wait_until

pytestmark = target.host_only

# A parent with memory in its cache forks a worker that never touches vattn, says its pid and sleeps.
OWNER = """
import os, sys, time
import vattn
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
    files = [os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()]
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
