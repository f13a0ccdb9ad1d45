"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import zlib

import pytest
import torch

from tests.support.backends import CACHING_KVS, GROWING_KVS, KVS, MAIN_GROWING_KVS, MAIN_KVS
from tests.support.effort import LONG
from vattn.cores import cores

collect_ignore = ["browser", "clients"]  # each needs what `make dashboard-test` and `make clients` install

# Every engine checks its books whenever it becomes idle, those of servers in other processes too.
os.environ["VATTN_CHECK"] = "1"

# Nothing asks the network, and a proxy of the environment cannot reach servers on this machine.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"

# The models are tiny: a second thread costs more than it brings, above all on a machine that others use.
torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_auto_num_workers() -> int:
    """With `-n auto` a process per core, and one more for the time in which tests wait for processes of their own."""
    return cores() + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The slowest tests first: one that starts last keeps a worker busy after the others are done. Long ones if asked
    for.
    """
    if not LONG:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    items.sort(key=_seconds, reverse=True)


def _seconds(item: pytest.Item) -> float:
    """What a test takes, as its mark says."""
    slow = item.get_closest_marker("slow")
    return 0 if slow is None else slow.args[0] if slow.args else 2


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """The objects of torch, transformers and pytest are nearly all that a collection looks at; they stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers in every run and every order, and each test others."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=KVS)
def kv(request: pytest.FixtureRequest) -> str:
    """Every test that takes this runs over every backend."""
    backend: str = request.param
    return backend


@pytest.fixture(params=MAIN_KVS)
def main_kv(request: pytest.FixtureRequest) -> str:
    """For what hardly depends on the backend and takes long: two backends, and all of them in a long run."""
    backend: str = request.param
    return backend


@pytest.fixture(params=GROWING_KVS)
def growing_kv(request: pytest.FixtureRequest) -> str:
    """The backends in which a request that has a slot can still lack memory."""
    backend: str = request.param
    return backend


@pytest.fixture(params=MAIN_GROWING_KVS)
def main_growing_kv(request: pytest.FixtureRequest) -> str:
    """Of these, as `main_kv`."""
    backend: str = request.param
    return backend


@pytest.fixture(params=[kv for kv in KVS if kv != "dynamic"])
def whole_kv(request: pytest.FixtureRequest) -> str:
    """The backends that can show a kernel the whole of a layer."""
    backend: str = request.param
    return backend


@pytest.fixture(params=CACHING_KVS)
def caching_kv(request: pytest.FixtureRequest) -> str:
    """The backends that keep prefixes for later requests."""
    backend: str = request.param
    return backend
