"""PagePool: the physical pages of one device, shared by one or more caches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NoReturn

import torch

from vattn import drivers
from vattn.broker.borrower import Loan
from vattn.errors import ConfigError
from vattn.groups import check_choice, check_int
from vattn.integers import shown
from vattn.pool import leftovers
from vattn.pool.core import MOST_PAGES, Core
from vattn.pool.lent import LentCore, lend
from vattn.pool.worker import Worker
from vattn.units import format_bytes, parse_bytes


class PagePool:
    """Physical pages under a budget, which several caches may share.

    Every change is a transaction: decided in the books on the calling thread, and executed in order by one worker.

    Args:
        budget: the most physical memory that may exist, in bytes or as text ("4GiB").
        device: the device of the memory.
        page_size: bytes per page; "auto" is 64 KiB on the host, and the size of CUDA's own pages (2 MiB) on CUDA.
        guard: what a stray read past the mapped pages sees on the host: "zero" or "strict" (a fault).
        zero_on_free: whether the worker zeroes a page that nobody holds any more before it can be mapped again.
        handle_type: how CUDA can export the pages to other processes (docs/cuda.md says how, and what to heed):
            "posix_fd", file descriptors, within one machine; "fabric", across the machines of an NVLink fabric.
        peers: further CUDA devices whose kernels can read and write the pages, by ordinal.
        table: addresses of driver calls by CUDA's names, replacing the driver's own.

    Attributes:
        device: the device of the memory.
        guard: as in the arguments.

    Raises:
        ConfigError: an argument is not possible, the budget is below one page, no driver has that page size or
            device, or the device has no such handles or peers.
        DriverError: CUDA cannot use the device, or has no memory for a page.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        device: str | torch.device = "cpu",
        page_size: int | Literal["auto"] = "auto",
        guard: drivers.Guard = "zero",
        zero_on_free: bool = False,
        handle_type: drivers.HandleType = "none",
        peers: Sequence[int] = (),
        table: dict[str, int] | None = None,
    ) -> None:
        check_choice("handle_type", handle_type, ("none", "posix_fd", "fabric"))
        source, page_size = _checked(device, page_size, guard, zero_on_free)
        driver = source.open(page_size, guard=guard, handle_type=handle_type, peers=peers, table=table)
        size = parse_bytes(budget, "budget")
        if size < page_size:
            raise ConfigError(f"budget={budget!r} is below one page of {format_bytes(page_size)}")
        if size // page_size >= MOST_PAGES:
            raise ConfigError(
                f"budget={budget!r} is {size // page_size} pages of {format_bytes(page_size)}; a pool has fewer than "
                f"{MOST_PAGES}: give less, or larger pages"
            )
        self.device = source.torch_device
        self.guard = guard
        self._core: Core = Core(Worker(driver, page_size, size // page_size, zero_on_free=zero_on_free))

    @classmethod
    def connect(
        cls,
        name: str,
        *,
        at_least: int | str = 0,
        at_most: int | str | None = None,
        label: str | None = None,
        device: str | torch.device = "cpu",
        page_size: int | Literal["auto"] = "auto",
        guard: drivers.Guard = "zero",
        zero_on_free: bool = False,
        fingerprint: bytes | None = None,
    ) -> PagePool:
        """A pool whose pages count in a budget that processes share, kept by a broker: `vattn pool serve NAME`.

        It grows while there is memory that nobody needs, and gives back what others need: parked pages, then cached
        prefixes, then, down to what is guaranteed, pages of running requests, which their engine preempts. How it does
        so is in `vattn.broker`.

        Args:
            name: of the broker's pool.
            at_least: bytes, or text such as "4GiB", that the pool can always have.
            at_most: bytes or text of the most that it may have; by default the whole budget.
            label: what `vattn pool top` calls it; by default the process.
            device, page_size, guard, zero_on_free: as for `PagePool`.
            fingerprint: 32 bytes that stand for all that K and V depend on but tokens and salt: weights, element type,
                kernels, versions. The first cache on the pool then shares its committed blocks with those of other
                processes that have the same, which map them read-only. On a CPU, and without sliding windows. By
                default nothing is shared.

        Raises:
            ConfigError: no broker serves the pool, it refuses, or an argument is not possible.
        """
        source, page_size = _checked(device, page_size, guard, zero_on_free)
        if fingerprint is not None:
            if not isinstance(fingerprint, bytes) or len(fingerprint) != 32:
                raise ConfigError(f"fingerprint is {shown(fingerprint)}; give 32 bytes, such as a hash")
            if source.torch_device.type != "cpu":
                raise ConfigError("prefixes are shared between processes on a CPU only; leave fingerprint out")
        lent = lend(
            name,
            source,
            page_size,
            label=label or f"process-{os.getpid()}",
            at_least=0 if at_least == 0 else parse_bytes(at_least, "at_least"),
            at_most=None if at_most is None else parse_bytes(at_most, "at_most"),
            guard=guard,
            zero_on_free=zero_on_free,
            fingerprint=fingerprint,
        )
        pool = cls.__new__(cls)
        pool.device, pool.guard, pool._core = source.torch_device, guard, lent
        return pool

    @property
    def page_size(self) -> int:
        """Bytes per page."""
        return self._core.page_size

    @property
    def zero_on_free(self) -> bool:
        """Whether pages are zeroed before they can be mapped again."""
        return self._core.native.zero_on_free

    @property
    def budget(self) -> int:
        """The most physical memory that may exist, in bytes: whole pages."""
        return self._core.total_pages * self._core.page_size

    @property
    def total_pages(self) -> int:
        """The budget, in pages."""
        return self._core.total_pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return max(0, self._core.free_pages)

    @property
    def caches(self) -> int:
        """How many caches and `BlockWindows` use the pool."""
        return self._core.tenants

    @property
    def loan(self) -> Loan | None:
        """What a broker lends, as far as this process knows; it asks nobody. None for a pool of its own memory."""
        return self._core.loan if isinstance(self._core, LentCore) else None

    @property
    def sharing(self) -> bytes | None:
        """32 bytes that pools have in common whose caches map each other's blocks; None if it shares none."""
        shares = self._core.shares if isinstance(self._core, LentCore) else None
        return None if shares is None else shares.directory.shape.fingerprint

    @property
    def publishing(self) -> bool:
        """Whether blocks have been committed that other processes do not find yet."""
        return isinstance(self._core, LentCore) and self._core.publishing

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PagePool cannot be copied or pickled: its memory is mapped in this process")

    def close(self) -> None:
        """Stops the worker and gives all memory back. Caches on the pool must be closed first.

        Raises:
            VattnError: a cache still uses the pool.
            ForkedProcess: this is a child of the process that made the pool.
            StreamCapturing: a dropped cache left pages behind, and a stream is capturing a CUDA graph.
        """
        self._core.close()


def _checked(
    device: str | torch.device, page_size: int | Literal["auto"], guard: drivers.Guard, zero_on_free: bool
) -> tuple[drivers.Device, int]:
    """The device and the page size of a new pool, after what dropped caches left behind was taken back."""
    leftovers.take_back()
    check_choice("guard", guard, ("zero", "strict"))
    check_choice("zero_on_free", zero_on_free, (True, False))
    source = drivers.find(device)
    size = source.default_page_size if isinstance(page_size, str) and page_size == "auto" else page_size
    return source, check_int("page_size", size, at_least=1, at_most=2**40)
