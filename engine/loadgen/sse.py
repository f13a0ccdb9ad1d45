"""Server-sent events: the `data` of each, from bytes in whatever pieces the network delivers them."""

from __future__ import annotations

import json
from typing import Any


class EventReader:
    """Collects bytes, and yields an event once the empty line behind it has come."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[str]:
        """The `data` of the events that are complete with these bytes; comments and other fields are left out."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                events.append(b"\n".join(self._data).decode())
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
        return events


def error_message(answer: str) -> str:
    """The message of an OpenAI-style error, or the beginning of an answer that is none."""
    try:
        error: Any = json.loads(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return answer.strip()[:300] or "no message"
