"""A connection by itself, over timers whose time passes when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vattn.engine.server.connections import LimitedProtocol


class Timers:
    """Those of an event loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def call_later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        self._waiting.append((self.now + seconds, callback, args))

    def until(self, end: float) -> None:
        while self._waiting and (due := min(self._waiting, key=lambda each: each[0]))[0] <= end:
            self._waiting.remove(due)
            self.now, callback, args = due
            callback(*args)


class Transport:
    """Of a client that is there; notes when something is written."""

    def __init__(self, timers: Timers) -> None:
        self.written: list[float] = []
        self._timers = timers

    def write(self, data: bytes) -> None:
        self.written.append(self._timers.now)

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> Any:
        established = b"\x01"
        return SimpleNamespace(getsockopt=lambda *_: established) if name == "socket" else None


def test_a_half_closed_client_is_asked_every_second_whether_it_is_there() -> None:
    """A write is what makes the kernel tell that a client has closed the other side too."""
    timers = Timers()
    transport = Transport(timers)
    connection: Any = LimitedProtocol.__new__(LimitedProtocol)
    connection.loop, connection.transport, connection.pipeline = timers, transport, []
    connection.cycle = SimpleNamespace(
        scope={"http_version": "1.1"}, more_body=False, response_complete=False, response_started=False
    )
    assert connection.eof_received()
    timers.until(29.5)
    assert transport.written == pytest.approx(list(range(30)))
