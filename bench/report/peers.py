"""The table of docs/related-work.md, for the page: what others do, with the files and commits that say so."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from bench.report.markup import element

SOURCE = Path(__file__).parents[2] / "docs" / "related-work.md"

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def rows() -> list[list[str]]:
    """The table under `## Point by point`, its heading first, as markdown.

    Raises:
        ValueError: there is no such table.
    """
    text = SOURCE.read_text(encoding="utf-8").partition("\n## Point by point\n")[2]
    lines = [line for line in text.partition("\n###")[0].splitlines() if line.startswith("|")]
    if len(lines) < 3:
        raise ValueError(f"{SOURCE} has no table under 'Point by point'")
    return [[cell.strip() for cell in line.strip("|").split(" |")] for number, line in enumerate(lines) if number != 1]


def inline(text: str) -> str:
    """A cell's markdown as HTML: links to the web, strong text and code. Links within the documents become text."""

    def link(match: re.Match[str]) -> str:
        words, to = match.groups()
        return f'<a href="{to}" rel="noreferrer">{words}</a>' if to.startswith("https://") else words

    html = _LINK.sub(link, escape(text, quote=False))
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", html)


def table() -> str:
    """The table as HTML."""
    header, *others = rows()
    head = element("tr", "".join(element("th", inline(cell), scope="col") for cell in header))
    body = "".join(element("tr", "".join(element("td", inline(cell)) for cell in row)) for row in others)
    whole = element("table", element("thead", head) + element("tbody", body), _class="peers")
    return element("div", whole, _class="scroll", tabindex=0)
