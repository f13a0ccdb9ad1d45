"""Tables and plots in the documents follow the committed records, and only records that count are published."""

import json
import shutil
from pathlib import Path

import pytest

from bench import cases, overview
from bench.__main__ import publish
from bench.harness import plot, records
from bench.harness.discovery import find
from bench.harness.report import Goal, Report, Row

ROOT = Path(__file__).parents[2]


def _record(**flaws: bool) -> dict[str, object]:
    rows: list[Row] = [{"context": n, "step us": 10.0, "block table us": 2000.0} for n in (1024, 8192)]
    report = Report(parameters={}, figures=rows, goals=[Goal("flat", 1.01, "<=", 1.2)])
    return report.record("step", quick=False, foreign_cores=0.0) | flaws


@pytest.fixture
def project(tmp_path: Path) -> Path:
    results = tmp_path / "bench" / "results" / "here"
    results.mkdir(parents=True)
    (results / "step.json").write_text(json.dumps(_record()))
    text = (
        "a\n<!-- bench:step -->\n<!-- /bench:step -->\nb\n<!-- bench:step goals -->\nold\n<!-- /bench:step goals -->\n"
    )
    (tmp_path / "README.md").write_text(text)
    return tmp_path


def test_plot_fills_documents_and_notices_what_is_stale(project: Path) -> None:
    readme, svg = project / "README.md", project / "docs" / "img" / "step-here.svg"
    assert publish(project, check=True) == 1
    assert not svg.exists()
    assert publish(project, check=False) == 0
    text = readme.read_text()
    assert "| 8192 | 10.0 | 2000 |" in text
    assert "| flat | at most 1.2 | 1.01 | met |" in text
    assert "old" not in text
    assert publish(project, check=True) == 0
    readme.write_text(text.replace("2000", "2001"))
    assert publish(project, check=True) == 1
    readme.write_text(text)
    svg.unlink()
    assert publish(project, check=True) == 1


@pytest.mark.parametrize("flaw", ["quick", "contended"])
def test_plot_refuses_what_is_no_figure(project: Path, flaw: str, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "bench" / "results" / "here" / "step.json").write_text(json.dumps(_record(**{flaw: True})))
    assert publish(project, check=False) == 2
    assert flaw in capsys.readouterr().err


def test_plot_refuses_a_record_of_no_benchmark(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = _record() | {"name": "stride"}
    (project / "bench" / "results" / "here" / "stride.json").write_text(json.dumps(record))
    assert publish(project, check=False) == 2
    assert "a record of 'stride', but bench/cases has no such benchmark" in capsys.readouterr().err


def _gpu_record(name: str, **changes: object) -> dict[str, object]:
    figures: list[Row] = [{"page MiB": 2.0, "us": 31.4}]
    goals = [Goal("cuMemCreate, us", 31.4, "<=", 29), Goal("cuMemMap, us", 1.5, "<=", 2)]
    record = Report({"missing": ["paged, for want of a kernel"]}, figures, goals).record(
        name, quick=False, foreign_cores=1.0
    )
    hardware = {"gpu": "NVIDIA X", "gpu_memory_bytes": 80 * 2**30, "cuda": "13.0"}
    return record | {"stub": False, "contended": False, "hardware": {**record["hardware"], **hardware}} | changes


@pytest.fixture
def documents(project: Path) -> tuple[Path, Path]:
    """README.md and a document, both without a record of a GPU yet."""
    readme, tables = project / "README.md", project / "docs" / "benchmarks.md"
    readme.write_text("before\n<!-- gpu -->\n<!-- /gpu -->\nafter\n")
    tables.parent.mkdir(exist_ok=True)
    tables.write_text("# Tables\n\n<!-- gpu tables -->\n<!-- /gpu tables -->\n")
    assert publish(project, check=False) == 0
    assert readme.read_text() == "before\n<!-- gpu -->\n<!-- /gpu -->\nafter\n"
    (project / "bench" / "results" / "nvidia-x" / "gpu").mkdir(parents=True)
    return readme, tables


def test_the_section_on_gpus_comes_and_goes_with_the_records(project: Path, documents: tuple[Path, Path]) -> None:
    """The most valuable part first, whatever its name; of one that failed, the reason."""
    folder = project / "bench" / "results" / "nvidia-x" / "gpu"
    (folder / "calls.json").write_text(json.dumps(_gpu_record("calls")))
    (folder / "attention.json").write_text(json.dumps({"name": "attention", "failed": "stopped after 120 s"}))
    assert publish(project, check=True) == 1
    assert publish(project, check=False) == 0
    readme, tables = (path.read_text() for path in documents)
    assert "## On a GPU\n\nNVIDIA X, 80 GiB, CUDA 13.0, beside " in readme
    rows = [line for line in readme.splitlines() if line.startswith("| ")][2:]
    assert rows[0].endswith("| cuMemCreate, us | at most 29 | 31.4 | 1 of 2 |")
    assert rows[1].endswith("| failed |  | stopped after 120 s |  |")
    assert "| 2.000 | 31.4 |" in tables
    assert "Missing: paged, for want of a kernel." in tables
    assert "| cuMemMap, us | at most 2 | 1.5 | met |" in tables
    assert publish(project, check=True) == 0
    shutil.rmtree(folder)
    assert publish(project, check=False) == 0
    assert "GPU\n" not in documents[0].read_text()


@pytest.mark.parametrize("flaw", ["quick", "stub", "contended"])
def test_a_void_record_of_a_gpu_is_refused(
    project: Path, documents: tuple[Path, Path], flaw: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project / "bench" / "results" / "nvidia-x" / "gpu" / "calls.json"
    file.write_text(json.dumps(_gpu_record("calls", **{flaw: True})))
    assert publish(project, check=False) == 2
    assert f"is from a {flaw} run" in capsys.readouterr().err
    file.rename(file.with_name("phone.json"))
    assert publish(project, check=False) == 2
    assert "bench/gpu/parts has no such part" in capsys.readouterr().err


def test_the_overview_is_drawn_for_a_machine_that_has_all_its_records(tmp_path: Path) -> None:
    for machine, count in (("whole", len(overview.BENCHMARKS)), ("partial", 2)):
        results = tmp_path / machine
        results.mkdir()
        for name in overview.BENCHMARKS[:count]:
            shutil.copy(ROOT / "bench" / "results" / "epyc-2core" / f"{name}.json", results)
    found = find(cases)
    overviews = [p for p in plot.plots(found, records.load(tmp_path, found)) if p.file.startswith("overview")]
    assert [p.file for p in overviews] == ["overview-whole.svg"]
    overviews[0].save(tmp_path / "overview.svg")
    assert overviews[0].digest in (tmp_path / "overview.svg").read_text()


def test_what_is_committed_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """Run `python -m bench --publish` if it is not."""
    assert publish(ROOT, check=True) == 0, capsys.readouterr().out
