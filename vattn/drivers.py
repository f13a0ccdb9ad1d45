"""Memory drivers: where virtual and physical memory come from, and what this machine has of it."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from vattn import _native
from vattn.errors import ConfigError, DriverError
from vattn.units import format_bytes

Guard = Literal["zero", "strict"]

_DLPACK_CPU = 1
MIN_PAGE_SIZE: int = _native.HOST_MIN_GRANULARITY
MAX_PAGE_SIZE: int = _native.HOST_MAX_GRANULARITY


@dataclass(frozen=True)
class MemoryDriver:
    """A provider of virtual memory, opened for one device and one size of page.

    Attributes:
        device: the torch device that its tensors are on.
        page_size: bytes of a page, which is also the granularity of reservations and mappings.
        native: the table of calls that the mechanism uses.
        dlpack_device: (type, id) as DLPack numbers devices.
    """

    device: torch.device
    page_size: int
    native: _native.Driver
    dlpack_device: tuple[int, int]


def check_page_size(page_size: int) -> int:
    """Returns `page_size`, or raises ConfigError if the host driver has no such pages."""
    if page_size & (page_size - 1) or not MIN_PAGE_SIZE <= page_size <= MAX_PAGE_SIZE:
        raise ConfigError(
            f"page_size={page_size} is not possible: the host driver's pages are powers of two from "
            f"{MIN_PAGE_SIZE} ({format_bytes(MIN_PAGE_SIZE)}) to {MAX_PAGE_SIZE} ({format_bytes(MAX_PAGE_SIZE)})"
        )
    return page_size


def open_driver(
    device: str | torch.device, page_size: int, *, guard: Guard = "zero", table: dict[str, int] | None = None
) -> MemoryDriver:
    """Opens the driver for a device.

    Args:
        device: `"cpu"`.
        page_size: bytes of a page, a power of two that the driver offers.
        guard: what a stray read past the mapped pages sees: `"zero"`, zeros; `"strict"`, a fault.
        table: addresses of the driver's calls by CUDA's names, where they are not the driver's own (a recorder, say).

    Raises:
        ConfigError: for a device without a driver, or a page size that it does not have.
    """
    device = torch.device(device)
    if device.type != "cpu":
        raise ConfigError(f"device={str(device)!r} has no memory driver in this version; possible: 'cpu'")
    check_page_size(page_size)
    native = _native.Driver(
        table if table is not None else _native.host_table(),
        _native.host_prop(page_size),
        reserve_flags=_native.HOST_RESERVE_STRICT if guard == "strict" else 0,
        restore_flags=_native.HOST_MAP_RESTORE,
    )
    return MemoryDriver(device, page_size, native, (_DLPACK_CPU, 0))


def max_mappings() -> int:
    """Mappings that Linux allows this process (`vm.max_map_count`)."""
    return int(Path("/proc/sys/vm/max_map_count").read_text())


def available_memory() -> int:
    """Bytes of memory that this machine, or the control group around this process, still has to give."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def doctor() -> str:
    """What drivers, devices, kernels and limits this machine has, as text for people."""
    usage = _native.host_usage()
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for _ in maps)
    lines = [
        f"vattn {_version('vattn')}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {_version('transformers')}, Linux {platform.release()} ({platform.machine()})",
        "",
        "drivers",
        f"  host   ok: pages of {format_bytes(MIN_PAGE_SIZE)} to {format_bytes(MAX_PAGE_SIZE)} over memfd; "
        f"{usage.reservations} reservations, {format_bytes(usage.physical_bytes)} in use by this process",
        "  cuda   not in this version",
        "devices",
        f"  cpu    {os.cpu_count()} cores, {torch.get_num_threads()} torch threads, "
        f"{format_bytes(available_memory())} available",
        *(f"  cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())),
        "kernels",
        *(f"  {line}" for line in _kernels()),
        "limits",
        f"  mappings per process  {max_mappings()} (vm.max_map_count), {mappings} in use; "
        "one per page that is not next to its neighbour",
        f"  largest reservation   {_largest_reservation()}",
    ]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> list[str]:
    from vattn import attention

    return attention.describe()


def _largest_reservation() -> str:
    """Tries reservations, from large to small, and gives each back at once."""
    driver = open_driver("cpu", MAX_PAGE_SIZE)
    pool = _native.PagePool(MAX_PAGE_SIZE, 1)
    for power in range(47, 30, -1):
        try:
            _native.AddressSpace(driver.native, pool, tensors=1, slots=1, runs=1, run_pages=2**power // MAX_PAGE_SIZE)
        except DriverError:
            continue
        return f"{format_bytes(2**power)} of address space"
    return "below 2 GiB; see ulimit -v"


if sys.platform != "linux":
    raise ImportError(f"vattn needs Linux (memfd, mmap); this is {sys.platform}")
