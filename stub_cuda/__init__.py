"""The stub libcuda.so.1: how it is built, and its controls. Only processes that have it on LD_LIBRARY_PATH load it.

Tests and bench.gpu run over it where there is no GPU; `signatures` is for both, and for a real driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "build" / "stub_cuda" / "libcuda.so.1"
SOURCES = [
    Path(__file__).with_name("libcuda.cpp"),
    *(ROOT / "csrc" / name for name in ("available_memory.cpp", "fork_guard.cpp", "host_vmm.cpp")),
]
ACTIVE = "VATTN_STUB_CUDA"  # set in the processes that run over the stub


def build() -> Path:
    """Builds the stub if its sources are newer; returns its folder."""
    headers = (ROOT / "csrc").glob("*.h")
    newest = max(path.stat().st_mtime for path in (*SOURCES, *headers))
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest:
        LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        fresh = LIBRARY.with_suffix(f".{os.getpid()}")
        command = [
            "g++",
            "-std=c++20",
            "-O1",
            "-g",
            "-fPIC",
            "-fvisibility=hidden",
            "-shared",
            "-Wall",
            "-Wextra",
            "-pthread",
        ]
        if os.environ.get("VATTN_WERROR") == "ON":
            command.append("-Werror")
        command += ["-Wl,-soname,libcuda.so.1", f"-I{ROOT / 'csrc'}", "-o", str(fresh), *map(str, SOURCES)]
        subprocess.run(command, check=True)
        fresh.replace(LIBRARY)
    return LIBRARY.parent


def environment(**options: int) -> dict[str, str]:
    """The environment of a process over the stub; `options` are the STUB_CUDA_* variables, in lower case."""
    path = os.pathsep.join(filter(None, (str(build()), os.environ.get("LD_LIBRARY_PATH"))))
    return {**os.environ, "LD_LIBRARY_PATH": path, ACTIVE: "1", **variables(options)}


def variables(options: Mapping[str, int]) -> dict[str, str]:
    """The STUB_CUDA_* variables of these options, whose names are in lower case."""
    return {f"STUB_CUDA_{name.upper()}": str(value) for name, value in options.items()}


@dataclass(frozen=True)
class Usage:
    reservations: int
    mappings: int
    handles: int
    events: int
    bytes: int

    @property
    def memory(self) -> tuple[int, int, int, int]:
        """All but the events, of which a driver keeps a stock while a cache or a tensor of it lives."""
        return self.reservations, self.mappings, self.handles, self.bytes


class Stub:
    """The stub that this process loaded, or would load."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, result, *arguments in (
            ("calls", ctypes.c_size_t, ctypes.c_char_p),
            ("fail", None, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int),
            ("heal", None),
            ("latency", None, ctypes.c_char_p, ctypes.c_size_t),
            ("hold", None, ctypes.c_char_p),
            ("held", ctypes.c_size_t),
            ("stalls", ctypes.c_size_t, ctypes.c_char_p),
            ("logging", None, ctypes.c_int),
            ("log", ctypes.c_char_p),
            ("violations", ctypes.c_char_p),
            ("forgive", None),
            ("memory", None, ctypes.c_size_t),
            ("usage", None, ctypes.c_size_t * 5),
            ("locking", None, ctypes.c_int),
            ("end", None),
            ("stream", ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
            ("pool", ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
            ("launch", None, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int),
            ("complete", None, ctypes.c_size_t, ctypes.c_size_t),
            ("capture", ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint),
            ("reset", None),
            ("waiters", ctypes.c_size_t),
        ):
            function = getattr(self._library, f"stub_{name}")
            function.restype, function.argtypes = result, arguments

    def calls(self, name: str) -> int:
        return int(self._library.stub_calls(name.encode()))

    def fail(self, name: str | None, nth: int = 1, code: int = 999) -> None:
        self._library.stub_fail(name.encode() if name else None, nth, code)

    def heal(self) -> None:
        self._library.stub_heal()

    def latencies(self, microseconds: dict[str, int]) -> None:
        for name, value in microseconds.items():
            self._library.stub_latency(name.encode(), value)

    def hold(self, name: str | None) -> None:
        """From now on calls of this name wait, under the driver's lock if it is on; None lets all go on."""
        self._library.stub_hold(name.encode() if name else None)

    def held(self) -> int:
        """How many calls wait because of `hold`."""
        return int(self._library.stub_held())

    def stalls(self, name: str = "launch") -> int:
        """How many launches, or calls of a name, had to wait for the driver's lock."""
        return int(self._library.stub_stalls(name.encode()))

    def logging(self, on: bool) -> None:
        self._library.stub_logging(on)

    def log(self, *names: str) -> list[str]:
        lines: Iterable[str] = self._library.stub_log().decode().splitlines()
        return [line for line in lines if not names or line.split()[0] in names]

    def violations(self) -> list[str]:
        return list(self._library.stub_violations().decode().splitlines())

    def forgive(self) -> None:
        self._library.stub_forgive()

    def memory(self, size: int) -> None:
        self._library.stub_memory(size)

    def usage(self) -> Usage:
        values = (ctypes.c_size_t * 5)()
        self._library.stub_usage(values)
        return Usage(*values)

    def locking(self, on: bool) -> None:
        """Whether calls take their latencies under a lock that launches need too."""
        self._library.stub_locking(on)

    def end(self) -> None:
        """Ends the driver, as the exit of the process does: every later call fails with CUDA_ERROR_DEINITIALIZED."""
        self._library.stub_end()

    def stream(self, device: int = 0, *, blocking: bool = False) -> int:
        """A stream: the next one of `pool`; `blocking`: a new one, which waits for the legacy default stream and is
        waited for by it.
        """
        return int(self._library.stub_stream(device, blocking))

    def pool(self, device: int = 0) -> list[int]:
        """All streams of a device that do not block; like torch's, they exist from the start."""
        handles = (ctypes.c_size_t * self._library.stub_pool(device, None))()
        self._library.stub_pool(device, handles)
        return list(handles)

    def launch(self, stream: int, address: int, size: int, *, writes: bool = False) -> None:
        self._library.stub_launch(stream, address, size, writes)

    def complete(self, stream: int, kernels: int = 1 << 30) -> None:
        self._library.stub_complete(stream, kernels)

    def capture(self, stream: int, on: bool, mode: int = 0) -> int:
        """Begins or ends a capture; at the end, 0 or CUDA_ERROR_STREAM_CAPTURE_INVALIDATED."""
        return int(self._library.stub_capture(stream, on, mode))

    def reset(self) -> None:
        self._library.stub_reset()

    def waiters(self) -> int:
        return int(self._library.stub_waiters())


def stand_in() -> None:
    """Lets a torch without CUDA pass for one with it.

    What is left to torch is little: whether it has CUDA, its current device and stream, and the import of tensors. The
    stub's memory is the host's, so tensors come in as that.
    """
    from vattn.drivers import cuda

    cuda.torch_lacks = lambda: None
    torch.cuda.is_available = lambda: False  # CUDA's runtime, in a torch that has it, would warn about the stub
    cuda.current_device = lambda: 0
    cuda.torch_streams = lambda device: Stub().pool(device.index)
    streams = [0]  # the last is the current one

    @contextlib.contextmanager
    def use_stream(device: torch.device, handle: int) -> Iterator[None]:
        streams.append(handle)
        try:
            yield
        finally:
            streams.pop()

    cuda.current_stream = lambda device: streams[-1]
    cuda.use_stream = use_stream
    cuda._DLPACK_CUDA = 1  # DLPack's number for the CPU
