"""Tables and plots in the documents, generated from the committed records.

README.md and docs/*.md mark the places:

    <!-- bench:NAME -->         to  <!-- /bench:NAME -->          the plot and the table of every machine
    <!-- bench:NAME goals -->   to  <!-- /bench:NAME goals -->    the goals of every machine, and whether they were met
    <!-- gpu -->                to  <!-- /gpu -->                 the section on GPUs; nothing while there is no record
    <!-- gpu tables -->         to  <!-- /gpu tables -->          every table and goal of every GPU, or nothing
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.records import Record, Records, source
from bench.harness.report import format_cell

_MARKED = re.compile(r"(<!-- bench:(\w+)( goals|) -->\n).*?(<!-- /bench:\2\3 -->)", re.DOTALL)
_GPU = re.compile(r"(<!-- gpu( tables|) -->\n).*?(<!-- /gpu\2 -->)", re.DOTALL)
_RELATIONS = {"<=": "at most", ">=": "at least", "==": "exactly"}


def update(
    root: Path, records: Records, plots: Mapping[str, str], gpu: Records, parts: Mapping[str, str], *, check: bool
) -> list[Path]:
    """Fills the marked places in all documents under `root`; returns the documents that were stale.

    Args:
        records: by benchmark and machine.
        plots: the benchmarks that have a plot for each machine, and what each measures.
        gpu: by machine and part.
        parts: the parts that there are, and what each measures.
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
            shown = []
            for machine, record in records[name].items():
                if name in plots and not goals:
                    image = os.path.relpath(root / "docs" / "img" / f"{name}-{machine}.svg", path.parent)
                    shown.append(f"![{plots[name][0].upper()}{plots[name][1:]}]({image})")
                shown.append(_goals(record) if goals else _table(record))
            return opening + "\n\n".join(shown) + "\n" + closing

        def fill_gpu(match: re.Match[str]) -> str:
            opening, tables, closing = match.groups()
            return opening + (_gpu_tables(gpu, parts) if tables else _gpu_section(gpu, parts)) + closing

        new = _GPU.sub(fill_gpu, _MARKED.sub(fill, old))
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


def _goal(goal: Mapping[str, Any]) -> list[str]:
    asked = f"{_RELATIONS[goal['relation']]} {goal['bound']:.4g}"
    return [goal["what"], asked, f"{goal['value']:.4g}", "met" if goal["met"] else "not met"]


def _goals(record: Record) -> str:
    rows = [_goal(goal) for goal in record["goals"]]
    return "\n".join([f"{source(record)}:", "", *_markdown(["what", "goal", "measured", ""], rows)])


def _gpu_section(gpu: Records, parts: Mapping[str, str]) -> str:
    """One row per part: its first goal, and how many of its goals were met."""
    if not gpu:
        return ""
    lines = ["## On a GPU", ""]
    for records in gpu.values():
        rows = []
        for name, record in records.items():
            if "failed" in record:
                rows.append([parts[name], "failed", "", record["failed"], ""])
                continue
            met = sum(goal["met"] for goal in record["goals"])
            rows.append([parts[name], *_goal(record["goals"][0])[:3], f"{met} of {len(record['goals'])}"])
        lines += [f"{_gpu_source(records)}:", ""]
        lines += [*_markdown(["measured", "first goal", "asked", "result", "goals met"], rows), ""]
    lines += ["All figures and goals: [docs/benchmarks.md](docs/benchmarks.md#on-a-gpu).", ""]
    return "\n".join(lines)


def _gpu_tables(gpu: Records, parts: Mapping[str, str]) -> str:
    lines = []
    for records in gpu.values():
        lines += [f"### {_gpu_source(records)}", ""]
        for name, record in records.items():
            if "failed" in record:
                lines += [f"**{parts[name]}**: failed, {record['failed']}.", ""]
                continue
            missing = "".join(f" Missing: {what}." for what in record["parameters"].get("missing", []))
            lines += [f"**{parts[name]}.**{missing}", "", _table(record), ""]
            lines += [*_markdown(["what", "goal", "measured", ""], [_goal(goal) for goal in record["goals"]]), ""]
    return "\n".join(lines)


def _gpu_source(records: Mapping[str, Record]) -> str:
    """Of the first part that has figures; all ran on the same machine, if not at the same commit."""
    return next((source(record) for record in records.values() if "failed" not in record), "No part came to its end")
