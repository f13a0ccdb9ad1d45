"""Llama models with random weights, made on the GPU."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, HEADS, KV_HEADS, STUB
from vattn import packed


def llama(*, layers: int) -> PreTrainedModel:
    """A model ready for packed steps: Llama-3-8B with 32 layers; over the stub narrow but with its heads."""
    hidden, intermediate, vocabulary = (64, 64, 256) if STUB else (4096, 14_336, 128_256)
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
        with torch.device(DEVICE):
            torch.manual_seed(0)
            model: PreTrainedModel = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.train(False)
    packed.register()
    model.set_attn_implementation(packed.NAME)
    return model
