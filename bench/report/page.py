"""The page: the verdicts first, then each question with plot, table, how it was measured, and what was published."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench.harness import claims
from bench.harness.discovery import Case
from bench.harness.ratios import Comparison
from bench.harness.records import Record, Records, machine, source
from bench.report import accountant, drawing, peers
from bench.report.markup import element, items, prose, sentence, table
from bench.report.sections import PUBLISHED, SECTIONS
from vattn.plan import PAGE_SIZES
from vattn.units import format_bytes

HERE = "here"  # the machine of records that were taken for this page
_FOLDER = Path(__file__).parent
_SIGNS = {"ahead": "▲", "tie": "=", "behind": "▼", "few": "·", "limit": "⊢", "void": "∅"}
_RELATIONS = {"<=": "at most", ">=": "at least", "==": "exactly"}
_INTRODUCTION = """\
Every figure is from a record of one run on one machine, at one commit; machines stand beside each other and are never
mixed. A ratio is the median over the cases of its table, with its 95 % interval (a bootstrap over the cases, or over
the rounds of one case where it says so) and its range. It is called a tie if the interval includes 1, and is not judged
with fewer than three cases.
"""
_BLOCK_SIZES = """\
Tokens of a block, and the most that a request can waste in its last pages, by page size: Tables 5 and 8 of the paper,
for every layout of vattn on a GPU, by `vattn plan`. NVIDIA's driver has pages of 2 MiB; the paper changed it to have
smaller ones.
"""
_OTHERS = "Feature by feature, from the sources that are linked, each at its commit or release."
_WITHOUT_COMPARISON = "No side to compare with: the goals and the table say what was found."


@dataclass(frozen=True)
class Found:
    """A record, where it stands, and what it says."""

    case: Case
    place: str
    record: Record
    comparisons: tuple[Comparison, ...]

    @property
    def key(self) -> str:
        """How elements of the page name the record."""
        return f"{self.place}/{self.case.name}"

    @property
    def machine(self) -> str:
        """The machine's name, for readers."""
        return "this machine, just now" if self.place == HERE else machine(self.record)


def collect(cases: Mapping[str, Case], committed: Records, fresh: Mapping[str, Record]) -> dict[str, list[Found]]:
    """The records by benchmark, committed ones first, with what each says."""
    found: dict[str, list[Found]] = {}
    for name in (name for names in SECTIONS.values() for name in names):
        by_place = {**committed.get(name, {}), **({HERE: fresh[name]} if name in fresh else {})}
        for place, record in by_place.items():
            said = claims.comparisons(cases[name], record)
            found.setdefault(name, []).append(Found(cases[name], place, record, said))
    return found


def build(found: Mapping[str, list[Found]], cases: Mapping[str, Case]) -> str:
    """The whole page, without a request to anywhere else."""
    light, dark = drawing.variables()
    style = (_FOLDER / "style.css").read_text()
    colors = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    grid = json.dumps(accountant.grid(), separators=(",", ":")).replace("</", "<\\/")
    contents = [(_anchor(title), title) for title in ("Verdict", "Plan a memory", *SECTIONS, "Block sizes", "Others")]
    body = [
        element("h1", "vattn, measured"),
        element("p", prose(_INTRODUCTION), _class="lead"),
        element("nav", items(element("a", escape(title), href=f"#{anchor}") for anchor, title in contents)),
        _section("Verdict", _verdicts(found)),
        _section("Plan a memory", (_FOLDER / "panel.html").read_text()),
        *(_section(title, "".join(_questions(names, found, cases))) for title, names in SECTIONS.items()),
        _section("Block sizes", _block_sizes()),
        _section("Others", element("p", _OTHERS) + peers.html()),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>vattn, measured</title><style>{colors}{style}</style></head><body>"
        f"<main>{''.join(body)}</main>"
        f'<script type="application/json" id="grid">{grid}</script>'
        f"<script>{(_FOLDER / 'panel.js').read_text()}</script></body></html>\n"
    )


def _anchor(title: str) -> str:
    return f"part-{title.lower().replace(' ', '-')}"  # the names of benchmarks are ids, too


def _section(title: str, content: str) -> str:
    return element("section", element("h2", escape(title)) + content, id=_anchor(title))


def _verdicts(found: Mapping[str, list[Found]]) -> str:
    """A card per question: on each machine the first comparison, and the one with the machine's limit."""
    parts = []
    for title, names in SECTIONS.items():
        cards = []
        for name in names:
            if records := found.get(name):
                asked = element("a", prose(records[0].case.question), href=f"#{name}")
                cards.append(element("p", asked) + "".join(map(_verdict, records)))
        parts.append(element("h3", escape(title)) + items(cards, _class="verdicts"))
    return "".join(parts)


def _verdict(found: Found) -> str:
    shown = [
        f"{_mark(comparison)} {sentence(comparison, found.key, number)}"
        for number, comparison in enumerate(found.comparisons)
        if claims.leading(number, comparison)
    ]
    lines = shown or [f"{element('span', '·', _class='mark few')} {_goals_met(found)}"]
    return element("p", _machine(found), _class="machine") + "".join(element("p", line) for line in lines)


def _mark(comparison: Comparison) -> str:
    verdict = claims.verdict(comparison)
    return element("span", f"{_SIGNS[verdict]} {claims.WORDS[verdict]}", _class=f"mark {verdict}")


def _machine(found: Found) -> str:
    badges = [flaw for flaw in ("quick", "contended") if found.record[flaw]]
    badges += ["with uncommitted changes"] if found.record["dirty"] else []
    name = element("span", escape(found.machine), data_record=found.key, data_is="machine")
    return name + "".join(f" {element('span', badge, _class='badge')}" for badge in badges)


def _goals_met(found: Found) -> str:
    goals = found.record["goals"]
    met = sum(goal["met"] for goal in goals)
    of, all_of = (
        element("data", str(value), value=value, data_record=found.key, data_of=what)
        for what, value in (("goals met", met), ("goals", len(goals)))
    )
    return f"{of} of {all_of} goals met"


def _questions(names: tuple[str, ...], found: Mapping[str, list[Found]], cases: Mapping[str, Case]) -> Iterator[str]:
    for name in names:
        cards = [_card(each) for each in found.get(name, [])]
        if not cards:
            cards = [element("p", f"No record yet: <code>python -m bench {name}</code> measures it.")]
        cards.append(element("aside", _background(cases[name])))
        asked = element("h3", prose(cases[name].question))
        yield element("article", asked + element("div", "".join(cards), _class="machines"), id=name)


def _background(case: Case) -> str:
    """What was published, and how a benchmark measures."""
    parts = []
    if published := PUBLISHED.get(case.name):
        rows = (
            f"{escape(each.what)}: <strong>{escape(each.result)}</strong> ({escape(each.source)})" for each in published
        )
        parts.append(element("h4", "Published") + items(rows, _class="published"))
    paragraphs = map(_paragraph, case.text.split("\n\n"))
    summary = element("summary", "How it is measured")
    command = element("pre", f"python -m bench {case.name}")
    parts.append(element("details", summary + "".join(paragraphs) + command, _class="how"))
    return "".join(parts)


def _paragraph(text: str) -> str:
    """A part of a docstring: a list, lines that are aligned, or prose."""
    if text.startswith("- "):
        return items(map(prose, text.removeprefix("- ").split("\n- ")))
    return element("pre", escape(text)) if text.startswith("    ") else element("p", prose(text))


def _card(found: Found) -> str:
    """A machine's part of a question."""
    record, key = found.record, found.key
    parts = [element("h4", _machine(found))]
    said = [
        f"{_mark(comparison)} {sentence(comparison, key, number)}"
        for number, comparison in enumerate(found.comparisons)
    ]
    parts.append(items(said, _class="says") if said else element("p", escape(_WITHOUT_COMPARISON)))
    if found.case.draw_source is not None:
        plot, caption = drawing.draw(found.case, record, key.replace("/", "-"))
        said_by = element("figcaption", escape(caption), data_record=key, data_is="caption")
        parts.append(element("figure", plot + said_by))
    parts.append(element("details", element("summary", _goals_met(found)) + _goals(found), _class="goals"))
    parts.append(element("details", element("summary", "Table") + table(record["figures"], key, "figures")))
    parts.append(element("p", escape(source(record)), _class="source", data_record=key, data_is="source"))
    return element("div", "".join(parts), _class="card")


def _goals(found: Found) -> str:
    lines = []
    for number, goal in enumerate(found.record["goals"]):
        value, bound = (
            element("data", f"{goal[key]:.4g}", value=goal[key], data_record=found.key, data_at=json.dumps(place))
            for key, place in ((key, ("goals", number, key)) for key in ("value", "bound"))
        )
        cells = [
            escape(goal["what"]),
            f"{_RELATIONS[goal['relation']]} {bound}",
            value,
            "met" if goal["met"] else "not met",
        ]
        lines.append(element("tr", "".join(element("td", each) for each in cells)))
    header = element("tr", "".join(element("th", name, scope="col") for name in ("goal", "asked", "measured", "")))
    whole = element("table", element("thead", header) + element("tbody", "".join(lines)), data_record=found.key)
    return element("div", whole, _class="scroll", tabindex=0)


def _block_sizes() -> str:
    """Tables 5 and 8 of the paper, for every layout."""
    sizes = [size for size in PAGE_SIZES if size in (2**16, 2**17, 2**18, 2**21)]
    header = ["model", "GPUs", "layout", *map(format_bytes, sizes)]
    lines = []
    for model in accountant.TABLE_MODELS:
        for gpus in accountant.TABLE_GPUS:
            found = {(each.layout, each.page_size): each for each in accountant.options(model, gpus, 2**16)}
            for layout in ("layer", "sliced", "fused"):
                cells = [escape(model), str(gpus), layout]
                for size in sizes:
                    option = found[layout, size]
                    where = {"data_plan": json.dumps([model, gpus, layout, size])}
                    tokens = element("data", f"{option.block_tokens:,}", value=option.block_tokens, **where)
                    waste = element("data", format_bytes(option.worst_waste), value=option.worst_waste, **where)
                    cells.append(f"{tokens} tokens, {waste}")
                lines.append(element("tr", "".join(element("td", each) for each in cells)))
    head = element("thead", element("tr", "".join(element("th", escape(name), scope="col") for name in header)))
    whole = element("table", head + element("tbody", "".join(lines)), data_is="block sizes")
    return element("p", prose(_BLOCK_SIZES)) + element("div", whole, _class="scroll", tabindex=0)
