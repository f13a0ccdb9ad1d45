"""Every test must leave the host provider as it found it: no handle, no memory, no reservation lost."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from vattn import _native


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    gc.collect()
    before = _usage()
    yield
    gc.collect()
    assert _usage() == before


def _usage() -> tuple[int, int, int, int]:
    usage = _native.host_usage()
    return usage.kernel_mappings, usage.physical_bytes, usage.handles, usage.reservations
