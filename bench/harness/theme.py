"""How every plot looks, and what every plot must say.

A plot has a ground of its own, because it is read on white pages and on dark ones. Its type is still legible when a
phone shows it 390 pixels wide. A colour and a dash pattern belong to what a line stands for, in all plots.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

GROUND, INK, QUIET, GRID = "#ffffff", "#1f2328", "#59636e", "#d8dee4"
OURS, OTHERS = "#2563eb", "#8c959f"
WIDTH, HEIGHT = 6.4, 4.2  # inches

# Lines that lie on each other stay visible: patterns differ, and markers.
_STYLES: Mapping[str, Mapping[str, str]] = {
    "virtual": {"color": OURS, "linestyle": "-", "marker": "o"},
    "paged": {"color": "#d9480f", "linestyle": "--", "marker": "s"},
    "static": {"color": "#57606a", "linestyle": ":", "marker": "^"},
    "dynamic": {"color": "#9333ea", "linestyle": "-.", "marker": "D"},
    "other": {"color": "#0f8a5f", "linestyle": "--", "marker": "v"},
    "another": {"color": "#a16207", "linestyle": "-.", "marker": "P"},
}
_SETTINGS: Any = {
    "svg.hashsalt": "vattn",  # the same ids in every run
    "figure.facecolor": GROUND,
    "savefig.facecolor": GROUND,
    "font.size": 11,
    "axes.facecolor": GROUND,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextmanager
def applied() -> Iterator[None]:
    """Within it, figures are made and saved in this style."""
    import matplotlib  # here and below, so that a check in which nothing is stale does not need it

    with matplotlib.rc_context(_SETTINGS):
        yield


def figure(width: float = WIDTH, height: float = HEIGHT) -> Any:
    """A figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def finish(figure: Any, axes: Any, source: str) -> None:
    """Puts the title, the legend and the source where they are in every plot."""
    title = axes.get_title()
    axes.set_title("")
    figure.suptitle(textwrap.fill(title, 62), x=0.015, ha="left", fontsize=12.5, fontweight="bold")
    figure.supxlabel(textwrap.fill(source, 118), x=0.015, ha="left", fontsize=7.5, color=QUIET)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = 3 - sum(max(map(len, labels)) > limit for limit in (16, 26))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=10, borderaxespad=0.2)


def unsaid(axes: Any) -> list[str]:
    """What a reader would miss: a title, which says what was found, or the label of an axis of numbers."""
    missing = [] if axes.get_title() else ["title"]
    for name in "xy":
        if _shows_numbers(axes, name) and not getattr(axes, f"get_{name}label")():
            missing.append(f"label of its {name} axis")
    return missing


def style(name: str) -> dict[str, Any]:
    """Colour, pattern and marker of the lines of a backend, or of `other` and `another`."""
    return {**_STYLES[name]}


def color(name: str) -> str:
    """The colour of a backend."""
    return _STYLES[name]["color"]


def bars(axes: Any, values: Mapping[str, float], ours: Sequence[str], digits: int | None = None) -> None:
    """Horizontal bars from the top down, with their values; those of `ours` stand out."""
    drawn = axes.barh(list(values), list(values.values()), color=[OURS if name in ours else OTHERS for name in values])
    axes.bar_label(drawn, [number(value, digits) for value in values.values()], padding=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.14)


def reference(axes: Any, text: str, value: float = 1) -> None:
    """A line at what all others are compared with."""
    axes.axhline(value, color=INK, linewidth=1.2, label=text)


def doublings(axes: Any, values: Sequence[float]) -> None:
    """An x axis of powers, with exactly these values on it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [tokens(value) for value in values])
    axes.set_xticks([], minor=True)


def tokens(count: float) -> str:
    """A number of tokens as it is written on an axis: 512, 8K."""
    return f"{count / 1024:g}K" if count >= 1024 and count % 1024 == 0 else f"{count:,.0f}"


def number(value: float, digits: int | None = None) -> str:
    """A figure with as many digits as a reader needs."""
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def more_time(ratio: float) -> str:
    """A ratio of times in words: `2.5 times as long`, `17 % more time`, `4 % less time`, `as long`."""
    if ratio >= 1.95:
        return f"{ratio:.1f} times as long"
    percent = round(100 * (ratio - 1))
    return "as long" if percent == 0 else f"{abs(percent)} % {'more' if percent > 0 else 'less'} time"


def _shows_numbers(axes: Any, name: str) -> bool:
    """Whether the ticks of an axis are numbers, not names."""
    from matplotlib.category import StrCategoryFormatter
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    axis = getattr(axes, f"{name}axis")
    if isinstance(axis.get_major_formatter(), ScalarFormatter | LogFormatter):
        return True
    labels = [label.get_text() for label in axis.get_majorticklabels()]
    return not isinstance(axis.get_major_formatter(), StrCategoryFormatter) and any(map(_is_number, labels))


def _is_number(text: str) -> bool:
    return text.replace(",", "").removesuffix("K").replace(".", "", 1).isdigit()
