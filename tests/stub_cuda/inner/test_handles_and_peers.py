"""Pages that CUDA can export to other processes, and pages that other devices can access."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cuda.bindings import driver as bindings

import vattn
from stub_cuda import Stub
from tests.support import scripts
from tests.support.exports import export
from tests.support.one_layer import PAGE, TOKENS, make
from vattn import drivers
from vattn.drivers import cuda


@contextmanager
def current() -> Iterator[None]:
    device = drivers.find("cuda")
    assert isinstance(device, cuda.CudaDevice)
    with device._current():
        yield


def access(address: int, device: int) -> int:
    location = bindings.CUmemLocation()
    location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    with current():
        return int(cuda.call(bindings.cuMemGetAccess, location, address))


@contextmanager
def filled(pages: int = 2, **options: Any) -> Iterator[tuple[vattn.KVCache, int]]:
    """A cache on a pool of its own with these options, and the address of a slot with this many pages of keys."""
    pool = vattn.PagePool(16 * PAGE, device="cuda", **options)
    with make(pool=pool) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: pages * TOKENS})
        yield cache, cache.layer(0)[0][reqid].data_ptr()
    pool.close()


def test_pages_can_be_exported_if_the_pool_says_so(stub: Stub) -> None:
    with filled(handle_type="posix_fd") as (_, address):
        for page in range(2):
            export(address + page * PAGE)
    with filled() as (_, address):
        with pytest.raises(vattn.DriverError, match="cuMemExportToShareableHandle failed"):
            export(address)
        assert "made without such handles" in stub.violations()[-1]
        stub.forgive()


def test_peers_access_every_page(stub: Stub) -> None:
    stream = stub.stream(1)
    stub.logging(True)
    with filled(peers=[1]) as (cache, address):
        assert stub.log("cuDeviceCanAccessPeer") == ["cuDeviceCanAccessPeer 1 0"]  # device 1 the memory of device 0
        stub.logging(False)
        assert [access(address + page * PAGE, device) for page in range(2) for device in range(2)] == 4 * [3]
        stub.launch(stream, address, 2 * PAGE, writes=True)
        stub.complete(stream)
        cache.check()
    with filled() as (_, address):
        assert [access(address, device) for device in range(2)] == [3, 0]
        stub.launch(stream, address, PAGE)
        assert "no access" in stub.violations()[-1]
        stub.forgive()
        stub.reset()


def test_shared_pages_are_read_only_for_peers_too(stub: Stub) -> None:
    pool = vattn.PagePool(16 * PAGE, device="cuda", peers=[1])
    prompt = list(range(TOKENS + 1))
    with make(pool=pool) as cache:
        first, _ = cache.admit(prompt)
        cache.step({first: len(prompt)})
        cache.commit(first, prompt)
        second, cached = cache.admit(prompt)
        cache.step({second: len(prompt)})
        assert (cached, cache.stats().shared_read_only) == (TOKENS, True)
        keys = cache.layer(0)[0]
        assert [access(keys[slot].data_ptr(), 1) for slot in (first, second)] == [3, 1]
        cache.check()
        del keys
    pool.close()


def test_a_page_whose_access_differs_between_devices_is_found(stub: Stub) -> None:
    with filled(peers=[1]) as (cache, address):
        desc = bindings.CUmemAccessDesc()
        desc.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        desc.location.id = 1
        with current():
            cuda.call(bindings.cuMemSetAccess, address, PAGE, [desc], 1)
        with pytest.raises(AssertionError):
            cache.check()


def test_memory_of_a_kind_is_tried_once(stub: Stub) -> None:
    for _ in range(2):
        before = stub.calls("cuMemCreate")
        vattn.PagePool(16 * PAGE, device="cuda:1", handle_type="posix_fd", peers=[0, 0]).close()
    assert stub.calls("cuMemCreate") == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"handle_type": "win32"}, "handle_type='win32' is not one of 'none', 'posix_fd', 'fabric'"),
        ({"handle_type": "fabric"}, r"no handles of handle_type='fabric'.*; possible: 'none', 'posix_fd'$"),
        ({"peers": [0]}, r"names cuda:0, the device of the pages"),
        ({"peers": [2]}, "peers=2 must be a whole number from 0 to 1"),
        ({"peers": ["cuda:1"]}, "peers='cuda:1' must be a whole number"),
        ({"peers": 1}, r"peers=1 must be a list of ordinals of CUDA devices, such as \[1\]"),
        ({"peers": "1"}, "must be a list"),
    ],
)
def test_what_is_not_possible_is_refused(stub: Stub, options: dict[str, Any], says: str) -> None:
    with pytest.raises(vattn.ConfigError, match=says):
        vattn.PagePool(16 * PAGE, device="cuda", **options)


@pytest.mark.parametrize(
    ("call", "code", "error"),
    [
        ("cuMemSetAccess", 801, vattn.ConfigError),
        ("cuMemCreate", 800, vattn.ConfigError),
        ("cuMemCreate", 2, vattn.DriverError),
        ("cuDeviceCanAccessPeer", 46, vattn.DriverError),
        ("cuMemMap", 999, vattn.DriverError),
    ],
)
def test_a_trial_that_fails_leaves_nothing_and_is_made_again(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, call: str, code: int, error: type[Exception]
) -> None:
    device = drivers.find("cuda")
    assert isinstance(device, cuda.CudaDevice)
    monkeypatch.setattr(device, "_memories", {})
    before = stub.usage().memory
    stub.fail(call, 1, code)
    with pytest.raises(error, match=f"{call} failed with CUDA_ERROR_|{call} failed with an unknown"):
        vattn.PagePool(16 * PAGE, device="cuda", peers=[1])
    assert stub.usage().memory == before
    vattn.PagePool(16 * PAGE, device="cuda", peers=[1]).close()


ELSEWHERE = """
import stub_cuda, vattn
stub_cuda.stand_in()
for options in ({"handle_type": "posix_fd"}, {"handle_type": "fabric"}, {"peers": [1]}):
    try:
        vattn.PagePool("64MiB", device="cuda", **options).close()
        print("fine")
    except vattn.ConfigError as error:
        print(error)
print(stub_cuda.Stub().usage().memory, stub_cuda.Stub().violations())
"""


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"posix_fd": 0, "peers": 0}, ("possible: 'none'", "possible: 'none'", "cuda:1 cannot access the memory of")),
        ({"fabric": 1}, ("fine", "CUDA_ERROR_NOT_PERMITTED (800); fabric handles need an IMEX channel", "fine")),
        ({"fabric": 1, "imex": 1, "read_only": 0}, ("fine", "fine", "fine")),
    ],
)
def test_what_a_machine_lacks_is_said(stub: Stub, machine: dict[str, int], says: tuple[str, ...]) -> None:
    done = scripts.over_stub(ELSEWHERE, devices=2, **machine)
    *lines, usage = done.stdout.splitlines()
    assert len(lines) == len(says), done.stdout + done.stderr
    for line, words in zip(lines, says, strict=True):
        assert words in line
    assert usage == "(0, 0, 0, 0) []"
