"""The simulator: it counts what a real run counts, leaps change nothing, and clocks wait as a step does."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from bench.simulate.checked import real_and_replayed
from bench.simulate.gpus import A100, LLAMA_3_8B, OnGpus, Work
from bench.simulate.provider import PAPER, Clock, SimulatedPool
from bench.simulate.replay import Replay, Result
from bench.simulate.stores import PagedStore, Store, VirtualStore
from bench.simulate.traces import CHAT, LONG, LONGEST, Trace
from vattn import KVCache, KVConfig
from vattn.layout import LayoutName
from vattn.model_shapes import find_shape

SMALL = Trace("small", (5.5, 0.6), (4.5, 0.6))
TURNS = Trace("turns", (3.5, 0.6), (4.0, 0.6), turns=3, system=300)
GIB, REQUESTS = 2**30, 32


def replayed(trace: Trace, memory: str, *, leap: bool = True, overlap: bool = True, budget: int = 2 * GIB) -> Result:
    shape = find_shape("Llama-3-8B")
    clock = Clock()
    common = {"budget": budget, "slots": 16, "max_context_len": LONGEST, "chunk_tokens": 512}
    store: Store
    if memory == "paged":
        store = PagedStore(shape, **common)
    else:
        layouts: dict[str, LayoutName] = {"layer": "layer", "sliced": "sliced", "fused": "fused"}
        store = VirtualStore(shape, layouts[memory], clocks=[clock], overlap=overlap, **common)
    with closing(store):
        machines = {"A100": (OnGpus(A100, LLAMA_3_8B, 1), clock)}
        replay = Replay(store, trace, machines, requests=REQUESTS, slots=16, tokens_per_step=512, leap=leap)
        return replay.run()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["layer", "sliced", "fused"])
def test_a_replay_counts_what_a_real_run_counts(layout: LayoutName) -> None:
    real, found = real_and_replayed(24, layout)
    assert real.preemptions > 0, "the case has to be one in which memory runs short"
    assert replace(found, seconds=0.0) == replace(real, seconds=0.0)


@pytest.mark.parametrize("memory", ["paged", "layer", "sliced", "fused"])
@pytest.mark.parametrize("trace", [SMALL, TURNS], ids=lambda trace: trace.name)
def test_leaps_change_nothing(trace: Trace, memory: str) -> None:
    leaping, walking = (replayed(trace, memory, leap=leap) for leap in (True, False))
    assert leaping == walking
    assert leaping.requests == REQUESTS
    assert (leaping.map_calls > 0) == (memory != "paged")


def test_memory_that_runs_short_preempts() -> None:
    assert replayed(replace(SMALL, output=(5.5, 0.6)), "fused", budget=GIB // 4).preemptions > 0


def test_all_layouts_make_the_same_tokens_and_waste_differently() -> None:
    found = {memory: replayed(SMALL, memory) for memory in ("paged", "fused", "sliced", "layer")}
    assert len({result.output_tokens for result in found.values()}) == 1
    assert found["fused"].waste <= found["sliced"].waste <= found["layer"].waste


def test_what_is_not_overlapped_is_waited_for() -> None:
    synchronous = replayed(SMALL, "sliced", overlap=False)
    assert synchronous.waited["A100"] == pytest.approx(synchronous.driver_seconds)
    overlapped = replayed(SMALL, "sliced")
    assert 0 < overlapped.waited["A100"] < overlapped.driver_seconds


def test_calls_cost_what_the_paper_says() -> None:
    clock = Clock()
    pool = SimulatedPool(64 * 2**21, 2**21, clocks=[clock])
    config = KVConfig(
        num_layers=2,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        max_batch_size=2,
        max_context_len=4096,
        page_size=2**21,
        layout="layer",
        kv_order="NHD",
        eager_pages=0,
    )
    with KVCache(config, pool=pool) as cache:
        cache.step({cache.alloc_reqid(): 1500})  # two pages in each of four tensors
        calls = cache.stats().calls
        counted = {name: calls[name].count for name in PAPER if name in calls}
        assert counted["cuMemMap"] == counted["cuMemCreate"] == 8
        assert pool.spent == pytest.approx(1e-6 * sum(PAPER[name] * count for name, count in counted.items()))
        assert clock.waited == clock.now == pytest.approx(pool.spent)
    pool.close()


def test_a_clock_waits_for_what_is_left_of_the_worker() -> None:
    clock = Clock()
    clock.submit(1, 2.0)
    clock.submit(2, 1.0)  # after the first
    clock.now += 2.5
    clock.wait(1)
    assert clock.waited == 0
    clock.wait(2)
    assert (clock.now, clock.waited) == (3.0, 0.5)
    clock.now = 10.0
    clock.submit(3, 1.0)  # the worker was idle
    clock.wait(3)
    assert (clock.now, clock.waited) == (11.0, 1.5)


def test_more_gpus_are_faster_where_work_is_large() -> None:
    prefill, decode = Work(8192, 8192**2 // 2, 8192), Work(64, 64 * 4096, 64 * 4096)
    for work in (prefill, decode):
        times = [OnGpus(A100, LLAMA_3_8B, gpus)(work) for gpus in (1, 2, 4)]
        assert times == sorted(times, reverse=True)


def test_traces_are_the_same_in_every_call_and_fit() -> None:
    for trace in (CHAT, LONG):
        first, second = trace.begin(), trace.begin()
        for _ in range(50):
            turn, same = next(first), next(second)
            assert (turn.prompt, turn.output) == (same.prompt, same.output)
            assert 0 < len(turn.prompt) + turn.output <= LONGEST
            assert not trace.shares or turn.prompt[: trace.system] == list(range(trace.system))
            while turn.more is not None and (following := turn.more.turn(turn.prompt + [0] * turn.output)) is not None:
                assert following.prompt[: len(turn.prompt)] == turn.prompt
                turn = following
