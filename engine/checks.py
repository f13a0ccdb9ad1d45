"""Checks of values from callers: numbers become Python's own, and text has to be encodable."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Protocol

from vattn.errors import ConfigError, VattnError
from vattn.integers import as_int, as_real, shown

# The largest integer that tensors and the C++ core can hold.
LARGEST = 2**63 - 1


def wrong(param: str, what: str) -> ConfigError:
    """The error of one argument, whose name begins the message."""
    return ConfigError(f"{param} {what}", param=param)


def whole(value: Any) -> int | None:
    """`value` as an `int`, also from NumPy's and torch's integers; None for any other value, bools included."""
    try:
        return as_int(value)
    except TypeError:
        return None


def checked_whole(name: str, value: Any, low: int, high: int = LARGEST, *, what: str | None = None) -> int:
    """`value` as an integer in `[low, high]`.

    Args:
        what: what is possible, for the message.

    Raises:
        ConfigError: it is not one.
    """
    number = whole(value)
    if number is None or number < low:
        raise wrong(name, f"is {shown(value)}; give {what or f'a whole number, at least {low}'}")
    if number > high:
        raise wrong(name, f"is {shown(value)}; it can be at most {high}")
    return number


def checked_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise a ConfigError for a value that is not one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name}={shown(value)} is not one of {', '.join(choices)}", param=name)


def number(value: Any) -> float | None:
    """`value` as a float, if it is a finite number; None for any other value, bools included."""
    found = as_real(value)
    return None if found is None or not math.isfinite(found) else found


class _OfArgument(Protocol):
    def __call__(self, message: str, /, *, param: str | None) -> VattnError: ...


def check_encodable(what: str, text: str, error: _OfArgument, param: str | None = None) -> None:
    """Raise `error` for text with lone surrogates: no encoding has them, and no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError as found:
        raise error(
            f"{what} has the lone surrogate {text[found.start]!a} at position {found.start}, which is no character; "
            "decode the text it came from with errors='replace'",
            param=param,
        ) from None
