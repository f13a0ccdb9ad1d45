"""The number of computing threads: what is chosen on an idle machine, beside others, and when they come and go."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.effort import covering, effort
from tests.support.tiny_models import random_model
from tests.support.waiting import wait_until
from vattn import cores as machine_cores
from vattn.cores import FreeCores, _quotas, thread_counts
from vattn.engine import LLM, AsyncEngine, BeamSearchParams, Counter, Histogram, SamplingParams
from vattn.engine.beam_search import BeamGroup
from vattn.engine.core import EngineCore
from vattn.engine.model import threads as module
from vattn.engine.model.runner import ModelRunner
from vattn.engine.model.threads import Threads, Tuner
from vattn.errors import ConfigError


class Machine:
    """Two cores, other programs that keep some of them busy, and steps whose seconds are known.

    Threads that lack a core wait for a turn of a few milliseconds, so a step is now fast, now very slow.

    Args:
        alone: seconds of a step by number of threads, on an idle machine.
        visible: whether the other programs can be seen.
    """

    def __init__(self, alone: dict[int, float], *, visible: bool = True, cores: int = 2) -> None:
        self.alone, self.visible, self.cores = alone, visible, cores
        self.others = 0
        self.now = 0.0
        self.tokens = 0
        self.rng = random.Random(0)
        self.tuner = Tuner(sorted(alone), clock=lambda: self.now, free=self.free)

    def free(self) -> int:
        return self.cores - self.others if self.visible else self.cores

    def step(self, tokens: int = 8, times: float = 1.0) -> int:
        count = self.tuner.next(tokens)
        seconds = times * self.alone[count] * self.rng.uniform(0.97, 1.03)
        used = seconds * count
        lacking = count + self.others - self.cores
        if lacking > 0 and count > 1:
            turns = sum(self.rng.random() < 0.5 for _ in range(1 + int(seconds / 0.003)))
            seconds += 0.004 * turns * lacking
        self.tuner.took(seconds, used)
        self.now += seconds
        self.tokens += tokens
        return count

    def run(self, seconds: float, **step: Any) -> float:
        """Steps for so long; returns tokens per second."""
        tokens, until = self.tokens, self.now + seconds
        while self.now < until:
            self.step(**step)
        return (self.tokens - tokens) / seconds


SMALL = {1: 0.0005, 2: 0.00065}
LARGE = {1: 0.060, 2: 0.033}


@pytest.mark.parametrize("alone", [SMALL, LARGE, {1: 0.0030, 2: 0.0018}, {1: 0.002, 2: 0.00201}])
@pytest.mark.parametrize("first", [1, 2])
def test_an_idle_machine_is_as_fast_as_with_the_best_number(alone: dict[int, float], first: int) -> None:
    machine = Machine(alone)
    machine.tuner.choose(first)
    machine.run(2)
    assert machine.run(20) >= 0.97 * 8 / min(alone.values())


@pytest.mark.parametrize("alone", [SMALL, LARGE, {1: 0.0030, 2: 0.0018}])
@pytest.mark.parametrize("visible", [True, False])
def test_beside_a_busy_process_one_thread_computes(alone: dict[int, float], visible: bool) -> None:
    """Another program takes one of two cores for a while: no thread waits for it, and later both cores are used."""
    machine = Machine(alone, visible=visible)
    idle = machine.run(10)
    machine.others = 1
    assert machine.run(1) >= 0.35 * idle, "it takes a moment"
    assert machine.run(20) >= 0.96 * 8 / alone[1], "one thread's speed"
    machine.others = 0
    machine.run(1 if visible else 30)
    assert machine.run(10) >= 0.96 * idle


def test_among_many_cores_the_best_number_is_found_step_by_step() -> None:
    alone = {1: 0.08, 2: 0.045, 4: 0.028, 8: 0.024, 14: 0.029}
    for first in alone:
        machine = Machine(alone, cores=16)
        machine.tuner.choose(first)
        machine.run(20)
        assert machine.tuner.count == 8
        assert machine.run(20) >= 0.97 * 8 / alone[8]
        machine.others = 11  # then five threads have a core each
        machine.run(5)
        assert machine.tuner.count == 4


def test_a_longer_context_is_no_lost_core() -> None:
    """Chunks of a long prompt take longer one after another, with as much of the CPU as before."""
    machine = Machine({1: 0.5, 2: 0.3})
    machine.tuner.choose(2)
    machine.tuner._due = 1e9  # no trial but for a lost core
    assert {machine.step(512, 1 + chunk / 4) for chunk in range(20)} == {2}


def test_steps_of_other_sizes_are_not_compared() -> None:
    """A few large steps among small ones look slow, whatever the number of threads."""
    machine = Machine(LARGE)
    machine.run(5)
    counts = [machine.step(*((8, 1.0) if i % 4 else (200, 9.0))) for i in range(200)]
    assert counts.count(2) >= 0.96 * len(counts)


def test_what_a_trial_of_fewer_threads_costs_is_earned_before() -> None:
    """A server's prompts take a second a step, and twice as long on half of the threads, which loading has measured."""
    machine = Machine({1: 2.0, 2: 1.0})
    machine.tuner.choose(2, {1: 0.08, 2: 0.04})
    assert {machine.step(2048) for _ in range(45)} == {2}
    counts = [machine.step(2048) for _ in range(500)]
    assert 5 <= counts.count(1) <= 10


def test_a_core_that_was_lost_for_a_moment_is_used_again_by_the_next_long_steps() -> None:
    machine = Machine({1: 2.0, 2: 1.0})
    machine.tuner.choose(1, {1: 2.0, 2: 3.0})  # as they took beside another program
    assert [machine.step(2048) for _ in range(5)] == [1, 2, 2, 2, 2]


def _lose_a_core(machine: Machine, slow: float) -> None:
    """Steps take so long on two threads, beside another program, until one thread computes."""
    machine.run(5)
    machine.others = 1
    while machine.tuner.count == 2:
        machine.tuner.next(8)
        machine.tuner.took(*((slow, slow) if machine.tuner._trial is None else (machine.alone[1],) * 2))
        machine.now += slow


def test_what_one_kind_of_step_finds_is_told_to_the_others() -> None:
    machine = Machine(LARGE)
    prefill = Tuner([1, 2], clock=lambda: machine.now, free=machine.free)
    _lose_a_core(machine, 0.12)
    prefill.follow(machine.tuner)
    assert machine.tuner.count == prefill.count == 1
    machine.others = 0
    machine.run(5)
    prefill.follow(machine.tuner)
    assert machine.tuner.count == prefill.count == 2


def test_a_core_that_costs_less_than_half_of_the_threads_is_not_given_up() -> None:
    """By steps that gain nothing by a second thread: others, which are twice as fast with it, keep it."""
    machine = Machine({1: 0.034, 2: 0.033})
    prefill = Tuner([1, 2], clock=lambda: machine.now, free=machine.free)
    prefill.choose(2, {1: 0.08, 2: 0.044})
    _lose_a_core(machine, 0.055)
    prefill.follow(machine.tuner)
    assert machine.tuner.count == 1
    assert prefill.count == 2


def test_the_numbers_that_are_tried_leave_cores_to_the_worker_and_the_server() -> None:
    table = {cores: thread_counts(cores, 64) for cores in (1, 2, 3, 4, 5, 8, 16)}
    assert table == {
        1: (1,),
        2: (1, 2),
        3: (1, 2),
        4: (1, 2, 3),
        5: (1, 2, 3),
        8: (1, 2, 4, 6),
        16: (1, 2, 4, 8, 14),
    }
    assert thread_counts(64, 1) == (1,), "OMP_NUM_THREADS=1"
    assert thread_counts(64, 6) == (1, 2, 4, 6)


def test_a_quota_of_a_control_group_around_the_process_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:cpu,cpuacct:/a\n0::/a/b\n")
    for folder, name, text in (
        ("a/b", "cpu.max", "max 100000"),
        ("a", "cpu.max", "150000 100000"),
        ("cpu/a", "cpu.cfs_quota_us", "300000"),
        ("cpu/a", "cpu.cfs_period_us", "100000"),
        ("cpu", "cpu.cfs_quota_us", "-1"),
        ("cpu", "cpu.cfs_period_us", "100000"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text + "\n")
    assert sorted(_quotas(tmp_path, own)) == [1.5, 3.0]
    assert list(_quotas(tmp_path, tmp_path / "nowhere")) == []


def test_free_cores_are_those_that_others_left_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own threads take nothing from it, however many run; a look that is hardly over is not taken again."""
    now = left = 0.0
    monkeypatch.setattr(machine_cores, "_left_seconds", lambda: (now, left))
    free = FreeCores()
    found = []
    for seconds, idle, own in ((2.5, 2.4, 2.5), (0.1, 0.0, 0.1), (0.01, 0.02, 0.0), (3.0, 1.3, 3.0), (3.0, 1.6, 3.0)):
        now, left = now + seconds, left + idle + own
        found.append(free())
    assert found == [2, 1, 1, 1, 2]


def test_free_cores_of_this_machine() -> None:
    """Time that passes is idle, this process's or another's, so there are at most as many as cores."""
    free, end = FreeCores(), time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    assert 0 <= free() <= (os.cpu_count() or 1)


# In the engine


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As on an idle machine with two cores."""
    before = torch.get_num_threads()
    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(module, "FreeCores", lambda: lambda: 2)
    torch.set_num_threads(2)
    module.end_team()
    yield
    torch.set_num_threads(before)


def make_model(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2} | changes
    return random_model("LlamaConfig", vocab_size=96, num_hidden_layers=2, max_position_embeddings=256, **sizes)


def watched(model: Any) -> list[int]:
    """The numbers of threads with which the model runs from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    return seen


def generate(llm: LLM, max_tokens: int = 6) -> Any:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5)
    outputs = llm.generate([{"prompt_token_ids": list(range(3, 40))}, [5, 6, 7]], params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.usefixtures("two_threads")
def test_threads_that_loaded_a_model_end_when_another_thread_is_to_compute() -> None:
    """More OpenMP threads than cores sleep whenever they wait for each other."""

    async def serve() -> None:
        async with AsyncEngine(LLM(make_model(), memory_budget="1MiB", max_model_len=64)) as engine:
            # One that has ended is listed a moment longer.
            wait_until(lambda: not computing & set(os.listdir("/proc/self/task")))
            params = SamplingParams(temperature=0, max_tokens=4)
            outputs = [output async for output in engine.generate([1, 2, 3], params)]
            assert outputs[-1].finished

    alone = set(os.listdir("/proc/self/task"))
    torch.ones(10**6).sum()
    computing = set(os.listdir("/proc/self/task")) - alone
    assert computing
    asyncio.run(serve())


@pytest.mark.usefixtures("two_threads")
def test_a_given_number_computes_every_step_and_torchs_own_comes_back() -> None:
    model = make_model()
    for count in (1, 3):
        with LLM(model, num_threads=count, memory_budget="1MiB", max_model_len=64) as llm:
            seen = watched(model)
            generate(llm)
            assert llm.num_threads == {"decode": count, "prefill": count}
            assert set(seen) == {count}
            assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("count", [1, 3])
def test_log_probabilities_and_beams_are_computed_by_a_steps_number(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Once what the step took is known: they depend on what requests ask for."""
    seen: dict[str, set[int]] = {}
    events: list[str] = []

    def note(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **keywords: Any) -> Any:
            events.append(name)
            seen.setdefault(name, set()).add(torch.get_num_threads())
            return original(*args, **keywords)

        monkeypatch.setattr(owner, name, noting)

    note(EngineCore, "_token_logprobs")
    note(EngineCore, "_note_prompt_logprobs")
    note(BeamGroup, "advance")
    note(ModelRunner, "run")
    note(Tuner, "took")
    with LLM(make_model(), num_threads=count, memory_budget="1MiB", max_model_len=64) as llm:
        params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2)
        llm.generate([5, 6, 7], params, use_tqdm=False)
        llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert all(seen[name] == {count} for name in ("_token_logprobs", "_note_prompt_logprobs", "advance"))
    assert all(after == "took" for event, after in pairwise(events) if event == "run")
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_torchs_number_comes_back_if_a_step_fails() -> None:
    model = make_model()

    def fail(*_: Any) -> None:
        raise RuntimeError("as models do")

    with LLM(model, num_threads=1, memory_budget="1MiB", max_model_len=64) as llm:
        model.register_forward_pre_hook(fail)
        assert llm.generate([5, 6], use_tqdm=False)[0].outputs[0].finish_reason == "error"
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_loading_measures_both_kinds_of_steps_and_says_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here, time stands still but for steps: decode steps are faster with two threads, prefill steps with one."""
    now = 0.0

    def rehearse(tokens: int) -> None:
        nonlocal now
        now += {(8, 1): 0.02, (8, 2): 0.01, (30, 1): 0.03, (30, 2): 0.04}[tokens, torch.get_num_threads()]

    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(module, "_LOADING_TOKENS", {"decode": 8, "prefill": 64})
    threads = Threads("auto", on_cpu=True)
    with caplog.at_level(logging.INFO, "vattn.engine.model.threads"):
        threads.measure(rehearse, {"decode": 16, "prefill": 30})
    assert threads.counts == {"decode": 2, "prefill": 1}
    assert caplog.messages == [
        "computing threads: 2 for decode steps (1: 20.00 ms, 2: 10.00 ms), 1 for prefill steps (1: 30.00 ms, 2: 40.00 "
        "ms); measured again as the engine runs"
    ]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_engine_measures_when_it_is_made_and_counts_none_of_it(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    seen = watched(model)
    with caplog.at_level(logging.INFO, "vattn"), LLM(model, memory_budget="1MiB", max_model_len=64) as llm:
        assert {1, 2} == set(seen)
        assert set(llm.num_threads) == {"decode", "prefill"}
        assert any("computing threads: " in message for message in caplog.messages)
        metrics = llm.get_metrics()
        assert {metric.count for metric in metrics if isinstance(metric, Histogram)} == {0}
        totals = {metric.name: metric.value for metric in metrics if isinstance(metric, Counter)}
        assert totals["vllm:prompt_tokens"] == totals["vllm:generation_tokens"] == 0
        assert llm.core.kv.stats().physical_bytes == 0
        generate(llm)


@pytest.mark.usefixtures("two_threads")
def test_an_engine_whose_model_cannot_be_measured_is_made_nevertheless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ModelRunner, "rehearse", lambda *_: [][0])
    with LLM(make_model(), memory_budget="1MiB", max_model_len=64) as llm:
        assert "no steps could be measured" in caplog.text
        assert llm.num_threads == {"decode": 2, "prefill": 2}
        assert len(generate(llm)) == 2


def products_depend_on_threads() -> bool:
    """Whether a product of torch's in float32 does: MKL divides some of them differently on Intel's CPUs."""
    row, weight = torch.randn(1, 512), torch.randn(1024, 512)
    before, products = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        products.append(torch.nn.functional.linear(row, weight))
    torch.set_num_threads(before)
    return not all(torch.equal(each, products[0]) for each in products)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_log_probabilities_do_not_depend_on_threads(dtype: str) -> None:
    """Not by a bit, where torch's products do not; the model is wide enough for them to be divided among threads."""
    model = make_model(hidden_size=512, intermediate_size=1024, num_attention_heads=8).to(getattr(torch, dtype))
    results = []
    for kv, count in covering(("virtual", "paged"), (1, 2, 3)):
        with LLM(model, kv=kv, num_threads=count, memory_budget="16MiB", max_model_len=128) as llm:
            results.append(generate(llm, max_tokens=effort(8, 24)))
    if dtype == "bfloat16" or not products_depend_on_threads():
        assert all(result == results[0] for result in results[1:])
    for result in results[1:]:
        for (tokens, logprobs), (first_tokens, first_logprobs) in zip(result, results[0], strict=True):
            assert tokens == first_tokens
            for token, here, there in zip(tokens, logprobs, first_logprobs, strict=True):
                assert here[token].logprob == pytest.approx(there[token].logprob, abs=1e-4)


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, "two", True])
def test_what_is_no_number_is_refused(num_threads: Any) -> None:
    with pytest.raises(ConfigError, match="num_threads"):
        LLM(make_model(), num_threads=num_threads)


def test_a_device_that_computes_by_itself_keeps_torchs_number(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(module.torch, "set_num_threads", calls.append)
    threads = Threads("auto", on_cpu=False)
    threads.measure(lambda _: pytest.fail("a step"), {"decode": 1, "prefill": 1})
    with threads.computing("decode", 4) as measuring, measuring:
        pass
    assert not calls
    assert threads.counts == {}
