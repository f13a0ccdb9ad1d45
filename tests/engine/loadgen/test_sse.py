"""Events from bytes in any pieces."""

from __future__ import annotations

import pytest

from vattn.engine.loadgen.sse import EventReader, error_message

STREAM = (
    ': a comment\n\nevent: message\ndata: {"a": 1}\r\n\r\ndata:no space\n\n\n\ndata: two\ndata: lines\nid: 3\n\n'
    "data: wörter\n\ndata: cut off"
).encode()
EVENTS = ['{"a": 1}', "no space", "two\nlines", "wörter"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_are_the_same_however_the_bytes_come(size: int) -> None:
    reader = EventReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_an_event_comes_with_its_empty_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x\n") == []
    assert reader.feed(b"\n") == ["x"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"error": {"message": "too long", "type": "x"}}', "too long"),
        ('{"error": "plain"}', "plain"),
        ('{"detail": "other"}', '{"detail": "other"}'),
        ("<html>" + "x" * 1000, ("<html>" + "x" * 1000)[:300]),
        ("[1]", "[1]"),
        ("", "no message"),
    ],
)
def test_the_message_of_an_error(answer: str, message: str) -> None:
    assert error_message(answer) == message
