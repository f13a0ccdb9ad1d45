"""The time of a step: of a model on published GPUs, or fitted to the steps of a real run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vattn.engine.scheduling.record import StepRecord


@dataclass(frozen=True)
class Work:
    """What a step computes.

    Attributes:
        tokens: that go through the model.
        pairs: of a query and a key that attention multiplies, in each layer and head.
        reads: tokens whose keys and values are read.
    """

    tokens: int
    pairs: int
    reads: int


class StepTime(Protocol):
    """Seconds of a step."""

    def __call__(self, work: Work) -> float: ...


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU.

    Attributes:
        flops: multiplications and additions of bfloat16 per second, dense.
        bandwidth: bytes of its memory per second.
        link: bytes per second to other GPUs, in each direction.
        source: where the figures are published.
    """

    name: str
    flops: float
    bandwidth: float
    link: float
    source: str


A100 = Gpu("A100", 312e12, 2.039e12, 300e9, "NVIDIA A100 80GB datasheet: SXM, BF16 without sparsity, NVLink 600 GB/s")
H100 = Gpu("H100", 989.5e12, 3.35e12, 450e9, "NVIDIA H100 datasheet: SXM, BF16 without sparsity, NVLink 900 GB/s")

# Assumed, not published: what is reached of the published figures, a step's own overhead, and that of an all-reduce.
COMPUTE_SHARE, MEMORY_SHARE = 0.6, 0.8
STEP_SECONDS, REDUCE_SECONDS = 1e-3, 10e-6


@dataclass(frozen=True)
class Model:
    """What decides the time of a model's step; bfloat16.

    Attributes:
        parameters: how many.
        layers, heads, head_dim, hidden: of attention, and the width of the model.
        token_bytes: of keys and values, on all GPUs together.
    """

    name: str
    parameters: float
    layers: int
    heads: int
    head_dim: int
    hidden: int
    token_bytes: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters


LLAMA_3_8B = Model("Llama-3-8B", 8.03e9, 32, 32, 128, 4096, 131_072)


@dataclass(frozen=True)
class OnGpus:
    """A model on some GPUs, which divide its heads and its matrices (tensor parallelism).

    A step takes as long as its multiplications or its reads of memory, whichever takes longer; and the all-reduces, two
    a layer, which nothing hides.
    """

    gpu: Gpu
    model: Model
    gpus: int

    def __call__(self, work: Work) -> float:
        model, gpu = self.model, self.gpu
        flops = 2 * model.parameters * work.tokens + 4 * model.layers * model.heads * model.head_dim * work.pairs
        read = model.weight_bytes + model.token_bytes * work.reads
        seconds = max(flops / (gpu.flops * COMPUTE_SHARE), read / (gpu.bandwidth * MEMORY_SHARE)) / self.gpus
        if self.gpus > 1:
            sent = 2 * work.tokens * model.hidden * 2 * (self.gpus - 1) / self.gpus
            seconds += 2 * model.layers * (REDUCE_SECONDS + sent / gpu.link)
        return seconds + STEP_SECONDS


@dataclass(frozen=True)
class Fitted:
    """A line through the steps of a real run: seconds of a step, and of each of its tokens."""

    step: float
    token: float

    @classmethod
    def to(cls, records: Sequence[StepRecord]) -> Fitted:
        """By least squares."""
        rows = np.array([(1, record.decode_tokens + record.prefill_tokens) for record in records], dtype=float)
        seconds = np.array([record.forward_seconds for record in records])
        (step, token), *_ = np.linalg.lstsq(rows, seconds, rcond=None)
        return cls(float(step), float(token))

    def __call__(self, work: Work) -> float:
        return self.step + self.token * work.tokens
