"""python -m bench.gpu [--quick] [--out DIR] [PART ...]: run the parts, each in a process of its own, and print a table.

Each part's record is written as soon as the part has ended, to DIR/PART.json; DIR defaults to
bench/results/<device>/gpu.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import parts as folder
from bench.harness.discovery import Case, find
from bench.harness.report import Report, text_table
from bench.harness.timing import LoadMeter

_ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 if every part ran to its end or was skipped for a reason."""
    parts = find_parts()
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", choices=(*parts, []), metavar="PART", help=", ".join(parts))
    parser.add_argument("--quick", action="store_true", help="few and small cases: does it run? Not for figures")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the records go")
    parser.add_argument("--seconds", type=float, default=570, help="time for all parts; what is left over is skipped")
    parser.add_argument("--here", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # one part, in this process
    args = parser.parse_args(argv)
    if args.here:
        return _run_here(parts[args.parts[0]], args.quick, args.here)

    environment, device = _place()
    print(f"device: {device or 'stub'}", flush=True)
    machine = re.sub(r"[^a-z0-9]+", "-", (device or "stub").lower()).strip("-")
    out = (args.out or _ROOT / "bench" / "results" / machine / "gpu").absolute()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    rows, failed = [], False
    for name in args.parts or parts:
        part, file = parts[name], out / f"{name}.json"
        print(f"\n== {name}: {part.about}", flush=True)
        start = time.monotonic()
        if part.constants["COMPUTES"] and device is None:
            record = _without("skipped", part, "it computes, and there is no GPU", file)
        else:
            limit = min(part.constants["SECONDS"], deadline - start)
            record = _run_apart(part, args.quick, file, limit, environment)
        failed |= "failed" in record
        rows += _summary(name, record, time.monotonic() - start)
    print("\n".join(["", *text_table(rows)]))
    return 1 if failed else 0


def find_parts() -> dict[str, Case]:
    """The parts by name, the most valuable first.

    Raises:
        ValueError: a part lacks one of its constants.
    """
    found = find(folder)
    for part in found.values():
        if missing := {"RANK", "SECONDS", "COMPUTES"} - part.constants.keys():
            raise ValueError(
                f"{part.module} has no {', '.join(sorted(missing))}; bench/gpu/parts says what a part needs"
            )
    return dict(sorted(found.items(), key=lambda item: item[1].constants["RANK"]))


def _place() -> tuple[dict[str, str], str | None]:
    """The environment of the parts and the name of the GPU; None for the stub in its place."""
    import torch  # here and not above: a part's process may have nothing to do with it before the part

    from bench.gpu import device
    from vattn import VattnError, drivers

    try:
        drivers.find("cuda")
        return dict(os.environ), torch.cuda.get_device_name()
    except VattnError as error:
        print(f"no GPU, so over the stub driver; times mean nothing. {error}")
        return device.stub_environment(), None


def _run_apart(part: Case, quick: bool, file: Path, limit: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a part in a process of its own; returns its record, which is also in `file`."""
    file.unlink(missing_ok=True)
    failure = "no time was left"
    if limit > 5:
        command = [sys.executable, "-m", "bench.gpu", part.name, "--here", str(file), *(["--quick"] if quick else [])]
        try:
            done = subprocess.run(command, cwd=_ROOT, env=environment, timeout=limit)
            failure = f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"stopped after {limit:.0f} s"
    if not file.exists():
        return _without("failed", part, failure, file)
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def _without(outcome: str, part: Case, why: str, file: Path) -> dict[str, Any]:
    """The record of a part that was `"skipped"` or `"failed"`, also written to `file`."""
    print(f"{part.name} {outcome}: {why}")
    record = {"name": part.name, outcome: why}
    file.write_text(json.dumps(record) + "\n")
    return record


def _run_here(part: Case, quick: bool, file: Path) -> int:
    from bench.gpu import device

    stub = device.over_stub()  # before the part: it makes torch pass for one that has CUDA
    module = part.load()
    load = LoadMeter()
    report: Report = module.run(quick)
    print(report.text(), flush=True)
    record = report.record(part.name, quick=quick, foreign_cores=load.foreign_cores())
    file.write_text(json.dumps(record | {"stub": stub}, indent=1) + "\n")
    return 0


def _summary(name: str, record: Mapping[str, Any], seconds: float) -> list[dict[str, str | int | float]]:
    """One row per goal, or one row that says why there are none."""
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
