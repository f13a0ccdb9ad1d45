"""The directory of a process's published blocks: a file in memory, which others read without asking anybody.

An entry says where the pages of a block lie in the file of its owner's memory, and which tokens it stands for. Its
owner is the process that computed the block, or the broker once that has ended. Entries are found by key, over a table
of buckets.

**Pins.** Whoever maps a block holds a read lock on the byte of the directory whose number is that of the entry (an
`F_OFD_SETLK` lock, of the open file that the broker gave it). Whoever wants a block's pages back takes a write lock on
that byte first, and erases the entry while it has the lock. A reader looks at the entry after it has its lock. So the
kernel decides, in one place, which of the two came first, and it takes a lock back when its holder has ended, however
that came about.

    reader                          owner
    find the key                    write lock, or leave the block where it is
    read lock, or a miss            erase the entry
    read the entry again            unlock
    map the pages                   use the pages for something else

A reader may pin a range of entries with one lock: it gets all of it or nothing.

An entry has a checksum: one that is being written, or was erased, is a miss. Nothing here trusts what a file says about
sizes and places before it has looked at the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import select
import stat
import struct
import time
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from vattn import _native
from vattn.errors import VattnError

KEY_BYTES = 32
_MAGIC = b"vattn dy"
_FORMAT = 2
# magic, format, process, when it started, fingerprint, page size, tokens and pages of a block, most entries
_HEAD = struct.Struct("<8sIIQ32sIIIQ")
_FRESH, _WITHDRAWN, _LEFT, _ENDED = 128, 136, 144, 152  # places of numbers of 8 bytes that change
_BUCKETS = 4096  # where these begin
_BUCKET = 40  # bytes: a key and the number of its entry
_PROBED = 8  # buckets that a key may be in
_NUMBER = struct.Struct("<Q")
_LOCK = struct.Struct("hhqqi4x")  # struct flock
_CHECKSUM_BYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which Python has no name for
_READ_ONLY = fcntl.F_SEAL_WRITE | _FUTURE_WRITE  # with these its heir could not keep it
_MOST_BYTES = 2**50


class NoDirectory(VattnError):
    """A descriptor is not that of a directory."""


@dataclass(frozen=True)
class Shape:
    """What all blocks of a directory have in common.

    Attributes:
        fingerprint: 32 bytes that stand for all that a block's contents depend on, but for tokens and salt.
        page_size: bytes.
        block_tokens, block_pages: tokens and pages of a block.
        capacity: most entries.
    """

    fingerprint: bytes
    page_size: int
    block_tokens: int
    block_pages: int
    capacity: int

    @property
    def buckets(self) -> int:
        return 2 * self.capacity

    @property
    def entry_bytes(self) -> int:
        return KEY_BYTES + 8 + 8 * (self.block_tokens + self.block_pages) + _CHECKSUM_BYTES

    @property
    def entries_at(self) -> int:
        return _BUCKETS + _BUCKET * (self.buckets + _PROBED)

    @property
    def num_bytes(self) -> int:
        return self.entries_at + self.capacity * self.entry_bytes


class Entry(NamedTuple):
    """A published block.

    Attributes:
        published: when it was, in nanoseconds of the monotonic clock.
        tokens: its token ids.
        offsets: of its pages, in the file of its owner's memory.
    """

    key: bytes
    published: int
    tokens: array[int]
    offsets: array[int]


class Directory:
    """A directory as others see it, who find and pin blocks.

    Args:
        descriptor: of an open file of its own, since that holds the pins. It is closed with the directory.

    Attributes:
        pid, started: of the process that made it: its number, and when it started, in ticks since the machine did.
        identity: by which one file is known, whatever descriptor it has.

    Raises:
        NoDirectory: it is none. The descriptor stays the caller's.
    """

    def __init__(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & (_SEALS | _READ_ONLY) == _SEALS
            head = _HEAD.unpack(os.pread(descriptor, _HEAD.size, 0))
        except (OSError, struct.error):
            raise NoDirectory("the descriptor is not that of a directory") from None
        magic, version, self.pid, self.started, fingerprint, page, tokens, pages, capacity = head
        self.shape = Shape(fingerprint, page, tokens, pages, capacity)
        possible = 0 < capacity <= _MOST_BYTES and tokens and pages and page and not page & (page - 1)
        whole = possible and stat.S_ISREG(found.st_mode) and found.st_size == self.shape.num_bytes <= _MOST_BYTES
        if (magic, version) != (_MAGIC, _FORMAT) or not sealed or not whole:
            raise NoDirectory("the descriptor is not that of a directory")
        self.identity = found.st_dev, found.st_ino
        self._body = self.shape.entry_bytes - _CHECKSUM_BYTES
        self._file = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False
        _open.add(self)

    def fileno(self) -> int:
        return self._file

    def close(self) -> None:
        """Closes it, with which its pins end. Idempotent."""
        self._close()
        self._file = -1

    def find(self, key: bytes) -> int | None:
        """The number of the entry that is said to have this key; only `read` knows."""
        at = self._bucket(key)
        buckets = os.pread(self._file, _BUCKET * _PROBED, at)
        place = buckets.find(key)
        if place < 0 or place % _BUCKET:
            return None
        (number,) = _NUMBER.unpack_from(buckets, place + KEY_BYTES)
        return int(number) if number < self.shape.capacity else None

    def alike(self, number: int, keys: Sequence[bytes]) -> int:
        """How many entries from this number on are said to have these keys, in order; only `offsets` knows. Where the
        last one has its key, no other is looked at.

        What is published together has neighbouring numbers, and is pinned and read together, which takes a few system
        calls in place of some per entry.
        """
        return _native.entries_alike(self._file, self._at(number), self.shape.entry_bytes, b"".join(keys))

    def read(self, number: int) -> Entry | None:
        """An entry; None if there is none of this number."""
        data = os.pread(self._file, self.shape.entry_bytes, self._at(number))
        body = data[: self._body]
        if len(data) < self.shape.entry_bytes or data[self._body :] != _checksum(body):
            return None
        numbers = array("q", body[KEY_BYTES:])
        tokens = 1 + self.shape.block_tokens
        return Entry(body[:KEY_BYTES], numbers[0], numbers[1:tokens], numbers[tokens:])

    def offsets(self, number: int, keys: Sequence[bytes], tokens: bytes) -> bytes:
        """Where the pages lie of the entries from this number on, as far as these have the keys and tokens, in order:
        numbers of 8 bytes, as `tokens` are.
        """
        at, size = self._at(number), self.shape.entry_bytes
        return _native.entry_offsets(self._file, at, size, b"".join(keys), tokens, 8 * self.shape.block_tokens)

    def entries(self) -> Iterator[tuple[int, Entry]]:
        """All entries, with their numbers. Takes as long as there is memory in the file, whatever the file says."""
        number, end = 0, min(self._get(_FRESH), self.shape.capacity)
        while number < end:
            if (entry := self.read(number)) is not None:
                yield number, entry
                number += 1
                continue
            try:
                written = os.lseek(self._file, self._at(number + 1), os.SEEK_DATA)
            except OSError:  # nothing is written from here on
                return
            number = max(number + 1, (written - self.shape.entries_at) // self.shape.entry_bytes)

    def pin(self, number: int, count: int = 1) -> bool:
        """Keeps the pages of so many entries, from this number on, as they are until `unpin` of each; False if their
        owner is about to take some of them.
        """
        return self._lock(fcntl.F_RDLCK, number, count)

    def unpin(self, number: int) -> None:
        """Ends `pin`."""
        self._lock(fcntl.F_UNLCK, number)

    @property
    def withdrawals(self) -> int:
        """How many blocks were withdrawn: they are wrong, and whoever has one pinned finds its entry changed."""
        return self._get(_WITHDRAWN)

    @property
    def left(self) -> bool:
        """Whether the process that made it has nothing more to do with it."""
        return bool(self._get(_LEFT))

    @property
    def has_owner(self) -> bool:
        """Whether the process that made it lives; also where that cannot be seen for want of a descriptor."""
        try:
            process = os.pidfd_open(self.pid)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:
            return True
        try:
            return started(self.pid) == self.started and not has_ended(process)
        except OSError:
            return False
        finally:
            os.close(process)

    @property
    def ended(self) -> bool:
        """Whether there is no entry, and will be none."""
        return bool(self._get(_ENDED))

    def _lock(self, kind: int, number: int, count: int = 1) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, number, count, 0))
        except OSError:  # somebody else has one, or the kernel has no memory for it
            return False
        return True

    def _get(self, place: int) -> int:
        return int(_NUMBER.unpack(os.pread(self._file, 8, place))[0])

    def _at(self, number: int) -> int:
        return self.shape.entries_at + number * self.shape.entry_bytes

    def _bucket(self, key: bytes) -> int:
        """Where the buckets begin that a key may be in."""
        return _BUCKETS + _BUCKET * (int.from_bytes(key[:8], "little") % self.shape.buckets)


class OwnDirectory(Directory):
    """A directory as the owner of its blocks sees it. Its descriptor can be written to."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._free: list[int] = []

    @classmethod
    def make(cls, shape: Shape) -> Self:
        """An empty directory of this process."""
        descriptor = os.memfd_create("vattn-directory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            head = (_MAGIC, _FORMAT, os.getpid(), started(os.getpid()), shape.fingerprint, shape.page_size)
            os.pwrite(descriptor, _HEAD.pack(*head, shape.block_tokens, shape.block_pages, shape.capacity), 0)
            os.ftruncate(descriptor, shape.num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def add(self, key: bytes, tokens: Sequence[int], offsets: Sequence[int]) -> int | None:
        """Publishes a block; the number of its entry, or None if there is no room for it.

        Its pages are finished, and stay as they are until `remove` has said so.

        Raises:
            OSError: there is no memory for it; it is not published.
        """
        place = self._place(key, bytes(KEY_BYTES))
        if place is None:
            return None
        fresh = self._get(_FRESH)
        if self._free:
            number = self._free.pop()
        elif fresh < self.shape.capacity:
            number = fresh
            self._put(_FRESH, fresh + 1)
        else:
            return None
        try:
            # The entry last: it is found as a neighbour, too, without its bucket.
            os.pwrite(self._file, key + _NUMBER.pack(number), place)
            self._write(number, key, time.monotonic_ns(), tokens, offsets)
        except OSError:
            self._free.append(number)
            self._erase(key, number)
            raise
        return number

    def remove(self, number: int) -> bool:
        """Takes a block back, unless somebody has it pinned; whether its pages may be used for something else."""
        if not self._lock(fcntl.F_WRLCK, number):
            return False
        try:
            key = os.pread(self._file, KEY_BYTES, self._at(number))
            os.pwrite(self._file, bytes(KEY_BYTES), self._at(number))
            self._erase(key, number)
        finally:
            self._lock(fcntl.F_UNLCK, number)
        self._free.append(number)
        return True

    def hide(self, number: int) -> None:
        """Has nobody find a block any more; who has it pinned keeps it. Its pages stay as they are until `remove`."""
        self._erase(os.pread(self._file, KEY_BYTES, self._at(number)), number)

    def show(self, number: int, key: bytes) -> None:
        """Undoes `hide` of an entry with this key, unless that was withdrawn, or another one is found by it."""
        entry, place = self.read(number), self._place(key, bytes(KEY_BYTES))
        if entry is not None and entry.key == key and place is not None and self.find(key) is None:
            os.pwrite(self._file, key + _NUMBER.pack(number), place)

    def removed_tokens(self, number: int, key: bytes) -> array[int] | None:
        """The token ids of an entry with this key that was removed; None once another block has its place."""
        data = os.pread(self._file, self.shape.entry_bytes, self._at(number))
        body = key + data[KEY_BYTES : self._body]
        if data[self._body :] != _checksum(body):
            return None
        return array("q", body[KEY_BYTES:])[1 : 1 + self.shape.block_tokens]

    def withdraw(self, number: int) -> None:
        """`hide`, because the block is wrong: who has it pinned learns that."""
        entry = self.read(number)
        assert entry is not None, "withdrew a block that is not published"
        self._erase(entry.key, number)
        self._write(number, secrets.token_bytes(KEY_BYTES), entry.published, entry.tokens, entry.offsets)
        self._put(_WITHDRAWN, self.withdrawals + 1)

    def pinned(self) -> set[int]:
        """The numbers of the entries that somebody has pinned."""
        found: set[int] = set()
        ranges = [(0, self._get(_FRESH))]
        while ranges:
            begin, end = ranges.pop()
            if begin >= end:
                continue
            question = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, end - begin, 0)
            kind, _, first, length, _ = _LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, question))
            if kind == fcntl.F_UNLCK:
                continue
            last = min(end, first + length) if length else end
            first = max(begin, first)
            found.update(range(first, last))
            ranges += [(begin, first), (last, end)]
        return found

    def leave(self) -> None:
        """Says that its blocks are whoever's who finds them."""
        self._put(_LEFT, 1)

    def end(self) -> None:
        """Says that there will be no more entries."""
        self._put(_ENDED, 1)

    def _write(self, number: int, key: bytes, published: int, tokens: Sequence[int], offsets: Sequence[int]) -> None:
        body = key + array("q", [published, *tokens, *offsets]).tobytes()
        assert len(body) == self._body, "a block of another shape"
        if os.pwrite(self._file, body + _checksum(body), self._at(number)) < self.shape.entry_bytes:
            raise OSError(errno.ENOSPC, "an entry was written in part")

    def _erase(self, key: bytes, number: int) -> None:
        place = self._place(key, key + _NUMBER.pack(number))
        if place is not None:
            os.pwrite(self._file, bytes(_BUCKET), place)

    def _place(self, key: bytes, content: bytes) -> int | None:
        """The first of a key's buckets that begins with this content."""
        at = self._bucket(key)
        buckets = os.pread(self._file, _BUCKET * _PROBED, at)
        starts = range(0, _BUCKET * _PROBED, _BUCKET)
        return next((at + start for start in starts if buckets.startswith(content, start)), None)

    def _put(self, place: int, value: int) -> None:
        os.pwrite(self._file, _NUMBER.pack(value), place)


_open: weakref.WeakSet[Directory] = weakref.WeakSet()


def _close_in_child() -> None:
    """A child that had these open would keep what this process has pinned."""
    for directory in list(_open):
        directory.close()


os.register_at_fork(after_in_child=_close_in_child)


def read_only(descriptor: int) -> int:
    """A descriptor of the same file that cannot be written to, of an open file of its own."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def started(pid: int) -> int:
    """When a process started, in ticks since the machine did, by which it differs from a later one of its number.

    Raises:
        OSError: it has ended.
    """
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19])


def has_ended(process: int) -> bool:
    """Whether the process of a pidfd has ended, so that its memory is gone; its parent may not have noticed."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _checksum(body: bytes) -> bytes:
    return _NUMBER.pack(_native.checksum(body))
