"""`python -m bench report`: builds the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import cases
from bench.harness import records
from bench.harness.discovery import find
from bench.harness.extras import require_matplotlib
from bench.report import page
from bench.report.measuring import expected_seconds, measure

_ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench report", description="One page of the committed records, and of this machine."
    )
    parser.add_argument("--quick", action="store_true", help="measure few and small cases: under two minutes")
    parser.add_argument("--records-only", action="store_true", help="measure nothing: only the committed records")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "report", metavar="DIR", help="build/report")
    args = parser.parse_args(argv)
    if args.quick and args.records_only:
        parser.error("--quick says how to measure, and --records-only not to; give one")
    require_matplotlib("python -m bench report")
    found = find(cases)
    try:
        committed = records.load(_ROOT / "bench" / "results", found)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    fresh = {} if args.records_only else measure(quick=args.quick, expected=expected_seconds(committed))
    print("drawing ...", file=sys.stderr)
    text = page.build(page.collect(found, committed, fresh), found)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "index.html"
    file.write_text(text, encoding="utf-8")
    print(f"wrote {file} ({len(text.encode()) / 2**20:.1f} MiB)")
    return 0
