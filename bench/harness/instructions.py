"""Instructions that a call takes, counted by the processor, where the system lets a process count its own."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_SYSCALLS = {"x86_64": 298, "aarch64": 241}  # perf_event_open
_ATTRIBUTES = 128  # bytes of the structure
_HARDWARE, _INSTRUCTIONS = 0, 1
_DISABLED, _NOT_THE_KERNEL, _NOT_THE_HYPERVISOR = 1 << 0, 1 << 5, 1 << 6
_ENABLE, _DISABLE, _RESET = 0x2400, 0x2401, 0x2403


class CannotCount(RuntimeError):
    """There is no counter here; the message says why."""


class Counter:
    """Instructions of the calling thread in user space. `close` it.

    Raises:
        CannotCount: the processor has no counter, as in most virtual machines, or the system gives none.
    """

    def __init__(self) -> None:
        number = _SYSCALLS.get(platform.machine())
        if number is None:
            raise CannotCount(f"the number of perf_event_open on {platform.machine()} is not known")
        attributes = bytearray(_ATTRIBUTES)
        struct.pack_into("IIQ", attributes, 0, _HARDWARE, _ATTRIBUTES, _INSTRUCTIONS)
        struct.pack_into("Q", attributes, 40, _DISABLED | _NOT_THE_KERNEL | _NOT_THE_HYPERVISOR)
        self._libc = ctypes.CDLL(None, use_errno=True)
        buffer = (ctypes.c_char * _ATTRIBUTES).from_buffer(attributes)
        self._file = self._libc.syscall(number, buffer, 0, -1, -1, 0)
        if self._file < 0:
            reason = os.strerror(ctypes.get_errno())
            with suppress(OSError):
                level = Path("/proc/sys/kernel/perf_event_paranoid").read_text().strip()
                reason += f"; kernel.perf_event_paranoid is {level}"
            raise CannotCount(f"perf_event_open: {reason}")

    def count(self, call: Callable[[], object]) -> int:
        """Instructions of one call, on this thread alone."""
        self._control(_RESET)
        self._control(_ENABLE)
        call()
        self._control(_DISABLE)
        return int(struct.unpack("Q", os.read(self._file, 8))[0])

    def close(self) -> None:
        os.close(self._file)

    def _control(self, request: int) -> None:
        if self._libc.ioctl(self._file, request, 0):
            raise CannotCount(f"ioctl: {os.strerror(ctypes.get_errno())}")
