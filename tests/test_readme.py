"""The Python of the documents below runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/kernels.md", "docs/transformers.md", "docs/your-own-engine.md")
BLOCKS = [
    block for name in DOCUMENTS for block in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 11
