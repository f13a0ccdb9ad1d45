"""Kept: the published blocks of a process that has ended, which are the broker's from then on."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from array import array
from collections.abc import Iterator

from vattn.broker.directory import Directory, OwnDirectory

_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_AT_ONCE = 2**28  # bytes that are given back while borrowers wait
_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger("vattn.broker")


class Kept:
    """A file of memory of which nothing is in use but what was published.

    Args:
        memory: the file, to be written to; it is closed with this object, as is the directory.

    Attributes:
        process: a pidfd of the process, as long as that lives: it may still use the rest of the file; else -1.
    """

    def __init__(self, memory: int, directory: OwnDirectory, process: int = -1) -> None:
        self.memory = memory
        self.directory = directory
        self.process = process
        self._page = directory.shape.page_size
        self._used: dict[int, int] = {}  # by entry: when it was last seen in use
        self._offsets: dict[int, array[int]] = {}
        for number, entry in directory.entries():
            self._used[number], self._offsets[number] = entry.published, entry.offsets
        self._pinned: set[int] = set()
        self._rest = [] if process >= 0 else self._unpublished()

    @property
    def bytes(self) -> int:
        """What the file holds."""
        return os.fstat(self.memory).st_blocks * 512

    @property
    def evictable(self) -> int:
        """Bytes of blocks that nobody had mapped when that was last looked at."""
        return (len(self._used) - len(self._pinned)) * self.directory.shape.block_pages * self._page

    @property
    def gone(self) -> bool:
        """Whether nothing is left, nor will be: the file of a pool that has left only becomes less."""
        return not self._used and not self._rest and (self.process < 0 or not self.bytes)

    def ended(self) -> None:
        """The process has ended."""
        os.close(self.process)
        self.process = -1
        self._rest = self._unpublished()

    def tidy(self) -> bool:
        """Gives back some of what was not published; whether there is more."""
        left = _AT_ONCE
        while self._rest and left > 0:
            start, end = self._rest.pop()
            size = min(left, end - start)
            self._punch(start, size)
            left -= size
            if start + size < end:
                self._rest.append((start + size, end))
        return bool(self._rest)

    def look(self) -> None:
        """Notes which blocks are in use."""
        self._pinned = self.directory.pinned() & self._used.keys()
        self._used |= dict.fromkeys(self._pinned, time.monotonic_ns())

    def evict(self, num_bytes: int) -> int:
        """Gives back blocks that nobody has mapped, those first that were used longest ago; returns the bytes."""
        freed = 0
        self.look()
        for number in sorted(self._used.keys() - self._pinned, key=lambda number: (self._used[number], -number)):
            if freed >= num_bytes:
                break
            if not self.directory.remove(number):
                continue
            for offset in self._offsets.pop(number):
                self._punch(offset, self._page)
                freed += self._page
            del self._used[number]
        return freed

    def close(self) -> None:
        """Closes the files. What others have mapped stays as it is."""
        os.close(self.memory)
        self.directory.close()
        if self.process >= 0:
            os.close(self.process)

    def _unpublished(self) -> list[tuple[int, int]]:
        """The ranges of the file between its published pages."""
        ranges, start = [], 0
        for offset in sorted(offset for offsets in self._offsets.values() for offset in offsets):
            if start < offset:
                ranges.append((start, offset))
            start = offset + self._page
        size = os.fstat(self.memory).st_size
        return [*ranges, (start, size)] if start < size else ranges

    def _punch(self, start: int, size: int) -> None:
        place, length = ctypes.c_int64(start), ctypes.c_int64(size)
        while _libc.fallocate64(self.memory, _PUNCH_HOLE, place, length) != 0:
            if (error := ctypes.get_errno()) != errno.EINTR:
                _log.warning("memory of a process that has ended cannot be given back: %s", os.strerror(error))
                return


def problems(directory: Directory, memory: int) -> Iterator[str]:
    """What is wrong with the pages that a directory says are published; nothing, if all is well."""
    size, page = os.fstat(memory).st_size, directory.shape.page_size
    seen: set[int] = set()
    for number, entry in directory.entries():
        offsets = set(entry.offsets)
        if len(offsets) < len(entry.offsets) or offsets & seen:
            yield f"a page of entry {number} is published twice"
        if any(offset % page or not 0 <= offset <= size - page for offset in offsets):
            yield f"a page of entry {number} is not in its file"
        seen |= offsets
