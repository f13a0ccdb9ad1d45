"""KV-cache memory for LLM serving: contiguous in virtual memory, on demand in physical memory, no block table.

cache = vattn.init(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16,
                   max_batch_size=64, max_context_len=131_072, memory_budget="4GiB")
reqid = vattn.alloc_reqid()
vattn.step({reqid: 1000})           # backs tokens [0, 1000) of the slot
k, v = cache.layer(0)               # torch tensors [max_batch_size, max_context_len, num_kv_heads, head_dim]
k[reqid, :1000] = ...               # plain memory, for any kernel
vattn.free_reqid(reqid)             # parked, not unmapped
"""

import importlib.metadata
from typing import TYPE_CHECKING, Any

from vattn import attention
from vattn.api import alloc_reqid, free_reqid, init, step
from vattn.block_windows import BlockWindows
from vattn.cache import KVCache
from vattn.config import KVConfig
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
from vattn.groups import TensorGroup
from vattn.memory.pool import PagePool
from vattn.prefix import Admission
from vattn.stats import BlockStats, CacheStats, CallStats, Capacity, SlotPages

if TYPE_CHECKING:
    __version__: str

    from vattn.engine import LLM, AsyncEngine, SamplingParams
    from vattn.hf import VirtualCache

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
    "step",
]


# Imported on first use, since they load transformers.
_LAZY = {
    "AsyncEngine": "vattn.engine",
    "LLM": "vattn.engine",
    "SamplingParams": "vattn.engine",
    "VirtualCache": "vattn.hf",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "__version__":
        return importlib.metadata.version("vattn")
    raise AttributeError(f"module 'vattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LAZY.keys() | {"__version__"})
