"""Every script in examples/ runs as it stands, without a warning, and shows what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.models import CACHE
from tests.support import scripts
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
SHOWN = {
    "generate.py": ["17 + 25 = 42", "Mercury", "12 x 12 = 144", "GiB of address space"],
    "chat.py": ["17 + 25 = 42", "Oslo", "0 of them in the cache", "24 of them in the cache"],
    "beam_search.py": ["The drum came from the mill.", "in several beams"],
    "prompt_lookup.py": ["12 x 12 = 144", "forward passes", "without drafts: True"],
    "stream.py": ["Bake the loaf", "tokens in the cache"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_example_runs(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name
    script = path.read_text().replace("cache=cache", f"{CACHE}=cache").replace('"cache": cache', f'"{CACHE}": cache')
    done = scripts.run(f"__file__ = {str(path)!r}\n{script}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in SHOWN[name]:
        assert text in done.stdout
    assert " 0 KiB" not in done.stdout


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHOWN)
