"""The CUDA driver: CUDA's virtual memory calls, looked up through cuda-python and made by the native code.

cuda-python initialises CUDA, builds the allocation properties and looks up the addresses of the calls; Python makes
none of these calls itself. The device's primary context, which torch uses too, is retained once per process and never
released: objects that outlive a cache, such as tensors, may need it until the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vattn import _native
from vattn.drivers.base import Device, Guard, HandleType, MemoryDriver, Stream
from vattn.errors import ConfigError, DriverError, ForkedProcess
from vattn.groups import check_int
from vattn.integers import shown
from vattn.units import format_bytes

_DLPACK_CUDA = 2

# The calls are looked up as CUDA 12.0 declares them: every driver that cuda-python 12.9 and later works with has those.
_ABI = 12000
_PROP_BYTES = 32  # sizeof(CUmemAllocationProp)

# CUmemAllocationHandleType, and the CUdevice_attribute that says whether a device has it
_HANDLE_TYPES: dict[HandleType, tuple[str, str]] = {
    "posix_fd": ("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
    "fabric": ("CU_MEM_HANDLE_TYPE_FABRIC", "HANDLE_TYPE_FABRIC_SUPPORTED"),
}
_REFUSALS = (800, 801)  # CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_SUPPORTED

NOT_READ_ONLY = "shared pages are writable in every slot that has them, so a stray write to one does not fault"
_log = logging.getLogger("vattn")

_initialised_in = 0  # the process that started CUDA, which does not survive a fork


@dataclass(frozen=True)
class _Memory:
    """How pages are made and mapped.

    Attributes:
        prop: a CUmemAllocationProp.
        granularity: bytes of the smallest page.
        peers: the other devices that have access, by CUDA's numbers.
        read_only: whether it can be mapped read-only, for all of them.
    """

    prop: bytes
    granularity: int
    peers: tuple[int, ...]
    read_only: bool


class CudaDevice(Device):
    """A GPU, by its ordinal among those in CUDA_VISIBLE_DEVICES, as in torch.

    Attributes:
        granularity: bytes of CUDA's own pages.
        read_only: whether memory can be mapped read-only.

    Raises:
        ConfigError: it has no virtual memory management.
        DriverError: CUDA cannot use it, or has no memory for a page.
    """

    default_utilization = 0.9

    def __init__(self, bindings: Any, ordinal: int) -> None:
        self._cuda = bindings
        self.torch_device = torch.device("cuda", ordinal)
        device = call(bindings.cuDeviceGet, ordinal)
        name, supported, _ = describe(bindings, ordinal)
        if not supported:
            raise ConfigError(
                f"cuda:{ordinal} ({name}) has no virtual memory management, as its driver is set up; vattn needs it"
            )
        self._context = call(bindings.cuDevicePrimaryCtxRetain, device)
        self._table: dict[str, int] = {name: _address(bindings, name) for name in _native.table_names()}
        self._streams = torch_streams(self.torch_device)
        self._memories: dict[tuple[HandleType, tuple[int, ...]], _Memory] = {}
        memory = self._memory("none", ())
        self._prop = memory.prop
        self.granularity = memory.granularity
        self.page_sizes = tuple(self.granularity * pages for pages in range(1, 33))
        self.default_page_size = self.granularity
        self.read_only = memory.read_only

    def check_page_size(self, page_size: int) -> int:
        if page_size <= 0 or page_size % self.granularity:
            raise ConfigError(
                f"page_size={page_size} is not possible: pages on {self.torch_device} are multiples of "
                f"{self.granularity} ({format_bytes(self.granularity)}); give one, or leave it out"
            )
        return page_size

    def available_memory(self) -> int:
        with self._current():
            free, _ = call(self._cuda.cuMemGetInfo)
        return int(free)

    def empty_cache(self) -> int:
        before = unused_by_torch(self.torch_device)
        if before:
            empty_cache()
        return max(0, before - unused_by_torch(self.torch_device))

    def describe_memory(self) -> str:
        unused = unused_by_torch(self.torch_device)
        kept = f" (and {format_bytes(unused)} that torch's allocator keeps: torch.cuda.empty_cache())" if unused else ""
        return super().describe_memory() + kept

    def mapping_limit(self) -> int | None:
        return None

    def open(
        self,
        page_size: int,
        *,
        guard: Guard = "zero",
        handle_type: HandleType = "none",
        peers: Sequence[int] = (),
        table: dict[str, int] | None = None,
    ) -> MemoryDriver:
        self.check_page_size(page_size)
        memory = self._memory(handle_type, self._check_peers(peers))
        if page_size % memory.granularity:
            raise ConfigError(
                f"page_size={page_size} is not possible: pages with handle_type={handle_type!r} on "
                f"{self.torch_device} are multiples of {memory.granularity} ({format_bytes(memory.granularity)})"
            )
        native = self._driver(self._table if table is None else table, memory)
        return MemoryDriver(self, page_size, native, (_DLPACK_CUDA, self.torch_device.index))

    def _driver(self, table: dict[str, int], memory: _Memory) -> _native.Driver:
        return _native.Driver(
            table,
            memory.prop,
            context=int(self._context),
            # "The range must be the entire contiguous address range that was mapped to": one call per mapping is what
            # cuMemUnmap's documentation surely allows. NVIDIA's samples unmap several at once.
            unmap_ranges=False,
            read_only=memory.read_only,
            streams=self._streams,
            peers=memory.peers,
        )

    def _memory(self, handle_type: HandleType, peers: tuple[int, ...]) -> _Memory:
        """Memory with such handles and peers, of which a page has been made and mapped once."""
        found = self._memories.get((handle_type, peers))
        if found is None:
            found = self._memories[handle_type, peers] = self._try_memory(handle_type, peers)
        return found

    def _try_memory(self, handle_type: HandleType, peers: tuple[int, ...]) -> _Memory:
        cuda, ordinal = self._cuda, self.torch_device.index
        prop = cuda.CUmemAllocationProp()
        prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = int(call(cuda.cuDeviceGet, ordinal))
        if handle_type != "none":
            name, attribute = _HANDLE_TYPES[handle_type]
            if not _has(cuda, ordinal, attribute):
                possible = [kind for kind, (_, attribute) in _HANDLE_TYPES.items() if _has(cuda, ordinal, attribute)]
                raise ConfigError(
                    f"{self.torch_device} has no handles of handle_type={handle_type!r}, as its driver is set up; "
                    f"possible: {', '.join(map(repr, ['none', *possible]))}"
                )
            prop.requestedHandleTypes = getattr(cuda.CUmemAllocationHandleType, name)
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(call(cuda.cuMemGetAllocationGranularity, prop, minimum))
        memory = _Memory(
            ctypes.string_at(prop.getPtr(), _PROP_BYTES),
            granularity,
            tuple(int(call(cuda.cuDeviceGet, peer)) for peer in peers),
            read_only=True,
        )
        with self._current():
            try:
                read_only = self._driver(self._table, memory).try_read_only(granularity)
            except DriverError as error:
                if error.code not in _REFUSALS:
                    raise
                hint = "; fabric handles need an IMEX channel that this process may open" * (handle_type == "fabric")
                raise ConfigError(
                    f"{self.torch_device} refuses pages with handle_type={handle_type!r} and peers={[*peers]}: "
                    f"{error}{hint}"
                ) from error
        if not read_only:
            _log.warning("%s maps no memory read-only: %s", self.torch_device, NOT_READ_ONLY)
        return replace(memory, read_only=read_only)

    def _check_peers(self, peers: Sequence[int]) -> tuple[int, ...]:
        """The ordinals, in ascending order, each once."""
        count, own = device_count(self._cuda), self.torch_device.index
        if isinstance(peers, str) or not isinstance(peers, Sequence):
            raise ConfigError(f"peers={shown(peers)} must be a list of ordinals of CUDA devices, such as [1]")
        found = sorted({check_int("peers", peer, at_least=0, at_most=count - 1) for peer in peers})
        for peer in found:
            if peer == own:
                raise ConfigError(f"peers={[*peers]} names cuda:{own}, the device of the pages; name only others")
            if not call(self._cuda.cuDeviceCanAccessPeer, peer, own):
                raise ConfigError(
                    f"peers={[*peers]} is not possible: cuda:{peer} cannot access the memory of cuda:{own} "
                    "(nvidia-smi topo -p2p r shows which can)"
                )
        return tuple(found)

    def table(self) -> dict[str, int]:
        return dict(self._table)

    def stream_handle(self, stream: Stream | None) -> int | None:
        if stream is None:
            return current_stream(self.torch_device)
        return stream if isinstance(stream, int) else int(stream.cuda_stream)

    def on_stream(self, handle: int | None) -> contextlib.AbstractContextManager[None]:
        if handle is None or handle == current_stream(self.torch_device):
            return contextlib.nullcontext()
        return use_stream(self.torch_device, handle)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Makes the device's context current on this thread, and restores the thread's own, which torch relies on.
        Calls may be made although a stream captures.
        """
        cuda = self._cuda
        relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = call(cuda.cuCtxGetCurrent)
        call(cuda.cuCtxSetCurrent, self._context)
        try:
            mode = call(cuda.cuThreadExchangeStreamCaptureMode, relaxed)
            try:
                yield
            finally:
                call(cuda.cuThreadExchangeStreamCaptureMode, mode)
        finally:
            call(cuda.cuCtxSetCurrent, before)


def find(device: torch.device) -> CudaDevice:
    """The device that `"cuda"` (torch's current one) or `"cuda:1"` names.

    Raises:
        ConfigError: something is missing; the message says what, and how to get it.
        ForkedProcess: CUDA was started in the parent of this process.
        DriverError: CUDA cannot use the device.
    """
    bindings, lacking = start()
    lacking = [reason for reason in (torch_lacks(), *lacking) if reason]
    if lacking:
        raise ConfigError(f"device={str(device)!r} cannot be used here: {'; '.join(lacking)}")
    ordinal = device.index if device.index is not None else current_device()
    count = device_count(bindings)
    if not 0 <= ordinal < count:
        raise ConfigError(f"device='cuda:{ordinal}' does not exist; CUDA has {count} here{_visible()}, counted from 0")
    return _device(os.getpid(), ordinal)


def device_count(bindings: Any) -> int:
    """The number of devices that CUDA sees in this process."""
    return int(call(bindings.cuDeviceGetCount))


def describe(bindings: Any, ordinal: int) -> tuple[str, bool, int]:
    """A device's name, whether it supports virtual memory management, and its bytes of memory; creates no context."""
    device = call(bindings.cuDeviceGet, ordinal)
    name = call(bindings.cuDeviceGetName, 256, device).split(b"\0")[0].decode()
    return (
        name,
        _has(bindings, ordinal, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
        int(call(bindings.cuDeviceTotalMem, device)),
    )


def _has(bindings: Any, ordinal: int, attribute: str) -> bool:
    """Whether a device has an attribute that is yes or no."""
    number = getattr(bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
    return bool(call(bindings.cuDeviceGetAttribute, number, call(bindings.cuDeviceGet, ordinal)))


def start() -> tuple[Any, list[str]]:
    """Starts CUDA in this process.

    Returns:
        cuda-python's driver module, and the reasons why it cannot be used.

    Raises:
        ForkedProcess: CUDA was started in the parent of this process.
    """
    global _initialised_in
    if _initialised_in not in (0, os.getpid()):
        raise ForkedProcess(
            f"CUDA was started in process {_initialised_in}, and this is a fork of it (process {os.getpid()}): CUDA "
            "does not survive a fork; start workers with 'spawn'"
        )
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        return None, [f"cuda-python is not installed ({error}): pip install 'vattn[cuda]'"]
    try:
        (result,) = bindings.cuInit(0)
    except Exception as error:  # what it raises where there is no library differs from version to version
        return bindings, [
            f"NVIDIA's driver (libcuda.so.1) is not there ({' '.join(str(error).split())}): install it, or start the "
            "container with GPUs (docker run --gpus all)"
        ]
    if result == bindings.CUresult.CUDA_ERROR_NO_DEVICE:
        return bindings, [f"NVIDIA's driver finds no GPU{_visible()}: cuInit returned CUDA_ERROR_NO_DEVICE (100)"]
    if result != bindings.CUresult.CUDA_SUCCESS:
        return bindings, [f"NVIDIA's driver does not start: cuInit returned {_name(result)} ({int(result)}); see dmesg"]
    _initialised_in = os.getpid()
    version = int(call(bindings.cuDriverGetVersion))
    if version < _ABI:
        return bindings, [
            f"NVIDIA's driver is for CUDA {format_version(version)}, too old: install one for {format_version(_ABI)} "
            "or later"
        ]
    return bindings, []


def torch_lacks() -> str | None:
    """The reason why this torch has no tensors on a GPU; None if it has."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu128 (or the index for your driver, see pytorch.org)"
        )
    return None


def current_device() -> int:
    """The ordinal of torch's current device."""
    return torch.cuda.current_device()


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream on a device."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def unused_by_torch(device: torch.device) -> int:
    """Bytes of the device's memory that torch's allocator keeps although no tensor has them; 0 if it does not say."""
    try:
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except RuntimeError:  # an allocator of the user's
        return 0


def empty_cache() -> None:
    """Has torch's allocator give back what it keeps unused, on all devices, unless torch captures a graph on one."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def use_stream(device: torch.device, handle: int) -> contextlib.AbstractContextManager[None]:
    """Makes a stream of the device torch's current one, within the context."""
    return torch.cuda.stream(torch_stream(device, handle))


def torch_stream(device: torch.device, handle: int) -> torch.cuda.Stream:
    """torch's object for a stream of the device."""
    # For torch, an external stream with the handle 0 is a new stream.
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)  # type: ignore[no-untyped-call]


def torch_streams(device: torch.device) -> list[int]:
    """The handles of all streams that torch makes on a device, which live as long as the process."""

    def stream(priority: int) -> torch.cuda.Stream:
        return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]

    lowest, highest = stream(0).priority_range()  # 0, -3
    handles: list[int] = []
    for priority in range(lowest, highest - 1, -1):
        # Streams come from a pool per priority, in turn, until the first one comes again.
        pool: dict[int, None] = {}
        while (handle := int(stream(priority).cuda_stream)) not in pool:
            pool[handle] = None
        handles += pool
    return handles


def format_version(version: int) -> str:
    """A version number of CUDA as text: 12040 is 12.4."""
    return f"{version // 1000}.{version % 1000 // 10}"


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls cuda-python; returns the values after the result code.

    Raises:
        DriverError: the call failed.
    """
    result, *values = function(*arguments)
    if int(result) != 0:
        name = _name(result)
        raise DriverError(
            f"{function.__name__} failed with {name} ({int(result)})",
            call=function.__name__,
            code=int(result),
            name=name,
        )
    return values[0] if len(values) == 1 else tuple(values)


def _name(result: Any) -> str:
    return str(getattr(result, "name", "an unknown result"))


def _visible() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"


def _address(bindings: Any, name: str) -> int:
    # Of the two meanings that the stream 0 can have, the one that torch means: the legacy default stream.
    legacy = bindings.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
    address, status = call(bindings.cuGetProcAddress, name.encode(), _ABI, legacy)
    if not address:
        raise ConfigError(f"NVIDIA's driver has no {name} ({_name(status)}): install a newer one")
    return int(address)


@functools.cache
def _device(process: int, ordinal: int) -> CudaDevice:
    bindings, _ = start()
    return CudaDevice(bindings, ordinal)
