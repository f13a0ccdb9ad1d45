"""What the scheduler tells workers: which blocks hold nothing any more.

vLLM's scheduler alone knows which blocks are free, and which of those its prefix cache may still find. Its outputs
already say which blocks are allocated; a subclass adds those whose memory can go. Blocks in the prefix cache are only
given back after the cache has forgotten them, so no hit finds memory that is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vattn_vllm.budget import Share, SharedBudget
from vattn_vllm.options import Options, selected

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_GIVEN_BACK = "vattn_given_back"


def install() -> None:
    """Makes engines with the plugin's workers use the subclass. Idempotent; other engines are as before."""
    from vllm.config import SchedulerConfig

    stock = SchedulerConfig.get_scheduler_cls
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def get_scheduler_cls(self: SchedulerConfig) -> Any:
        cls = stock(self)

        def make(*args: Any, vllm_config: Any, **keywords: Any) -> Any:
            chosen = giving_back(cls) if selected(vllm_config) else cls
            return chosen(*args, vllm_config=vllm_config, **keywords)

        return make

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls  # type: ignore[method-assign]


def allocated(output: SchedulerOutput) -> Iterator[int]:
    """The blocks that requests have got in this step, and those of prefixes that they found."""
    for request in output.scheduled_new_reqs:
        yield from request.block_ids[0]
    for blocks in output.scheduled_cached_reqs.new_block_ids:
        if blocks is not None:
            yield from blocks[0]


def given_back(output: SchedulerOutput) -> list[int]:
    """The blocks that hold nothing any more when this step begins."""
    return getattr(output, _GIVEN_BACK, [])


@functools.cache
def giving_back(cls: type) -> type:
    """A subclass of a scheduler of vLLM that says which blocks hold nothing any more."""

    class GivingBack(cls):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, vllm_config: Any, kv_cache_config: Any, **keywords: Any) -> None:
            super().__init__(*args, vllm_config=vllm_config, kv_cache_config=kv_cache_config, **keywords)
            options = Options.of(vllm_config)
            cache = self.kv_cache_config
            workers = vllm_config.parallel_config.world_size
            self._vattn = _Backed(
                self.kv_cache_manager.block_pool,
                options,
                block_bytes=workers * cache.kv_cache_tensors[0].size // cache.num_blocks,
            )

        def schedule(self, *args: Any, **keywords: Any) -> Any:
            with self._vattn.deciding() as share:
                output = super().schedule(*args, **keywords)
                ended = bool(output.finished_req_ids or output.preempted_req_ids)
                idle = not self.running and not self.waiting
                gone = self._vattn.decide(list(allocated(output)), ended=ended, idle=idle, share=share)
            if gone:
                setattr(output, _GIVEN_BACK, gone)
            return output

    return GivingBack


class _Backed:
    """Which blocks the workers are told to back, and to give back.

    Args:
        pool: vLLM's block pool.
        block_bytes: of a block, in all workers.
    """

    def __init__(self, pool: Any, options: Options, *, block_bytes: int) -> None:
        self._pool = pool
        self._options = options
        self._block_bytes = block_bytes
        self._backed: set[int] = {pool.null_block.block_id}
        self._budget = None if options.shared_budget is None else SharedBudget(options.shared_budget)
        self._most: int | None = None  # blocks that may be backed now
        if self._budget is not None:
            count = pool.get_num_free_blocks

            def free_blocks() -> int:
                """Free blocks, as far as there may be memory: that of free ones can be moved to others."""
                free: int = count()
                return free if self._most is None else max(0, min(free, self._most - (pool.num_gpu_blocks - free)))

            pool.get_num_free_blocks = free_blocks

    @contextmanager
    def deciding(self) -> Iterator[Share | None]:
        """A step of the scheduler, in which no other engine takes memory of a shared budget."""
        if self._budget is None:
            yield None
            return
        with self._budget.deciding() as share:
            self._most = share.most // self._block_bytes
            try:
                yield share
            finally:
                self._most = None

    def decide(self, allocated: list[int], *, ended: bool, idle: bool, share: Share | None) -> list[int]:
        """The blocks to give back before those that were allocated are backed; the prefix cache has forgotten them."""
        pool, options = self._pool, self._options
        before = len(self._backed)
        self._backed.update(allocated)
        over = 0 if self._most is None else max(0, len(self._backed) - self._most)
        gone: list[int] = []
        if ended or idle or over:
            free = {block for block in self._backed if not pool.blocks[block].ref_cnt} - {pool.null_block.block_id}
            empty = [block for block in free if pool.blocks[block].block_hash is None]
            kept = max(0, min(int(options.keep_free * pool.num_gpu_blocks), len(empty) - over))
            gone = empty[kept:]
            if idle or len(gone) < over:
                # In the order in which vLLM would evict them.
                queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
                cached = [block for block in queue if block in free and pool.blocks[block].block_hash is not None]
                surplus = len(cached) - int(options.keep_cached * pool.num_gpu_blocks) if idle else 0
                forgotten = cached[: max(surplus, over - len(gone), 0)]
                pool.evict_blocks(set(forgotten))
                gone += forgotten
            self._backed.difference_update(gone)
        if share is not None and len(self._backed) != before:
            share.used = len(self._backed) * self._block_bytes
        return gone
