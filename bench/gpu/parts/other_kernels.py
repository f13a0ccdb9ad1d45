"""Attention of one layer by kernels that few machines have, and over blocks of 16 tokens.

flash-attn 2.8 takes blocks of a multiple of 256 tokens (`mha_fwd_kvcache` in its `flash_api.cpp`: "Paged KV cache block
size must be divisible by 256"), and so does torch's operator; flash-attn 3 and FlashInfer take 16. What a kernel
refuses, or that it is not installed, is a row, and no failure. FlashInfer comes last: it compiles at its first call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu import flash_attn_2, flash_attn_3
from bench.gpu.caches import BLOCK_SIZE
from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, STUB, copy_bandwidth, empty_cache
from bench.gpu.figures import Figures
from bench.gpu.parts.attention import SMALL_BLOCKS, Work, measure, row
from bench.gpu.sides import Side
from bench.harness.report import Report, Row
from vattn.attention import Case, adapters

ABOUT = "attention by kernels that may be there (flash-attn 3, FlashInfer), and over blocks of 16 tokens"
RANK = 19
SECONDS = 50

_KERNELS = (*(["torch_sdpa"] if STUB else []), "flash_attn_2", "torch_flash", "flash_attn_3", "flashinfer")
_BLOCK_SIZES = {"virtual": None, "static": None, "paged": BLOCK_SIZE, SMALL_BLOCKS: 16}
_WORK = [
    *(Work(1, 1, 32_768), Work(16, 1, 16_384), Work(64, 1, 4096, "ragged"), Work(32, 1, 16_384, "ragged")),
    *(Work(1, 2048, 2048), Work(1, 8192, 8192), Work(1, 8192, 32_768), Work(1, 2048, 131_072)),
]
_QUICK = [Work(3, 1, 300, "ragged"), Work(1, 300, 512)]


def run(quick: bool) -> Report:
    flash_attn_2.provide()
    flash_attn_3.provide()
    figures = Figures()
    ceiling = copy_bandwidth()
    for sides in _sides():
        for refused in _refusals(sides):
            figures.append(refused)
        usable = [side for side in sides if not side.refusal]
        for work in (_QUICK if quick else _WORK) if usable else []:
            seconds = measure(work, usable, quick)
            for side in usable:
                figures.append(row(work, side, seconds, ceiling))
            empty_cache()
    return Report(parameters={"dtype": str(DTYPE), "copy GB/s": ceiling / 1e9}, figures=figures, goals=[])


def _sides() -> Iterator[list[Side]]:
    """By kernel, its sides."""
    known = {kernel.name: kernel for kernel in adapters()}
    for name in _KERNELS:
        yield [
            Side(cache, known[name], known[name].refusal(Case(torch.device(DEVICE), DTYPE, HEAD_DIM, block_size=size)))
            for cache, size in _BLOCK_SIZES.items()
        ]


def _refusals(sides: list[Side]) -> list[Row]:
    """A row for each thing that a kernel refuses, with the reason in place of the time."""
    found: dict[str, list[str]] = {}
    for side in sides:
        if side.refusal:
            found.setdefault(side.refusal, []).append(side.cache)
    empty = dict.fromkeys(row(_QUICK[0], sides[0], {}, 1.0), "-")
    return [
        {
            **empty,
            "cache": "all" if len(of) == len(sides) else " and ".join(of),
            "kernel": sides[0].kernel.name,
            "us": why,
        }
        for why, of in found.items()
    ]
