"""Every test has the stub to itself: no fault left over, no precondition broken, nothing leaked."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import stub_cuda
from tests.support.vmm_contract import Provider
from vattn import drivers
from vattn.drivers.cuda import CudaDevice

stub_cuda.stand_in()
gc.freeze()  # torch's objects are nearly all that a collection looks at


@pytest.fixture
def stub() -> Iterator[stub_cuda.Stub]:
    control = stub_cuda.Stub()
    gc.collect()
    before = control.usage().memory
    yield control
    violations = control.violations()
    control.reset()
    gc.collect()
    assert violations == []
    assert control.usage().memory == before


@pytest.fixture
def vmm(stub: stub_cuda.Stub) -> Iterator[Provider]:
    """The cuda driver's table, with its context current. Violations are forgiven: tests of a contract break it."""
    device = drivers.find("cuda")
    assert isinstance(device, CudaDevice)
    provider = Provider(
        device.table(), device._prop, device.granularity, context=int(device._context), unmaps_ranges=False
    )
    assert provider.cuCtxSetCurrent(provider.context) == 0
    yield provider
    assert provider.cuCtxSetCurrent(None) == 0
    stub.forgive()
