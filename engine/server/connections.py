"""`LimitedProtocol`: uvicorn's connection, with a limit on what is neither a body nor the end of a head.

httptools keeps the line, headers and trailers of a request in memory, however many bytes they are, long before the
application sees the request and its key.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 256 * 1024


class LimitedProtocol(HttpToolsProtocol):
    """A connection is closed once it has sent `MOST_HEAD_BYTES` that made up no body and completed no head."""

    _head_bytes = 0
    _progressed = False

    def data_received(self, data: bytes) -> None:
        self._progressed = False
        super().data_received(data)
        self._head_bytes = 0 if self._progressed else self._head_bytes + len(data)
        if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._progressed = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)
