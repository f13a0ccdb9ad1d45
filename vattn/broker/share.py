"""What an engine asks of a pool, as an operator writes it: `at least 4GiB, at most 40GiB`."""

from __future__ import annotations

import re

from vattn.errors import ConfigError
from vattn.integers import shown
from vattn.units import parse_bytes


def parse_share(text: object) -> tuple[int, int | None]:
    """The guaranteed bytes, and the most; 0 and None for what is not said.

    Raises:
        ConfigError: it is no such text.
    """
    found: dict[str, int] = {}
    for part in text.split(",") if isinstance(text, str) else [""]:
        match = re.fullmatch(r"\s*at\s+(least|most)\s+(\S+(?:\s\w+)?)\s*", part)
        if match is None or match[1] in found:
            raise ConfigError(f"kv_share is {shown(text)}; give text such as 'at least 4GiB, at most 40GiB'")
        found[match[1]] = parse_bytes(match[2], "kv_share")
    return found.get("least", 0), found.get("most")
