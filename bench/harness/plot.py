"""Plots of the committed records: docs/img/<name>-<machine>.svg, and the overview of several benchmarks.

A plot carries a digest of its record and of the code that draws it. The digests are compared, not the files: two
versions of matplotlib do not write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import overview
from bench.harness.discovery import Case
from bench.harness.records import Record, Records, source


@dataclass(frozen=True)
class Plot:
    """A file, what it is made from, and the call that writes it.

    Attributes:
        file: the file's name in docs/img.
        digest: of the records and of the code that draws them.
        save: writes the plot to a path.
    """

    file: str
    digest: str
    save: Callable[[Path], None]


def update(root: Path, cases: Mapping[str, Case], records: Records, *, check: bool) -> list[Path]:
    """Draws the plots that are missing or stale; returns their paths.

    Args:
        check: draw nothing.
    """
    stale = []
    for plot in plots(cases, records):
        path = root / "docs" / "img" / plot.file
        if path.exists() and plot.digest in path.read_text():
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            plot.save(path)
    return stale


def draw_record(case: Case, record: Record, path: Path, digest: str) -> None:
    """Draws one record as its case says."""
    figure = _figure(figsize=(8, 4.5))
    axes = figure.subplots()
    case.load().draw(axes, record)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(source(record), fontsize=7)
    figure.savefig(path, metadata={"Date": None, "Source": digest})


def draw_overview(records: Mapping[str, Record], path: Path, digest: str) -> None:
    """Draws the overview on a transparent background, since README is read on light and on dark ones."""
    figure = _figure(figsize=(10, 6.6))
    overview.draw(figure, records)
    figure.savefig(path, transparent=True, metadata={"Date": None, "Source": digest})


def plots(cases: Mapping[str, Case], records: Records) -> Iterator[Plot]:
    """All plots of the records; the overview for every machine that has the records it needs."""
    for name, by_machine in records.items():
        for machine, record in by_machine.items():
            if (code := cases[name].draw_source) is not None:
                yield _plot(f"{name}-{machine}.svg", record, code, draw_record, cases[name])
    code = Path(overview.__file__).read_text()
    for machine in sorted(set.intersection(*(set(records.get(name, {})) for name in overview.BENCHMARKS))):
        chosen = {name: records[name][machine] for name in overview.BENCHMARKS}
        yield _plot(f"overview-{machine}.svg", chosen, code, draw_overview)


def _plot(file: str, data: Any, code: str, draw: Callable[..., None], *before: Any) -> Plot:
    made_from = json.dumps(data, sort_keys=True) + code + Path(__file__).read_text()
    digest = hashlib.sha256(made_from.encode()).hexdigest()
    return Plot(file, digest, lambda path: draw(*before, data, path, digest))


def _figure(**options: Any) -> Any:
    import matplotlib  # here, so that a check in which nothing is stale does not need it

    matplotlib.rcParams["svg.hashsalt"] = "vattn"  # the same ids in every run
    from matplotlib.figure import Figure

    return Figure(layout="constrained", **options)
