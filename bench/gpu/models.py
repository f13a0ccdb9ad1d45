"""Llama models with random weights, made on the GPU."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.gpu.device import DTYPE, HEAD_DIM, HEADS, KV_HEADS
from vattn import packed


def llama(*, layers: int, hidden: int = 4096, intermediate: int = 14_336, vocabulary: int = 128_256) -> PreTrainedModel:
    """A model ready for packed steps: Llama-3-8B with 32 layers; its attention heads at any other size."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=131_072,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device("cuda"):
            torch.manual_seed(0)
            model: PreTrainedModel = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.train(False)
    packed.register()
    model.set_attn_implementation(packed.NAME)
    return model
