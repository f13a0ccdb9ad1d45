"""The host driver: CUDA's calls over Linux memory (memfd_create, mmap), for tensors on the CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import torch

from vattn import _native
from vattn.drivers.base import Device, Guard, HandleType, MemoryDriver, Stream
from vattn.errors import ConfigError
from vattn.units import format_bytes

_DLPACK_CPU = 1
MIN_PAGE_SIZE: int = _native.HOST_MIN_GRANULARITY
MAX_PAGE_SIZE: int = _native.HOST_MAX_GRANULARITY


class HostDevice(Device):
    """The machine's memory."""

    torch_device = torch.device("cpu")
    page_sizes = tuple(1 << power for power in range(MIN_PAGE_SIZE.bit_length() - 1, MAX_PAGE_SIZE.bit_length()))
    default_page_size = 2**16
    default_utilization = 0.5

    def check_page_size(self, page_size: int) -> int:
        if page_size & (page_size - 1) or not MIN_PAGE_SIZE <= page_size <= MAX_PAGE_SIZE:
            raise ConfigError(
                f"page_size={page_size} is not possible: the host driver's pages are powers of two from "
                f"{MIN_PAGE_SIZE} ({format_bytes(MIN_PAGE_SIZE)}) to {MAX_PAGE_SIZE} ({format_bytes(MAX_PAGE_SIZE)})"
            )
        return page_size

    def available_memory(self) -> int:
        return _native.available_memory().bytes

    def describe_memory(self) -> str:
        memory = _native.available_memory()
        bound = "" if memory.source == "/proc/meminfo" else f" of {format_bytes(memory.total)} ({memory.source})"
        return f"{format_bytes(memory.bytes)}{bound} available, of which a part is left to the rest of the machine"

    def mapping_limit(self) -> int:
        return _native.host_max_mappings()

    def open(
        self,
        page_size: int,
        *,
        guard: Guard = "zero",
        handle_type: HandleType = "none",
        peers: Sequence[int] = (),
        table: dict[str, int] | None = None,
        file: int = 0,
    ) -> MemoryDriver:
        """`Device.open`.

        Args:
            file: the number of the file that pages come from (`_native.open_host_file`); 0 for the process's own.
        """
        for name, given in (("handle_type", handle_type != "none" and handle_type), ("peers", peers)):
            if given:
                raise ConfigError(f"{name}={given!r} is for pages on CUDA, and these are on the CPU; leave it out")
        native = _native.Driver(
            table if table is not None else self.table(),
            _native.host_prop(self.check_page_size(page_size), file),
            reserve_flags=_native.HOST_RESERVE_STRICT if guard == "strict" else 0,
            restore_flags=_native.HOST_MAP_RESTORE,
        )
        return MemoryDriver(self, page_size, native, (_DLPACK_CPU, 0))

    def table(self) -> dict[str, int]:
        return _native.host_table()

    def stream_handle(self, stream: Stream | None) -> int | None:
        return None

    def on_stream(self, handle: int | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


if sys.platform != "linux":
    raise ImportError(f"vattn needs Linux (memfd, mmap); this is {sys.platform}")
