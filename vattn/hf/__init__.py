"""transformers: packed batches through unmodified models."""

from vattn.hf.mla import LatentAttention, find_latents, handing_on, store_latents
from vattn.hf.packed import (
    NAME,
    PackedStep,
    attention_forward,
    check_supported,
    max_context,
    packed_mask,
    register,
    run_packed,
)
from vattn.hf.shape import KVShape, LayerShape, kv_shape

__all__ = [
    "NAME",
    "KVShape",
    "LatentAttention",
    "LayerShape",
    "PackedStep",
    "attention_forward",
    "check_supported",
    "find_latents",
    "handing_on",
    "kv_shape",
    "max_context",
    "packed_mask",
    "register",
    "run_packed",
    "store_latents",
]
