"""The demo's picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness import theme
from demo.shows import Growth
from demo.sides import Side
from vattn.units import format_bytes

MIB = 2**20
LIVE, NEEDED, SPARE = theme.OURS, "#93c5fd", "#e0b36a"


def draw(sides: Mapping[str, Side], static: int, grown: Growth, path: Path) -> None:
    """Memory beside static reservations, over time, slot by slot, and of one request that grows to the limit."""
    with theme.applied():
        figure = theme.figure(11, 7.6)
        grid = figure.subplots(2, 2)
        draw_reservation(sides, static, grid[0, 0])
        draw_steps(sides["virtual"], grid[0, 1])
        draw_slots(sides["virtual"], grid[1, 0])
        draw_growth(grown, grid[1, 1])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def draw_reservation(sides: Mapping[str, Side], static: int, axes: Any) -> None:
    """The most that running requests needed on each side, beside what static reservations hold for as many."""
    sizes = {"static": static, **{kv: side.needed for kv, side in sides.items()}, "live tokens": sides["virtual"].live}
    drawn = axes.barh(
        list(sizes),
        [size / MIB for size in sizes.values()],
        color=[theme.OTHERS, *(theme.color(kv) for kv in sides), NEEDED],
    )
    axes.bar_label(drawn, [format_bytes(size) for size in sizes.values()], padding=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.2)
    axes.set(title=f"{static / sides['virtual'].needed:.0f} times less than static reservations", xlabel="MiB")


def draw_steps(side: Side, axes: Any) -> None:
    """KV memory after each step."""
    for color, label, values in (
        (SPARE, "mapped or created, for whoever comes", [kv.physical_bytes for kv in side.kv]),
        (NEEDED, "needed by running requests", [kv.used_bytes for kv in side.kv]),
        (LIVE, "live tokens", [kv.live_bytes for kv in side.kv]),
    ):
        axes.fill_between(range(len(values)), [value / MIB for value in values], color=color, label=label)
    axes.set(title="Memory follows the tokens", xlabel="step", ylabel="MiB", xlim=(0, len(side.kv) - 1), ylim=(0, None))
    axes.legend(loc="upper right", frameon=True, framealpha=0.9, fontsize=9)


def draw_slots(side: Side, axes: Any) -> None:
    """The page map at the fullest moment at which a good part of the slots runs."""
    from matplotlib.patches import Patch

    busy = [step for step, slots in enumerate(side.pages) if sum(slot.active for slot in slots) >= len(slots) / 2]
    moment = max(busy, key=lambda step: sum(slot.mapped for slot in side.pages[step] if not slot.active), default=0)
    for slot in side.pages[moment]:
        axes.barh(slot.reqid, slot.mapped, color=SPARE)
        axes.barh(slot.reqid, slot.length, color=LIVE)
    axes.set(title=f"Each request is one row; step {moment}", xlabel="token", ylabel="slot (reqid)")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.7 * axes.get_xlim()[1])  # room for the legend
    axes.legend(
        [Patch(color=LIVE), Patch(color=SPARE)],
        ["live tokens", "mapped, for the next tokens or requests"],
        loc="lower right",
        frameon=True,
        framealpha=0.9,
        fontsize=9,
    )


def draw_growth(grown: Growth, axes: Any) -> None:
    """The memory of one request on its way to the longest context."""
    reserved = [grown.tokens[-1] * grown.token_bytes / MIB] * len(grown.tokens)
    axes.fill_between(grown.tokens, reserved, color=theme.GRID, label="a static reservation")
    axes.fill_between(grown.tokens, [size / MIB for size in grown.mapped], color=LIVE, label="mapped, never moved")
    axes.set(
        title="One request grows to the longest context",
        xlabel="tokens",
        ylabel="MiB",
        xlim=(grown.tokens[0], grown.tokens[-1]),
        ylim=(0, None),
    )
    axes.legend(loc="upper left", frameon=True, framealpha=0.9, fontsize=9)
