"""Models with random weights in published shapes."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from vattn import packed

# What models call their cache: transformers took another name for it with 5.24.
CACHE = "cache" if "cache" in signature(Qwen2ForCausalLM.forward).parameters else "past_key_values"

# Qwen2-0.5B with a third of its layers and a fifth of its vocabulary.
QWEN2 = {
    "vocab_size": 32_000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 8,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
# What a quick run changes in it.
TINY = {"vocab_size": 256, "num_hidden_layers": 1, "hidden_size": 112, "intermediate_size": 64}


def qwen2(**config: Any) -> PreTrainedModel:
    """A Qwen2 model with random weights in bfloat16, ready for packed steps."""
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**config))
    model.bfloat16()
    model.train(False)
    packed.register()
    model.set_attn_implementation(packed.NAME)
    return model
