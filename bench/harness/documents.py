"""Claims, tables and plots in the documents, generated from the committed records.

README.md and docs/*.md mark the places:

    <!-- claims NAME NAME -->   to  <!-- /claims -->       what the records of these benchmarks say, as the report does
    <!-- all claims NAME -->    to  <!-- /claims -->       the same, with all that a record says
    <!-- plot NAME -->          to  <!-- /plot -->         the plot of every machine
    <!-- gpu -->                to  <!-- /gpu -->          the section on GPUs; nothing while there is no record
    <!-- gpu tables -->         to  <!-- /gpu tables -->   every table and goal of every GPU, or nothing
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.harness import claims
from bench.harness.discovery import Case
from bench.harness.records import Record, Records, commit, setting, source
from bench.harness.report import format_cell

_CLAIMS = re.compile(r"(<!-- (?:all )?claims ([\w ]+) -->\n).*?(<!-- /claims -->)", re.DOTALL)
_PLOT = re.compile(r"(<!-- plot (\w+) -->\n).*?(<!-- /plot -->)", re.DOTALL)
_GPU = re.compile(r"(<!-- gpu( tables|) -->\n).*?(<!-- /gpu\2 -->)", re.DOTALL)
_LONGEST_TABLE = 60  # rows
_RELATIONS = {"<=": "at most", ">=": "at least", "==": "exactly"}


def update(
    root: Path, cases: Mapping[str, Case], records: Records, gpu: Records, parts: Mapping[str, str], *, check: bool
) -> list[Path]:
    """Fills the marked places in all documents under `root`; returns the documents that were stale.

    Args:
        records: by benchmark and machine.
        gpu: by machine and part.
        parts: the parts that there are, and what each measures.
        check: write nothing.

    Raises:
        ValueError: a document asks for a benchmark that has no record, or for the plot of one that draws none.
    """
    stale = []
    for path in _documents(root):
        old = path.read_text()

        def fill_claims(match: re.Match[str]) -> str:
            opening, names, closing = match.groups()
            header, *rows = claims.table(cases, records, names.split(), every=" all " in opening)
            return opening + "\n".join(_markdown(header, rows)) + "\n" + closing

        def fill_plot(match: re.Match[str], path: Path = path) -> str:
            opening, name, closing = match.groups()
            if not records.get(name) or cases[name].draw_source is None:
                raise ValueError(f"{path} asks for the plot of {name!r}, of which there is no record, or no plot")
            about = cases[name].about
            folder = root / "docs" / "img"
            images = [os.path.relpath(folder / f"{name}-{machine}.svg", path.parent) for machine in records[name]]
            return (
                opening + "\n".join(f"![{about[0].upper()}{about[1:]}]({image})" for image in images) + "\n" + closing
            )

        def fill_gpu(match: re.Match[str]) -> str:
            opening, tables, closing = match.groups()
            return opening + (_gpu_tables(gpu, parts) if tables else _gpu_section(gpu, parts)) + closing

        new = _GPU.sub(fill_gpu, _PLOT.sub(fill_plot, _CLAIMS.sub(fill_claims, old)))
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new)
    return stale


def plotted(root: Path) -> set[str]:
    """The benchmarks whose plots the documents under `root` show."""
    return {match[2] for path in _documents(root) for match in _PLOT.finditer(path.read_text())}


def claimed(path: Path) -> list[str]:
    """The benchmarks of a document's claims and plots."""
    text = path.read_text()
    names = [name for pattern in (_CLAIMS, _PLOT) for match in pattern.finditer(text) for name in match[2].split()]
    return list(dict.fromkeys(names))


def _documents(root: Path) -> list[Path]:
    return [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.exists()]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def _table(record: Record) -> str:
    rows = [[format_cell(value) for value in row.values()] for row in record["figures"]]
    return "\n".join([f"{source(record)}:", "", *_markdown(list(record["figures"][0]), rows)])


def _goal(goal: Mapping[str, Any]) -> list[str]:
    asked = f"{_RELATIONS[goal['relation']]} {goal['bound']:.4g}"
    return [goal["what"], asked, f"{goal['value']:.4g}", "met" if goal["met"] else "not met"]


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
            if not record["goals"]:
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
            failed = f" Failed: {record['failed']}; what there was until then:" if "failed" in record else ""
            missing = "".join(f" Missing: {what}." for what in record["parameters"].get("missing", []))
            lines += [f"**{parts[name]}.**{failed}{missing}", ""]
            if len(record["figures"]) > _LONGEST_TABLE:
                lines += [f"{source(record)}: {len(record['figures'])} rows in its record, {name}.json.", ""]
            elif record["figures"]:
                lines += [_table(record), ""]
            if record["goals"]:
                lines += [*_markdown(["what", "goal", "measured", ""], [_goal(goal) for goal in record["goals"]]), ""]
    return "\n".join(lines)


def _gpu_source(records: Mapping[str, Record]) -> str:
    """Of all parts that have figures, which ran on one machine, at several commits."""
    done = sorted((record for record in records.values() if "failed" not in record), key=itemgetter("date"))
    if not done:
        return "No part came to its end"
    commits = list(dict.fromkeys(map(commit, done)))
    days = list(dict.fromkeys(record["date"][:10] for record in done))
    at = f"commit {commits[0]}" if len(commits) == 1 else f"commits {', '.join(commits[:-1])} and {commits[-1]}"
    return f"{setting(done[-1])}, {at}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"
