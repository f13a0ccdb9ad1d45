"""README.md and the documents: their Python runs, README's figures are the records', the reference is complete."""

from __future__ import annotations

import json
import re
from types import ModuleType
from typing import Any

import pytest
import scripts
from paths import ROOT

import vattn
from vattn import engine, errors

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


@pytest.mark.parametrize("module", [vattn, engine])
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: vattn\.(?:\w+\.)?(\w+)$", pages, re.MULTILINE)) | vars(errors).keys()
    assert set(module.__all__) - {"attention"} <= documented  # a module, which has a page of its own


# README's first table: a benchmark, what selects the row of its record, and figures by column as README prints them.
FIGURES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("step", {"context": 1024}, {"step us": "13.4", "block table us": "47.4"}),
    ("step", {"context": 131072}, {"step us": "13.4", "block table us": "138"}),
    (
        "cache",
        {"dtype": "bfloat16", "context": 8192},
        {"virtual ms": "13.5", "dynamic ms": "37.8", "static ms": "14.0", "static x2 ms": "20.2"}
        | {"virtual MiB": "77", "dynamic MiB": "117", "static MiB": "72", "static x2 MiB": "136"},
    ),
    ("memory", {"requests": 24}, {"virtual MiB": "5.2", "static MiB": "120", "paged MiB": "3.0"}),
    ("throughput", {"set": "short", "engine": "virtual"}, {"output tokens/s": "331"}),
    ("throughput", {"set": "short", "engine": "paged"}, {"output tokens/s": "328"}),
    ("throughput", {"set": "short", "engine": "vllm"}, {"output tokens/s": "407"}),
    ("throughput", {"set": "short", "engine": "generate"}, {"output tokens/s": "50"}),
    ("throughput", {"set": "short", "engine": "generate_batch"}, {"output tokens/s": "71"}),
    ("throughput", {"set": "long", "engine": "virtual"}, {"output tokens/s": "57.5"}),
    ("throughput", {"set": "long", "engine": "paged"}, {"output tokens/s": "59.5"}),
]


@pytest.mark.parametrize(("name", "where", "figures"), FIGURES)
def test_figure_is_the_records(name: str, where: dict[str, Any], figures: dict[str, str]) -> None:
    table = (ROOT / "README.md").read_text().split("## Two commands")[0]
    record = json.loads((ROOT / f"bench/results/epyc-2core/{name}.json").read_text())
    (row,) = (row for row in record["figures"] if where.items() <= row.items())
    for column, text in figures.items():
        assert f"{row[column]:.{len(text.partition('.')[2])}f}" == text
        assert re.search(rf"(?<![\d.,]){re.escape(text)}(?![\d,]|\.\d)", table), f"README does not say {text}"
