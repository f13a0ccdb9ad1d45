"""What the scheduler tells workers: which blocks hold nothing any more.

vLLM's scheduler alone knows which blocks are free, and which of those its prefix cache may still find. Its outputs
already say which blocks are allocated; a subclass adds those whose memory can go. Blocks in the prefix cache are only
given back after the cache has forgotten them, so no hit finds memory that is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vattn_vllm.budget import Share, SharedBudget
from vattn_vllm.options import Options, selected
from vattn_vllm.steps import NULL_BLOCK

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


def allocated(output: SchedulerOutput) -> list[int]:
    """The blocks that requests have got in this step, in all KV cache groups, and those of prefixes that they found."""
    rows = [request.block_ids for request in output.scheduled_new_reqs]
    rows += [blocks for blocks in output.scheduled_cached_reqs.new_block_ids if blocks is not None]
    # What a sliding window hides of a prefix is the null block.
    return [block for groups in rows for blocks in groups for block in blocks if block != NULL_BLOCK]


def given_back(output: SchedulerOutput) -> list[int]:
    """The blocks that hold nothing any more when this step begins."""
    return getattr(output, _GIVEN_BACK, [])


@functools.cache
def giving_back(cls: type) -> type:
    """A subclass of a scheduler of vLLM that says which blocks hold nothing any more."""

    class GivingBack(cls):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, vllm_config: Any, kv_cache_config: Any, **keywords: Any) -> None:
            super().__init__(*args, vllm_config=vllm_config, kv_cache_config=kv_cache_config, **keywords)
            from vllm.v1.kv_cache_interface import SlidingWindowSpec

            options = Options.of(vllm_config)
            cache = self.kv_cache_config
            workers = vllm_config.parallel_config.world_size
            self._vattn = _Backed(
                self.kv_cache_manager.block_pool,
                options,
                block_bytes=workers * cache.kv_cache_tensors[0].size // cache.num_blocks,
                shows_null=any(isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in cache.kv_cache_groups),
            )

        def schedule(self, *args: Any, **keywords: Any) -> Any:
            with self._vattn.deciding() as share:
                output = super().schedule(*args, **keywords)
                ended = bool(output.finished_req_ids or output.preempted_req_ids)
                idle = not self.running and not self.waiting
                gone = self._vattn.decide(allocated(output), ended=ended, idle=idle, share=share)
            if gone:
                setattr(output, _GIVEN_BACK, gone)
            return output

    return GivingBack


class _Backed:
    """Which blocks the workers are told to back, and to give back.

    Args:
        pool: vLLM's block pool.
        block_bytes: of a block, in all workers.
        shows_null: rows may show the null block, which then has memory too.
    """

    def __init__(self, pool: Any, options: Options, *, block_bytes: int, shows_null: bool = False) -> None:
        self._pool = pool
        self._options = options
        self._block_bytes = block_bytes
        self._shows_null = shows_null
        self._backed: set[int] = set()
        self._cached = 0  # blocks that nobody used, but the prefix cache could find, when they were last looked at
        self._budget = None if options.shared_budget is None else SharedBudget(options.shared_budget)
        self._most: int | None = None  # blocks that may be backed now
        self._free_blocks: Callable[[], int] = pool.get_num_free_blocks
        if self._budget is not None:
            pool.get_num_free_blocks = self._affordable

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
        before = self._count()
        self._backed.update(allocated)
        over = 0 if self._most is None else max(0, self._count() - self._most)
        kept = int(options.keep_free * pool.num_gpu_blocks)
        # A sliding window also leaves blocks behind while its request runs.
        unused = len(self._backed) - self._used()
        self._cached = min(self._cached, unused)
        gone: list[int] = []
        if ended or idle or over or unused - self._cached > kept:
            free = {block for block in self._backed if not pool.blocks[block].ref_cnt}
            empty = [block for block in free if pool.blocks[block].block_hash is None]
            self._cached = len(free) - len(empty)
            gone = empty[max(0, min(kept, len(empty) - over)) :]
            if idle or len(gone) < over:
                # In the order in which vLLM would evict them.
                queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
                cached = [block for block in queue if block in free and pool.blocks[block].block_hash is not None]
                surplus = len(cached) - int(options.keep_cached * pool.num_gpu_blocks) if idle else 0
                forgotten = cached[: max(surplus, over - len(gone), 0)]
                pool.evict_blocks(set(forgotten))
                gone += forgotten
                self._cached -= len(forgotten)
            self._backed.difference_update(gone)
        if share is not None and self._count() != before:
            share.used = self._count() * self._block_bytes
        return gone

    def _count(self) -> int:
        """The blocks that have memory."""
        return len(self._backed) + (self._shows_null and bool(self._backed))

    def _used(self) -> int:
        """The blocks that requests have; the null block is never free."""
        used: int = self._pool.num_gpu_blocks - self._free_blocks() - 1
        return used

    def _affordable(self) -> int:
        """Free blocks, as far as there may be memory: that of free ones can be moved to others."""
        free = self._free_blocks()
        return free if self._most is None else max(0, min(free, self._most - self._used() - self._shows_null))
