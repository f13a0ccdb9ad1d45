"""Plots for a page: the draw functions of the benchmarks, as SVG with real text and the page's colours.

The colours of `bench.harness.theme` become variables of the page's style sheet, of which there is a light and a dark
set, and the ground is transparent.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from bench.harness import theme
from bench.harness.discovery import Case
from bench.harness.records import Record

# Each colour of the theme on a dark page.
DARK = {
    theme.GROUND: "#0d1117",
    theme.INK: "#e6edf3",
    theme.QUIET: "#9da7b1",
    theme.GRID: "#373e47",
    theme.OURS: "#6ea3ff",
    theme.OTHERS: "#7d8792",
    theme.color("paged"): "#ff8f52",
    theme.color("static"): "#b1bac4",
    theme.color("dynamic"): "#c896ff",
    theme.color("other"): "#3fce97",
    theme.color("another"): "#dcae3c",
}
_FONTS = "system-ui, 'DejaVu Sans', Verdana, sans-serif"
_COLOR = re.compile(r"#[0-9a-f]{6}")


def variables() -> tuple[str, str]:
    """The colours as declarations of CSS: of a light page, and of a dark one."""
    light, dark = (
        "".join(f"--{_name(color)}:{shown};" for color, shown in colors.items())
        for colors in ({color: color for color in DARK}, DARK)
    )
    return light, dark


def draw(case: Case, record: Record, prefix: str) -> tuple[str, str]:
    """The plot of a record, and what it shows, in words.

    Args:
        prefix: of the ids within the SVG, since several are on one page.

    Raises:
        ValueError: the case gave the plot no title, or an axis no label.
    """
    caption = ""

    def fill(axes: Any) -> None:
        nonlocal caption
        case.load().draw(axes, record)
        if missing := theme.unsaid(axes):
            raise ValueError(f"bench/cases/{case.name}.py: draw() gives the plot no {' and no '.join(missing)}")
        caption = axes.get_title()
        axes.set_title("")  # the page's own text

    return svg(fill, prefix), caption


def svg(fill: Callable[[Any], None], prefix: str, *, width: float = theme.WIDTH, height: float = 3.6) -> str:
    """A figure as an element of a page.

    Args:
        fill: draws on the axes.
        prefix: of the ids within.
        width, height: in inches; the page scales it.
    """
    import matplotlib

    with theme.applied(), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = theme.figure(width, height)
        axes = figure.subplots()
        fill(axes)
        theme.finish(figure, axes, "")
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(file.getvalue(), prefix)


def _name(color: str) -> str:
    return f"c{color[1:]}"


def _inline(text: str, prefix: str) -> str:
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style type=\"text/css\">.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r"(font(?:-family)?: [^;\"]*?)'DejaVu Sans'[^;\"]*", rf"\1{_FONTS}", text)
    text = _COLOR.sub(lambda match: f"var(--{_name(match[0])})" if match[0] in DARK else match[0], text)
    # Attributes do not take variables, properties do.
    text = re.sub(r' (fill|stroke)="(var\([^)]*\))"', r' style="\1: \2"', text)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    return text.replace("<svg ", '<svg role="img" ', 1)
