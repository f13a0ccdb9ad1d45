"""A broker in a process of its own, `vattn pool serve`, for the engines of a test."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from vattn.broker.control import Control
from vattn.broker.places import FOLDER_VARIABLE
from vattn.errors import VattnError

NAME = "tested"
SECONDS = 60  # for what happens soon


class Pool:
    """A broker, which can be killed and started anew."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "vattn.engine.cli", "pool", "serve", NAME, "--budget", f"{self._budget}B"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None
        try:
            self.ask("top")
        except VattnError:
            return False
        return True

    def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        with closing(Control(NAME)) as control:
            return control.ask(kind, **fields)

    def of(self, name: str) -> dict[str, Any]:
        """What `vattn pool top` says of a borrower; nothing, if there is none."""
        return next((each for each in self.ask("top")["borrowers"] if each["name"] == name), {})

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving_pool(budget: int) -> Iterator[Pool]:
    """A broker, in a folder that only this test knows."""
    before = os.environ.get(FOLDER_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            pool = Pool(budget)
            try:
                yield pool
            finally:
                pool.kill()
        finally:
            if before is None:
                del os.environ[FOLDER_VARIABLE]
            else:
                os.environ[FOLDER_VARIABLE] = before


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
