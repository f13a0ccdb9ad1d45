"""The report: every number on the page is a record's, nothing is loaded from elsewhere, and nothing is left out."""

from __future__ import annotations

import html
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench import cases
from bench.__main__ import main
from bench.harness import records, theme
from bench.harness.discovery import Case, find
from bench.harness.ratios import at, interval
from bench.harness.report import Goal, Report, format_cell
from bench.report import accountant, drawing, measuring, page, peers
from bench.report.sections import PUBLISHED, SECTIONS
from tests.support.effort import effort
from tests.support.waiting import SECONDS, runs, wait_until
from vattn.model_shapes import find_shape
from vattn.plan import PAGE_SIZES, plan
from vattn.units import format_bytes

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow(15)  # for the page and its plots, which all need
VOID = {"meta", "input", "br", "path", "use", "rect", "link"}


@dataclass
class Node:
    name: str
    attributes: dict[str, str | None]
    parent: Node | None
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.all()

    def within(self, *names: str) -> bool:
        """Whether it is, or is in, an element of one of these names."""
        return self.name in names or (self.parent is not None and self.parent.within(*names))


class Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = self.at = Node("", {}, None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs), self.at)
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.at.children.append(Node(tag, dict(attrs), self.at))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert tag == self.at.name, f"<{self.at.name}> is closed by </{tag}>"
            assert self.at.parent is not None
            self.at = self.at.parent

    def handle_data(self, data: str) -> None:
        self.at.children.append(data)


@pytest.fixture(scope="module")
def found() -> dict[str, Case]:
    """A short run draws the plots of every fourth benchmark: they are most of the work, and `make docs` draws all."""
    found = find(cases)
    drawn = list(found)[:: effort(4, 1)]
    return {name: case if name in drawn else replace(case, draw_source=None) for name, case in found.items()}


@pytest.fixture(scope="module")
def committed(found: dict[str, Case]) -> records.Records:
    return records.load(ROOT / "bench" / "results", found)


@pytest.fixture(scope="module")
def fresh() -> dict[str, records.Record]:
    """A quick run of this machine, beside other load."""
    rows: list[dict[str, str | int | float]] = [
        {"context": context, "step us": 10.0, "block table us": 123.456, "mapped MiB": 1.0, "pages": 2}
        for context in (1024, 4096, 8192)
    ]
    report = Report({}, rows, [Goal("flat", 1.01, "<=", 1.2)])
    return {"step": report.record("step", quick=True, foreign_cores=1.0)}


@pytest.fixture(scope="module")
def text(found: dict[str, Case], committed: records.Records, fresh: dict[str, records.Record]) -> str:
    return page.build(page.collect(found, committed, fresh), found)


@pytest.fixture(scope="module")
def tree(text: str) -> Node:
    parser = Tree()
    parser.feed(text)
    assert parser.at is parser.root
    return parser.root


def test_nothing_is_loaded_from_elsewhere(text: str, tree: Node) -> None:
    for node in tree.all():
        assert node.name not in ("link", "img", "iframe"), node
        assert "src" not in node.attributes
        for name in ("href", "xlink:href"):
            to = node.attributes.get(name) or "#"
            assert to.startswith("#") or (node.name == "a" and to.startswith("https://")), "a link is no request"
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest", text)


def test_ids_are_unique_and_links_lead_somewhere(tree: Node) -> None:
    ids = [node.attributes["id"] for node in tree.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for node in tree.all():
        for name in ("href", "xlink:href"):
            if (to := node.attributes.get(name)) and to.startswith("#"):
                assert to[1:] in ids


def _of_comparison(comparison: Any, what: str) -> float:
    """By the record's own figures, read anew."""
    values = [
        at(comparison.record, above) / (at(comparison.record, below) if below else 1)
        for above, below in comparison.pairs
    ]
    low, high = interval(values)
    return {
        "median": median(values),
        "low": low,
        "high": high,
        "min": min(values),
        "max": max(values),
        "cases": len(values),
    }[what]


def test_every_number_is_a_record_s(
    tree: Node, found: dict[str, Case], committed: records.Records, fresh: dict[str, records.Record]
) -> None:
    """Numbers in <data> are what they name, in value and in print."""
    counted = 0
    for node in tree.all():
        if node.name != "data" or "data-plan" in node.attributes:
            continue
        value = float(node.attributes["value"] or "")
        place, name = (node.attributes["data-record"] or "").split("/")
        record = fresh[name] if place == page.HERE else committed[name][place]
        if "data-at" in node.attributes:
            expected = at(record, json.loads(node.attributes["data-at"] or ""))
            printed = f"{expected:.4g}" if "goals" in (node.attributes["data-at"] or "") else format_cell(expected)
        elif "data-comparison" in node.attributes:
            comparison = found[name].load().compare(record)[int(node.attributes["data-comparison"] or "")]
            expected = _of_comparison(comparison, node.attributes["data-of"] or "")
            printed = str(expected) if isinstance(expected, int) else f"{expected:.2f}"
        else:
            met = [goal["met"] for goal in record["goals"]]
            expected = {"goals met": sum(met), "goals": len(met)}[node.attributes["data-of"] or ""]
            printed = str(expected)
        assert value == expected
        assert node.text == printed
        counted += 1
    assert counted > 2000


def test_what_is_not_marked_as_a_number_has_none_of_its_own(
    tree: Node, found: dict[str, Case], committed: records.Records, fresh: dict[str, records.Record]
) -> None:
    """Text with digits outside <data> is a title, a column, a name or a sentence of a record, or of the project."""
    every = {
        f"{place}/{name}": record
        for name, by_place in [*committed.items(), *((n, {page.HERE: r}) for n, r in fresh.items())]
        for place, record in by_place.items()
    }

    def words(key: str) -> str:
        """Everything that a record says in words."""
        record, case = every[key], found[key.split("/")[1]]
        said = [records.source(record), records.machine(record), *map(str, record["figures"][0])]
        said += [str(value) for row in record["figures"] for value in row.values() if isinstance(value, str)]
        said += [goal["what"] for goal in record["goals"]]
        if hasattr(case.load(), "compare"):
            said += [comparison.says.replace("`", "") for comparison in case.load().compare(record)]
        if case.draw_source is not None:
            axes = theme.figure(1, 1).subplots()
            case.load().draw(axes, record)
            said.append(axes.get_title())
        return "\n".join(said)

    def key_of(node: Node | None) -> str | None:
        while node is not None:
            if key := node.attributes.get("data-record"):
                return key
            # A sentence has its numbers inside it.
            for inner in node.all():
                if node.name in ("p", "li") and (key := inner.attributes.get("data-record")):
                    return key
            node = node.parent
        return None

    project = "\n".join(
        [
            *(case.text + case.question for case in found.values()),
            *(f"{each.what}{each.result}{each.source}" for several in PUBLISHED.values() for each in several),
            (ROOT / "bench" / "report" / "panel.html").read_text(),
            page._INTRODUCTION,
            page._BLOCK_SIZES,
            *(format_bytes(size) for size in (2**16, 2**17, 2**18, 2**21)),
            *accountant.TABLE_MODELS,
            *(
                re.sub(r"<[^>]+>", "", html.unescape(peers.inline(cell)))
                for rows in peers.tables().values()
                for row in rows
                for cell in row
            ),
        ]
    )
    project = re.sub(r"[`\s]+", " ", project)
    said: dict[str, str] = {}
    for node in tree.all():
        if node.within("style", "script", "data", "svg", "title"):
            continue
        for part in (child for child in node.children if isinstance(child, str) and re.search(r"\d", child)):
            plain = re.sub(r"\s+", " ", part).strip()
            if plain.strip(" (;:),") in project or (node.name == "td" and _in_block_sizes(node)):
                continue
            key = key_of(node)
            assert key is not None, plain
            if key not in said:
                said[key] = re.sub(r"\s+", " ", words(key))
            assert plain.strip(" (;:),") in said[key] or plain in ("2 cases:",), f"{key}: {plain}"


def _in_block_sizes(node: Node | None) -> bool:
    while node is not None and node.name != "table":
        node = node.parent
    return node is not None and node.attributes.get("data-is") == "block sizes"


def test_the_table_of_block_sizes_is_the_plan_s(tree: Node) -> None:
    cells = [node for node in tree.all() if "data-plan" in node.attributes]
    assert len(cells) == len(accountant.TABLE_MODELS) * len(accountant.TABLE_GPUS) * 3 * 4 * 2
    plans = {}
    for tokens, waste in zip(cells[::2], cells[1::2], strict=True):
        model, gpus, layout, size = json.loads(tokens.attributes["data-plan"] or "")
        if (model, gpus) not in plans:
            groups = find_shape(model, tensor_parallel=gpus).groups
            plans[model, gpus] = plan(groups, memory=80 << 30, max_context_len=32_768, lengths=[1])
        (option,) = [each for each in plans[model, gpus].options if (each.layout, each.page_size) == (layout, size)]
        assert (tokens.text, waste.text) == (f"{option.block_tokens:,}", format_bytes(option.worst_waste))


def test_the_panel_has_the_plan_s_figures(tree: Node) -> None:
    (script,) = [node for node in tree.all() if node.attributes.get("id") == "grid"]
    grid = json.loads(script.text)
    draws = [("Llama-3-8B", 2, 8192), ("DeepSeek-V3", 4, 256), ("Gemma-2-9B", 1, 131_072)]
    for model, gpus, tokens in draws:
        by_gpus = grid["values"][grid["models"].index(model)]
        values = by_gpus[grid["gpus"].index(gpus)][grid["tokens"].index(tokens)]
        lengths = accountant.load(tokens)
        assert sum(lengths) / len(lengths) == pytest.approx(tokens, rel=0.01)
        assert (min(lengths), max(lengths)) == (tokens // 2, tokens // 2 + tokens)
        made = plan(
            find_shape(model, tensor_parallel=gpus).groups,
            memory=1 << 40,
            max_context_len=max(lengths),
            max_batch_size=1,
            lengths=lengths,
            block_sizes=[option["block"] for option in grid["options"] if option["kind"] == "paged"],
        )
        # The recommended one may have larger pages than all models are shown with.
        options = [option for option in made.options if option.kind == "paged" or option.page_size in PAGE_SIZES]
        assert len(values) == len(grid["options"]) == len(options)
        for row, option, said in zip(values, options, grid["options"], strict=True):
            assert said["layout"] == option.layout
            assert said["page"] in (None, option.page_size)
            for name, value in zip(grid["fields"], row, strict=True):
                assert value == pytest.approx(getattr(option, name), abs=1e-4)


def test_every_benchmark_is_on_the_page_once(tree: Node, found: dict[str, Case]) -> None:
    placed = [name for names in SECTIONS.values() for name in names]
    assert sorted(placed) == sorted(found)
    assert PUBLISHED.keys() <= found.keys()
    assert set(measuring.ORDER) | set(measuring.LEFT_OUT) == found.keys()
    articles = {node.attributes["id"] for node in tree.all() if node.name == "article"}
    assert articles == set(found)


def test_machines_are_told_apart_and_void_runs_say_so(tree: Node) -> None:
    (step,) = [node for node in tree.all() if node.attributes.get("id") == "step"]
    cards = [node for node in step.all() if node.attributes.get("class") == "card"]
    committed = [*(ROOT / "bench" / "results").glob("*/step.json")]
    assert len(cards) == len(committed) + 1 > 2
    for card in cards:
        keys = {node.attributes["data-record"] for node in card.all() if "data-record" in node.attributes}
        assert len(keys) == 1
    assert "this machine, just now" in cards[-1].text
    badges = [node.text for node in cards[-1].all() if node.attributes.get("class") == "badge"]
    assert badges[:2] == ["quick", "contended"]
    marks = [[node.text for node in card.all() if "mark" in (node.attributes.get("class") or "")] for card in cards]
    assert marks == [*[["▲ vattn ahead"]] * len(committed), ["∅ void: a busy machine"]]


def test_plots_follow_the_colours_of_the_page(text: str, tree: Node, found: dict[str, Case]) -> None:
    light, dark = drawing.variables()
    assert light in text
    assert dark in text
    plots = [node for node in tree.all() if node.name == "svg"]
    assert len(plots) > effort(5, 30)
    inks = re.findall(r"--(c[0-9a-f]{6})", light)
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert set(re.findall(r"var\(--(c[0-9a-f]{6})\)", svg)) <= set(inks)
        assert "DejaVu" not in svg.replace(drawing._FONTS, "")


def test_the_tables_of_others_are_the_document_s(tree: Node) -> None:
    """Whole rows, with their sources pinned to commits and releases."""
    tables = [node for node in tree.all() if node.attributes.get("class") == "peers"]
    for table, rows in zip(tables, peers.tables().values(), strict=True):
        shown = [
            [cell.text for cell in row.all() if cell.name in ("td", "th")] for row in table.all() if row.name == "tr"
        ]
        assert [len(row) for row in shown] == [len(row) for row in rows] == [len(rows[0])] * len(rows)
        assert shown[1][0] == "a kernel reads"
        assert shown[0][-1] == "vattn"
        links = [node.attributes["href"] or "" for node in table.all() if node.name == "a"]
        assert sum("/blob/" in link for link in links) > 5
        assert not [link for link in links if re.search(r"/(blob|tree)/(main|master)", link)]
        assert not re.search(r"\]\(|\*\*|`", table.text)
    assert "SGLang" in tables[1].text


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = []
    monkeypatch.setattr(page, "build", lambda found, cases: built.append(found) or "<!doctype html>")
    assert main(["report", "--records-only", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "index.html").read_text() == "<!doctype html>"
    assert set(built[0]) <= set(find(cases))
    assert f"wrote {tmp_path / 'out' / 'index.html'}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["report", "--records-only", "--quick"])


def test_a_run_that_is_stopped_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"

    class Begun(subprocess.Popen[str]):
        def communicate(self, *arguments: Any, **keywords: Any) -> tuple[str, str]:
            wait_until(lambda: child.exists() and child.read_text().endswith("\n"))
            return super().communicate(*arguments, **keywords)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    script = f"sleep 600 & echo $! > {child}; echo why >&2; wait"
    assert measuring._run(["bash", "-c", script], 0.0) == (None, "")
    wait_until(lambda: not runs(int(child.read_text())))
    assert measuring._run(["bash", "-c", "echo why >&2; exit 3"], SECONDS) == (3, "why\n")


def test_a_run_that_fails_or_hangs_does_not_cost_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(command: list[str], seconds: float) -> tuple[int | None, str]:
        name = command[command.index("bench") + 1]
        if name == "hangs":
            return None, ""
        if name != "fails":
            Path(command[command.index("--json") + 1]).write_text(json.dumps({"name": name, "argv": command[-1]}))
        return int(name == "fails"), "why it failed"

    monkeypatch.setattr(measuring, "_run", fake)
    measured = measuring.measure(quick=True, names=("first", "fails", "hangs", "last"), expected={"last": 1e9})
    assert measured == {name: {"name": name, "argv": "--quick"} for name in ("first", "last")}
    said = capsys.readouterr().err
    assert re.search(r"\[2/4\] fails, of \d+ s left ... failed:\nwhy it failed", said)
    assert re.search(r"\[3/4\] hangs, of \d+ s left ... stopped: out of time", said)
    full = measuring.measure(quick=False, names=("first", "last"), minutes=1, expected={"first": 5.0, "last": 61.0})
    assert list(full) == ["first"], "what would end late is not begun"
    said = capsys.readouterr().err
    assert re.search(r"\[2/2\] last, about 61 s, of \d+ s left ... left out: it would end late", said)
    monkeypatch.setattr(measuring, "QUICK_MINUTES", 0)
    assert measuring.measure(quick=True, names=("first", "last")) == {}
    assert "not measured are first, last" in capsys.readouterr().err
