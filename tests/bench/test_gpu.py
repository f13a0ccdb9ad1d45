"""The GPU's measurements without a GPU: over the stub driver, to their end; a part that fails costs no other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import device, figures
from bench.gpu.parts import sanitizer
from bench.harness.discovery import Case
from bench.harness.report import Report
from tests.support.effort import effort
from tests.support.waiting import SECONDS, runs, wait_until

pytestmark = pytest.mark.slow(1)

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: bench/gpu.sh measures it")
@pytest.mark.skipif(not shutil.which("g++"), reason="the stub needs a C++ compiler (g++)")
@pytest.mark.slow(6)
def test_parts_run_over_the_stub(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed: pip install 'vattn[cuda]'")
    names = effort(["strides"], ["strides", "attention"])
    command = [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path / "home"), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "home" / f"{'-'.join(names)}.txt").read_text()
    assert done.stdout.endswith("\n\n" + table)
    assert "means nothing" in table.splitlines()[1]
    assert {path.name for path in (tmp_path / "home").iterdir()} == {  # nothing of parts that run
        f"{'-'.join(names)}.tar.gz",
        f"{'-'.join(names)}.txt",
    }
    with tarfile.open(tmp_path / "home" / f"{'-'.join(names)}.tar.gz") as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
        tar.extractall(tmp_path)
    gpu_records = tmp_path / "stub" / "gpu"
    strides, *others = (json.loads((gpu_records / f"{name}.json").read_text()) for name in names)
    assert (gpu_records / "strides.log").exists()
    assert (strides["stub"], strides["quick"], strides["goals"][0]["met"]) == (True, True, True)
    caches = ("virtual", "virtual, aged", "static", "static again", "paged")
    for attention in others:
        sides = [(row["cache"], row["kernel"]) for row in attention["figures"]]
        assert sides == 4 * [(cache, "torch_sdpa") for cache in caches]


REHEARSAL = """
import json
from bench.gpu import device
assert device.over_stub()
from bench.gpu.__main__ import find_parts
for name, part in find_parts().items():
    if name not in ("memory_tests", "kernel_tests", "model_tests", "sanitizer"):  # which start tests that need a GPU
        report = part.load().run(True)
        rows = [list(row) for row in report.figures]
        assert report.figures and all(row == rows[0] for row in rows), name
        assert report.goals or name in ("doctor", "other_kernels")
        assert not report.parameters.get("missing"), name
        json.dumps(report.record(name, quick=True, foreign_cores=0.0)), report.text()
        if name == "other_kernels":
            sides = [(row["kernel"], row["cache"], row["us"]) for row in report.figures if isinstance(row["us"], str)]
            assert ("flashinfer", "all", "FlashInfer is not installed (pip install flashinfer-python)") in sides, sides
            measured = {row["cache"] for row in report.figures if row["kernel"] == "torch_sdpa"}
            assert measured == {"virtual", "static", "paged", "paged, blocks of 16"}
        print(name)
from tests.gpu import tails  # what tests/gpu runs in processes of their own
assert max(tails.check("torch_sdpa", kind) for kind in tails.KINDS) <= tails.TOLERANCE
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: bench/gpu.sh measures it")
@pytest.mark.skipif(not shutil.which("g++"), reason="the stub needs a C++ compiler (g++)")
@pytest.mark.slow
@pytest.mark.long
def test_every_part_runs_over_the_stub() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed: pip install 'vattn[cuda]'")
    command = [sys.executable, "-c", REHEARSAL]
    environment = device.stub_environment()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    apart = {"memory_tests", "kernel_tests", "model_tests", "sanitizer"}
    assert {*done.stdout.split()} | apart == gpu.find_parts().keys()


STALLS = """
import json
from bench.gpu import device
assert device.over_stub()
import stub_cuda
from bench.gpu.parts import stalls
control = stub_cuda.Stub()
control.latencies({"cuMemSetAccess": 2000})
for locked in (True, False):
    control.locking(locked)
    before = control.stalls("cuEventRecord")
    report = stalls.run(True)
    slowest = {row["beside"]: row["slowest us"] for row in report.figures}
    met = {goal.what: goal.met for goal in report.goals}
    print(json.dumps([control.stalls("cuEventRecord") - before, slowest, met]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: bench/gpu.sh measures it")
@pytest.mark.skipif(not shutil.which("g++"), reason="the stub needs a C++ compiler (g++)")
@pytest.mark.slow(8)
def test_stalls_shows_a_driver_whose_map_calls_stall_launches() -> None:
    """With a lock in the driver, launches stall, and the report shows it; without one, none stalls."""
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed: pip install 'vattn[cuda]'")
    command = [sys.executable, "-c", STALLS]
    environment = device.stub_environment()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    (stalls, slowest, met), unlocked = map(json.loads, done.stdout.splitlines())
    assert stalls > 0
    for beside in ("map, set access, unmap", "the cache's worker"):
        assert slowest[beside] > 1000
    assert not met["cuEventRecord: 99th percentile beside the cache's worker, us"]
    assert unlocked[0] == 0


def test_records_are_packed_when_the_run_is_ended_in_mid_part(tmp_path: Path) -> None:
    """By SIGTERM, as `timeout` sends it."""
    script = "import os, signal; from bench.gpu import __main__ as gpu; gpu._place = lambda: (dict(os.environ), None)\n"
    script += "run = gpu._run_apart\n"
    script += "ended = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
    script += "gpu._run_apart = lambda part, quick, file, limit, _, running: (\n"
    script += "    run(part, quick, file, limit, {'PATH': ''}, running) if part.name == 'doctor' else ended())\n"
    script += f"gpu.main(['--out', {str(tmp_path)!r}, 'doctor', 'strides', 'overlap'])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    with tarfile.open(tmp_path / "doctor-strides-overlap.tar.gz") as tar:
        assert [name for name in tar.getnames() if name.endswith(".json")] == ["stub/gpu/doctor.json"]


def test_parts_without_goals_leave_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"parameters": {}, "goals": [], "stub": True, "contended": False, "timed": False}
    monkeypatch.setattr(gpu, "_place", lambda: ({}, None))
    monkeypatch.setattr(gpu, "_run_apart", lambda *_: record)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    assert gpu.main(["--out", str(tmp_path), "doctor"]) == 0
    assert capsys.readouterr().out.endswith("\n\n" + (tmp_path / "doctor.txt").read_text())


@pytest.mark.parametrize(("cores", "bearable"), [(1, 0.1), (2, 0.1), (16, 6.0), (192, 94.0)])
def test_the_load_that_is_bearable_grows_with_the_cores(cores: int, bearable: float) -> None:
    assert not gpu.contended(bearable, cores)
    assert gpu.contended(bearable + 0.01, cores)


@pytest.mark.parametrize(
    ("carried", "commit", "dirty"), [(None, "unknown", False), ("0a1b", "0a1b", False), ("0a1b-dirty", "0a1b", True)]
)
def test_the_commit_of_a_checkout_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carried: str | None, commit: str, dirty: bool
) -> None:
    monkeypatch.setenv("PATH", "")  # no git: a record then has no commit of its own
    monkeypatch.setenv(figures.OUT, "restored afterwards")
    monkeypatch.setenv("VATTN_COMMIT", carried) if carried else monkeypatch.delenv("VATTN_COMMIT", raising=False)
    report = Report({}, [{"figure": 1}], [], timed=False)
    monkeypatch.setattr(Case, "load", lambda _: SimpleNamespace(run=lambda quick: report))
    file = tmp_path / "nothing.json"
    assert gpu._run_here(Case("nothing", "nothing", {"ABOUT": "nothing"}, None), True, file) == 0
    record = json.loads(file.read_text())
    assert (record["commit"], record["dirty"]) == (commit, dirty)


def test_a_record_has_the_seconds_of_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(figures.OUT, "restored afterwards")
    clock = iter([100.0, 107.25])
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    report = Report({}, [{"figure": 1}], [], timed=False)
    monkeypatch.setattr(Case, "load", lambda _: SimpleNamespace(run=lambda quick: report))
    file = tmp_path / "nothing.json"
    assert gpu._run_here(Case("nothing", "nothing", {"ABOUT": "nothing"}, None), True, file) == 0
    assert json.loads(file.read_text())["seconds"] == 7.2


def test_parts_are_found_in_the_order_of_their_ranks() -> None:
    parts = gpu.find_parts()
    assert parts.keys() == {path.stem for path in (ROOT / "bench" / "gpu" / "parts").glob("[!_]*.py")}
    ranks = [part.constants["RANK"] for part in parts.values()]
    assert ranks == sorted(set(ranks)), "two parts have one rank"


def test_every_group_of_parts_fits_one_call() -> None:
    parts = gpu.find_parts()
    groups = gpu.group(parts.values())
    assert [part.name for parts in groups for part in parts] == list(parts)
    for group in groups:
        assert gpu.BUILD_SECONDS + sum(part.constants["SECONDS"] for part in group) <= gpu.CALL_SECONDS == 570
    transfers = 30 * len(groups)
    assert gpu.BUILD_SECONDS + transfers + sum(part.constants["SECONDS"] for part in parts.values()) <= 1650


def test_help_begins_with_what_comes_before_the_first_call() -> None:
    """And builds nothing."""
    command = [str(ROOT / "bench" / "gpu.sh"), "--help"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Before the first call: build the paged baseline")
    assert "bench/gpu/build_fa2.sh" in done.stdout.splitlines()[0]
    assert "timeout -k 15 575 bench/gpu.sh --first 1 --out DIR" in done.stdout
    assert "usage: python -m bench.gpu" in done.stdout
    assert "built in" not in done.stdout


def test_a_part_that_fails_leaves_a_record(tmp_path: Path) -> None:
    part = Case("nothing", "bench.gpu.parts.nothing", {"ABOUT": "a part that does not exist"}, None)
    file = tmp_path / "nothing.json"
    record = gpu._run_apart(part, True, file, SECONDS, {"PATH": ""}, tmp_path / "running")
    assert record == json.loads(file.read_text())
    assert (record["name"], record["failed"], record["figures"]) == ("nothing", "the process ended with 2", [])
    assert record["versions"]["torch"] == torch.__version__
    assert "invalid choice: 'nothing'" in (tmp_path / "nothing.log").read_text()
    row = gpu._summary("nothing", record, 1.0)[0]
    assert row["goal"] == "failed: the process ended with 2; rows until then: 0"


def stop(monkeypatch: pytest.MonkeyPatch, ready: Callable[[], object]) -> None:
    """Parts run out of time as soon as that holds."""

    class Stopped(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            wait_until(ready)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Stopped)


LEAVES_CHILDREN = """
import os, pathlib, subprocess, sys, time
children = [subprocess.Popen(["sleep", "600"], process_group=group) for group in (None, 0)]
pathlib.Path(sys.argv[0] + ".pids").write_text(" ".join(str(child.pid) for child in children))
if os.environ["HANGS"] == "yes":
    time.sleep(600)
"""


@pytest.mark.parametrize("hangs", ["yes", "no"])
def test_a_part_leaves_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str) -> None:
    """Neither one stopped in mid-run nor one that ends with children running, in its process group or in theirs."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}{LEAVES_CHILDREN}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    part = Case("children", "bench.gpu.parts.children", {"ABOUT": "a part with children"}, None)
    environment = {"PATH": os.environ["PATH"], "HANGS": hangs}
    started = tmp_path / "python.pids"
    if hangs == "yes":
        stop(monkeypatch, lambda: started.exists() and len(started.read_text().split()) == 2)
    record = gpu._run_apart(part, True, tmp_path / "children.json", SECONDS, environment, tmp_path / "running")
    assert record["failed"] == (f"stopped after {SECONDS} s" if hangs == "yes" else "the process ended with 0")
    pids = [int(pid) for pid in started.read_text().split()]
    assert len(pids) == 2
    assert [pid for pid in pids if runs(pid)] == []


def test_a_side_that_is_missing_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["paged with flash_attn_2: it is not installed"]
    goal = {"what": "decode", "value": 1.0, "relation": ">=", "bound": 0.99, "met": True}
    record = {"parameters": {figures.MISSING: missing}, "goals": [goal], "stub": False}
    record |= {"contended": False, "timed": True}
    monkeypatch.setattr(gpu, "_place", lambda: ({}, "A GPU"))
    monkeypatch.setattr(gpu, "_run_apart", lambda *_: record)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    assert gpu.main(["--out", str(tmp_path), "attention"]) == 1
    table = capsys.readouterr().out.splitlines()[-2:]
    assert table[0].endswith(" met")
    assert "MISSING: " + missing[0] in table[1]
    record["parameters"] = {figures.MISSING: []}
    assert gpu.main(["--out", str(tmp_path), "attention"]) == 0
    goal["met"] = False  # a time: it is shown, and fails nothing
    assert gpu.main(["--out", str(tmp_path), "attention"]) == 0
    record["timed"] = False
    assert gpu.main(["--out", str(tmp_path), "attention"]) == 1
    record |= {"timed": True, "goals": [goal | {"relation": "=="}]}
    assert gpu.main(["--out", str(tmp_path), "attention"]) == 1


ROWS_AND_NO_END = """
import os, time
from bench.gpu.figures import ROWS, Figures
figures = Figures()
figures.append({"us": 1.5})
figures.append({"us": 2.5})
with open(os.environ[ROWS], "a") as file:
    file.write('{"us": ')
time.sleep(600)
"""


def test_a_part_that_is_stopped_leaves_the_rows_that_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}{ROWS_AND_NO_END}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    part = Case("rows", "bench.gpu.parts.rows", {"ABOUT": "a part that hangs"}, None)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    rows = tmp_path / "running.rows"
    stop(monkeypatch, lambda: rows.exists() and rows.read_text().endswith('{"us": '))
    record = gpu._run_apart(part, True, tmp_path / "rows.json", SECONDS, environment, tmp_path / "running")
    assert record["failed"] == f"stopped after {SECONDS} s"
    assert record["figures"] == [{"us": 1.5}, {"us": 2.5}]


KILLED = """
import os, pathlib, sys, time
from types import SimpleNamespace
from bench.gpu import __main__ as gpu
from bench.harness.discovery import Case
gpu._place = lambda: (dict(os.environ), None)
sys.exit(gpu.main(["--out", sys.argv[1], "--quick", sys.argv[2]]))
"""


def test_a_leader_that_is_killed_takes_its_part_along(tmp_path: Path) -> None:
    """What the part has printed until then stays in DIR, also when other parts run next."""
    log = tmp_path / "running-strides.log"
    environment = device.stub_environment()
    leader = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), "strides"], cwd=ROOT, env=environment)

    def parts() -> list[int]:
        return [int(file.parent.name) for file in Path("/proc").glob("[0-9]*/stat") if parent(file) == leader.pid]

    wait_until(lambda: log.exists() and parts())
    (started,) = parts()
    leader.kill()
    leader.wait()
    wait_until(lambda: not runs(started))
    command = [sys.executable, "-c", KILLED, str(tmp_path), "doctor"]
    assert subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {log.name, "doctor.tar.gz", "doctor.txt"}


LEADER_IS_INIT = """
import os, subprocess, sys
from functools import partial
from bench.gpu.lifetime import end_with
child = subprocess.run([sys.executable, "-c", "print('ran')"], preexec_fn=partial(end_with, os.getpid()))
print(child.returncode, os.getpid())
"""
HANGS = """
import os, pathlib, time
def test_hangs():
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(600)
"""


def test_a_leader_may_be_the_first_process_of_a_container() -> None:
    """As where a container runs bench/gpu.sh and nothing else: its parts are then children of process 1."""
    command = ["unshare", "--fork", "--pid", "--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespace of processes")
    done = subprocess.run(
        [*command, sys.executable, "-c", LEADER_IS_INIT], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout == "ran\n0 1\n", done.stdout + done.stderr


def test_the_tests_under_the_sanitizer_end_with_it(tmp_path: Path) -> None:
    """The tool starts them, and neither ends them when it is killed nor passes on what it was started with."""
    tests, pid = tmp_path / "test_hangs.py", tmp_path / "pid"
    tests.write_text(HANGS)
    tool = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [
        sys.executable,
        "-c",
        tool,
        sys.executable,
        "-c",
        sanitizer._PYTEST,
        str(tests),
        "-p",
        "no:cacheprovider",
    ]
    leader = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until(lambda: pid.exists() and pid.read_text())
    started = int(pid.read_text())
    assert runs(started)
    leader.kill()
    leader.wait()
    wait_until(lambda: not runs(started))


def parent(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended meanwhile
        return None
