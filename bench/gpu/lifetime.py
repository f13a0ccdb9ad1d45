"""Processes that end with the one that started them, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on this process is killed when the one that started it ends, by SIGKILL too.

    As `preexec_fn` of a subprocess, or at the start of one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it has ended already
        os._exit(128 + signal.SIGKILL)
