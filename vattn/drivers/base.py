"""The interface of drivers: a device, and its memory opened for one page size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from vattn import _native
from vattn.units import format_bytes

Guard = Literal["zero", "strict"]
HandleType = Literal["none", "posix_fd", "fabric"]

# A CUDA stream: torch's, or its handle (a CUstream as a number; 0 is the legacy default stream).
Stream = torch.cuda.Stream | int


class Device(ABC):
    """A device that can hold caches.

    Attributes:
        torch_device: the torch.device, with its index.
        page_sizes: page sizes in bytes that "auto" chooses from, ascending.
        default_page_size: page size in bytes of a pool made without one.
        default_utilization: default share of the available memory for an automatic budget.
    """

    torch_device: torch.device
    page_sizes: tuple[int, ...]
    default_page_size: int
    default_utilization: float

    @abstractmethod
    def check_page_size(self, page_size: int) -> int:
        """Returns `page_size`; raises ConfigError if the device has no pages of this size."""

    @abstractmethod
    def available_memory(self) -> int:
        """Bytes of memory that can still be allocated; on the host, within the control groups of this process.

        Raises:
            ProcessLimit: there is no file descriptor left to look.
        """

    def empty_cache(self) -> int:
        """Has torch's allocator give back memory of the device that it keeps unused, and waits for kernels where that
        takes it; returns the bytes. Not while a stream of the device captures a CUDA graph.
        """
        return 0

    def describe_memory(self) -> str:
        """`available_memory` as text."""
        return f"{format_bytes(self.available_memory())} available"

    @abstractmethod
    def mapping_limit(self) -> int | None:
        """Mappings that this process may have (`vm.max_map_count` on the host); None without such a limit. Pages that
        are not neighbours count separately.
        """

    @abstractmethod
    def open(
        self,
        page_size: int,
        *,
        guard: Guard = "zero",
        handle_type: HandleType = "none",
        peers: Sequence[int] = (),
        table: dict[str, int] | None = None,
    ) -> MemoryDriver:
        """The driver for pages of `page_size` bytes.

        Args:
            guard: effect of a read past the mapped pages on the host: "zero" returns zeros, "strict" faults. On CUDA
                such a read is always an error of the kernel.
            handle_type: how CUDA can export the pages to other processes; "none" on the host.
            peers: further CUDA devices whose kernels can access the pages, by ordinal; none on the host.
            table: addresses of calls by CUDA's names, to replace the driver's own (for a recorder, say).

        Raises:
            ConfigError: the device has no such pages.
            DriverError: CUDA has no memory for such a page, or cannot map it.
        """

    @abstractmethod
    def table(self) -> dict[str, int]:
        """Addresses of the driver's calls by CUDA's names."""

    @abstractmethod
    def stream_handle(self, stream: Stream | None) -> int | None:
        """The handle of a stream, by default torch's current one; None if the device runs kernels synchronously."""

    @abstractmethod
    def on_stream(self, handle: int | None) -> AbstractContextManager[None]:
        """Makes the stream of this handle torch's current one, within the context."""


@dataclass(frozen=True)
class MemoryDriver:
    """The memory of a device, opened for one page size.

    Attributes:
        device: the device.
        page_size: bytes of a page; reservations and mappings are multiples of it.
        native: the native driver, which holds the table of calls.
        dlpack_device: (type, id) of the device in DLPack.
    """

    device: Device
    page_size: int
    native: _native.Driver
    dlpack_device: tuple[int, int]
