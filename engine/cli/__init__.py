"""The `vattn` command: a file per subcommand, and flags that are generated from the engine's configuration."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

import vattn
from vattn.errors import VattnError

# Each is a module of this package with `add_to(commands, help)`. Only the one that is asked for is imported: most need
# torch, whose import takes seconds.
COMMANDS = {
    "serve": "serve a model over HTTP, as OpenAI's API",
    "generate": "run prompts through a model",
    "chat": "talk to a model, line by line",
    "complete": "continue prompts, one per line",
    "bench": "measure a running server, or the engine in this process",
    "pool": "one memory for the caches of all engines of a machine",
    "store": "prefixes on disk: what is there, and deleting it",
    "plan": "what fits a memory: a model's cache, paged and virtual",
    "doctor": "what this machine offers, and what would be used",
    "completion": "a script for your shell, which then completes `vattn`",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    It is 0, 1 if a request failed, 2 for a bad argument, 130 for Ctrl-C, 141 if nobody reads the output.
    """
    argv = sys.argv[1:] if argv is None else argv
    # No flag before the command takes a value, so the first word that is no flag is the command.
    command = next((word for word in argv if not word.startswith("-")), "")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer has what characters it likes
    try:
        try:
            args = parser(command).parse_args(argv)
            status: int = args.run(args)
        finally:
            print(end="", flush=True)  # here rather than at the interpreter's end, which could only complain
    except BrokenPipeError:  # as of `| head`; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except (VattnError, OSError) as error:  # OSError: transformers' "no such model"
        print(f"vattn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """All commands, with the flags of `command`, or of all."""
    parser = argparse.ArgumentParser(
        prog="vattn", description="KV-cache memory on demand, contiguous in virtual memory."
    )
    parser.add_argument("--version", action="version", version=f"vattn {vattn.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help in COMMANDS.items():
        if command in (None, name):
            importlib.import_module(f".{name}", __name__).add_to(commands, help)
        else:
            commands.add_parser(name, help=help)
    return parser
