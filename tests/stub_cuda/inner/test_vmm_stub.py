"""The stub keeps the contract of vmm.h, so that what runs over it may run over CUDA."""

from __future__ import annotations

import ctypes

from stub_cuda import Stub
from tests.support.vmm_contract import POSIX_FD, Provider, VmmContract


class TestStub(VmmContract):
    """With the fixture `vmm` of conftest.py."""


def test_what_is_imported_cannot_be_exported(vmm: Provider, stub: Stub) -> None:
    """As on an H100 with driver 580; a descriptor that is to be handed on has to be duplicated."""
    descriptor = ctypes.c_int(-1)
    with vmm.memory(1, vmm.exportable) as one, vmm.exported(one) as first, vmm.imported(first) as again:
        assert vmm.cuMemExportToShareableHandle(ctypes.byref(descriptor), again, POSIX_FD, 0) != 0
    assert "made without such handles" in stub.violations()[-1]
    stub.forgive()
