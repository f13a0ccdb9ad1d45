"""The GPU, or the stub driver and the CPU in its place; timing on the device; Llama-3-8B's shapes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

import stub_cuda
from bench.gpu import flash_attn_2, flash_attn_3
from bench.harness.timing import Key, interleave
from vattn.attention import Attention, Case, adapters, get

STUB = stub_cuda.ACTIVE in os.environ
DEVICE = "cpu" if STUB else "cuda"  # of all tensors but a cache's; the stub's memory is the host's
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
_HEAD_START = 8_000_000  # clock cycles of the device, about 4 ms


def over_stub() -> bool:
    """Whether this process runs over the stub driver; if so, makes torch pass for a build with CUDA."""
    if STUB:
        stub_cuda.stand_in()
    return STUB


def stub_environment() -> dict[str, str]:
    """Builds the stub driver; returns the environment of a process that loads it."""
    # Threads that wait for each other take ten times as long on busy cores.
    return {**stub_cuda.environment(), "OMP_NUM_THREADS": "1"}


def usable_kernels(block_size: int | None = None) -> list[Attention]:
    """The kernels that accept Llama-3-8B's shapes here, over contiguous slots or over blocks of `block_size` tokens."""
    case = Case(torch.device(DEVICE), DTYPE, HEAD_DIM, block_size=block_size)
    flash_attn_2.provide()
    flash_attn_3.provide()
    return [kernel for kernel in adapters() if kernel.refusal(case) is None]


def best(block_size: int | None = None) -> Attention:
    """The kernel that "auto" chooses for Llama-3-8B's shapes."""
    return get("auto", Case(torch.device(DEVICE), DTYPE, HEAD_DIM, block_size=block_size))


def synchronize() -> None:
    """Waits for the device."""
    if not STUB:
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Gives the memory that torch keeps for itself back to the device."""
    if not STUB:
        torch.cuda.empty_cache()


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy on the device that no cache holds: what a kernel can hope for."""
    source = torch.empty(2**20 if STUB else 2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / times({"copy": lambda: target.copy_(source)}, rounds=20)["copy"]


def times(actions: Mapping[Key, Callable[[], object]], rounds: int, *, warmup: int = 3) -> dict[Key, float]:
    """Median seconds of each action on the device, by events; interleaved, so that clocks and heat affect all alike.

    Each round begins with a pause of the device during which the host launches everything, so Python is not timed.
    """
    if STUB:
        return {key: median(seconds) for key, seconds in interleave(actions, rounds=2, warmup=0).items()}
    events: dict[Key, list[tuple[Any, Any]]] = {key: [] for key in actions}
    order = list(actions)
    for number in range(-warmup, rounds):
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        for key in order:
            begin, end = _event(), _event()
            begin.record()
            actions[key]()
            end.record()
            if number >= 0:
                events[key].append((begin, end))
        order = order[1:] + order[:1]
    torch.cuda.synchronize()
    return {key: median(a.elapsed_time(b) for a, b in pairs) * 1e-3 for key, pairs in events.items()}


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)
