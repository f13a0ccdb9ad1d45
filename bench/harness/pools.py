"""A broker in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from vattn.broker.places import FOLDER_VARIABLE

NAME = "bench"


@contextmanager
def serving_pool(budget: int) -> Iterator[str]:
    """The name of a pool of so many bytes, which this process and its children find within the context."""
    before = os.environ.get(FOLDER_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        command = [sys.executable, "-m", "vattn.engine.cli", "pool", "serve", NAME, "--budget", f"{budget}B"]
        broker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert broker.stdout is not None
            if not broker.stdout.readline():
                raise RuntimeError(f"the broker ended with status {broker.wait()}")
            yield NAME
        finally:
            broker.terminate()
            broker.communicate()
            if before is None:
                del os.environ[FOLDER_VARIABLE]
            else:
                os.environ[FOLDER_VARIABLE] = before
