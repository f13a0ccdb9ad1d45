"""One budget of physical memory for the engines of one machine.

Every engine may have as many blocks as the whole budget holds. A file in shared memory says how much each of them has
backed, and its lock makes an engine's decision one with what it writes there. An engine also locks a byte of the file
for as long as it lives: the kernel unlocks it however the engine ends, and what the engine had counts no more. The last
engine removes the file; if it is killed, the next engine that starts does, whichever its budget is.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from vattn.errors import ConfigError
from vattn.units import parse_bytes

_FOLDER = Path("/dev/shm")
# Engine i has the i-th number of the file, the bytes that it has backed, and the lock of byte _FIRST_LOCK + i, which
# lies past all numbers.
_BYTES = struct.Struct("q")
_FIRST_LOCK = 2**40
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid


def parse_budget(text: str) -> tuple[str, int]:
    """The name and the bytes of a budget such as `"chat:4GiB"`.

    Raises:
        ConfigError: it is no such text.
    """
    name, colon, size = text.rpartition(":")
    if not colon or not re.fullmatch(r"[\w.-]{1,64}", name):
        raise ConfigError(f"vattn: shared_budget={text!r} is not NAME:SIZE, such as 'chat:4GiB'")
    return name, parse_bytes(size, "shared_budget")


class SharedBudget:
    """The part of one engine in a budget that several share, until it is dropped or its process ends.

    Args:
        text: a name that the engines of the budget have in common, a colon, and a size: `"chat:4GiB"`.

    Raises:
        ConfigError: it is no such text.
    """

    def __init__(self, text: str) -> None:
        name, self.total = parse_budget(text)
        prefix = f"vattn-budget-{os.getuid()}-"
        for path in _FOLDER.glob(f"{prefix}*"):
            _remove_unused(path)
        path = _FOLDER / f"{prefix}{name}"
        self._file, self._number = _join(path)
        weakref.finalize(self, _leave, self._file, path)

    @contextmanager
    def deciding(self) -> Iterator[Share]:
        """What the engine may have, which no other engine changes within the context."""
        with _locked(self._file):
            numbers = range(os.fstat(self._file).st_size // _BYTES.size)
            others = (number for number in numbers if _alive(self._file, number))
            share = Share(self.total - sum(_used(self._file, number) for number in others))
            yield share
            if share.used is not None:
                os.pwrite(self._file, _BYTES.pack(share.used), self._number * _BYTES.size)


class Share:
    """What one engine may have of a budget at a moment.

    Attributes:
        most: bytes that it may have in all.
        used: bytes that it will have, for the others to see; None if that is as before.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used: int | None = None


def _join(path: Path) -> tuple[int, int]:
    """A descriptor of a budget's file, and a number in it that no engine has."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with _locked(file):
            if os.fstat(file).st_nlink:  # else the last engine has removed it in the meantime
                number = next(number for number in count() if not _alive(file, number))
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, _byte(number))
                os.pwrite(file, _BYTES.pack(0), number * _BYTES.size)
                return file, number
        os.close(file)


def _leave(file: int, path: Path) -> None:
    os.close(file)
    _remove_unused(path)


def _remove_unused(path: Path) -> None:
    """Removes a budget's file if no engine has it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it has gone in the meantime, or is not ours
        return
    with _locked(file):
        numbers = range(os.fstat(file).st_size // _BYTES.size)
        if os.fstat(file).st_nlink and not any(_alive(file, number) for number in numbers):
            path.unlink()
    os.close(file)


@contextmanager
def _locked(file: int) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _byte(number: int) -> bytes:
    """The lock of an engine, for calls that concern locks of open files: those do not end when the process closes
    another descriptor of the file.
    """
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _FIRST_LOCK + number, 1, 0)


def _alive(file: int, number: int) -> bool:
    """Whether another engine than that of `file` has this number."""
    kind, *_ = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, _byte(number)))
    return bool(kind != fcntl.F_UNLCK)


def _used(file: int, number: int) -> int:
    used: int
    (used,) = _BYTES.unpack(os.pread(file, _BYTES.size, number * _BYTES.size))
    return used
