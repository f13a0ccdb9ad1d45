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
        self.now = end


class Transport:
    """Of a client that is there; notes when something is written, and when the connection is given up."""

    def __init__(self, timers: Timers) -> None:
        self.written: list[float] = []
        self.aborted: list[float] = []
        self.closed: list[float] = []
        self.waiting = 0  # bytes
        self._timers = timers

    def write(self, data: bytes) -> None:
        self.written.append(self._timers.now)

    def abort(self) -> None:
        self.aborted.append(self._timers.now)

    def close(self) -> None:
        self.closed.append(self._timers.now)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return bool(self.aborted or self.closed)

    def get_extra_info(self, name: str) -> Any:
        established = b"\x01"
        return SimpleNamespace(getsockopt=lambda *_: established) if name == "socket" else None


def connect() -> tuple[Any, Transport, Timers]:
    timers = Timers()
    transport = Transport(timers)
    connection: Any = LimitedProtocol.__new__(LimitedProtocol)
    connection.loop, connection.transport = timers, transport
    connection.flow = SimpleNamespace(
        pause_writing=lambda: None, resume_writing=lambda: None, resume_reading=lambda: None
    )
    connection.parser = SimpleNamespace(should_upgrade=lambda: False)
    connection.headers, connection._body = [], []
    connection.app_state, connection.root_path = {}, ""
    connection.server = connection.client = connection.scheme = connection.asgi_version = None
    connection.server_state = SimpleNamespace(total_requests=0)
    connection.timeout_keep_alive, connection.timeout_keep_alive_task = 1000.0, None
    connection.receive_timeout = 1.0
    return connection, transport, timers


def ask(connection: Any, count: int = 1) -> list[SimpleNamespace]:
    """Whole requests of the client, the first of which is being answered."""
    cycles = [
        SimpleNamespace(scope={"http_version": "1.1"}, more_body=False, response_complete=False, response_started=False)
        for _ in range(count)
    ]
    connection._cycles, connection.cycle, connection.pipeline = cycles, cycles[-1], cycles[:0:-1]
    return cycles


def test_a_half_closed_client_is_asked_every_second_whether_it_is_there() -> None:
    """A write is what makes the kernel tell that a client has closed the other side too."""
    connection, transport, timers = connect()
    ask(connection)
    assert connection.eof_received()
    timers.until(29.5)
    assert transport.written == pytest.approx(list(range(30)))


def test_a_half_closed_client_is_asked_between_answers_to_what_it_sent_ahead() -> None:
    """In the middle of one, it would take the question for a part of it."""
    connection, transport, timers = connect()
    first, last = ask(connection, 2)
    assert connection.eof_received()
    first.response_started = True
    timers.until(9.5)
    assert transport.written == [0]
    first.response_complete = True
    timers.until(12.5)
    assert transport.written == pytest.approx([0, 10, 11, 12])
    last.response_started = True
    timers.until(20)
    assert len(transport.written) == 4


@pytest.mark.parametrize("kept", [{"more_body": True}, {"scope": {"http_version": "1.0"}}])
def test_a_half_closed_client_whose_last_request_has_no_answer(kept: dict[str, Any]) -> None:
    """The rest of its body will never come, or nothing tells whether the client is still there."""
    connection, _, _ = connect()
    vars(ask(connection, 2)[-1]).update(kept)
    assert not connection.eof_received()


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
    connection.pause_writing()
    timers.until(20 * MOST_STALLED_SECONDS)
    assert transport.aborted == [11 * MOST_STALLED_SECONDS]


def test_the_time_of_a_request_begins_anew_when_the_answer_before_it_ends() -> None:
    connection, transport, timers = connect()
    (cycle,) = ask(connection)
    timers.until(0.2)
    connection._expect_request()  # the next one begins
    timers.until(1.95)
    cycle.response_complete = True
    connection.on_response_complete()
    timers.until(2.5)
    assert not transport.closed
    timers.until(4)
    assert transport.closed == pytest.approx([2.95])


def test_an_answer_to_half_a_request_gives_no_time_for_the_rest() -> None:
    connection, transport, timers = connect()
    connection._expect_request()
    (cycle,) = ask(connection)
    cycle.more_body = True
    timers.until(0.5)
    cycle.response_complete = True
    connection.on_response_complete()
    timers.until(4)
    assert transport.closed == [1]


@pytest.mark.parametrize("next_one", [False, True])
def test_an_answered_request_that_becomes_whole_leaves_an_idle_connection(next_one: bool) -> None:
    """It stays open for the keep-alive timeout, unless the next request begins with the same bytes."""
    connection, transport, timers = connect()
    connection.timeout_keep_alive = 0.5
    connection._expect_request()
    (cycle,) = ask(connection)
    cycle.more_body, cycle.response_complete = True, True
    connection.on_response_complete()
    connection._unset_keepalive_if_required()  # the rest of the body comes
    timers.until(0.25)
    connection.on_message_complete()
    if next_one:
        connection.on_message_begin()
    timers.until(4)
    assert transport.closed == [1.25 if next_one else 0.75]
