"""Every test must leave the provider as it found it: no handle, no memory, no reservation lost."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.support import cpu_kernels, target


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = target.usage()
    yield
    gc.collect()
    # Less is what tests of other folders had left to the collector.
    assert all(now <= then for now, then in zip(target.usage(), before, strict=True)), (target.usage(), before)
    assert not target.violations()


@pytest.fixture(scope="module", params=cpu_kernels.KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the kernels for CPUs in turn."""
    with cpu_kernels.asking_for(request.param):
        yield request.param
