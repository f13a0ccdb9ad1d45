"""Requests over HTTP, timed by a clock that the test holds.

A server that waits for the client's clock sends its next piece only when the last one was timed, so every timestamp
belongs to a known piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.fake_openai import DONE, FakeOpenAI, delta, event, refusal, text, usage
from tests.support.waiting import SECONDS
from vattn.engine.loadgen.client import ENDPOINTS, Backend, Target, list_models, send_all
from vattn.engine.loadgen.samples import Sample
from vattn.engine.loadgen.summary import Timing, summarize
from vattn.errors import ConfigError

SAMPLE = Sample("w5 w6", 2, 4)


def measure(
    server: FakeOpenAI,
    samples: Sequence[Sample] = (SAMPLE,),
    *,
    backend: Backend = "openai",
    fields: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Timing], float]:
    async def run() -> tuple[list[Timing], float]:
        async with server.running() as address:
            target = Target(url=address + ENDPOINTS[backend], model="fake", backend=backend, fields=fields or {})
            return await send_all(target, samples, [0.0] * len(samples), **options)

    return asyncio.run(run())


class Clock:
    """Shows given times, one after the other, and tells a server when it was looked at."""

    def __init__(self, *times: float) -> None:
        self._times, self._looks = list(times), asyncio.Semaphore(0)

    def __call__(self) -> float:
        self._looks.release()
        return self._times.pop(0)

    async def paced(self, pieces: Sequence[Sequence[bytes]], looks: int) -> AsyncIterator[bytes]:
        """Pieces in groups: the first after `looks` looks at the clock, and each further one after another look."""
        for _ in range(looks):
            await self._looks.acquire()
        for number, group in enumerate(pieces):
            if number:
                await self._looks.acquire()
            for piece in group:
                yield piece


def test_the_times_of_a_stream() -> None:
    # The run, the request's turn, its start; then a look for each group of tokens; then the end of the run.
    clock = Clock(99.0, 99.5, 100.0, 100.5, 100.6, 100.9, 101.4, 103.0)
    first = text("a")
    groups = [
        [b": ping\n\n", first[:7], first[7:]],
        [text("b")],
        [text("")],  # a token without text, such as a part of a character
        [text("d") + usage(9, 5), DONE],
    ]
    (timing,), duration = measure(FakeOpenAI(lambda body: clock.paced(groups, looks=3)), clock=clock)
    assert timing.error is None
    assert timing.token_times == [100.5, 100.6, 100.9, 101.4]
    assert (timing.start, timing.queued, timing.text) == (100.0, 0.5, "abd")
    assert (timing.prompt_tokens, timing.output_tokens) == (9, 5)
    assert duration == 4.0
    result = summarize([timing], duration, metrics=("ttft", "tpot", "itl", "e2el"))
    assert result["mean_ttft_ms"] == pytest.approx(500)
    assert result["mean_e2el_ms"] == pytest.approx(1400)
    assert result["mean_tpot_ms"] == pytest.approx(900 / 4)
    assert result["mean_itl_ms"] == pytest.approx(300)
    assert result["output_throughput"] == pytest.approx(5 / 4)


def test_of_a_chat_the_role_is_no_token() -> None:
    clock = Clock(0.0, 0.0, 1.0, 3.0, 3.5, 9.0)
    groups = [
        [delta(role="assistant", content=""), delta(content="a")],
        [delta(reasoning_content="b"), delta(), usage(4, 2), DONE],
    ]
    server = FakeOpenAI(lambda body: clock.paced(groups, looks=3))
    (timing,), _ = measure(server, backend="openai-chat", clock=clock)
    assert (timing.error, timing.token_times, timing.text) == (None, [3.0, 3.5], "ab")
    path, _, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "w5 w6"}]
    assert body["max_completion_tokens"] == 4


def test_a_chat_that_ends_with_its_first_token() -> None:
    only = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    server = FakeOpenAI(lambda body: [event(choices=[only]), usage(4, 1), DONE])
    (timing,), _ = measure(server, backend="openai-chat")
    assert (timing.error, len(timing.token_times), timing.text, timing.output_tokens) == (None, 1, "", 1)


def test_what_a_request_says() -> None:
    server = FakeOpenAI(lambda body: [text("a"), DONE])
    fields = {"temperature": 0.0, "ignore_eos": True}
    (timing,), _ = measure(server, fields=fields)
    assert server.requests[0][2] == {
        "model": "fake",
        "prompt": "w5 w6",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    # Without a count of the server's, the sample's, and one per chunk.
    assert (timing.prompt_tokens, timing.output_tokens) == (2, 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda body: refusal(503, "the queue is full"), "503: the queue is full"),
        (lambda body: [text("a"), event(error={"message": "out of memory"}), DONE], "out of memory"),
        (lambda body: [text("a")], "the server ended the stream without [DONE]"),
        (lambda body: [usage(2, 0), DONE], "the stream had no tokens"),
        (lambda body: [text("a"), b"data: {broken\n\n"], "JSONDecodeError"),
        (lambda body: [b"data: " + b"[" * 100_000 + b"\n\n"], "RecursionError"),
        (lambda body: [b"data: 5\n\n"], "5 is no chunk of an answer"),
        (lambda body: [text("a"), event(choices=5)], "{'choices': 5} is no chunk of an answer"),
        (lambda body: [delta(content=5)], "is no chunk of an answer"),
        (lambda body: [text("a"), event(usage={"completion_tokens": "5"})], "is no chunk of an answer"),
    ],
)
def test_a_request_that_fails(answer: Callable[[dict[str, Any]], Any], error: str) -> None:
    (timing,), duration = measure(FakeOpenAI(answer))
    assert timing.error is not None
    assert error in timing.error
    assert summarize([timing], duration)["failed"] == 1


def test_one_failure_leaves_the_others() -> None:
    samples = [Sample(f"w{number}", 1, 1) for number in range(6)]
    server = FakeOpenAI(
        lambda body: refusal(400, "no") if body["prompt"] == "w3" else [text(body["prompt"]), usage(1, 1), DONE]
    )
    timings, _ = measure(server, samples)
    assert [timing.text for timing in timings] == ["w0", "w1", "w2", "", "w4", "w5"]
    assert [timing.error for timing in timings if timing.error] == ["400: no"]


def test_as_many_at_a_time_as_allowed() -> None:
    running, most = 0, 0

    async def stream() -> AsyncIterator[bytes]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.wait_for(pair.wait(), SECONDS)  # passes only when two run together
        yield text("a")
        running -= 1
        yield DONE

    pair = asyncio.Barrier(2)
    ended = []
    timings, _ = measure(
        FakeOpenAI(lambda body: stream()), [SAMPLE] * 6, max_concurrency=2, done=lambda: ended.append(1)
    )
    assert [timing.error for timing in timings] == [None] * 6
    assert (most, len(ended)) == (2, 6)
    assert timings[0].queued < timings[-1].queued


def test_warmups_are_sent_and_not_counted() -> None:
    server, ended = FakeOpenAI(lambda body: [text("a"), DONE]), []
    timings, _ = measure(server, [SAMPLE, Sample("w9", 1, 1)], warmups=3, done=lambda: ended.append(1))
    assert [body["prompt"] for _, _, body in server.requests[:3]] == ["w5 w6"] * 3
    assert (len(server.requests), len(timings), len(ended)) == (5, 2, 2)


def test_nobody_answers() -> None:
    async def run() -> list[Timing]:
        target = Target(url="http://127.0.0.1:1/v1/completions", model="m")
        return (await send_all(target, [SAMPLE], [0.0]))[0]

    (timing,) = asyncio.run(run())
    assert timing.error is not None
    assert "ClientConnectorError" in timing.error


def test_the_models_of_a_server() -> None:
    server = FakeOpenAI(lambda body: [], root="/models/fake", key="secret")

    async def run() -> None:
        async with server.running() as address:
            (model,) = await list_models(address + "/", "secret")
            assert (model["id"], model["root"]) == ("fake", "/models/fake")
            with pytest.raises(ConfigError, match="answers 401: wrong key"):
                await list_models(address)

    asyncio.run(run())
    with pytest.raises(ConfigError, match="no server answers"):
        asyncio.run(list_models("http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="is no address of a server"):
        asyncio.run(list_models("nowhere"))
    with pytest.raises(ConfigError, match="is no address of a server"):
        asyncio.run(list_models("http://a..b"))


async def asked(address: str, api_key: str | None = None) -> tuple[list[dict[str, Any]], Timing]:
    """What a server lists, and what it answers to a request."""
    target = Target(url=address + "/v1/completions", model="fake", api_key=api_key)
    (timing,), _ = await send_all(target, [SAMPLE], [0.0])
    return await list_models(address, api_key), timing


def test_listing_and_requests_have_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")
    proxy = FakeOpenAI(lambda body: [text("a"), DONE], key="secret")

    async def run() -> None:
        async with proxy.running() as address:
            for value in (address, address.removeprefix("http://"), address.replace("//", "//me:word@")):
                monkeypatch.setenv("http_proxy", value)
                models, timing = await asked("http://a.invalid:8000", "secret")
                assert ([model["id"] for model in models], timing.error, timing.text) == (["fake"], None, "a")
            assert "Proxy-Authorization" in proxy.requests[-1][1]
            async with FakeOpenAI(lambda body: [text("direct"), DONE]).running() as server:
                monkeypatch.setenv("no_proxy", server.removeprefix("http://"))
                assert (await asked(server))[1].text == "direct"

    asyncio.run(run())
    assert len(proxy.requests) == 3


def test_the_key_that_was_given_is_sent_and_no_password_of_netrc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "netrc"
    path.write_text("machine 127.0.0.1 login me password word\n")
    monkeypatch.setenv("NETRC", str(path))

    async def run() -> None:
        for key in ("secret", None):
            server = FakeOpenAI(lambda body: [text("a"), DONE], key=key)
            async with server.running() as address:
                _, timing = await asked(address, key)
            assert timing.error is None
            assert server.requests[0][1].get("Authorization") == (key and f"Bearer {key}")

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff",
        b"[" * 100_000,
        b"[1]",
        b'{"data": [{}]}',
        b'{"data": ["m"]}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": "m", "root": 5}]}',
    ],
)
def test_an_answer_that_lists_no_models(answer: bytes) -> None:
    class Other(FakeOpenAI):
        async def _models(self, request: web.Request) -> web.Response:
            return web.Response(body=answer, content_type="application/json")

    async def run() -> None:
        async with Other(lambda body: []).running() as address:
            with pytest.raises(ConfigError, match="lists no models; is it an OpenAI-compatible server"):
                await list_models(address)

    asyncio.run(run())
