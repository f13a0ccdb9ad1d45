"""Interrupts come where they are asked for, whatever bytecode this Python has."""

from __future__ import annotations

import pytest

import vattn
from tests.campaign.injection import interrupted


@pytest.mark.parametrize("how", ["raise", "signal"])
def test_an_interrupt_comes_when_a_call_has_happened(how: str) -> None:
    config = vattn.KVConfig(
        num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", max_batch_size=1, max_context_len=100
    )
    with vattn.KVCache(config) as cache:
        slot = cache.alloc_reqid()
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda: cache.step({slot: 50}), "done", 1, how)
        assert cache.length(slot) == 50
        cache.check()
