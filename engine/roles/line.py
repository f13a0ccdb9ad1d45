"""What an engine that decodes and one that prefills say to each other, over a Unix socket beside that of their pool.

    decoder                                   prefiller
    COMPUTE job, salt, tokens           ->
    DROP job                            ->
                                        <-    DONE job, tokens, rows: the prompt's whole blocks are published
                                        <-    FAILED job: it is to be computed where it is wanted
                                        <-    ALIVE: what is asked for is worked on

Whole blocks never come this way: that they are published is no more than a hint when to look for them. What fills no
block is in nobody's pages but those of its request, so a DONE has a copy of it: the rows of the prompt's last tokens,
but for the very last one, which its reader has to compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path

from vattn.errors import VattnError

PATIENCE = 5.0  # seconds after which a prefiller that says nothing is waited for no more
BEAT = 1.0  # seconds between two signs of life
_HEAD = struct.Struct("<BQIIQ")  # kind, job, bytes of the salt, tokens, bytes of rows
_DIGEST_BYTES = 16
MOST_SALT = 2**16  # bytes
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


@dataclass(frozen=True)
class Message:
    """What came.

    Attributes:
        tokens: of a prompt, or those that `rows` are of.
    """

    kind: Kind
    job: int
    salt: bytes
    tokens: list[int]
    rows: bytearray


def rest_of(num_tokens: int, block_tokens: int) -> range:
    """Which tokens of a prompt come as rows: those that fill no block, and need not be computed by its reader."""
    last = num_tokens - 1
    return range(last // block_tokens * block_tokens, last)


def message(
    kind: Kind,
    job: int = 0,
    salt: bytes = b"",
    tokens: Sequence[int] = (),
    rows: Sequence[memoryview] = (),
    *,
    key: bytes = b"",
) -> bytes:
    """The bytes of a message.

    Args:
        key: what the values of rows depend on; who expects another one refuses them.
    """
    head = _HEAD.pack(kind, job, len(salt), len(tokens), sum(map(len, rows)))
    ids = array(_TOKEN, tokens).tobytes()
    return b"".join([head, salt, ids, *rows, *([_digest(key, ids, *rows)] if rows else [])])


async def receive(
    reader: asyncio.StreamReader, kinds: Sequence[Kind], *, key: bytes = b"", most_rows: int = 0
) -> Message:
    """The next message, which is of one of these kinds.

    Args:
        most_rows: bytes.

    Raises:
        LineError: there is none; nothing more can be read.
        IncompleteReadError, OSError: the line has ended.
    """
    number, job, salt_bytes, count, row_bytes = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if number not in kinds or salt_bytes > MOST_SALT or count > _MOST_TOKENS:
        raise LineError("what came is no message")
    kind = Kind(number)
    if kind is not Kind.COMPUTE and (salt_bytes or (count and not row_bytes)):
        raise LineError("a message with a prompt that has none")
    if row_bytes and (kind is not Kind.DONE or row_bytes > most_rows or count > row_bytes):
        raise LineError("a message with more rows than there are")
    salt = await reader.readexactly(salt_bytes)
    ids = await reader.readexactly(count * array(_TOKEN).itemsize)
    rows = bytearray(await reader.readexactly(row_bytes))
    if rows and await reader.readexactly(_DIGEST_BYTES) != _digest(key, ids, rows):
        raise LineError("rows that are not what was sent, or not for this model")
    return Message(kind, job, salt, array(_TOKEN, ids).tolist(), rows)


def keep_from_children(path: Path) -> None:
    """Has sockets of this name closed in forked children, in which they would seem to be this process when that has
    ended: the one that listens, both ends of its connections, and those that asyncio has just accepted.
    """
    _names.update((str(path), str(early(path))))


def early(path: Path) -> Path:
    """The name of a prefiller's socket until it listens, which is the name that the socket keeps."""
    return path.with_suffix(".early")


def _close_in_child() -> None:
    """Not by their loop, whose epoll the parent has, too; its objects go on having descriptors, but of nothing."""
    if not _names:
        return
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # or looking at a socket would make it non-blocking, in the parent, too
    try:
        with socket.socket(socket.AF_UNIX) as nothing:
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if _has_name(descriptor):
                    os.dup2(nothing.fileno(), descriptor, inheritable=False)
    finally:
        socket.setdefaulttimeout(timeout)
    _names.clear()


def _has_name(descriptor: int) -> bool:
    """Whether it is a socket with one of `_names`, at either end."""
    found = set()
    with contextlib.suppress(OSError):  # no socket, or without an address
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as end:
                for name in (end.getsockname, end.getpeername):
                    with contextlib.suppress(OSError):
                        found.add(name())
    return not _names.isdisjoint(found)


_names: set[object] = set()
os.register_at_fork(after_in_child=_close_in_child)


def _digest(key: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    digest = blake2b(key=key, digest_size=_DIGEST_BYTES, person=b"vattn rest")
    for part in parts:
        digest.update(part)
    return digest.digest()
