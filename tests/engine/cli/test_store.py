"""`vattn store`: what is there, and that it can be deleted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vattn.engine.cli import main
from vattn.store.blockfile import Block
from vattn.store.folder import PrefixStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = PrefixStore(tmp_path / "store", 2**20)
    for number in range(3):
        label = "small" if number else "large"
        block = Block(bytes([number // 2]) * 32, bytes([number]) * 32, 0, range(128), label)
        store.put(block, [bytes(2048)], used_ns=number + 1)
    return store.path


def test_what_is_stored_is_listed_by_model(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "list", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "small (01010101): 3.2 KiB",
        "small (00000000): 3.2 KiB",
        "large (00000000): 3.2 KiB",
    ]
    assert all(", 128 tokens, used last " in line for line in lines)


def test_what_was_used_longest_ago_is_trimmed_first(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "trim", str(path), "--to", "4KiB"]) == 0
    assert capsys.readouterr().out == "6.4 KiB deleted; 3.2 KiB left\n"
    (left,) = PrefixStore(path).entries()
    assert left.key == "02" * 32
    assert main(["store", "clear", str(path)]) == 0
    assert main(["store", "list", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing is stored"


def test_a_store_that_is_not_there(refuses: Callable[[list[str], str], None], tmp_path: Path) -> None:
    refuses(["store", "list", str(tmp_path / "nothing")], "there is no store")
    refuses(["store", "clear", ""], "there is no store ''")
    assert not (tmp_path / "nothing").exists()


def test_a_store_needs_no_torch() -> None:
    script = "import sys, vattn.store.background, vattn.engine.cli.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
