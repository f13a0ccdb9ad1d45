"""An OpenAI-compatible server whose answers a test writes, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import web

from tests.support.waiting import SECONDS

DONE = b"data: [DONE]\n\n"


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(token: str) -> bytes:
    """A chunk of `/v1/completions`."""
    return event(choices=[{"index": 0, "text": token}])


def delta(**content: Any) -> bytes:
    """A chunk of `/v1/chat/completions`."""
    return event(choices=[{"index": 0, "delta": content}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid", "code": status}}, status=status)


Answer: TypeAlias = AsyncIterator[bytes] | list[bytes] | web.Response


@dataclass
class FakeOpenAI:
    """Answers each request for a completion with the pieces that `answer` makes of its body.

    Attributes:
        requests: path, headers and body of each, in order.
        root: of its only model, "fake".
    """

    answer: Callable[[dict[str, Any]], Answer]
    root: str = "fake"
    key: str | None = None
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    @contextlib.asynccontextmanager
    async def running(self, bound: socket.socket | None = None) -> AsyncIterator[str]:
        """Serve in this event loop; gives the address, which is that of `bound` if there is one."""
        runner = web.AppRunner(self.app())
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0) if bound is None else web.SockSite(runner, bound)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    @contextlib.contextmanager
    def in_thread(self, bound: socket.socket | None = None) -> Iterator[str]:
        """As `running`, from a thread of its own."""
        loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        addresses: list[str] = []

        async def serve() -> None:
            async with self.running(bound) as address:
                addresses.append(address)
                started.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        try:
            assert started.wait(SECONDS)
            yield addresses[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return refusal(401, "wrong key")

    async def _models(self, request: web.Request) -> web.Response:
        listed = {"data": [{"id": "fake", "object": "model", "root": self.root}]}
        refused = self._refused(request)
        return web.json_response(listed) if refused is None else refused

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, dict(request.headers), body))
        refused = self._refused(request)
        answer = self.answer(body) if refused is None else refused
        if isinstance(answer, web.Response):
            return answer
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if isinstance(answer, list):
            for piece in answer:
                await response.write(piece)
        else:
            async for piece in answer:
                await response.write(piece)
        return response
