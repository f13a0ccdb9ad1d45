"""Connections of uvicorn's that wait neither forever nor for more bytes than a head can have.

httptools keeps the line, headers and trailers of a request in memory, however many bytes they are, long before the
application sees the request and its key; and uvicorn waits for the rest of a request as long as its client likes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MOST_HEAD_BYTES = 256 * 1024


def limited_to(receive_timeout: float) -> type[HttpToolsProtocol]:
    """`LimitedProtocol` with this timeout: uvicorn makes an object of the class for each connection."""
    seconds = receive_timeout

    class Limited(LimitedProtocol):
        receive_timeout = seconds

    return Limited


class LimitedProtocol(HttpToolsProtocol):
    """A connection that is closed when its client

    - has sent `MOST_HEAD_BYTES` that made up no body and completed no head,
    - or has not sent a whole request `receive_timeout` seconds after it connected or began to send one.

    The time while the connection answers an earlier request does not count.
    """

    receive_timeout: ClassVar[float]
    _head_bytes = 0
    _progressed = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_none()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # An empty line in front of a request begins no message, but ends uvicorn's wait for one.
        self._expect_request()
        self._progressed = False
        super().data_received(data)
        self._head_bytes = 0 if self._progressed else self._head_bytes + len(data)
        if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.transport.close()

    def on_message_begin(self) -> None:
        self._expect_request()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._progressed = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._expect_none()
        super().on_message_complete()

    def _expect_request(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.receive_timeout, self._on_deadline)

    def _expect_none(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

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
