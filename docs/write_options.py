"""Writes the tables of options into the reference: `python docs/write_options.py`.

A table stands between two comments that name it; tests/engine/cli/test_flags.py asserts that it is up to date.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from vattn.engine.cli.engine_flags import add_engine_flags, engine_flags
from vattn.engine.cli.flags import add_fields, flagged
from vattn.engine.config import EngineConfig
from vattn.engine.options import Option, options_of
from vattn.engine.server.settings import ServerSettings

REFERENCE = Path(__file__).parent / "reference"


def pages() -> dict[Path, str]:
    """Each page that has tables, and its text with these brought up to date."""
    found = {}
    for name in ("engine.md", "command-line.md"):
        text = (REFERENCE / name).read_text()
        for mark, table in _TABLES.items():
            begin, end = f"<!-- begin: {mark} -->", f"<!-- end: {mark} -->"
            if begin in text:
                before, rest = text.split(begin)
                text = f"{before}{begin}\n\n{table()}\n\n{end}{rest.split(end)[1]}"
        found[REFERENCE / name] = text
    return found


def _arguments() -> str:
    """The arguments of `LLM`."""
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    lines = ["| argument | default | meaning |", "| --- | --- | --- |"]
    for name, option in options_of(EngineConfig).items():
        lines.append(f"| `{name}` | `{defaults[name]!r}` | {_meaning(option)} |")
    return "\n".join(lines)


def _flags(add: Callable[[argparse.ArgumentParser], None], options: Mapping[str, Option]) -> str:
    """The flags that `add` adds to a command, as argparse names them."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    lines = ["| option | meaning |", "| --- | --- |"]
    for action in parser._actions:
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        repeated = "; may be repeated" if isinstance(action, argparse._AppendAction) else ""
        lines.append(f"| {names} | {_meaning(options[action.dest])}{repeated} |")
    return "\n".join(lines)


def _meaning(option: Option) -> str:
    if option.choices is None or all(f"`{choice}`" in option.doc for choice in option.choices):
        return option.doc
    return f"{option.doc}; one of {', '.join(f'`{choice}`' for choice in option.choices)}"


_TABLES: dict[str, Callable[[], str]] = {
    "arguments of LLM": _arguments,
    "flags of the server": lambda: _flags(lambda made: add_fields(made, ServerSettings), flagged(ServerSettings)),
    "flags of the engine": lambda: _flags(add_engine_flags, engine_flags()),
}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
        print(page.relative_to(REFERENCE.parents[1]))
