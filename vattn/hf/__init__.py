"""transformers: `VirtualCache` for `generate()`, and packed batches through unmodified models."""

from vattn.hf.mla import LatentAttention, find_latents, handing_on, store_latents
from vattn.hf.packed import (
    NAME,
    PackedStep,
    attention_forward,
    check_supported,
    current_step,
    max_context,
    packed_mask,
    register,
    run_packed,
)
from vattn.hf.shape import KVShape, LayerShape, kv_shape
from vattn.hf.virtual_cache import VirtualCache

__all__ = [
    "NAME",
    "KVShape",
    "LatentAttention",
    "LayerShape",
    "PackedStep",
    "VirtualCache",
    "attention_forward",
    "check_supported",
    "current_step",
    "find_latents",
    "handing_on",
    "kv_shape",
    "max_context",
    "packed_mask",
    "register",
    "run_packed",
    "store_latents",
]
