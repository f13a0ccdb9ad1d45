"""A broker in a process of its own, for tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import SECONDS, wait_until
from vattn.broker.borrower import Borrower, _borrowers
from vattn.broker.control import Control
from vattn.broker.places import FOLDER_VARIABLE
from vattn.errors import VattnError

NAME = "tested"

# On a busy machine the thread of a borrower may not come to answer within a second.
_SCRIPT = """
import sys
from vattn.broker import books, server
books.PATIENCE = 10.0
server.serve(sys.argv[1], int(sys.argv[2]), device=sys.argv[3])
"""


class Process:
    """A broker, which can be killed and started anew."""

    def __init__(self, budget: int, device: str) -> None:
        self.budget, self.device = budget, device
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", _SCRIPT, NAME, str(self.budget), self.device]
        with tempfile.TemporaryFile("w+") as errors:  # nobody would read a pipe, and it would fill
            self.process = subprocess.Popen(command, stderr=errors)
            deadline = time.monotonic() + SECONDS
            while True:
                assert self.process.poll() is None, errors.seek(0) or errors.read()
                with contextlib.suppress(VattnError):
                    self.ask("top")
                    return
                assert time.monotonic() < deadline
                time.sleep(0.005)

    def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        with closing(Control(NAME)) as control:
            return control.ask(kind, **fields)

    def borrower(self, name: str) -> dict[str, Any] | None:
        """What `top` says of a borrower."""
        return next((each for each in self.ask("top")["borrowers"] if each["name"] == name), None)

    def problems(self) -> list[str]:
        found: list[str] = self.ask("check")["problems"]
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(budget: int, device: str = "cpu") -> Iterator[Process]:
    """A broker of the pool `NAME`, in a folder that only this test knows."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        os.chmod(folder, 0o700)
        patch.setenv(FOLDER_VARIABLE, str(Path(folder)))
        process = Process(budget, device)
        try:
            yield process
        finally:
            process.kill()
            # Without a broker they write into the folder that they have left, and it could not be removed meanwhile.
            wait_until(lambda: not any(map(_leaves, list(_borrowers))))


def _leaves(each: Borrower) -> bool:
    """Whether it has no pool any more, and its thread has not ended yet."""
    pool, thread = each._lent, each._thread
    return pool is not None and pool() is None and thread is not None and thread.is_alive()
