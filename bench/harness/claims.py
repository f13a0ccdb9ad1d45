"""What the records say, as report and documents say it: the first comparison of each, and those with a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.harness.discovery import Case
from bench.harness.ratios import DIGITS, Comparison
from bench.harness.records import Record, Records, machine

WORDS = {
    "ahead": "vattn ahead",
    "tie": "tie",
    "behind": "vattn behind",
    "few": "too few cases",
    "limit": "of the limit",
    "void": "void: a busy machine",
}


def comparisons(case: Case, record: Record) -> tuple[Comparison, ...]:
    """All that a record says, in the case's order."""
    compare = getattr(case.load(), "compare", None)
    said = [] if compare is None else compare(record)
    return tuple(comparison for comparison in said if comparison.pairs)


def leading(number: int, comparison: Comparison) -> bool:
    """Whether the comparison with this number among those of its record stands for the record."""
    return number == 0 or comparison.is_limit


def verdict(comparison: Comparison) -> str:
    """A key of `WORDS`: who is ahead; nobody in times that were taken on a busy machine."""
    return "void" if comparison.record["contended"] else comparison.verdict


def table(cases: Mapping[str, Case], records: Records, names: Sequence[str], *, every: bool = False) -> list[list[str]]:
    """What the records of these benchmarks say, the machines beside each other; the first row has their names.

    Args:
        every: all comparisons, not only the leading ones.

    Raises:
        ValueError: there is no such benchmark, or no record of it.
    """
    for name in names:
        if not records.get(name):
            raise ValueError(f"claims are asked of benchmark {name!r}, of which there is no record")
    # Of several records of a machine, the one that says most about it.
    places: dict[str, str] = {}
    for name in names:
        for place, record in records[name].items():
            places[place] = max(places.get(place, ""), machine(record), key=len)
    rows: dict[str, dict[str, str]] = {}
    for name in names:
        for place, record in records[name].items():
            for number, comparison in enumerate(comparisons(cases[name], record)):
                if every or leading(number, comparison):
                    rows.setdefault(comparison.says.replace("{}", "…"), {})[place] = _cell(comparison)
    order = sorted(places)
    return [
        ["", *(places[place] for place in order)],
        *([says, *(cells.get(place, "") for place in order)] for says, cells in rows.items()),
    ]


def _cell(comparison: Comparison) -> str:
    ratio = f"{comparison.median:.{DIGITS}f}"
    said = verdict(comparison)
    if said in ("few", "limit") or len(comparison.values) == 1:
        return f"**{ratio}**, {WORDS[said]}"
    low, high = comparison.interval
    return f"**{ratio}** ({low:.{DIGITS}f} to {high:.{DIGITS}f}), {WORDS[said]}"
