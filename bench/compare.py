"""`python -m bench compare A B`: what got slower, or larger, from the records of A to those of B."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.changes import changes
from bench.harness.records import Record

_ROOT = Path(__file__).parents[1]
_RESULTS = "bench/results"
TOLERANCE = 0.05

By = dict[tuple[str, str], Record]  # by machine and benchmark


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 1 if something got worse, and 2 for a bad argument or what cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m bench compare", description=__doc__)
    for name in ("before", "after"):
        parser.add_argument(name, help="a record, a folder with a folder of records per machine, or a commit")
    add_tolerance(parser)
    args = parser.parse_args(argv)
    try:
        before, after = read(args.before), read(args.after)
        if len(before) == len(after) == 1:  # two files, whatever their folders are called
            before = dict(zip(after, before.values(), strict=True))
        shared = [key for key in after if key in before]
        if not shared:
            raise ValueError(f"{args.before} and {args.after} have no benchmark of the same machine")
        return show({key: (before[key], after[key]) for key in shared}, args.tolerance)
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def add_tolerance(parser: argparse.ArgumentParser) -> None:
    """Adds --tolerance."""
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="SHARE",
        help=f"how much worse is no failure, since sessions differ; default: {TOLERANCE}",
    )


def show(pairs: dict[tuple[str, str], tuple[Record, Record]], tolerance: float) -> int:
    """Prints what changed in each pair of records.

    Returns:
        1 if anything got worse by more than the tolerance, 2 if nothing did and a pair could not be compared.
    """
    worse = unknown = 0
    for (machine, name), (before, after) in pairs.items():
        commits = " to ".join((record["commit"] or "none")[:10] for record in (before, after))
        print(f"{machine}, {name}, {commits}")
        if before == after:
            print("  the same record")
            continue
        try:
            found = changes(before, after)
        except ValueError as error:  # the others may say something
            print(f"  not compared: {error}")
            unknown += 1
            continue
        print("\n".join(f"  {each}" for each in found) or "  not compared: no row is in both")
        unknown += not found
        worse += sum(each.worse_than(tolerance) for each in found)
    missing = f"; {unknown} of {len(pairs)} records could not be compared" if unknown else ""
    print(f"{worse} column{'s' * (worse != 1)} got worse by more than {100 * tolerance:g} %{missing}")
    return 1 if worse else 2 * bool(unknown)


def read(what: str) -> By:
    """The records of a file, a folder, or a commit of this repository.

    Raises:
        ValueError: it is none of these, or has no records.
    """
    path = Path(what)
    if path.is_file():
        texts = {path: path.read_text()}
    elif path.is_dir():
        texts = {file: file.read_text() for file in sorted(path.glob("**/*.json"))}
    else:
        texts = _of_commit(what)
    found = {}
    for file, text in texts.items():
        record = json.loads(text)
        if file.parent.name != "gpu":
            if "figures" not in record:
                raise ValueError(f"{file} is no record of a benchmark")
            found[file.parent.name, str(record["name"])] = record
    if not found:
        raise ValueError(f"{what} has no records")
    return found


def _of_commit(commit: str) -> dict[Path, str]:
    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise ValueError(f"{commit!r} is no file, no folder and no commit: git is not installed") from None
        if done.returncode:
            raise ValueError(f"{commit!r} is no file, no folder and no commit: {done.stderr.strip()}")
        return done.stdout

    verified = git("rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}").strip()
    files = git("ls-tree", "-r", "--name-only", verified, _RESULTS).splitlines()
    return {Path(file): git("show", f"{verified}:{file}") for file in files if file.endswith(".json")}
