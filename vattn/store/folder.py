"""`PrefixStore`: a folder of blocks that processes of one user share, within a quota.

A block is written under a temporary name, locked by its writer, and renamed when it is whole: a writer that is killed
leaves a file that nobody has locked, which the next search for room deletes. Readers take no lock. They copy a file
into memory of their own before they check it, so nothing that happens to it later matters.

The time of a file's last change is when its block was last used, less a nanosecond for each block before it. So what
was used longest ago is evicted first, and of blocks that were used together the last one of the prefix, which could not
be found without its predecessors.

The file `lock` serialises all that changes how many bytes there are, and has their number: stored before a block is
written and after one is deleted, so a process that is killed in between leaves a number that is too high, never too
low, until somebody counts. Who finds that it has been deleted makes another, and counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vattn.errors import ConfigError

from .blockfile import Allocate, Block, Buffer, Head, NotThisBlock, pack, unpack

_LOCK = "lock"
_BLOCK = re.compile(r"[0-9a-f]{64}\.kv", re.ASCII)
_UNFINISHED = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp", re.ASCII)
_BOOKS = struct.Struct("<Q")
# Of the quota: evicted beyond what is missing, so that not every block needs a search.
_SLACK = 1 / 16
_SKEW_NS = 3600 * 10**9  # by which clocks may differ
_PATIENCE = 30.0  # seconds for other processes to unlock a folder; counting many files takes some
_GLANCES = 0.001  # seconds between looks at whether they have
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe must not wait


@dataclass(frozen=True)
class Entry:
    """A block in the folder.

    Attributes:
        key: as hexadecimal digits.
        used_ns: nanoseconds since the epoch; lower for blocks that give way earlier.
    """

    path: Path
    key: str
    size: int
    used_ns: int

    def head(self) -> Head | None:
        """What its file says of itself, unchecked; None if there is no such file any more."""
        with contextlib.suppress(OSError, NotThisBlock), open(os.open(self.path, _READING), "rb") as file:
            return Head.of(file.read(Head.SIZE))
        return None


class PrefixStore:
    """Blocks in a folder. Any number of processes of one user may use it at once, each by as many threads as it likes.

    A call raises an OSError if the disk does not do its part, or another process keeps the folder locked; the store is
    then as it was. Nothing has to be closed.

    Args:
        folder: made if it is not there, for its owner alone.
        most_bytes: the quota, of all files together; None for a caller that puts nothing. The lowest of all users'
            counts.

    Attributes:
        rejected: files that were found, were not what they had to be, and were deleted.
        evicted: blocks that gave way to others.

    Raises:
        ConfigError: it cannot be used, is somebody else's, or others can enter it.
    """

    def __init__(self, folder: str | os.PathLike[str], most_bytes: int | None = None) -> None:
        self.path = Path(folder).expanduser().absolute()
        self.most_bytes = most_bytes
        self.rejected = 0
        self.evicted = 0
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._books = self._open_books()
        except (OSError, ValueError) as error:  # the latter for a name with a null character
            raise ConfigError(f"the store {self.path} cannot be used: {error}; name another folder") from error
        weakref.finalize(self, os.close, self._books)
        self._mutex = threading.Lock()  # a lock of a file is its process's, not its thread's
        try:
            with self._locked():
                entries, total = self._count()
                self._evict(entries, total, self._quota)
        except OSError as error:
            raise ConfigError(f"the store {self.path} cannot be used: {error}; name another folder") from error

    def put(self, block: Block, parts: Sequence[Buffer], *, used_ns: int | None = None) -> bool:
        """Write a block, unless there is one of its key, and evict others if there is no room.

        Args:
            parts: its contents, in pieces that are checked one by one.
            used_ns: when it was used, for the order of eviction; by default now.

        Returns:
            Whether it is there; not, if only blocks that were used later could give way.
        """
        used_ns = _when(block.depth, used_ns)
        path = self._place(block.key)
        buffers = [pack(block, parts), *parts]
        size = sum(map(len, buffers))
        temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        with self._locked():
            if _touch(path, used_ns):
                return True
            if path.is_dir() or not self._make_room(size, used_ns):
                return False
            self._note(self._noted() + size)
            descriptor = -1
            try:
                descriptor = self._begin(temporary, size)
            finally:
                if descriptor < 0:
                    self._note(self._noted() - size)
        try:
            _write(descriptor, buffers)
            os.utime(descriptor, ns=(used_ns, used_ns))
            temporary.rename(path)
        except BaseException:
            with self._locked(), contextlib.suppress(FileNotFoundError):  # it may have its name already
                temporary.unlink()
                self._note(self._noted() - size)
            raise
        finally:
            os.close(descriptor)
        return True

    def find(self, keys: Iterable[bytes]) -> int:
        """How many of these blocks are there, up to the first that is not."""
        found = 0
        for key in keys:
            if not self._place(key).exists():
                break
            found += 1
        return found

    def announce(self, key: bytes) -> None:
        """Have the kernel begin to read a block, without waiting for it."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._place(key), _READING)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def read(
        self, block: Block, allocate: Allocate = lambda size: memoryview(bytearray(size))
    ) -> list[memoryview] | None:
        """The parts of a block; None if there is none. A file that is not that block, byte for byte, is deleted.

        Args:
            allocate: makes room for so many bytes, of which the parts will be views.
        """
        path = self._place(block.key)
        try:
            descriptor = os.open(path, _READING)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            self._reject(path)
            return None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or _is_open_to_others(found):
                raise NotThisBlock("others may have written it")
            return unpack(block, found.st_size, lambda room: _fill(descriptor, room), allocate)
        except (NotThisBlock, OSError, EOFError):
            self._reject(path, os.fstat(descriptor).st_ino)
            return None
        finally:
            os.close(descriptor)

    def use(self, keys: Sequence[bytes], *, used_ns: int | None = None) -> int:
        """Note that these blocks of one prefix, from its first one on, were used.

        Returns:
            How many of them are there, up to the first that is not.
        """
        for depth, key in enumerate(keys):
            if not _touch(self._place(key), _when(depth, used_ns)):
                return depth
        return len(keys)

    def remove(self, key: bytes) -> None:
        """Delete a block, if it is there."""
        with self._locked():
            path = self._place(key)
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                size = path.lstat().st_size
                path.unlink()
                self._note(self._noted() - size)

    @property
    def bytes(self) -> int:
        """Bytes of all files, as its users have counted them."""
        return self._noted()

    def entries(self) -> list[Entry]:
        """The blocks, those that give way first in front."""
        return sorted(self._blocks(), key=lambda entry: (entry.used_ns, entry.key))

    def trim(self, most_bytes: int) -> int:
        """Evict blocks until there are at most so many bytes; returns the bytes that this frees."""
        with self._locked():
            entries, total = self._count()
            return total - self._evict(entries, total, most_bytes)

    # Under the lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:
            self._lock_books()
            try:
                if not self._has_books():
                    self._replace_books()
                yield
            finally:
                fcntl.flock(self._books, fcntl.LOCK_UN)

    def _open_books(self) -> int:
        # Without its parents: where these have gone, a disk is not mounted any more.
        self.path.mkdir(mode=0o700, exist_ok=True)
        _check_private(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path / _LOCK, flags, 0o600)

    def _has_books(self) -> bool:
        """Whether the file that this store has open is the one that others find."""
        try:
            return os.path.samestat(os.fstat(self._books), (self.path / _LOCK).lstat())
        except FileNotFoundError:
            return False

    def _replace_books(self) -> None:
        while not self._has_books():
            fresh = self._open_books()
            os.dup2(fresh, self._books, inheritable=False)
            os.close(fresh)
            self._lock_books()
        self._count()

    def _lock_books(self) -> None:
        """Raises TimeoutError if another process, stopped say, does not unlock them."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                return fcntl.flock(self._books, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"another process has kept {self.path / _LOCK} locked for {_PATIENCE:.0f} s: it may be stopped"
                    ) from None
            time.sleep(_GLANCES)

    @property
    def _quota(self) -> int:
        return 2**63 if self.most_bytes is None else self.most_bytes

    def _noted(self) -> int:
        data = os.pread(self._books, _BOOKS.size, 0)
        return int(_BOOKS.unpack(data)[0]) if len(data) == _BOOKS.size else 0

    def _note(self, total: int) -> None:
        os.pwrite(self._books, _BOOKS.pack(max(0, total)), 0)

    def _count(self) -> tuple[list[Entry], int]:
        """All blocks, and the bytes of all files; deletes what writers that were killed have left."""
        total = 0
        for path, found in self._files(_UNFINISHED):
            if _is_abandoned(path):
                path.unlink(missing_ok=True)
            else:
                total += found.st_size
        entries = list(self._blocks())
        total += sum(entry.size for entry in entries)
        self._note(total)
        return entries, total

    def _make_room(self, size: int, used_ns: int) -> bool:
        if self._noted() + size <= self._quota:
            return True
        entries, total = self._count()
        older = [entry for entry in entries if entry.used_ns < used_ns]
        if total - sum(entry.size for entry in older) + size > self._quota:
            return False
        if total + size > self._quota:
            self._evict(older, total, self._quota - size, slack=int(self._quota * _SLACK))
        return True

    def _evict(self, entries: list[Entry], total: int, most: int, *, slack: int = 0) -> int:
        """Deletes blocks, least recently used first, until `total` is at most `most`, and whole blocks of `slack` more.

        Returns:
            What `total` is then.
        """
        for entry in sorted(entries, key=lambda entry: entry.used_ns):
            if total <= most and total - entry.size < most - slack:
                break
            entry.path.unlink(missing_ok=True)
            total -= entry.size
            self.evicted += 1
        self._note(total)
        return total

    def _begin(self, path: Path, size: int) -> int:
        """An unfinished file, which counts with all of its bytes from the start."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, size)
        except BaseException:
            os.close(descriptor)  # first: if the file cannot be deleted, whoever counts next finds it abandoned
            path.unlink(missing_ok=True)
            raise
        return descriptor

    # Anywhere

    def _place(self, key: Buffer) -> Path:
        return self.path / f"{key.hex()}.kv"

    def _files(self, name: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self.path) as found:
            for each in found:
                if name.fullmatch(each.name) and not each.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        yield Path(each.path), each.stat(follow_symlinks=False)

    def _blocks(self) -> Iterator[Entry]:
        now = time.time_ns()
        for path, found in self._files(_BLOCK):
            # A time to come is from when the clock was wrong, and would hold up new blocks until then. What others use
            # meanwhile is a little later than now.
            used_ns = found.st_mtime_ns if found.st_mtime_ns <= now + _SKEW_NS else 0
            yield Entry(path, path.stem, found.st_size, used_ns)

    def _reject(self, path: Path, inode: int | None = None) -> None:
        """Deletes a file, unless another has its name by now; those who count next will miss its bytes."""
        self.rejected += 1
        with contextlib.suppress(OSError):
            if inode in (None, path.lstat().st_ino):
                path.unlink()


def _check_private(path: Path) -> None:
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode) or _is_open_to_others(found):
        raise ConfigError(
            f"the store {path} must be a folder of your own that nobody else can enter, as it holds prompts: "
            f"chmod 700 it, or name another"
        )


def _is_open_to_others(found: os.stat_result) -> bool:
    return found.st_uid != os.geteuid() or bool(found.st_mode & 0o077)


def _when(depth: int, used_ns: int | None) -> int:
    return (time.time_ns() if used_ns is None else used_ns) - depth


def _touch(path: Path, used_ns: int) -> bool:
    """Notes when a block was used last; returns whether it is there."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_abandoned(path: Path) -> bool:
    """Whether an unfinished file has no writer; its descriptor, and so its lock, went with the process."""
    try:
        descriptor = os.open(path, _READING)
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)  # with no descriptor to look with, it may have one
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _write(descriptor: int, buffers: Iterable[Buffer]) -> None:
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _fill(descriptor: int, room: memoryview) -> None:
    while room:
        count = os.readv(descriptor, [room])
        if not count:
            raise EOFError
        room = room[count:]
