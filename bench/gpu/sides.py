"""What is compared: the caches, each read by the same kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def sides(first: Sequence[str] = ()) -> list[Side]:
    """The sides of a comparison, by kernel.

    Args:
        first: kernels that come before the others, if the environment names none and they can read all caches.

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
    for name in names:
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
