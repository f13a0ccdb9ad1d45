"""How much is tried where any amount could be: little in `make test`, much in `make check-long` (VATTN_TEST_LONG=1)."""

from __future__ import annotations

import os
from typing import TypeVar

LONG = os.environ.get("VATTN_TEST_LONG") == "1"

Amount = TypeVar("Amount")


def effort(short: Amount, long: Amount) -> Amount:
    """The amount for this run."""
    return long if LONG else short
