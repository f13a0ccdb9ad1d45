"""The host provider keeps the contract of vmm.h, with pages of every size."""

from __future__ import annotations

import contextlib
import ctypes
import os

import pytest

from tests.support import forks
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

    def test_a_descriptor_that_was_opened_read_only_maps_nothing_for_writing(self, vmm: Provider) -> None:
        """So that a process that is given one cannot change what others read, by whatever mistake."""
        with vmm.reservation(2) as base, vmm.memory(1, vmm.exportable) as handle, vmm.exported(handle) as descriptor:
            read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
            with vmm.mapping(base, handle), vmm.imported(read_only) as reader:
                os.close(read_only)
                vmm.poke(base, 7)
                there = base + vmm.page
                with vmm.mapping(there, reader, access=1):
                    assert vmm.peek(there) == 7
                    assert vmm.cuMemSetAccess(there, vmm.page, vmm.descriptor(3), 1) != 0
                    assert (vmm.access(there), vmm.peek(there)) == (1, 7)

    def test_a_child_keeps_no_descriptor_of_exportable_memory(self, vmm: Provider) -> None:
        with vmm.memory(1, vmm.exportable) as handle:
            with vmm.exported(handle) as descriptor:
                inode = os.fstat(descriptor).st_ino
            assert inode in _open_files()
            assert forks.status(lambda: inode in _open_files()) == 0


def _open_files() -> set[int]:
    """Inodes of all files that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor
            found.add(os.fstat(int(name)).st_ino)
    return found


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
