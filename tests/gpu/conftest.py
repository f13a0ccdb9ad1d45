"""What needs a GPU. Without one these tests are skipped, and say what is missing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu import flash_attn_2, flash_attn_3
from tests.support.vmm_contract import Provider
from vattn import VattnError, drivers
from vattn.drivers.cuda import CudaDevice, call


def missing() -> str | None:
    try:
        drivers.find("cuda")
    except VattnError as error:
        return str(error)
    return None


# The kernels' tests run with them too, if bench/gpu/build_fa2.sh and fetch_fa3.sh have got them.
if missing() is None:
    flash_attn_2.provide()
    flash_attn_3.provide()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:  # what another version of torch warns of is no failure
        item.add_marker(pytest.mark.filterwarnings("default"))
    if here and (reason := missing()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def vmm() -> Iterator[Provider]:
    """The driver's own table, with its context current as torch has it, or for the test."""
    from cuda.bindings import driver

    device = drivers.find("cuda")
    assert isinstance(device, CudaDevice)

    def peek(address: int) -> int:
        word = ctypes.c_uint64()
        call(driver.cuMemcpyDtoH, ctypes.addressof(word), address, 8)
        return word.value

    def poke(address: int, value: int) -> None:
        word = ctypes.c_uint64(value)
        call(driver.cuMemcpyHtoD, address, ctypes.addressof(word), 8)

    provider = Provider(
        device.table(),
        device._prop,
        device.granularity,
        context=int(device._context),
        peek=peek,
        poke=poke,
        unmaps_ranges=False,
        checks_everything=False,
    )
    before = ctypes.c_void_p()
    assert provider.cuCtxGetCurrent(before) == 0
    assert provider.cuCtxSetCurrent(provider.context) == 0
    yield provider
    assert provider.cuCtxSetCurrent(before) == 0
