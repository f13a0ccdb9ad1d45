"""python -m bench.gpu [--quick] [--out DIR] [--first N | PART ...]: run parts in processes of their own; print a table.

As soon as a part has ended, its record is in bench/results/<device>/gpu/PART.json and what it printed in PART.log (over
the stub driver: in build/stub/gpu); parts that run tests write their results too (JUnit). With --out, a tar of these
files and a copy of the table go to DIR instead, named after the group or the parts: `tar -xf DIR/group-1.tar.gz -C
bench/results` brings them home. While a part runs, DIR has what it printed in running-PART.log and the rows that it has
measured in running-PART.rows. They stay there, whatever ends the run, until the part runs again.

The groups are the first half hour on a machine, the most telling parts first: `--first 1`, then `--first 2`, ... each
in a call of ten minutes: `timeout -k 15 575 bench/gpu.sh --first 1 --out DIR`.

The environment variable VATTN_COMMIT names the commit for the records, as `git describe --always --dirty --abbrev=40
--exclude='*'` prints it: for copies of a checkout without .git, which are "unknown" else, or with an older one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.gpu import figures
from bench.gpu.lifetime import end_with
from bench.gpu.parts import find_parts
from bench.harness.discovery import Case
from bench.harness.report import MAX_FOREIGN_CORES, Report, Row, text_table
from bench.harness.timing import LoadMeter

CALL_SECONDS = 570  # one call, the build included: some machines are lent for ten minutes at a time
BUILD_SECONDS = 90
_PATIENCE_WITH_STUB = 30  # times the seconds of a part: over the stub, tests run it beside other load

_ROOT = Path(__file__).parents[2]
_SECONDS_TO_DIE = 10
_CORES_OF_A_PART = 4
_LINES_OF_A_FAILURE = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 if every part ran with all its sides."""
    parts = find_parts()
    groups = group(parts.values())
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description="Runs parts in processes of their own; prints a table."
    )
    parser.add_argument("parts", nargs="*", choices=(*parts, []), metavar="PART", help=", ".join(parts))
    parser.add_argument(
        "--first",
        "--group",
        dest="group",
        type=int,
        choices=range(1, len(groups) + 1),
        help="parts that fit one call of ten minutes: " + _list(groups),
    )
    parser.add_argument("--quick", action="store_true", help="few and small cases: does it run? Not for figures")
    parser.add_argument("--out", type=Path, metavar="DIR", help="pack the records into a tar there")
    parser.add_argument("--here", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # one part, in this process
    args = parser.parse_args(argv)
    if args.group and args.parts:
        parser.error("--first names its parts itself: give either a group or parts")
    if args.here:
        return _run_here(parts[args.parts[0]], args.quick, args.here)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it ends the running part too
    environment, device = _place()
    print(f"device: {device or 'stub'}", flush=True)
    machine = re.sub(r"[^a-z0-9]+", "-", (device or "stub").lower()).strip("-")
    chosen = [part.name for part in groups[args.group - 1]] if args.group else args.parts or list(parts)
    title = f"group-{args.group}" if args.group else "-".join(args.parts) or "all"
    results = _ROOT / ("bench/results" if device else "build")  # what means nothing is no result
    rows: list[Row] = []
    failed = False
    with ExitStack() as stack:
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            results = Path(stack.enter_context(TemporaryDirectory()))
            stack.callback(_pack, results, rows, args.out / title)  # what there is, if it is ended in mid-run
        out = results / machine / "gpu"
        out.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            part, file = parts[name], out / f"{name}.json"
            print(f"{name}: {part.about}", flush=True)
            start = time.monotonic()
            running = (args.out or out) / f"running-{name}"
            limit = part.constants["SECONDS"] * (1 if device else _PATIENCE_WITH_STUB)
            record = _run_apart(part, args.quick, file, limit, environment, running)
            failed |= "failed" in record or bool(_missing(record)) or _is_wrong(record)
            rows += _summary(name, record, time.monotonic() - start)
            if args.out:
                _pack(results, rows, args.out / title)
    print("\n".join(["", *_table(rows)]))
    return 1 if failed else 0


def group(parts: Iterable[Case]) -> list[list[Case]]:
    """The parts in their order, as many in each group as run within one call even if all take as long as they may."""
    groups: list[list[Case]] = [[]]
    for part in parts:
        if sum(other.constants["SECONDS"] for other in [*groups[-1], part]) > CALL_SECONDS - BUILD_SECONDS:
            groups.append([])
        groups[-1].append(part)
    return groups


def _list(groups: Sequence[Sequence[Case]]) -> str:
    return "; ".join(f"{n}: {', '.join(part.name for part in parts)}" for n, parts in enumerate(groups, 1))


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


def _pack(results: Path, rows: Sequence[Row], to: Path) -> None:
    """The records and the table so far in `to`.tar.gz and `to`.txt: some machines give back only a few files."""
    part = to.with_suffix(".part")
    with tarfile.open(part, "w:gz") as tar:
        for path in sorted(results.iterdir()):
            tar.add(path, path.name)
    part.replace(to.with_suffix(".tar.gz"))
    to.with_suffix(".txt").write_text("\n".join(_table(rows)) + "\n")


def _table(rows: Sequence[Row]) -> list[str]:
    return text_table(rows) if rows else ["no part with goals has ended"]


def _run_apart(
    part: Case, quick: bool, file: Path, limit: float, environment: Mapping[str, str], running: Path
) -> dict[str, Any]:
    """Runs a part in a session of its own, no process of which outlives it; returns its record, also in `file`.

    Args:
        running: without a suffix, where the log and the rows of the part are while it runs.
    """
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu", part.name, "--here", str(file), *(["--quick"] if quick else [])]
    log, rows = running.with_suffix(".log"), running.with_suffix(".rows")
    rows.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**environment, figures.ROWS: str(rows.resolve())},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with, os.getpid()),
        )
        try:
            failure = f"the process ended with {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            failure = f"stopped after {limit:.0f} s"
        finally:
            _end_session(process)
    if not file.exists():
        print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-_LINES_OF_A_FAILURE:]))
        print(f"{part.name} failed: {failure}")
        seconds = time.monotonic() - started
        _write(file, Report({}, _rows(rows), []), part.name, quick, {"failed": failure}, seconds=seconds)
    shutil.move(log, file.with_suffix(".log"))
    rows.unlink(missing_ok=True)
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def _rows(file: Path) -> list[Row]:
    """The rows that a part has measured; the last one only if it is whole."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _write(
    file: Path,
    report: Report,
    name: str,
    quick: bool,
    more: Mapping[str, Any],
    *,
    seconds: float,
    foreign: float = 0.0,
) -> None:
    record = report.record(name, quick=quick, foreign_cores=foreign, seconds=seconds) | dict(more)
    if record["commit"] is None or "VATTN_COMMIT" in os.environ:  # a copy's .git may be older than its files
        record |= _carried_commit()
    part = file.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(file)


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kills what a part left running, and waits until it is gone: it may hold the GPU and its memory until then."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while alive := _session(leader.pid):
        if time.monotonic() > deadline:
            print(f"processes {alive} are still there: the times of later parts may be falsified")
            return
        for pid in alive:  # one that left the group of its session
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _session(leader: int) -> list[int]:
    """The processes of a session that have not ended; those that only wait to be reaped have."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, session = file.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended meanwhile
            continue
        if int(session) == leader and state not in "ZX":
            found.append(int(file.parent.name))
    return found


def _run_here(part: Case, quick: bool, file: Path) -> int:
    from bench.gpu import device

    stub = device.over_stub()  # before the part: it makes torch pass for one that has CUDA
    quick |= stub  # whose times mean nothing
    os.environ[figures.OUT] = str(file.parent)
    started = time.monotonic()
    module = part.load()
    load = LoadMeter()
    report: Report = module.run(quick)
    print(report.text(), flush=True)
    foreign = load.foreign_cores()
    more = {
        "stub": stub,
        "timed": report.timed,
        "contended": report.timed and contended(foreign, os.cpu_count() or 1),
    }
    _write(file, report, part.name, quick, more, seconds=time.monotonic() - started, foreign=foreign)
    return 0


def contended(foreign_cores: float, cores: int) -> bool:
    """Whether other load makes times void: with more than four cores, as much as half of those that a part leaves idle.

    A machine that is lent may be a share of one with many more cores, of whose load the system tells.
    """
    return foreign_cores > max(MAX_FOREIGN_CORES, (cores - _CORES_OF_A_PART) / 2)


def _carried_commit() -> dict[str, str | bool]:
    commit = os.environ.get("VATTN_COMMIT") or "unknown"
    return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}


def _summary(name: str, record: Mapping[str, Any], seconds: float) -> list[Row]:
    """One row per goal and per side that is missing, or one row that says why there are none."""
    if "failed" in record:
        why = f"failed: {record['failed']}; rows until then: {len(record['figures'])}"
        return [{"part": name, "seconds": seconds, "goal": why, "value": "-", "asked": "-", "": ""}]
    rows: list[Row] = [
        {
            "part": name,
            "seconds": seconds,
            "goal": goal["what"],
            "value": float(goal["value"]),
            "asked": f"{goal['relation']} {goal['bound']:g}",
            "": "means nothing"
            if record["stub"]
            else "void: contended"
            if record["contended"]
            else "met"
            if goal["met"]
            else "NOT met",
        }
        for goal in record["goals"]
    ]
    for what in _missing(record):
        rows.append(
            {"part": name, "seconds": seconds, "goal": f"MISSING: {what}", "value": "-", "asked": "-", "": "failed"}
        )
    return rows


def _is_wrong(record: Mapping[str, Any]) -> bool:
    """Whether a goal that is no time is not met: a test failed, say. The stub decides nothing."""
    return (
        "failed" not in record
        and not record["stub"]
        and any(not goal["met"] and (goal["relation"] == "==" or not record["timed"]) for goal in record["goals"])
    )


def _missing(record: Mapping[str, Any]) -> list[str]:
    missing: list[str] = record.get("parameters", {}).get(figures.MISSING, [])
    return missing


if __name__ == "__main__":
    raise SystemExit(main())
