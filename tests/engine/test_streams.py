"""Outputs of several streams as they come: all of them, in order, by one task, and errors after what came before."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.engine.test_async_engine import GREEDY, make_llm, serving
from tests.support.tiny_models import expected, make_prompts
from tests.support.waiting import SECONDS
from vattn.engine import CompletionOutput, EngineStopped, RequestMetrics, RequestOutput, RequestOutputKind, Stream
from vattn.engine.streams import as_they_come

pytestmark = pytest.mark.slow(1)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, SECONDS))


def make_stream(name: str = "a") -> Stream:
    return Stream(cast(Any, SimpleNamespace(request_id=name, kind=RequestOutputKind.DELTA)))


def output(token: int, *, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, "", [token], None, None, None, "length" if finished else None, None)
    return RequestOutput("a", None, [1], None, [completion], finished, RequestMetrics(0, None, None, None, 0))


def tokens_of(batch: list[tuple[int, RequestOutput]]) -> list[tuple[int, int]]:
    return [(number, token) for number, output in batch for token in output.outputs[0].token_ids]


def test_each_stream_is_what_it_is_alone() -> None:
    prompts = make_prompts([5, 9, 1, 30, 12, 7])
    want = [expected("llama", prompt, 8) for prompt in prompts]

    async def test() -> None:
        async with serving(make_llm()) as engine:
            found: list[list[int]] = [[] for _ in prompts]
            streams = await engine.add_all(prompts, GREEDY)
            tasks = len(asyncio.all_tasks())
            async for batch in as_they_come(streams, 2):
                assert len(asyncio.all_tasks()) == tasks
                assert len({number for number, _ in batch}) <= 2
                for number, token in tokens_of(batch):
                    found[number].append(token)
            assert found == want

    run(test())


def test_what_came_before_an_error_is_read_first() -> None:
    async def test() -> None:
        streams = [make_stream(), make_stream()]
        error = EngineStopped("ended")
        streams[1].put(output(7))
        streams[1].put(error)
        batches = as_they_come(streams, 8)
        assert tokens_of(await anext(batches)) == [(1, 7)]
        with pytest.raises(EngineStopped) as caught:
            await anext(batches)
        assert caught.value is error

    run(test())


@pytest.mark.parametrize("most", [1, 8])
def test_an_error_of_all_streams_is_read_after_what_waited_in_each(most: int) -> None:
    async def test() -> None:
        streams = [make_stream() for _ in range(3)]
        streams[1].put(output(7))
        streams[2].put(output(8, finished=True))
        for stream in streams:
            stream.put(EngineStopped("ended"))
        found = []
        with pytest.raises(EngineStopped):
            async for batch in as_they_come(streams, most):
                found += tokens_of(batch)
        assert found == [(1, 7), (2, 8)]

    run(test())


def test_an_error_after_the_end_is_of_no_interest() -> None:
    async def test() -> None:
        streams = [make_stream(), make_stream()]
        streams[0].put(output(7, finished=True))
        batches = as_they_come(streams, 8)
        assert tokens_of(await anext(batches)) == [(0, 7)]
        streams[0].put(EngineStopped("ended"))
        streams[1].put(output(8, finished=True))
        assert tokens_of(await anext(batches)) == [(1, 8)]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    run(test())


def test_no_stream_waits_for_one_that_has_more() -> None:
    async def test() -> None:
        streams = [make_stream() for _ in range(3)]
        for each in streams:
            each.put(output(0))
        batches = as_they_come(streams, 2)
        assert tokens_of(await anext(batches)) == [(0, 0), (1, 0)]
        streams[0].put(output(1))
        assert tokens_of(await anext(batches)) == [(2, 0), (0, 1)]
        # What nobody takes waits in its stream, which puts it together.
        for token in range(100):
            streams[1].put(output(token))
        batch = await anext(batches)
        assert tokens_of(batch) == [(1, token) for token in range(100)]
        assert len(batch) < 100
        await batches.aclose()
        streams[2].put(output(3))
        assert await streams[2].ready() == [output(3)]

    run(test())
