"""Does the campaign find what it is there for? It runs under each mutation until it finds something, and a table says
what, and after how many calls.

    python -m tests.campaign.mutations [NAME ...] --calls 200000 --seed 0 1
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

from tests.campaign import mutations
from tests.campaign.campaign import run
from tests.campaign.mutations import MUTATIONS, Mutation


def main() -> int:
    """Runs the campaign under every mutation named, or all; the exit status says whether each was found."""
    for module in pkgutil.iter_modules(mutations.__path__, "tests.campaign.mutations."):
        importlib.import_module(module.name)
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MUTATIONS)}")
    parser.add_argument("--calls", type=int, default=200_000, help="give up after so many")
    parser.add_argument("--seconds", type=float, default=300, help="give up after so many")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or more, each a run of its own")
    options = parser.parse_args()
    print("| defect | taken out | mode | found as | after calls |\n" + "| --- " * 5 + "|", flush=True)
    found = [_found(MUTATIONS[name], options) for name in _chosen(options.names)]
    return 0 if all(found) else 1


def _chosen(names: Sequence[str]) -> list[str]:
    if unknown := set(names) - set(MUTATIONS):
        raise SystemExit(f"no such mutation: {', '.join(sorted(unknown))}; there are {', '.join(MUTATIONS)}")
    return list(names or MUTATIONS)


def _found(mutation: Mutation, options: argparse.Namespace) -> bool:
    """Prints a line of the table; whether every seed found it."""
    runs = [
        run(
            seed,
            calls=options.calls,
            seconds=options.seconds,
            modes=mutation.modes,
            shrink_seconds=0,
            setup=mutation.patch,
        )
        for seed in options.seed
    ]
    kinds = [summary.findings[0].played.kind if summary.findings else "**not found**" for summary in runs]
    cells = (
        mutation.defect or "",
        mutation.what,
        ", ".join(mutation.modes),
        "; ".join(str(kind).replace("AssertionError: ", "") for kind in dict.fromkeys(kinds)),
        " / ".join(f"{summary.calls:,}" for summary in runs),
    )
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return all(summary.findings for summary in runs)


if __name__ == "__main__":
    sys.exit(main())
