"""What CUDA's documentation forbids, the stub refuses, or lets do its harm; docs/cuda.md lists these tests."""

from __future__ import annotations

import ctypes
import threading

import pytest

from stub_cuda import Stub
from tests.support import forks
from tests.support.vmm_contract import PER_THREAD, READ_WRITE, Provider
from tests.support.waiting import Background, wait_until

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
        (4, 2, INVALID, "no handles of Windows"),  # requestedHandleTypes
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


def fails_later(stub: Stub, vmm: Provider, stream: int, says: str) -> None:
    """Nothing failed so far; once the kernel completes, everything does."""
    assert says in stub.violations()[-1]
    event = ctypes.c_void_p()
    assert vmm.cuEventCreate(event, 3) == vmm.cuEventRecord(event, stream) == 0
    assert vmm.cuEventQuery(event) == 600
    stub.complete(stream)
    calls = [
        vmm.cuEventQuery(event),
        vmm.cuEventSynchronize(event),
        vmm.cuCtxSynchronize(),
        vmm.cuMemCreate(ctypes.c_uint64(), vmm.page, vmm.prop, 0),
        vmm.cuMemAddressReserve(ctypes.c_uint64(), vmm.page, 0, 0, 0),
        vmm.cuStreamIsCapturing(stub.stream(), ctypes.c_uint()),
    ]
    assert calls == [700] * len(calls)
    stub.reset()
    assert vmm.cuEventDestroy(event) == 0


def test_unmap_under_a_running_kernel(stub: Stub, vmm: Provider) -> None:
    stream = stub.stream()
    with vmm.reservation(1) as base, vmm.memory() as handle:
        with vmm.mapping(base, handle):
            stub.launch(stream, base + 8, 8)
        fails_later(stub, vmm, stream, "a kernel that is running uses these pages")


def test_a_kernel_whose_pages_were_unmapped_and_mapped_again(stub: Stub, vmm: Provider) -> None:
    stream = stub.stream()
    with vmm.reservation(1) as base, vmm.memory() as handle:
        with vmm.mapping(base, handle):
            stub.launch(stream, base + 8, 8)
        with vmm.mapping(base, handle):
            fails_later(stub, vmm, stream, "a kernel that is running uses these pages")


def test_access_taken_from_a_running_kernel(stub: Stub, vmm: Provider) -> None:
    stream, read_only = stub.stream(), vmm.descriptor(1)
    with vmm.reservation(1) as base, vmm.memory() as handle, vmm.mapping(base, handle):
        stub.launch(stream, base, 8)
        assert vmm.cuMemSetAccess(base, vmm.page, read_only, 1) == 0
        stub.complete(stream)
        assert vmm.cuMemSetAccess(base, vmm.page, vmm.descriptor(READ_WRITE), 1) == 0
        stub.launch(stream, base, 8, writes=True)
        assert vmm.cuMemSetAccess(base, vmm.page, read_only, 1) == 0
        fails_later(stub, vmm, stream, "needs more access")


@pytest.mark.parametrize("access", [None, 1])
def test_a_kernel_without_access(stub: Stub, vmm: Provider, access: int | None) -> None:
    stream = stub.stream()
    with vmm.reservation(2) as base, vmm.memory() as handle, vmm.mapping(base, handle, access=access):
        stub.launch(stream, base + 8, 8, writes=access == 1)
        fails_later(stub, vmm, stream, "memory that it has no access to")
        stub.launch(stream, base + vmm.page - 8, 16)  # its end is not mapped
        fails_later(stub, vmm, stream, "memory that it has no access to")


def test_a_memset_that_nothing_orders_behind_a_running_kernel(stub: Stub, vmm: Provider) -> None:
    """The worker's stream waits for the legacy default stream, and for no stream of torch's."""
    stream = stub.stream()
    page = vmm.page
    with vmm.reservation(2) as base, vmm.memory() as one, vmm.mapping(base, one), vmm.mapping(base + page, one):
        stub.launch(0, base, 8)
        assert vmm.cuMemsetD8Async(base + page, 0, page, PER_THREAD) == 0
        assert stub.violations() == []
        stub.launch(stream, base, 8)
        assert vmm.cuMemsetD8Async(base + page, 0, page, PER_THREAD) == 0
        assert "nothing orders before this" in stub.violations()[-1]
        stub.complete(stream)
        stub.complete(0)


def test_fresh_memory(stub: Stub, vmm: Provider) -> None:
    for _ in range(2):
        with vmm.reservation(1) as base, vmm.memory() as handle, vmm.mapping(base, handle):
            assert ctypes.string_at(base, vmm.page) == b"\xa5" * vmm.page
            ctypes.memset(base, 0, vmm.page)


@pytest.mark.parametrize("locking", [False, True])
def test_calls_that_stall_launches(stub: Stub, vmm: Provider, locking: bool) -> None:
    """With a lock in the driver, a launch waits while another thread's call takes its time."""
    stub.locking(locking)
    with vmm.reservation(2) as base, vmm.memory() as handle, vmm.mapping(base, handle):

        def map_another() -> None:
            assert vmm.cuCtxSetCurrent(vmm.context) == 0
            with vmm.memory() as other, vmm.mapping(base + vmm.page, other):
                pass

        stub.hold("cuMemMap")
        mapping = Background(map_another)
        wait_until(stub.held)
        launch = Background(lambda: stub.launch(0, base, 8))
        if locking:
            wait_until(stub.stalls)
            assert launch.runs()
        else:
            launch.finish()
        stub.hold(None)
        launch.finish()
        mapping.finish()
        stub.complete(0)
    assert stub.stalls() == locking


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
            refused(stub, vmm.cuMemSetAccess(base, page, desc + desc, 2), INVALID, "a device twice")


def test_access_of_two_devices(stub: Stub, vmm: Provider) -> None:
    """Each has its own: a kernel on one device needs nothing of the other's."""
    own, peer = vmm.descriptor(READ_WRITE), bytes([1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0])
    with vmm.reservation(1) as base, vmm.memory() as handle, vmm.mapping(base, handle, access=None):
        assert vmm.cuMemSetAccess(base, vmm.page, own + peer, 2) == 0
        found = [ctypes.c_uint64(), ctypes.c_uint64()]
        assert [vmm.cuMemGetAccess(flags, desc[:8], base) for flags, desc in zip(found, (own, peer), strict=True)] == [
            0,
            0,
        ]
        assert [flags.value for flags in found] == [3, 1]
        stub.launch(stub.stream(0), base, 8, writes=True)
        stub.launch(stub.stream(1), base, 8)
        assert stub.violations() == []
        stub.launch(stub.stream(1), base, 8, writes=True)
        assert "no access" in stub.violations()[-1]
        stub.reset()


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


ACTIVE, INVALIDATED = 1, 2


def captures(vmm: Provider, stream: int) -> int:
    status = ctypes.c_uint()
    assert vmm.cuStreamIsCapturing(stream, status) == 0
    return status.value


def test_an_event_that_is_part_of_a_graph(stub: Stub, vmm: Provider) -> None:
    event, stream = ctypes.c_void_p(), stub.stream()
    assert vmm.cuEventCreate(event, 3) == 0
    stub.capture(stream, True, mode=2)
    assert vmm.cuEventRecord(event, stream) == 0
    for call in (vmm.cuEventQuery, vmm.cuEventSynchronize):
        assert captures(vmm, stream) == ACTIVE
        refused(stub, call(event), 907, "part of a graph")
        assert captures(vmm, stream) == INVALIDATED
        assert vmm.cuEventRecord(event, stream) == 901
        assert stub.capture(stream, False) == 901
        assert stub.capture(stream, True, mode=2) == 0
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
    assert captures(vmm, stream) == (ACTIVE if allowed else INVALIDATED)
    assert stub.capture(stream, False) == (0 if allowed else 901)
    assert vmm.cuThreadExchangeStreamCaptureMode(before) == 0
    if allowed:
        assert (result, vmm.cuMemRelease(handle.value)) == (0, 0)
    else:
        refused(stub, result, 900, "a graph is being captured")


def test_synchronising_a_context_that_captures(stub: Stub, vmm: Provider) -> None:
    stream = stub.stream()
    stub.capture(stream, True, mode=2)
    refused(stub, vmm.cuCtxSynchronize(), 900, "captures")
    assert stub.capture(stream, False) == 901
    other = stub.stream(device=1)
    stub.capture(other, True, mode=2)
    assert vmm.cuCtxSynchronize() == 0
    assert stub.capture(other, False) == 0


def test_the_legacy_stream_while_another_captures(stub: Stub, vmm: Provider) -> None:
    event, stream = ctypes.c_void_p(), stub.stream(blocking=True)
    assert vmm.cuEventCreate(event, 3) == 0
    stub.capture(stream, True, mode=2)
    assert vmm.cuStreamIsCapturing(None, ctypes.c_uint()) == 906  # documented: no violation
    assert captures(vmm, stream) == ACTIVE
    refused(stub, vmm.cuEventRecord(event, None), 906, "depends on one that captures")
    assert stub.capture(stream, False) == 901
    assert vmm.cuEventDestroy(event) == 0


def test_the_legacy_stream_is_apart_from_streams_that_do_not_block(stub: Stub, vmm: Provider) -> None:
    event, stream = ctypes.c_void_p(), stub.stream()
    assert vmm.cuEventCreate(event, 3) == 0
    stub.capture(stream, True)
    assert vmm.cuStreamIsCapturing(None, ctypes.c_uint()) == 0
    assert vmm.cuEventRecord(event, None) == 0
    assert stub.capture(stream, False) == 0
    assert vmm.cuEventDestroy(event) == 0


@pytest.mark.parametrize("blocking", [False, True])
def test_what_an_event_covers(stub: Stub, vmm: Provider, blocking: bool) -> None:
    """Kernels of its own stream; and between the legacy default stream and one that blocks, the other's."""
    event, stream = ctypes.c_void_p(), stub.stream(blocking=blocking)
    assert vmm.cuEventCreate(event, 3) == 0
    with vmm.reservation(1) as base, vmm.memory() as handle, vmm.mapping(base, handle):
        for launched, recorded in ((stream, 0), (0, stream), (0, PER_THREAD)):
            stub.launch(launched, base, 8)
            assert vmm.cuEventRecord(event, recorded) == 0
            waits = blocking or recorded == PER_THREAD
            assert vmm.cuEventQuery(event) == (600 if waits else 0)
            stub.complete(launched)
            assert vmm.cuEventQuery(event) == 0
    assert vmm.cuEventDestroy(event) == 0


def test_anything_in_a_fork(stub: Stub, vmm: Provider) -> None:
    assert forks.status(lambda: vmm.cuMemCreate(ctypes.c_uint64(), vmm.page, vmm.prop, 0)) == 3
