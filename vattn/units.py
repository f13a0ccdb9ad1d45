"""Sizes in bytes, as numbers and as text."""

from __future__ import annotations

import operator
import re

from vattn.errors import ConfigError

_LARGEST = 2**63 - 1
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


def parse_bytes(value: int | str, what: str) -> int:
    """A size in bytes from a number or text such as `"4GiB"`, `"512 MiB"`, `"1.5G"` (K, M, G, T are binary, KB 1000).

    Args:
        what: names the value in the error.

    Raises:
        ConfigError: if it is no such text or number, not positive, or beyond 64 bits.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(f"{what}={value!r} is not a size; write bytes, or text such as '4GiB' or '512MiB'")
        size: float = float(match[1]) * _UNITS[match[2].upper()]
    elif not isinstance(value, bool) and hasattr(value, "__index__"):
        size = operator.index(value)
    else:
        raise ConfigError(f"{what}={value!r} is not a size; write bytes, or text such as '4GiB'")
    if size > _LARGEST:
        raise ConfigError(f"{what} is more than 2**63 - 1 bytes; no machine has them")
    if size <= 0:
        raise ConfigError(f"{what}={value!r} must be more than 0 bytes")
    return int(size)


def format_bytes(size: float) -> str:
    """`size` bytes for people: `"1.5 MiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
