"""python -m bench.gpu [--quick] [--out DIR] [PART ...]: run the parts, each in a process of its own, and print a table.

Each part's record is written as soon as the part has ended: DIR/PART.json, DIR being bench/results/<device>/gpu unless
it is given.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu import PARTS, device
from bench.harness.report import LoadMeter, Report, text_table
from vattn import VattnError, drivers

_ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if every part ran to its end or said why it was skipped."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="few and small cases: does it run? Not for figures")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the records go")
    parser.add_argument("--seconds", type=float, default=570, help="time for all parts; what is left over is skipped")
    parser.add_argument("--here", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # one part, in this process
    args = parser.parse_args(argv)
    if args.here:
        return _run_here(args.parts[0], args.quick, args.here)

    environment, where = _place()
    print(f"device: {where}", flush=True)
    folder = re.sub(r"[^a-z0-9]+", "-", where.lower()).strip("-")
    out = (args.out or _ROOT / "bench" / "results" / folder / "gpu").absolute()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    rows, failed = [], False
    for name in args.parts or PARTS:
        file = out / f"{name}.json"
        limit = min(PARTS[name][1], deadline - time.monotonic())
        start = time.monotonic()
        record = _run_apart(name, args.quick, file, limit, environment)
        failed |= "failed" in record
        rows += _summary(name, record, time.monotonic() - start)
    print("\n".join(["", *text_table(rows)]))
    return 1 if failed else 0


def _place() -> tuple[dict[str, str], str]:
    """The environment of the parts, and the name of the device: the GPU's, or the stub's."""
    try:
        drivers.find("cuda")
        return dict(os.environ), torch.cuda.get_device_name()
    except VattnError as error:
        print(f"no GPU, so over the stub driver; times mean nothing. {error}")
        return device.stub_environment(), "stub"


def _run_apart(name: str, quick: bool, file: Path, limit: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a part in a process of its own; its record, which is also in `file`."""
    print(f"\n== {name}: {PARTS[name][0]}", flush=True)
    file.unlink(missing_ok=True)
    failure = "no time was left"
    if limit > 5:
        command = [sys.executable, "-m", "bench.gpu", name, "--here", str(file), *(["--quick"] if quick else [])]
        try:
            done = subprocess.run(command, cwd=_ROOT, env=environment, timeout=limit)
            failure = f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"stopped after {limit:.0f} s"
    if not file.exists():
        print(f"{name} failed: {failure}")
        file.write_text(json.dumps({"name": name, "failed": failure}) + "\n")
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def _run_here(name: str, quick: bool, file: Path) -> int:
    module = importlib.import_module(f"bench.gpu.cases.{name}")
    load = LoadMeter()
    if device.over_stub() and getattr(module, "COMPUTES", False):
        record: dict[str, Any] = {"name": name, "skipped": "it computes, and there is no GPU"}
        print(f"skipped: {record['skipped']}")
    else:
        report: Report = module.run(quick)
        print(report.text(), flush=True)
        record = report.record(name, quick=quick, foreign_cores=load.foreign_cores())
        record["stub"] = device.over_stub()
    file.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _summary(name: str, record: Mapping[str, Any], seconds: float) -> list[dict[str, str | int | float]]:
    """One row per goal, or one that says why there is none."""
    without = next((f"{key}: {record[key]}" for key in ("skipped", "failed") if key in record), None)
    if without is not None:
        return [{"part": name, "seconds": seconds, "goal": without, "value": "-", "asked": "-", "": ""}]
    return [
        {
            "part": name,
            "seconds": seconds,
            "goal": goal["what"],
            "value": float(goal["value"]),
            "asked": f"{goal['relation']} {goal['bound']:g}",
            "": "means nothing" if record.get("stub") else "met" if goal["met"] else "NOT met",
        }
        for goal in record["goals"]
    ]


if __name__ == "__main__":
    raise SystemExit(main())
