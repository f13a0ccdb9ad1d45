"""The interpreter ends while daemon threads use a cache: nothing is unmapped under them, and the process ends well."""

from __future__ import annotations

import pytest

from tests.support import scripts, target
from tests.support.effort import effort

pytestmark = [target.host_only, pytest.mark.slow(1)]

SETUP = """
import ctypes, threading, time, torch, vattn
from vattn import cpu
cache = vattn.init(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", max_batch_size=4, max_context_len=20000,
                   memory_budget="64MiB", kv_order="HND")
k, v = cache.layer(0)
reqid = cache.alloc_reqid()
cache.step({reqid: 6000})

# Not by torch: of its own accord it aborts the process when a daemon thread comes back from an operation at exit.
where, size = k[reqid].data_ptr(), 6000 * 64 * 4  # rows of one head
def write():
    while True: ctypes.memset(where, 1, size)

def step():  # pages come and go all the time
    while True:
        for tokens in (6000, 12000, 1): cache.step({reqid: tokens})
        cache.trim()

# The kernels over tensors that are never freed, as the interpreter frees others while threads go on.
query, out, rows = torch.ones(1, 8, 64), torch.empty(1, 8, 64), torch.ones(1, 6000, 2, 64)
lengths = torch.tensor([6000], dtype=torch.int32)
for kept in (query, out, rows, lengths): ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
kernel, place = cpu._module()[0].attend, cpu._place(rows)
given = (cpu._index(), 0, 0, 0, 8, 2, 64, 64, query.data_ptr(), 2048, 256, out.data_ptr(), place, place, place, place,
         1, 0, lengths.data_ptr(), 0, 0, 0, 0, 0.1, 0.0, 0, 0, 1)
def attend():
    while True: kernel(*given)

def start(body):
    threading.Thread(target=body, daemon=True).start()
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    "script",
    [
        "start(write)",
        "start(attend)",
        "start(step)",
        "start(write); start(step)",
        "start(step); raise SystemExit(0)",
        "import atexit; atexit.register(cache.step, {reqid: 7000}); start(write)",
        "import atexit; atexit.register(cache.close)",
        # a worker at work, and a cache in a cycle that nobody collects
        "cycle = [cache]; cycle.append(cycle); del cache\nfor n in (20000, 1, 20000): cycle[0].step({reqid: n})",
    ],
)
def test_daemon_threads_at_exit(script: str) -> None:
    for _ in range(effort(1, 10)):  # some of these fail only sometimes
        done = scripts.run(SETUP + script, to_the_end=True)
        assert (done.returncode, done.stderr) == (0, "")
