"""A driver table over the provider's that can fail chosen calls: every call passes through Python on its way."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from stub_cuda.signatures import SIGNATURES
from tests.support import target
from tests.support.waiting import SECONDS

_COUNTED = (
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemsetD8Async",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamIsCapturing",
)
_PER_THREAD = 2  # CU_STREAM_PER_THREAD, on which memory is zeroed


class FaultyTable:
    """`addresses` is a driver table; `fail(n)` makes the n-th call from now on fail (1: the next), once;
    `fail_several((n, code), ...)` several of them.

    Calls that only look (retain, get_access) are passed on uncounted. The wait for a memset fails by name only: what
    that leaves is unknown, so the pool is unusable then, and nothing is taken back.
    """

    def __init__(self) -> None:
        self.addresses = target.table()
        self.calls: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.delay = 0.0  # seconds that every call takes longer
        self._most: dict[str, int] = {}  # calls that may end before the next one waits, by name
        self._released = threading.Event()
        self.failed: str | None = None
        self._coming: list[list[int]] = []  # calls until each failure, and its code
        self._always: frozenset[str] = frozenset()
        self._code = 0
        self._transparent = False
        self._only: str | None = None
        self._memset_event: int | None = None
        self._kept_alive = []
        for name in _COUNTED:
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name])
            callback = prototype(self._wrap(name, prototype(self.addresses[name])))
            self._kept_alive.append(callback)
            self.addresses[name] = ctypes.cast(callback, ctypes.c_void_p).value or 0

    def fail(self, nth: int, code: int = 999, name: str | None = None) -> None:
        self.fail_several((nth, code))
        self._only = name

    def fail_several(self, *failures: tuple[int, int]) -> None:
        self.failed, self._only = None, None
        self._coming = [[nth, code] for nth, code in failures]

    def fail_always(self, *names: str, code: int = 999) -> None:
        self._always, self._code = frozenset(names), code

    @contextlib.contextmanager
    def holding(self, name: str, after: int) -> Iterator[None]:
        """Calls of that name wait, once so many have ended, until they are released, at the latest at the end."""
        self._released.clear()
        self._most = {name: after}
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._most = {}
        self._released.set()

    @contextlib.contextmanager
    def transparent(self) -> Iterator[None]:
        """For checks, which make calls of their own."""
        self._transparent = True
        yield
        self._transparent = False

    def heal(self) -> None:
        self._coming = []
        self._always = frozenset()

    def _wrap(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def wrapped(*arguments: Any) -> int:
            if self._transparent:
                return call(*arguments)
            self.calls[name] += 1
            if name in self._always:
                return self._code
            if name == "cuEventRecord" and arguments[1] == _PER_THREAD:
                self._memset_event = arguments[0]
            waits = name in ("cuEventRecord", "cuEventSynchronize") and arguments[0] == self._memset_event
            if name == "cuEventSynchronize" and waits:
                self._memset_event = None  # the event is used again for other things
            if self._only == name or (self._only is None and not waits):
                for failure in self._coming:
                    failure[0] -= 1
                if over := [failure for failure in self._coming if failure[0] == 0]:
                    self._coming = [failure for failure in self._coming if failure[0] > 0]
                    self.failed = name
                    return over[0][1]
            if self.ended[name] >= self._most.get(name, math.inf):
                assert self._released.wait(SECONDS)
            if self.delay:
                time.sleep(self.delay)
            result = call(*arguments)
            self.ended[name] += 1
            return result

        return wrapped
