"""The `vattn` command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import VOCAB, expected, make_model, make_tokenizer

from engine.cli import main


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_generate_with_both_backends(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--kv", "both", "--max-tokens", "6", "--max-model-len", "64", "--kv-cache-memory-bytes", "2MiB"]
    status = main(["generate", str(model_path), "w5 w6 w7", "w9", *args])
    captured = capsys.readouterr()
    assert status == 0
    assert "the two backends gave the same text" in captured.out
    for prompt in ([5, 6, 7], [9]):
        text = " ".join(f"w{i}" for i in expected("llama", prompt, 6) if i > 1)
        assert captured.out.replace("w5 w6 w7w", "w").count(text) >= 2
    assert len(re.findall(r"3 prompt \+ 6 output tokens, length, first token \d", captured.out)) == 2
    assert "Processed prompts" in captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["w5", "--max-model-len", "100000"], "give at most 256"),
        (["w5", "--max-tokens", "0"], "max_tokens is 0"),
        (["", "--max-tokens", "1"], "the prompt is empty"),
        (["w5", "--kv", "paged", "--kv-cache-memory-bytes", "some"], "some"),
    ],
)
def test_errors_are_one_line_on_stderr(
    model_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert main(["generate", str(model_path), "--no-progress", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_generate_with_static_batching(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--scheduling", "static", "--kv", "static", "--max-num-seqs", "1", "--max-tokens", "4", "--no-progress"]
    assert main(["generate", str(model_path), "w5 w6 w7", "w9", *args, "--max-model-len", "64"]) == 0
    printed = capsys.readouterr().out
    for prompt in ([5, 6, 7], [9]):
        assert " ".join(f"w{i}" for i in expected("llama", prompt, 4) if i > 1) in printed


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", str(tmp_path / "nothing"), "w5"]) == 2
    assert "nothing" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.strip()


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert {"doctor", "generate"} <= set(re.findall(r"\w+", capsys.readouterr().out))


def test_the_tokenizer_of_these_tests_covers_the_vocabulary() -> None:
    assert len(make_tokenizer()) == VOCAB


def test_the_command_does_not_load_transformers_unasked() -> None:
    code = "import sys, engine.cli; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    import engine

    assert all(getattr(engine, name).__name__ == name for name in engine.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = engine.Nothing
