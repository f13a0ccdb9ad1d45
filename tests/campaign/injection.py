"""An exception in the midst of a call, where CPython might deliver a signal. Scripts that need it contain this file."""

from __future__ import annotations

import dis
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

import vattn

LIBRARY = os.path.dirname(vattn.__file__)


@cache
def _leaves_with(code: CodeType) -> frozenset[int]:
    """Offsets from which a `with` is left in order.

    No signal is handled between the end of the body and the call of `__exit__`; an exception raised there would leave
    every lock in the world locked.
    """
    found = set()
    steps = list(dis.get_instructions(code))
    for i in range(len(steps) - 4):
        pushed = steps[i : i + 3]
        if all(step.opname == "LOAD_CONST" and step.argval is None for step in pushed):
            after = [step for step in steps[i + 3 : i + 6] if step.opname not in ("PRECALL", "CACHE", "PUSH_NULL")]
            if after and after[0].opname == "CALL" and after[0].arg == 2:
                found |= {step.offset for step in steps[max(0, i - 2) : i + 1] if step.opname in ("LOAD_CONST", "SWAP")}
    return frozenset(found)


def interrupted(function: Callable[[], Any], event: str, nth: int, how: str = "raise") -> Any:
    """Calls a function, with a KeyboardInterrupt at the nth event in code of vattn.

    Args:
        event: "call": where a Python function is entered; "line": at any line, or return, as well.
        how: "raise": the exception itself; "signal": SIGINT, which code may hold off.
    """
    events = ("call",) if event == "call" else ("call", "line", "return")
    left = nth

    def trace(frame: FrameType, kind: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if kind == "line":
            counts = frame.f_lasti not in _leaves_with(frame.f_code)
        else:  # what a public call returns, the caller has
            counts = kind == "call" or (
                frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(LIBRARY)
            )
        if kind in events and counts:
            left -= 1
            if left == 0:
                sys.settrace(None)
                if how == "raise":
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(None)
        interrupted.events = nth - left  # type: ignore[attr-defined]
