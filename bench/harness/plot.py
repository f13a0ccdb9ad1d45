"""Plots of the committed records for the documents: docs/img/<name>-<machine>.svg, and the overview of several.

A plot carries a digest of its record and of the code that draws it. The digests are compared, not the files: two
versions of matplotlib do not write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import overview, theme
from bench.harness.discovery import Case
from bench.harness.records import Record, Records, source

_THEME = "".join(Path(str(file)).read_text() for file in (__file__, theme.__file__))


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


def update(
    root: Path, cases: Mapping[str, Case], records: Records, names: Collection[str], *, check: bool
) -> list[Path]:
    """Draws the plots that are missing or stale; returns their paths.

    Args:
        names: the benchmarks that are drawn, besides the overview.
        check: draw nothing.
    """
    stale = []
    for plot in plots(cases, records, names):
        path = root / "docs" / "img" / plot.file
        if path.exists() and plot.digest in path.read_text():
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            plot.save(path)
    return stale


def draw_record(case: Case, record: Record, path: Path, digest: str) -> None:
    """Draws one record as its case says.

    Raises:
        ValueError: the case gave the plot no title, or an axis no label.
    """
    with theme.applied():
        figure = theme.figure()
        axes = figure.subplots()
        case.load().draw(axes, record)
        if missing := theme.unsaid(axes):
            raise ValueError(f"bench/cases/{case.name}.py: draw() gives the plot no {' and no '.join(missing)}")
        theme.finish(figure, axes, source(record))
        figure.savefig(path, metadata={"Date": None, "Source": digest})


def draw_overview(machines: Mapping[str, Mapping[str, Record]], path: Path, digest: str) -> None:
    """Draws the overview of several machines."""
    with theme.applied():
        figure = theme.figure()
        overview.draw(figure, machines)
        figure.savefig(path, metadata={"Date": None, "Source": digest})


def plots(cases: Mapping[str, Case], records: Records, names: Collection[str]) -> Iterator[Plot]:
    """The plots of these benchmarks; the overview of the machines that have the records it needs, if there are any."""
    for name in sorted(names):
        for machine, record in records[name].items():
            if (code := cases[name].draw_source) is not None:
                yield _plot(f"{name}-{machine}.svg", record, code, draw_record, cases[name])
    complete = set.intersection(*(set(records.get(name, {})) for name in overview.NEEDED))
    machines = {
        machine: {name: records[name][machine] for name in overview.WANTED if machine in records.get(name, {})}
        for machine in sorted(complete)
    }
    if machines:
        yield _plot("overview.svg", machines, Path(overview.__file__).read_text(), draw_overview)


def _plot(file: str, data: Any, code: str, draw: Callable[..., None], *before: Any) -> Plot:
    made_from = json.dumps(data, sort_keys=True) + code + _THEME
    digest = hashlib.sha256(made_from.encode()).hexdigest()
    return Plot(file, digest, lambda path: draw(*before, data, path, digest))
