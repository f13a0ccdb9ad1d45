"""The contract of csrc/vmm.h, held against a provider's table of addresses, whoever the provider is.

A test module makes a subclass of `VmmContract` with a fixture `vmm`. Where CUDA's documentation leaves open what
happens, nothing is tried on a real driver (`Provider.checks_everything` is false): a size of zero, flags that "must be
zero", addresses that nobody reserved, an unmap of nothing or past a mapping's end.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from stub_cuda.signatures import SIGNATURES

OUT_OF_MEMORY = 2
READ_WRITE = 3
POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
PER_THREAD = 2  # CU_STREAM_PER_THREAD

_u64, _uint, _pointer = ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p


def host_peek(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def host_poke(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


@dataclass
class Provider:
    """A provider's table, as functions, with what its calls need.

    Attributes:
        table: addresses of its calls by CUDA's names.
        prop: a CUmemAllocationProp of its memory.
        page: the granularity.
        context: its context, or None.
        peek, poke: read and write a word of mapped memory.
        unmaps_ranges: one unmap may take several neighbouring mappings.
        checks_everything: every precondition in vmm.h is checked, also those whose breach CUDA leaves undefined.
    """

    table: dict[str, int]
    prop: bytes
    page: int
    context: int | None = None
    peek: Callable[[int], int] = host_peek
    poke: Callable[[int, int], None] = host_poke
    unmaps_ranges: bool = True
    checks_everything: bool = True
    _functions: dict[str, Any] = field(default_factory=dict)

    @property
    def exportable(self) -> bytes:
        """`prop` of memory that can be exported as a file descriptor."""
        return self.prop[:4] + POSIX_FD.to_bytes(4, "little") + self.prop[8:]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        if name not in self._functions:
            self._functions[name] = ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name])(self.table[name])
        return self._functions[name]

    @property
    def location(self) -> bytes:
        return self.prop[8:16]

    def descriptor(self, access: int) -> bytes:
        return self.location + access.to_bytes(4, "little")

    @contextmanager
    def reservation(self, pages: int) -> Iterator[int]:
        address = _u64()
        assert self.cuMemAddressReserve(address, pages * self.page, self.page, 0, 0) == 0
        try:
            yield address.value
        finally:
            assert self.cuMemAddressFree(address.value, pages * self.page) == 0

    @contextmanager
    def memory(self, pages: int = 1, prop: bytes | None = None) -> Iterator[int]:
        handle = _u64()
        assert self.cuMemCreate(handle, pages * self.page, prop or self.prop, 0) == 0
        try:
            yield handle.value
        finally:
            assert self.cuMemRelease(handle.value) == 0

    @contextmanager
    def mapping(self, address: int, handle: int, pages: int = 1, access: int | None = READ_WRITE) -> Iterator[int]:
        assert self.cuMemMap(address, pages * self.page, 0, handle, 0) == 0
        try:
            if access is not None:
                assert self.cuMemSetAccess(address, pages * self.page, self.descriptor(access), 1) == 0
            yield address
        finally:
            assert self.cuMemUnmap(address, pages * self.page) == 0

    @contextmanager
    def exported(self, handle: int) -> Iterator[int]:
        descriptor = ctypes.c_int(-1)
        assert self.cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, POSIX_FD, 0) == 0
        try:
            yield descriptor.value
        finally:
            os.close(descriptor.value)

    @contextmanager
    def imported(self, descriptor: int) -> Iterator[int]:
        handle = _u64()
        assert self.cuMemImportFromShareableHandle(handle, descriptor, POSIX_FD) == 0
        try:
            yield handle.value
        finally:
            assert self.cuMemRelease(handle.value) == 0

    def access(self, address: int) -> int | None:
        flags = _u64()
        return flags.value if self.cuMemGetAccess(flags, self.location, address) == 0 else None

    def is_mapped(self, address: int) -> bool:
        handle = _u64()
        if self.cuMemRetainAllocationHandle(handle, address) != 0:
            return False
        assert self.cuMemRelease(handle.value) == 0
        return True


class VmmContract:
    """Subclasses give the fixture `vmm`: a Provider whose context is current."""

    def test_the_table_is_what_the_mechanism_asks_for(self, vmm: Provider) -> None:
        from vattn import _native

        assert set(vmm.table) == set(_native.table_names()) == set(SIGNATURES)
        assert all(vmm.table.values())
        assert len(vmm.prop) == 32

    @pytest.mark.parametrize("pages", [1, 2, 4, 16])
    def test_reserve_aligns(self, vmm: Provider, pages: int) -> None:
        address = _u64()
        assert vmm.cuMemAddressReserve(address, 3 * vmm.page, pages * vmm.page, 0, 0) == 0
        assert address.value % (pages * vmm.page) == 0
        assert not vmm.is_mapped(address.value)
        assert vmm.cuMemAddressFree(address.value, 3 * vmm.page) == 0

    def test_reserve_many_tebibytes(self, vmm: Provider) -> None:
        pages = 2**43 // vmm.page
        with vmm.reservation(pages) as address, vmm.memory() as handle:
            last = address + (pages - 1) * vmm.page
            with vmm.mapping(last, handle):
                vmm.poke(last, 7)
                assert vmm.peek(last) == 7

    def test_reserve_refuses(self, vmm: Provider) -> None:
        address = _u64()
        refused = [(vmm.page + 1, 0, 0), (vmm.page, 3 * vmm.page, 0)]
        if vmm.checks_everything:
            refused += [(0, 0, 0), (vmm.page, 0, 64)]
        for size, alignment, flags in refused:
            assert vmm.cuMemAddressReserve(address, size, alignment, 0, flags) != 0, (size, alignment, flags)

    def test_free_takes_exactly_one_reservation(self, vmm: Provider) -> None:
        with vmm.reservation(4) as address:
            assert vmm.cuMemAddressFree(address, 3 * vmm.page) != 0
            assert vmm.cuMemAddressFree(address + vmm.page, 3 * vmm.page) != 0

    def test_free_refuses_while_something_is_mapped(self, vmm: Provider) -> None:
        if not vmm.checks_everything:
            pytest.skip("not documented")
        with vmm.reservation(2) as address, vmm.memory() as handle, vmm.mapping(address + vmm.page, handle):
            assert vmm.cuMemAddressFree(address, 2 * vmm.page) != 0

    def test_create_refuses(self, vmm: Provider) -> None:
        handle = _u64()
        refused = [(vmm.page - 1, 0), (vmm.page // 2, 0)]
        if vmm.checks_everything:
            refused += [(0, 0), (vmm.page, 1)]
        for size, flags in refused:
            assert vmm.cuMemCreate(handle, size, vmm.prop, flags) != 0, (size, flags)

    @pytest.mark.parametrize("size", [2**44, 2**62])
    def test_create_says_when_memory_is_exhausted(self, vmm: Provider, size: int) -> None:
        """The smaller one fits any address space, so that nothing but a provider's foresight refuses it in time."""
        handle = _u64()
        result = vmm.cuMemCreate(handle, size, vmm.prop, 0)
        assert result == OUT_OF_MEMORY or (result != 0 and not vmm.checks_everything)

    def test_map_refuses(self, vmm: Provider) -> None:
        page = vmm.page
        with vmm.reservation(4) as base, vmm.memory() as one, vmm.memory(2) as two:
            refused = [
                (base + page // 2, page, 0, one, 0),  # alignment of the address
                (base, page // 2, 0, one, 0),  # alignment of the size
                (base, 2 * page, 0, one, 0),  # more than there is
                (base, page, page, one, 0),  # past what there is
            ]
            if vmm.checks_everything:
                refused += [
                    (base, 0, 0, one, 0),
                    (base, page, 0, one, 64),  # flags
                    (base + 4 * page, page, 0, one, 0),  # outside, where another reservation may be
                    (base + 3 * page, 2 * page, 0, two, 0),  # reaches outside
                ]
            for address, size, offset, handle, flags in refused:
                assert vmm.cuMemMap(address, size, offset, handle, flags) != 0, (address - base, size, offset, flags)
            with vmm.mapping(base + page, one):
                assert vmm.cuMemMap(base + page, page, 0, one, 0) != 0
                assert vmm.cuMemMap(base, 2 * page, 0, two, 0) != 0  # its end is taken
                assert vmm.cuMemMap(base + page, 2 * page, 0, two, 0) != 0  # its start is taken
            assert not any(vmm.is_mapped(base + i * page) for i in range(4))

    def test_handles_that_are_gone_are_refused(self, vmm: Provider) -> None:
        if not vmm.checks_everything:
            pytest.skip("undefined, as CUDA's documentation has it")
        handle = _u64()
        assert vmm.cuMemCreate(handle, vmm.page, vmm.prop, 0) == 0
        assert vmm.cuMemRelease(handle.value) == 0
        assert vmm.cuMemRelease(handle.value) != 0
        with vmm.reservation(1) as base:
            assert vmm.cuMemMap(base, vmm.page, 0, handle.value, 0) != 0

    def test_a_mapping_has_no_access_until_it_is_set(self, vmm: Provider) -> None:
        with vmm.reservation(2) as base, vmm.memory() as handle, vmm.mapping(base, handle, access=None):
            assert vmm.access(base) == 0
            assert vmm.cuMemSetAccess(base, vmm.page, vmm.descriptor(READ_WRITE), 1) == 0
            assert vmm.access(base) == vmm.access(base + vmm.page - 8) == READ_WRITE

    def test_access_is_set_once_for_neighbours(self, vmm: Provider) -> None:
        with vmm.reservation(4) as base, ExitStack() as stack:
            for i in range(3):
                handle = stack.enter_context(vmm.memory())
                stack.enter_context(vmm.mapping(base + i * vmm.page, handle, access=None))
            assert vmm.cuMemSetAccess(base, 3 * vmm.page, vmm.descriptor(READ_WRITE), 1) == 0
            for i in range(3):
                vmm.poke(base + i * vmm.page, i + 1)
            assert [vmm.peek(base + i * vmm.page) for i in range(3)] == [1, 2, 3]

    def test_set_access_refuses_what_is_not_mapped(self, vmm: Provider) -> None:
        page, desc = vmm.page, vmm.descriptor(READ_WRITE)
        with vmm.reservation(4) as base, vmm.memory() as one, vmm.memory() as two:
            assert vmm.cuMemSetAccess(base, page, desc, 1) != 0
            with vmm.mapping(base, one), vmm.mapping(base + 2 * page, two):
                if vmm.checks_everything:  # CUDA's driver 580 sets that of what is mapped on both sides
                    assert vmm.cuMemSetAccess(base, 3 * page, desc, 1) != 0  # a gap
                assert vmm.cuMemSetAccess(base + 2 * page, 2 * page, desc, 1) != 0  # past the end

    def test_read_only_where_the_provider_can(self, vmm: Provider) -> None:
        with vmm.reservation(1) as base, vmm.memory() as handle, vmm.mapping(base, handle):
            vmm.poke(base, 5)
            result = vmm.cuMemSetAccess(base, vmm.page, vmm.descriptor(1), 1)
            if result != 0 and not vmm.checks_everything:
                pytest.skip(f"read-only access is refused with {result}")
            assert result == 0
            assert (vmm.access(base), vmm.peek(base)) == (1, 5)

    def test_unmap_takes_whole_mappings(self, vmm: Provider) -> None:
        page = vmm.page
        with vmm.reservation(4) as base, vmm.memory(2) as two:
            if vmm.checks_everything:
                assert vmm.cuMemUnmap(base, page) != 0
            with vmm.mapping(base, two, pages=2):
                # "cuMemUnmap cannot unmap a sub-range of an address range mapped by cuMemCreate / cuMemMap"
                assert vmm.cuMemUnmap(base, page) != 0
                assert vmm.cuMemUnmap(base + page, page) != 0
                if vmm.checks_everything:
                    assert vmm.cuMemUnmap(base, 3 * page) != 0
                assert vmm.access(base) == vmm.access(base + page) == READ_WRITE
            assert not vmm.is_mapped(base)

    def test_unmap_of_neighbours(self, vmm: Provider) -> None:
        """Whether one call takes several is the provider's; `Driver(unmap_ranges=...)` has to say the same."""
        if not vmm.checks_everything:
            pytest.skip("probed in tests/gpu")
        with vmm.reservation(2) as base, vmm.memory() as one, vmm.memory() as two:
            for address, handle in ((base, one), (base + vmm.page, two)):
                assert vmm.cuMemMap(address, vmm.page, 0, handle, 0) == 0
            assert (vmm.cuMemUnmap(base, 2 * vmm.page) == 0) == vmm.unmaps_ranges
            if not vmm.unmaps_ranges:
                assert vmm.cuMemUnmap(base, vmm.page) == vmm.cuMemUnmap(base + vmm.page, vmm.page) == 0

    def test_an_address_can_be_mapped_again(self, vmm: Provider) -> None:
        with vmm.reservation(1) as base, vmm.memory() as one, vmm.memory() as two:
            for value, handle in enumerate((one, two), start=1):
                with vmm.mapping(base, handle):
                    vmm.poke(base, value)
            for value, handle in ((2, two), (1, one)):
                with vmm.mapping(base, handle):
                    assert vmm.peek(base) == value

    def test_the_same_memory_at_several_addresses(self, vmm: Provider) -> None:
        with vmm.reservation(4) as base, vmm.memory() as handle, ExitStack() as stack:
            places = [stack.enter_context(vmm.mapping(base + i * vmm.page, handle)) for i in (0, 1, 3)]
            for value, (written, read) in enumerate(itertools.permutations(places, 2)):
                vmm.poke(written, value)
                assert vmm.peek(read) == value

    def test_memory_outlives_its_handle_while_it_is_mapped(self, vmm: Provider) -> None:
        handle = _u64()
        assert vmm.cuMemCreate(handle, vmm.page, vmm.prop, 0) == 0
        with vmm.reservation(1) as base, vmm.mapping(base, handle.value):
            vmm.poke(base, 9)
            assert vmm.cuMemRelease(handle.value) == 0
            assert vmm.peek(base) == 9

    def test_the_handle_of_an_address(self, vmm: Provider) -> None:
        found = _u64()
        with vmm.reservation(2) as base, vmm.memory() as handle, vmm.mapping(base, handle):
            for address in (base, base + vmm.page - 1):
                assert vmm.cuMemRetainAllocationHandle(found, address) == 0
                assert found.value == handle
                assert vmm.cuMemRelease(found.value) == 0
            assert vmm.cuMemRetainAllocationHandle(found, base + vmm.page) != 0

    @pytest.mark.parametrize("pages", [1, 3])
    def test_exported_memory_is_the_same_wherever_it_is_imported(self, vmm: Provider, pages: int) -> None:
        last = (pages - 1) * vmm.page
        with vmm.reservation(2 * pages) as base, vmm.memory(pages, vmm.exportable) as handle:
            there = base + pages * vmm.page
            with vmm.exported(handle) as descriptor, vmm.imported(descriptor) as other:
                assert other != handle or not vmm.checks_everything  # CUDA promises neither
                with vmm.mapping(base, handle, pages), vmm.mapping(there, other, pages):
                    vmm.poke(base + last, 7)
                    assert vmm.peek(there + last) == 7
                    vmm.poke(there, 9)
                    assert vmm.peek(base) == 9

    def test_a_descriptor_keeps_memory(self, vmm: Provider) -> None:
        """Neither the handle nor a mapping is left meanwhile; what was imported outlives the descriptor likewise."""
        with vmm.reservation(1) as base:
            with vmm.memory(1, vmm.exportable) as handle:
                with vmm.mapping(base, handle):
                    vmm.poke(base, 11)
                keeping = vmm.exported(handle)
                descriptor = keeping.__enter__()
            again = vmm.imported(descriptor)
            handle = again.__enter__()
            keeping.__exit__(None, None, None)
            with vmm.mapping(base, handle):
                assert vmm.peek(base) == 11
            again.__exit__(None, None, None)

    def test_export_refuses(self, vmm: Provider) -> None:
        descriptor = ctypes.c_int(-1)
        with vmm.memory() as plain:
            assert vmm.cuMemExportToShareableHandle(ctypes.byref(descriptor), plain, POSIX_FD, 0) != 0
        with vmm.memory(1, vmm.exportable) as handle:
            if vmm.checks_everything:
                assert vmm.cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, POSIX_FD, 1) != 0
                assert vmm.cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, 2, 0) != 0
        if vmm.checks_everything:
            assert vmm.cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, POSIX_FD, 0) != 0  # it is gone
        assert descriptor.value == -1

    def test_import_refuses(self, vmm: Provider) -> None:
        if not vmm.checks_everything:
            pytest.skip("CUDA's documentation does not say what happens")
        handle, (reading, writing) = _u64(), os.pipe()
        unsealed = os.memfd_create("unsealed")
        os.truncate(unsealed, vmm.page)
        try:
            for descriptor in (reading, writing, unsealed, 2**31 - 1, 2**40):
                assert vmm.cuMemImportFromShareableHandle(handle, descriptor, POSIX_FD) != 0
            with vmm.memory(1, vmm.exportable) as exportable, vmm.exported(exportable) as descriptor:
                assert vmm.cuMemImportFromShareableHandle(handle, descriptor, 2) != 0
        finally:
            for descriptor in (reading, writing, unsealed):
                os.close(descriptor)
        assert handle.value == 0

    def test_memset_on_the_threads_own_stream(self, vmm: Provider) -> None:
        page, event = vmm.page, _pointer()
        assert vmm.cuEventCreate(event, 3) == 0
        with vmm.reservation(5) as base, ExitStack() as stack:
            for i in range(4):
                stack.enter_context(vmm.mapping(base + i * page, stack.enter_context(vmm.memory())))
                for word in (0, page - 8):
                    vmm.poke(base + i * page + word, i + 1)
            assert vmm.cuMemsetD8Async(base + page, 0, 2 * page, PER_THREAD) == 0
            assert vmm.cuEventRecord(event, PER_THREAD) == 0
            assert vmm.cuEventSynchronize(event) == 0
            assert [vmm.peek(base + i * page) for i in range(4)] == [1, 0, 0, 4]
            assert [vmm.peek(base + i * page + page - 8) for i in range(4)] == [1, 0, 0, 4]
            if vmm.checks_everything:
                assert vmm.cuMemsetD8Async(base + 3 * page, 0, 2 * page, PER_THREAD) != 0  # past what is mapped
                assert vmm.cuMemsetD8Async(base + 4 * page, 0, page, PER_THREAD) != 0
                assert vmm.cuMemSetAccess(base, page, vmm.descriptor(1), 1) == 0
                assert vmm.cuMemsetD8Async(base, 0, page, PER_THREAD) != 0  # read-only
                assert (vmm.peek(base), vmm.peek(base + 3 * page)) == (1, 4)
        assert vmm.cuEventDestroy(event) == 0

    def test_events_without_work_are_complete(self, vmm: Provider) -> None:
        event = _pointer()
        assert vmm.cuEventCreate(event, 3) == 0
        assert vmm.cuEventQuery(event) == 0
        for _ in range(3):
            assert vmm.cuEventRecord(event, None) == 0
            assert vmm.cuEventSynchronize(event) == 0
            assert vmm.cuEventQuery(event) == 0
        assert vmm.cuEventDestroy(event) == 0
        assert vmm.cuCtxSynchronize() == 0

    def test_a_stream_that_does_not_capture(self, vmm: Provider) -> None:
        status = _uint(7)
        assert vmm.cuStreamIsCapturing(None, status) == 0
        assert status.value == 0

    def test_threads_have_contexts_and_capture_modes_of_their_own(self, vmm: Provider) -> None:
        problems: list[str] = []

        def thread() -> None:
            current, mode = _pointer(1), _uint(2)
            if vmm.cuCtxGetCurrent(current) != 0 or current.value is not None:
                problems.append("a new thread has a context")
            if vmm.cuCtxSetCurrent(vmm.context) != 0 or vmm.cuCtxGetCurrent(current) != 0:
                problems.append("the context cannot be set")
            if current.value != vmm.context:
                problems.append("another context is current")
            for expected in (0, 2):
                if vmm.cuThreadExchangeStreamCaptureMode(mode) != 0 or mode.value != expected:
                    problems.append("the modes are not exchanged")
            with vmm.reservation(1) as base, vmm.memory() as handle, vmm.mapping(base, handle):
                pass
            if vmm.cuCtxSetCurrent(None) != 0 or vmm.cuCtxGetCurrent(current) != 0 or current.value is not None:
                problems.append("the context cannot be taken away")

        worker = threading.Thread(target=thread)
        worker.start()
        worker.join()
        assert not problems

    def test_results_have_names(self, vmm: Provider) -> None:
        name = ctypes.c_char_p()
        for code, expected in ((0, b"CUDA_SUCCESS"), (2, b"CUDA_ERROR_OUT_OF_MEMORY"), (999, b"CUDA_ERROR_UNKNOWN")):
            assert vmm.cuGetErrorName(code, name) == 0
            assert name.value == expected
        assert vmm.cuGetErrorName(123_456, name) != 0
        assert name.value is None
