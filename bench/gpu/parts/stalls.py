"""Latency of launches while another thread makes memory calls: whether the driver's calls stall launches.

The thread is one of Python, which makes one kind of call over and over, or the worker of a cache, which maps ahead.
A thread of Python also takes Python's lock between its calls; one that only sleeps shows what that costs. How often the
other thread got to its end, or how many pages the worker mapped, is in the last column.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles

import torch

from bench.gpu.caches import virtual
from bench.gpu.device import DEVICE, STUB
from bench.gpu.figures import Figures
from bench.gpu.raw import Calls
from bench.harness.report import Goal, Report, Row

ABOUT = "latency of launches while another thread makes memory calls"
RANK = 4
SECONDS = 40

_IN_A_ROW = 100  # launches before the device is waited for: its queue must not fill up
_PAUSE = 5e-5  # seconds before each launch: it leaves Python's lock to the other thread
_REMAP = "map, set access, unmap"
_WORKER = "the cache's worker"


def run(quick: bool) -> Report:
    calls = Calls()
    rounds = 2 if quick else 40
    launches = _launches(calls)
    figures = Figures()
    with _threads(calls) as threads:
        for kind, launch in launches.items():
            for beside, action in threads.items():
                with _loop(calls, action) as done:
                    seconds = [second for _ in range(rounds) for second in _row_of_launches(calls, launch)]
                    count = len(done)
                figures.append(_figures(kind, beside, seconds, count))
            figures.append(_figures(kind, _WORKER, *_beside_worker(calls, launch, quick)))
    by_case = {(row["launch"], row["beside"]): row for row in figures}
    goals = []
    for kind in launches:
        for beside, other in ((_REMAP, "a thread that sleeps"), (_WORKER, "nothing")):
            ratio = float(by_case[kind, beside]["median us"]) / float(by_case[kind, other]["median us"])
            goals.append(Goal(f"{kind}: median beside {beside} over beside {other}", ratio, "<=", 1.5))
        slowest, alone = (float(by_case[kind, beside]["99th percentile us"]) for beside in (_WORKER, "nothing"))
        goals.append(Goal(f"{kind}: 99th percentile beside {_WORKER}, us", slowest, "<=", max(50.0, alone)))
    return Report(parameters={"launches in a row": _IN_A_ROW, "rounds": rounds}, figures=figures, goals=goals)


def _launches(calls: Calls) -> dict[str, Callable[[], object]]:
    event = calls.event()
    launches: dict[str, Callable[[], object]] = {"cuEventRecord": lambda: calls.record(event)}
    if not STUB:
        number = torch.zeros(8, device=DEVICE)
        launches["torch's add_"] = lambda: number.add_(1)
    return launches


@contextmanager
def _threads(calls: Calls) -> Iterator[dict[str, Callable[[], object] | None]]:
    """What another thread does over and over, by what the table calls it."""
    page = calls.granularity
    base = calls.reserve(page, page)
    handle = calls.create(page)
    sleep = ctypes.CDLL(None).usleep

    def remap() -> None:
        calls.map(base, page, handle)
        calls.set_access(base, page)
        calls.unmap(base, page)

    yield {
        "nothing": None,
        "a thread that sleeps": lambda: sleep(30),
        "reserve, free": lambda: calls.free(calls.reserve(page, page), page),
        "create, release": lambda: calls.release(calls.create(page)),
        _REMAP: remap,
    }
    calls.release(handle)
    calls.free(base, page)


@contextmanager
def _loop(calls: Calls, action: Callable[[], object] | None) -> Iterator[list[None]]:
    """Another thread that repeats `action` meanwhile; the list grows by one each time."""
    done: list[None] = []
    if action is None:
        yield done
        return
    ending = threading.Event()
    failures: list[Exception] = []

    def repeat() -> None:
        try:
            calls.enter()
            while not ending.is_set():
                action()
                done.append(None)
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield done
    finally:
        ending.set()
        thread.join()
    if failures:
        raise failures[0]


def _row_of_launches(calls: Calls, launch: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(_IN_A_ROW):
        time.sleep(_PAUSE)
        start = time.perf_counter()
        launch()
        seconds.append(time.perf_counter() - start)
    calls.synchronize()
    return seconds


def _beside_worker(calls: Calls, launch: Callable[[], object], quick: bool) -> tuple[list[float], int]:
    """Latencies while the worker of a cache maps what the next step needs, and the pages that it has mapped by then."""
    slots, pages = 4, 8 if quick else 128
    kv = virtual(slots, 2**16, layers=8, layout="fused")
    calls.enter()
    block = kv.cache.layout.page_tokens
    seconds: list[float] = []
    mapped = 0
    for _ in range(2 if quick else 20):
        reqids = [kv.allocate(1) for _ in range(slots)]
        kv.prepare(dict.fromkeys(reqids, 1))
        before = kv.stats().map_calls
        kv.prepare(dict.fromkeys(reqids, 1), dict.fromkeys(reqids, pages * block))
        seconds += _row_of_launches(calls, launch)
        mapped += kv.stats().map_calls - before
        kv.prepare(dict.fromkeys(reqids, pages * block))
        for reqid in reqids:
            kv.free(reqid)
        kv.prepare({})
        kv.cache.trim()
    kv.close()
    return seconds, mapped


def _figures(launch: str, beside: str, seconds: list[float], count: int) -> Row:
    return {
        "launch": launch,
        "beside": beside,
        "median us": 1e6 * median(seconds),
        "99th percentile us": 1e6 * quantiles(seconds, n=100)[98],
        "slowest us": 1e6 * max(seconds),
        "done meanwhile": count,
    }
