"""`python -m bench check`: README's figures, measured anew, beside the committed records of the same machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import cases
from bench.compare import add_tolerance, show
from bench.harness import documents, records
from bench.harness.changes import same_machine
from bench.harness.discovery import find
from bench.harness.report import hardware
from bench.report.measuring import ORDER, measure

_ROOT = Path(__file__).parents[1]
_MINUTES = 60.0
# What README claims, but for what needs hours or another environment.
NAMES = tuple(name for name in documents.claimed(_ROOT / "README.md") if name in ORDER)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 1 if a figure got worse, and 2 if it could not be compared."""
    parser = argparse.ArgumentParser(prog="python -m bench check", description=__doc__)
    add_tolerance(parser)
    args = parser.parse_args(argv)
    committed = records.load(_ROOT / "bench" / "results", find(cases))
    here = {"hardware": hardware()}
    known = {
        (machine, name): record
        for name in NAMES
        for machine, record in committed[name].items()
        if same_machine(record, here)
    }
    if not known:
        print(f"bench: no committed record is of this machine ({records.machine(here)})", file=sys.stderr)
        return 2
    measured = measure(quick=False, names=tuple({name: None for _, name in known}), minutes=_MINUTES)
    pairs = {key: (record, measured[key[1]]) for key, record in known.items() if key[1] in measured}
    return max(show(pairs, args.tolerance), 2 * (len(pairs) < len(known)))
