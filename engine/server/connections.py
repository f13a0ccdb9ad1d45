"""Connections of uvicorn's that wait neither forever nor for too many bytes, and that may be half-closed.

httptools keeps the line, headers and trailers of a request in memory, however many bytes they are, long before the
application sees the request and its key; and uvicorn waits for the rest of a request as long as its client likes, and
parses all requests that a client sends ahead, however many they are.

A client may offer to go on in another protocol (Java's does in every request), and this server never accepts. httptools
takes what follows the head for that protocol all the same, so such a request is parsed anew, without the offer.

A client that has closed its sending side may still read (`nc -N` does) or be gone: both look the same. So an interim
answer is sent, which HTTP/1.1 allows at any time before the answer: where nobody reads, the connection is reset. The
parts of an answer do the same, so an answer has to begin no earlier than it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

logger = logging.getLogger(__name__)

MOST_HEAD_BYTES = 256 * 1024
MOST_AHEAD = 64  # requests that a client sends before the first of them is answered
# Of a body that was refused: a client that is still sending when its connection is closed does not get the answer.
MOST_UNREAD_BYTES = 64 * 2**20
MOST_STALLED_SECONDS = 300.0  # for which a client may read nothing of an answer that waits for it
_SLICE = 4096  # bytes that are parsed at a time
_LOOK_SECONDS = 0.1  # between looks at the state of a half-closed connection
# From one interim answer to the next: a second, for which the request of a client that is gone goes on.
_LOOKS = 10
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7  # the kernel's number for a connection that was reset


def limited_to(receive_timeout: float) -> type[HttpToolsProtocol]:
    """`LimitedProtocol` with this timeout: uvicorn makes an object of the class for each connection."""
    seconds = receive_timeout

    class Limited(LimitedProtocol):
        receive_timeout = seconds

    return Limited


class LimitedProtocol(HttpToolsProtocol):
    """A connection that is closed when its client

    - has sent `MOST_HEAD_BYTES` that made up no body and completed no head,
    - has sent `MOST_AHEAD` requests ahead, or `MOST_UNREAD_BYTES` of a body after the answer,
    - has not sent a whole request `receive_timeout` seconds after it connected or began to send one, not counting the
      time while the connection answers an earlier request,
    - or has read nothing for `MOST_STALLED_SECONDS`, while more of its answer waits than the kernel takes.

    A client that closes its sending side gets its answers, unless it is gone altogether.
    """

    receive_timeout: ClassVar[float]
    _head_bytes = 0
    _unread_bytes = 0
    _progressed = False
    _deadline: asyncio.TimerHandle | None = None
    _looking: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._body: list[bytes] = []
        self._cycles: list[RequestResponseCycle] = []  # of requests without a complete answer, in order
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_none()
        for timer in (self._looking, self._stall):
            if timer is not None:
                timer.cancel()
        # uvicorn tells the newest request only, which may wait for an older one's answer.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # An empty line in front of a request begins no message, but ends uvicorn's wait for one.
        self._expect_request()
        for part in _slices(data):
            self._progressed = False
            self._parse(part)
            self._pass_body_on()
            if self.transport.is_closing():
                return
            self._head_bytes = 0 if self._progressed else self._head_bytes + len(part)
            if (
                self._head_bytes > MOST_HEAD_BYTES
                or len(self.pipeline) > MOST_AHEAD
                or self._unread_bytes > MOST_UNREAD_BYTES
            ):
                self.transport.close()
                return

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Whether the connection stays open, for an answer."""
        if self.transport.get_extra_info("sslcontext") is not None or not self._answers() or self.cycle.more_body:
            return False
        if any(cycle.scope["http_version"] != "1.1" for cycle in self._cycles):
            return False
        self.cycle.keep_alive = False
        if self._looking is None:
            self._look(0)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._expect_request()
        self._unread_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._progressed = True
        if self._offers():
            return
        paused = self.flow.read_paused  # for a body that waits to be taken
        super().on_headers_complete()
        # uvicorn reads nothing after a request that waits for an earlier one's answer, so not that the client leaves.
        if not paused:
            self.flow.resume_reading()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _UntilClose
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._offers():
            return
        self._expect_none()
        self._pass_body_on()
        super().on_message_complete()
        # uvicorn's time for the next request began with the answer, and ended when the rest of this one came.
        if self.cycle.response_complete and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next request's time begins now. One that is answered before it is whole gets no more time for the rest.
        early = self.cycle.response_complete and self.cycle.more_body
        if self._deadline is not None and not early:
            self._expect_none()
            self._expect_request()

    def _parse(self, data: bytes) -> None:
        """As `HttpToolsProtocol.data_received`, but for a request that offers another protocol."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offers():
                (end,) = upgrade.args
                version = self.parser.get_http_version().encode()
                lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
                lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
                head = b"\r\n".join([*lines, b"", b""])
                self.parser = httptools.HttpRequestParser(self)
                with contextlib.suppress(AttributeError):  # httptools before 0.6.3; as uvicorn does
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._parse(head + data[end:])
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _offers(self) -> bool:
        """Whether the request that is being parsed offers another protocol."""
        return bool(self.parser.should_upgrade()) and any(name == b"upgrade" for name, _ in self.headers)

    def _pass_body_on(self) -> None:
        """A body that comes in chunks of single bytes is not copied for each of them."""
        if self._body:
            body, self._body = b"".join(self._body), []
            super().on_body(body)

    def _look(self, number: int) -> None:
        """Whether the client of a half-closed connection is still there; again and again."""
        self._looking = None
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
            return
        begun = any(cycle.response_started and not cycle.response_complete for cycle in self._cycles)
        if number % _LOOKS == 0 and not begun:
            self.transport.write(_CONTINUE)
        self._looking = self.loop.call_later(_LOOK_SECONDS, self._look, number + 1)

    def _expect_request(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.receive_timeout, self._on_deadline)

    def _expect_none(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expect_reader(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(MOST_STALLED_SECONDS, self._on_stall, waiting)

    def _on_stall(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._expect_reader()
        elif not self.transport.is_closing():
            logger.info("a client does not read its answer", extra={"fields": {"seconds": MOST_STALLED_SECONDS}})
            self.transport.abort()

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._answers():
            self._expect_request()
        elif not self.transport.is_closing():
            logger.info("a client was too slow", extra={"fields": {"seconds": self.receive_timeout}})
            self.transport.close()

    def _answers(self) -> bool:
        """Whether a whole request has no complete answer yet."""
        if self.pipeline:
            return True
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete


class _UntilClose(RequestResponseCycle):
    """Of HTTP/1.0, which knows no chunks: uvicorn closes the connection after the answer, and the body ends there."""

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        self.expected_content_length = len(message.get("body", b""))  # uvicorn refuses more than was announced
        await super().send(message)


def _slices(data: bytes) -> Iterator[bytes]:
    return (data[start : start + _SLICE] for start in range(0, len(data), _SLICE))
