"""What changed between two records of one benchmark on one machine.

Rows are paired by the columns that say what was run; each column that is measured gives one ratio per pair. Rows with
the same texts, such as the name of an engine, are one side, and judged together: their median, and its interval.
Whether more is worse follows from the unit at the end of the column's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from bench.harness.ratios import DIGITS, interval, verdict
from bench.harness.records import Record

_COSTS = re.compile(r"(?: (?:us|ms|s|MiB|GiB)|\bseconds(?: of .*)?|ms per step|B/token)$")
_RATES = re.compile(r"(?:\w/s$|^sequences\b)")

_WIDER = 3  # times the tolerance, where there are too few rows for an interval

Change = Literal["worse", "better", "tie", "few"]
_SAID: dict[str, Change] = {"ahead": "worse", "behind": "better", "tie": "tie", "few": "few"}


@dataclass(frozen=True)
class Changed:
    """One column of two records.

    Attributes:
        column: its name.
        side: the texts of its rows; empty where all rows have the same.
        ratios: for each pair of rows how many times as much it costs in the second record: over 1 is worse.
    """

    column: str
    side: str
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.ratios)

    @property
    def change(self) -> Change:
        """Whether it got worse; a tie if the interval of the median includes 1."""
        return _SAID[verdict(self.ratios)]

    def worse_than(self, tolerance: float) -> bool:
        """Whether it got worse by more than a share of `tolerance`; of three times as much, if it is a few rows'."""
        if self.change == "few":
            return self.median > 1 + _WIDER * tolerance
        return self.change == "worse" and self.median > 1 + tolerance

    def __str__(self) -> str:
        name = f"{self.side}, {self.column}" if self.side else self.column
        text = f"{name}: {self.median:.{DIGITS}f} times the cost"
        if self.change == "few":
            return f"{text}, of {len(self.ratios)} row{'s' * (len(self.ratios) > 1)}: too few for an interval"
        low, high = interval(self.ratios)
        said = {"worse": "WORSE", "better": "better", "tie": "a tie"}[self.change]
        return f"{text} ({low:.{DIGITS}f} to {high:.{DIGITS}f}, {len(self.ratios)} rows): {said}"


def same_machine(before: Record, after: Record) -> bool:
    """Whether two records are of one kind of machine."""
    names = ("cpu", "cpu_family", "cpu_model", "cores", "gpu")
    return all(before["hardware"].get(name) == after["hardware"].get(name) for name in names)


def changes(before: Record, after: Record) -> list[Changed]:
    """The measured columns that both records have, over the rows that both have.

    Raises:
        ValueError: the records cannot be compared; the message says why.
    """
    if before["name"] != after["name"]:
        raise ValueError(f"a record of {before['name']!r} and one of {after['name']!r} cannot be compared")
    if not same_machine(before, after):
        raise ValueError(f"the records of {before['name']!r} are of different machines")
    for flaw in ("quick", "contended"):
        if before[flaw] != after[flaw] or (flaw == "contended" and after[flaw]):
            raise ValueError(f"a record of {before['name']!r} is from a {flaw} run")
    earlier, later = ({_case(row): row for row in record["figures"]} for record in (before, after))
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for case, row in later.items():
        if case in earlier:
            pairs.setdefault(_side(row), []).append((earlier[case], row))
    return [
        Changed(column, side if len(pairs) > 1 else "", ratios)
        for column in after["figures"][0]
        for side, both in pairs.items()
        if (ratios := tuple(_ratios(column, both)))
    ]


def _side(row: dict[str, Any]) -> str:
    return ", ".join(value for value in row.values() if isinstance(value, str))


def _case(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What was run: the columns that are no measurement."""
    return tuple((name, value) for name, value in row.items() if not isinstance(value, float) and not _measures(name))


def _measures(column: str) -> bool:
    return bool(_COSTS.search(column) or _RATES.search(column))


def _ratios(column: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[float]:
    if not _measures(column):
        return
    for before, after in pairs:
        a, b = before.get(column), after.get(column)
        if isinstance(a, int | float) and isinstance(b, int | float) and a and b:
            yield a / b if _RATES.search(column) else b / a
