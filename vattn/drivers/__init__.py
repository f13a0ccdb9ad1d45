"""Memory drivers: where virtual and physical memory come from, and what this machine has of it."""

from __future__ import annotations

import torch

from vattn.drivers import cuda
from vattn.drivers.base import Device, Guard, MemoryDriver, Stream
from vattn.drivers.host import (
    MAX_PAGE_SIZE,
    MIN_PAGE_SIZE,
    HostDevice,
    available_memory,
    check_page_size,
    max_mappings,
)
from vattn.errors import ConfigError

__all__ = [
    "MAX_PAGE_SIZE",
    "MIN_PAGE_SIZE",
    "Device",
    "Guard",
    "MemoryDriver",
    "Stream",
    "available_memory",
    "check_page_size",
    "find",
    "max_mappings",
    "open_driver",
    "parse",
]

_HOST = HostDevice()


def find(device: str | torch.device) -> Device:
    """The device called `"cpu"`, `"cuda"` (torch's current one) or `"cuda:1"`.

    Raises:
        ConfigError: it has no memory driver here, saying what is missing.
        DriverError: CUDA cannot use it.
    """
    kind = parse(device)
    return _HOST if kind.type == "cpu" else cuda.find(kind)


def parse(device: str | torch.device) -> torch.device:
    """A device as torch names it; it need not exist.

    Raises:
        ConfigError: there is no driver for such devices.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={str(device)!r} has no memory driver; possible: 'cpu', 'cuda', 'cuda:1'")
    return parsed


def open_driver(
    device: str | torch.device, page_size: int, *, guard: Guard = "zero", table: dict[str, int] | None = None
) -> MemoryDriver:
    """Opens the driver of a device for pages of `page_size` bytes.

    Args:
        guard: what a stray read past the mapped pages sees on the host: `"zero"`, zeros; `"strict"`, a fault. On CUDA
            it is an error of the kernel.
        table: addresses of the driver's calls by CUDA's names, where they are not the driver's own (a recorder, say).

    Raises:
        ConfigError: for a device without a driver, or a page size that it does not have.
    """
    return find(device).open(page_size, guard=guard, table=table)
