"""python -m bench NAME [--quick] [--json FILE]: run a benchmark, print its table and goals, and record it as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

from bench import BENCHMARKS
from bench.harness.report import LoadMeter, Report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit status, 0 whether or not the goals are met."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of vattn.")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("name", nargs="?", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    chosen.add_argument("--list", action="store_true", help="say what each benchmark measures")
    parser.add_argument("--quick", action="store_true", help="few and small cases: does it run? Not for figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there instead of printing it")
    args = parser.parse_args(argv)

    if args.list:
        for name, what in BENCHMARKS.items():
            print(f"{name:15}{what}")
        return 0

    module = importlib.import_module(f"bench.cases.{args.name}")
    load = LoadMeter()
    report: Report = module.run(args.quick)
    foreign = load.foreign_cores()
    print(report.text())
    if report.contended(foreign):
        print(f"CONTENDED: others kept {foreign:.2f} cores busy; these times are no figures. Run it on an idle machine")
    record = report.record(args.name, quick=args.quick, foreign_cores=foreign)
    if args.json is None:
        print(json.dumps(record))
    else:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
