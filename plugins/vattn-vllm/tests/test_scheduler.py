"""vLLM's own scheduler with the plugin, without a model: what it waits for, and what it lets go."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import NAME, Pool, serving_pool, wait_until
from vattn_vllm import hooks
from vattn_vllm.lent import LentBlocks
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

TOKENS = 16  # of a block
BLOCKS = 80
LAYERS = 4
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
BLOCK = LAYERS * SPEC.page_size_bytes  # bytes

init_none_hash(sha256)


class Engine:
    """A scheduler whose steps give every request that has its whole prompt a token."""

    def __init__(self, model: Path, plugin: dict[str, Any], **options: Any) -> None:
        arguments = EngineArgs(
            model=str(model),
            dtype="float32",
            max_num_seqs=8,
            enforce_eager=True,
            skip_tokenizer_init=True,
            block_size=TOKENS,
            worker_cls="vattn_vllm.CPUWorker",
            additional_config={"vattn": plugin},
            **{"max_model_len": 1024, "max_num_batched_tokens": 128, **options},
        )
        config = arguments.create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        names = [f"layer.{number}" for number in range(LAYERS)]
        part = SPEC.page_size_bytes * BLOCKS
        cache = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[KVCacheTensor(BLOCK * BLOCKS, names, part, SPEC.page_size_bytes)],
            kv_cache_groups=[KVCacheGroupSpec(names, SPEC)],
        )
        hooks.install()
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=TOKENS,
        )
        self.memory: set[int] = set()
        self._number = 0

    def add(self, length: int, *, name: str | None = None, max_tokens: int = 4, session: bool = False) -> Request:
        """Adds a request, or more input to a session of this name."""
        self._number += 1
        request = Request(
            name or f"request-{self._number}",
            [100 * self._number + each % 50 for each in range(length)],
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=get_request_block_hasher(TOKENS, sha256),
            resumable=session,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.memory.difference_update(hooks.given_back(output))
        self.memory.update(hooks.allocated(output))
        ids = list(output.num_scheduled_tokens)
        sampled = [[7] if self._complete(self.scheduler.requests[each]) else [] for each in ids]
        runner = ModelRunnerOutput(ids, {each: number for number, each in enumerate(ids)}, sampled)
        self.scheduler.update_from_output(output, runner)

    def _complete(self, request: Request) -> bool:
        return request.num_computed_tokens >= request.num_tokens

    def run(self, ends: Callable[[], object]) -> None:
        """Takes steps until something holds."""

        def holds() -> object:
            if not ends():
                self.step()
            return ends()

        wait_until(holds)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with serving_pool(64 * BLOCK) as pool:
        yield pool


@pytest.fixture
def engine(model: Path, pool: Pool) -> Iterator[Engine]:
    """One whose memory is lent."""
    engine = Engine(model, {"kv_pool": NAME})
    yield engine
    engine.scheduler.shutdown()


def give_way(engine: Engine, pool: Pool) -> None:
    """Another engine takes what this one has no use for, and leaves."""
    other = LentBlocks(NAME, None, name="other", device="cpu", block_bytes=BLOCK, blocks=BLOCKS, longest=4)

    def has_most() -> bool:
        with other.deciding(0, 56) as most:
            other.decided(min(most, 56), parked=0, cached=0, oldest=None)
        other.ended()
        if engine.scheduler.has_requests():
            engine.step()
        return most >= 56

    wait_until(has_most)
    other.close()
    wait_until(lambda: not pool.of("other"))


def waits_for_input(request: Request) -> bool:
    return request.status == RequestStatus.WAITING_FOR_STREAMING_REQ


def test_a_session_that_goes_on_gets_memory(engine: Engine, pool: Pool) -> None:
    session = engine.add(40, name="session", session=True)
    engine.run(lambda: waits_for_input(session))
    assert engine.scheduler._coming() == (0, 0)
    give_way(engine, pool)
    engine.add(100, name="session", session=True)
    assert not waits_for_input(session)
    engine.run(lambda: waits_for_input(session))


def test_a_prompt_that_is_computed_in_parts_gets_memory(engine: Engine, pool: Pool) -> None:
    """vLLM lets a request begin only where all of its prompt has room."""
    engine.run(engine.add(40).is_finished)
    give_way(engine, pool)
    engine.run(engine.add(800).is_finished)


@pytest.mark.parametrize(("blocks", "watermark"), [(64, 0.5), (20, 0.3)])
def test_requests_run_beside_a_watermark(blocks: int, watermark: float, model: Path, pool: Pool) -> None:
    """There is memory for it as well, and it is a share of what there is memory for."""
    plugin = {"kv_pool": NAME, "kv_share": f"at most {blocks * BLOCK}B"}
    engine = Engine(model, plugin, watermark=watermark, max_model_len=256)
    engine.run(engine.add(40).is_finished)
    give_way(engine, pool)
    engine.add(40, max_tokens=200)
    engine.run(lambda: engine.scheduler.running)
    engine.add(40, max_tokens=200)
    engine.run(lambda: len(engine.scheduler.running) == 2)
    assert engine.scheduler.kv_cache_manager.watermark_blocks == int(watermark * blocks)
    engine.scheduler.shutdown()


def test_an_engine_with_a_session_that_goes_on_is_not_idle(model: Path) -> None:
    engine = Engine(model, {"keep_cached": 0, "keep_free": 0})
    session, other = engine.add(40, name="session", session=True), engine.add(64, max_tokens=1)
    engine.run(other.is_finished)
    engine.run(lambda: waits_for_input(session))
    engine.add(40, name="session", session=True)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.step()
    assert len(engine.memory) == 3 + 4, "the prefix cache lost what it may keep while a request waits"
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run(lambda: waits_for_input(session))
    engine.step()
    assert len(engine.memory) == 6, "nothing runs, and the session has no input yet"


def test_a_prefix_cache_that_is_reset_leaves_no_memory(model: Path, engine: Engine) -> None:
    """By a step without requests, as nothing else may come."""
    alone = Engine(model, {"keep_free": 0})
    for each in alone, engine:
        scheduler = each.scheduler
        each.run(each.add(64).is_finished)
        each.run(lambda scheduler=scheduler: not scheduler.has_requests())
        assert len(each.memory) >= 4
        assert scheduler.reset_prefix_cache()
        assert scheduler.has_requests()
        each.step()
        assert not scheduler.has_requests()
    assert not alone.memory
    used = engine.scheduler._vattn._lent.usage(wait=False)
    assert (used.owned, used.parked, used.cached) == (0, len(engine.memory) * BLOCK, 0)
    assert alone.scheduler.reset_prefix_cache()
    assert not alone.scheduler.has_requests(), "nothing has memory"


class WithoutWaiting(queue.Queue[Any]):
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        assert not self.empty(), "the engine waits"
        return super().get(block, timeout)


def test_a_prefix_cache_that_is_reset_when_an_engine_becomes_idle_leaves_no_memory(model: Path) -> None:
    """As by a pause that has waited for requests."""
    engine = Engine(model, {"keep_free": 0})
    scheduler = engine.scheduler
    engine.run(engine.add(64).is_finished)
    engine.run(lambda: not scheduler.has_requests())
    assert engine.memory
    core: Any = object.__new__(EngineCoreProc)
    core.scheduler, core.engines_running, core.batch_queue = scheduler, False, None
    core.shutdown_state, core.process_input_queue_block = EngineShutdownState.RUNNING, True
    core.input_queue, core.aborts_queue = WithoutWaiting(), queue.Queue()
    core._idle_state_callbacks = [lambda _: scheduler.reset_prefix_cache()]
    core._process_input_queue()
    engine.step()
    assert not engine.memory
    assert not core.has_work()
    with pytest.raises(AssertionError, match="waits"):
        core._process_input_queue()
