"""transformers: `VirtualCache` for `generate()`, and packed batches through unmodified models."""

from vattn.hf.packed import (
    NAME,
    KVShape,
    PackedStep,
    attention_forward,
    check_supported,
    kv_shape,
    max_context,
    packed_mask,
    register,
    run_packed,
)
from vattn.hf.virtual_cache import VirtualCache

__all__ = [
    "NAME",
    "KVShape",
    "PackedStep",
    "VirtualCache",
    "attention_forward",
    "check_supported",
    "kv_shape",
    "max_context",
    "packed_mask",
    "register",
    "run_packed",
]
