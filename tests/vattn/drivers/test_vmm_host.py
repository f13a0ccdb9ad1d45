"""The host provider keeps the contract of vmm.h, with pages of every size."""

from __future__ import annotations

import ctypes
import os

import pytest

from tests.support.vmm_contract import Provider, VmmContract
from vattn import _native


class TestHost(VmmContract):
    @pytest.fixture(params=[2**12, 2**16, 2**21])
    def vmm(self, request: pytest.FixtureRequest) -> Provider:
        return Provider(_native.host_table(), _native.host_prop(request.param), request.param)

    @pytest.mark.parametrize("strict", [False, True])
    def test_reads_past_what_is_mapped_never_fault_unless_that_is_asked_for(self, vmm: Provider, strict: bool) -> None:
        """Not between the calls of a mapping either: the worker maps while kernels read rows that they do not use."""
        base = ctypes.c_uint64()
        flags = _native.HOST_RESERVE_STRICT if strict else 0
        assert vmm.cuMemAddressReserve(base, vmm.page, vmm.page, 0, flags) == 0
        with vmm.memory() as handle:
            seen = [_readable(base.value)]
            with vmm.mapping(base.value, handle, access=None):
                seen.append(_readable(base.value))
                assert vmm.cuMemSetAccess(base.value, vmm.page, vmm.descriptor(3), 1) == 0
                assert _readable(base.value)
            seen.append(_readable(base.value))
        assert seen == [not strict] * 3
        assert vmm.cuMemAddressFree(base.value, vmm.page) == 0


def _readable(address: int) -> bool:
    """Whether a read there does not fault: the kernel is asked to, which says so."""
    read, write = os.pipe()
    try:
        return os.write(write, (ctypes.c_char * 8).from_address(address)) == 8
    except OSError:
        return False
    finally:
        os.close(read)
        os.close(write)
