"""Benchmarks are found by where their files are; no list names them."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Case:
    """A file that measures something: `ABOUT` and `run(quick) -> Report`; `QUESTION` and `compare` for the report, and
    `draw` if its record has a plot.

    Attributes:
        name: the file's name without `.py`.
        module: the module's full name.
        constants: the literals assigned at the top level of the file. They are read without importing it: an import
            takes seconds, and one that fails must not hide the other cases.
        draw_source: the source of `draw(axes, record)`, or None if the case has no plot.
        text: the docstring of the file: how it is measured.
    """

    name: str
    module: str
    constants: Mapping[str, Any]
    draw_source: str | None
    text: str = ""

    @property
    def about(self) -> str:
        """One line on what is measured."""
        return str(self.constants["ABOUT"])

    @property
    def question(self) -> str:
        """What it answers, as a reader would ask."""
        return str(self.constants.get("QUESTION", self.about))

    def load(self) -> ModuleType:
        """The module itself."""
        return importlib.import_module(self.module)


def find(package: ModuleType) -> dict[str, Case]:
    """The cases in a package, by name, in alphabetical order.

    Raises:
        ValueError: a file lacks `ABOUT` or `run`.
    """
    paths = sorted(path for folder in package.__path__ for path in Path(folder).glob("[!_]*.py"))
    return {path.stem: _read(path, package.__name__, path.read_text()) for path in paths}


@functools.cache  # one command may look more than once, and syntax trees of all cases take tenths of a second
def _read(path: Path, package: str, source: str) -> Case:
    tree = ast.parse(source)
    constants: dict[str, Any] = {}
    functions: dict[str, ast.FunctionDef] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                constants[name] = value
            case ast.FunctionDef(name=name):
                functions[name] = statement
    missing = [name for name in ("ABOUT", "run") if name not in constants.keys() | functions.keys()]
    if missing:
        raise ValueError(
            f"{path} has no {' and no '.join(missing)}: every case needs ABOUT, a one-line string, and run(quick)"
        )
    draw = functions.get("draw")
    # As `ast.get_source_segment`, which splits the source anew, character by character.
    draw_source = None if draw is None else "\n".join(source.split("\n")[draw.lineno - 1 : draw.end_lineno])
    return Case(path.stem, f"{package}.{path.stem}", constants, draw_source, ast.get_docstring(tree) or "")
