"""What CUDA's documentation forbids, the stub refuses, and says so. docs/cuda.md lists these tests."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
from stub import Stub
from vmm_contract import READ_WRITE, Provider

HANDLE, INVALID, NO_CONTEXT = 400, 1, 201


def refused(stub: Stub, result: int, code: int, *words: str) -> None:
    assert result == code
    violation = stub.violations()[-1]
    for word in words:
        assert word in violation


@pytest.mark.parametrize(
    ("size", "alignment", "flags", "says"),
    [
        (2**21 + 100, 0, 0, "multiple of the host page size"),
        (0, 0, 0, "multiple of the host page size"),
        (2**21, 3 * 2**21, 0, "power of two or zero"),
        (2**21, 0, 1, "flags must be zero"),
    ],
)
def test_reserve(stub: Stub, vmm: Provider, size: int, alignment: int, flags: int, says: str) -> None:
    result = vmm.cuMemAddressReserve(ctypes.c_uint64(), size, alignment, 0, flags)
    refused(stub, result, INVALID, "cuMemAddressReserve", says)


def test_free_other_than_reserved(stub: Stub, vmm: Provider) -> None:
    with vmm.reservation(2) as base:
        refused(stub, vmm.cuMemAddressFree(base, vmm.page), INVALID, "not exactly what")
        refused(stub, vmm.cuMemAddressFree(base + vmm.page, vmm.page), INVALID, "not exactly what")


def test_free_with_mappings_left(stub: Stub, vmm: Provider) -> None:
    with vmm.reservation(1) as base, vmm.memory() as handle, vmm.mapping(base, handle):
        refused(stub, vmm.cuMemAddressFree(base, vmm.page), INVALID, "something is mapped")


@pytest.mark.parametrize("size", [2**20, 2**21 + 4096, 0])
def test_create_of_no_multiple_of_the_granularity(stub: Stub, vmm: Provider, size: int) -> None:
    refused(stub, vmm.cuMemCreate(ctypes.c_uint64(), size, vmm.prop, 0), INVALID, "multiple of the granularity")


@pytest.mark.parametrize(
    ("at", "value", "code", "says"),
    [
        (0, 0, INVALID, "only pinned memory of a device"),  # type
        (8, 2, INVALID, "only pinned memory of a device"),  # location.type
        (12, 9, 101, "no such device"),  # location.id
        (4, 1, INVALID, "no handles to share"),  # requestedHandleTypes
        (24, 1, INVALID, "no allocation flags"),  # compressionType
    ],
)
def test_create_with_other_properties(
    stub: Stub,
    vmm: Provider,
    at: int,
    value: int,
    code: int,
    says: str,
) -> None:
    prop = vmm.prop[:at] + bytes([value]) + vmm.prop[at + 1 :]
    refused(stub, vmm.cuMemCreate(ctypes.c_uint64(), vmm.page, prop, 0), code, says)


def test_release_twice(stub: Stub, vmm: Provider) -> None:
    with vmm.memory() as handle:
        pass
    refused(stub, vmm.cuMemRelease(handle), INVALID, "cuMemRelease", "not a valid handle")


def test_map(stub: Stub, vmm: Provider) -> None:
    page = vmm.page
    with vmm.reservation(2) as base, vmm.memory() as one, vmm.memory(2) as two:
        refused(stub, vmm.cuMemMap(base + 4096, page, 0, one, 0), INVALID, "multiple of the granularity")
        refused(stub, vmm.cuMemMap(base, page // 2, 0, one, 0), INVALID, "multiple of the granularity")
        refused(stub, vmm.cuMemMap(base, page, page, two, 0), INVALID, "offset must be zero")
        refused(stub, vmm.cuMemMap(base, page, 0, two, 0), INVALID, "must be the allocation's")
        refused(stub, vmm.cuMemMap(base, page, 0, one, 1), INVALID, "flags must be zero")
        refused(stub, vmm.cuMemMap(base + page, 2 * page, 0, two, 0), INVALID, "within one reservation")
        with vmm.mapping(base, one):
            refused(stub, vmm.cuMemMap(base, page, 0, one, 0), 208, "something is mapped there")
            refused(stub, vmm.cuMemMap(base, 2 * page, 0, two, 0), 208, "something is mapped there")


def test_unmap_of_a_part_of_several_or_of_nothing(stub: Stub, vmm: Provider) -> None:
    page = vmm.page
    with vmm.reservation(4) as base, vmm.memory() as one, vmm.memory(2) as two:
        with vmm.mapping(base, two, pages=2), vmm.mapping(base + 2 * page, one):
            refused(stub, vmm.cuMemUnmap(base, page), INVALID, "entire range of one mapping")
            refused(stub, vmm.cuMemUnmap(base, 3 * page), INVALID, "entire range of one mapping")
            refused(stub, vmm.cuMemUnmap(base + page, page), INVALID, "nothing is mapped at this address")
        refused(stub, vmm.cuMemUnmap(base, page), INVALID, "nothing is mapped at this address")


def test_unmap_under_a_running_kernel(stub: Stub, vmm: Provider) -> None:
    stream = stub.stream()
    with vmm.reservation(1) as base, vmm.memory() as handle, vmm.mapping(base, handle):
        stub.launch(stream, base + 8, 8)
        refused(stub, vmm.cuMemUnmap(base, vmm.page), 700, "a kernel that is running reads these pages")
        stub.complete(stream)


def test_set_access(stub: Stub, vmm: Provider) -> None:
    page, desc = vmm.page, vmm.descriptor(READ_WRITE)
    with vmm.reservation(4) as base, vmm.memory() as one, vmm.memory(2) as two:
        refused(stub, vmm.cuMemSetAccess(base, page, desc, 1), INVALID, "fully mapped")
        with vmm.mapping(base, one), vmm.mapping(base + 2 * page, two, pages=2):
            refused(stub, vmm.cuMemSetAccess(base, 4 * page, desc, 1), INVALID, "fully mapped")
            refused(stub, vmm.cuMemSetAccess(base + 2 * page, page, desc, 1), INVALID, "whole mappings")
            refused(stub, vmm.cuMemSetAccess(base, page, vmm.descriptor(2), 1), INVALID, "no such access")
            elsewhere = bytes([1, 0, 0, 0, 9, 0, 0, 0, 3, 0, 0, 0])
            refused(stub, vmm.cuMemSetAccess(base, page, elsewhere, 1), 101, "no such device")


def test_memory_calls_without_a_context(stub: Stub, vmm: Provider) -> None:
    results: list[int] = []

    def thread() -> None:
        results.append(vmm.cuMemAddressReserve(ctypes.c_uint64(), vmm.page, 0, 0, 0))
        results.append(vmm.cuMemCreate(ctypes.c_uint64(), vmm.page, vmm.prop, 0))
        results.append(vmm.cuEventCreate(ctypes.c_void_p(), 0))

    worker = threading.Thread(target=thread)
    worker.start()
    worker.join()
    assert results == [NO_CONTEXT] * 3
    assert all("no context is current" in violation for violation in stub.violations())


def test_a_context_that_is_not_retained(stub: Stub, vmm: Provider) -> None:
    refused(stub, vmm.cuCtxSetCurrent(4096), NO_CONTEXT, "not a context that is retained")


def test_event_and_stream_of_different_contexts(stub: Stub, vmm: Provider) -> None:
    event = ctypes.c_void_p()
    assert vmm.cuEventCreate(event, 3) == 0
    refused(stub, vmm.cuEventRecord(event, stub.stream(device=1)), HANDLE, "of different contexts")
    assert vmm.cuEventDestroy(event) == 0
    refused(stub, vmm.cuEventRecord(event, None), HANDLE, "no such event")
    refused(stub, vmm.cuEventDestroy(event), HANDLE, "no such event")


def test_an_event_that_is_part_of_a_graph(stub: Stub, vmm: Provider) -> None:
    event, stream = ctypes.c_void_p(), stub.stream()
    assert vmm.cuEventCreate(event, 3) == 0
    stub.capture(stream, True, mode=2)
    assert vmm.cuEventRecord(event, stream) == 0
    refused(stub, vmm.cuEventQuery(event), 907, "part of a graph")
    refused(stub, vmm.cuEventSynchronize(event), 907, "part of a graph")
    stub.capture(stream, False)
    assert vmm.cuEventDestroy(event) == 0


@pytest.mark.parametrize(
    ("capture", "elsewhere", "mode", "allowed"),
    [
        (0, False, 0, False),
        (0, False, 1, False),
        (0, False, 2, True),
        (0, True, 0, False),
        (0, True, 1, True),
        (1, False, 0, False),
        (1, True, 0, True),
        (2, False, 0, True),
        (2, True, 0, True),
    ],
)
def test_calls_during_a_capture(
    stub: Stub,
    vmm: Provider,
    capture: int,
    elsewhere: bool,
    mode: int,
    allowed: bool,
) -> None:
    """`capture`: the mode that the capture was begun in, on this thread or elsewhere; `mode`: this thread's."""
    stream, before = stub.stream(), ctypes.c_uint(mode)
    if elsewhere:
        thread = threading.Thread(target=stub.capture, args=(stream, True, capture))
        thread.start()
        thread.join()
    else:
        stub.capture(stream, True, capture)
    assert vmm.cuThreadExchangeStreamCaptureMode(before) == 0
    handle = ctypes.c_uint64()
    result = vmm.cuMemCreate(handle, vmm.page, vmm.prop, 0)
    stub.capture(stream, False)
    assert vmm.cuThreadExchangeStreamCaptureMode(before) == 0
    if allowed:
        assert (result, vmm.cuMemRelease(handle.value)) == (0, 0)
    else:
        refused(stub, result, 900, "a graph is being captured")


def test_synchronising_a_context_that_captures(stub: Stub, vmm: Provider) -> None:
    stream = stub.stream()
    stub.capture(stream, True, mode=2)
    refused(stub, vmm.cuCtxSynchronize(), 900, "captures")
    stub.capture(stream, False)


def test_the_legacy_stream_while_another_captures(stub: Stub, vmm: Provider) -> None:
    event, stream = ctypes.c_void_p(), stub.stream()
    assert vmm.cuEventCreate(event, 3) == 0
    stub.capture(stream, True, mode=2)
    assert vmm.cuStreamIsCapturing(None, ctypes.c_uint()) == 906  # documented: no violation
    refused(stub, vmm.cuEventRecord(event, None), 906, "depends on one that captures")
    stub.capture(stream, False)
    assert vmm.cuEventDestroy(event) == 0


def test_anything_in_a_fork(stub: Stub, vmm: Provider) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if vmm.cuMemCreate(ctypes.c_uint64(), vmm.page, vmm.prop, 0) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
