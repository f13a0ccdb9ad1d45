"""The numbers of workers that other processes read."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vattn_vllm.gauge import Usage, _address, _total
from vllm.v1.engine.utils import _apply_dp_identity_suffix

WORKER = """
import sys
from types import SimpleNamespace
from vattn_vllm.gauge import Usage
config = SimpleNamespace(instance_id=sys.argv[1], parallel_config=SimpleNamespace(data_parallel_index=0))
usage = Usage(config, 1)
usage.set(SimpleNamespace(mapped_bytes=30, reserved_bytes=40))
print(flush=True)
sys.stdin.read()
"""


# As one of several API servers has it; the directory has to be named before prometheus_client is loaded.
API_SERVER = """
import sys, time
from types import SimpleNamespace
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vattn_vllm.gauge import Gauges
parallel = SimpleNamespace(data_parallel_index=0, world_size=1)
model = SimpleNamespace(served_model_name="m")
Gauges(SimpleNamespace(instance_id=sys.argv[1], parallel_config=parallel, model_config=model))
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
while "vattn:kv_mapped_bytes{" not in (text := generate_latest(registry).decode()):
    time.sleep(0.05)
print(text)
"""


def config(name: str) -> Any:
    parallel = SimpleNamespace(data_parallel_index=0)
    return SimpleNamespace(instance_id=name, parallel_config=parallel, kv_transfer_config=None)


def stats(mapped: int, reserved: int) -> Any:
    return SimpleNamespace(mapped_bytes=mapped, reserved_bytes=reserved)


def test_workers_of_other_processes_count_until_they_are_killed() -> None:
    name = f"test-{id(object())}-killed"
    addresses = [_address(config(name), 0, rank) for rank in range(2)]
    assert _total(addresses, 0) == 0
    usage = Usage(config(name), 0)
    usage.set(stats(1, 2))
    other = subprocess.Popen([sys.executable, "-c", WORKER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    assert [_total(addresses, position) for position in range(2)] == [31, 42]
    usage.set(stats(5, 6))
    assert [_total(addresses, position) for position in range(2)] == [35, 46]
    other.kill()
    other.wait()
    assert [_total(addresses, position) for position in range(2)] == [5, 6]
    bound = Path("/proc/net/unix").read_text()
    assert [address.replace("\0", "@") in bound for address in addresses] == [True, False]


def test_several_api_servers_show_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives each an instance of its own."""
    (folder := tmp_path / ("of a long name" * 8)).mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    usage = Usage(config("engine"), 0)
    usage.set(stats(12345, 67890))
    for server in ("first", "second"):
        command = [sys.executable, "-c", API_SERVER, server]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert 'vattn:kv_mapped_bytes{engine="0",model_name="m"} 12345.0' in done.stdout, done.stderr


def test_a_worker_that_is_dropped_takes_its_thread_along() -> None:
    name = f"test-{id(object())}-dropped"
    threads = set(threading.enumerate())
    usage = Usage(config(name), 0)
    (thread,) = set(threading.enumerate()) - threads
    del usage
    thread.join(timeout=60)
    assert not thread.is_alive()
    Usage(config(name), 0).set(stats(7, 8))  # the address is free again


def test_an_address_that_is_taken_costs_the_gauge_and_no_more() -> None:
    name = f"test-{id(object())}-taken"
    first, second = Usage(config(name), 0), Usage(config(name), 0)
    first.set(stats(1, 1))
    second.set(stats(2, 2))
    assert _total([_address(config(name), 0, 0)], 0) == 1


def test_engines_that_ray_runs() -> None:
    """vLLM gives each an instance of its own, which other processes are not told."""
    other = config(name := f"test-{id(object())}-ray")
    other.parallel_config.data_parallel_index = 12
    _apply_dp_identity_suffix(other, 12)
    assert other.instance_id != name
    usage = Usage(other, 0)
    usage.set(stats(7, 8))
    assert _total([_address(config(name), 12, 0)], 0) == 7
    assert _total([_address(config(name), 2, 0)], 0) == 0
