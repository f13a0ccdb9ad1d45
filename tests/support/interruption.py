"""Calls that are interrupted where Python delivers a KeyboardInterrupt: at the entry of a function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import vattn

HOME = str(Path(vattn.__file__).parent)


def interrupted(call: Callable[[], object], entries: int) -> bool | None:
    """Calls with a KeyboardInterrupt at the n-th entry of a function of vattn; whether the call ended all the same, and
    None if it has not so many entries.
    """
    left = entries

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if event == "call":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # what a generator that is closed swallows
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return False
    except vattn.OutOfPages:
        return None if left >= 0 else False
    finally:
        sys.settrace(None)
        sys.unraisablehook = hook
    return None if left >= 0 else True


def entries(call: Callable[[], object]) -> int:
    """Makes the call; how many functions of vattn it entered."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(HOME)

    sys.settrace(trace)
    try:
        call()
    except vattn.OutOfPages:
        pass
    finally:
        sys.settrace(None)
    return count
