"""CUDA's memory calls and a few others, without a cache."""

from __future__ import annotations

import ctypes

from bench.gpu.device import STUB
from bench.harness.driver_calls import MemoryCalls
from vattn import drivers
from vattn.drivers.cuda import CudaDevice

_DISABLE_TIMING = 2


class Calls(MemoryCalls):
    """The calls, each of which raises `RuntimeError` if the driver refuses it.

    Makes the device's context, which is also torch's, current on the calling thread; other threads call `enter`.

    Attributes:
        granularity: bytes of the smallest page.
    """

    def __init__(self) -> None:
        device = drivers.find("cuda")
        assert isinstance(device, CudaDevice)
        self.granularity = device.granularity
        # Ranges as CUDA's driver 580 takes them, and the stub does not; the library itself never asks for it.
        super().__init__(device.table(), device._prop, unmap_ranges=not STUB)
        self._context = int(device._context)
        self.enter()

    def enter(self) -> None:
        self.call("cuCtxSetCurrent", self._context)

    def event(self) -> int:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        assert event.value
        return event.value

    def record(self, event: int) -> None:
        """Records the event on the default stream."""
        self.call("cuEventRecord", event, None)

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")
