"""One thread at a time, and calls that end in their middle: threads, close(), interrupts, callbacks that raise."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.campaign.injection import events, interrupted
from tests.support import scripts
from tests.support.backends import PAGED_WINDOWS, chosen
from tests.support.effort import effort
from tests.support.target import EXAMPLES
from tests.support.tiny_models import expected, make_model, make_prompts, make_smallest_model, make_tokenizer
from tests.support.waiting import SECONDS
from vattn import engine as engine_package
from vattn.engine import (
    LLM,
    AsyncEngine,
    BeamSearchParams,
    EngineBusy,
    EngineClosed,
    EngineStopped,
    InvalidRequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StepRecord,
)
from vattn.errors import ConfigError, VattnError

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ENGINE_FILES = str(Path(engine_package.__file__).parent)


def make_llm(kv: str = "paged", **keywords: Any) -> LLM:
    defaults = {"max_model_len": 128, "memory_budget": "4MiB", "tokenizer": make_tokenizer()}
    return LLM(make_model("llama"), **chosen(kv, **{**defaults, **keywords}))


@pytest.fixture(scope="module", autouse=True)
def references() -> None:
    """While an LLM is open, its model cannot say what it should give."""
    for prompt in ([5, 6, 7], *make_prompts([5, 9, 30, 12])):
        expected("llama", prompt, 8)
    expected("llama", [5, 6, 7], 1)


def assert_idle(llm: LLM) -> None:
    assert not llm.has_unfinished()
    llm.check()
    assert llm.core.kv.available() == llm.core.kv.total()
    stats = llm.core.kv.stats()
    assert stats.used_bytes == stats.live_bytes == 0


def held(llm: LLM) -> tuple[threading.Event, threading.Event]:
    """The model waits in each step until the second event is set; the first says that it does."""
    arrived, go_on = threading.Event(), threading.Event()
    compute = llm.core.runner.run

    def run(entries: Any) -> Any:
        arrived.set()
        assert go_on.wait(SECONDS)
        return compute(entries)

    llm.core.runner.run = run  # type: ignore[method-assign]
    return arrived, go_on


class Caller(threading.Thread):
    """A call in a thread of its own, and how it ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.join(SECONDS)
        assert not self.is_alive(), "the call hangs"


def test_a_second_thread_is_refused_at_once_and_changes_nothing(kv: str) -> None:
    with make_llm(kv) as llm:
        arrived, go_on = held(llm)
        first = Caller(lambda: llm.generate([5, 6, 7], GREEDY, use_tqdm=False))
        assert arrived.wait(SECONDS)
        messages = [{"role": "user", "content": "w2"}]
        for name, call in {
            "generate": lambda: llm.generate([2, 3], GREEDY, use_tqdm=False),
            "chat": lambda: llm.chat(messages, GREEDY, chat_template="w2", use_tqdm=False),
            "beam_search": lambda: llm.beam_search([2, 3], BeamSearchParams(beam_width=2, max_tokens=2)),
            "add_request": lambda: llm.add_request("a", [2, 3], GREEDY),
            "abort": lambda: llm.abort("0"),
            "step": lambda: llm.step(),
            "get_metrics": lambda: llm.get_metrics(),
            "AsyncEngine": lambda: AsyncEngine(llm),
        }.items():
            said = "generate" if name == "chat" else name
            with pytest.raises(EngineBusy, match=f"{said} was called .* while generate runs .* one thread at a time"):
                call()
        go_on.set()
        first.finish()
        assert first.result[0].outputs[0].token_ids == expected("llama", [5, 6, 7], 8)
        assert_idle(llm)


def test_threads_that_take_turns() -> None:
    prompts = make_prompts([5, 9, 30])
    lock = threading.Lock()
    with make_llm() as llm:

        def one(prompt: list[int]) -> list[int]:
            with lock:
                return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

        callers = [Caller(lambda prompt=prompt: one(prompt)) for prompt in prompts * 3]
        for caller, prompt in zip(callers, prompts * 3, strict=True):
            caller.finish()
            assert caller.result == expected("llama", prompt, 8)


def test_many_threads_at_once() -> None:
    """Each gets the right tokens or is told that the engine is busy; some get through."""
    prompts = make_prompts([5, 9, 30, 12])
    counts: Counter[str] = Counter()
    with make_llm() as llm:
        for _ in range(10):
            barrier = threading.Barrier(len(prompts))

            def one(prompt: list[int], barrier: threading.Barrier = barrier) -> list[int]:
                barrier.wait()
                return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

            callers = [Caller(lambda prompt=prompt: one(prompt)) for prompt in prompts]
            for caller, prompt in zip(callers, prompts, strict=True):
                caller.finish()
                if caller.error is None:
                    assert caller.result == expected("llama", prompt, 8)
                counts[type(caller.error).__name__] += 1
        assert_idle(llm)
    assert set(counts) <= {"NoneType", "EngineBusy"}
    assert counts["NoneType"] >= 10


def test_close_waits_for_the_step_of_another_thread(kv: str) -> None:
    llm = make_llm(kv)
    arrived, go_on = held(llm)
    generating = Caller(lambda: llm.generate([5, 6, 7], GREEDY, use_tqdm=False))
    assert arrived.wait(SECONDS)
    closing = [Caller(llm.close) for _ in range(2)]
    time.sleep(0.05)
    assert all(caller.is_alive() for caller in closing), "the cache was closed under a running step"
    go_on.set()
    for caller in (generating, *closing):
        caller.finish()
    assert isinstance(generating.error, EngineClosed)
    assert all(caller.error is None for caller in closing)
    assert not llm.has_unfinished()
    with pytest.raises(EngineClosed):
        llm.generate([5], GREEDY, use_tqdm=False)
    llm.close()


def test_close_from_on_step(kv: str) -> None:
    llm = make_llm(kv)
    llm.on_step = lambda record: llm.close()
    with pytest.raises(EngineClosed):
        llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    assert llm.model.config._attn_implementation != "vattn", "it was not torn down"
    assert not llm.has_unfinished()
    assert llm.abort("0") is None

    llm = make_llm(kv)
    llm.add_request("a", [5, 6, 7], GREEDY)
    llm.on_step = lambda record: llm.close()
    assert [output.request_id for output in llm.step()] == ["a"]
    with pytest.raises(EngineClosed):
        llm.step()
    with pytest.raises(EngineClosed):
        llm.add_request("b", [5, 6, 7], GREEDY)


def test_close_under_an_async_engine() -> None:
    async def one(engine: AsyncEngine) -> None:
        async for _ in engine.generate([2, 3, 4], SamplingParams(temperature=0, max_tokens=100)):
            pass

    async def test(requests: int, steps: int) -> None:
        llm = make_llm(max_num_seqs=4)
        step, begun, arrived = llm.core.step, itertools.count(), threading.Event()

        def bounded() -> Any:
            """So many steps: no request ends before the close."""
            if next(begun) < steps:
                return step()
            arrived.set()
            time.sleep(0.001)
            return []

        llm.core.step = bounded  # type: ignore[method-assign]
        engine = AsyncEngine(llm)
        tasks = [asyncio.create_task(one(engine)) for _ in range(requests)]
        if requests:
            assert await asyncio.to_thread(arrived.wait, SECONDS)
        llm.close()
        async with asyncio.timeout(SECONDS):
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, EngineStopped) for result in results)
            assert all("its LLM was closed" in str(result) for result in results)
            with pytest.raises(EngineStopped):
                await engine.add([2], GREEDY)
            assert engine.dead
            await engine.shutdown()
        assert not engine._thread.is_alive()

    for requests, steps in ((0, 0), (10, 0), (10, 20)):
        asyncio.run(test(requests, steps))


def test_an_async_engine_has_its_llm_alone() -> None:
    async def test() -> None:
        llm = make_llm()
        engine = AsyncEngine(llm)
        with pytest.raises(EngineBusy, match="AsyncEngine runs in 'vattn-engine'"):
            llm.generate([2, 3], GREEDY, use_tqdm=False)
        with pytest.raises(EngineBusy):
            AsyncEngine(llm)
        assert len([output async for output in engine.generate([2, 3], GREEDY)]) == 8
        with pytest.raises(ConfigError, match="timeout is -1"):
            await engine.shutdown(timeout=-1)
        await engine.shutdown()
        with pytest.raises(EngineClosed):
            AsyncEngine(llm)

    asyncio.run(test())


def test_an_engine_thread_at_the_interpreters_exit() -> None:
    """It is stopped before memory is given back, without a word."""
    code = """
import asyncio
from tests.engine.test_exclusive import make_llm, AsyncEngine, SamplingParams

async def main():
    engine = AsyncEngine(make_llm("virtual"))
    async for _ in engine.generate([2, 3], SamplingParams(temperature=0, max_tokens=100)):
        break
    stream = await engine.add([2, 3], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))

asyncio.run(main())
"""
    done = scripts.run(code, to_the_end=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("how", ["ends", "closes"])
def test_a_child_of_an_async_engines_process_does_not_wait_for_its_thread(how: str) -> None:
    """Nor for a lock that a thread of the parent had."""
    code = f"""
import os, signal, sys, threading
from tests.engine.test_exclusive import make_llm, AsyncEngine

llm = make_llm()
engine = AsyncEngine(llm)
locked, go_on = threading.Event(), threading.Event()

def lock():
    with engine._changed:
        locked.set()
        go_on.wait()

threading.Thread(target=lock).start()
locked.wait()
child = os.fork()
if not child:
    signal.alarm({SECONDS})
    if sys.argv[1] == "closes":
        llm.close()
    sys.exit()
go_on.set()
assert os.waitpid(child, 0)[1] == 0
llm.close()
"""
    done = scripts.run(code, how, to_the_end=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_on_step_raises_costs_no_output(kv: str) -> None:
    with make_llm(kv) as llm:
        for name in "ab":
            llm.add_request(name, [5, 6, 7], SamplingParams(temperature=0, max_tokens=1))

        def late(record: StepRecord) -> None:
            raise RuntimeError("late")

        llm.on_step = late
        with pytest.raises(RuntimeError, match="late"):
            llm.step()
        assert llm.has_unfinished()
        llm.check()
        aborted = llm.abort("a")
        assert aborted is not None
        assert aborted.outputs[0].finish_reason == "length"
        outputs = llm.step()
        assert [(output.request_id, output.finished) for output in outputs] == [("b", True)]
        assert outputs[0].outputs[0].token_ids == expected("llama", [5, 6, 7], 1)
        assert_idle(llm)

        with pytest.raises(RuntimeError, match="late"):
            llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
        assert_idle(llm)


def test_calls_from_on_step() -> None:
    with make_llm() as llm:
        seen: list[type[BaseException]] = []

        def on_step(record: StepRecord) -> None:
            for call in (llm.step, lambda: llm.generate([2], GREEDY, use_tqdm=False)):
                with pytest.raises(VattnError) as caught:
                    call()
                seen.append(caught.type)
            assert llm.abort("a") is not None
            llm.add_request("b", [5, 6, 7], GREEDY)
            llm.on_step = None

        llm.on_step = on_step
        llm.add_request("a", [5, 6, 7], GREEDY)
        assert llm.step() == []
        assert seen[0] is EngineBusy
        outputs = [output for _ in range(8) for output in llm.step()]
        assert outputs[-1].outputs[0].token_ids == expected("llama", [5, 6, 7], 8)
        assert_idle(llm)


def test_a_signal_handler_in_a_step() -> None:
    with make_llm() as llm:
        compute, refused = llm.core.runner.run, []

        def run(entries: Any) -> Any:
            for call in (lambda: llm.abort("a"), lambda: llm.add_request("b", [2], GREEDY), llm.step):
                with pytest.raises(EngineBusy, match="middle of a step"):
                    call()
                refused.append(call)
            return compute(entries)

        llm.core.runner.run = run  # type: ignore[method-assign]
        llm.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=1))
        assert llm.step()[0].outputs[0].token_ids == expected("llama", [5, 6, 7], 1)
        assert len(refused) == 3
        assert_idle(llm)


# Interrupts


class Interrupter:
    """Counts entries into functions of the engine, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.entered: list[CodeType] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        # A generator expression that is left early is entered once more, where nothing can be raised.
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ENGINE_FILES) and code.co_name != "<genexpr>":
            self.entered.append(frame.f_code)
            if len(self.entered) == self.at:
                raise KeyboardInterrupt

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


def moments(call: Callable[[], object]) -> list[int]:
    """An entry of each function that a call enters, in the middle of it, by number; not all."""
    counter = Interrupter()
    with counter.watching():
        call()
    places: dict[CodeType, list[int]] = {}
    for number, code in enumerate(counter.entered, start=1):
        places.setdefault(code, []).append(number)
    middles = sorted(numbers[len(numbers) // 2] for numbers in places.values())
    return middles[:: -(-effort(2, 1) * len(middles) // EXAMPLES)]


def small_llm(kv: str, **keywords: Any) -> LLM:
    """Short of memory, so that requests are preempted in both ways."""
    sizes = {"page_size": 8192, "layout": "fused"} if kv == "virtual" else {}
    budget = 6 * 8192 if kv != "static" else 4 * 128 * 256
    defaults = {"max_model_len": 128, "max_num_seqs": 4, "memory_budget": budget, "kv_options": sizes}
    block_size = 16 if kv == PAGED_WINDOWS else 8
    common = {"tokenizer": make_tokenizer(), "max_num_batched_tokens": 32, "preemption_mode": "swap"}
    return LLM(make_smallest_model(), **chosen(kv, **{"block_size": block_size, **defaults, **common, **keywords}))


PROMPTS = [[*range(2, 40)], [*range(2, 40), 50], [7] * 20, [*range(60, 90)], [5, 6]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=12, stop=["w1 w1"], logprobs=1),
    SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.1),
    SamplingParams(temperature=1, seed=5, max_tokens=4, n=3),
    SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
]


def run_all(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.slow
def test_an_interrupt_of_generate(main_kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.engine.scheduling.scheduler.HEADROOM_TOKENS", 2)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with small_llm(main_kv, speculative_config=drafts) as llm:
        want = run_all(llm)
        interrupted = 0
        for moment in moments(lambda: run_all(llm)):
            try:
                with Interrupter(moment).watching():
                    run_all(llm)
            except KeyboardInterrupt:
                interrupted += 1
            assert_idle(llm)
            assert llm.core.scheduler.swap is not None
            assert llm.core.scheduler.swap.used_bytes == 0
            assert llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids == want[0][0]
        assert run_all(llm) == want
        assert interrupted > EXAMPLES // 4


@pytest.mark.slow
def test_an_interrupt_of_beam_search(caching_kv: str) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    with small_llm(caching_kv) as llm:
        want = llm.beam_search(PROMPTS[:2], params)
        tried = moments(lambda: llm.beam_search(PROMPTS[:2], params))
        interrupted = 0
        for moment in tried:
            try:
                with Interrupter(moment).watching():
                    llm.beam_search(PROMPTS[:2], params)
            except KeyboardInterrupt:
                interrupted += 1
            assert_idle(llm)
        assert llm.beam_search(PROMPTS[:2], params) == want
        assert interrupted > len(tried) // 2


def drive(llm: LLM) -> tuple[dict[str, Any], int]:
    """Requests that come and go one step at a time, an abort among them; interrupts are counted and gone on after."""
    ended: dict[str, Any] = {}
    interrupts = 0

    def attempt(call: Callable[[], Any]) -> Any:
        nonlocal interrupts
        try:
            return call()
        except KeyboardInterrupt:
            interrupts += 1
            if not llm.core._torn:
                llm.check()
            return None

    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        name = str(number)
        while name not in llm.core._groups and name not in ended:
            attempt(lambda name=name, prompt=prompt, params=params: llm.add_request(name, prompt, params))
        for output in attempt(llm.step) or ():
            if output.finished:
                ended[output.request_id] = output
    attempt(lambda: llm.abort("2"))
    for _ in range(500):
        for output in attempt(llm.step) or ():
            if output.finished:
                assert output.request_id not in ended, "a request ended twice"
                ended[output.request_id] = output
        if attempt(llm.has_unfinished) is False:
            break
    return ended, interrupts


@pytest.mark.slow
def test_an_interrupt_of_step_fails_what_ran_and_the_rest_goes_on(
    main_kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vattn.engine.scheduling.scheduler.HEADROOM_TOKENS", 2)
    with small_llm(main_kv) as llm:
        want = run_all(llm)
        tried = moments(lambda: drive(llm))
        interrupted = 0
        for moment in tried:
            with Interrupter(moment).watching():
                ended, interrupts = drive(llm)
            interrupted += interrupts
            assert interrupts <= 1
            assert_idle(llm)
            assert {"0", "1", "3", "4"} - set(ended) == set(), "a request was lost"
            for name, output in ended.items():
                for completion, whole in zip(output.outputs, want[int(name)], strict=True):
                    assert completion.token_ids == whole[: len(completion.token_ids)]
                    if completion.finish_reason == "error":
                        assert interrupts
                        assert "interrupted by KeyboardInterrupt" in str(output.error)
                    else:
                        assert completion.token_ids == whole
        assert interrupted > len(tried) // 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that is left early
def test_an_interrupt_of_step_costs_no_news() -> None:
    """What an interrupted step does not return, the next one does: at any place where Python looks for signals."""
    kinds = [RequestOutputKind.DELTA, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]
    lengths = [3, 6, 3]
    with small_llm("paged", max_num_batched_tokens=64) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=6)
        whole = llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0]

        def attempt(nth: int) -> tuple[int, bool]:
            """The third step, in which two requests end, interrupted; how many places it has, and whether it was."""
            news: list[tuple[list[int], str]] = [([], "") for _ in kinds]
            ended: dict[int, str | None] = {}
            hit = False

            def take(outputs: list[RequestOutput]) -> None:
                for output in outputs:
                    number = int(output.request_id)
                    assert number not in ended, "a request ended twice"
                    for completion in output.outputs:
                        tokens, text = news[number]
                        news[number] = [*tokens, *completion.token_ids], text + completion.text
                        assert len(completion.logprobs or ()) == len(completion.token_ids)
                        assert all(completion.logprobs or ()), "a report was lost"
                    if output.finished:
                        ended[number] = "" if output.error is None else str(output.error)

            for number, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
                params = SamplingParams(temperature=0, max_tokens=length, output_kind=kind, logprobs=1)
                llm.add_request(str(number), [5, 6, 7], params)
            for _ in range(2):
                take(llm.step())
            try:
                take(interrupted(llm.step, "check", nth))
            except KeyboardInterrupt:
                hit = True
            places = events()
            while llm.has_unfinished():
                take(llm.step())
            assert ended.keys() == {0, 1, 2}
            for number, (tokens, text) in enumerate(news):
                count = len(tokens) if ended[number] else lengths[number]
                assert tokens == whole.token_ids[:count]
                assert whole.text.startswith(text)
                assert bool(text) == bool(tokens)
            assert_idle(llm)
            return places, hit

        places, _ = attempt(1 << 60)
        tried = range(places - 130, places + 1, effort(3, 1))
        assert sum(attempt(nth)[1] for nth in tried) > len(tried) - 10


@pytest.mark.slow
def test_an_interrupt_while_an_interrupt_is_mended(caching_kv: str) -> None:
    """The next call does what is left."""
    with small_llm(caching_kv) as llm:
        want = run_all(llm)
        restore = llm.core.scheduler.restore
        again_at = []

        def again(*args: Any) -> None:
            again_at.append(moment)
            monkey.undo()
            raise KeyboardInterrupt

        tried = moments(lambda: run_all(llm))[::4]
        for moment in tried:
            with pytest.MonkeyPatch.context() as monkey:
                monkey.setattr(llm.core.scheduler, "restore", again)
                with contextlib.suppress(KeyboardInterrupt), Interrupter(moment).watching():
                    run_all(llm)
            llm.core.scheduler.restore = restore  # type: ignore[method-assign]
            assert run_all(llm) == want
            assert_idle(llm)
        assert again_at, "no interrupt was mended"


def test_an_interrupt_in_the_engine_thread_is_told_to_every_stream() -> None:
    async def one(engine: AsyncEngine) -> None:
        async for _ in engine.generate([2, 3, 4], GREEDY):
            pass

    async def test(method: str, call: int) -> None:
        llm = make_llm(max_num_seqs=2)
        engine = AsyncEngine(llm)
        original, calls = getattr(engine, method), iter(range(1000))

        def interrupted(*args: Any) -> Any:
            result = original(*args) if method == "_take_orders" else None
            if next(calls) == call:
                raise KeyboardInterrupt
            return original(*args) if result is None else result

        setattr(engine, method, interrupted)
        tasks = [asyncio.create_task(one(engine)) for _ in range(4)]
        async with asyncio.timeout(SECONDS):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, EngineStopped) for result in results)
        assert all(result is None or isinstance(result, EngineStopped) for result in results)
        await engine.shutdown()

    for method in ("_hand_over", "_take_orders"):
        for call in (1, 3):
            asyncio.run(test(method, call))


def test_an_interrupt_of_a_call_is_told_to_its_caller() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    async def test() -> None:
        engine = AsyncEngine(make_llm())
        async with asyncio.timeout(SECONDS):
            with pytest.raises(EngineStopped, match="it died of KeyboardInterrupt"):
                await engine.call(interrupt)
            await engine.shutdown()
        assert engine.dead

    asyncio.run(test())


def test_bad_arguments_of_requests() -> None:
    with make_llm() as llm:
        for call, message in (
            (lambda: llm.add_request(5, [2], GREEDY), "request_id is 5; give text"),  # type: ignore[arg-type]
            (lambda: llm.add_request(["a"], [2], GREEDY), r"request_id is \['a'\]; give text"),  # type: ignore[arg-type]
            (lambda: llm.abort(["a"]), r"request_id is \['a'\]; give text"),  # type: ignore[arg-type]
            (lambda: llm.abort(5), "request_id is 5; give text"),  # type: ignore[arg-type]
            (lambda: llm.add_request("a", [2], GREEDY, priority="x"), "priority is 'x'"),  # type: ignore[arg-type]
            (lambda: llm.add_request("a", [2], GREEDY, priority=2**70), "whole number of 64 bits"),
            (lambda: llm.add_request("a", [2], "x"), "sampling_params is 'x'"),  # type: ignore[arg-type]
            (lambda: llm.beam_search([2], GREEDY), "give BeamSearchParams"),  # type: ignore[arg-type]
            (lambda: llm.chat("hello"), "a conversation is a list of messages"),  # type: ignore[arg-type]
            (lambda: llm.chat(None), "a conversation is a list of messages"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidRequest, match=message):
                call()
        assert_idle(llm)
