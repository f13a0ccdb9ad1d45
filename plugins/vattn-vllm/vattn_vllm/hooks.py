"""What the scheduler tells workers: which blocks hold nothing any more.

vLLM's scheduler alone knows which blocks are free, and which of those its prefix cache may still find. Its outputs
already say which blocks are allocated; a subclass adds those whose memory can go. Blocks in the prefix cache are only
given back after the cache has forgotten them, so no hit finds memory that is gone.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vattn.broker.places import borrower_name
from vattn_vllm.lent import LentBlocks
from vattn_vllm.options import Options, selected
from vattn_vllm.steps import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.loggers import StatLoggerManager

_GIVEN_BACK = "vattn_given_back"
_INSTALLED = "vattn_installed"  # which functools.wraps passes on to what others wrap around it


def install() -> None:
    """Makes engines with the plugin's workers use the subclass, and show the gauges. Idempotent; other engines are as
    before.
    """
    from vllm.config import SchedulerConfig
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.metrics.loggers import StatLoggerManager

    stock = SchedulerConfig.get_scheduler_cls
    if installed():
        return

    @functools.wraps(stock)
    def get_scheduler_cls(self: SchedulerConfig) -> Any:
        cls = stock(self)

        def make(*args: Any, vllm_config: Any, **keywords: Any) -> Any:
            chosen = giving_back(cls) if selected(vllm_config) else cls
            return chosen(*args, vllm_config=vllm_config, **keywords)

        return make

    setattr(get_scheduler_cls, _INSTALLED, True)
    SchedulerConfig.get_scheduler_cls = get_scheduler_cls  # type: ignore[method-assign]

    notify = EngineCoreProc._notify_idle_state_callbacks

    @functools.wraps(notify)
    def idle(self: EngineCoreProc) -> None:
        notify(self)
        if (backed := getattr(self.scheduler, "_vattn", None)) is not None:
            wake = functools.partial(self.input_queue.put_nowait, (EngineCoreRequestType.WAKEUP, None))
            backed.wake_by(wake)
            if backed.asks:  # a pause that waited for requests has reset the prefix cache
                wake()

    EngineCoreProc._notify_idle_state_callbacks = idle  # type: ignore[method-assign]

    manage = StatLoggerManager.__init__

    # Not by vLLM's entry point for stat loggers: where there is one, no engine heeds --disable-log-stats.
    @functools.wraps(manage)
    def with_gauges(
        self: StatLoggerManager,
        vllm_config: VllmConfig,
        engine_idxs: Any = None,
        custom_stat_loggers: Any = None,
        *args: Any,
        **keywords: Any,
    ) -> None:
        if selected(vllm_config):
            from vattn_vllm.gauge import Gauges

            custom_stat_loggers = [*(custom_stat_loggers or ()), Gauges]
        manage(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **keywords)

    StatLoggerManager.__init__ = with_gauges  # type: ignore[method-assign]


def installed() -> bool:
    """Whether `install` was called in this process."""
    from vllm.config import SchedulerConfig

    return hasattr(SchedulerConfig.get_scheduler_cls, _INSTALLED)


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
    from vllm.v1.request import RequestStatus

    class GivingBack(cls):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, vllm_config: Any, kv_cache_config: Any, **keywords: Any) -> None:
            super().__init__(*args, vllm_config=vllm_config, kv_cache_config=kv_cache_config, **keywords)
            from vllm.v1.kv_cache_interface import SlidingWindowSpec

            options = Options.of(vllm_config)
            shows_null = any(
                isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in self.kv_cache_config.kv_cache_groups
            )
            lent = None if options.kv_pool is None else _borrow(options, vllm_config, self.kv_cache_config, shows_null)
            self._vattn = _Backed(self.kv_cache_manager.block_pool, options, shows_null=shows_null, lent=lent)

        def schedule(self, *args: Any, **keywords: Any) -> Any:
            # vLLM's own is a share of all blocks, of which no more may ever have memory than are lent.
            self.kv_cache_manager.watermark_blocks = int(self.scheduler_config.watermark * self._vattn.most)
            with self._vattn.deciding(self._coming):
                output = super().schedule(*args, **keywords)
                ended = bool(output.finished_req_ids or output.preempted_req_ids)
                idle = not self.running and next(self._ready(), None) is None
                gone = self._vattn.decide(allocated(output), ended=ended, idle=idle)
            if gone:
                setattr(output, _GIVEN_BACK, gone)
            return output

        def _coming(self) -> tuple[int, int]:
            """The most blocks that requests can get in the next step, and those that have to be free for it: a request
            begins only where all of its prompt has room, beside vLLM's watermark.
            """
            left, coming, free, waits = self.scheduler_config.max_num_batched_tokens, 0, 0, False
            groups = self.kv_cache_config.kv_cache_groups
            size = min(group.kv_cache_spec.block_size for group in groups)

            def blocks(tokens: int) -> int:
                # They may begin at the end of a block. With windows a request never has as many as it has tokens for.
                most = len(groups) * ((tokens + self.num_lookahead_tokens) // size + 1)
                return min(most, self._vattn.longest)

            requests = itertools.chain(self.running, self._ready())
            for request in itertools.islice(requests, self.max_num_running_reqs):
                if left <= 0:
                    break
                tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
                chunk = min(tokens, left)
                left -= chunk
                coming += blocks(chunk)
                waits = request.status != RequestStatus.RUNNING
                free += blocks(tokens if waits else chunk)
            return coming, free + waits * self.kv_cache_manager.watermark_blocks

        def _ready(self) -> Iterator[Any]:
            """The requests that wait, without sessions that have no input yet."""
            for request in itertools.chain(self.kv_holding_waiting, self.waiting):
                if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
                    yield request

        def update_from_output(self, *args: Any, **keywords: Any) -> Any:
            self._vattn.ended()
            return super().update_from_output(*args, **keywords)

        def reset_prefix_cache(self, *args: Any, **keywords: Any) -> bool:
            done: bool = super().reset_prefix_cache(*args, **keywords)
            if done:
                self._vattn.forgotten()
            return done

        def has_requests(self) -> bool:
            return super().has_requests() or self._vattn.asks

        def shutdown(self) -> None:
            super().shutdown()
            self._vattn.close()

    return GivingBack


def _borrow(options: Options, config: VllmConfig, cache: Any, shows_null: bool) -> LentBlocks:
    from vllm.distributed.utils import get_pp_indices
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    assert options.kv_pool is not None
    parallel = config.parallel_config
    stages = parallel.pipeline_parallel_size
    # Only the first stage's cache is known here; each counts as much as the largest of them.
    total = config.model_config.get_total_num_hidden_layers()
    layers = [end - start for start, end in (get_pp_indices(total, stage, stages) for stage in range(stages))]
    stage_bytes = -(-cache.kv_cache_tensors[0].size * max(layers) // layers[0])
    return LentBlocks(
        options.kv_pool,
        options.kv_share,
        name=borrower_name(config.model_config.model),
        device="cpu" if config.device_config.device_type == "cpu" else "cuda:0",
        block_bytes=-(-parallel.world_size * stage_bytes // cache.num_blocks),
        blocks=cache.num_blocks,
        longest=round(cache.num_blocks / get_max_concurrency_for_kv_cache_config(config, cache)) + shows_null,
    )


class _Backed:
    """Which blocks the workers are told to back, and to give back.

    Args:
        pool: vLLM's block pool.
        shows_null: rows may show the null block, which then has memory too.
        lent: what a broker lends; None: there is memory for all blocks.
    """

    def __init__(
        self, pool: Any, options: Options, *, shows_null: bool = False, lent: LentBlocks | None = None
    ) -> None:
        self._pool = pool
        self._options = options
        self._shows_null = shows_null
        self._backed: set[int] = set()
        # Blocks that nobody used, but the prefix cache could find, when they were last looked at; and when each was
        # first seen so, in nanoseconds, and the earliest of these.
        self._cached = 0
        self._since: dict[int, int] = {}
        self._oldest: int | None = None
        self._forgotten = False  # the prefix cache has, all of them, and no step has dealt with it
        self._lent = lent
        self._most: int | None = None  # blocks that may be backed now
        self._free_blocks: Callable[[], int] = pool.get_num_free_blocks
        if lent is not None:
            pool.get_num_free_blocks = self._affordable

    @contextmanager
    def deciding(self, coming: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """A step of the scheduler, in which the broker takes nothing back; `coming`: how many blocks it may allocate at
        most, and how many have to be free.
        """
        if self._lent is None:
            yield
            return
        count = self._count()
        most, free = coming()
        with self._lent.deciding(count, max(most, self._used() + self._shows_null + free - count)) as self._most:
            try:
                yield
            finally:
                self._most = None

    def decide(self, allocated: list[int], *, ended: bool, idle: bool) -> list[int]:
        """The blocks to give back before those that were allocated are backed; the prefix cache has forgotten them."""
        pool, options, lent = self._pool, self._options, self._lent
        self._forgotten = False
        self._backed.update(allocated)
        count = self._count()
        over = 0 if self._most is None else max(0, count - self._most)
        kept = int(options.keep_free * pool.num_gpu_blocks)
        wanted, with_cached = (count, False) if lent is None else lent.wanted
        empty_over = max(over, count - wanted)
        cached_over = empty_over if with_cached else over
        # A sliding window also leaves blocks behind while its request runs.
        unused = len(self._backed) - self._used()
        self._cached = min(self._cached, unused)
        gone: list[int] = []
        if ended or idle or empty_over or unused - self._cached > kept:
            free = {block for block in self._backed if not pool.blocks[block].ref_cnt}
            empty = [block for block in free if pool.blocks[block].block_hash is None]
            self._cached = len(free) - len(empty)
            gone = empty[max(0, min(kept, len(empty) - empty_over)) :]
            if idle or len(gone) < cached_over:
                # In the order in which vLLM would evict them.
                queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
                cached = [block for block in queue if block in free and pool.blocks[block].block_hash is not None]
                surplus = len(cached) - int(options.keep_cached * pool.num_gpu_blocks) if idle else 0
                forgotten = cached[: max(surplus, cached_over - len(gone), 0)]
                pool.evict_blocks(set(forgotten))
                gone += forgotten
                self._cached -= len(forgotten)
            if lent is not None:
                now = time.monotonic_ns()
                self._since = {block: self._since.get(block, now) for block in free.difference(gone, empty)}
                self._oldest = min(self._since.values(), default=None)
            self._backed.difference_update(gone)
        if lent is not None:
            left = len(self._backed) - self._used()
            oldest = self._oldest if self._cached else None
            lent.decided(self._count(), parked=left - self._cached, cached=self._cached, oldest=oldest)
        return gone

    @property
    def most(self) -> int:
        """The blocks that may ever have memory."""
        most: int = self._pool.num_gpu_blocks
        return most if self._lent is None else min(most, self._lent.most)

    @property
    def longest(self) -> int:
        """Blocks of the longest request, where they are lent."""
        assert self._lent is not None
        return self._lent.longest

    @property
    def asks(self) -> bool:
        """Whether a step has to be taken to give memory back: the broker wants it, or what it held was forgotten."""
        return self._forgotten or (self._lent is not None and self._lent.asks)

    def forgotten(self) -> None:
        """The prefix cache has forgotten all blocks."""
        self._cached, self._since, self._oldest = 0, {}, None
        self._forgotten = bool(self._backed)

    def ended(self) -> None:
        """The workers have executed the earliest step that had yet to end."""
        if self._lent is not None:
            self._lent.ended()

    def wake_by(self, wake: Callable[[], object]) -> None:
        """What has an idle engine take a step."""
        if self._lent is not None:
            self._lent.wake = wake

    def close(self) -> None:
        """Gives up what was lent."""
        if self._lent is not None:
            self._lent.close()

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
