"""The memory calls of a driver's table themselves, without a cache. Python's lock is free while one runs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from stub_cuda.signatures import SIGNATURES

Result = TypeVar("Result")

# Microseconds for a page of 2 MiB, as the paper measured them.
PAPER = {
    "cuMemCreate": 29,
    "cuMemMap": 2,
    "cuMemSetAccess": 38,
    "cuMemUnmap": 34,
    "cuMemRelease": 23,
    "cuMemAddressReserve": 2,
    "cuMemAddressFree": 1,
}

_READ_WRITE = 3


class MemoryCalls:
    """The calls, each of which raises `RuntimeError` if the driver refuses it.

    Args:
        table: addresses of the calls, by CUDA's names.
        prop: the CUmemAllocationProp of the pages.
        unmap_ranges: whether one unmap may take several neighbouring mappings.
    """

    def __init__(self, table: Mapping[str, int], prop: bytes, *, unmap_ranges: bool = True) -> None:
        self.unmap_ranges = unmap_ranges
        self._prop = prop
        self._access = prop[8:16] + _READ_WRITE.to_bytes(4, "little")  # the location, and what may be done there
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(table[name]) for name, arguments in SIGNATURES.items()
        }

    def reserve(self, size: int, alignment: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAddressReserve", ctypes.byref(address), size, alignment, 0, 0)
        return address.value

    def free(self, address: int, size: int) -> None:
        self.call("cuMemAddressFree", address, size)

    def create(self, size: int) -> int:
        handle = ctypes.c_uint64()
        self.call("cuMemCreate", ctypes.byref(handle), size, self._prop, 0)
        return handle.value

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self.call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        self.call("cuMemUnmap", address, size)

    def set_access(self, address: int, size: int) -> None:
        self.call("cuMemSetAccess", address, size, self._access, 1)

    def call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = self._functions[name]
        if result := function(*arguments):
            raise RuntimeError(f"{name} failed with {result}")


def time_range(calls: MemoryCalls, page: int, count: int, seconds: dict[tuple[str, int], list[float]]) -> None:
    """Reserves a range, backs it page by page, and takes all of it down again.

    Args:
        page: bytes of a page, of which the range has `count`.
        seconds: gets the time of each call, by the call's name and by the pages that it was for.
    """

    def timed(name: str, pages: int, call: Callable[..., Result], *arguments: int) -> Result:
        start = time.perf_counter()
        result = call(*arguments)
        seconds[name, pages].append(time.perf_counter() - start)
        return result

    size = count * page
    base = timed("cuMemAddressReserve", count, calls.reserve, size, page)
    addresses = range(base, base + size, page)
    handles = [timed("cuMemCreate", 1, calls.create, page) for _ in addresses]
    for access_per_page in (True, False):
        for address, handle in zip(addresses, handles, strict=True):
            timed("cuMemMap", 1, calls.map, address, page, handle)
        if access_per_page:
            for address in addresses:
                timed("cuMemSetAccess", 1, calls.set_access, address, page)
        else:
            timed("cuMemSetAccess", count, calls.set_access, base, size)
        if access_per_page or not calls.unmap_ranges:
            for address in addresses:
                timed("cuMemUnmap", 1, calls.unmap, address, page)
        else:
            timed("cuMemUnmap", count, calls.unmap, base, size)
    for handle in handles:
        timed("cuMemRelease", 1, calls.release, handle)
    timed("cuMemAddressFree", count, calls.free, base, size)
