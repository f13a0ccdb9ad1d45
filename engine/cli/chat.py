"""`vattn chat`."""

from __future__ import annotations

import argparse
from collections.abc import Generator

from .flags import Commands, Help
from .talk import add_talk_flags, chosen, talk


def add_to(commands: Commands, help: str) -> None:
    """Add `chat`."""
    parser = commands.add_parser("chat", help=help, formatter_class=Help)
    parser.add_argument("--system-prompt", metavar="TEXT", help="a system message to begin with")
    add_talk_flags(parser, temperature=0.7, max_tokens=512, model="path or hub id of a model with a chat template")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    messages = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]

    with chosen(args) as model:

        def answer(line: str) -> Generator[str]:
            return model.chat([*messages, {"role": "user", "content": line}])

        def heard(line: str, text: str) -> None:
            messages.extend([{"role": "user", "content": line}, {"role": "assistant", "content": text}])

        return talk(args, answer, heard)
