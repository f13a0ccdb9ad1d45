"""The command line: what it finds, runs and refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import cases
from bench.__main__ import main
from bench.harness.discovery import find


def test_list_names_every_file_of_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    files = {path.stem for path in Path(cases.__path__[0]).glob("*.py")} - {"__init__"}
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == sorted(files)


def test_all_runs_every_case_in_a_process_and_says_which_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def fake(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        ran.append(arguments[arguments.index("bench") + 1 :])
        return subprocess.CompletedProcess(arguments, returncode=int("memory" in arguments))

    monkeypatch.setattr(command.subprocess, "run", fake)
    assert main(["--all", "--quick"]) == 1
    assert ran == [[name, "--quick"] for name in find(cases)]
    assert capsys.readouterr().err == "failed: memory\n"
    ran.clear()
    assert main(["step", "decode"]) == 0
    assert ran == [["step"], ["decode"]]


def test_a_report_that_could_not_be_drawn_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("bench.report.command.measure", lambda **_: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as ended:
        main(["report"])
    assert ended.value.code == 2
    assert "needs matplotlib: pip install -e './[bench]'" in capsys.readouterr().err


def test_what_cannot_run_here_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VATTN_VLLM_PYTHON", raising=False)
    assert main(["plugin", "--quick"]) == 2
    assert "not measured: set VATTN_VLLM_PYTHON" in capsys.readouterr().err

    def fake(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, returncode=2 * ("plugin" in arguments))

    monkeypatch.setattr(command.subprocess, "run", fake)
    assert main(["plugin", "step"]) == 0
    assert capsys.readouterr().err == "not measured: plugin\n"


def test_one_record_may_go_to_a_folder_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    monkeypatch.setattr(command, "run", lambda case, *, quick, file: files.append(file) or 0)
    assert main(["step", "--json", str(tmp_path)]) == 0
    assert main(["step", "--json", str(tmp_path / "new.json")]) == 0
    assert files == [tmp_path / "step.json", tmp_path / "new.json"]


def test_several_records_go_to_a_folder_each_as_its_benchmark_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "records"
    places = []

    def fake(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        places.append(arguments[arguments.index("--json") + 1])
        return subprocess.CompletedProcess(arguments, returncode=0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.subprocess, "run", fake)
    assert main(["step", "decode", "--json", "records"]) == 0
    assert places == [str(folder / "step.json"), str(folder / "decode.json")]
    places.clear()
    assert main(["step", "decode", "--json", "-"]) == 0
    assert places == ["-", "-"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give either NAMEs or one of --all, --list and --publish"),
        (["step", "--all"], "give either NAMEs"),
        (["steps"], "no benchmark is called steps; there are ablation, "),
        (["--list", "--json", "x"], "--json belongs to benchmarks that are run"),
        (["step", "--check"], "--check belongs to --publish"),
    ],
)
def test_refuses_what_makes_no_sense(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "lines"), [([], 0), (["--json", "-"], 1)])
def test_a_record_is_printed_for_those_who_ask(
    asked: list[str], lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fragmentation", "--quick", *asked]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("{") for line in printed) == lines
    assert any(line.startswith("goal ") for line in printed)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_case_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = type(cases)("nowhere")
    package.__path__ = [str(tmp_path)]
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "good.py").write_text('ABOUT = "something"\n\n\ndef run(quick): ...\n')
    good = find(package)["good"]
    assert (good.about, good.module, good.draw_source) == ("something", "nowhere.good", None)
    (tmp_path / "bad.py").write_text("def draw(axes, record): ...\n")
    with pytest.raises(ValueError, match=r"bad.py has no ABOUT and no run: every case needs"):
        find(package)
