"""Many clients, one engine thread: streams, back-pressure, cancellation, shutdown, and an engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from tests.support.backends import chosen
from tests.support.tiny_models import expected, make_model, make_prompts, make_tokenizer
from tests.support.waiting import SECONDS
from vattn.engine import (
    LLM,
    AsyncEngine,
    Counter,
    EngineStopped,
    Histogram,
    InvalidRequest,
    NotOffered,
    QueueFull,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    async_engine,
)
from vattn.engine.requests.structured import StructuredOutputs
from vattn.errors import ConfigError, VattnError

pytestmark = pytest.mark.slow(1)

GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=100)


def make_llm(kv: str = "paged", **keywords: Any) -> LLM:
    defaults = {"max_model_len": 128, "memory_budget": "4MiB", "tokenizer": make_tokenizer()}
    return LLM(make_model("llama"), **chosen(kv, **{**defaults, **keywords}))


@contextlib.asynccontextmanager
async def serving(llm: LLM, **keywords: Any) -> AsyncIterator[AsyncEngine]:
    """An engine that must be idle, with its books in order, when the test is done with it."""
    engine = AsyncEngine(llm, **keywords)
    try:
        yield engine
        await until(lambda: engine.num_unfinished == 0)
        await until(lambda: not llm.has_unfinished())
        llm.check()
        assert llm.core.kv.available() == llm.core.kv.total()
    finally:
        await engine.shutdown(timeout=0)
    assert not engine._thread.is_alive()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def hold(llm: LLM) -> threading.Event:
    """The engine does no step until the event is set."""
    step, event = llm.core.step, threading.Event()

    def waiting() -> list[RequestOutput]:
        assert event.wait(SECONDS)
        return step()

    llm.core.step = waiting  # type: ignore[method-assign]
    return event


async def collect(engine: AsyncEngine, *args: Any, **keywords: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args, **keywords)]


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(SECONDS):
            await test

    asyncio.run(limited())


def test_methods_of_vllm_that_are_not_offered_say_why() -> None:
    async def test() -> None:
        async with serving(make_llm()) as engine:
            with pytest.raises(NotOffered, match="AsyncEngine has no encode: the engine serves models that generate"):
                engine.encode  # type: ignore[attr-defined]  # noqa: B018

    run(test())


def test_deltas_add_up(kv: str) -> None:
    prompts = make_prompts([5, 9, 30])

    async def test() -> None:
        async with serving(make_llm(kv)) as engine:
            streams = await asyncio.gather(*(collect(engine, prompt, GREEDY) for prompt in prompts))
        for prompt, outputs in zip(prompts, streams, strict=True):
            want = expected("llama", prompt, 8)
            assert [output.outputs[0].token_ids for output in outputs] == [[token] for token in want]
            text = "".join(output.outputs[0].text for output in outputs)
            assert text.split() == [f"w{token}" for token in want if token > 1]
            assert [output.finished for output in outputs] == [False] * 7 + [True]
            assert outputs[-1].outputs[0].finish_reason == "length"

    run(test())


def test_the_engine_leaves_its_core_to_the_event_loop_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(async_engine.os, "sched_yield", lambda: left.append(threading.current_thread().name))

    async def test() -> None:
        async with serving(make_llm()) as engine:
            outputs = await collect(engine, make_prompts([5])[0], GREEDY)
        assert left == ["vattn-engine"] * len(outputs)

    run(test())


def test_other_kinds_of_output() -> None:
    prompt = make_prompts([5])[0]
    want = expected("llama", prompt, 8)

    async def test() -> None:
        async with serving(make_llm()) as engine:
            for kind, counts in ((RequestOutputKind.CUMULATIVE, range(1, 9)), (RequestOutputKind.FINAL_ONLY, [8])):
                params = SamplingParams(temperature=0, max_tokens=8, output_kind=kind)
                outputs = await collect(engine, prompt, params)
                assert [output.outputs[0].token_ids for output in outputs] == [want[:count] for count in counts]

    run(test())


def test_a_hundred_clients_of_which_ten_leave(kv: str) -> None:
    prompts = make_prompts([3 + i % 20 for i in range(100)])
    want = [expected("llama", prompt, 8) for prompt in prompts]

    async def leave(engine: AsyncEngine, prompt: list[int], after: int) -> None:
        outputs = engine.generate(prompt, LONG)
        for _ in range(after):
            await anext(outputs)
        await outputs.aclose()

    async def test() -> None:
        async with serving(make_llm(kv, max_num_seqs=8, max_num_batched_tokens=64)) as engine:
            tasks = [
                asyncio.create_task(leave(engine, prompt, i // 10) if i % 10 == 3 else collect(engine, prompt, GREEDY))
                for i, prompt in enumerate(prompts)
            ]
            for i, task in enumerate(tasks):
                outputs = await task
                if outputs is not None:
                    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
                    assert tokens == want[i]

    run(test())


def test_a_cancelled_task_aborts_its_request() -> None:
    want = expected("llama", [5, 6, 7], 8)

    async def test() -> None:
        llm = make_llm()
        go_on = hold(llm)
        async with serving(llm) as engine:
            tasks = [asyncio.create_task(collect(engine, [2, 3, 4], LONG)) for _ in range(200)]
            await until(lambda: engine.num_unfinished == 200)
            go_on.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(task.cancelled() for task in tasks)
            outputs = await collect(engine, [5, 6, 7], GREEDY)
            assert [token for output in outputs for token in output.outputs[0].token_ids] == want

    run(test())


def test_abort_by_name() -> None:
    async def test() -> None:
        llm = make_llm()
        go_on = hold(llm)
        async with serving(llm) as engine:
            stream = await engine.add([2, 3, 4], LONG, request_id="a")
            other = await engine.add([5, 6, 7], GREEDY, request_id="b")
            with pytest.raises(InvalidRequest, match="'a' is unfinished"):
                await engine.add([2], GREEDY, request_id="a")
            go_on.set()
            assert not (await anext(stream)).finished
            engine.abort("a")
            engine.abort("nobody")
            outputs = [output async for output in stream]
            assert (outputs[-1].finished, outputs[-1].outputs[0].finish_reason) == (True, "abort")
            assert len([output async for output in other]) == 8
            again = await engine.add([2, 3, 4], GREEDY, request_id="a")
            assert len([output async for output in again]) == 8

    run(test())


def test_names_are_text() -> None:
    async def test() -> None:
        llm = make_llm()
        go_on = hold(llm)
        async with serving(llm) as engine:
            stream = await engine.add([2, 3, 4], GREEDY, request_id="a")
            names: tuple[Any, ...] = (5, b"a", ["a"])
            for name in names:
                with pytest.raises(InvalidRequest, match=f"request_id is {re.escape(repr(name))}; give text"):
                    await engine.add([2], GREEDY, request_id=name)
                with pytest.raises(InvalidRequest, match=f"request_id is {re.escape(repr(name))}; give text"):
                    engine.abort(["a", name])
            for name in names[:2]:
                with pytest.raises(InvalidRequest, match=f"{re.escape(repr(name))}; give text, or a list of names"):
                    engine.abort(name)
            go_on.set()
            assert len([output async for output in stream]) == 8

    run(test())


def test_one_task_reads_a_stream() -> None:
    async def test() -> None:
        llm = make_llm()
        go_on = hold(llm)
        async with serving(llm) as engine:
            stream = await engine.add([2, 3], LONG)
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(VattnError, match="another task waits for 'async-0'"):
                await anext(stream)
            go_on.set()
            await first
            assert [output async for output in stream][-1].finished

    run(test())


def test_names_that_clients_chose_are_passed_over() -> None:
    async def test() -> None:
        llm = make_llm()
        go_on = hold(llm)
        async with serving(llm) as engine:
            streams = [await engine.add([2, 3], LONG, request_id="async-0"), await engine.add([2, 3], LONG)]
            streams += await engine.add_all([[2], [3]], LONG)
            assert [stream.request_id for stream in streams] == [f"async-{number}" for number in range(4)]
            go_on.set()
            for stream in streams:
                assert [output async for output in stream][-1].finished

    run(test())


def test_the_queue_is_bounded_all_or_nothing() -> None:
    async def test() -> None:
        llm = make_llm(max_num_seqs=2)
        go_on = hold(llm)
        async with serving(llm, max_num_queued_reqs=3) as engine:
            streams = [await engine.add([2, 3], LONG) for _ in range(3)]
            three = SamplingParams(n=3, max_tokens=5)
            with pytest.raises(
                QueueFull, match=r"3 more requests with 3 unfinished .* limit of 5: 2 .* and 3 that wait"
            ):
                await engine.add([2, 3], three)
            with pytest.raises(InvalidRequest, match=r"6 requests at once are over the limit of 5: 2 .* ask for fewer"):
                await engine.add_all([[2, 3], [4]], three)
            with pytest.raises(QueueFull, match="3 more"):
                await engine.add_all([[2, 3], [4], [5]], LONG)
            with pytest.raises(InvalidRequest, match="empty"):
                await engine.add_all([[2, 3], []], LONG)
            for prompts in ("two", None, {"prompt": "two"}):
                with pytest.raises(InvalidRequest, match="give a list of prompts"):
                    await engine.add_all(prompts, LONG)
            assert engine.num_unfinished == 3
            streams.append(await engine.add([2, 3], SamplingParams(n=2, max_tokens=5)))
            with pytest.raises(QueueFull):
                await engine.add([2, 3], GREEDY)
            go_on.set()
            for stream in streams:
                engine.abort(stream.request_id)
                assert [output async for output in stream][-1].finished
            assert len(await collect(engine, [2, 3], GREEDY)) == 8

    run(test())


def test_completions_that_have_ended_leave_their_places() -> None:
    """Also while others of the same prompt go on."""

    async def test() -> None:
        llm = make_llm(max_num_seqs=2)
        one_left, go_on = threading.Event(), threading.Event()

        def on_step(_: object) -> None:
            stream = engine._streams.get("both")
            if stream is not None and len(stream.group.unfinished()) == 1:
                one_left.set()
                go_on.wait()

        llm.on_step = on_step
        async with serving(llm, max_num_queued_reqs=0) as engine:
            # Of the two, one has such a token earlier than the other.
            params = SamplingParams(n=2, seed=2, temperature=2, max_tokens=100, stop_token_ids=list(range(2, 8)))
            stream = await engine.add([2, 3], params, "both")
            try:
                await until(one_left.is_set)
                assert engine.num_unfinished == 1
                other = await engine.add([2, 3], GREEDY)
                with pytest.raises(QueueFull, match="1 more requests with 2 unfinished"):
                    await engine.add([2, 3], GREEDY)
            finally:
                go_on.set()
            for each in (stream, other):
                assert [output async for output in each][-1].finished

    run(test())


def test_bad_input_reaches_its_own_client_only() -> None:
    want = expected("llama", [5, 6, 7], 100)

    async def test() -> None:
        async with serving(make_llm()) as engine:
            good = asyncio.create_task(collect(engine, [5, 6, 7], LONG))
            for bad, params, message in (
                ([], GREEDY, "empty"),
                ([2] * 128, GREEDY, "maximum context length is 128"),
                ([1000], GREEDY, "no token id"),
                ([2], SamplingParams(stop_token_ids=[1000]), "stop_token_ids holds 1000"),
            ):
                with pytest.raises(InvalidRequest, match=message):
                    await collect(engine, bad, params)
            tokens = [token for output in await good for token in output.outputs[0].token_ids]
            assert tokens == want

    run(test())


def test_a_failing_forward_is_told_to_its_clients_and_the_engine_goes_on() -> None:
    async def test() -> None:
        llm = make_llm(max_num_seqs=2)
        calls = iter(range(1000))

        def broken(*_: object) -> None:
            if next(calls) == 2:
                raise RuntimeError("a broken kernel")

        handle = llm.model.get_output_embeddings().register_forward_hook(broken)
        try:
            async with serving(llm) as engine:
                streams = await asyncio.gather(*(collect(engine, [5, 6, 7], GREEDY) for _ in range(4)))
        finally:
            handle.remove()
        lasts = [outputs[-1] for outputs in streams]
        failed = [last for last in lasts if last.error is not None]
        assert 1 <= len(failed) <= 2
        assert all(str(last.error) == "a broken kernel" for last in failed)
        assert all(last.outputs[0].finish_reason == "error" for last in failed)
        assert [last.outputs[0].finish_reason for last in lasts].count("length") == 4 - len(failed)

    run(test())


def test_the_death_of_the_engine_is_told_to_everybody(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        llm = make_llm(max_num_seqs=1)
        records = iter(range(1000))

        def on_step(_: object) -> None:
            if next(records) == 3:
                raise MemoryError("no more")

        llm.on_step = on_step
        engine = AsyncEngine(llm)
        results = await asyncio.gather(*(collect(engine, [5, 6, 7], LONG) for _ in range(3)), return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineStopped)
            assert "died of MemoryError: no more" in str(result)
            assert isinstance(result.__cause__, MemoryError)
        assert engine.dead
        with pytest.raises(EngineStopped, match="no more"):
            await engine.add([2], GREEDY)
        await engine.shutdown()

    run(test())
    assert "the engine died" in caplog.text


def test_an_engine_that_lost_memory_dies_of_it_once_it_is_idle(
    kv: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(llm: LLM) -> None:
        slot = llm.core.kv.allocate(40)
        llm.core.kv.prepare({slot: 40})
        if kv == "dynamic":  # which takes no memory before something is written
            monkeypatch.setattr(llm.core.kv, "_granted", llm.core.kv.total())

    async def test() -> None:
        llm = make_llm(kv)
        engine = AsyncEngine(llm)
        assert len(await collect(engine, [2, 3], GREEDY)) == 8
        lose(llm)
        with pytest.raises(EngineStopped, match="died of AssertionError") as raised:
            await collect(engine, [2, 3], GREEDY)
        assert isinstance(raised.value.__cause__, AssertionError)
        await engine.shutdown()

    run(test())
    assert "the engine died" in caplog.text


def test_an_engine_checks_itself_only_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, checks in (("1", 2), ("0", 0), ("", 0), (None, 0)):
        if value is None:
            monkeypatch.delenv("VATTN_CHECK")
        else:
            monkeypatch.setenv("VATTN_CHECK", value)
        with make_llm() as llm:
            calls: list[None] = []
            monkeypatch.setattr(llm.core, "check", lambda calls=calls: calls.append(None))
            llm.generate([[2, 3], [4]], GREEDY, use_tqdm=False)
            llm.add_request("a", [2], GREEDY)
            llm.abort("a")
            assert len(calls) == checks


@pytest.mark.parametrize(("timeout", "reason"), [(None, "length"), (1e300, "length"), (0, "abort"), (0.05, "abort")])
def test_shutdown(timeout: float | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        llm = make_llm()
        if reason == "abort":
            step, calls = llm.core.step, iter(range(10_000))
            slow = threading.Event()
            monkeypatch.setattr(llm.core, "step", lambda: (slow.wait(0.05) if next(calls) else None, step())[1])
        engine = AsyncEngine(llm)
        stream = await engine.add([2, 3, 4], LONG)
        waiting = asyncio.create_task(engine.shutdown(timeout=timeout))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped, match="shutting down"):
            await engine.add([2], GREEDY)
        outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].finish_reason == reason
        await waiting
        await engine.shutdown()
        assert not engine.dead
        with pytest.raises(VattnError, match="closed"):
            llm.step()

    run(test())


def test_a_shutdown_while_a_grammar_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        llm = make_llm()
        looking, go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(llm.core.intake, "has_grammar", lambda _: (looking.set(), go_on.wait(60), False)[2])
        engine = AsyncEngine(llm)
        params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="[a-z]{3}"))
        adding = asyncio.create_task(engine.add([2, 3], params))
        await asyncio.to_thread(looking.wait, 60)
        await engine.shutdown(timeout=0)
        go_on.set()
        with pytest.raises(EngineStopped, match="shutting down"):
            await adding

    run(test())


def test_a_client_whose_event_loop_is_gone() -> None:
    llm = make_llm()
    go_on = hold(llm)
    engine = AsyncEngine(llm)

    async def ask() -> None:
        await engine.add([2, 3, 4], LONG)

    async def test() -> None:
        await until(lambda: engine.num_unfinished == 0)
        assert len(await collect(engine, [2, 3], GREEDY)) == 8
        await engine.shutdown()

    asyncio.run(ask())
    go_on.set()
    run(test())


def test_what_cannot_be_served() -> None:
    with make_llm() as llm:
        with pytest.raises(ConfigError, match="max_num_queued_reqs is -1"):
            AsyncEngine(llm, max_num_queued_reqs=-1)
        llm.add_request("a", [2], GREEDY)
        with pytest.raises(ConfigError, match="unfinished requests"):
            AsyncEngine(llm)


def test_outputs_that_came_together_are_read_together() -> None:
    async def test() -> None:
        async with serving(make_llm()) as engine:
            stream = await engine.add([2, 3, 4], GREEDY)
            await until(lambda: engine.num_unfinished == 0)
            batch = await stream.ready()
            assert [len(output.outputs[0].token_ids) for output in batch] == [1] * 8
            assert await stream.ready() == []

    run(test())


def test_outputs_that_nobody_takes_are_put_together() -> None:
    """And are none the less what they were; of snapshots the last one is kept."""
    prompt = make_prompts([5])[0]
    want = expected("llama", prompt, 100)

    async def test() -> None:
        async with serving(make_llm()) as engine:
            for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
                params = SamplingParams(max_tokens=100, seed=3, n=2, logprobs=1, output_kind=kind)
                taken = await collect(engine, prompt, params)
                stream = await engine.add(prompt, params)
                await until(lambda: engine.num_unfinished == 0)
                waited = await stream.ready()
                assert len(waited) <= 100
                assert [output.finished for output in waited] == [False] * (len(waited) - 1) + [True]
                for index in (0, 1):
                    assert news(waited, index, kind) == news(taken, index, kind)
            stream = await engine.add(prompt, SamplingParams(temperature=0, max_tokens=100))
            await until(lambda: engine.num_unfinished == 0)
            assert [len(output.outputs[0].token_ids) for output in await stream.ready()] == [65] + [1] * 35
            (last,) = await collect(engine, prompt, SamplingParams(temperature=0, max_tokens=100, output_kind=FINAL))
            assert last.outputs[0].token_ids == want

    run(test())


FINAL = RequestOutputKind.FINAL_ONLY


def news(outputs: list[RequestOutput], index: int, kind: RequestOutputKind) -> tuple[list[int], str, list[Any], Any]:
    """Of one completion: its tokens, text, reports and end."""
    own = [each for output in outputs for each in output.outputs if each.index == index]
    if kind is RequestOutputKind.CUMULATIVE:
        own = own[-1:]
    return (
        [token for each in own for token in each.token_ids],
        "".join(each.text for each in own),
        [report for each in own for report in each.logprobs or ()],
        own[-1].finish_reason,
    )


def test_log_probabilities_that_nobody_takes_end_their_request() -> None:
    async def test() -> None:
        async with serving(make_llm(), max_waiting_logprobs=50) as engine:
            params = SamplingParams(temperature=0, max_tokens=100, logprobs=4, ignore_eos=True)
            taken = await collect(engine, [2, 3, 4], params)
            assert sum(len(output.outputs[0].token_ids) for output in taken) == 100
            # What was in an output is not kept.
            stream = await engine.add([2, 3, 4], params)
            await anext(stream)
            assert stream.group.requests[0].logprobs is not None
            assert not stream.group.requests[0].logprobs[0]
            await until(lambda: engine.num_unfinished == 0)
            *_, last = await stream.ready()
            assert last.outputs[0].finish_reason == "abort"

    run(test())


def test_log_probabilities_of_streams_that_were_added_together_wait_under_one_limit() -> None:
    async def test() -> None:
        prompts = make_prompts([3, 4, 5, 6, 7, 8, 9, 10])
        params = SamplingParams(temperature=0, max_tokens=100, logprobs=4, ignore_eos=True)
        llm, loop = make_llm(), asyncio.get_running_loop()
        step = llm.core.step

        def after_the_last() -> list[RequestOutput]:
            """A step, once the outputs of the one before wait in their streams."""
            handed = threading.Event()
            loop.call_soon_threadsafe(handed.set)
            assert handed.wait(SECONDS)
            return step()

        llm.core.step = after_the_last  # type: ignore[method-assign]
        async with serving(llm, max_waiting_logprobs=500) as engine:
            alone = [await engine.add(prompt, params) for prompt in prompts]
            together = await engine.add_all(prompts, params)
            await until(lambda: engine.num_unfinished == 0)
            for streams, reason in ((alone, "length"), (together, "abort")):
                assert [(await stream.ready())[-1].outputs[0].finish_reason for stream in streams] == [reason] * 8
            assert together[0].waiting.logprobs == 0

    run(test())


def test_an_idle_engine_waits_for_announced_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(async_engine, "_GATHER_SECONDS", 60)
        llm = make_llm()
        running: list[int] = []
        llm.on_step = lambda _: running.append(len(llm.core.scheduler.running))
        async with serving(llm) as engine:
            other = asyncio.create_task(collect(engine, [2, 3, 4], GREEDY))
            with engine.announce():
                await until(lambda: engine.num_unfinished == 1)
                await collect(engine, [3, 4, 5], GREEDY)
            await other
            assert running[0] == 2
            with engine.announce():
                pass  # one that never comes
            await collect(engine, [4, 5, 6], GREEDY)

    run(test())


def test_calls_between_steps() -> None:
    async def test() -> None:
        llm = make_llm()
        async with serving(llm) as engine:
            stream = await engine.add([2, 3, 4], LONG)
            assert await engine.call(threading.current_thread) is engine._thread
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda: 1 // 0)
            assert len([output async for output in stream]) == 100
            await engine.reset_prefix_cache()
            assert await engine.get_tokenizer() is llm.tokenizer
        with pytest.raises(EngineStopped, match="shut down"):
            await engine.call(llm.check)

    run(test())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_call_or_on_step_that_aborts_a_request_ends_its_stream(kind: RequestOutputKind) -> None:
    async def test() -> None:
        aborting: list[str] = []
        llm = make_llm(on_step=lambda record: [llm.abort(aborting.pop()) for _ in aborting[:]])
        async with serving(llm) as engine:
            params = LONG.clone(output_kind=kind)
            streams = [await engine.add([2, 3, number], params, f"{number}") for number in range(3)]
            await engine.call(lambda: llm.abort("1"))
            aborting.append("2")
            outputs = [[output async for output in stream] for stream in streams]
            assert [each[-1].outputs[0].finish_reason for each in outputs if each[-1].outputs] == (
                ["length"] if kind is RequestOutputKind.DELTA else ["length", "abort", "abort"]
            )
            assert all(each[-1].finished for each in outputs)
            assert engine.num_unfinished == 0
            assert await collect(engine, [2, 3, 4], GREEDY, request_id="1"), "the name is free"

    run(test())


def test_calls_as_of_vllm() -> None:
    async def test() -> None:
        async with serving(make_llm()) as engine:
            outputs = [output async for output in engine.generate([2, 3, 4], GREEDY, "mine", lora_request=None)]
            assert {output.request_id for output in outputs} == {"mine"}
            with pytest.raises(InvalidRequest, match="lora_request: adapters are not served"):
                await engine.add([2, 3, 4], GREEDY, "other", lora_request="adapter")  # type: ignore[arg-type]
            assert engine.num_unfinished == 0

    run(test())


def test_every_request_is_counted_once() -> None:
    async def test() -> None:
        llm = make_llm()
        engine = AsyncEngine(llm)
        left = await engine.add([2, 3, 4], LONG, request_id="left")
        await anext(left)
        engine.abort("left")
        assert [output async for output in left][-1].finished
        await collect(engine, [2, 3, 4], GREEDY, request_id="whole")
        found = {metric.name: metric for metric in await engine.get_metrics()}
        latency = found["vllm:e2e_request_latency_seconds"]
        assert isinstance(latency, Histogram)
        assert latency.count == 2
        llm.on_step = lambda _: 1 // 0
        with pytest.raises(EngineStopped, match="ZeroDivisionError"):
            await collect(engine, [2, 3, 4], GREEDY, request_id="fallen")
        ends = {
            metric.labels["finished_reason"]: metric.value
            for metric in llm.core.counted()
            if isinstance(metric, Counter) and metric.name == "vllm:request_success"
        }
        assert ends == {"abort": 1, "length": 1, "stop": 0, "error": 1}
        await engine.shutdown()

    run(test())
