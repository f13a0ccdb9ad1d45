"""Answers that end when the client leaves: `EventStream` for streams, `Parts` and `until_gone` for the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, ClassVar, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ClientGone, api_error, encode, log_failure, pieces

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_PART_CHARACTERS = 2**16


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


class Parts(Response):
    """An answer that is written part by part, and ends when the client leaves. It begins with its first part.

    Args:
        parts: at least one; closed when the client leaves.
    """

    headers_of_parts: ClassVar[list[tuple[bytes, bytes]]] = [(b"content-type", b"application/json")]
    end: ClassVar[bytes] = b""

    def __init__(self, parts: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self.raw_headers = list(self.headers_of_parts)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send, scope["request_id"]))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await end(writing, gone)
            await self._parts.aclose()

    async def _write(self, send: Send, request_id: str) -> None:
        begun = False
        try:
            async for data in self._parts:
                if not begun:
                    begun = True
                    start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                    await send(start)
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if not begun:
                raise  # it is answered as any other
            body = self.of_error(error)
            log_failure(error, request_id)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": self.end, "more_body": False})

    def of_error(self, error: Exception) -> bytes:
        """What is written of an error in the middle."""
        raise error


class EventStream(Parts):
    """Server-sent events, ended by `[DONE]`; an error in their middle is an event of its own.

    Args:
        events: closed when the client leaves.
        close: called in the end, whether or not a single event was read.
    """

    media_type = "text/event-stream"
    headers_of_parts: ClassVar[list[tuple[bytes, bytes]]] = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    end: ClassVar[bytes] = DONE

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(events)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()

    def of_error(self, error: Exception) -> bytes:
        return event(api_error(error).body)


async def parts(value: object) -> AsyncGenerator[bytes, None]:
    """JSON that takes long to write, made in a thread."""
    source = pieces(value)

    def take() -> bytes:
        taken: list[str] = []
        size = 0
        while size < _PART_CHARACTERS and (piece := next(source, "")):
            taken.append(piece)
            size += len(piece)
        return "".join(taken).encode("utf-8", "replace")

    while part := await asyncio.to_thread(take):
        yield part


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: asyncio.Future[Any]) -> None:
    """End these tasks; their results and errors no longer matter."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
