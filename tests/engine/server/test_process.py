"""A server process: clients that leave, overload, SIGTERM, TLS, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support import applications, scripts
from tests.support.effort import effort
from tests.support.servers import MODEL, Server, metric, running
from tests.support.waiting import SECONDS, wait_until
from vattn.engine.config import EngineConfig
from vattn.engine.server import ServerSettings, run, serve
from vattn.errors import ConfigError

pytestmark = pytest.mark.slow(1)

LONG = {"prompt": "Question: Count to 200.\nAnswer:", "temperature": 0, "max_tokens": 1800, "ignore_eos": True}
SHORT = {"prompt": "Question: What is 17 + 25?\nAnswer:", "temperature": 0, "max_tokens": 64}
ANSWER = " 7 + 5 = 12, so 17 + 25 = 42."
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def wait_until_idle(server: Server) -> None:
    """Until the gauges are zero; then no request holds memory, and no page is missing."""

    def gauges() -> dict[str, float]:
        return {name: server.metric(name) for name in GAUGES}

    wait_until(lambda: not any(gauges().values()), gauges, every=0.1)
    memory = httpx.get(f"{server.url}/health", params={"memory": 1}, verify=server.verify).json()["memory"]
    assert memory["used_bytes"] == memory["live_bytes"] == 0
    if pages := memory.get("pages"):
        assert pages["owned"] == pages["other"] == 0
        assert pages["budget"] == pages["parked"] + pages["cached"] + pages["free"]


def wait_until_unfinished(server: Server, count: int) -> None:
    def load() -> object:
        return httpx.get(f"{server.url}/load", verify=server.verify, timeout=SECONDS).json()

    wait_until(lambda: load() == {"server_load": count}, load, every=0.02)


@contextlib.contextmanager
def asleep(server: Server, **headers: str) -> Iterator[None]:
    """No request ends meanwhile."""
    httpx.post(f"{server.url}/sleep", headers=headers, timeout=SECONDS).raise_for_status()
    try:
        yield
    finally:
        httpx.post(f"{server.url}/wake_up", headers=headers, timeout=SECONDS).raise_for_status()


def test_a_client_that_leaves_ends_its_stream(server: Server) -> None:
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as answer:
        assert next(answer.iter_text())
    wait_until_idle(server)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1


@pytest.fixture(params=["virtual", "paged"])
def cancelling(request: pytest.FixtureRequest, server: Server) -> Iterator[Server]:
    if request.param == "virtual":
        yield server
        return
    with running({"kv": request.param}) as started:
        yield started
        assert started.terminate() == 0


def test_200_long_requests_cancelled_at_once(cancelling: Server) -> None:
    """Memory, pages and slots are all there again."""
    server = cancelling
    slots = 16
    resident = []

    async def test() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=SECONDS) as http:
            bodies = [{**LONG, "stream": bool(i % 2)} for i in range(200)]
            tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
            while (await http.get("/load")).json()["server_load"] + sum(task.done() for task in tasks) < 200:
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            answer = (await http.post("/v1/completions", json=SHORT)).json()
            assert answer["choices"][0]["text"] == ANSWER

    async def fill() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=SECONDS) as http:
            bodies = [{**LONG, "max_tokens": 1000}] * (4 * slots)  # so that those that end are followed by others
            tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
            while metric((await http.get("/metrics")).text, "vllm:num_requests_running") < slots:
                assert not all(task.done() for task in tasks), "a slot is missing"
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    computed = server.metric("vllm:generation_tokens_total")
    for _ in range(2):
        asyncio.run(test())
        wait_until_idle(server)
        resident.append(server.metric("process_resident_memory_bytes"))
    assert resident[1] < resident[0] + 20e6
    computed = server.metric("vllm:generation_tokens_total") - computed
    assert computed < 200 * LONG["max_tokens"] / 2, "cancelled requests went on"
    asyncio.run(fill())
    wait_until_idle(server)


@pytest.mark.slow
def test_many_streams(server: Server) -> None:
    """No error, and the second time they take no more memory than the first."""
    count = effort(100, 1000)
    body = {**SHORT, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}

    async def test() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=SECONDS) as http:

            async def ask() -> str:
                answer = await http.post("/v1/completions", json=body)
                assert answer.status_code == 200
                return answer.text

            # While the engine sleeps none ends, so that all are there at the same time.
            with asleep(server):
                asked = [asyncio.create_task(ask()) for _ in range(count)]
                await asyncio.to_thread(wait_until_unfinished, server, count)
            answers = await asyncio.gather(*asked)
        for text in answers:
            *events, done, end = text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            chunks = [json.loads(event.removeprefix("data: ")) for event in events]
            assert ANSWER.startswith("".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]))
            assert chunks[-1]["usage"]["completion_tokens"] == 6

    resident = []
    for _ in range(2):
        asyncio.run(test())
        wait_until_idle(server)
        resident.append(server.metric("process_resident_memory_bytes"))
    assert resident[1] < resident[0] + 20e6


def test_ten_of_a_hundred_leave_and_the_others_are_exact(server: Server) -> None:
    async def test() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def ask(i: int) -> str:
                options: Any = {**SHORT, "prompt": f"Question: What is {i} + 7?\nAnswer:"}
                texts = []
                async with await client.completions.create(model="tiny", stream=True, **options) as stream:
                    async for chunk in stream:
                        texts.append(chunk.choices[0].text)
                        if i in leaving and len(texts) == 1 + i // 20:
                            return ""
                return "".join(texts)

            leaving = set(range(3, 100, 10))
            answers = await asyncio.gather(*(ask(i) for i in range(100)))
            assert [i for i, answer in enumerate(answers) if not answer] == sorted(leaving)
            leaving.clear()
            assert all([answers[i] in ("", await ask(i)) for i in range(0, 100, effort(7, 1))])

    asyncio.run(test())
    wait_until_idle(server)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\nX-Much: ",
        b"GET /",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Much: ",
    ],
    ids=["header", "line", "trailer"],
)
def test_a_head_without_end_closes_its_connection(server: Server, head: bytes) -> None:
    url = httpx.URL(server.url)
    before = server.metric("process_resident_memory_bytes")
    with socket.create_connection((url.host, url.port or 0), timeout=SECONDS) as connection:
        connection.sendall(head)
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe
            for _ in range(1000):
                connection.sendall(b"a" * 100_000)
    assert server.metric("process_resident_memory_bytes") < before + 20e6
    assert httpx.get(f"{server.url}/health", headers={"X-Much": "a" * 20_000}).status_code == 200


IMPATIENCE = 1.0  # seconds


@pytest.fixture(scope="module")
def impatient() -> Iterator[Server]:
    """Little time for a client to send a request; a key, so that some get their answer before their body is there."""
    with running(
        receive_timeout=IMPATIENCE, keep_alive_timeout=SECONDS, api_key=["secret"], admin_endpoints=True
    ) as started:
        yield started


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
KEY = b"Authorization: Bearer secret\r\n"


@pytest.mark.parametrize(
    ("start", "piece", "status"),
    [
        (b"", b"", b""),
        (b"", b"\r\n", b""),
        (b"GET /", b"", b""),
        (b"GET /health HTTP/1.1\r\nX-Much: ", b"a", b""),
        (POST + KEY + b"Content-Length: 1000\r\n\r\n{", b" ", b""),
        (POST + KEY + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", b""),
        (POST + b"Content-Length: 1000\r\n\r\n{", b" ", b"401"),
        (b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n", b"200"),
    ],
    ids=[
        "silence",
        "empty lines",
        "line",
        "header",
        "body",
        "chunks",
        "body of a refused request",
        "empty lines after",
    ],
)
def test_a_slow_client_loses_its_connection(impatient: Server, start: bytes, piece: bytes, status: bytes) -> None:
    url = httpx.URL(impatient.url)
    begun = time.monotonic()
    received = b""
    logged = len(impatient.log)
    with socket.create_connection((url.host, url.port or 0), timeout=0.1) as connection:
        connection.sendall(start)
        while time.monotonic() < begun + SECONDS:
            try:
                connection.sendall(piece)
                data = connection.recv(10_000)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if not data:
                break
            received += data
        else:
            pytest.fail("it still has its connection")
    assert time.monotonic() - begun > 0.9 * IMPATIENCE
    assert received[len(b"HTTP/1.1 ") :].startswith(status)
    assert bool(received) == bool(status)
    said = "a client was too slow"
    wait_until(lambda: any(line["message"] == said for line in impatient.log[logged:]), lambda: impatient.log[logged:])
    wait_until_idle(impatient)


@pytest.fixture
def brief() -> Iterator[Server]:
    """Little time for all that a client may wait with."""
    with running(receive_timeout=1, keep_alive_timeout=1, api_key=["secret"], admin_endpoints=True) as started:
        yield started


def test_a_refused_request_whose_rest_comes_late(brief: Server) -> None:
    """Its connection idles once it is whole; a request that comes with the rest gets its answer, however slow."""
    url = httpx.URL(brief.url)

    def refused(path: str, key: bytes, status: int) -> socket.socket:
        connection = socket.create_connection((url.host, url.port or 0), timeout=10)
        connection.sendall(b"POST %b HTTP/1.1\r\nHost: a\r\n%bContent-Length: 2\r\n\r\n" % (path.encode(), key))
        received = b""
        while not received.endswith(b"}}"):
            received += receive(connection)
        assert received.startswith(b"HTTP/1.1 %d" % status)
        return connection

    for path, key, status in (("/v1/completions", b"", 401), ("/nowhere", KEY, 404), ("/version", KEY, 405)):
        with refused(path, key, status) as connection:
            connection.sendall(b"{}")
            assert not read(connection)
    content = json.dumps(SHORT).encode()
    whole = POST + KEY + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    with asleep(brief, Authorization="Bearer secret"):
        connection = refused("/v1/completions", b"", 401)
        connection.sendall(b"{}" + whole)
        wait_until_unfinished(brief, 1)
        time.sleep(1.5)
    with connection:
        connection.settimeout(SECONDS)
        assert ANSWER.encode() in read(connection)


def test_an_answer_may_take_longer_than_its_request(impatient: Server) -> None:
    """Also where the client has begun its next request, or sent an empty line."""
    body = json.dumps(SHORT).encode()
    whole = POST + KEY + b"Content-Length: %d\r\n\r\n" % len(body) + body
    url = httpx.URL(impatient.url)
    ways = [(b"", whole), (whole[:-20], whole[-20:]), (b"\r\n", whole), (whole[:20], whole[20:])]
    for more, rest in ways[: effort(2, 4)]:
        with socket.create_connection((url.host, url.port or 0), timeout=SECONDS) as connection:
            for part in (whole + more, rest):
                with asleep(impatient, Authorization="Bearer secret"):
                    connection.sendall(part)
                    wait_until_unfinished(impatient, 1)
                    time.sleep(1.3 * IMPATIENCE)
                head, received = receive(connection).split(b"\r\n\r\n", 1)
                assert head.startswith(b"HTTP/1.1 200")
                length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
                while len(received) < length:
                    received += receive(connection)
                assert json.loads(received)["choices"][0]["text"] == ANSWER


def send(server: Server, body: dict[str, Any], version: str = "1.1") -> socket.socket:
    """A connection on which a completion is asked for."""
    url = httpx.URL(server.url)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((url.host, url.port or 0), timeout=SECONDS)
    connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    return connection


def receive(connection: socket.socket) -> bytes:
    """What comes next, of a server that must not have closed the connection."""
    received = connection.recv(100_000)
    assert received, "the server closed the connection"
    return received


def read(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    while data := connection.recv(100_000):
        received += data
    return received


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_answer(server: Server, stream: bool) -> None:
    with send(server, {**SHORT, "stream": stream}) as connection:
        connection.shutdown(socket.SHUT_WR)
        *interim, head, body = read(connection).split(b"\r\n\r\n", maxsplit=2)
    assert set(interim) <= {b"HTTP/1.1 100 Continue"}
    assert head.startswith(b"HTTP/1.1 200")
    assert (b"data: [DONE]" if stream else ANSWER.encode()) in body


def test_a_half_closed_client_gets_all_answers_to_what_it_sent_ahead(server: Server) -> None:
    content = json.dumps(SHORT).encode()
    with send(server, {**LONG, "max_tokens": 100}) as connection:
        connection.sendall((POST + b"Content-Length: %d\r\n\r\n" % len(content) + content) * 2)
        connection.shutdown(socket.SHUT_WR)
        _, *answers = read(connection).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 200 OK\r\n")
    texts = [json.loads(answer.split(b"\r\n\r\n", maxsplit=1)[1])["choices"][0]["text"] for answer in answers]
    assert [text == ANSWER for text in texts] == [False, True, True]


@pytest.mark.parametrize("sent", ["1.0", "head"])
def test_a_half_closed_client_that_cannot_be_answered(server: Server, sent: str) -> None:
    """HTTP/1.0 has no interim answers, by which a client that is gone is known; and half a request has no answer."""
    url = httpx.URL(server.url)
    connection = (
        send(server, LONG, "1.0")
        if sent == "1.0"
        else socket.create_connection((url.host, url.port or 0), timeout=SECONDS)
    )
    with connection:
        if sent == "head":
            connection.sendall(POST[:40])
        connection.shutdown(socket.SHUT_WR)
        assert read(connection) == b""
    wait_until_idle(server)


@pytest.mark.parametrize(
    "fields",
    [{}, {"stream": True}, {"logprobs": 20, "max_tokens": 200, "ignore_eos": True}],
    ids=["whole", "stream", "parts"],
)
def test_http_1_0_knows_no_chunks(server: Server, fields: dict[str, Any]) -> None:
    """An answer whose length is not known when it begins ends with the connection."""
    with send(server, {**SHORT, **fields}, "1.0") as connection:
        head, body = read(connection).split(b"\r\n\r\n", maxsplit=1)
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert (b"content-length: %d" % len(body) in head) == (not fields)
    if "stream" in fields:
        *events, done, _ = body.split(b"\n\n")
        assert done == b"data: [DONE]"
        assert all(json.loads(event.removeprefix(b"data: ")) for event in events)
    else:
        assert json.loads(body)["choices"][0]["text"].startswith(ANSWER)


@pytest.mark.parametrize("how", ["close", "both sides", "half, then close"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_not_taken_for_a_half_closed_one(server: Server, how: str, stream: bool) -> None:
    connection = send(server, {**LONG, "stream": stream})
    wait_until_unfinished(server, 1)
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    if how == "both sides":
        connection.shutdown(socket.SHUT_RDWR)
    elif how != "close":
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.3)
        assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted
    if how != "both sides":
        connection.close()
    wait_until_idle(server)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    connection.close()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("pause", [0, 0.3], ids=["at once", "while the first is answered"])
def test_requests_that_are_sent_ahead_end_with_their_client(server: Server, half: bool, pause: float) -> None:
    def ended(how: str) -> float:
        return server.metric("vllm:request_success_total", finished_reason=how)

    aborted, whole = ended("abort"), ended("length")
    with asleep(server):
        with send(server, LONG) as connection:
            if pause:
                wait_until_unfinished(server, 1)
            time.sleep(pause)
            content = json.dumps(LONG).encode()
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(content) + content)
            time.sleep(pause)
            if half:
                connection.shutdown(socket.SHUT_WR)
            wait_until_unfinished(server, 1)
        wait_until_unfinished(server, 0)
    wait_until_idle(server)
    assert (ended("abort"), ended("length")) == (aborted + 1, whole)
    assert not [line for line in server.log if line["level"] == "error"]


def test_requests_that_are_sent_ahead_have_a_limit(server: Server) -> None:
    url = httpx.URL(server.url)
    one = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    with socket.create_connection((url.host, url.port or 0), timeout=SECONDS) as connection:
        connection.sendall(one * 60)
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 60:
            received += receive(connection)
    with socket.create_connection((url.host, url.port or 0), timeout=SECONDS) as connection:
        connection.sendall(one * 5000)
        try:
            received = read(connection)
        except ConnectionError:
            received = b""
    assert received.count(b"HTTP/1.1 200 OK") < 5000


def test_a_body_in_chunks_of_single_bytes(server: Server) -> None:
    url = httpx.URL(server.url)
    content = json.dumps({**SHORT, "user": "x" * 100_000}).encode()
    with socket.create_connection((url.host, url.port or 0), timeout=SECONDS) as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n")
        assert ANSWER.encode() in read(connection)


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [("/v1/completions", 20_000_000, 413), ("/nowhere", 3_000_000, 404), ("/v1/models", 3_000_000, 405)],
)
def test_a_refusal_reaches_a_client_that_is_still_sending(server: Server, path: str, size: int, status: int) -> None:
    """One that asks for the connection's end after the answer, as Python's urllib does."""
    url = httpx.URL(server.url)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n"
    for _ in range(3):
        with socket.create_connection((url.host, url.port or 0), timeout=SECONDS) as connection:
            connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + b"x" * size)
            assert read(connection).startswith(f"HTTP/1.1 {status} ".encode())
    with socket.create_connection((url.host, url.port or 0), timeout=SECONDS) as connection:
        connection.sendall(head.encode() + b"Connection: close\r\nExpect: 100-continue\r\n\r\n")
        assert read(connection).startswith(f"HTTP/1.1 {status} ".encode()), "nothing was asked of a client that waits"


@pytest.mark.parametrize("pause", [0, 0.3])
def test_a_client_may_offer_another_protocol(server: Server, pause: float) -> None:
    """As Java's does with every request, over plain HTTP."""
    url = httpx.URL(server.url)
    content = json.dumps(SHORT).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
    with socket.create_connection((url.host, url.port or 0), timeout=SECONDS) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n" + offer + b"\r\n")
        connection.sendall(POST + offer + b"Content-Length: %d\r\n\r\n" % len(content))
        time.sleep(pause)
        connection.sendall(content + b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        received = read(connection)
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert ANSWER.encode() in received


@pytest.mark.slow
def test_sigterm_lets_requests_finish() -> None:
    answers: list[Any] = []

    def ask(server: Server, body: dict[str, Any]) -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS).json())

    with running(shutdown_timeout=SECONDS, admin_endpoints=True) as server:
        bodies = [{**LONG, "max_tokens": 1500}, {**LONG, "max_tokens": 1000}]
        threads = [threading.Thread(target=ask, args=(server, body)) for body in bodies]
        with asleep(server):
            for thread in threads:
                thread.start()
            wait_until_unfinished(server, 2)
        assert server.terminate() == 0
        for thread in threads:
            thread.join()
        assert sorted(answer["usage"]["completion_tokens"] for answer in answers) == [1000, 1500]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert not server.plain


@pytest.mark.slow
def test_a_second_sigterm_ends_the_server_at_once() -> None:
    """With clients that read and one that does not; and without an error in the log."""
    with running() as server:
        connections = [send(server, {**LONG, "stream": stream}) for stream in (False, True)]
        stalled = send(server, {**LONG, "stream": True, "n": 12, "temperature": 1, "logprobs": 20})
        wait_until_unfinished(server, 14)
        server.process.terminate()
        wait_until(lambda: any(line["message"] == "stopping" for line in server.log), lambda: server.log, every=0.01)
        assert server.terminate() == 0
        for connection in connections:
            with connection:
                assert b'"finish_reason":"abort"' in read(connection)
        stalled.close()
    assert not [line for line in server.log if line["level"] not in ("info", "warning")]
    assert not server.plain


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_until_the_process_has_ended(number: int) -> None:
    status = None
    with running() as server:
        deadline = time.monotonic() + SECONDS
        while status is None:
            assert time.monotonic() < deadline, server.log
            server.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = server.process.wait(timeout=0.001)
    assert status == 0
    assert not server.plain


def test_an_empty_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("", " secret", "secret\n", "g\u00e9heim"):
        monkeypatch.setenv("VATTN_API_KEY", key)
        with pytest.raises(ConfigError, match=r"VATTN_API_KEY (is empty|has characters)") as caught:
            serve(EngineConfig(model=MODEL), ServerSettings(port=0))
        assert not key.strip() or key.strip() not in str(caught.value)
    with pytest.raises(ConfigError, match="api_key is empty") as caught:
        ServerSettings(api_key=["secret", ""])
    assert "secret" not in str(caught.value)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a private key, and of a certificate that it signs; a test that needs them is skipped without openssl."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return key, certificate


def test_clients_may_need_a_certificate(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    options = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate), "ssl_ca_certs": str(certificate)}
    stranger = ssl.create_default_context(cafile=certificate)
    known = ssl.create_default_context(cafile=certificate)
    known.load_cert_chain(certificate, key)
    with running(verify=known, ssl_cert_reqs=2, **options) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT, verify=known, timeout=SECONDS).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", verify=stranger)
    unknown = ssl.create_default_context(cafile=certificate)
    (tmp_path / "unknown").mkdir()
    other_key, other = make_certificate(tmp_path / "unknown")
    unknown.load_cert_chain(other, other_key)
    with running(verify=known, ssl_cert_reqs=1, **options) as server:
        assert httpx.get(f"{server.url}/health", verify=stranger, timeout=SECONDS).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", verify=unknown)


def test_tls_keeps_the_timeouts_of_a_connection(tmp_path: Path) -> None:
    """Also where a client neither shakes hands, nor asks, nor confirms the end: asyncio would wait for 30 s or more."""
    key, certificate = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=certificate)
    options = {"receive_timeout": 1, "keep_alive_timeout": 1, "ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    with running(**options) as server:
        url = httpx.URL(server.url)
        address = ("127.0.0.1", url.port or 0)
        with (
            socket.create_connection(address, timeout=20) as silent,
            context.wrap_socket(socket.create_connection(address, timeout=20), server_hostname="127.0.0.1") as idle,
            context.wrap_socket(socket.create_connection(address, timeout=20), server_hostname="127.0.0.1") as asked,
        ):
            asked.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert asked.recv(1000).startswith(b"HTTP/1.1 200 ")
            assert silent.recv(1) == b""
            for tls in (idle, asked):
                while tls.recv(1000):
                    pass
                with socket.socket(fileno=tls.detach()) as plain:
                    plain.settimeout(20)
                    while plain.recv(1000):
                        pass


def test_certificates_are_read_before_the_model(tmp_path: Path) -> None:
    key, certificate = map(str, make_certificate(tmp_path))
    encrypted, junk = str(tmp_path / "encrypted.pem"), str(tmp_path / "junk.pem")
    command = f"openssl pkey -in {key} -aes256 -passout pass:word -out {encrypted}"
    subprocess.run(command.split(), check=True, capture_output=True)
    Path(junk).write_text("junk")
    for options, message in (
        ({"ssl_certfile": certificate}, "ssl_certfile is .*, which OpenSSL cannot use"),
        ({"ssl_certfile": certificate, "ssl_keyfile": junk}, "ssl_keyfile is .*, which OpenSSL cannot use"),
        ({"ssl_certfile": certificate, "ssl_keyfile": encrypted}, "ssl_keyfile is .* encrypted; decrypt it first"),
        (
            {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": junk, "ssl_cert_reqs": 2},
            "ssl_ca_certs is .*, which OpenSSL cannot read",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            ServerSettings(**options)


def test_https_and_sigterm_with_requests_that_take_too_long(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    options: dict[str, Any] = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate), "shutdown_timeout": 0.3}
    with running(environment={"VATTN_API_KEY": "secret"}, **options) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificate)
        assert httpx.get(f"{server.url}/v1/models", verify=trusting).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        with httpx.Client(base_url=server.url, verify=trusting, headers=headers, timeout=SECONDS) as http:
            answer = http.post("/v1/completions", json=SHORT)
            assert answer.json()["choices"][0]["text"] == ANSWER
            with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as streamed:
                lines = streamed.iter_lines()
                next(lines)
                server.process.terminate()
                *_, last, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(timeout=SECONDS) == 0


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use; give another"
        ):
            serve(EngineConfig(model=MODEL), ServerSettings(port=port))


def test_an_address_that_is_taken_while_the_model_loads() -> None:
    async def test() -> None:
        async with applications.client() as (_, service):
            with run._bind(ServerSettings(port=0)) as other:
                port = other.getsockname()[1]
                service.settings = ServerSettings(port=port)
                with run._bind(service.settings) as listener:
                    other.listen()
                    server = run._make_server(service, listener)
                    match = rf"cannot listen on 127.0.0.1:{port}: Address already in use; give another"
                    with pytest.raises(ConfigError, match=match):
                        await server.serve(sockets=[listener])

    applications.run(test())


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_an_address_that_is_none(host: str) -> None:
    with pytest.raises(ConfigError, match="that is no name of a host; give another --host"):
        serve(EngineConfig(model=MODEL), ServerSettings(host=host))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70_000}, "port is 70000"),
        ({"host": ""}, "host is ''"),
        ({"shutdown_timeout": -1}, "shutdown_timeout is -1"),
        ({"receive_timeout": 0}, "receive_timeout is 0; give seconds, 0.1 or more"),
        ({"keep_alive_timeout": -1}, "keep_alive_timeout is -1"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs is -1"),
        ({"max_body_bytes": "much"}, "max_body_bytes"),
        ({"api_key": [""]}, "api_key"),
        ({"api_key": 3}, "api_key is no text"),
        ({"allowed_origins": ['["https://a.example"]']}, "allowed_origins has .* which no page has"),
        ({"allowed_origins": ["a.example"]}, "allowed_origins has .a.example."),
        ({"ssl_keyfile": "key.pem"}, "needs ssl_certfile"),
        ({"ssl_certfile": "/nowhere.pem"}, "where no file is"),
        ({"ssl_ca_certs": "ca.pem"}, "give ssl_ca_certs with ssl_cert_reqs=2"),
        ({"ssl_cert_reqs": 1}, "give ssl_ca_certs with ssl_cert_reqs=2"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs is 3"),
        ({"ssl_cert_reqs": 2, "ssl_ca_certs": "ca.pem"}, "needs ssl_certfile"),
        ({"log_level": "loud"}, "log_level='loud'"),
        ({"chat_template": "/nowhere.jinja"}, "chat_template"),
        ({"chat_template": sys.executable}, "chat_template .* codec"),
        ({"chat_template": "{% for x %}"}, "chat_template .* expected token 'in'"),
    ],
)
def test_settings_that_are_impossible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**options)


def test_the_engine_needs_none_of_the_extra() -> None:
    """The engine imports none of it; without it `serve` says what to install."""
    code = """
import sys
extra = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "starlette")
for name in [name for name in sys.modules if name.partition(".")[0] in extra]:
    del sys.modules[name]  # the server of scripts had imported them
import vattn.engine.server
assert not any(name in sys.modules for name in extra)
for name in extra:
    sys.modules[name] = None
import vattn.engine
from vattn.engine.config import EngineConfig
from vattn.engine.server import ServerSettings, serve
serve(EngineConfig(model="x"), ServerSettings())
"""
    found = scripts.run(code)
    assert found.returncode == 1
    assert "ConfigError: the server needs" in found.stderr
    assert "pip install 'vattn[server]'" in found.stderr
