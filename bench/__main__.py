"""python -m bench: run benchmarks, list them, publish, compare and report their records."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import cases
from bench.gpu.parts import find_parts
from bench.harness import documents, plot, records
from bench.harness.discovery import Case, find
from bench.harness.report import Report, Unavailable
from bench.harness.timing import LoadMeter

_ROOT = Path(__file__).parents[1]

# Words in place of a NAME.
_COMMANDS = ("report", "compare", "check")
_UNAVAILABLE = 2  # exit status of a benchmark that cannot run here


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, which does not depend on whether goals are met."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in _COMMANDS:
        return run_command(argv[0], argv[1:])
    found = find(cases)
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Benchmarks of vattn.",
        epilog=f"Further commands, each with a --help of its own: {', '.join(_COMMANDS)}.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(found))
    parser.add_argument("--all", action="store_true", help="run every benchmark")
    parser.add_argument("--list", action="store_true", help="say what each benchmark measures")
    parser.add_argument(
        "--publish", action="store_true", help="update the documents' claims and plots from the committed records"
    )
    parser.add_argument("--quick", action="store_true", help="few and small cases: does it run? Not for figures")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the record there, of several into that folder, or print it for -",
    )
    parser.add_argument("--check", action="store_true", help="with --publish: write nothing, fail if anything is stale")
    args = parser.parse_args(argv)

    if sum((bool(args.names), args.all, args.list, args.publish)) != 1:
        parser.error("give either NAMEs or one of --all, --list and --publish")
    if unknown := [name for name in args.names if name not in found]:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(found)}")
    if args.json and (args.list or args.publish):
        parser.error("--json belongs to benchmarks that are run: give NAMEs or --all")
    if args.check and not args.publish:
        parser.error("--check belongs to --publish")

    if args.list:
        for name, case in found.items():
            print(f"{name:18}{case.about}")
        return 0
    if args.publish:
        return publish(_ROOT, check=args.check)
    if len(args.names) == 1:
        file = args.json / f"{args.names[0]}.json" if args.json and args.json.is_dir() else args.json
        return run(found[args.names[0]], quick=args.quick, file=file)
    return run_apart(args.names or list(found), quick=args.quick, folder=args.json)


def run_command(name: str, argv: Sequence[str]) -> int:
    """Runs a command that has a command line of its own; only its imports are made."""
    if name == "report":
        from bench.report import command

        return command.main(argv)
    if name == "compare":
        from bench import compare

        return compare.main(argv)
    from bench import check

    return check.main(argv)


def run(case: Case, *, quick: bool, file: Path | None = None) -> int:
    """Runs a benchmark here; prints its table and goals, and writes its record to a file, or prints it for `-`."""
    module = case.load()
    gc.freeze()  # collections between measurements then skip what was imported, half a second each
    try:
        load, start = LoadMeter(), time.monotonic()
        report: Report = module.run(quick)
        foreign, seconds = load.foreign_cores(), time.monotonic() - start
    except Unavailable as error:
        print(f"not measured: {error}", file=sys.stderr)
        return _UNAVAILABLE
    finally:
        gc.unfreeze()
    print(report.text())
    if report.contended(foreign):
        print(f"CONTENDED: others kept {foreign:.2f} cores busy; these times are void. Run it on an idle machine")
    record = report.record(case.name, quick=quick, foreign_cores=foreign, seconds=seconds)
    if file == Path("-"):
        print(json.dumps(record))
    elif file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def run_apart(names: Sequence[str], *, quick: bool, folder: Path | None = None) -> int:
    """Runs benchmarks one after another, each in a process of its own, so that none finds the memory of another.

    Each writes its record to a folder, if there is one, when it ends, so a run that is cut off keeps those before it.
    For the folder `-`, each prints it. Those that cannot run here are no failure.
    """
    failed: list[str] = []
    missing: list[str] = []
    for name in names:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", "bench", name, *(["--quick"] if quick else [])]
        if folder is not None:
            command += ["--json", str(folder if folder == Path("-") else folder.absolute() / f"{name}.json")]
        status = subprocess.run(command, cwd=_ROOT, check=False).returncode
        if status:
            (missing if status == _UNAVAILABLE else failed).append(name)
    if missing:
        print(f"not measured: {', '.join(missing)}", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def publish(root: Path, *, check: bool) -> int:
    """Brings tables and plots under `root` up to date, or says which are stale."""
    found = find(cases)
    try:
        committed = records.load(root / "bench" / "results", found)
        parts = find_parts()
        gpu = records.load_gpu(root / "bench" / "results", list(parts))
        about = {name: part.about for name, part in parts.items()}
        stale = documents.update(root, found, committed, gpu, about, check=check)
        stale += plot.update(root, found, committed, documents.plotted(root), check=check)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for path in stale:
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(root)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # engines would go to a GPU; `bench.gpu` measures those
    raise SystemExit(main())
