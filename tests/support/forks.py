"""Children that a test forks of its own process.

None goes on as a second pytest, outlives the test's process, whose end xdist would not see then, or is awaited for
ever: whatever lock another thread held at the fork stays locked in the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterator

from tests.support.waiting import SECONDS

_PR_SET_PDEATHSIG = 1
_RAISED = 99
_DYING = 10  # seconds in which a child that hangs says where
_prctl = ctypes.CDLL(None).prctl  # in a fork, to load it could wait for a lock of the loader


def die_with_parent() -> None:
    """Ends this process when the one that forked it has ended, whatever ended that."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def status(body: Callable[[], int | None]) -> int:
    """The exit status of a child: what `body` returned in it, 99 if it raised; negative is the signal that ended it."""
    child = _fork(body)
    ended = os.pidfd_open(child)
    hangs = not select.select([ended], [], [], SECONDS)[0]
    if hangs:
        os.kill(child, signal.SIGABRT)  # pytest's faulthandler prints where it is
        select.select([ended], [], [], _DYING)
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert not hangs, f"a forked child did not end within {SECONDS} s"
    return found


@contextlib.contextmanager
def running(body: Callable[[], int | None]) -> Iterator[int]:
    """A child that is killed at the end."""
    child = _fork(body)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _fork(body: Callable[[], int | None]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    found = _RAISED
    try:
        die_with_parent()
        if os.getppid() == parent:
            found = body() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(found)
