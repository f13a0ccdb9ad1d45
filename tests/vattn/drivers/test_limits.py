"""Limits that are none of vattn's: control groups, open files, address space. Each is an error that says which."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vattn
from tests.support import scripts, target
from tests.support.waiting import SECONDS
from vattn import _native
from vattn.drivers.failure import failure

pytestmark = target.host_only

SETUP = """
import os, resource, torch, vattn
from pathlib import Path
from vattn import _native

def make(tokens=32768, **options):
    options = {"memory_budget": "1GiB", **options}
    return vattn.init(num_layers=2, num_kv_heads=4, head_dim=128, dtype="float32", max_batch_size=4,
                      max_context_len=tokens, **options)

def refused(call, limit):
    try:
        call()
    except vattn.ProcessLimit as error:
        assert error.limit == limit, error
        print(error)
    else:
        raise AssertionError("it was not refused")

def address_space():
    return int(open("/proc/self/statm").read().split()[0]) * 4096
"""


def run(script: str, *prefix: str) -> str:
    if prefix:
        command = [*prefix, sys.executable, "-c", SETUP + script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    else:
        done = scripts.run(SETUP + script)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_out_of_file_descriptors() -> None:
    said = run("""
cache = make()
open_files = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 20, 4096))
taken = []
try:
    while True: taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError: pass
reqid = cache.alloc_reqid()
refused(lambda: cache.step({reqid: 1000}), "RLIMIT_NOFILE")
refused(lambda: make(memory_budget="auto"), "RLIMIT_NOFILE")
refused(lambda: cache.step({reqid: 1000}), "RLIMIT_NOFILE")
assert _native.host_usage().handles == 0
for file in taken: os.close(file)
cache.check()
cache.step({reqid: 1000})
cache.layer(1)[1][reqid, :1000] = 1
taken = []
try:
    while True: taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError: pass
refused(lambda: cache.step({reqid: 32000}), "RLIMIT_NOFILE")  # to look how much memory there is
for file in taken: os.close(file)
cache.check()
cache.step({reqid: 32000})
cache.check()
cache.close()
assert len(os.listdir("/proc/self/fd")) <= open_files + 1  # the host's memory
""")
    assert "ulimit -n" in said
    assert "files open" in said


def test_address_space_that_cannot_be_reserved() -> None:
    said = run("""
before = _native.host_usage().reservations
resource.setrlimit(resource.RLIMIT_AS, (address_space() + (256 << 20), resource.RLIM_INFINITY))
refused(lambda: make(1 << 20), "RLIMIT_AS")
assert _native.host_usage().reservations == before
cache = make(256)
cache.step({cache.alloc_reqid(): 256})
cache.check()
""")
    assert "ulimit -v" in said
    assert "max_context_len" in said


def test_a_step_takes_no_address_space() -> None:
    run("""
cache = make(page_size=2 << 20)
reqid = cache.alloc_reqid()
cache.step({reqid: 1})
resource.setrlimit(resource.RLIMIT_AS, (address_space(), resource.RLIM_INFINITY))
cache.step({reqid: 30000})
cache.check()
""")


def test_a_window_for_zeroing_takes_address_space() -> None:
    said = run("""
cache = make(zero_on_free=True)
reqid = cache.alloc_reqid()
cache.step({reqid: 30000})
cache.layer(1)[1][reqid, :30000] = 1
cache.free_reqid(reqid)
resource.setrlimit(resource.RLIMIT_AS, (address_space() + (64 << 20), resource.RLIM_INFINITY))
refused(cache.trim, "RLIMIT_AS")
cache.check()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
cache.trim()
reqid = cache.alloc_reqid()
cache.step({reqid: 30000})
assert not cache.layer(1)[1][reqid, :30000].any()
""")
    assert "ulimit -v" in said


def test_file_size() -> None:
    said = run("""
cache = make()
reqid = cache.alloc_reqid()
cache.step({reqid: 100})
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, resource.RLIM_INFINITY))
refused(lambda: cache.step({reqid: 30000}), "RLIMIT_FSIZE")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
cache.check()
cache.step({reqid: 30000})
""")
    assert "64.0 MiB" in said


def own_group() -> Path:
    """The file with the memory limit of this process's control group."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path(f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes")
    return Path(f"/sys/fs/cgroup{group}/memory.max")


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="needs a mount namespace of its own (root)",
)
def test_a_control_group_with_less_than_the_budget(tmp_path: Path) -> None:
    """The group's limit is another file, which only the process under test sees in its place."""
    limit = own_group()
    if not limit.exists():
        pytest.skip("this process is in no control group with a limit on memory")
    used = limit.with_name("memory.usage_in_bytes" if limit.name == "memory.limit_in_bytes" else "memory.current")
    shown = tmp_path / "limit"
    shown.touch()
    script = f"""
limit, used, shown = Path({str(limit)!r}), Path({str(used)!r}), Path({str(shown)!r})
"""
    # The limit is written when it is needed: what other processes of the group use changes.
    script += """
# Pages of files that nobody uses count as used, but are available.
stat = dict(line.split() for line in limit.with_name("memory.stat").read_text().splitlines())
cached = int(stat.get("total_inactive_file", stat["inactive_file"]))
shown.write_text(f"{int(used.read_text()) - cached + (1 << 30)}\\n")
available = _native.available_memory()
print(available.source, available.bytes)
cache = make(memory_budget="8GiB", tokens=1 << 20)
reqid = cache.alloc_reqid()
try:
    for tokens in range(2048, 1 << 20, 2048): cache.step({reqid: tokens})
except vattn.OutOfPages as error:
    print(error)
assert 64 << 20 < _native.host_usage().physical_bytes < 3 << 30
cache.check()
"""
    mount = f'mount --bind {shown} {limit} && exec "$@"'
    said = run(script, "unshare", "-m", "sh", "-c", mount, "sh")
    assert str(limit) in said.splitlines()[0]
    assert "the machine has no memory for another page" in said
    assert f"({limit}) available" in said


def test_which_limit_and_what_to_do() -> None:
    def error(call: str, code: int, name: str) -> vattn.DriverError:
        return failure(call, code, name)

    base = _native.HOST_ERRNO
    for code, name, limit, remedy in (
        (base + 24, "EMFILE", "RLIMIT_NOFILE", "ulimit -n"),
        (base + 23, "ENFILE", "fs.file-max", "sysctl"),
        (base + 27, "EFBIG", "RLIMIT_FSIZE", "ulimit -f"),
        (base + 12, "ENOMEM", "address space", "max_context_len"),
        (base + 11, "EAGAIN", "RLIMIT_NPROC", "ulimit -u"),
    ):
        found = error("cuMemCreate", code, name)
        assert isinstance(found, vattn.ProcessLimit), name
        assert (found.limit, found.code, found.call) == (limit, code, "cuMemCreate")
        assert remedy in str(found)
    assert type(error("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY")) is vattn.DriverError
    assert type(error("cuMemMap", 999, "CUDA_ERROR_UNKNOWN")) is vattn.DriverError
    assert isinstance(error("cuMemAddressReserve", 2, "CUDA_ERROR_OUT_OF_MEMORY"), vattn.ProcessLimit)
