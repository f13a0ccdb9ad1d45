"""`KVMemory`: the KV cache of one worker, as vLLM's blocks and as windows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec

from vattn import BlockWindows, MappingLimit
from vattn.attention import Blocks, Contiguous
from vattn_vllm.options import Options
from vattn_vllm.refusals import check_cache
from vattn_vllm.steps import NULL_BLOCK, Group, ShownRows, Step


class KVMemory:
    """Blocks at home, `[num_blocks, num_kv_heads, block_size, 2 * head_size]` for vLLM, and windows for kernels.

    The layers of every KV cache group lie over the same memory, since a block belongs to one group at a time.

    Raises:
        ConfigError: layers that differ, blocks that are not whole pages, or too many mappings.
    """

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, device: torch.device, options: Options) -> None:
        specs = check_cache(cache)
        spec, scheduler = specs[0], config.scheduler_config
        self._groups = [
            Group(each.block_size, each.sliding_window if isinstance(each, SlidingWindowSpec) else None)
            for each in specs
        ]
        # Which memory a layer has, and of which group it is.
        self._indices = {name: index for part in cache.kv_cache_tensors for index, name in enumerate(part.layers)}
        self._group_of = {
            name: number for number, each in enumerate(cache.kv_cache_groups) for name in each.layer_names
        }
        self._head_size = spec.head_size
        self._max_model_len = config.model_config.max_model_len
        self.windows = BlockWindows(
            num_layers=1 + max(self._indices.values()),
            num_blocks=cache.num_blocks,
            block_size=spec.block_size,
            row=(spec.num_kv_heads, 2 * spec.head_size),
            dtype=spec.dtype,
            num_windows=len(specs) * scheduler.max_num_seqs + options.spare_windows,
            max_context_len=max(
                group.tokens(self._max_model_len, scheduler.max_num_batched_tokens) for group in self._groups
            ),
            layout=options.layout,
            page_size=options.page_size,
            device=device,
            guard=options.guard,
        )
        self._shown_rows = ShownRows(self.windows)
        self._has = torch.zeros(cache.num_blocks, dtype=torch.bool)
        self._step: Step | None = None
        self._changed = False

    def views(self) -> dict[str, Tensor]:
        """The cache of each layer as vLLM sees it: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`."""
        return {name: self.windows.home(index).transpose(1, 2) for name, index in self._indices.items()}

    def slots(self, name: str) -> Tensor:
        """A layer's tokens by vLLM's slot number, `[num_blocks * block_size, num_kv_heads, 2 * head_size]`."""
        return self.windows.home(self._indices[name]).flatten(0, 1)

    def stored(self, name: str) -> Contiguous:
        """A layer's windows as kernels take them."""
        rows = self.windows.window(self._indices[name])
        return Contiguous(rows[..., : self._head_size], rows[..., self._head_size :])

    def group_of(self, name: str) -> int:
        """The number of a layer's KV cache group."""
        return self._group_of[name]

    # What the scheduler decided

    def begin_step(self, back: Iterable[int], give_back: Iterable[int]) -> None:
        """Gives back the memory of blocks that hold nothing any more, and backs those that will be written."""
        self._step = None
        gone, new = set(give_back), list(back)
        if gone:
            keep = self.windows.backed() - gone
            # It has memory since a row showed it, for which other blocks are needed as well.
            keep = set() if keep == {NULL_BLOCK} else keep
            self._shown_rows.forget()
            self.windows.trim(keep)
            self._changed = True
            self._has.zero_()[list(keep)] = True
        if new:
            self._back(new)

    def changed(self) -> bool:
        """Whether blocks got or lost memory since this was last asked; rows that are shown may give some to the null
        block.
        """
        changed, self._changed = self._changed, False
        return changed

    def blocks(self, name: str, table: Tensor) -> Blocks:
        """A layer's blocks as kernels take them that find rows by a block table, `[rows, blocks]` int32."""
        home = self.windows.home(self._indices[name])
        return Blocks(home[..., : self._head_size], home[..., self._head_size :], table)

    def _back(self, blocks: list[int]) -> None:
        try:
            new = self.windows.back(blocks)
        except MappingLimit:  # windows have all that homes have not
            self._shown_rows.hide()
            new = self.windows.back(blocks)
        self._changed |= bool(new)
        self._has[blocks] = True

    # What the attention metadata are built from

    def rows(self, group: int, table: Tensor, starts: Tensor, ends: Tensor) -> tuple[Step, Tensor | None]:
        """Prepares to show the rows of a group's block table in this step.

        Args:
            table: `[rows, blocks]` int32.
            starts, ends: the new tokens of each row, `[rows]` int32.

        Returns:
            The step, which knows the rows' windows when all groups have theirs; and the token with which each begins,
            or None if that is the first.
        """
        if self._step is None or self._step.shown:
            self._step = Step(self._shown_rows, self._back)
        rows = self._groups[group].rows(table, starts, ends, self._has)
        self._step.add(group, rows)
        return self._step, rows.offsets

    def check(self) -> None:
        """Asserts that every block is mapped where the books say."""
        self.windows.check()
        assert set(self._has.nonzero().flatten().tolist()) == self.windows.backed(), "blocks with memory are misnoted"
