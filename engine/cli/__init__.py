"""The `vattn` command: a file per subcommand, and flags that are generated from the engine's configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import vattn
from vattn.engine.cli import bench, chat, complete, completion, doctor, generate, serve
from vattn.errors import VattnError

COMMANDS = (serve, generate, chat, complete, bench, doctor, completion)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if a request failed, 2 for a bad argument, 130 for Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except (VattnError, OSError) as error:  # OSError: transformers' "no such model"
        print(f"vattn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def parser() -> argparse.ArgumentParser:
    """All commands, with their flags."""
    parser = argparse.ArgumentParser(
        prog="vattn", description="KV-cache memory on demand, contiguous in virtual memory."
    )
    parser.add_argument("--version", action="version", version=f"vattn {vattn.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
