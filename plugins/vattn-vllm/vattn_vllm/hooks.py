"""What the scheduler tells workers: which blocks hold nothing any more.

vLLM's scheduler alone knows which blocks are free, and which of those its prefix cache may still find. Its outputs
already say which blocks are allocated; a subclass adds those whose memory can go. Blocks in the prefix cache are only
given back after the cache has forgotten them, so no hit finds memory that is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
        def __init__(self, *args: Any, vllm_config: Any, **keywords: Any) -> None:
            super().__init__(*args, vllm_config=vllm_config, **keywords)
            self._vattn_options = Options.of(vllm_config)
            self._vattn_backed: set[int] = set()  # as far as the workers are told

        def schedule(self, *args: Any, **keywords: Any) -> Any:
            output = super().schedule(*args, **keywords)
            self._vattn_backed.update(allocated(output))
            idle = not self.running and not self.waiting
            if (idle or output.finished_req_ids or output.preempted_req_ids) and (gone := self._vattn_gone(idle)):
                self._vattn_backed.difference_update(gone)
                setattr(output, _GIVEN_BACK, gone)
            return output

        def _vattn_gone(self, idle: bool) -> list[int]:
            """Blocks to give back; the prefix cache forgets those that it has."""
            pool, options = self.kv_cache_manager.block_pool, self._vattn_options
            free = {block for block in self._vattn_backed if not pool.blocks[block].ref_cnt}
            empty = [block for block in free if pool.blocks[block].block_hash is None]
            gone = empty[int(options.keep_free * pool.num_gpu_blocks) :]
            if idle:
                # In the order in which vLLM would evict them.
                queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
                cached = [block for block in queue if block in free and pool.blocks[block].block_hash is not None]
                over = max(0, len(cached) - int(options.keep_cached * pool.num_gpu_blocks))
                pool.evict_blocks(set(cached[:over]))
                gone += cached[:over]
            return gone

    return GivingBack
