"""The broker's process: its socket, its clock, and what it asks the kernel. `books` decides; but for
`notes`, all is one thread's.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import re
import selectors
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vattn.broker.books import Account, Books
from vattn.broker.directory import NoDirectory, OwnDirectory, has_ended, read_only, started
from vattn.broker.kept import Kept, problems
from vattn.broker.notes import Notes
from vattn.broker.places import check_name, credentials, left_path, socket_path
from vattn.broker.wire import STAGES, VERSION, Message, Reader, WireError, encode
from vattn.errors import ConfigError
from vattn.integers import shown
from vattn.units import format_bytes

_MOST_BORROWERS = 128  # whose answer to `top` fits into a message
_MOST_CONNECTIONS = _MOST_BORROWERS + 32  # with those of `vattn pool`
_MOST_PROBLEMS, _MOST_LENGTH = 200, 200  # lines of the answer to `check`, and characters of each
_MOST_KEPT = 64  # processes that have ended of which more is kept than what others have mapped
_MOST_DESCRIPTORS = 2  # that no message has claimed
_MOST_UNSENT = 2**20  # bytes for a peer that does not read
_GREETING = 5.0  # seconds in which a connection has to say what it is for
_AUDIT = 1.0  # seconds between looks at the borrowers' files
_NOTING = 0.25  # seconds in which leases are noted, unless the disk is slow
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,2})")  # as borrowers name theirs
# What is noted of an account for the next broker, and the attribute: limits as they were asked for.
_NOTED = {"name": "name", "at_least": "least_asked", "at_most": "most_asked", "page": "page", "lease": "lease"}
_IDENTITY = "[0-9a-f]" * 32  # a pattern of what borrowers choose
_log = logging.getLogger("vattn.broker")


@dataclass(eq=False)
class _Peer:
    """A connection.

    Attributes:
        pid: the process at its other end.
        since: when it came.
        received: descriptors that came and that no message has claimed.
    """

    socket: socket.socket
    pid: int
    since: float
    reader: Reader = field(default_factory=Reader)
    unsent: bytearray = field(default_factory=bytearray)
    received: list[int] = field(default_factory=list)
    borrower: _Borrower | None = None
    controls: bool = False


@dataclass(eq=False)
class _Borrower:
    """What is known of a borrower beside its account.

    Attributes:
        process: a pidfd, which is signalled when the process has ended and its memory is gone; -1 once it is another's.
        memory: a descriptor of its memory; None on CUDA, and where its memory is not in one file.
        peer: its connection; None if that was lost.
        started: when the process did.
        leaving: its pool is closed, so that its memory only becomes less.
        directory: of what it has published; None if it shares nothing.
        told: the directories that it was told of.
    """

    account: Account
    identity: str
    pid: int
    process: int
    memory: int | None
    peer: _Peer | None
    started: int
    leaving: bool = False
    directory: OwnDirectory | None = None
    told: set[tuple[int, int]] = field(default_factory=set)


class Broker:
    """A pool's broker. `run` serves until `stop`; then whatever borrowers have stays theirs.

    Args:
        name: of the pool.
        budget: bytes.
        device: of the memory: "cpu", or "cuda:0".

    Raises:
        ConfigError: another broker serves this pool, or the name, the device or the folder of sockets is not possible.
    """

    def __init__(self, name: str, budget: int, *, device: str = "cpu") -> None:
        self.name = check_name(name)
        if not _DEVICE.fullmatch(device):
            raise ConfigError(f"the pool's device is {shown(device)}; give cpu, or a GPU by its number, such as cuda:0")
        self.device = device
        self.books = Books(budget)
        self.path = socket_path(name)
        self._lock = _locked(self.path.with_suffix(".lock"), name)
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(self.path)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._peers: set[_Peer] = set()
        self._borrowers: list[_Borrower] = []
        self._kept: list[Kept] = []
        self._stopping = False
        self._audited = 0.0
        self._untold: dict[Account, None] = {}
        self._before = _memories()  # of the process's own caches, where it has any
        self._notes = Notes(self.path.with_suffix(".books"), self._call)
        self._hears = False  # whoever wants to connect
        self._hear()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda _: os.eventfd_read(self._wake))
        self._restore()

    def run(self) -> None:
        """Serves until `stop`."""
        try:
            while not self._stopping:
                self.turn()
        finally:
            self.close()

    def stop(self, *_: object) -> None:
        """Ends `run`; for signal handlers and other threads."""
        self._stopping = True
        self._call()

    def _call(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def turn(self, timeout: float | None = None) -> None:
        """Deals with what has come, after waiting for something to come for at most so many seconds."""
        now = time.monotonic()
        due = self.books.due(now)
        waits = [_AUDIT] if due is None else [_AUDIT, due]
        for kept in self._kept:
            if kept.tidy():
                waits.append(0.0)
        if self._kept:
            self._count_kept()
        ready = self._selector.select(min(waits if timeout is None else [*waits, timeout]))
        for key, events in ready:
            key.data(events)
        now = time.monotonic()
        for peer in [*self._peers]:
            if peer.borrower is None and not peer.controls and now - peer.since > _GREETING:
                self._drop(peer, "it says nothing")
        if now - self._audited >= _AUDIT:
            self._audited = now
            self._hear()
            self._notes.try_again()
            self.audit()
        self._settle()
        self._introduce()

    def close(self) -> None:
        """Closes everything. The socket's file goes, unless it is another broker's."""
        for peer in [*self._peers]:
            self._forget(peer)
        for borrower in [*self._borrowers]:
            self._bury(borrower)
        for kept in self._kept:
            kept.close()
        self._kept.clear()
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._notes.close()
        self._selector.close()
        self._listener.close()
        wake, self._wake = self._wake, -1  # a signal's handler may still write to it
        os.close(wake)
        os.close(self._lock)

    def audit(self) -> None:
        """Looks at what the borrowers' files hold, and those of processes that have ended."""
        for kept in [*self._kept]:
            if kept.gone:
                self._kept.remove(kept)
                if kept.process >= 0:
                    self._selector.unregister(kept.process)
                kept.directory.end()
                kept.close()
        self._look_at_kept()
        for borrower in [*self._borrowers]:
            account = borrower.account
            if account.lost and not borrower.leaving:
                self._look_for_left(borrower)
            self._look_at(borrower)
            if borrower.leaving:
                self.books.shrink(account)
                if not account.lease:
                    self._ended(borrower)
            elif account.found > account.lease:
                _log.warning(
                    "%s has %s of memory and a lease of %s",
                    account.name,
                    format_bytes(account.found),
                    format_bytes(account.lease),
                )

    def _look_at(self, borrower: _Borrower) -> None:
        if borrower.memory is not None:
            self.books.observe(borrower.account, os.fstat(borrower.memory).st_blocks * 512)

    def _look_for_left(self, borrower: _Borrower) -> None:
        """Whether a borrower that is not connected has left, and said so in a file."""
        with contextlib.suppress(OSError, ValueError, ConfigError):
            left = int(left_path(self.path, borrower.identity).read_text())
            if 0 <= left <= borrower.account.lease:
                self.books.observe(borrower.account, left)
                self._leaves(borrower)

    def check(self) -> list[str]:
        """What does not agree between the books and the kernel; nothing, if all is well."""
        wrong: list[str] = []
        try:
            self.books.check()
        except AssertionError as error:
            wrong.append(str(error))
        leases, kept_bytes = sum(account.lease for account in self.books.accounts), self.books.kept
        if leases + kept_bytes > self.books.budget:
            wrong.append(f"leases of {leases} bytes and {kept_bytes} that are kept are more than the budget")
        if [borrower.account for borrower in self._borrowers] != self.books.accounts:
            wrong.append("the books have borrowers that are not there, or lack some")
        expected = {self._listener.fileno(), self._wake, self._lock}
        expected |= {peer.socket.fileno() for peer in self._peers} | {fd for p in self._peers for fd in p.received}
        for borrower in self._borrowers:
            expected.add(borrower.process)
            if borrower.memory is not None:
                expected.add(borrower.memory)
            account = borrower.account
            if not Path("/proc", str(borrower.pid)).exists():
                wrong.append(f"the process of {account.name} has ended")
            if borrower.memory is not None and borrower.directory is not None:
                expected.add(borrower.directory.fileno())
                found = problems(borrower.directory, borrower.memory)
                wrong += [f"{account.name}: {each}" for each in found]
            if borrower.memory is not None and (held := os.fstat(borrower.memory).st_blocks * 512) > account.lease:
                wrong.append(f"{account.name} has {held} bytes and a lease of {account.lease}")
        for kept in self._kept:
            expected |= {kept.memory, kept.directory.fileno()} | ({kept.process} if kept.process >= 0 else set())
            wrong += [f"of a process that has ended: {each}" for each in problems(kept.directory, kept.memory)]
        if self.books.kept != sum(kept.bytes for kept in self._kept):
            wrong.append("blocks of processes that have ended are miscounted")
        for descriptor in expected:
            if not Path("/proc/self/fd", str(descriptor)).is_symlink():
                wrong.append(f"descriptor {descriptor} is not open")
        try:
            strays = _memories() - self._before - expected
        except OSError as error:  # no descriptor is left to look with
            wrong.append(f"the broker's own descriptors cannot be counted: {error}")
            strays = set()
        if strays:
            wrong.append(f"{len(strays)} descriptors of memory that no borrower has")
        if self._notes.trouble:
            wrong.append(f"leases cannot be noted for the next broker: {self._notes.trouble}")
        return wrong

    # Connections

    def _hear(self) -> None:
        if not self._hears:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._hears = True

    def _accept(self, _: int) -> None:
        try:
            accepted, _address = self._listener.accept()
        except BlockingIOError:  # it has gone already
            return
        except OSError as error:  # there is no descriptor for it; until the next audit there may be
            _log.warning("a process cannot connect: %s", error)
            self._selector.unregister(self._listener)
            self._hears = False
            return
        accepted.setblocking(False)
        pid, uid, _gid = credentials(accepted)
        if uid != os.getuid() or len(self._peers) >= _MOST_CONNECTIONS:
            accepted.close()
            return
        peer = _Peer(accepted, pid, time.monotonic())
        self._peers.add(peer)
        self._selector.register(accepted, selectors.EVENT_READ, lambda events: self._serve(peer, events))

    def _serve(self, peer: _Peer, events: int) -> None:
        if peer in self._peers and events & selectors.EVENT_WRITE:
            self._flush(peer)
        if not events & selectors.EVENT_READ or peer not in self._peers:
            return
        try:
            data, whole = _receive(peer)
        except BlockingIOError:
            return
        except OSError:
            data, whole = b"", True
        if not data:
            self._lose(peer)
            return
        if not whole or len(peer.received) > _MOST_DESCRIPTORS:
            self._drop(peer, "it sent more descriptors than belong to a message")
            return
        try:
            for message in peer.reader.feed(data):
                self._handle(peer, message)
                if peer not in self._peers:
                    return
        except WireError as error:
            self._drop(peer, f"it sent what is no message: {error}")
        except ConfigError as error:
            self._refuse(peer, str(error))

    def _send(self, peer: _Peer, kind: str, **fields: object) -> None:
        try:
            peer.unsent += encode(kind, **fields)
        except WireError as error:  # which is not the peer's
            self._refuse(peer, f"the broker's answer cannot be sent: {error}")
            return
        self._flush(peer)
        if peer in self._peers and len(peer.unsent) > _MOST_UNSENT:
            self._drop(peer, "it does not read")

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                del peer.unsent[: peer.socket.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it has gone, but may have said something before
            peer.unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        key = self._selector.get_key(peer.socket)
        if key.events != events:
            self._selector.modify(peer.socket, events, key.data)

    def _refuse(self, peer: _Peer, why: str) -> None:
        with contextlib.suppress(OSError):
            peer.socket.send(encode("refused", why=why[:1024]))
        self._drop(peer, why)

    def _drop(self, peer: _Peer, why: str) -> None:
        _log.warning("closing the connection of process %d: %s", peer.pid, why)
        self._lose(peer)

    def _lose(self, peer: _Peer) -> None:
        """A connection ended. What its process has counts until that ends, too."""
        borrower = peer.borrower
        self._forget(peer)
        if borrower is not None:
            borrower.peer = None
            self.books.lose(borrower.account)

    def _forget(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        for descriptor in peer.received:
            os.close(descriptor)
        peer.received.clear()
        self._peers.discard(peer)

    # Messages

    def _handle(self, peer: _Peer, message: Message) -> None:
        kind = message["kind"]
        if kind == "report" and peer.borrower is not None:
            self.books.report(peer.borrower.account, message, time.monotonic())
            self._look_at(peer.borrower)
        elif kind == "leave" and peer.borrower is not None:
            borrower = peer.borrower
            self._lose(peer)
            self._leaves(borrower)
            self.audit()
        elif kind == "share" and peer.borrower is not None and peer.received:
            self._share(peer.borrower, peer.received.pop())
        elif kind == "orphan" and peer.borrower is not None and len(peer.received) == 2:
            received, peer.received = peer.received, []
            self._adopt(*received)
        elif kind == "join" and peer.borrower is None and not peer.controls:
            self._join(peer, message)
        elif kind in ("top", "limit", "reclaim", "check") and peer.borrower is None:
            peer.controls = True
            self._send(peer, "answer", result=self._control(message))
        else:
            raise WireError(f"a message of kind {kind} does not belong here")

    def _join(self, peer: _Peer, message: Message) -> None:
        if message["version"] != VERSION:
            raise ConfigError(f"the broker speaks version {VERSION}, the other side {message['version']}; update one")
        if message["device"] != self.device:
            raise ConfigError(f"the pool {self.name!r} is on {self.device}, and the cache on {message['device']}")
        check_name(message["name"], "the name of a borrower")
        memory = peer.received.pop() if peer.received else None
        process = -1
        try:
            before = self._same(peer.pid, message["identity"])
            if before is None and len(self._borrowers) >= _MOST_BORROWERS:
                raise ConfigError(f"the pool has {_MOST_BORROWERS} borrowers, which is the most")
            self._check_memory(memory, before)
            process, started = _open_process(peer.pid)
            account = self.books.join(
                message["name"],
                **{name: message[name] for name in ("page", "at_least", "at_most", "lease")},
                before=None if before is None else before.account,
            )
        except BaseException:
            for descriptor in (memory, process):
                if descriptor is not None and descriptor >= 0:
                    os.close(descriptor)
            raise
        if before is not None:
            self._bury(before)
        borrower = _Borrower(account, message["identity"], peer.pid, process, memory, peer, started)
        peer.borrower = borrower
        self._admit(borrower)
        _log.info("%s joins (process %d), with a lease of %s", account.name, peer.pid, format_bytes(account.lease))
        self._send(
            peer,
            "joined",
            name=account.name,
            budget=self.books.budget,
            chunk=account.chunk,
            number=account.number,
            lease=account.lease,
            at_least=account.at_least,
            at_most=account.at_most,
        )

    def _admit(self, borrower: _Borrower) -> None:
        self._borrowers.append(borrower)
        self._selector.register(borrower.process, selectors.EVENT_READ, lambda _: self._ended(borrower))

    def _same(self, pid: int, identity: str) -> _Borrower | None:
        """The borrower that joins again; its earlier connection is of no use any more."""
        for borrower in self._borrowers:
            if borrower.identity == identity and borrower.pid == pid:
                if borrower.peer is not None:
                    self._lose(borrower.peer)
                return borrower
        return None

    def _check_memory(self, memory: int | None, before: _Borrower | None) -> None:
        """Whether a descriptor is that of a file that nobody can make shorter, and nobody else's memory."""
        if memory is None:
            return
        if self.device != "cpu":
            raise ConfigError("only a borrower on a CPU sends the descriptor of its memory")
        found = os.fstat(memory)
        try:
            sealed = fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:
            sealed = False
        if not stat.S_ISREG(found.st_mode) or not sealed:
            raise ConfigError("the descriptor is not that of a borrower's memory")
        for borrower in self._borrowers:
            if borrower is not before and borrower.memory is not None:
                other = os.fstat(borrower.memory)
                if (other.st_dev, other.st_ino) == (found.st_dev, found.st_ino):
                    raise ConfigError("the memory is another borrower's")

    def _leaves(self, borrower: _Borrower) -> None:
        """A pool is closed; what it has published stays."""
        borrower.leaving = True
        if borrower.directory is not None and any(borrower.directory.entries()):
            self._ended(borrower, lives=True)

    def _ended(self, borrower: _Borrower, *, lives: bool = False) -> None:
        """A process has ended, or, if it lives, a pool of it. The system has taken the memory back, but for what was
        published, which stays.
        """
        if borrower not in self._borrowers:  # something else that came at the same time has ended it
            return
        _log.info("%s has left (process %d)", borrower.account.name, borrower.pid)
        if borrower.peer is not None:
            self._forget(borrower.peer)
        if borrower.directory is not None and borrower.memory is not None:
            process = -1
            if lives:  # its descriptor goes along: there may be none for a copy
                process, borrower.process = borrower.process, -1
                self._selector.unregister(process)
            self._keep(Kept(borrower.memory, borrower.directory, process))
            borrower.memory = borrower.directory = None
        self.books.remove(borrower.account)
        self._bury(borrower)

    def _bury(self, borrower: _Borrower) -> None:
        self._borrowers.remove(borrower)
        self._untold.pop(borrower.account, None)
        if borrower.process >= 0:
            self._selector.unregister(borrower.process)
            os.close(borrower.process)
        if borrower.memory is not None:
            os.close(borrower.memory)
        if borrower.directory is not None:
            borrower.directory.close()

    # Prefixes that borrowers share

    def _share(self, borrower: _Borrower, received: int) -> None:
        # Of an open file of its own: what came may be one that can only be read, or appended to.
        try:
            descriptor = os.open(f"/proc/self/fd/{received}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"its directory cannot be opened: {error}") from None
        finally:
            os.close(received)
        try:
            directory = OwnDirectory(descriptor)
        except NoDirectory as error:
            os.close(descriptor)
            raise ConfigError(str(error)) from None
        if borrower.directory is not None or borrower.memory is None:
            directory.close()
            raise ConfigError("it shares its memory already, or has none that can be shared")
        borrower.directory = directory

    def _adopt(self, *received: int) -> None:
        """Takes what a process has published that ended without having shared it with this broker."""
        for borrower in [*self._borrowers]:  # it may have joined, and ended since this broker last looked
            if has_ended(borrower.process):
                self._ended(borrower)
        opened: list[int] = []
        try:
            for descriptor in received:
                opened.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
            self._check_memory(opened[0], None)
            memory, directory = opened[0], OwnDirectory(opened[1])
        except (OSError, NoDirectory, ConfigError):
            for descriptor in opened:
                os.close(descriptor)
            return
        finally:
            for descriptor in received:
                os.close(descriptor)
        process = -1
        with contextlib.suppress(ConfigError):
            process, since = _open_process(directory.pid)
            if since != directory.started:
                os.close(process)
                process = -1
        lives = process >= 0 and not has_ended(process) and not directory.left
        if lives or directory.identity in {each.identity for each in self._directories()}:
            for descriptor in (memory, process) if process >= 0 else (memory,):
                os.close(descriptor)
            directory.close()
        else:
            self._keep(Kept(memory, directory, process))

    def _keep(self, kept: Kept) -> None:
        """Counts what a process has published once, as the broker's."""
        self._kept.append(kept)
        for older in self._kept[:-_MOST_KEPT]:
            older.evict(older.bytes)
        if kept.process >= 0:

            def ended(_: int) -> None:
                self._selector.unregister(kept.process)
                kept.ended()

            self._selector.register(kept.process, selectors.EVENT_READ, ended)
        self._count_kept()

    def _look_at_kept(self) -> None:
        for kept in self._kept:
            kept.look()
        self._count_kept()

    def _count_kept(self) -> None:
        self.books.keep(sum(kept.bytes for kept in self._kept), sum(kept.evictable for kept in self._kept))

    def _evict(self, num_bytes: int) -> None:
        """Gives up so many bytes of processes that have ended, as far as nobody has them mapped."""
        freed = 0
        for kept in self._kept:
            freed += kept.evict(num_bytes - freed) if freed < num_bytes else 0
        self._count_kept()

    def _directories(self) -> Iterator[OwnDirectory]:
        yield from (borrower.directory for borrower in self._borrowers if borrower.directory is not None)
        yield from (kept.directory for kept in self._kept)

    def _introduce(self) -> None:
        """Tells borrowers of each other, and of what others have left, as far as they can use it."""
        sharing = [borrower for borrower in self._borrowers if borrower.directory is not None]
        for borrower in sharing:
            for memory, directory in [
                *((other.memory, other.directory) for other in sharing if other is not borrower),
                *((kept.memory, kept.directory) for kept in self._kept),
            ]:
                assert borrower.directory is not None
                assert directory is not None
                assert memory is not None
                if (
                    directory.shape.fingerprint == borrower.directory.shape.fingerprint
                    and directory.identity not in borrower.told
                    and borrower.peer is not None
                    and self._send_files(borrower.peer, "peer", memory, directory.fileno())
                ):
                    borrower.told.add(directory.identity)

    def _send_files(self, peer: _Peer, kind: str, *files: int) -> bool:
        """Sends a message with descriptors that can only be read; False if that has to wait."""
        if peer.unsent:
            return False
        message, opened = encode(kind), list[int]()
        try:
            for file in files:
                opened.append(read_only(file))
            if socket.send_fds(peer.socket, [message], opened) < len(message):
                self._drop(peer, "it does not read")
        except BlockingIOError:
            return False
        except OSError:
            # Either this process has no descriptor left, or the other has gone, but may have said something before.
            return len(opened) == len(files)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return True

    def _control(self, message: Message) -> dict[str, Any]:
        """The answer to `vattn pool`."""
        kind, now = message["kind"], time.monotonic()
        try:
            if kind == "check":
                return {"problems": _shortened(self.check())}
            if kind == "limit":
                self.books.limit(self._named(message["name"])[0], message["at_least"], message["at_most"])
            if kind == "reclaim":
                if message["name"] is None and message["stage"] == "cached":
                    self._evict(self.books.kept)
                for account in self._named(message["name"]):
                    if not account.lost:
                        self.books.reclaim(account, message["stage"] or STAGES[0], now)
        except ConfigError as error:
            return {"refused": str(error)}
        self.audit()
        return {"pool": self.name, "device": self.device, "path": str(self.path), **self.books.top()}

    # Notes for the next broker, which must not lend what borrowers have that have yet to join it

    def _save(self) -> None:
        """Has all leases noted."""
        trouble = self._notes.trouble
        notes = [
            {
                "identity": borrower.identity,
                "pid": borrower.pid,
                "started": borrower.started,
                **{name: getattr(borrower.account, attribute) for name, attribute in _NOTED.items()},
            }
            for borrower in self._borrowers
        ]
        self._notes.write(notes)
        if any(not self._is_noted(borrower) for borrower in self._borrowers if borrower.account in self._untold):
            self._notes.wait(_NOTING)
        if self._notes.trouble and not trouble:
            _log.warning("leases cannot be noted for the next broker: %s", self._notes.trouble)

    def _is_noted(self, borrower: _Borrower) -> bool:
        return self._notes.has(borrower.identity, borrower.account.lease)

    def _restore(self) -> None:
        """Opens accounts for the borrowers of an earlier broker that still run; the audit closes those of borrowers
        that have left.
        """
        for note in self._notes.read():
            with contextlib.suppress(ConfigError):  # it has ended
                process, started = _open_process(note["pid"])
                if started != note["started"] or not note["page"]:
                    os.close(process)
                    continue
                account = self.books.restore(**{name: note[name] for name in _NOTED})
                self._admit(_Borrower(account, note["identity"], note["pid"], process, None, None, started))
        noted = {borrower.identity for borrower in self._borrowers}
        for path in self.path.parent.glob(f"{self.name}.{_IDENTITY}.left"):
            if path.stem.rpartition(".")[2] not in noted:  # no broker will ask for it
                path.unlink(missing_ok=True)

    def _named(self, name: str | None) -> list[Account]:
        found = [account for account in self.books.accounts if name in (None, account.name)]
        if name is not None and not found:
            names = ", ".join(account.name for account in self.books.accounts) or "nobody"
            raise ConfigError(f"{name!r} borrows nothing of the pool {self.name!r}; who does: {names}")
        return found

    def _settle(self) -> None:
        """Tells what has changed. A lease is noted before it is told, so that nobody ever has more than is noted."""
        if self._kept and self.books.wanting:
            self._look_at_kept()
        self._untold |= dict.fromkeys(self.books.settle(time.monotonic()))
        if evict := self.books.evictions():
            self._evict(evict)
            self._untold |= dict.fromkeys(self.books.settle(time.monotonic()))
        self._save()
        for borrower in [*self._borrowers]:
            if borrower.account in self._untold and self._is_noted(borrower):
                del self._untold[borrower.account]
                if borrower.peer is not None:
                    self._send(borrower.peer, "lease", **self.books.message(borrower.account))


def _shortened(problems: list[str]) -> list[str]:
    """As much of these as fits into a message."""
    shown = [problem[:_MOST_LENGTH] for problem in problems[:_MOST_PROBLEMS]]
    more = len(problems) - len(shown)
    return [*shown, f"{more} more"] if more else shown


def _memories() -> set[int]:
    """The descriptors of this process that are of caches' memory."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own, or another thread's
            if os.readlink(entry).startswith("/memfd:vattn"):
                found.add(int(entry.name))
    return found


def serve(name: str, budget: int, *, device: str = "cpu", ready: Callable[[Broker], object] = lambda _: None) -> None:
    """Runs a broker until SIGTERM or SIGINT.

    Args:
        ready: called when borrowers can join.

    Raises:
        ConfigError: as `Broker`.
    """
    broker = Broker(name, budget, device=device)
    before = {number: signal.signal(number, broker.stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ready(broker)
        broker.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _locked(path: Path, name: str) -> int:
    """A descriptor of the file that says, by its lock, that a pool has a broker; the system unlocks it however that
    ends.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used for the pool's lock: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"the pool {name!r} has a broker already; stop that one, or give another name") from None
    return descriptor


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)  # of a broker that was killed: this one has the lock
        listener.bind(str(path))
        path.chmod(0o700)
        listener.listen(64)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{path} cannot be used for the pool's socket: {error}") from error
    return listener


def _open_process(pid: int) -> tuple[int, int]:
    """A pidfd, and when the process started.

    Raises:
        ConfigError: it cannot be seen, or has ended.
    """
    descriptor = -1
    try:
        descriptor = os.pidfd_open(pid)
        return descriptor, started(pid)
    except (OSError, OverflowError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise ConfigError(
            f"the broker cannot see the borrower's process ({error}): run both in one PID namespace (--pid=host)"
        ) from error


def _receive(peer: _Peer) -> tuple[bytes, bool]:
    """What came, and whether all of its descriptors did; those are added to the peer's."""
    size = array.array("i").itemsize
    data, ancillary, flags, _ = peer.socket.recvmsg(2**16, socket.CMSG_SPACE(4 * size), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            peer.received += _descriptors(content, size)
    return data, not flags & socket.MSG_CTRUNC


def _descriptors(content: bytes, size: int) -> Iterator[int]:
    whole = array.array("i")
    whole.frombytes(content[: len(content) // size * size])
    yield from whole
