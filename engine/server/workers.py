"""`Workers`: threads for what would keep the event loop from other requests: parsing, chat templates, tokenizing."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

from .errors import ClientGone
from .streams import until_gone

T = TypeVar("T")

# Raises ClientGone once nobody waits for the result, and lets the event loop run. Work calls it between its parts.
Check = Callable[[], None]

SMALL_BYTES = 2**16
_SMALL_THREADS = 4
# One at a time, so that what large bodies take does not add up.
_LARGE_THREADS = 1
_TURNS = 3  # of the event loop: it receives a request, calls its endpoint, and sends the answer
_MOST_SECONDS = 1.0  # that a thread waits for them
_SECONDS = 0.01  # of work, after which it waits again


class Workers:
    """Small bodies do not wait for large ones."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_SMALL_THREADS, thread_name_prefix="vattn-small")
        self._large = ThreadPoolExecutor(_LARGE_THREADS, thread_name_prefix="vattn-large")

    async def run(self, request: Request, size: int, work: Callable[[Check], T]) -> T:
        """What `work` returns or raises, for a body of `size` bytes; it ends when the client leaves.

        Raises:
            ClientGone: it left.
        """
        gone = threading.Event()
        loop = asyncio.get_running_loop()

        def begin() -> T:
            large = size > SMALL_BYTES
            # What was before a large body is freed all at once.
            waited = 0.0 if large else time.monotonic()

            def check() -> None:
                nonlocal waited
                if gone.is_set():
                    raise ClientGone
                if time.monotonic() - waited > _SECONDS:
                    _let_run(loop)
                    waited = time.monotonic()

            try:
                check()
                return work(check)
            finally:
                if large:
                    _give_back()

        threads = self._small if size <= SMALL_BYTES else self._large
        try:
            return await until_gone(request, loop.run_in_executor(threads, begin))
        finally:
            gone.set()

    def close(self) -> None:
        """Work that has not begun is dropped."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)


def _let_run(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until the event loop has answered what waits for it.

    A large body is parsed and checked by calls that keep all of Python waiting for tens of milliseconds each. The loop
    takes several turns to answer, and a thread that does not wait would begin the next call after the first of them.
    """
    answered = threading.Event()

    def turn(left: int) -> None:
        if left:
            loop.call_soon(turn, left - 1)
        else:
            answered.set()

    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(turn, _TURNS)
        answered.wait(_MOST_SECONDS)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def _give_back() -> None:
    """Give free memory back to the machine; glibc keeps it otherwise."""
    if _trim is not None:
        _trim(0)
