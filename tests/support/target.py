"""The device that these tests run on: the host, or CUDA over the stub (tests/stub_cuda says so by VATTN_TEST_DEVICE).

The same tests hold on both; those about the host driver itself are marked `host_only`.
"""

from __future__ import annotations

import os

import pytest

from tests.support.effort import effort
from vattn import CacheStats, CallStats, _native, drivers

DEVICE = os.environ.get("VATTN_TEST_DEVICE", "cpu")
EXAMPLES = int(os.environ.get("VATTN_TEST_EXAMPLES", effort(25, 200)))  # runs of what is random
host_only = pytest.mark.skipif(DEVICE != "cpu", reason="about the host driver")

if DEVICE != "cpu":
    import stub_cuda

    stub_cuda.stand_in()


def table() -> dict[str, int]:
    """Addresses of the driver's calls."""
    return drivers.find(DEVICE).table()


def usage() -> tuple[int, ...]:
    """What the provider holds; a test that changes it has leaked."""
    if DEVICE == "cpu":
        held = _native.host_usage()
        return held.kernel_mappings, held.physical_bytes, held.handles, held.reservations
    return stub_cuda.Stub().usage().memory


def violations() -> list[str]:
    """Preconditions of CUDA's calls that were not kept."""
    return [] if DEVICE == "cpu" else stub_cuda.Stub().violations()


def memory_calls(stats: CacheStats) -> dict[str, CallStats]:
    """The driver's calls that manage memory, and not those that order streams."""
    return {name: calls for name, calls in stats.calls.items() if name.startswith("cuMem")}
