"""Packed steps for engines: running an unmodified transformers model on them, and the shape of its keys and values."""

from vattn.attention.interface import NAME, PackedStep, RowsStep, current_step, register, wanted_rows
from vattn.packed.latents import LatentAttention, find_latents, handing_on, store_latents
from vattn.packed.shape import KVShape, LayerShape, kv_shape
from vattn.packed.step import check_supported, max_context, run_packed

__all__ = [
    "NAME",
    "KVShape",
    "LatentAttention",
    "LayerShape",
    "PackedStep",
    "RowsStep",
    "check_supported",
    "current_step",
    "find_latents",
    "handing_on",
    "kv_shape",
    "max_context",
    "register",
    "run_packed",
    "store_latents",
    "wanted_rows",
]
