"""The `vattn` command."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import brokers
from tests.support.tiny_models import VOCAB, expected, make_tokenizer
from tests.support.waiting import SECONDS
from vattn.broker.places import socket_path
from vattn.broker.wire import VERSION, encode
from vattn.engine.cli import main


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


def test_generate_with_options_of_both_backends(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = ["--page-size", "4KiB", "--kv-layout", "fused", "--num-blocks", "2", "--block-size", "4"]
    args = ["--kv", "both", "--max-tokens", "4", "--max-model-len", "64", "--no-progress", *ours]
    assert main(["generate", str(model_path), "w5 w6 w7", *args]) == 0
    assert "the two backends gave the same text" in capsys.readouterr().out
    # Two blocks hold 8 tokens, so a longer request can never run.
    assert main(["generate", str(model_path), "w5 " * 9, *args]) == 2
    assert "vattn: " in capsys.readouterr().err


def test_generate_over_windows(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--kv", "both", "--paged-windows", "--max-tokens", "4", "--max-model-len", "64", "--no-progress"]
    assert main(["generate", str(model_path), "w5 w6 w7", *args, "--block-size", "32"]) == 0
    assert "the two backends gave the same text" in capsys.readouterr().out
    assert main(["generate", str(model_path), "w5 w6 w7", *args, "--block-size", "8"]) == 2
    assert "use a block_size that is a multiple of 16" in capsys.readouterr().err


def test_generate_with_sampling_options(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = "-n 2 --temperature 0.8 --top-p 0.9 --top-k 20 --min-p 0.01 --presence-penalty 0.5 --seed 3"
    args = [*sampling.split(), "--max-tokens", "5", "--max-model-len", "64", "--no-progress"]
    texts = []
    for _ in range(2):
        assert main(["generate", str(model_path), "w5 w6 w7", *args]) == 0
        out = capsys.readouterr().out
        assert "10 tokens" in out
        texts.append(re.findall(r"-- \[0, \d\].*\n(.*)", out))
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    text = texts[0][0].removeprefix("w5 w6 w7")
    stop = text.split()[1]
    assert main(["generate", str(model_path), "w5 w6 w7", *args, "--stop", stop]) == 0
    assert f"w5 w6 w7{text[: text.index(stop)]}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["w5", "--max-model-len", "100000"], "give at most 256"),
        (["w5", "--max-tokens", "-1"], "max_tokens is -1"),
        (["w5", "--top-p", "2"], "top_p is 2.0"),
        (["w5", "-n", "3"], "n is 3 with temperature 0"),
        (["", "--max-tokens", "1"], "the prompt is empty"),
        (["w5", "--kv", "paged", "--kv-cache-memory-bytes", "some"], "some"),
        (["w5", "--kv", "paged", "--kv-cache-dtype", "int8"], "kv='virtual'"),
        (["w5", "--num-blocks", "4"], "--num-blocks is an option of --kv paged"),
        (["w5", "--kv", "paged", "--num-blocks", "0"], "num_blocks is 0"),
        (
            ["w5", "--kv", "paged", "--num-blocks", "64", "--kv-cache-memory-bytes", "64KiB"],
            "more memory or fewer blocks",
        ),
        (
            ["w5", "--kv", "paged", "--kv-options", '{"page_size": 4096}'],
            "only takes num_blocks, windows as kv_options",
        ),
        (["w5", "--page-size", "5000"], "page_size"),
    ],
)
def test_errors_are_one_line_on_stderr(
    model_path: Path, refuses: Callable[[list[str], str], None], args: list[str], message: str
) -> None:
    refuses(["generate", str(model_path), "--no-progress", *args], message)


def test_generate_with_static_batching(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--scheduling", "static", "--kv", "static", "--max-num-seqs", "1", "--max-tokens", "4", "--no-progress"]
    assert main(["generate", str(model_path), "w5 w6 w7", "w9", *args, "--max-model-len", "64"]) == 0
    printed = capsys.readouterr().out
    for prompt in ([5, 6, 7], [9]):
        assert " ".join(f"w{i}" for i in expected("llama", prompt, 4) if i > 1) in printed


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", str(tmp_path / "nothing"), "w5"]) == 2
    assert "nothing" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"vattn \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.strip()


def test_doctor_names_the_pools_and_what_is_wrong_with_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pools() -> list[str]:
        assert main(["doctor"]) == 0
        return [line.strip() for line in capsys.readouterr().out.partition("\npools\n")[2].splitlines()]

    monkeypatch.setattr("vattn.doctor._largest_reservation", lambda: "not looked for")
    with brokers.running(2**20) as broker:
        assert pools() == ["tested  ok: 1.0 MiB on cpu, 1.0 MiB free; borrowed by nobody"]
        with socket.socket(socket.AF_UNIX) as borrower:
            borrower.settimeout(SECONDS)
            memory = os.memfd_create("a borrower", os.MFD_ALLOW_SEALING)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            os.pwrite(memory, bytes(8192), 0)  # without a lease
            borrower.connect(str(socket_path(brokers.NAME)))
            said = {"version": VERSION, "identity": "x", "name": "a", "device": "cpu", "page": 4096}
            socket.send_fds(borrower, [encode("join", **said, at_least=0, at_most=None, lease=0)], [memory])
            assert borrower.recv(2**16)
            first, second = pools()
            assert first.startswith("tested  ok:")
            assert first.endswith("borrowed by a")
            assert second == "wrong: a has 8192 bytes and a lease of 0"
            os.close(memory)
        monkeypatch.setattr("vattn.doctor._BROKER_SECONDS", 0.1)
        broker.process.send_signal(signal.SIGSTOP)
        (line,) = pools()
        assert line.startswith("tested  no: the broker of 'tested' does not answer")
        broker.process.send_signal(signal.SIGCONT)
        broker.kill()
        assert pools() == ["tested  no: no broker serves the pool 'tested'; vattn pool serve tested --budget SIZE"]
        socket_path(brokers.NAME).unlink()
        assert pools() == ["none; vattn pool serve NAME --budget SIZE makes one"]


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert {"serve", "generate", "chat", "complete", "bench", "doctor", "completion"} <= set(
        re.findall(r"\w+", capsys.readouterr().out)
    )


def test_ctrl_c_while_a_command_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vattn.engine.cli.parser", load)
    assert main(["generate", "x"]) == 130


def test_the_tokenizer_of_these_tests_covers_the_vocabulary() -> None:
    assert len(make_tokenizer()) == VOCAB


def test_the_command_does_not_load_transformers_unasked() -> None:
    code = "import sys, vattn.engine.cli; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    from vattn import engine

    assert all(getattr(engine, name).__name__ == name for name in engine.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = engine.Nothing
