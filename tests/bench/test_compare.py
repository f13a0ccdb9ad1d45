"""What got slower between two records: which columns, which side is worse, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import check
from bench.__main__ import main
from bench.compare import show
from bench.harness import records
from bench.harness.changes import changes
from bench.harness.report import Report, hardware

ROOT = Path(__file__).parents[2]


def _record(**changed: Any) -> dict[str, Any]:
    rows = [
        {
            "batch": batch,
            "kv": "virtual",
            "step ms": 2.0 * batch,
            "held MiB": 8.0,
            "tokens/s": 100.0,
            "paged over virtual": 1.5,
            "pages": 7,
        }
        for batch in (1, 2, 4, 8)
    ]
    record = Report({}, [dict(row) for row in rows], []).record("decode", quick=False, foreign_cores=0.0)  # type: ignore[arg-type]
    return {**record, **changed}


def _scaled(record: dict[str, Any], **factors: float) -> dict[str, Any]:
    scaled = copy.deepcopy(record)
    for row in scaled["figures"]:
        for column, factor in factors.items():
            row[column.replace("_", " ").replace(" per ", "/")] *= factor
    return scaled


def test_more_time_and_fewer_tokens_are_worse() -> None:
    before = _record()
    found = {
        each.column: each for each in changes(before, _scaled(before, step_ms=1.2, tokens_per_s=0.5, held_MiB=0.5))
    }
    assert list(found) == ["step ms", "held MiB", "tokens/s"], "a ratio is no cost, and pages say what was run"
    assert found["step ms"].median == pytest.approx(1.2)
    assert found["tokens/s"].median == pytest.approx(2)
    assert {name: each.change for name, each in found.items()} == {
        "step ms": "worse",
        "held MiB": "better",
        "tokens/s": "worse",
    }
    assert found["step ms"].worse_than(0.1)
    assert not found["step ms"].worse_than(0.3)
    assert str(found["step ms"]) == "step ms: 1.20 times the cost (1.20 to 1.20, 4 rows): WORSE"


def test_a_change_whose_interval_includes_1_is_a_tie() -> None:
    before, after = _record(), _record()
    for row, factor in zip(after["figures"], (0.8, 1.3, 0.9, 1.4), strict=True):
        row["step ms"] *= factor
    (step,) = [each for each in changes(before, after) if each.column == "step ms"]
    assert step.change == "tie"
    assert not step.worse_than(0)


def test_rows_are_paired_by_what_was_run() -> None:
    before, after = _record(), _record()
    after["figures"] = [*after["figures"][:1:-1], {**after["figures"][0], "batch": 64}]
    step = changes(before, after)[0]
    assert step.ratios == (1.0, 1.0)
    assert step.change == "few"
    assert "of 2 rows: too few for an interval" in str(step)
    assert not step.worse_than(0.05)
    after["figures"][0]["step ms"] *= 1.5
    after["figures"][1]["step ms"] *= 1.5
    step = changes(before, after)[0]
    assert step.worse_than(0.05)
    assert not step.worse_than(0.2)


def test_a_side_that_got_slower_is_not_hidden_by_others() -> None:
    def record(virtual: float) -> dict[str, Any]:
        rows = [
            {"backend": backend, "requests": count, "output tokens/s": virtual if backend == "virtual" else 100.0}
            for backend in ("static", "virtual", "dynamic", "paged")
            for count in (8, 16, 32)
        ]
        return _record(figures=rows)

    found = {each.side: each for each in changes(record(100.0), record(50.0))}
    assert [side for side, each in found.items() if each.worse_than(0.05)] == ["virtual"]
    assert str(found["virtual"]).startswith("virtual, output tokens/s: 2.00 times the cost")


def test_records_without_a_row_in_common_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = _record(), _record()
    for row in after["figures"]:
        row["pages"] += 1
    assert show({("here", "decode"): (before, after)}, 0.05) == 2
    assert "not compared: no row is in both" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "step"}, "'decode' and one of 'step'"),
        ({"hardware": {"cpu": "other", "cores": 2}}, "different machines"),
        ({"contended": True}, "contended run"),
        ({"quick": True}, "quick run"),
    ],
)
def test_records_that_say_nothing_about_each_other(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changes(_record(), _record(**changed))


def test_the_command_compares_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, factor in (("a", 1.0), ("b", 1.5)):
        folder = tmp_path / side / "here"
        folder.mkdir(parents=True)
        (folder / "decode.json").write_text(json.dumps(_scaled(_record(), step_ms=factor)))
    a, b = (str(tmp_path / side) for side in "ab")
    assert main(["compare", a, b]) == 1
    assert "here, decode" in (said := capsys.readouterr().out)
    assert "step ms: 1.50 times the cost" in said
    assert "1 column got worse by more than 5 %" in said
    assert main(["compare", b, a]) == 0
    assert main(["compare", a, b, "--tolerance", "0.6"]) == 0
    assert main(["compare", f"{a}/here/decode.json", f"{b}/here/decode.json"]) == 1
    for side, quick in (("a", False), ("b", True)):
        (tmp_path / side / "here" / "step.json").write_text(json.dumps(_record(name="step", quick=quick)))
    capsys.readouterr()
    assert main(["compare", a, b]) == 1
    assert "not compared: a record of 'step' is from a quick run" in (said := capsys.readouterr().out)
    assert "step ms: 1.50 times the cost" in said
    (tmp_path / "b" / "here" / "decode.json").write_text(json.dumps(_record()))
    assert main(["compare", a, b]) == 2, "nothing got worse, as far as it can be compared"
    assert "0 columns got worse by more than 5 %; 1 of 2 records could not be compared" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_command_compares_commits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With git as it is where nobody has settings: a user's may have commits signed, or name another repository."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    target = tmp_path / "bench" / "results" / "here"
    target.mkdir(parents=True)
    for commit, factor in (("one", 1.0), ("two", 1.5)):
        (target / "decode.json").write_text(json.dumps(_scaled(_record(), step_ms=factor)))
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", commit], ["tag", commit]):
            options = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
            subprocess.run(["git", *options, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr("bench.compare._ROOT", tmp_path)
    assert main(["compare", "one", "two"]) == 1
    assert main(["compare", "one", "one"]) == 0
    assert "the same record" in capsys.readouterr().out


def test_the_command_knows_no_commits_without_git(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["compare", "HEAD", "HEAD"]) == 2
    assert "'HEAD' is no file, no folder and no commit: git is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"), [(None, "is no file, no folder and no commit"), ("{}", "is no record of a benchmark")]
)
def test_the_command_refuses_what_is_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    file = tmp_path / "record.json"
    if text is not None:
        file.write_text(text)
    assert main(["compare", str(file), str(file)]) == 2
    assert message in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["compare", str(empty), str(empty)]) == 2
    assert "has no records" in capsys.readouterr().err


def test_the_check_measures_what_readme_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the records of this machine, or not at all."""
    here = _record()
    other = _record(hardware={**hardware(), "cpu": "other"})
    committed = {name: {"here": {**here, "name": name}, "there": {**other, "name": name}} for name in check.NAMES}
    monkeypatch.setattr(records, "load", lambda *_: committed)
    asked = []

    def measure(*, quick: bool, names: tuple[str, ...], minutes: float) -> dict[str, Any]:
        asked.extend(names)
        slower = _scaled(here, step_ms=2.0)
        return {name: {**slower, "name": name} for name in names}

    monkeypatch.setattr(check, "measure", measure)
    assert main(["check"]) == 1
    assert asked == list(check.NAMES)
    assert capsys.readouterr().out.count("step ms: 2.00 times the cost") == len(check.NAMES)
    monkeypatch.setattr(check, "measure", lambda **_: {})
    assert main(["check"]) == 2, "nothing was measured"
    for by_machine in committed.values():
        del by_machine["here"]
    assert main(["check"]) == 2
    assert "no committed record is of this machine" in capsys.readouterr().err


def test_committed_records_have_columns_to_compare() -> None:
    """But for those of counts, of shares and of times without a unit, each record compared with itself is one tie."""
    for path in sorted((ROOT / "bench" / "results").glob("*/*.json")):
        record = json.loads(path.read_text())
        found = changes(record, copy.deepcopy(record))
        assert all(set(each.ratios) == {1.0} for each in found)
        if record["name"] not in ("blocks", "external", "fragmentation", "table"):
            assert found, f"{path}: no column ends in a unit that is known"
