"""`vattn complete`."""

from __future__ import annotations

import argparse

from .flags import Commands, Help
from .talk import add_talk_flags, chosen, talk


def add_to(commands: Commands, help: str) -> None:
    """Add `complete`."""
    parser = commands.add_parser("complete", help=help, formatter_class=Help)
    add_talk_flags(parser, temperature=0.0, max_tokens=64, model="path or hub id")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with chosen(args) as model:
        return talk(args, model.complete, lambda line, text: None)
