"""What a layer stores, and what it reads beside keys and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vattn_vllm.attention import WindowAttention, WindowMetadata

import vattn.cpu
from vattn.attention import AttentionParams, Contiguous, PackedBatch, Span
from vattn.attention.native import Native


@pytest.mark.parametrize("native", [False, True])
def test_tokens_without_a_slot_are_stored_nowhere(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(vattn.cpu, "store", lambda *_: False)
    layer: Any = object.__new__(WindowAttention)
    layer.num_heads, layer.head_size, layer._layer, layer._shares = 1, 2, None, None
    layer._keys, layer._values = torch.zeros(4, 1, 2), torch.zeros(4, 1, 2)
    layer._kernel, layer._params = lambda query, *_: query, None
    metadata: Any = object.__new__(WindowMetadata)
    metadata.num_actual_tokens, metadata.slots = 3, torch.tensor([2, -1, 0])
    metadata.batch = metadata.table = None
    key, value = torch.arange(1.0, 9.0).view(4, 1, 2), -torch.arange(1.0, 9.0).view(4, 1, 2)
    layer.forward(None, torch.zeros(4, 1, 2), key, value, None, metadata, torch.zeros(4, 2))
    expected = torch.stack((key[2], torch.zeros(1, 2), key[0], torch.zeros(1, 2)))
    assert torch.equal(layer._keys, expected)
    assert torch.equal(layer._values, -expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_that_are_loaded_again_count(dtype: torch.dtype) -> None:
    """vLLM writes them to the parameter that the layer was made with."""
    layer: Any = object.__new__(WindowAttention)
    layer.num_heads, layer.head_size, layer.scale, layer._shares = 2, 8, 1.0, None
    sinks = torch.zeros(2, dtype=dtype)
    layer._kernel, layer._params = Native(), AttentionParams(scale=1.0, sinks=sinks)
    stored = torch.zeros(1, 16, 1, 16, dtype=dtype)
    memory: Any = SimpleNamespace(
        group_of=lambda _: 0,
        stored=lambda _: Contiguous(stored[..., :8], stored[..., 8:]),
        slots=lambda _: stored.flatten(0, 1),
    )
    layer.use(memory, "layer")
    metadata: Any = object.__new__(WindowMetadata)
    metadata.num_actual_tokens, metadata.slots = 1, torch.tensor([0])
    metadata.batch, metadata.table = PackedBatch((Span(0, 0, 1),)), None
    query, key, value = torch.zeros(1, 2, 8, dtype=dtype), torch.zeros(1, 1, 8, dtype=dtype), torch.ones(1, 1, 8)

    def attended() -> list[float]:
        output = torch.empty(1, 16, dtype=dtype)
        layer.forward(None, query, key, value.to(dtype), None, metadata, output)
        heads: list[float] = output.view(2, 8)[:, 0].tolist()
        return heads

    assert attended() == [0.5, 0.5]
    sinks.data.copy_(torch.tensor([float("-inf"), 0.0]))
    assert attended() == [1.0, 0.5]
