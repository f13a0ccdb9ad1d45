"""A package that only plots need."""

from __future__ import annotations

import importlib.util
import sys


def require_matplotlib(command: str) -> None:
    """Exit with status 2 where it is not installed, before minutes of measurements that would be lost."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{command} needs matplotlib: pip install -e './[bench]'", file=sys.stderr)
        raise SystemExit(2)
