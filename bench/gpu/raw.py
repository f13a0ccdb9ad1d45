"""The driver's calls themselves, without a cache. Python's lock is free while one runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from stub_cuda.signatures import SIGNATURES
from vattn import drivers
from vattn.drivers.cuda import CudaDevice

_u64, _pointer = ctypes.c_uint64, ctypes.c_void_p
_READ_WRITE = 3
_DISABLE_TIMING = 2


class Calls:
    """The calls, each of which raises `RuntimeError` if the driver refuses it.

    Makes the device's context, which is also torch's, current on the calling thread; other threads call `enter`.

    Attributes:
        granularity: bytes of the smallest page.
    """

    def __init__(self) -> None:
        device = drivers.find("cuda")
        assert isinstance(device, CudaDevice)
        self.granularity = device.granularity
        self._prop = device._prop
        self._access = self._prop[8:16] + _READ_WRITE.to_bytes(4, "little")  # the location, and what may be done there
        self._context = int(device._context)
        table = device.table()
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(table[name]) for name, arguments in SIGNATURES.items()
        }
        self.enter()

    def enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def reserve(self, size: int, alignment: int) -> int:
        address = _u64()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, alignment, 0, 0)
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> int:
        handle = _u64()
        self._call("cuMemCreate", ctypes.byref(handle), size, self._prop, 0)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def set_access(self, address: int, size: int) -> None:
        self._call("cuMemSetAccess", address, size, self._access, 1)

    def event(self) -> int:
        event = _pointer()
        self._call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        assert event.value
        return event.value

    def record(self, event: int) -> None:
        """Records the event on the default stream."""
        self._call("cuEventRecord", event, None)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = self._functions[name]
        if result := function(*arguments):
            raise RuntimeError(f"{name} failed with {result}")
