"""Draws docs/img/idea.svg: contiguous rows over scattered pages. Run it: python docs/draw_idea.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PICTURE = Path(__file__).parent / "img" / "idea.svg"

INK, QUIET, GROUND = "#1f2328", "#59636e", "#ffffff"
COLORS = {"A": "#2563eb", "B": "#d9480f", "C": "#0f8a5f", "=": "#7c3aed", "-": "#eaeef2"}
WIDTH, HEIGHT = 640, 396
CELL, GAP, TALL = 42, 4, 34
LEFT = 118  # where rows begin

# The pages of each row, by name; "=" is of a prefix that two requests share. Then the same pages as they lie in memory;
# "-" is free.
ROWS = {"request A": ["=1", "=2", "A3", "A4"], "request B": ["=1", "=2", "B3"], "request C": ["C1", "C2"]}
MEMORY = ["B3", "=1", "-", "C2", "A3", "=2", "-", "C1", "-", "A4", "-"]
RESERVED = 11  # cells in a row, with memory or without
ROW_TOPS = (84, 132, 180)
MEMORY_TOP = 288


def draw() -> str:
    """The picture as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif">',
        "<title>Contiguous rows of virtual memory over physical pages in any order</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{GROUND}"/>',
        _text(16, 30, "What a kernel sees: a contiguous row for each request", INK, bold=True),
        _text(16, 54, "addresses for the longest context; memory for the tokens that are there", QUIET),
        *_curves(),
        *_rows(),
        *_memory(),
        _text(16, MEMORY_TOP + 68, "Where the bytes are: physical pages, in any order", INK, bold=True),
        _text(16, MEMORY_TOP + 92, "mapped as tokens arrive; a prefix that two requests share is stored once", QUIET),
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rows() -> Iterator[str]:
    for top, (name, pages) in zip(ROW_TOPS, ROWS.items(), strict=True):
        yield _text(16, top + 23, name, INK)
        for number in range(RESERVED):
            yield _cell(_place(number, LEFT), top, pages[number] if number < len(pages) else None)


def _memory() -> Iterator[str]:
    for number, page in enumerate(MEMORY):
        yield _cell(_place(number, LEFT), MEMORY_TOP, page)
    yield _text(16, MEMORY_TOP + 23, "memory", INK)


def _curves() -> Iterator[str]:
    """From each cell of a row to its page; drawn first, so that cells lie over them."""
    for top, pages in zip(ROW_TOPS, ROWS.values(), strict=True):
        for number, page in enumerate(pages):
            x, to = (_place(at, LEFT) + CELL / 2 for at in (number, MEMORY.index(page)))
            y = top + TALL
            yield (
                f'<path d="M{x:g} {y}C{x:g} {y + 60} {to:g} {MEMORY_TOP - 60} {to:g} {MEMORY_TOP}" fill="none" '
                f'stroke="{COLORS[page[0]]}" stroke-width="1.6" opacity="0.75"/>'
            )


def _cell(x: float, y: float, page: str | None) -> str:
    """A page of memory, or addresses without any."""
    box = f'<rect x="{x:g}" y="{y}" width="{CELL}" height="{TALL}" rx="3"'
    if page is None:
        return f'{box} fill="{GROUND}" fill-opacity="0.7" stroke="{QUIET}" stroke-dasharray="3 3"/>'
    cell = f'{box} fill="{COLORS[page[0]]}"/>'
    return cell if page == "-" else cell + _text(x + CELL / 2, y + 23, page.replace("=", "AB"), "#ffffff", middle=True)


def _place(number: int, left: int) -> float:
    return left + number * (CELL + GAP)


def _text(x: float, y: float, text: str, color: str, *, bold: bool = False, middle: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    anchor = ' text-anchor="middle"' if middle else ""
    size = 18 if bold else 14 if middle else 16
    return f'<text x="{x:g}" y="{y}" font-size="{size}" fill="{color}"{weight}{anchor}>{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE.relative_to(Path(__file__).parents[1]))
