"""Processes that end with the one that started them, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # in a fork, to load it could wait for a lock of the loader that another thread held


def end_with(parent: int) -> None:
    """From now on this process is killed when `parent`, the one that started it, ends, by SIGKILL too.

    `partial(end_with, os.getpid())` is the `preexec_fn` of a subprocess. What that starts needs its own.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(128 + signal.SIGKILL)
