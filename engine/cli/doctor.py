"""`vattn doctor`."""

from __future__ import annotations

import argparse

from .flags import Commands


def add_to(commands: Commands, help: str) -> None:
    """Add `doctor`."""
    parser = commands.add_parser("doctor", help=help)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from vattn.doctor import doctor

    print(doctor())
    return 0
