"""Answers that end when the client leaves: `EventStream` for streams, `until_gone` for the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from vattn.engine.server.errors import ClientGone, api_error, encode

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


async def until_gone(request: Request, answer: Awaitable[T]) -> T:
    """The answer; cancelled when the client leaves.

    Raises:
        ClientGone: it left.
    """
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await end(task, gone)


class EventStream(Response):
    """Server-sent events, ended by `[DONE]`; an error in their middle is an event of its own.

    Args:
        events: closed when the client leaves.
        close: called in the end, whether or not a single event was read.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__()
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._write_until_gone(receive, send)
        finally:
            self._close()

    async def _write_until_gone(self, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await end(writing, gone)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            await send({"type": "http.response.body", "body": event(api_error(error).body), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: asyncio.Future[Any]) -> None:
    """End these tasks; their results and errors no longer matter."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
