"""`vattn doctor`: a report on the drivers, devices, kernels, limits and pools of this machine."""

from __future__ import annotations

import os
import platform
import time
from contextlib import closing
from importlib import metadata

import torch

from vattn import _native, attention, cpu
from vattn.broker.control import Control, summary
from vattn.broker.places import pools
from vattn.cores import FreeCores, cores, thread_counts
from vattn.drivers import cuda, host
from vattn.errors import DriverError, VattnError
from vattn.units import format_bytes

_LOOK_SECONDS = 0.1  # for which the report looks at what other programs do
_BROKER_SECONDS = 2.0  # in which a broker answers


def doctor() -> str:
    """A report on the drivers, devices, kernels, limits and pools of this machine, as text."""
    free_cores = FreeCores()
    time.sleep(_LOOK_SECONDS)
    machine = host.HostDevice()
    usage = _native.host_usage()
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for _ in maps)
    lines = [
        f"vattn {_version('vattn')}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {_version('transformers')}, Linux {platform.release()} ({platform.machine()})",
        "",
        "drivers",
        f"  host   ok: pages of {format_bytes(host.MIN_PAGE_SIZE)} to {format_bytes(host.MAX_PAGE_SIZE)} over memfd; "
        f"{usage.reservations} reservations, {format_bytes(usage.physical_bytes)} in use by this process",
        *_cuda_driver(),
        "devices",
        f"  cpu    {cores()} of {os.cpu_count()} cores for this process, {free_cores()} free now; "
        f"{format_bytes(machine.available_memory())} available",
        f"  threads {_threads()}",
        *_cuda_devices(),
        "kernels",
        *(f"  {line}" for line in attention.describe()),
        f"  for CPUs: {cpu.describe()}",
        "limits",
        f"  mappings per process  {machine.mapping_limit()} (vm.max_map_count), {mappings} in use; "
        "one per page that is not next to its neighbour",
        f"  largest reservation   {_largest_reservation()}",
        "pools",
        *(f"  {line}" for line in _pools()),
    ]
    return "\n".join(lines)


def _threads() -> str:
    """How many threads compute, and who decides it."""
    most = torch.get_num_threads()
    counts = thread_counts(cores(), most)
    torch_says = f"torch computes with {most}"
    if os.environ.get("OMP_NUM_THREADS"):
        torch_says += ", as OMP_NUM_THREADS says"
    if len(counts) == 1:
        return f"{torch_says}; LLM with {counts[0]}, unless num_threads says otherwise"
    listed = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
    return f"{torch_says}; LLM measures steps with {listed}, again and again, unless num_threads says how many"


def _pools() -> list[str]:
    """The pools of this user's brokers, and what their books and the kernel do not agree in."""
    try:
        names = list(pools())
    except (VattnError, OSError) as error:
        return [f"none can be found: {error}"]
    lines = []
    for name in names:
        try:
            with closing(Control(name, seconds=_BROKER_SECONDS)) as control:
                top, problems = control.ask("top"), control.ask("check")["problems"]
        except (VattnError, OSError) as error:
            lines.append(f"{name}  no: {error}")
            continue
        lines.append(f"{name}  ok: {summary(top)}")
        lines += [f"  wrong: {problem}" for problem in problems]
    return lines or ["none; vattn pool serve NAME --budget SIZE makes one"]


def _cuda_driver() -> list[str]:
    try:
        bindings, lacking = cuda.start()
        lacking = [reason for reason in (cuda.torch_lacks(), *lacking) if reason]
        if lacking:
            return [f"  cuda   no: {reason}" for reason in lacking]
        version = cuda.format_version(cuda.call(bindings.cuDriverGetVersion))
    except VattnError as error:
        return [f"  cuda   no: {error}"]
    return [f"  cuda   ok: a driver for CUDA {version}, cuda-python {_version('cuda-bindings')}"]


def _cuda_devices() -> list[str]:
    lines = []
    try:
        bindings, lacking = cuda.start()
        for ordinal in range(0 if lacking else cuda.device_count(bindings)):
            name, supported, memory = cuda.describe(bindings, ordinal)
            state = _sharing(ordinal) if supported else "unusable, it has no virtual memory management"
            lines.append(f"  cuda:{ordinal} {name}, {format_bytes(memory)}; {state}")
    except VattnError as error:
        lines.append(f"  cuda   {error}")
    return lines


def _sharing(ordinal: int) -> str:
    """How slots share pages on a GPU, which takes a context and a page of memory to find out."""
    try:
        read_only = cuda.find(torch.device("cuda", ordinal)).read_only
    except VattnError as error:
        return f"not usable now: {error}"
    return "shared pages are mapped read-only" if read_only else f"no read-only mappings: {cuda.NOT_READ_ONLY}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _largest_reservation() -> str:
    """The largest power of two that can be reserved, found by trial."""
    driver = host.HostDevice().open(host.MAX_PAGE_SIZE)
    pool = _native.PagePool(host.MAX_PAGE_SIZE, 1)
    for power in range(47, 30, -1):
        try:
            _native.AddressSpace(
                driver.native, pool, tensors=1, slots=1, runs=1, run_pages=2**power // host.MAX_PAGE_SIZE
            )
        except DriverError:
            continue
        return f"{format_bytes(2**power)} of address space"
    return "below 2 GiB; see ulimit -v"
