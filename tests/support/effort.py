"""How much is tried where any amount could be: little in `make test`, much in `make check-long` (VATTN_TEST_LONG=1)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, TypeVar

LONG = os.environ.get("VATTN_TEST_LONG") == "1"

Amount = TypeVar("Amount")


def effort(short: Amount, long: Amount) -> Amount:
    """The amount for this run."""
    return long if LONG else short


def covering(first: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of parameters: all in a long run.

    A short one has every combination of `others`, each value of `first`, and no more than either of them needs: where
    there are as many values of `first` as combinations of the others, or more, each has one.
    """
    rest = list(itertools.product(*others))
    if LONG:
        return [(value, *combination) for value in first for combination in rest]
    # Shifted each time around, or a first of two values would have the same value of the last at each of its own.
    return [
        (first[(i + i // len(first)) % len(first)], *rest[i % len(rest)]) for i in range(max(len(first), len(rest)))
    ]
