"""Every script in examples/ runs as it stands, without a warning, and shows what it is for."""

from __future__ import annotations

import subprocess
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


def run(name: str, argument: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """An example whose cache is given by this argument, which depends on the version of transformers."""
    path = EXAMPLES / name
    script = path.read_text().replace("cache=cache", f"{argument}=cache")
    return scripts.run(f"__file__ = {str(path)!r}\n{script}", cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_example_runs(name: str, tmp_path: Path) -> None:
    done = run(name, CACHE, tmp_path)
    assert done.returncode == 0, done.stderr
    for text in SHOWN[name]:
        assert text in done.stdout
    assert " 0 KiB" not in done.stdout


@pytest.mark.slow
def test_a_stream_ends_with_the_error_of_its_thread(tmp_path: Path) -> None:
    done = run("stream.py", "no_argument_of_the_model", tmp_path)
    assert done.returncode == 1
    assert "ValueError" in done.stderr.splitlines()[-1]
    assert "no_argument_of_the_model" in done.stderr.splitlines()[-1]


def test_every_example_says_how_older_versions_take_a_cache() -> None:
    for name in SHOWN:
        assert "past_key_values" in (EXAMPLES / name).read_text(), name


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHOWN)
