"""Tables in the documents, generated from the committed records.

README.md and docs/*.md mark the places:

    <!-- bench:NAME -->         to  <!-- /bench:NAME -->          the table of every machine
    <!-- bench:NAME goals -->   to  <!-- /bench:NAME goals -->    the goals of every machine, and whether they were met
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench.harness.records import Record, Records, source
from bench.harness.report import format_cell

_MARKED = re.compile(r"(<!-- bench:(\w+)( goals|) -->\n).*?(<!-- /bench:\2\3 -->)", re.DOTALL)
_RELATIONS = {"<=": "at most", ">=": "at least", "==": "exactly"}


def update(root: Path, records: Records, *, check: bool) -> list[Path]:
    """Fills the marked places in all documents under `root`; returns the documents that were stale.

    Args:
        check: write nothing.

    Raises:
        ValueError: a document asks for a benchmark that has no record.
    """
    stale = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if not path.exists():
            continue
        old = path.read_text()

        def fill(match: re.Match[str], path: Path = path) -> str:
            opening, name, goals, closing = match.groups()
            if not records.get(name):
                raise ValueError(f"{path} asks for benchmark {name!r}, of which there is no record")
            render = _goals if goals else _table
            return opening + "\n\n".join(map(render, records[name].values())) + "\n" + closing

        new = _MARKED.sub(fill, old)
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new)
    return stale


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def _table(record: Record) -> str:
    rows = [[format_cell(value) for value in row.values()] for row in record["figures"]]
    return "\n".join([f"{source(record)}:", "", *_markdown(list(record["figures"][0]), rows)])


def _goals(record: Record) -> str:
    rows = [
        [
            goal["what"],
            f"{_RELATIONS[goal['relation']]} {goal['bound']:.4g}",
            f"{goal['value']:.4g}",
            "met" if goal["met"] else "not met",
        ]
        for goal in record["goals"]
    ]
    return "\n".join([f"{source(record)}:", "", *_markdown(["what", "goal", "measured", ""], rows)])
