"""Numbers from callers: conversion of whole ones to `int`, and of real ones to `float`.

NumPy and torch integers are not stored as they are: arithmetic on narrow ones overflows silently, and a tensor may
change later.
"""

from __future__ import annotations

import math
import numbers
import operator


def as_int(value: object) -> int:
    """`value` as a plain `int`: from an `int`, a NumPy or torch integer, or any object with `__index__`.

    Raises:
        TypeError: it is not a whole number, but a float, a bool, text or None, for example.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError(f"{shown(value)} is a bool, not a whole number")
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except Exception as error:  # an __index__ may raise anything
        raise TypeError(f"{shown(value)} is not a whole number") from error


def as_real(value: object) -> float | None:
    """`value` as a plain `float`, infinite where it is too large for one; None if it is no real number, or a bool.

    Narrow numbers are converted before they are compared: to float16, every bound above 65504 is infinite.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:  # a __float__ may raise anything
        return None


def shown(value: object) -> str:
    """A short representation of any value for error messages."""
    if isinstance(value, int) and value.bit_length() > 10_000:  # repr refuses them
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # a __repr__ may raise anything
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else f"{text[:77]}..."
