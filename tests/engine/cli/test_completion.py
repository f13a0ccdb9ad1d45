"""`vattn completion`: scripts that a shell can read, and that know every command and flag."""

from __future__ import annotations

import subprocess

import pytest

from vattn.engine.cli import main

KNOWN = ("generate", "complete", "throughput", "--kv-layout", "--max-num-batched-tokens", "--percentile-metrics")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_knows_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for word in KNOWN:
        # fish writes flags without their dashes.
        assert word in text or word.lstrip("-") in text, word


def test_bash_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["vattn", "gen"], ["generate"]),
        (["vattn", "bench", "la"], ["latency"]),
        (["vattn", "chat", "--kv-l"], ["--kv-layout"]),
        (["vattn", "chat", "--kv", "pa"], ["paged"]),
        (["vattn", "bench", "serve", "--max-c"], ["--max-concurrency"]),
    ],
)
def test_bash_completes(words: list[str], offered: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    quoted = " ".join(words)
    asked = (
        f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE="{quoted}"; COMP_POINT=${{#COMP_LINE}}\n'
        "complete -p vattn >/dev/null && _shtab_vattn; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(
        ["bash", "--norc"], input=script("bash", capsys) + "\n" + asked, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [word.strip() for word in done.stdout.split()] == offered


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])
    assert "invalid choice: 'cmd'" in capsys.readouterr().err
