"""A borrower: the thread that keeps the connection to a broker, and has a pool's lease follow it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import math
import os
import select
import socket
import struct
import termios
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vattn import _native
from vattn.broker.directory import Directory
from vattn.broker.lease import Lease
from vattn.broker.places import check_name, left_path, socket_path
from vattn.broker.wire import AHEAD, ASKED, NEEDED, VERSION, Message, Reader, WireError, encode
from vattn.errors import ConfigError, DriverError, VattnError

_HEARTBEAT = 1.0  # seconds after which what is unchanged is said again
_AGAIN = 0.25  # seconds between attempts to join
_LOOKS = 1.0  # seconds between looks at whether processes have ended
_REDUCING = 0.02  # seconds between attempts to come down to a level
_CONNECTING = 5.0  # seconds for a broker to answer who joins
_BUSY = 0.5  # seconds for which a call may keep the pool from answering; the broker waits longer (`books.PATIENCE`)
_HANGS = 5.0  # seconds without reading what it was sent, after which a broker counts as one that does not answer
_LOGGED = 60.0  # seconds until it is logged again that sharing prefixes fails
_STANDING = 1.0  # seconds for which a wish stands after the call that waited for it has gone on without
_log = logging.getLogger("vattn")


@dataclass(frozen=True)
class Usage:
    """What a pool has, in bytes: of running requests, of none, of cached prefixes that none uses.

    Attributes:
        oldest: when the cached block to be evicted next was last used, in nanoseconds of the monotonic clock.
        shared: of other processes, which count there.
    """

    owned: int = 0
    parked: int = 0
    cached: int = 0
    oldest: int | None = None
    shared: int = 0


@dataclass(frozen=True)
class Loan:
    """What a broker lends a pool, in bytes, as the borrower knows it.

    Attributes:
        pool: the broker's; `name`: what `vattn pool` calls the borrower.
        reachable: whether there is a broker, and it reads what it is sent.
        budget: of all borrowers together.
        at_least, at_most: what the borrower is guaranteed, and the most that it may have.
        lent: what it may have now.
        usage: what it has.
        asked_back: what the broker wants back now; `given_back`: what it has got back so far.
    """

    pool: str
    name: str
    reachable: bool
    budget: int
    at_least: int
    at_most: int
    lent: int
    usage: Usage
    asked_back: int
    given_back: int


class Lent(Protocol):
    """A pool whose memory is lent, as its borrower sees it."""

    def usage(self, *, wait: bool) -> Usage:
        """What it has; what it had, if a call is in progress for long, or at all if this is not to wait."""

    def raise_to(self, level: int) -> None:
        """It may have so many bytes."""

    def come_down(self, level: int, stage: str) -> int | None:
        """Gives back what is over a level, as far as the stage allows and as far as possible now; the level reached,
        or None if a call is in progress.

        For the stage "all" it takes no more than the level from now on, whether it is reached or not.
        """


class Sharer(Protocol):
    """A pool that shares prefixes with other processes, as its borrower sees it."""

    def tend(self) -> bool:
        """Looks after what it shares with other processes; whether there is more to do now."""

    def meet(self, memory: int, directory: int) -> None:
        """Takes descriptors of another process's memory and directory."""

    def orphans(self, *, anew: bool) -> list[tuple[int, int]] | None:
        """Such descriptors of those that it has met and that have ended since the last call, or ever if this is to
        begin anew; to be closed by the caller. None if a call is in progress.
        """


class Borrower:
    """A lease, and the thread that has it follow the broker's messages.

    Sizes are bytes. Other threads only ask: `request`, `wait`.

    Args:
        pool: name of the broker's pool.
        name: what `vattn pool` calls this borrower.
        device: of the memory.
        memory: makes a descriptor of the memory; None where it is not one file.

    Attributes:
        name: as the broker knows it.
        budget, chunk: of the broker: all that there is; what is asked for at a time.

    Raises:
        ConfigError: no broker serves the pool, or it refuses.
    """

    def __init__(
        self,
        pool: str,
        *,
        name: str,
        device: str,
        page: int,
        at_least: int = 0,
        at_most: int | None = None,
        memory: Callable[[], int] | None = None,
    ) -> None:
        self.pool = check_name(pool)
        self.name = check_name(name, "the name of a borrower")
        self._page = page
        self._identity = uuid.uuid4().hex
        self._join = {"identity": self._identity, "name": self.name, "device": device, "page": page}
        self._join |= {"at_least": at_least, "at_most": at_most}
        self._memory = memory
        self._path = socket_path(pool)
        self._lease = Lease()
        self._changed = threading.Condition()
        self._want, self._urgent, self._wish = 0, AHEAD, 0
        self._reader = Reader()
        self._socket: socket.socket | None = None
        self._trouble = ""  # why there is no broker
        self._dirty = True
        self._closing = False
        self._waiting = False  # a call is
        self._stands_until = 0.0
        self._patient_until = 0.0
        self._joining: socket.socket | None = None
        self._due = 0.0  # when what is unchanged is to be said again
        self._unread_since = 0.0  # when the oldest message was sent that the broker may not have read
        self._short_since = 0.0
        self._given_back = 0
        self._lent: weakref.ref[Lent] | None = None
        self._sharer: weakref.ref[Sharer] | None = None
        self._directory: Directory | None = None
        self._shares_told = False  # the broker has the directory
        self._looks_at = 0.0  # when to look for processes that have ended
        self._logs_at = 0.0  # from when on a failure of sharing is logged
        self._received: list[int] = []  # descriptors that no message has claimed yet
        self.budget, self.chunk = 0, 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        _borrowers.add(self)
        try:
            self._connect()
        except BaseException as error:
            _borrowers.discard(self)
            os.close(self._wake)
            if isinstance(error, TimeoutError | BlockingIOError):  # the latter where too many wait to connect
                raise ConfigError(
                    f"the broker of the pool {pool!r} does not answer; stop it, and start it again under that name"
                ) from error
            if isinstance(error, OSError):
                raise ConfigError(
                    f"no broker serves the pool {pool!r} ({error}); start one: vattn pool serve {pool} --budget SIZE"
                ) from error
            raise

    def start(self, lent: Lent) -> None:
        """Starts the thread, for a pool that is not kept alive by it.

        Raises:
            RuntimeError: the process may have no other thread.
        """
        self._lent = weakref.ref(lent, lambda _: self.wake())
        thread = threading.Thread(target=self._run, name="vattn borrower", daemon=True)
        thread.start()
        self._thread = thread

    def share(self, sharer: Sharer, directory: Directory) -> None:
        """Has the broker tell other processes of the pool's published blocks, and the pool of theirs."""
        self._sharer, self._directory, self._shares_told = weakref.ref(sharer), directory, False
        self.wake()

    @property
    def level(self) -> int:
        """The most memory that the pool may have."""
        return self._lease.level

    @property
    def at_most(self) -> int:
        """The level that it cannot get over."""
        return self._lease.at_most

    @property
    def comes_down(self) -> bool:
        """Whether the broker wants memory of running requests back."""
        give = self._lease.give
        return give is not None and give[1] == "all"

    @property
    def trouble(self) -> str:
        """Why nothing can be borrowed now; empty if that is not known to be so."""
        if self._trouble:
            return f"the broker of the pool {self.pool!r} cannot be reached ({self._trouble})"
        if self._hangs():
            return f"the broker of the pool {self.pool!r} does not answer"
        if self._lease.short:
            return f"the pool {self.pool!r} has no more to lend: vattn pool top {self.pool} says who has it"
        return ""

    @property
    def reachable(self) -> bool:
        """Whether there is a broker, and it reads what it is sent."""
        return not (self._trouble or self._hangs())

    def loan(self, usage: Usage) -> Loan:
        """What is known of it; for any thread."""
        lease, give = self._lease, self._lease.give
        return Loan(
            self.pool,
            self.name,
            reachable=self.reachable,
            budget=self.budget,
            at_least=lease.at_least,
            at_most=lease.at_most,
            lent=lease.level,
            usage=usage,
            asked_back=0 if give is None else max(0, lease.level - give[0]),
            given_back=self._given_back,
        )

    def request(self, level: int) -> None:
        """Asks for a lease of so many bytes, without waiting."""
        with self._changed:
            if level == self._want or (level < self._want and self._urgent):
                return
            self._want, self._urgent = level, AHEAD
            self._lease.wished()
            self._dirty = True
        self.wake()

    def wait(self, level: int, seconds: float, *, needed: bool, want: int = 0) -> bool:
        """Asks for a level, and waits until it is there, the broker says that it has no more, or time is up; whether
        it is there.

        Args:
            needed: whether a call fails without it. Otherwise the broker is not asked if it has just said that it has
                no more.
            want: the level to ask for, if that is more: others give back at once what several calls will wait for.
        """
        level, want = min(level, self.at_most), min(want, self.at_most)
        with self._changed:
            if self._lease.level >= level:
                return True
            if not self.reachable or self._thread is None:
                return False
            if not needed and self._lease.short and time.monotonic() - self._short_since < _AGAIN:
                return False  # the broker says so when there is more
            before = self._want
            self._want, self._urgent, self._dirty = max(level, want, before), NEEDED if needed else ASKED, True
            self._wish += 1
            self._lease.wished()
            self._waiting, self._stands_until = True, time.monotonic() + seconds + _STANDING
            self.wake()

            def settled() -> bool:
                short = self._lease.short and self._lease.answered == self._wish
                return self._lease.level >= level or short or self.comes_down or bool(self._trouble) or self._closing

            is_settled = True
            try:
                is_settled = self._changed.wait_for(settled, seconds)
            finally:  # interrupted, too
                self._waiting, self._dirty = False, True
                if is_settled:
                    self._want, self._urgent = before, AHEAD
                else:  # what was asked of others for it is on its way, and would go to whoever wants it ahead of need
                    self._urgent = ASKED
                self.wake()
            return self._lease.level >= level

    def close(self) -> None:
        """Ends the thread and the connection, with which the lease ends when its memory has gone."""
        with self._changed:
            self._closing = True
            if self._joining is not None:
                with contextlib.suppress(OSError):  # it is not connected yet
                    self._joining.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        elif self._thread is None:
            self._leave()
            self._end()

    def forget(self) -> None:
        """In a forked child: closes what the parent has open, and nothing else."""
        self._changed = threading.Condition()  # a thread that this process lacks may hold the other
        if self._wake >= 0:
            with contextlib.suppress(OSError):
                os.close(self._wake)
        for connection in (self._socket, self._joining):
            if connection is not None:
                connection.close()
        self._drop_received()
        self._wake, self._socket, self._joining, self._thread = -1, None, None, None
        self._trouble = "this process is a fork of the borrower's"

    # The thread's

    def _run(self) -> None:
        """Until `close`, or until nobody has the pool any more."""
        try:
            self._follow()
        except BaseException as error:
            # The broker has to go on counting the lease: the pool still has it.
            _log.exception("pool %r: the thread of its borrower has ended", self.pool)
            self._part(f"the thread that asks it has ended: {type(error).__name__}: {error}")
        else:
            self._leave()
        self._end()

    def _follow(self) -> None:
        waiting = 0.0
        while not self._closing and self._lent is not None and self._lent() is not None:
            connection = self._socket
            poll = select.poll()  # which takes no descriptor: the process may be out of them
            poll.register(self._wake, select.POLLIN)
            if connection is not None:
                poll.register(connection, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(math.ceil(1000 * waiting))}
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            if connection is not None and connection.fileno() in ready:
                self.receive()
            if not self._closing:
                waiting = self.turn()

    def turn(self) -> float:
        """Says what is to be said; for how many seconds nothing else is."""
        more = self._tend()
        if self._socket is None:
            try:
                self._connect()
            except (OSError, VattnError, WireError) as error:
                self._part(str(error))
                return _AGAIN
        lent = self._lent() if self._lent is not None else None
        if lent is None:
            return 0.0
        if self._directory is not None and (not self._shares_told or self._looks_due()):
            self._introduce(self._directory)
            if self._socket is None:
                return _AGAIN
        give, before = self._lease.give, self._lease.level
        waiting = _HEARTBEAT
        lent.raise_to(self._lease.allowed)
        if give is not None:
            level, stage = give
            # A call that waits has the pool's lock; it ends at once if it is running requests' memory that is wanted.
            answer = before if self._waiting and stage != "all" else lent.come_down(level, stage)
            if answer is None and time.monotonic() < self._patient_until and not self._waiting:
                return _REDUCING
            reached = before if answer is None else answer
            with self._changed:
                self._lease.lowered(reached)
                self._given_back += before - self._lease.level
                if self._lease.give == give and (reached <= level or stage != "all"):
                    self._lease.complied()
                if not self._urgent:
                    self._want = min(self._want, reached)
            if self._lease.give is not None:
                waiting = _REDUCING  # an engine preempts requests first
            self._dirty |= reached < before
        lent.raise_to(self._lease.allowed)
        with self._changed:
            if self._urgent and not self._waiting and time.monotonic() >= self._stands_until:
                self._want, self._urgent, self._dirty = self._lease.level, AHEAD, True
        if self._dirty or time.monotonic() >= self._due:
            self._report(lent)
        return _REDUCING if more else waiting

    def receive(self) -> None:
        """Takes what the broker sent."""
        assert self._socket is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 2**16, 4, socket.MSG_CMSG_CLOEXEC)
            self._received += descriptors
            if not data:
                raise ConnectionResetError("it has ended")
            for message in self._reader.feed(data):
                self._take(message)
        except BlockingIOError:
            return
        except (OSError, WireError, ConfigError) as error:
            self._part(str(error))

    def _take(self, message: Message) -> None:
        if message["kind"] == "refused":
            raise ConfigError(message["why"])
        if message["kind"] == "peer":
            self._meet()
            return
        if message["kind"] != "lease":
            raise WireError(f"a message of kind {message['kind']} does not belong here")
        with self._changed:
            if self._lease.received(message):
                self._dirty = True
                self._short_since = time.monotonic()
                self._patient_until = self._short_since + _BUSY
                lent = self._lent() if self._lent is not None else None
                if lent is not None:
                    lent.raise_to(self._lease.allowed)
                self._changed.notify_all()

    # Prefixes that processes share

    def _tend(self) -> bool:
        sharer = self._sharer() if self._sharer is not None else None
        try:
            return sharer is not None and not self._waiting and sharer.tend()
        except Exception:  # what is lent is to go on, and another time this may succeed
            if time.monotonic() >= self._logs_at:
                self._logs_at = time.monotonic() + _LOGGED
                _log.exception("pool %r: sharing prefixes fails; trying again", self.pool)
            return False

    def _meet(self) -> None:
        sharer = self._sharer() if self._sharer is not None else None
        if sharer is not None and len(self._received) == 2:
            sharer.meet(*self._received)
            self._received.clear()
        self._drop_received()  # where the process has no room for all descriptors, too

    def _looks_due(self) -> bool:
        return not self._waiting and time.monotonic() >= self._looks_at

    def _introduce(self, directory: Directory) -> None:
        """Gives the broker the directory, once, and what others leave: they may never have joined this broker."""
        self._looks_at = time.monotonic() + _LOOKS
        sharer = self._sharer() if self._sharer is not None else None
        try:
            orphans = None if sharer is None else sharer.orphans(anew=not self._shares_told)
        except (OSError, VattnError) as error:  # there is no descriptor for them
            if not self._shares_told:
                self._part(str(error))
            return
        if orphans is None:
            return
        assert self._socket is not None
        try:
            if not self._shares_told:
                socket.send_fds(self._socket, [encode("share")], [directory.fileno()])
            for files in orphans:
                socket.send_fds(self._socket, [encode("orphan")], files)
            self._shares_told = True
        except OSError as error:
            self._part(str(error))
        finally:
            for descriptor in itertools.chain(*orphans):
                os.close(descriptor)

    def _report(self, lent: Lent) -> None:
        usage = lent.usage(wait=not self._waiting)
        with self._changed:
            self._dirty = False
            message = {
                "ack": self._lease.number,
                "lease": self._lease.level,
                "want": self._want,
                "wish": self._wish,
                "urgent": self._urgent,
                "owned": usage.owned,
                "parked": usage.parked,
                "cached": usage.cached,
                "oldest": usage.oldest,
                "shared": usage.shared,
            }
        self._due = time.monotonic() + _HEARTBEAT
        assert self._socket is not None
        try:
            if not self._unread():
                self._unread_since = time.monotonic()
            self._socket.sendall(encode("report", **message))
        except OSError as error:
            self._part(str(error))

    def _unread(self) -> int:
        """Bytes that were sent and not read yet, with what the system adds to them."""
        connection = self._socket
        with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile
            if connection is not None:
                unread: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
                return unread
        return 0

    def _hangs(self) -> bool:
        """Whether the broker has read nothing for so long that it seems to hang; for any thread."""
        return time.monotonic() - self._unread_since > _HANGS and self._unread() > 0

    def _connect(self) -> None:
        with _sending:
            connection = self._joining = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_CONNECTING)
            connection.connect(str(self._path))
            message = encode("join", version=VERSION, lease=self._lease.level, **self._join)
            if self._memory is None:
                connection.sendall(message)
            else:
                with _sending:
                    descriptor = self._memory()
                    try:
                        socket.send_fds(connection, [message], [descriptor])
                    finally:
                        os.close(descriptor)
            reader = Reader()
            answers: list[Message] = []
            while not answers:
                data = connection.recv(2**16)
                if not data:
                    raise ConnectionResetError("it has ended")
                answers += reader.feed(data)
            if answers[0]["kind"] == "refused":
                raise ConfigError(f"the broker of the pool {self.pool!r} refuses: {answers[0]['why']}")
            if answers[0]["kind"] != "joined":
                raise WireError("no answer to join")
        except BaseException:
            with self._changed:
                self._joining = None
                connection.close()
            raise
        with self._changed:
            self._joining = None
            self._unread_since = time.monotonic()
            self._socket, self._reader, self._trouble, self._dirty = connection, reader, "", True
            self._shares_told = False
            self.name, self.budget, self.chunk = (answers[0][key] for key in ("name", "budget", "chunk"))
            self._due = 0.0
            self._lease.joined(answers[0])
            self._changed.notify_all()
        for answer in answers[1:]:
            self._take(answer)

    def _part(self, why: str) -> None:
        """There is no broker any more, for now."""
        with self._changed:
            if not self._trouble:
                _log.warning("pool %r: its broker cannot be reached: %s; going on with what is lent", self.pool, why)
            self._trouble = why or "no reason given"
            if self._socket is not None:
                self._socket.close()
            self._socket = None
            self._drop_received()
            self._changed.notify_all()

    def _drop_received(self) -> None:
        while self._received:
            os.close(self._received.pop())

    def wake(self) -> None:
        """Wakes the thread, if it still runs: its descriptor may be anybody's since."""
        with self._changed:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _leave(self) -> None:
        """Says that the pool is closed, to the next broker if there is none. What is still in use, by a tensor that
        outlives its cache, counts until it is not; for the next broker, until the process ends.
        """
        if self._wake < 0:  # it has left, or was its parent's
            return
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(encode("leave"))
                if self.reachable:  # one that hangs may be killed before it reads that
                    return
        try:
            left_path(self._path, self._identity).write_text(str(self._left()))
        except (OSError, VattnError) as error:
            _log.warning("pool %r: its next broker cannot be told that %s has left: %s", self.pool, self.name, error)

    def _left(self) -> int:
        """Bytes that are still in use; the file of the memory is closed once there are none."""
        if self._memory is None:
            return 0
        with _sending:
            try:
                descriptor = self._memory()
            except DriverError as error:
                if error.code == _native.HOST_ERRNO + errno.EBADF:
                    return 0
                raise
            try:
                return os.fstat(descriptor).st_blocks * 512
            finally:
                os.close(descriptor)

    def _end(self) -> None:
        _borrowers.discard(self)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._drop_received()
        self._trouble = self._trouble or "it was left"
        with self._changed:
            wake, self._wake = self._wake, -1
            if wake >= 0:
                os.close(wake)


_borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()
# Held while a descriptor is made that nothing refers to yet: a child that was forked then would keep it open.
_sending = threading.RLock()  # a signal handler may fork


def _forget_in_child() -> None:
    _sending.release()
    for borrower in list(_borrowers):
        borrower.forget()
    _borrowers.clear()


os.register_at_fork(before=_sending.acquire, after_in_parent=_sending.release, after_in_child=_forget_in_child)
