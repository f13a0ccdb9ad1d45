"""README.md and the documents: their Python runs, README's figures are the records', the reference is complete."""

from __future__ import annotations

import json
import re
import runpy
from types import ModuleType
from typing import Any

import pytest

import vattn
from tests.support import scripts
from tests.support.paths import ROOT
from vattn import attention, engine, errors, packed

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}")
    for path in DOCUMENTS
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str) -> None:
    done = scripts.run(block, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_readme_and_every_tutorial_have_blocks() -> None:
    shown = {str(block.id).rpartition("-")[0] for block in BLOCKS}
    tutorials = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "tutorial").glob("*.md")}
    assert len(tutorials) == 3
    assert {"README.md", *tutorials} <= shown


@pytest.mark.parametrize("module", [vattn, engine, attention, packed])
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = re.findall(r"^::: (vattn\.[\w.]+)$", pages, re.MULTILINE)
    assert len(documented) == len(set(documented))
    elsewhere = vars(errors).keys() | {"attention", "LLM", "AsyncEngine", "SamplingParams"}  # on pages of their own
    documented += re.findall(r"^`(vattn\.[\w.]+)` is another name of", pages, re.MULTILINE)
    missing = {name for name in module.__all__ if f"{module.__name__}.{name}" not in documented}
    assert missing <= (elsewhere if module is vattn else set())


# README's table: a column, a benchmark, what selects the row of its record, and figures by key as README prints them.
ZEN4, XEON = "epyc-zen4-2core", "xeon-2core"
FIGURES: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    (
        ZEN4,
        "decode",
        {"batch": 32, "context": 8192},
        {"virtual ms": "25.8", "paged ms": "41.8", "gathered ms": "118.6"},
    ),
    (XEON, "decode", {"batch": 32, "context": 8192}, {"virtual ms": "39.1", "paged ms": "48.9", "gathered ms": "94.0"}),
    (
        ZEN4,
        "decode",
        {"batch": 1, "context": 1024},
        {"virtual ms": "0.210", "paged ms": "0.235", "gathered ms": "0.651"},
    ),
    (XEON, "decode", {"batch": 1, "context": 1024}, {"virtual ms": "0.31", "paged ms": "0.32", "gathered ms": "0.52"}),
    (
        ZEN4,
        "cache",
        {"dtype": "bfloat16", "context": 16384},
        {"virtual ms": "13.8", "static ms": "23.6", "dynamic ms": "81.5"},
    ),
    (
        XEON,
        "cache",
        {"dtype": "bfloat16", "context": 16384},
        {"virtual ms": "18.4", "static ms": "20.8", "dynamic ms": "29.4"},
    ),
    (
        ZEN4,
        "cache",
        {"dtype": "bfloat16", "context": 512},
        {"virtual ms": "8.5", "static ms": "8.9", "dynamic ms": "10.1"},
    ),
    (
        XEON,
        "cache",
        {"dtype": "bfloat16", "context": 512},
        {"virtual ms": "9.5", "static ms": "9.0", "dynamic ms": "8.8"},
    ),
    (ZEN4, "conversations", {"engine": "virtual"}, {"seconds": "12.8"}),
    (ZEN4, "conversations", {"engine": "paged"}, {"seconds": "13.4"}),
    (ZEN4, "conversations", {"engine": "torch"}, {"seconds": "34.0"}),
    (ZEN4, "conversations", {"engine": "gathered"}, {"seconds": "41.7"}),
    (ZEN4, "throughput", {"set": "short", "engine": "virtual"}, {"seconds": "11.3"}),
    (ZEN4, "throughput", {"set": "short", "engine": "paged"}, {"seconds": "10.8"}),
    (ZEN4, "throughput", {"set": "short", "engine": "vllm"}, {"seconds": "11.8"}),
    (ZEN4, "throughput", {"set": "short", "engine": "generate"}, {"seconds": "104.3"}),
    (XEON, "serving", {"server": "vattn", "model": "large", "at a time": 8}, {"output tokens/s": "134"}),
    (XEON, "serving", {"server": "vllm", "model": "large", "at a time": 8}, {"output tokens/s": "57"}),
    (ZEN4, "memory", {"requests": 24}, {"virtual MiB": "3.5", "paged MiB": "3.0", "static MiB": "120"}),
]


@pytest.mark.parametrize(("machine", "name", "where", "figures"), FIGURES)
def test_figure_is_the_records(machine: str, name: str, where: dict[str, Any], figures: dict[str, str]) -> None:
    table = (ROOT / "README.md").read_text().split("## What it is worth")[1].split("## Ten lines")[0]
    column = [line.split("|")[2 + (machine == XEON)] for line in table.splitlines() if line.startswith("| ")]
    record = json.loads((ROOT / f"bench/results/{machine}/{name}.json").read_text())
    (row,) = (row for row in record["figures"] if where.items() <= row.items())
    for key, text in figures.items():
        assert f"{row[key]:.{len(text.partition('.')[2])}f}" == text
        pattern = rf"(?<![\d.,]){re.escape(text)}(?![\d,]|\.\d)"
        assert any(re.search(pattern, cell) for cell in column), f"README does not say {text}"


def test_ten_lines_are_ten() -> None:
    found = re.search(r"## Ten lines\s+```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    assert len(found[1].splitlines()) == 10


def test_the_drawing_of_the_idea_is_that_of_its_script() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_idea.py"))
    assert drawn["PICTURE"].read_text() == drawn["draw"](), "run: python docs/draw_idea.py"
