"""Messages between borrowers and a broker: JSON objects behind their length, with exactly the fields of their kind.

A connection carries nothing else. Whoever gets anything else closes it; nobody tries to find the next message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

VERSION: Final = 2  # of the protocol
MOST_BYTES: Final = 2**16  # of a message
MOST_MEMORY: Final = 2**50  # as in `vattn.units`; no machine has more
MOST_NUMBER: Final = 2**62
MOST_TEXT: Final = 4096
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]

# How urgent a wish is: ahead of need; somebody waits for an answer, who can do without; a call fails without it.
AHEAD: Final = 0
ASKED: Final = 1
NEEDED: Final = 2

# Stages of asking back, in order.
STAGES: Final = ("free", "parked", "cached", "all")


class WireError(Exception):
    """What came is no message; the text says what is wrong, never what it contained."""


def _size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_MEMORY


def _number(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_NUMBER


def _text(value: object) -> bool:
    return type(value) is str and len(value) <= MOST_TEXT


def _flag(value: object) -> bool:
    return type(value) is bool


def _optional(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


def _urgency(value: object) -> bool:
    return type(value) is int and 0 <= value <= NEEDED


def _stage(value: object) -> bool:
    return value is None or value in STAGES


def _table(value: object) -> bool:
    return type(value) is dict


# Field to what it has to be, by kind.
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    # From borrowers. The descriptor of the borrower's memory, if that is one file, comes with `join`.
    "join": {
        "version": _number,
        "identity": _text,  # chosen by the borrower once, so that it is known when it joins again
        "name": _text,
        "device": _text,
        "page": _size,
        "at_least": _size,
        "at_most": _optional(_size),  # None: the whole budget
        "lease": _size,  # that it has of an earlier broker of this pool
    },
    # What it has, and wants. `ack` is the number of the broker's last message that was dealt with.
    "report": {
        "ack": _number,
        "lease": _size,
        "want": _size,  # the lease that it would like to have
        "wish": _number,  # by which the answer to it is known
        "urgent": _urgency,
        "owned": _size,
        "parked": _size,
        "cached": _size,
        "oldest": _optional(_number),  # when the cached block to be evicted next was last used: nanoseconds, monotonic
        "shared": _size,  # of others, which count there
    },
    # The descriptor of its directory comes with it: others may map what is published there.
    "share": {},
    # Descriptors of the memory and the directory of another process, as it got them with `peer` of an earlier broker.
    "orphan": {},
    # Its pool is closed: what memory is left will only become less.
    "leave": {},
    # From a broker to a borrower.
    "joined": {
        "name": _text,
        "budget": _size,
        "chunk": _size,
        "number": _number,
        "lease": _size,
        "at_least": _size,
        "at_most": _size,
    },
    "lease": {
        "number": _number,
        "lease": _size,
        "at_least": _size,
        "at_most": _size,
        "wish": _number,  # that this answers
        "short": _flag,  # there is no more to be had for now
        "give": _optional(_size),  # the level that the borrower is asked to come down to
        "stage": _stage,  # by giving up no more than this
    },
    # Descriptors of the memory and the directory of another process come with it, which can only be read.
    "peer": {},
    "refused": {"why": _text},
    # From `vattn pool`, and the answers.
    "top": {},
    "limit": {"name": _text, "at_least": _optional(_size), "at_most": _optional(_size)},
    "reclaim": {"name": _optional(_text), "stage": _stage},
    "check": {},
    "answer": {"result": _table},
}

# Of a borrower, in the notes that a broker leaves for the next one of its pool.
NOTE: Final[Mapping[str, Callable[[object], bool]]] = {
    "identity": _text,
    "pid": _number,
    "started": _number,
    "name": _text,
    "at_least": _size,
    "at_most": _optional(_size),
    "page": _size,
    "lease": _size,
}


def encode(kind: str, **fields: object) -> bytes:
    """A message with its length in front."""
    message = {"kind": kind, **fields}
    check(message)
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MOST_BYTES:
        raise WireError(f"a message of {len(body)} bytes; the most is {MOST_BYTES}")
    return _LENGTH.pack(len(body)) + body


def check(message: object) -> Message:
    """The same message, if it is one.

    Raises:
        WireError: it is not.
    """
    if type(message) is not dict:
        raise WireError("no object")
    kind = message.get("kind")
    fields = KINDS.get(kind) if type(kind) is str else None
    if fields is None:
        raise WireError("an unknown kind")
    if message.keys() != {"kind", *fields}:
        raise WireError(f"a message of kind {kind} has the fields {', '.join(fields) or '(none)'}")
    for name, holds in fields.items():
        if not holds(message[name]):
            raise WireError(f"{name} of a message of kind {kind}")
    return message


def decode(body: bytes) -> Message:
    """The message that these bytes are, without their length.

    Raises:
        WireError: they are none.
    """
    try:
        return check(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {type(error).__name__}") from None


class Reader:
    """Divides what a connection brings into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with these bytes.

        Raises:
            WireError: what came is no message, or is too long. The connection is of no use any more.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not 0 < length <= MOST_BYTES:
                raise WireError(f"a length of {length}")
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield decode(body)
