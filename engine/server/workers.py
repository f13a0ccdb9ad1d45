"""`Workers`: threads for what would keep the event loop from other requests: parsing, chat templates, tokenizing."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

from .errors import ClientGone
from .streams import until_gone

T = TypeVar("T")

# Raises ClientGone once nobody waits for the result. Work calls it between its parts.
Check = Callable[[], None]

SMALL_BYTES = 2**16
_SMALL_THREADS = 4
# One at a time, so that what large bodies take does not add up.
_LARGE_THREADS = 1


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

        def check() -> None:
            if gone.is_set():
                raise ClientGone

        def work_and_trim() -> T:
            try:
                check()
                return work(check)
            finally:
                _give_back()

        threads, job = (self._small, lambda: work(check)) if size <= SMALL_BYTES else (self._large, work_and_trim)
        try:
            return await until_gone(request, asyncio.get_running_loop().run_in_executor(threads, job))
        finally:
            gone.set()

    def close(self) -> None:
        """Work that has not begun is dropped."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def _give_back() -> None:
    """Give free memory back to the machine; glibc keeps it otherwise."""
    if _trim is not None:
        _trim(0)
