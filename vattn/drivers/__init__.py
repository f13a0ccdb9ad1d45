"""Memory drivers: the sources of virtual and physical memory on the CPU and on CUDA devices."""

from __future__ import annotations

import torch

from vattn.drivers import cuda
from vattn.drivers.base import Device, Guard, HandleType, MemoryDriver, Stream
from vattn.drivers.host import HostDevice
from vattn.errors import ConfigError

__all__ = ["Device", "Guard", "HandleType", "MemoryDriver", "Stream", "find", "parse"]

_HOST = HostDevice()


def find(device: str | torch.device) -> Device:
    """The device called `"cpu"`, `"cuda"` (torch's current one) or `"cuda:1"`.

    Raises:
        ConfigError: it has no memory driver here; the message says what is missing.
        DriverError: CUDA cannot use it.
    """
    kind = parse(device)
    return _HOST if kind.type == "cpu" else cuda.find(kind)


def parse(device: str | torch.device) -> torch.device:
    """A torch.device of a type that has a driver; the device need not exist.

    Raises:
        ConfigError: there is no driver for this type.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={str(device)!r} has no memory driver; possible: 'cpu', 'cuda', 'cuda:1'")
    return parsed
