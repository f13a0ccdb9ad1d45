"""The overview at the top of README: how long others take, and how much memory they hold, on every machine.

All figures are over vattn's on the same machine, so that machines can be compared, and longer bars are better
throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness import theme
from bench.harness.records import Record, machine

NEEDED = ("cache", "decode")  # of a machine that is shown; the others are shown where there are records
WANTED = (*NEEDED, "serving", "throughput")

_NOTE = "Longer bars: vattn is ahead. Each figure is over vattn's on the same machine."

Ratios = dict[str, float]
Machine = Mapping[str, Record]


@dataclass(frozen=True)
class Panel:
    """Bars over vattn's.

    Attributes:
        finding: the title.
        measured: what the bars are.
        sides: the bars of each machine.
    """

    finding: str
    measured: str
    sides: Sequence[Ratios]

    @property
    def rows(self) -> dict[str, list[tuple[int, float]]]:
        """For each bar's name, the numbers of the machines that have it, and their figures."""
        rows: dict[str, list[tuple[int, float]]] = {}
        for number, ratios in enumerate(self.sides):
            for name, ratio in ratios.items():
                rows.setdefault(name, []).append((number, ratio))
        return rows

    @property
    def height(self) -> float:
        """In bars."""
        return sum(len(found) + 0.45 for found in self.rows.values())


def draw(figure: Any, machines: Mapping[str, Machine]) -> None:
    """Panels of bars, one below the other.

    Args:
        machines: records by machine and benchmark; each machine has those in `NEEDED`.
    """
    panels = list(_panels(list(machines.values())))
    figure.set_size_inches(theme.WIDTH, 0.8 + sum(0.25 * panel.height + 0.72 for panel in panels))
    names = [machine(records["decode"]) for records in machines.values()]
    all_axes = figure.subplots(len(panels), height_ratios=[panel.height for panel in panels])
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, names)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=10)
    figure.supxlabel(_NOTE, x=0.015, ha="left", fontsize=9.5, color=theme.QUIET)
    # Titles begin at the edge of the figure, not of the axes, whose place is known once they are laid out.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in all_axes:
        place = axes.get_position()
        axes.title.set_position(((0.015 - place.x0) / place.width, 1))


def _panels(machines: list[Machine]) -> Iterator[Panel]:
    step = machines[0]["decode"]["figures"][-1]
    attention = [_attention(records["decode"]) for records in machines]
    yield Panel(
        f"Following a block table makes attention {_span(attention, 'following a block table')} times as long",
        f"time of attention for {step['batch']} requests of {step['context']:,} tokens",
        attention,
    )
    context = machines[0]["cache"]["figures"][-1]["context"]
    times, sizes = ([_caches(records["cache"], unit) for records in machines] for unit in ("ms", "MiB"))
    yield Panel(
        f"DynamicCache makes a step of generate() {_span(times, 'DynamicCache')} times as long",
        f"time of a decode step at {context:,} tokens",
        times,
    )
    yield Panel(
        f"DynamicCache holds {_span(sizes, 'DynamicCache')} times as much memory",
        f"memory of the process at {context:,} tokens",
        sizes,
    )
    engines = [_engines(records) for records in machines]
    if any(engines):
        yield Panel(
            f"Serving a model, vLLM on a CPU takes {_span(engines, 'vLLM')} times as long",
            "time of 32 short requests; of a token, 8 clients",
            engines,
        )


def _attention(record: Record) -> Ratios:
    row = record["figures"][-1]
    names = {"paged": "following a block table", "gathered": "gathering blocks first", "torch": "torch's kernel"}
    return {name: row[f"{side} over virtual"] for side, name in names.items()}


def _caches(record: Record, unit: str) -> Ratios:
    row = record["figures"][-1]
    names = {"static": "StaticCache, exact size", "static x2": "StaticCache, twice the size", "dynamic": "DynamicCache"}
    return {name: row[f"{kind} {unit}"] / row[f"virtual {unit}"] for kind, name in names.items()}


def _engines(records: Machine) -> Ratios:
    ratios: Ratios = {}
    if "throughput" in records:
        names = {
            "paged": "paged, in vattn's engine",
            "vllm": "vLLM, 32 requests",
            "llamacpp": "llama.cpp, 32 requests",
            "generate_batch": "generate_batch(), 32 requests",
            "generate": "generate(), 32 requests",
        }
        rows = [row for row in records["throughput"]["figures"] if row["set"] == "short"]
        times = {row["engine"]: row["over virtual"] for row in rows}
        ratios |= {name: times[key] for key, name in names.items() if key in times}
    if "serving" in records:
        rows = [row for row in records["serving"]["figures"] if (row["model"], row["at a time"]) == ("large", 8)]
        delays = {row["server"]: row["median ITL ms"] for row in rows}
        if "vllm" in delays:
            ratios["vLLM's server, 8 clients"] = delays["vllm"] / delays["vattn"]
    return ratios


def _span(sides: Sequence[Ratios], begin: str) -> str:
    """The least and the largest figure of the bars whose names begin so."""
    found = [ratio for ratios in sides for name, ratio in ratios.items() if name.startswith(begin)]
    least, most = (f"{value:.2f}" for value in (min(found, default=1), max(found, default=1)))
    return least if least == most else f"{least} to {most}"


def _draw_panel(axes: Any, panel: Panel, machines: list[str]) -> None:
    place, ticks = 0.0, {}
    longest = max(ratio for ratios in panel.sides for ratio in ratios.values())
    shades = [(theme.OURS, 1 - number / len(machines)) for number in range(len(machines))]  # with their opacity
    for name, found in panel.rows.items():
        ticks[name] = place + (len(found) - 1) / 2
        for number, ratio in found:
            axes.barh(place, ratio, height=0.86, color=shades[number])
            axes.text(max(ratio, 1) + 0.012 * longest, place, f"{ratio:.2f}", va="center", fontsize=9.5)
            place += 1
        place += 0.45
    for number, name in enumerate(machines):
        axes.barh(0, 0, color=shades[number], label=name)  # for the legend
    axes.axvline(1, color=theme.INK, linewidth=1.2)
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.set_xticks([0, 1], ["0", "vattn"])
    axes.set_xlim(0, 1.1 * longest)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_xlabel(panel.measured, fontsize=9.5, color=theme.QUIET, labelpad=1)
    axes.set_title(panel.finding, x=-0.6, ha="left", fontsize=11, fontweight="bold")
