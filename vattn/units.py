"""Sizes in bytes, as numbers and as text."""

from __future__ import annotations

import re

from vattn.errors import ConfigError
from vattn.integers import as_int, shown

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


_MOST_BYTES = 2**50  # more than any machine has


def parse_bytes(value: int | str, what: str) -> int:
    """A size in bytes from a number or text such as `"4GiB"`, `"512 MiB"`, `"1.5G"` (K, M, G, T are binary, KB 1000).

    Args:
        what: name of the value in error messages.

    Raises:
        ConfigError: it is not a size, not positive, or over 1 PiB.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(f"{what}={shown(value)} is not a size; write bytes, or text such as '4GiB' or '512MiB'")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    else:
        try:
            size = as_int(value)
        except TypeError:
            raise ConfigError(f"{what}={shown(value)} is not a size; write bytes, or text such as '4GiB'") from None
    if not 0 < size <= _MOST_BYTES:
        raise ConfigError(f"{what}={shown(value)} must be more than 0 bytes and at most {format_bytes(_MOST_BYTES)}")
    return size


def format_bytes(size: float) -> str:
    """`size` bytes for people: `"1.5 MiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
