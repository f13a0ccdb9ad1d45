"""What an engine that decodes and one that prefills say to each other, over a Unix socket beside that of their pool.

    decoder                                   prefiller
    COMPUTE job, salt, tokens           ->
    DROP job                            ->
                                        <-    DONE job: the prompt's whole blocks are published
                                        <-    FAILED job: it is to be computed where it is wanted
                                        <-    ALIVE: what is asked for is worked on

Contents never come this way: what a prefiller says is no more than a hint when to look for published blocks.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum

from vattn.errors import VattnError

PATIENCE = 5.0  # seconds after which a prefiller that says nothing is waited for no more
BEAT = 1.0  # seconds between two signs of life
_HEAD = struct.Struct("<BQII")  # kind, job, bytes of the salt, tokens
_MOST_SALT = 2**16
_MOST_TOKENS = 2**24
_TOKEN = "i"  # of `array`, 4 bytes


class Kind(IntEnum):
    COMPUTE = 1
    DROP = 2
    DONE = 3
    FAILED = 4
    ALIVE = 5


class LineError(VattnError):
    """What came is no message."""


def message(kind: Kind, job: int = 0, salt: bytes = b"", tokens: Sequence[int] = ()) -> bytes:
    """The bytes of a message."""
    return _HEAD.pack(kind, job, len(salt), len(tokens)) + salt + array(_TOKEN, tokens).tobytes()


async def receive(reader: asyncio.StreamReader, kinds: Sequence[Kind]) -> tuple[Kind, int, bytes, list[int]]:
    """The next message: its kind, which is one of these, job, salt and tokens.

    Raises:
        LineError: there is none; nothing more can be read.
        IncompleteReadError, OSError: the line has ended.
    """
    number, job, salt_bytes, count = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if number not in kinds or salt_bytes > _MOST_SALT or count > _MOST_TOKENS:
        raise LineError("what came is no message")
    if number != Kind.COMPUTE and (salt_bytes or count):
        raise LineError("a message with a prompt that has none")
    salt = await reader.readexactly(salt_bytes)
    tokens = array(_TOKEN, await reader.readexactly(count * array(_TOKEN).itemsize))
    return Kind(number), job, salt, tokens.tolist()
