"""KV-cache memory for LLM serving: contiguous in virtual memory, on demand in physical memory, no block table.

cache = vattn.init(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16,
                   max_batch_size=64, max_context_len=131_072, memory_budget="4GiB")
reqid = vattn.alloc_reqid()
vattn.step({reqid: 1000})           # backs tokens [0, 1000) of the slot
k, v = cache.layer(0)               # torch tensors [max_batch_size, max_context_len, num_kv_heads, head_dim]
k[reqid, :1000] = ...               # plain memory, for any kernel
vattn.free_reqid(reqid)             # parked, not unmapped
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vattn.errors import (
    CacheClosed,
    ConfigError,
    DriverError,
    ForkedProcess,
    InvalidBlock,
    InvalidLength,
    InvalidSlot,
    InvalidTokens,
    MappingLimit,
    NoFreeSlot,
    OutOfPages,
    ProcessLimit,
    StreamCapturing,
    TokenMismatch,
    UnsupportedModel,
    VattnError,
)

if TYPE_CHECKING:
    from vattn import attention
    from vattn.api import alloc_reqid, free_reqid, init, look_ahead, step
    from vattn.block_windows import BlockWindows
    from vattn.cache import KVCache
    from vattn.config import KVConfig
    from vattn.engine import LLM, AsyncEngine, SamplingParams
    from vattn.groups import TensorGroup
    from vattn.hf import VirtualCache
    from vattn.pool.pool import PagePool
    from vattn.prefix import Admission
    from vattn.stats import BlockStats, CacheStats, CallStats, Capacity, SlotPages

    __version__: str

__all__ = [
    "LLM",
    "Admission",
    "AsyncEngine",
    "BlockStats",
    "BlockWindows",
    "CacheClosed",
    "CacheStats",
    "CallStats",
    "Capacity",
    "ConfigError",
    "DriverError",
    "ForkedProcess",
    "InvalidBlock",
    "InvalidLength",
    "InvalidSlot",
    "InvalidTokens",
    "KVCache",
    "KVConfig",
    "MappingLimit",
    "NoFreeSlot",
    "OutOfPages",
    "PagePool",
    "ProcessLimit",
    "SamplingParams",
    "SlotPages",
    "StreamCapturing",
    "TensorGroup",
    "TokenMismatch",
    "UnsupportedModel",
    "VattnError",
    "VirtualCache",
    "alloc_reqid",
    "attention",
    "free_reqid",
    "init",
    "look_ahead",
    "step",
]

# Names that are imported on first use, by the module that has them.
_HOMES = {
    "vattn.api": ("alloc_reqid", "free_reqid", "init", "look_ahead", "step"),
    "vattn.block_windows": ("BlockWindows",),
    "vattn.cache": ("KVCache",),
    "vattn.config": ("KVConfig",),
    "vattn.engine": ("LLM", "AsyncEngine", "SamplingParams"),
    "vattn.groups": ("TensorGroup",),
    "vattn.hf": ("VirtualCache",),
    "vattn.pool.pool": ("PagePool",),
    "vattn.prefix": ("Admission",),
    "vattn.stats": ("BlockStats", "CacheStats", "CallStats", "Capacity", "SlotPages"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # with it, type checkers would take any name for one of this module's

    def __getattr__(name: str) -> object:
        """Names are imported on first use: torch alone takes seconds, which `vattn --help` does not need."""
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), name)
        elif name == "attention":
            value = importlib.import_module("vattn.attention")
        elif name == "__version__":
            from importlib.metadata import version

            value = version("vattn")
        elif name in ("_kernels", "_native"):  # `from vattn import _native` asks here first
            try:
                value = importlib.import_module(f"vattn.{name}")
            except ModuleNotFoundError as error:
                raise ImportError(
                    f"{__path__[0]} has no compiled {name}: in a checkout, `pip install -e .` builds it; an installed "
                    "vattn is found where Python is started elsewhere"
                ) from error
        else:
            raise AttributeError(f"module 'vattn' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
