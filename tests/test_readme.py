"""The Python of the documents below runs as it stands."""

from __future__ import annotations

import re

import pytest
import scripts
from paths import ROOT

DOCUMENTS = ("README.md", "docs/kernels.md", "docs/transformers.md", "docs/your-own-engine.md")
BLOCKS = [
    block for name in DOCUMENTS for block in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block: str) -> None:
    done = scripts.run(block, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 11
