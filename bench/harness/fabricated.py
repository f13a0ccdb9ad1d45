"""Steps of an engine without its model: a cache is filled and used in seconds instead of minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vattn import packed
from vattn.engine.core import EngineCore


@contextmanager
def without_model(core: EngineCore) -> Iterator[None]:
    """Within it, steps store random keys and values, and the logits of all tokens are equal."""
    runner = core.runner
    shape = packed.kv_shape(runner.model)
    most = core.scheduler.max_num_batched_tokens
    rows = [
        [
            torch.randn(most, layer.num_kv_heads, dim, dtype=runner.model.dtype)
            for dim in (layer.head_dim, layer.v_head_dim)
        ]
        for layer in shape.layers
    ]

    def compute(step: Any, tokens: Tensor, logit_rows: Tensor) -> Tensor:
        for layer, (keys, values) in enumerate(rows):
            core.kv.write(layer, step.batch, keys[: len(tokens)], values[: len(tokens)])
        step.finite = torch.ones(len(tokens), dtype=torch.bool)  # what was stored may be published
        return torch.zeros(len(logit_rows), core.loaded.vocab_size)

    runner._compute = compute  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del runner._compute
