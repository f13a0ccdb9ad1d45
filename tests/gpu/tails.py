"""Kernels with an unmapped page, or with NaN, right after the end of a request's tokens.

    python -m tests.gpu.tails KERNEL unmapped|nan    prints the largest error against float64, or dies

Each case is a process of its own, since a stray read ends the CUDA context of its process. KERNEL is an adapter's name
or "cudnn": torch's SDPA by cuDNN alone, which the engine leaves out and a user of torch may not.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu import PAGE
from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, HEADS, KV_HEADS, random, usable_kernels
from bench.gpu.lifetime import end_with
from tests.support.paths import ROOT
from vattn import KVConfig
from vattn.attention import AttentionParams, Contiguous, KVSource, PackedBatch, Span, get
from vattn.engine.kv.virtual import VirtualKV

KINDS = ("unmapped", "nan")
CUDNN = "cudnn"
TOLERANCE = 0.02  # bfloat16, values of variance 1 averaged over many keys
_SECONDS = 40 if DEVICE == "cuda" else 600


def in_a_process(kernel: str, kind: str) -> float:
    """The largest error of a case; infinite if the process died."""
    command = [sys.executable, "-m", "tests.gpu.tails", kernel, kind]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            preexec_fn=partial(end_with, os.getpid()),
        )
    except subprocess.TimeoutExpired:
        print(f"{kernel} {kind}: stopped after {_SECONDS} s")
        return math.inf
    if done.returncode != 0:
        print(f"{kernel} {kind}: {done.stderr.strip().splitlines()[-1:]}")
        return math.inf
    return float(done.stdout.split()[-1])


_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
]


class _Doubles:
    """A cache read as float64, for the reference."""

    def __init__(self, kv: KVSource) -> None:
        self._kv = kv
        self.stored = kv.stored

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        key, value = self._kv.read(layer, slot, length, start)
        return key.double(), value.double()


def reference(
    query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams | None = None
) -> Tensor:
    """The expected output of a kernel: torch's SDPA in float64."""
    return get("torch_sdpa")(query.double(), _Doubles(kv), layer, batch, params or AttentionParams())


def check(kernel: str, kind: str) -> float:
    """The largest error over decodes and chunks, of lengths that end with a page and of others."""
    block = PAGE // (KV_HEADS * HEAD_DIM * DTYPE.itemsize)
    config = KVConfig.from_options(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        max_batch_size=4,
        max_context_len=8 * block,
        device="cuda",
        memory_budget=64 * PAGE,
        layout="layer",
        kv_order="NHD",
        overlap=False,
        eager_pages=0,
    )
    kv = VirtualKV(config)
    lengths = [block, 3 * block, 2 * block, 4 * block] if kind == "unmapped" else [block + 1, 77, 2 * block - 3, 3]
    slots = [kv.allocate(0) for _ in lengths]
    kv.prepare(dict(zip(slots, lengths, strict=True)))
    mapped = {slot.reqid: slot.mapped for slot in kv.cache.page_map()}
    assert kind != "unmapped" or [mapped[slot] for slot in slots] == lengths, "something is mapped past a length"
    stored = kv.stored(0)
    assert isinstance(stored, Contiguous)
    for slot, length in zip(slots, lengths, strict=True):
        for side in (stored.key, stored.value):
            side[slot, : mapped[slot]] = math.nan
            side[slot, :length] = random(length, KV_HEADS, HEAD_DIM)
    name = "torch_sdpa" if kernel == CUDNN else kernel
    adapter = next(usable for usable in usable_kernels() if usable.name == name)
    allowed = [backend for backend in _BACKENDS if (backend is SDPBackend.CUDNN_ATTENTION) == (kernel == CUDNN)]
    worst = 0.0
    for span_length in (1, 40, 300, 600):  # flash-attn 3 computes the last one alone, the others together
        spans = [Span(s, max(0, n - span_length), n) for s, n in zip(slots, lengths, strict=True)]
        batch = PackedBatch.pack(spans, DEVICE)
        query = random(batch.num_tokens, HEADS, HEAD_DIM)
        with sdpa_kernel(allowed):
            got = adapter(query, kv, 0, batch, AttentionParams())
        error = (got.double() - reference(query, kv, 0, batch)).abs().max()
        worst = max(worst, math.inf if torch.isnan(error) else float(error))
    return worst


if __name__ == "__main__":
    print(check(*sys.argv[1:]))
