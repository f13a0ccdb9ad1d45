"""A connection by itself, over timers whose time passes when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vattn.engine.server.connections import MOST_STALLED_SECONDS, LimitedProtocol


class Timers:
    """Those of an event loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def call_later(self, seconds: float, callback: Callable[..., None], *args: Any) -> SimpleNamespace:
        timer = (self.now + seconds, callback, args)
        self._waiting.append(timer)
        return SimpleNamespace(cancel=lambda: self._waiting.remove(timer))

    def until(self, end: float) -> None:
        while self._waiting and (due := min(self._waiting, key=lambda each: each[0]))[0] <= end:
            self._waiting.remove(due)
            self.now, callback, args = due
            callback(*args)


class Transport:
    """Of a client that is there; notes when something is written, and when the connection is given up."""

    def __init__(self, timers: Timers) -> None:
        self.written: list[float] = []
        self.aborted: list[float] = []
        self.waiting = 0  # bytes
        self._timers = timers

    def write(self, data: bytes) -> None:
        self.written.append(self._timers.now)

    def abort(self) -> None:
        self.aborted.append(self._timers.now)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return bool(self.aborted)

    def get_extra_info(self, name: str) -> Any:
        established = b"\x01"
        return SimpleNamespace(getsockopt=lambda *_: established) if name == "socket" else None


def connect() -> tuple[Any, Transport, Timers]:
    timers = Timers()
    transport = Transport(timers)
    connection: Any = LimitedProtocol.__new__(LimitedProtocol)
    connection.loop, connection.transport, connection.pipeline = timers, transport, []
    connection.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
    return connection, transport, timers


def test_a_half_closed_client_is_asked_every_second_whether_it_is_there() -> None:
    """A write is what makes the kernel tell that a client has closed the other side too."""
    connection, transport, timers = connect()
    connection.cycle = SimpleNamespace(
        scope={"http_version": "1.1"}, more_body=False, response_complete=False, response_started=False
    )
    assert connection.eof_received()
    timers.until(29.5)
    assert transport.written == pytest.approx(list(range(30)))


def test_a_client_that_reads_nothing_loses_its_connection() -> None:
    """One that reads slowly keeps it, as does one that has read all that waited."""
    connection, transport, timers = connect()
    transport.waiting = 100_000
    connection.pause_writing()
    for passed in (1, 2, 3):
        transport.waiting -= 1
        timers.until((passed + 0.5) * MOST_STALLED_SECONDS)
    connection.resume_writing()
    timers.until(10 * MOST_STALLED_SECONDS)
    assert not transport.aborted
    timers.now = 10 * MOST_STALLED_SECONDS
    connection.pause_writing()
    timers.until(20 * MOST_STALLED_SECONDS)
    assert transport.aborted == [11 * MOST_STALLED_SECONDS]
