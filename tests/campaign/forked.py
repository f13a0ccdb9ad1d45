"""Processes that a scenario forks, tells what to do, and kills; each is told one thing at a time, and answers it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Protocol

from tests.campaign.isolation import alive, stacks_of
from tests.campaign.play import Played
from tests.support.forks import die_with_parent

PATIENCE = 45.0  # seconds without an answer, beyond what anything takes on a busy machine
_TEXT = 4096  # bytes of what a process has said, in a finding


class Wrong(Exception):
    """Something that must not be; the text begins with what it is, without numbers, up to a colon."""


class World(Protocol):
    """Processes, and what is known of them."""

    calls: int

    def play(self) -> None:
        """Has them do what is drawn."""

    def close(self) -> None:
        """Ends them."""


def play_out(world: World, played: Played) -> None:
    """Plays, and notes what was found."""
    try:
        world.play()
    except Wrong as error:
        played.detail = str(error)
        played.kind = played.detail.partition(":")[0]
    finally:
        world.close()
        played.calls = world.calls


class Forked:
    """A process.

    Args:
        name: for findings.
        work: what it does, with its end of a pipe.
        die_after: so many calls of Python functions, in any of its threads, it kills itself.

    Attributes:
        may_die: it was killed, or was to kill itself.
        waiting: it has been told something, and has not answered.
    """

    def __init__(self, name: str, work: Callable[[Connection], None], *, die_after: int | None = None) -> None:
        self.name = name
        self.may_die = die_after is not None
        self.waiting = True  # for it to be ready
        self._said = os.memfd_create("said")
        self._pipe, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            self._pipe.close()
            os._exit(_work(work, theirs, self._said, die_after))
        theirs.close()
        self._status: int | None = None

    def tell(self, *what: Any) -> None:
        """Tells it something; it may be dead."""
        assert not self.waiting
        with contextlib.suppress(OSError):
            self._pipe.send(what)
        self.waiting = True

    def answer(self, meanwhile: Callable[[], object] = lambda: None) -> Any:
        """Its answer; None if it has died, which it may.

        Args:
            meanwhile: called again and again.

        Raises:
            Wrong: it found something wrong, hangs, or has died of itself.
        """
        end = time.monotonic() + PATIENCE / min(1, (os.cpu_count() or 1) / max(1, os.getloadavg()[0]))
        while self.waiting:
            alive()
            meanwhile()
            dead = not self.lives()
            if self._pipe.poll(0 if dead else 0.01):
                with contextlib.suppress(EOFError, ConnectionResetError):
                    return self._receive()
            if dead:
                self.waiting = False
                self.check()
            elif time.monotonic() > end:
                raise Wrong(f"{self.name} hangs:\n{stacks_of(self.pid)}\n{self.said()}")
        return None

    def _receive(self) -> Any:
        found, answer = self._pipe.recv()
        if found:
            raise Wrong(found)
        self.waiting = False
        return answer

    def lives(self) -> bool:
        """Whether it has not ended."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status is None

    def ends(self) -> bool:
        """Whether it has ended, or is about to: its connections close a moment before."""
        end = time.monotonic() + 1.0
        while self.lives() and time.monotonic() < end:
            time.sleep(0.001)
        return not self.lives()

    def check(self) -> None:
        """Raises:
        Wrong: it has ended as it should not.
        """
        if not self.lives() and self._status and not (self.may_die and self._status == -signal.SIGKILL):
            with contextlib.suppress(EOFError, ConnectionResetError):
                self._receive()
            raise Wrong(f"{self.name} ends: with {self._status}\n{self.said()}")

    def said(self) -> str:
        """The end of what it said on standard error."""
        if self._said < 0:
            return ""
        size = os.fstat(self._said).st_size
        return os.pread(self._said, _TEXT, max(0, size - _TEXT)).decode(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Ends it, and waits for that; its exit status."""
        self.may_die |= number == signal.SIGKILL
        if self.lives():
            os.kill(self.pid, number)
            end = time.monotonic() + PATIENCE
            while self.lives():
                if time.monotonic() > end:
                    raise Wrong(f"{self.name} does not end:\n{stacks_of(self.pid)}")
                time.sleep(0.001)
        assert self._status is not None
        return self._status

    def signal(self, number: int) -> None:
        """Sends it a signal that it survives."""
        if self.lives():
            os.kill(self.pid, number)

    def forget(self) -> None:
        """Kills it, and closes what there is of it. Idempotent."""
        self.signal(signal.SIGCONT)
        self.kill()
        self._pipe.close()
        if self._said >= 0:
            os.close(self._said)
            self._said = -1


def _work(work: Callable[[Connection], None], pipe: Connection, said: int, die_after: int | None) -> int:
    die_with_parent()
    os.dup2(said, 2)
    os.close(said)
    try:
        if die_after is not None:
            _die_after(die_after)
        work(pipe)
        return 0
    except BaseException as error:
        sys.setprofile(None)
        what = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            pipe.send((f"{what}\n{traceback.format_exc()}", None))
        traceback.print_exc()
        return 70


def _die_after(calls: int) -> None:
    left = calls

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)
