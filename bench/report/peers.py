"""The tables of docs/related-work.md, for the page: what others do, with the files and commits that say so."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from bench.report.markup import element

SOURCE = Path(__file__).parents[2] / "docs" / "related-work.md"

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def tables() -> dict[str, list[list[str]]]:
    """The tables under `## Point by point` by their headings: rows of markdown, the first of which has the names.

    Raises:
        ValueError: there are none.
    """
    text = SOURCE.read_text(encoding="utf-8").partition("\n## Point by point\n")[2].partition("\n## ")[0]
    found = {}
    for part in text.split("\n### ")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        if len(lines) > 2:
            found[part.partition("\n")[0]] = [
                [cell.strip() for cell in line.strip("|").split(" |")] for line in (lines[0], *lines[2:])
            ]
    if not found:
        raise ValueError(f"{SOURCE} has no table under 'Point by point'")
    return found


def inline(text: str) -> str:
    """A cell's markdown as HTML: links to the web, strong text and code. Links within the documents become text."""

    def link(match: re.Match[str]) -> str:
        words, to = match.groups()
        return f'<a href="{to}" rel="noreferrer">{words}</a>' if to.startswith("https://") else words

    html = _LINK.sub(link, escape(text, quote=False))
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", html)


def html() -> str:
    """The tables, each under its heading."""
    return "".join(element("h3", inline(heading)) + _table(rows) for heading, rows in tables().items())


def _table(rows: list[list[str]]) -> str:
    header, *others = rows
    head = element("tr", "".join(element("th", inline(cell), scope="col") for cell in header))
    body = "".join(element("tr", "".join(element("td", inline(cell)) for cell in row)) for row in others)
    whole = element("table", element("thead", head) + element("tbody", body), _class="peers")
    return element("div", whole, _class="scroll", tabindex=0)
