"""Ratios of a record's figures: their median, their spread, and whether they differ from 1.

A ratio is of two figures of one case, measured in turn, so that other load on the machine affects both. The interval is
a bootstrap of the median. Over the cases of a table it says how sure it is which side is ahead *over these cases*; the
noise of a single figure is in it only as far as cases differ by it. Over the rounds of one case it says how much that
case's ratio is noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median
from typing import Any, Literal

from bench.harness.records import Record

Place = tuple[str | int, ...]
Pair = tuple[Place, Place | None]
Verdict = Literal["ahead", "tie", "behind", "few", "limit"]

_RESAMPLES = 2000
_CONFIDENCE = 0.95
_FEWEST = 3  # cases of an interval
DIGITS = 2  # of a ratio as it is printed, and judged


def at(record: Any, place: Sequence[str | int]) -> Any:
    """The value in a place of a record: `("figures", 3, "paged ms")`."""
    for key in place:
        record = record[key]
    return record


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap; the same in every call.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("an interval of no values")
    return _bootstrap(tuple(values))


@cache
def _bootstrap(values: tuple[float, ...]) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    outside = round((1 - _CONFIDENCE) / 2 * _RESAMPLES)
    return medians[outside], medians[-outside - 1]


def verdict(values: Sequence[float], *, higher_is_better: bool = True) -> Verdict:
    """`tie` if the interval of the median, as it is printed, includes 1; `few` if there are too few values for one."""
    if len(values) < _FEWEST:
        return "few"
    low, high = (round(end, DIGITS) for end in interval(values))
    if low <= 1 <= high:
        return "tie"
    return "ahead" if (low > 1) == higher_is_better else "behind"


@dataclass(frozen=True)
class Comparison:
    """What a record says about one question, in a sentence around a ratio.

    Attributes:
        says: the sentence, with `{}` for the ratio.
        record: what it is taken from.
        pairs: for each case the places of the figure above and of the one below; a ratio of the record stands alone.
        higher_is_better: whether vattn is ahead where the ratio is over 1.
        of: what the values are, in the plural: cases of a table, or rounds of one case.
        is_limit: the ratio is to what the machine can do at most, so nobody is ahead.
    """

    says: str
    record: Record
    pairs: tuple[Pair, ...]
    higher_is_better: bool = True
    is_limit: bool = False
    of: Literal["cases", "rounds"] = "cases"

    @cached_property
    def values(self) -> list[float]:
        """The ratio of each case."""
        return [at(self.record, a) / (1 if b is None else at(self.record, b)) for a, b in self.pairs]

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Of the median, over the cases."""
        return interval(self.values)

    @property
    def median(self) -> float:
        """Over the cases."""
        return median(self.values)

    @property
    def verdict(self) -> Verdict:
        """Whether vattn is ahead."""
        return "limit" if self.is_limit else verdict(self.values, higher_is_better=self.higher_is_better)


def columns(
    record: Record, above: str, below: str | None = None, *, where: Callable[[Any], bool] | None = None
) -> tuple[Pair, ...]:
    """Pairs of two columns of the same row; or a column of ratios. Rows without a number in one of them are left out.

    Args:
        where: which rows; by default all.
    """
    pairs: list[Pair] = []
    for number, row in enumerate(record["figures"]):
        names = [name for name in (above, below) if name is not None]
        if (where is None or where(row)) and all(isinstance(row[name], int | float) for name in names):
            pairs.append((("figures", number, above), None if below is None else ("figures", number, below)))
    return tuple(pairs)


def by_round(record: Record, above: str, below: str | None = None) -> tuple[Pair, ...]:
    """Pairs of two series, each of two calls that were made in turn; or a series of ratios."""
    names = [name for name in (above, below) if name is not None]
    rounds = range(min(len(record["series"][name]) for name in names))
    return tuple((("series", above, n), None if below is None else ("series", below, n)) for n in rounds)


def rows(
    record: Record, column: str, above: dict[str, Any], below: dict[str, Any], *, same: Sequence[str] = ()
) -> tuple[Pair, ...]:
    """Pairs of one column of two rows.

    Args:
        above, below: the fields that the two rows have.
        same: columns in which they agree.
    """
    found: dict[tuple[Any, ...], list[Place | None]] = {}
    for number, row in enumerate(record["figures"]):
        for side, fields in enumerate((above, below)):
            if fields.items() <= row.items() and isinstance(row[column], int | float):
                pair = found.setdefault(tuple(row[name] for name in same), [None, None])
                pair[side] = ("figures", number, column)
    return tuple((a, b) for a, b in found.values() if a is not None and b is not None)
