"""Whole numbers that come from outside: the one place where they become Python's own.

A NumPy or torch integer stays what it is when it is stored: arithmetic on a narrow one overflows without a word, and a
tensor may change later.
"""

from __future__ import annotations

import operator


def as_int(value: object) -> int:
    """`value` as a plain `int`, where it is a whole number: an `int`, a NumPy or torch integer, any `__index__`.

    Raises:
        TypeError: it is none: a float, a bool, text, None.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError(f"{shown(value)} is a bool, not a whole number")
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except Exception as error:  # an __index__ may raise anything
        raise TypeError(f"{shown(value)} is not a whole number") from error


def shown(value: object) -> str:
    """`value` for an error message: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 10_000:  # repr refuses them
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # a __repr__ may raise anything
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else f"{text[:77]}..."
