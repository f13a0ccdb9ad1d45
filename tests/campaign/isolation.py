"""Work in a child process, whose crash or hang is an answer like any other."""

from __future__ import annotations

import contextlib
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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.forks import die_with_parent

Send = Callable[[Any], None]

_TELL_STACKS = signal.SIGUSR1
_alive: Callable[[], None] | None = None  # in a child
_told: int | None = None  # likewise: the file to which it and its children tell stacks


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
        Ended: it crashed, or hangs, with the stacks of its threads.
    """
    read, write = os.pipe()
    stacks = os.memfd_create("stacks")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _tell_stacks(stacks)
        os._exit(_child(work, write))
    os.close(write)
    done = False
    try:
        yield from _messages(read, quiet_seconds)
        done = True
    except TimeoutError:
        raise Ended("hang", f"nothing came for {quiet_seconds:.0f} s\n{_stacks(pid, stacks)}") from None
    finally:
        os.close(read)
        os.close(stacks)
        if not done:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        raise Ended(f"crash ({signal.Signals(os.WTERMSIG(status)).name})")
    if code := os.waitstatus_to_exitcode(status):
        raise Ended("crash", f"exit status {code}")


def _child(work: Callable[[Send], None], write: int) -> int:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.disable()
    torch.set_num_threads(1)
    set_aside()

    def put(data: bytes) -> None:
        data = struct.pack("<Q", len(data)) + data
        while data:
            data = data[os.write(write, data) :]

    def send(message: Any) -> None:
        put(pickle.dumps(message))

    global _alive
    _alive = partial(put, b"")

    try:
        work(send)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def _tell_stacks(file: int) -> None:
    global _told
    _told = file
    faulthandler.register(_TELL_STACKS, file=file)


def stacks_of(pid: int) -> str:
    """Where the threads of a process are that was forked within the work."""
    return _stacks(pid, _told) if _told is not None else _tasks(pid)


def alive() -> None:
    """Says, from within the work, that it goes on: what is long is no hang."""
    if _alive is not None:
        _alive()


def _stacks(pid: int, file: int) -> str:
    """Where the threads of a child and of its children are: what the kernel says, twice; and all of them in Python."""
    pids = _family(pid)
    first = [_tasks(pid) for pid in pids]
    for each in pids:
        with contextlib.suppress(OSError):
            os.kill(each, _TELL_STACKS)
        time.sleep(0.5)
    later = [_tasks(pid) for pid in pids]
    told = os.pread(file, 1 << 20, 0).decode(errors="replace")
    return "\n".join([*first, "a moment later:", *later, told])


def _family(pid: int) -> list[int]:
    """A process, its children, and theirs."""
    found = [pid]
    for each in found:
        for listed in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, listed.read_text().split())
    return found


def _tasks(pid: int) -> str:
    """The threads of a process: name, state, ticks of computing, and where in the kernel each waits."""
    lines = [f"process {pid}:"]
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            state = rest.split()
            waits = (task / "wchan").read_text()
            lines.append(f"thread {task.name} {name}: {state[0]}, {int(state[11]) + int(state[12])} ticks, {waits}")
    return "\n".join(lines)


def set_aside() -> None:
    """Spares the collections to come what exists so far: scenarios collect often, and hundreds of thousands of objects
    stay as long as the process.
    """
    gc.collect()
    gc.freeze()


def _messages(read: int, quiet_seconds: float) -> Iterator[Any]:
    buffer = b""
    while True:
        while len(buffer) >= 8 and len(buffer) >= 8 + (size := struct.unpack("<Q", buffer[:8])[0]):
            message, buffer = buffer[8 : 8 + size], buffer[8 + size :]
            if message:
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
