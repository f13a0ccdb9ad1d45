"""The import graph of the project, read from the source: `python docs/draw_imports.py` draws docs/img/imports.svg.

A node of the picture is a room: a package, or a module that is in none; of tests, what they share, the campaign, and
the rest together. An arrow goes from the room that imports to the one that is imported, always downwards; one that
other arrows imply is left out. tests/vattn/test_imports.py asserts on the same graph that no arrow turns back.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "img" / "imports.svg"

Graph = dict[str, set[str]]

# Folder -> how it is imported.
_PACKAGES = {
    "vattn": "vattn",
    "engine": "vattn.engine",
    "bench": "bench",
    "demo": "demo",
    "stub_cuda": "stub_cuda",
    "tests": "tests",
}


def modules() -> dict[str, Path]:
    """Every module of the project, by its full name; a package is its `__init__`."""
    found = {}
    for folder, package in _PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder != "vattn" or parts[0] != "engine":  # vattn/engine is a link to engine/
                found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def import_graph(*, types: bool = False) -> Graph:
    """For every module those that it imports, inside functions or outside; `types`: also what only type checkers see.

    Not what the two `__getattr__` import by name on first use: public names of vattn and vattn.engine.

    As Python does, an import of `a.b.c` runs the `__init__` of `a` and of `a.b` first, unless the importing module lies
    in them.
    """
    known = modules()
    graph: Graph = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text(), str(path))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets = {target for imported in _imported(package, tree, types) for target in _runs(imported, known)}
        graph[name] = {target for target in targets if target != name and not name.startswith(target + ".")}
    return graph


def rooms(graph: Mapping[str, set[str]]) -> Graph:
    """The graph between rooms; without the packages `vattn`, `vattn.engine` and `bench` themselves, which only name
    what is in them. A command of `bench` is a room: it imports what the rest of its folder must not.
    """
    packages = {name.rpartition(".")[0] for name in graph}
    outside = {"vattn", "vattn.engine", "bench"}

    def room(name: str) -> str:
        top, _, rest = name.partition(".")
        if top == "tests":
            shared = rest.partition(".")[0]
            return f"tests.{shared}" if shared in ("support", "campaign") else "tests"
        parent, _, own = name.rpartition(".")
        alone = name in packages or parent in outside or (top == "bench" and own == "__main__")
        return name if alone else parent or name

    between: Graph = {room(name): set() for name in graph if name not in outside}
    for name, targets in graph.items():
        if name not in outside:
            between[room(name)] |= {room(target) for target in targets if target not in outside} - {room(name)}
    return between


def find_cycle(graph: Mapping[str, set[str]]) -> list[str] | None:
    """The nodes of a cycle in the order of its arrows, the first one repeated at the end; None if there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        path.append(node)
        for target in sorted(graph[node]):
            cycle = visit(target)
            if cycle:
                return cycle
        path.pop()
        done.add(node)
        return None

    return next((cycle for node in sorted(graph) if (cycle := visit(node))), None)


def _imported(package: str, tree: ast.Module, types: bool) -> Iterator[str]:
    """Absolute names that a module of this package imports: of modules, and of what is taken from them."""

    def visit(node: ast.AST) -> Iterator[str]:
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from visit(other)
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # imports are statements
                yield from visit(child)

    yield from visit(tree)


def _runs(imported: str, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of ours that an import of this name runs."""
    parts = imported.split(".")
    yield from (name for end in range(1, len(parts) + 1) if (name := ".".join(parts[:end])) in known)


def draw(graph: Mapping[str, set[str]]) -> str:
    """An acyclic graph as SVG: a node stands above all those that it imports."""
    levels = _levels(graph)
    row = {node: number for number, level in enumerate(levels) for node in level}
    # An arrow that passes a level has a place of its own there, so that it does not cross a box.
    paths = []
    for node in sorted(graph):
        implied = {far for other in graph[node] for far in reachable(graph, other)}
        for target in sorted(graph[node] - implied):
            bends = [f"{node}|{target}|{passed}" for passed in range(row[node] + 1, row[target])]
            for passed, bend in enumerate(bends, row[node] + 1):
                levels[passed].append(bend)
            paths.append([node, *bends, target])
    left = _places(levels, paths)
    width = max(left[node] + _width(node) for level in levels for node in level) + _GAP
    height = len(levels) * _LEVEL
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" '
        'font-size="14">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#777"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
    ]
    for path in paths:
        x, y = left[path[0]] + _width(path[0]) / 2, _top(row[path[0]]) + _BOX
        line = f"M{x:.0f} {y}"
        for step, node in enumerate(path[1:], row[path[0]] + 1):
            end, top = left[node] + _width(node) / 2, _top(step)
            middle = (y + top) / 2
            line += f"C{x:.0f} {middle:.0f} {end:.0f} {middle:.0f} {end:.0f} {top}"
            if node != path[-1]:
                line += f"V{top + _BOX}"
            x, y = end, top + _BOX
        lines.append(f'<path d="{line}" fill="none" stroke="#777" marker-end="url(#tip)"/>')
    for node in sorted(graph):
        x, y, fill = left[node], _top(row[node]), _fill(node)
        lines.append(
            f'<rect x="{x:.0f}" y="{y}" width="{_width(node)}" height="{_BOX}" rx="5" fill="{fill}" stroke="#555"/>'
            f'<text x="{x + _width(node) / 2:.0f}" y="{y + 19}" text-anchor="middle">{escape(_label(node))}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


_BOX, _LEVEL, _GAP = 28, 78, 22  # heights of a box and of a level, and what lies between two boxes of one


def _top(row: int) -> int:
    return row * _LEVEL + (_LEVEL - _BOX) // 2


def _fill(node: str) -> str:
    """One colour for the engine, one for the library, one for what is built on them."""
    if node.startswith("vattn."):
        return "#fbe3d0" if node.startswith("vattn.engine.") else "#dbe8f5"
    return "#e3efdc"


def _label(node: str) -> str:
    return node.removeprefix("vattn.").replace(".", "/")


def _width(node: str) -> int:
    return 0 if "|" in node else 8 * len(_label(node)) + 14


def reachable(graph: Mapping[str, set[str]], node: str) -> set[str]:
    """What `node` imports, at first hand or not."""
    seen: set[str] = set()
    todo = [node]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def _levels(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Nodes from top to bottom: each as low as those that it imports allow."""
    height: dict[str, int] = {}

    def measure(node: str) -> int:
        if node not in height:
            height[node] = 1 + max((measure(target) for target in graph[node]), default=-1)
        return height[node]

    levels: list[list[str]] = [[] for _ in range(1 + max(map(measure, sorted(graph))))]
    for node in sorted(graph):
        levels[-1 - height[node]].append(node)
    return levels


def _places(levels: list[list[str]], paths: list[list[str]]) -> dict[str, float]:
    """The left edge of every node: in each level in the order of the middle of their neighbours, centred."""
    neighbours: dict[str, set[str]] = {node: set() for level in levels for node in level}
    for path in paths:
        for upper, lower in pairwise(path):
            neighbours[upper].add(lower)
            neighbours[lower].add(upper)
    most = max(sum(_width(node) + _GAP for node in level) for level in levels)
    middle = {node: float(place) for level in levels for place, node in enumerate(level)}
    left: dict[str, float] = {}
    for _ in range(12):
        for level in levels:
            level.sort(key=lambda node: (sum(middle[o] for o in neighbours[node]) / (len(neighbours[node]) or 1), node))
            x = _GAP + (most - sum(_width(node) + _GAP for node in level)) / 2
            for node in level:
                left[node], middle[node] = x, x + _width(node) / 2
                x += _width(node) + _GAP
    return left


if __name__ == "__main__":
    PICTURE.write_text(draw(rooms(import_graph())))
    print(PICTURE.relative_to(ROOT))
