"""Work in a child process, whose crash or hang is an answer like any other."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

Send = Callable[[Any], None]


class Ended(Exception):
    """The child ended before it was done.

    Attributes:
        kind: how: "crash (SIGSEGV)" or "hang", say.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


def in_child(work: Callable[[Send], None], *, quiet_seconds: float) -> Iterator[Any]:
    """Runs `work` in a forked process, and yields what it sends.

    Args:
        quiet_seconds: without a word for so long on an idle machine, it hangs.

    Raises:
        Ended: it crashed, or hangs.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os._exit(_child(work, write))
    os.close(write)
    done = False
    try:
        yield from _messages(read, quiet_seconds)
        done = True
    except TimeoutError:
        raise Ended("hang", f"nothing came for {quiet_seconds:.0f} s") from None
    finally:
        os.close(read)
        if not done:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        raise Ended(f"crash ({signal.Signals(os.WTERMSIG(status)).name})")
    if code := os.waitstatus_to_exitcode(status):
        raise Ended("crash", f"exit status {code}")


def _child(work: Callable[[Send], None], write: int) -> int:
    faulthandler.disable()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()

    def send(message: Any) -> None:
        data = pickle.dumps(message)
        data = struct.pack("<Q", len(data)) + data
        while data:
            data = data[os.write(write, data) :]

    try:
        work(send)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def _messages(read: int, quiet_seconds: float) -> Iterator[Any]:
    buffer = b""
    while True:
        while len(buffer) >= 8 and len(buffer) >= 8 + (size := struct.unpack("<Q", buffer[:8])[0]):
            message, buffer = buffer[8 : 8 + size], buffer[8 + size :]
            yield pickle.loads(message)
        began = time.monotonic()
        while not select.select([read], [], [], 1)[0]:
            # Beside others, a child gets its share of the cores only.
            share = min(1, (os.cpu_count() or 1) / max(1, os.getloadavg()[0]))
            if time.monotonic() - began > quiet_seconds / share:
                raise TimeoutError
        data = os.read(read, 1 << 20)
        if not data:
            return
        buffer += data
