"""Numbers from callers: conversion of whole ones to `int`, and whether a value is a number at all.

NumPy and torch integers are not stored as they are: arithmetic on narrow ones overflows silently, and a tensor may
change later.
"""

from __future__ import annotations

import numbers
import operator
from typing import TypeGuard


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


def is_real(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number of Python's or NumPy's, whole or not; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A short representation of any value for error messages."""
    if isinstance(value, int) and value.bit_length() > 10_000:  # repr refuses them
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # a __repr__ may raise anything
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else f"{text[:77]}..."
