"""transformers: packed batches through unmodified models."""

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

__all__ = [
    "NAME",
    "KVShape",
    "LayerShape",
    "PackedStep",
    "attention_forward",
    "check_supported",
    "current_step",
    "kv_shape",
    "max_context",
    "packed_mask",
    "register",
    "run_packed",
]
