"""Benchmarks run and record what they promise; what they compute instead of measuring agrees with real caches."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vattn
from bench import BENCHMARKS
from bench.__main__ import main
from bench.cases.fragmentation import TRACES
from bench.harness import plot
from bench.harness import report as common
from bench.harness.report import Goal, Report
from vattn.config import build_layout


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other, for seconds where other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_quick_run_records_valid_json_and_can_be_drawn(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / f"{name}.json"
    assert main([name, "--quick", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert (record["name"], record["quick"]) == (name, True)
    for key in (
        "parameters",
        "hardware",
        "kernel",
        "versions",
        "commit",
        "dirty",
        "date",
        "foreign_cores",
        "contended",
    ):
        assert key in record
    assert {"torch", "transformers", "vattn", "python"} == set(record["versions"])
    assert len({tuple(row) for row in record["figures"]}) == 1, "rows differ in their columns"
    for goal in record["goals"]:
        assert f"goal {goal['what']}: {'met' if goal['met'] else 'NOT met'}" in printed
    assert record["goals"]
    image = tmp_path / f"{name}.svg"
    plot._draw(record, image, "digest of the record")
    assert "digest of the record" in image.read_text()


def test_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)


@pytest.mark.parametrize("kv_order", ["NHD", "HND"])
@pytest.mark.parametrize("layout", ["layer", "sliced", "fused"])
def test_arithmetic_is_what_a_real_cache_maps(layout: str, kv_order: str) -> None:
    """The traces scaled down to a small cache: every slot and the sum, in pages really mapped."""
    lengths = [max(1, n // 256) for trace in TRACES for n in trace.lengths(8)[0]]
    for page_size in (4096, 16384, 65536):
        config = vattn.KVConfig(
            num_layers=3,
            num_kv_heads=2,
            head_dim=16,
            dtype=torch.bfloat16,
            max_batch_size=len(lengths),
            max_context_len=1024,
            memory_budget="512MiB",
            page_size=page_size,
            layout=layout,  # type: ignore[arg-type]
            kv_order=kv_order,  # type: ignore[arg-type]
            overlap=False,
            eager_pages=0,
        )
        expected = [build_layout(config, layout, page_size).pages(n) for n in lengths]  # type: ignore[arg-type]
        with vattn.KVCache(config) as cache:
            slots = [cache.alloc_reqid() for _ in lengths]
            cache.step(dict(zip(slots, lengths, strict=True)))
            pages = {slot.reqid: slot.pages for slot in cache.page_map()}
            assert [pages[slot] for slot in slots] == expected
            stats = cache.stats()
            assert stats.owned_bytes == stats.created_bytes == sum(expected) * page_size
            assert stats.calls["cuMemMap"].count == sum(expected)
            cache.check()


@pytest.mark.parametrize(
    ("value", "relation", "bound", "met"),
    [(1.0, "<=", 1.0, True), (1.1, "<=", 1.0, False), (0.9, ">=", 1.0, False), (2.0, "==", 2.0, True)],
)
def test_goals_are_judged(value: float, relation: str, bound: float, met: bool) -> None:
    goal = Goal("x", value, relation, bound)  # type: ignore[arg-type]
    assert goal.met is met
    assert ("NOT met" in str(goal)) is not met


def _record(**flaws: bool) -> dict[str, object]:
    rows: list[common.Row] = [{"context": n, "step us": 10.0, "block table us": 2000.0} for n in (1024, 8192)]
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
    assert plot.main(["--check"], project) == 1
    assert not svg.exists()
    assert plot.main([], project) == 0
    text = readme.read_text()
    assert "| 8192 | 10.0 | 2000 |" in text
    assert "| flat | at most 1.2 | 1.01 | met |" in text
    assert "old" not in text
    assert plot.main(["--check"], project) == 0
    readme.write_text(text.replace("2000", "2001"))
    assert plot.main(["--check"], project) == 1
    readme.write_text(text)
    svg.unlink()
    assert plot.main(["--check"], project) == 1


@pytest.mark.parametrize("flaw", ["quick", "contended"])
def test_plot_refuses_what_is_no_figure(project: Path, flaw: str, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "bench" / "results" / "here" / "step.json").write_text(json.dumps(_record(**{flaw: True})))
    assert plot.main([], project) == 2
    assert flaw in capsys.readouterr().err


def test_a_busy_machine_is_noticed() -> None:
    """A process that spins is foreign; children that have ended were this benchmark's own."""
    spin = "import time\nend = time.time() + 1\nwhile time.time() < end: pass"
    load = common.LoadMeter()
    with subprocess.Popen([sys.executable, "-c", spin]) as child:
        time.sleep(0.9)
        busy, seconds = load.foreign_cores(), load._foreign_seconds()
        child.wait()
    assert busy > 2 * common.MAX_FOREIGN_CORES
    assert load._foreign_seconds() < seconds, "what the child took is not foreign any more, whatever others took since"
    report = Report(parameters={}, figures=[], goals=[])
    assert report.contended(busy)
    assert not report.contended(0.0)
