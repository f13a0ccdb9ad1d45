"""A folder of stored prefixes under three processes that are stopped and killed at any instant, on a disk that fails,
and among hands that change its files.

Bursts of calls and events, after each of which all is quiet: then the folder holds what it says, within the quota, and
whatever is changed in a file is a miss.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import re
import shutil
import signal
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from tests.campaign.forked import Forked, Wrong, play_out
from tests.campaign.play import Played
from tests.campaign.storing import NUMBERS, QUOTA, Storing, block, is_file, parts, prepare, see
from vattn.store.folder import PrefixStore

USERS = 3
BURSTS = 4
_DISK = QUOTA * 3 // 4  # bytes of a disk that is full before the quota is
_SECRET = b"not the store's"
_OURS = re.compile(r"[0-9a-f]{64}\.(kv|[0-9a-f]{16}\.tmp)")


def scenario(rng: random.Random) -> Played:
    """Some bursts."""
    return play(rng.randrange(1 << 30))


def play(seed: int) -> Played:
    """The scenario of a seed; what it does is drawn from that, and how far which process is by then is not."""
    played = Played(lines=["from tests.campaign import store", f"print(store.play({seed}).detail)"])
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, _disk(Path(folder), full=rng.random() < 0.2) as is_small:
        played.counts["disks that are too small"] += is_small
        play_out(World(Path(folder), rng, played.counts, is_small=is_small), played)
    return played


@contextlib.contextmanager
def _disk(folder: Path, *, full: bool) -> Iterator[bool]:
    """A small disk in place of a folder, that only this process and its children see; whether it may have one."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, recursive, private = 0x20000, 0x4000, 1 << 18
    name = os.fsencode(folder)
    mounted = (
        full
        and os.geteuid() == 0
        and libc.unshare(new_namespace) == 0
        and libc.mount(b"none", b"/", None, recursive | private, None) == 0
        and libc.mount(b"none", name, b"tmpfs", 0, f"size={_DISK}".encode()) == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            libc.umount2(name, 2)


class World:
    """The processes and the folder of a scenario."""

    def __init__(self, folder: Path, rng: random.Random, counts: Counter[str], *, is_small: bool) -> None:
        self.calls = 0
        self._rng, self._counts, self._is_small = rng, counts, is_small
        self._path, self._elsewhere = folder / "store", folder / "elsewhere"
        self._elsewhere.write_bytes(_SECRET)
        self._since = self._elsewhere.stat().st_mtime_ns
        self._path.mkdir(mode=0o700)
        self._added = 0  # bytes that hands have added to files since they were counted
        self._users = [self._use(i) for i in range(USERS)]

    def play(self) -> None:
        """Everything."""
        self._await_all()
        for _ in range(BURSTS):
            self._burst()
            self._calm()
        for user in self._users:
            user.kill()
        self._see_folder()
        PrefixStore(self._path).trim(0)
        if left := [path.name for path in self._path.iterdir() if _OURS.fullmatch(path.name) and not path.is_dir()]:
            raise Wrong(f"a store that was cleared has files: {left}")

    def close(self) -> None:
        """Kills everything."""
        for user in self._users:
            with contextlib.suppress(Wrong):
                user.forget()

    def _use(self, number: int) -> Forked:
        rng = self._rng
        after = rng.randrange(500, 60_000) if rng.random() < 0.4 else None
        faults = not self._is_small and rng.random() < 0.3
        work = partial(_use, self._path, rng.randrange(1 << 30), faults, self._is_small)
        return Forked("a user", work, die_after=after)

    def _kill(self, number: int) -> None:
        self._users[number].forget()
        self._users[number] = self._use(number)
        self._counts["kills"] += 1

    def _stop(self, number: int) -> None:
        self._users[number].signal(signal.SIGSTOP)
        time.sleep(self._rng.random() * 0.1)
        self._users[number].signal(signal.SIGCONT)
        self._counts["stops"] += 1

    # Bursts

    def _burst(self) -> None:
        rng = self._rng
        for user in self._users:
            user.tell("play", rng.randrange(10, 100))
        for _ in range(rng.randrange(1, 10)):
            time.sleep(rng.random() * 0.03)
            user_of = rng.randrange(USERS)
            events = (
                (3, partial(self._kill, user_of)),
                (1, partial(self._stop, user_of)),
                (6, self._change),
                (1, self._put_something),
                (0.3, self._delete_all),
            )
            (event,) = rng.choices([event for _, event in events], [weight for weight, _ in events])
            event()
            self.calls += 1
        self._await_all()

    def _await_all(self) -> None:
        while True:
            for number, user in enumerate(self._users):
                self.calls += user.answer() or 0
                if not user.lives():
                    user.check()
                    self._kill(number)
            if not any(user.waiting for user in self._users):
                return

    # Hands

    def _change(self) -> None:
        """A file is changed where it is."""
        rng = self._rng
        paths = sorted(path for path in self._path.glob("*.kv") if is_file(path))
        if paths:
            path, other = rng.choice(paths), rng.choice(paths)
            with contextlib.suppress(OSError):  # it has gone, or the disk is full
                self._harm(path, other, rng.choice(("flip", "cut", "add", "copy", "mode", "delete")))

    def _harm(self, path: Path, other: Path, how: str) -> bool:
        """Whether the file is another then."""
        rng = self._rng
        self._counts["changed files"] += 1
        before = path.read_bytes()
        if not before:  # by an earlier hand
            return False
        if how == "flip":
            with path.open("r+b") as file:
                place = rng.randrange(len(before))
                file.seek(place)
                file.write(bytes([before[place] ^ 1 << rng.randrange(8)]))
        elif how == "cut":
            os.truncate(path, rng.randrange(len(before)))
        elif how == "add":
            self._added += 100
            with path.open("ab") as file:
                file.write(rng.randbytes(rng.randrange(1, 100)))
        elif how == "copy":
            data = other.read_bytes()
            self._added += len(data)
            path.write_bytes(data)
        elif how in ("link", "pipe"):
            path.unlink()
            self._added += 200
            path.symlink_to(self._elsewhere) if how == "link" else os.mkfifo(path)
            return True
        elif how == "mode":
            path.chmod(rng.choice((0o604, 0o640, 0o622, 0o777)))
        else:
            path.unlink()
        return how == "mode" or not path.exists() or path.read_bytes() != before

    def _put_something(self) -> None:
        """Something that is none of the store's files, under a name that might be."""
        rng = self._rng
        key = block(rng.randrange(NUMBERS)).key.hex()
        path = self._path / rng.choice((f"{key}.kv", f"{key}.{rng.randbytes(8).hex()}.tmp", "notes.kv", "x.tmp"))
        self._added += 200  # a link has bytes, too
        with contextlib.suppress(OSError):
            kind = rng.choice(("link", "dangling", "pipe", "folder", "file"))
            if kind == "link":
                path.symlink_to(self._elsewhere)
            elif kind == "dangling":
                path.symlink_to(self._elsewhere.with_name("nowhere"))
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "folder":
                path.mkdir()
            elif not path.exists():
                path.write_bytes(rng.randbytes(rng.randrange(200)))
            self._counts[f"{kind} put there"] += 1

    def _delete_all(self) -> None:
        """As `rm -rf folder/*` does."""
        for path in [*self._path.iterdir()]:
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self._counts["all deleted"] += 1

    # Quiet

    def _calm(self) -> None:
        for user in self._users:
            user.tell("flush")
        self._await_all()
        self._see_folder()
        self._see_misses()
        user = self._rng.choice(self._users)
        user.tell("hit")
        if user.answer() is False and not self._is_small:
            raise Wrong(f"what was stored is not found: {user.said()}")

    def _see_folder(self) -> None:
        """What there is is within the quota, and is what was written."""
        found = self._bytes()
        noted = int.from_bytes((self._path / "lock").read_bytes()[:8], "little") if self._has_lock() else 0
        if found > noted + self._added and self._has_lock():
            raise Wrong(f"fewer bytes are noted than there are: {noted} of {found}, {self._added} added by hand")
        if found > QUOTA + self._added:
            raise Wrong(f"the quota is exceeded: {found} of {QUOTA}, {self._added} added by hand")
        try:
            store = PrefixStore(self._path, QUOTA)
        except ValueError as error:
            raise Wrong(f"a store cannot be opened: {error}") from error
        self._added = 0
        if left := [each.name for each in self._path.glob("*.tmp") if _OURS.fullmatch(each.name) and not each.is_dir()]:
            raise Wrong(f"unfinished files are left: {left}")
        if store.bytes != self._bytes() or store.bytes > QUOTA:
            raise Wrong(f"a count is wrong: {store.bytes} of {self._bytes()}")
        for number in range(NUMBERS):
            self._counts["blocks read"] += see(store, number)
        if self._elsewhere.read_bytes() != _SECRET or self._elsewhere.stat().st_mtime_ns != self._since:
            raise Wrong("a file elsewhere was changed:")
        self.calls += NUMBERS + 1

    def _see_misses(self) -> None:
        """A block is written and read, and whatever is changed in its file, it is a miss, and the file is deleted."""
        rng = self._rng
        store, number = PrefixStore(self._path, QUOTA), rng.randrange(NUMBERS)
        path = self._path / f"{block(number).key.hex()}.kv"
        if path.is_dir():
            return
        for how in ("flip", "cut", "link", "add", "pipe", "mode", "copy"):
            try:
                there = store.put(block(number), parts(number))
            except OSError:
                if self._is_small:
                    return
                raise
            if not there or not see(store, number):
                raise Wrong(f"what was put is not there: {number}")
            others = [each for each in self._path.glob("*.kv") if is_file(each) and each != path]
            try:
                changed = self._harm(path, rng.choice(others or [path]), how)
            except OSError:
                if self._is_small:
                    return
                raise
            if changed and how not in ("link", "pipe"):  # those give way
                if see(store, number):
                    raise Wrong(f"a changed file is served: {how} of {number}")
                if path.exists():
                    raise Wrong(f"a changed file stays: {how} of {number}")
            self.calls += 3

    def _has_lock(self) -> bool:
        return is_file(self._path / "lock")

    def _bytes(self) -> int:
        found = [path.lstat() for path in self._path.iterdir() if _OURS.fullmatch(path.name)]
        return sum(each.st_size for each in found if not stat.S_ISDIR(each.st_mode))


def _use(folder: Path, seed: int, faults: bool, is_small: bool, pipe: Connection) -> None:
    logging.getLogger("vattn").setLevel(logging.ERROR)  # a disk that fails is a warning
    prepare()
    made = Storing(folder, random.Random(seed), faults=faults, is_small=is_small)
    pipe.send((None, 0))
    while True:
        what, *given = pipe.recv()
        before, answer = made.calls, None
        if what == "play":
            for _ in range(given[0]):
                made.turn()
            answer = made.calls - before
        elif what == "flush":
            made.flush()
        elif what == "hit":
            answer = made.hit()
        pipe.send((None, answer))
