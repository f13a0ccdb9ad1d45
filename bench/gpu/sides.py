"""What is compared: the caches, each read by the same kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Any

import torch

from bench.gpu import caches, flash_attn_2, flash_attn_3
from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, STUB
from vattn.attention import Attention, Case, adapters

CACHES: dict[str, Callable[..., Any]] = {
    "virtual": caches.virtual,
    "static": caches.static,
    "paged": caches.paged,
}
# Names of the kernels to compare, with commas between them: for kernels that a call of its own brings along.
KERNELS = "VATTN_GPU_KERNELS"
_DEFAULT = "torch_sdpa" if STUB else "flash_attn_2,torch_flash"  # the stub's machine has no kernel of CUDA's
# torch's operator takes blocks in newer versions only, so this side is a bonus and not missing without them.
_BONUS = [("paged", "torch_flash")]


@dataclass(frozen=True)
class Side:
    """One cache read by one kernel; with the reason if it cannot be measured here, which fails the run."""

    cache: str
    kernel: Attention
    refusal: str | None = None

    def __str__(self) -> str:
        return f"{self.cache} with {self.kernel.name}" + (f": {self.refusal}" if self.refusal else "")


def sides(first: Sequence[str] = (), *, instead_of: Sequence[str] = ()) -> list[Side]:
    """The sides of a comparison, by kernel.

    Args:
        first: kernels that come before the others, if the environment names none and they can read all caches.
        instead_of: kernels that are left out where one of `first` is there.

    Raises:
        ValueError: the environment names a kernel that does not exist.
    """
    known = {kernel.name: kernel for kernel in adapters()}
    named = os.environ.get(KERNELS)
    names = (named or _DEFAULT).split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{KERNELS} names {', '.join(unknown)}; there are {', '.join(known)}")
    absent = {"flash_attn_2": flash_attn_2.provide(), "flash_attn_3": flash_attn_3.provide()}
    found = []
    for name in () if named else first:
        of_kernel = [Side(cache, known[name], _refusal(known[name], cache)) for cache in CACHES]
        if not any(side.refusal for side in of_kernel):
            found += of_kernel
    for name in [name for name in names if not (found and name in instead_of)]:
        for cache in CACHES:
            refusal = _refusal(known[name], cache)
            if refusal and (cache, name) in _BONUS:
                continue
            if refusal and absent.get(name):
                refusal = f"{refusal}; {absent[name]}"
            found.append(Side(cache, known[name], refusal))
    return found


def _refusal(kernel: Attention, cache: str) -> str | None:
    block_size = caches.BLOCK_SIZE if cache == "paged" else None
    return kernel.refusal(Case(torch.device(DEVICE), DTYPE, HEAD_DIM, block_size=block_size))


def low(of: Sequence[float]) -> float:
    """The tenth percentile: of many ratios the least is noise."""
    return quantiles(of, n=10, method="inclusive")[0] if len(of) > 1 else min(of, default=1.0)


def ratios(seconds: Mapping[Any, Mapping[Side, float]], over: str, under: str) -> list[float]:
    """By case, the seconds with one cache over those with another, by the same kernel."""
    return [
        found[side] / own
        for found in seconds.values()
        for virtual, own in found.items()
        if virtual.cache == under and (side := replace(virtual, cache=over)) in found
    ]


def best_over_best(seconds: Mapping[Any, Mapping[Side, float]]) -> list[float]:
    """By case, paged over virtual, each by its fastest kernel."""
    of_cases = []
    for found in seconds.values():
        paged, virtual = ([own for side, own in found.items() if side.cache == cache] for cache in ("paged", "virtual"))
        if paged and virtual:
            of_cases.append(min(paged) / min(virtual))
    return of_cases
