"""Mutual exclusion of threads: a second thread in an engine gets an error at once."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from vattn.errors import VattnError


class EngineBusy(VattnError, RuntimeError):
    """The engine is in use, by another thread or by an outer call on the stack; nothing changed."""


class EngineClosed(VattnError, RuntimeError):
    """The engine was closed, perhaps while this call ran."""


class EngineAsleep(VattnError, RuntimeError):
    """The engine sleeps, and the call needs its cache: wake it up first."""


@dataclass(eq=False, frozen=True)
class Use:
    """A thread inside the engine, and the name of its outermost call.

    Attributes:
        lent_in: the process in which the thread keeps the engine between its calls, from before it starts until it
            gives the engine back; None where it does not.
    """

    thread: threading.Thread
    name: str
    lent_in: int | None = None


class Gate:
    """A reentrant lock that refuses a second thread instead of blocking it.

    A use ends with `if gate.user is use: gate.user = None`, written out in the `finally` around `enter`: stores of
    attributes with no call in between, which an interrupt cannot separate. So waiting threads have to poll.

    Attributes:
        user: the thread inside.
        closing: the engine is being closed, or is closed.
    """

    def __init__(self) -> None:
        self.user: Use | None = None
        self.closing = False
        self._lock = threading.Lock()

    def enter(self, use: Use) -> bool:
        """Let a thread in.

        Returns:
            False if it is inside already, by an outer call, which stays the user.

        Raises:
            EngineBusy: another thread is inside.
        """
        with self._lock:
            user = self.user
            # A thread that ended without leaving belonged to the process that this one was forked from.
            if user is None or not (user.lent_in == os.getpid() or user.thread.is_alive()):
                self.user = use
                return True
        if user.thread is use.thread:
            return False
        raise EngineBusy(
            f"{use.name} was called in the thread {threading.current_thread().name!r} while {user.name} runs in "
            f"{user.thread.name!r}, and one thread at a time may use an LLM; wait for it or guard the calls by a lock, "
            "give all prompts to one call, or let an AsyncEngine serve many clients"
        )

    def wait(self, use: Use) -> bool:
        """As `enter`, but waits until the other thread has left."""
        while True:
            try:
                return self.enter(use)
            except EngineBusy:
                time.sleep(0.001)


class _Gated(Protocol):
    gate: Gate

    def close(self) -> None: ...


_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=_Gated)


def exclusive(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A method that one thread at a time may run; the outermost call runs a `close` that was called inside.

    What a method without arguments returns is not lost to an interrupt on the way.
    """

    @functools.wraps(method)
    def guarded(self: _S, /, *args: _P.args, **keywords: _P.kwargs) -> Any:
        gate = self.gate
        use = Use(threading.current_thread(), method.__name__)
        try:
            gate.enter(use)
            # Python looks for signals after the second kind of call, whatever was called.
            return plain(self) if plain is not None else method(self, *args, **keywords)
        finally:
            if gate.user is use:
                gate.user = None
                if gate.closing:
                    self.close()

    plain: Any = method if len(inspect.signature(method).parameters) == 1 else None
    return guarded
