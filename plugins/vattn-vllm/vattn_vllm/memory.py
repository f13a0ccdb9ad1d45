"""`KVMemory`: the KV cache of one worker, as vLLM's blocks and as windows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vattn import BlockWindows
from vattn.attention import Contiguous
from vattn_vllm.options import Options
from vattn_vllm.refusals import check_cache

# vLLM's block 0 stands for "no block": padding is written there, and nobody reads it.
NULL_BLOCK = 0


class KVMemory:
    """Blocks at home, `[num_blocks, num_kv_heads, block_size, 2 * head_size]` for vLLM, and windows for kernels.

    Raises:
        ConfigError: layers that differ, blocks that are not whole pages, or too many mappings.
    """

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, device: torch.device, options: Options) -> None:
        spec = check_cache(cache)
        names = [name for group in cache.kv_cache_groups for name in group.layer_names]
        self._head_size = spec.head_size
        self.windows = BlockWindows(
            num_layers=len(names),
            num_blocks=cache.num_blocks,
            block_size=spec.block_size,
            row=(spec.num_kv_heads, 2 * spec.head_size),
            dtype=spec.dtype,
            num_windows=config.scheduler_config.max_num_seqs + options.spare_windows,
            max_context_len=config.model_config.max_model_len,
            layout=options.layout,
            page_size=options.page_size,
            device=device,
            guard=options.guard,
        )
        self.back([NULL_BLOCK])
        self._indices = {name: index for index, name in enumerate(names)}

    def views(self) -> dict[str, Tensor]:
        """The cache of each layer as vLLM sees it: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`."""
        return {name: self.windows.home(index).transpose(1, 2) for name, index in self._indices.items()}

    def rows(self, name: str) -> Tensor:
        """A layer's tokens by vLLM's slot number, `[num_blocks * block_size, num_kv_heads, 2 * head_size]`."""
        return self.windows.home(self._indices[name]).flatten(0, 1)

    def stored(self, name: str) -> Contiguous:
        """A layer's windows as kernels take them."""
        rows = self.windows.window(self._indices[name])
        return Contiguous(rows[..., : self._head_size], rows[..., self._head_size :])

    def back(self, blocks: Iterable[int]) -> None:
        """Backs blocks that will be written."""
        self.windows.back(blocks)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Gives back the memory of blocks that hold nothing any more."""
        keep = self.windows.backed().difference(blocks) | {NULL_BLOCK}
        self.windows.trim(keep)
