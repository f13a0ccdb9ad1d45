"""What a layer stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vattn_vllm.attention import WindowAttention, WindowMetadata

import vattn.cpu


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
