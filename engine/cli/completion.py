"""`vattn completion`: scripts that make a shell complete commands, flags and their choices."""

from __future__ import annotations

import argparse
from typing import Any

from .flags import Commands

_SHELLS = ("bash", "zsh", "fish")
_DIRECTORIES = {"model", "tokenizer"}
_FILES = {"dataset_path", "lengths", "output_json", "result_filename"}


def add_to(commands: Commands, help: str) -> None:
    """Add `completion`."""
    parser = commands.add_parser("completion", help=help)
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import shtab

    from . import parser

    whole = parser()
    _add_paths(whole, {**dict.fromkeys(_DIRECTORIES, shtab.DIRECTORY), **dict.fromkeys(_FILES, shtab.FILE)})
    print(shtab.complete(whole, args.shell))
    return 0


def _add_paths(parser: argparse.ArgumentParser, completers: dict[str, Any]) -> None:
    """Have shtab complete paths where a flag takes one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _add_paths(each, completers)
        elif action.dest in completers:
            action.complete = completers[action.dest]  # type: ignore[attr-defined]
