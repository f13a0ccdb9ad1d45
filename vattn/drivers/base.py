"""What a driver is: a device that has memory, and that memory opened for one size of page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from vattn import _native
from vattn.units import format_bytes

Guard = Literal["zero", "strict"]

# A CUDA stream: torch's, or its handle (a CUstream as a number; 0 is the legacy default stream).
Stream = torch.cuda.Stream | int


class Device(ABC):
    """A device that caches can live on.

    Attributes:
        torch_device: as torch names it, with its index.
        page_sizes: bytes of a page that "auto" chooses from, ascending.
        default_page_size: bytes of a page for a pool that nobody chose one for.
        default_utilization: share of the available memory that an automatic budget takes, unless told otherwise.
    """

    torch_device: torch.device
    page_sizes: tuple[int, ...]
    default_page_size: int
    default_utilization: float

    @abstractmethod
    def check_page_size(self, page_size: int) -> int:
        """Returns `page_size`, or raises ConfigError if there are no such pages."""

    @abstractmethod
    def available_memory(self) -> int:
        """Bytes of memory that the device still has to give; on the host, within the control groups of this process.

        Raises:
            ProcessLimit: there is no file descriptor left to look.
        """

    def describe_memory(self) -> str:
        """The same for people."""
        return f"{format_bytes(self.available_memory())} available"

    @abstractmethod
    def mapping_limit(self) -> int | None:
        """Mappings that this process may have, where pages that are not neighbours count towards a limit: on the host,
        `vm.max_map_count`.
        """

    @abstractmethod
    def open(self, page_size: int, *, guard: Guard = "zero", table: dict[str, int] | None = None) -> MemoryDriver:
        """The driver for pages of `page_size` bytes.

        Args:
            guard: what a stray read past the mapped pages sees on the host: "zero", zeros; "strict", a fault. On CUDA
                it is an error of the kernel.
            table: addresses of calls by CUDA's names, where they are not the driver's own (a recorder, say).

        Raises:
            ConfigError: the device has no such pages.
        """

    @abstractmethod
    def table(self) -> dict[str, int]:
        """Addresses of the driver's calls by CUDA's names."""

    @abstractmethod
    def stream_handle(self, stream: Stream | None) -> int | None:
        """The handle of a stream, by default torch's current one; None where kernels end before their calls return."""


@dataclass(frozen=True)
class MemoryDriver:
    """A device's memory, opened for one size of page.

    Attributes:
        device: where it is.
        page_size: bytes of a page; reservations and mappings are multiples of it.
        native: the table of calls that the mechanism uses.
        dlpack_device: (type, id) as DLPack numbers devices.
    """

    device: Device
    page_size: int
    native: _native.Driver
    dlpack_device: tuple[int, int]
