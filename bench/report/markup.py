"""HTML in which each number says which record it is from, and from where in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from bench.harness.ratios import DIGITS, Comparison, Place
from bench.harness.report import format_cell


def element(name: str, content: str, **attributes: Any) -> str:
    """An element around content that is HTML. Attributes of None are left out; `_` in their names is `-`."""
    said = "".join(
        f' {key.strip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{said}>{content}</{name}>"


def prose(text: str) -> str:
    """Text with `code` as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def cell(value: str | float, record: str, place: Place) -> str:
    """A figure of a record, as tables print it."""
    if isinstance(value, str):
        return escape(value)
    return element("data", format_cell(value), value=value, data_record=record, data_at=json.dumps(place))


def table(rows: Sequence[dict[str, Any]], record: str, name: str) -> str:
    """Rows of a record, the columns as headings.

    Args:
        record: which, as `machine/benchmark`.
        name: of the list of rows in the record.
    """
    header = element("tr", "".join(element("th", escape(column), scope="col") for column in rows[0]))
    lines = (
        element("tr", "".join(element("td", cell(value, record, (name, number, key))) for key, value in row.items()))
        for number, row in enumerate(rows)
    )
    whole = element("table", element("thead", header) + element("tbody", "".join(lines)), data_record=record)
    return element("div", whole, _class="scroll", tabindex=0)


def sentence(comparison: Comparison, record: str, number: int) -> str:
    """What a comparison says, with its ratio; and its spread. `number` is its place among those of the record."""

    def of(what: str, value: float, text: str) -> str:
        return element("data", text, value=value, data_record=record, data_comparison=number, data_of=what)

    ratio = element("strong", of("median", comparison.median, f"{comparison.median:.{DIGITS}f}"))
    says = prose(comparison.says).format(ratio)
    values = comparison.values
    least, most = (of(pick.__name__, pick(values), f"{pick(values):.{DIGITS}f}") for pick in (min, max))
    count = of("cases", len(values), str(len(values)))
    if len(values) == 1:
        spread = "one case"
    elif comparison.verdict == "few":
        spread = f"{count} cases: {least} and {most}" if len(values) == 2 else f"{count} cases"
    else:
        low, high = (
            of(name, value, f"{value:.{DIGITS}f}")
            for name, value in zip(("low", "high"), comparison.interval, strict=True)
        )
        spread = f"{low} to {high}; {count} {comparison.of} from {least} to {most}"
    return f"{says} {element('span', f'({spread})', _class='spread')}"


def items(parts: Iterable[str], **attributes: Any) -> str:
    """A list."""
    return element("ul", "".join(element("li", part) for part in parts), **attributes)
