"""Claims and plots in the documents follow the committed records, and only records that count are published."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import cases
from bench.__main__ import publish
from bench.harness import claims, overview, plot, records, report, theme
from bench.harness.discovery import Case, find
from bench.harness.report import Goal, Report, Row
from bench.report import page

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
    (tmp_path / "README.md").write_text(
        "a\n<!-- claims step -->\nold\n<!-- /claims -->\nb\n<!-- plot step -->\n<!-- /plot -->\n"
    )
    return tmp_path


def test_publishing_fills_documents_and_notices_what_is_stale(project: Path) -> None:
    readme, svg = project / "README.md", project / "docs" / "img" / "step-here.svg"
    assert publish(project, check=True) == 1
    assert not svg.exists()
    assert publish(project, check=False) == 0
    text = readme.read_text()
    assert "| Filling a padded block table takes … times as long as `step()` | **200.00**, too few cases |" in text
    assert text.count("](docs/img/step-here.svg)") == 1
    assert "old" not in text
    assert publish(project, check=True) == 0
    readme.write_text(text.replace("200", "201"))
    assert publish(project, check=True) == 1
    readme.write_text(text)
    svg.unlink()
    assert publish(project, check=True) == 1


def test_claims_are_those_of_the_report() -> None:
    """The sentences, ratios and intervals of the page's verdicts, machine by machine."""
    found = find(cases)
    committed = records.load(ROOT / "bench" / "results", found)
    on_page = page.collect(found, committed, {})
    header, *rows = claims.table(found, committed, ["decode", "memory", "plugin"])
    said = {
        (verdict.comparisons[number].says.replace("{}", "…"), verdict.machine): verdict.comparisons[number]
        for name in ("decode", "memory", "plugin")
        for verdict in on_page[name]
        for number, comparison in enumerate(verdict.comparisons)
        if claims.leading(number, comparison)
    }
    shown = {(row[0], machine): cell for row in rows for machine, cell in zip(header[1:], row[1:], strict=True) if cell}
    assert shown.keys() == said.keys()
    for key, cell in shown.items():
        assert cell.startswith(f"**{said[key].median:.2f}**")
        assert cell.endswith(claims.WORDS[claims.verdict(said[key])])
    assert len(header) > 2, "machines beside each other"


@pytest.mark.parametrize("asked", ["claims stride", "claims mla unknown", "plot unknown", "plot profile"])
def test_claims_and_plots_of_no_record_are_refused(
    asked: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "README.md").write_text(f"<!-- {asked} -->\n<!-- /{asked.split()[0]} -->\n")
    assert publish(project, check=False) == 2
    assert "of which there is no record" in capsys.readouterr().err


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
    """The most valuable part first, whatever its name; of one that failed, the reason and what there was until then."""
    folder = project / "bench" / "results" / "nvidia-x" / "gpu"
    (folder / "calls.json").write_text(json.dumps(_gpu_record("calls")))
    ended = {"failed": "stopped after 120 s", "figures": [{"us": 77.5}], "goals": [], "parameters": {}}
    (folder / "attention.json").write_text(json.dumps(_gpu_record("attention", **ended)))
    assert publish(project, check=True) == 1
    assert publish(project, check=False) == 0
    readme, tables = (path.read_text() for path in documents)
    assert "## On a GPU\n\nNVIDIA X, 80 GiB, CUDA 13.0, beside " in readme
    rows = [line for line in readme.splitlines() if line.startswith("| ")][2:]
    assert rows[0].endswith("| cuMemCreate, us | at most 29 | 31.4 | 1 of 2 |")
    assert rows[1].endswith("| failed |  | stopped after 120 s |  |")
    assert "| 2.000 | 31.4 |" in tables
    assert "Failed: stopped after 120 s" in tables
    assert "| 77.5 |" in tables
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


@pytest.mark.parametrize("names", [overview.NEEDED, overview.WANTED])
def test_the_overview_shows_the_machines_that_have_the_records(tmp_path: Path, names: tuple[str, ...]) -> None:
    for machine, its in (("whole", names), ("partial", overview.NEEDED[:1])):
        results = tmp_path / machine
        results.mkdir()
        for name in its:
            shutil.copy(next((ROOT / "bench" / "results").glob(f"*/{name}.json")), results)
    found = find(cases)
    (drawn,) = [p for p in plot.plots(found, records.load(tmp_path, found), ()) if p.file == "overview.svg"]
    drawn.save(tmp_path / "overview.svg")
    assert drawn.digest in (tmp_path / "overview.svg").read_text()
    (tmp_path / "whole" / f"{names[0]}.json").unlink()
    assert not [p for p in plot.plots(found, records.load(tmp_path, found), ()) if p.file == "overview.svg"]


def _axes(case: Case, record: records.Record) -> Any:
    with theme.applied():
        axes = theme.figure().subplots()
        case.load().draw(axes, record)
    return axes


def test_plots_are_labelled_for_readers() -> None:
    """A finding as the title, labelled axes, and words instead of the record's keys."""
    found = find(cases)
    for name, machines in records.load(ROOT / "bench" / "results", found).items():
        if found[name].draw_source is None:
            continue
        for record in machines.values():
            axes = _axes(found[name], record)
            assert not theme.unsaid(axes), name
            texts = [*axes.get_legend_handles_labels()[1], axes.get_xlabel(), axes.get_ylabel()]
            texts += [label.get_text() for axis in (axes.xaxis, axes.yaxis) for label in axis.get_majorticklabels()]
            for text in texts:
                assert "_" not in text.replace("generate_batch", ""), f"{name}: {text}"


def test_a_plot_that_says_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = find(cases)["step"]
    record = json.loads(next((ROOT / "bench" / "results").glob("*/step.json")).read_text())
    module = case.load()
    monkeypatch.setattr(module, "draw", lambda axes, record: axes.plot([1, 2]))
    with pytest.raises(
        ValueError, match=r"step\.py: draw\(\) gives the plot no title and no label of its x axis and no"
    ):
        plot.draw_record(case, record, tmp_path / "step.svg", "digest")


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ({"cpu": "AMD EPYC", "cpu_family": 25, "cpu_model": 17, "cores": 2}, "AMD EPYC (Zen 4), 2 cores"),
        ({"cpu": "Intel(R) Xeon(R) Processor", "cores": 4}, "Intel Xeon, 4 cores"),
        (
            {"cpu": "Intel(R) Xeon(R) Processor @ 2.50GHz", "cpu_family": 6, "cpu_model": 85, "cores": 2},
            "Intel Xeon (Cascade Lake), 2 cores",
        ),
    ],
)
def test_machines_with_one_name_are_told_apart(hardware: dict[str, object], name: str) -> None:
    assert records.machine({"hardware": hardware}) == name


def test_a_record_has_the_numbers_of_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text if str(self) == "/proc/cpuinfo" else "")
    found = report.hardware()
    assert (found["cpu"], found["cpu_family"], found["cpu_model"]) == ("AMD EPYC", 25, 17)


def test_what_is_committed_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """Run `python -m bench --publish` if it is not."""
    assert publish(ROOT, check=True) == 0, capsys.readouterr().out
