"""README.md and the documents: their Python runs, README's figures are the records', the reference is complete."""

from __future__ import annotations

import re
import runpy
from types import ModuleType

import pytest

import vattn
from bench.harness.models import CACHE
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
    done = scripts.run(block.replace("cache=cache", f"{CACHE}=cache"), cwd=ROOT)
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


def test_ten_lines_are_ten() -> None:
    found = re.search(r"## Ten lines\s+```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    assert len(found[1].splitlines()) == 10


def test_the_drawing_of_the_idea_is_that_of_its_script() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_idea.py"))
    assert drawn["PICTURE"].read_text() == drawn["draw"](), "run: python docs/draw_idea.py"
