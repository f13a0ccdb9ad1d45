"""Parts of a benchmark in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

from bench.harness.waiting import SECONDS


@contextmanager
def process(body: Callable[..., None], *arguments: object) -> Iterator[tuple[int, Connection]]:
    """The number of a process that runs this, given one end of a pipe first, and the other end.

    It is awaited until it sends something, which says that it is ready, and killed at the end.

    Raises:
        TimeoutError: it never is.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    started = context.Process(target=body, args=(there, *arguments), daemon=True)
    with ExitStack() as stack:
        stack.callback(here.close)
        started.start()
        there.close()
        stack.callback(started.join)
        stack.callback(started.kill)
        if not here.poll(SECONDS):
            raise TimeoutError(f"a process is not ready after {SECONDS:.0f} s")
        here.recv()
        assert started.pid is not None
        yield started.pid, here
