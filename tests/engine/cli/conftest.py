"""What the tests of the commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_models import make_model, make_tokenizer
from vattn.engine.cli import main


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, with a tokenizer whose tokens are words and that has no chat template."""
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of the machine's user reaches a server."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str], str], None]:
    """Asserts that a command is refused with a message on stderr, and no traceback."""

    def refuses(argv: list[str], message: str) -> None:
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("vattn: ") or "\nvattn: " in error
        assert message in error
        assert "Traceback" not in error

    return refuses
