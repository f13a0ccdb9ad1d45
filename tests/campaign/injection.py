"""An exception in the midst of a call, where CPython might deliver a signal. Scripts that need it contain this file."""

from __future__ import annotations

import dis
import itertools
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

import vattn
from vattn.pool.calls import Calls

LIBRARY = os.path.dirname(vattn.__file__)


@cache
def _after_calls(code: CodeType) -> dict[int, bool]:
    """Offsets behind a call, where an exception finds the same handlers as one that the call raised; and whether
    CPython looks for signals there whatever was called.
    """
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        inner = [entry.target for entry in handlers if entry.start <= offset < entry.end]
        return inner[-1] if inner else None

    found = {}
    steps = list(dis.get_instructions(code))
    for call, behind in itertools.pairwise(steps):
        if call.opname in ("CALL", "CALL_KW", "CALL_FUNCTION_EX") and handler(call.offset) == handler(behind.offset):
            found[behind.offset] = call.opname == "CALL_FUNCTION_EX"
    return found


@cache
def _after_blocks(code: CodeType) -> set[int]:
    """Offsets behind the ends of `with` blocks: calls that stand where a block begins."""
    steps = list(dis.get_instructions(code))
    begins = {step.positions for step in steps if step.opname == "BEFORE_WITH"}
    return {
        behind.offset
        for call, behind in itertools.pairwise(steps)
        if call.opname == "CALL" and call.positions in begins
    }


_counted = [0]


def events() -> int:
    """How many events the last call of `interrupted` had, up to the interrupt."""
    return _counted[0]


def interrupted(function: Callable[[], Any], event: str, nth: int, how: str = "raise", part: str = "") -> Any:
    """Calls a function, with a KeyboardInterrupt at the nth event in code of vattn.

    Args:
        event: "call": where a Python function is entered; "check": behind what is no Python function, as well. CPython
            handles signals there, and nowhere else but where a loop goes on. "done": of these, where a call on a pool
            has happened and has not returned.
        how: "raise": the exception itself; "signal": SIGINT, which code may hold off.
        part: of the library, whose events alone count: a folder, or a file; all of it by default.
    """
    left, counted = nth, os.path.join(LIBRARY, part)
    entered: set[FrameType] = set()  # those that called a Python function with the instruction before

    def trace(frame: FrameType, kind: str, arg: Any) -> Any:
        nonlocal left
        if kind == "call" and frame.f_back is not None and frame.f_code.co_name not in ("__init__", "__new__"):
            entered.add(frame.f_back)
        if not frame.f_code.co_filename.startswith(counted):
            return None
        if event == "done" and frame.f_code is not Calls.atomically.__code__:
            return None
        counts = kind == "call" and event != "done"
        if kind == "opcode":
            always = _after_calls(frame.f_code).get(frame.f_lasti)
            counts = always or (always is not None and frame not in entered)
            entered.discard(frame)
            if event == "done":
                counts = frame.f_lasti in _after_blocks(frame.f_code)
        if event != "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if counts:
            left -= 1
            if left == 0:
                sys.settrace(None)
                if how == "raise":
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGINT)
        return trace

    if how == "signal" and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(None)
        entered.clear()  # CPython 3.11 loses count of a generator's frame that is held when its entry raises
        _counted[0] = nth - left
