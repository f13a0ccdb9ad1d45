"""What the plugin replaces in vLLM, or relies on without a promise: pinned, so that a new version fails here first."""

from __future__ import annotations

import functools
import inspect
import queue
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.version
from vattn_vllm import hooks
from vattn_vllm.attention import on_host
from vattn_vllm.options import selected
from vattn_vllm.refusals import TRIED
from vattn_vllm.worker import CPUWorker
from vllm.config import SchedulerConfig, get_layers_from_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.metrics import loggers
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import allocate_kv_cache


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_this_version_was_tried() -> None:
    assert vllm.version.__version__.split("+")[0] in TRIED


def test_signatures() -> None:
    assert parameters(allocate_kv_cache) == ["kv_cache_config", "device", "layout", "kernel_block_sizes"]
    assert parameters(Worker.initialize_from_config) == ["self", "kv_cache_config"]
    assert parameters(Worker.execute_model) == ["self", "scheduler_output"]
    assert parameters(Scheduler.schedule) == ["self", "throttle_prefills"]
    assert parameters(Scheduler.update_from_output) == ["self", "scheduler_output", "model_runner_output"]
    assert parameters(Scheduler.reset_prefix_cache) == ["self", "reset_running_requests", "reset_connector"]
    assert parameters(Scheduler.has_requests) == parameters(Scheduler.shutdown) == ["self"]
    assert parameters(SchedulerConfig.get_scheduler_cls) == ["self"]
    assert parameters(get_max_concurrency_for_kv_cache_config) == ["vllm_config", "kv_cache_config"]
    metrics = ["self", "vllm_config", "engine_idxs", "custom_stat_loggers"]
    assert parameters(loggers.StatLoggerManager.__init__)[:4] == metrics
    assert parameters(BlockPool.evict_blocks) == ["self", "block_ids"]
    assert parameters(BlockPool.get_num_free_blocks) == ["self"]
    assert parameters(get_layers_from_vllm_config) == ["vllm_config", "layer_type", "layer_names"]
    build = ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]
    assert parameters(AttentionMetadataBuilder.build) == build
    forward = ["self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"]
    assert parameters(AttentionImpl.forward) == [*forward, "output_scale", "output_block_scale"]
    assert AttentionBackend.forward_includes_kv_cache_update


def test_what_the_scheduler_says() -> None:
    assert {"scheduled_new_reqs", "scheduled_cached_reqs", "finished_req_ids", "preempted_req_ids"} <= {
        field.name for field in fields(SchedulerOutput)
    }
    assert "block_ids" in {field.name for field in fields(NewRequestData)}
    assert "new_block_ids" in {field.name for field in fields(CachedRequestData)}
    pool = BlockPool(4, enable_caching=True, hash_block_size=16)
    assert [block.ref_cnt for block in pool.blocks] == [0] * 4
    assert pool.null_block.block_id == 0
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == [1, 2, 3]
    assert all(block.block_hash is None for block in pool.blocks)


def test_what_requests_may_take() -> None:
    assert isinstance(Request.num_tokens_with_spec, property)
    source = inspect.getsource(Scheduler.__init__) + inspect.getsource(Request.__init__)
    assert RequestStatus.WAITING_FOR_STREAMING_REQ
    queues = "running", "kv_holding_waiting", "waiting"
    tokens = "num_lookahead_tokens", "num_computed_tokens", "num_output_placeholders"
    for attribute in ("max_num_running_reqs", *queues, *tokens):
        assert re.search(rf"self\.{attribute}\b.* = ", source), attribute
    assert "self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)" in inspect.getsource(KVCacheManager)
    assert "watermark" in {field.name for field in fields(SchedulerConfig)}


def test_how_an_idle_engine_is_woken() -> None:
    hooks.install()
    woken: queue.Queue[Any] = queue.Queue()
    wakes: list[Any] = []
    engine: Any = SimpleNamespace(input_queue=woken, _idle_state_callbacks=[lambda _: wakes.append("idle")])
    engine.scheduler = SimpleNamespace()
    EngineCoreProc._notify_idle_state_callbacks(engine)
    assert wakes == ["idle"]
    engine.scheduler._vattn = SimpleNamespace(wake_by=wakes.append, asks=False)
    EngineCoreProc._notify_idle_state_callbacks(engine)
    assert woken.empty()
    wakes[1]()
    request = woken.get_nowait()
    assert request == (EngineCoreRequestType.WAKEUP, None)
    EngineCoreProc._handle_client_request(engine, *request)
    assert "self._notify_idle_state_callbacks()" in inspect.getsource(EngineCoreProc._process_input_queue)
    assert "self.scheduler.has_requests()" in inspect.getsource(EngineCoreProc.has_work)


def test_where_layers_lie() -> None:
    """Layers of all groups lie over the same memory, from its beginning."""
    assert {"num_blocks", "kv_cache_tensors", "kv_cache_groups"} <= {field.name for field in fields(KVCacheConfig)}
    assert {"layer_names", "kv_cache_spec"} <= {field.name for field in fields(KVCacheGroupSpec)}
    assert {"size", "layers", "offset"} <= {field.name for field in fields(KVCacheTensor)}
    stored = {"block_size", "num_kv_heads", "head_size", "head_size_v", "dtype"}
    assert stored <= {field.name for field in fields(FullAttentionSpec)}
    assert stored | {"sliding_window"} <= {field.name for field in fields(SlidingWindowSpec)}


def test_what_metadata_are_built_from() -> None:
    assert {"query_start_loc_cpu", "seq_lens", "max_seq_len", "num_reqs", "block_table_tensor", "slot_mapping"} <= {
        field.name for field in fields(CommonAttentionMetadata)
    }


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU, and counts how often such ones are copied to the host."""

    device = torch.device("cuda")
    copies = 0

    def cpu(self) -> torch.Tensor:
        OnDevice.copies += 1
        return self.as_subclass(torch.Tensor)


def test_table_and_lengths_come_to_the_host_together() -> None:
    table = torch.tensor([[5, 6, 7], [8, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([33, 9], dtype=torch.int32)
    here = on_host(table, lengths)
    assert here[0] is table
    assert here[1] is lengths
    there = on_host(table.as_subclass(OnDevice), lengths.as_subclass(OnDevice))
    assert OnDevice.copies == 1
    for got, expected in zip(there, (table, lengths), strict=True):
        assert type(got) is torch.Tensor
        assert got.dtype == torch.int32
        assert torch.equal(got, expected)


def test_other_engines_have_their_own_scheduler() -> None:
    hooks.install()
    hooks.install()
    made = []

    class Stock:
        def __init__(self, *, vllm_config: Any) -> None:
            made.append(vllm_config)

    config = SchedulerConfig.default_factory(max_model_len=16, is_encoder_decoder=False)
    config.scheduler_cls = Stock
    other = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls="auto"))
    assert not selected(other)
    assert type(config.get_scheduler_cls()(vllm_config=other)) is Stock
    assert made == [other]


def test_other_engines_have_no_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks.install()
    monkeypatch.setattr(loggers, "PrometheusStatLogger", type("Prometheus", (), {"__init__": lambda *_: None}))

    def made(worker: str, **keywords: Any) -> list[str]:
        parallel = SimpleNamespace(worker_cls=worker, world_size=1)
        model = SimpleNamespace(served_model_name="model")
        config: Any = SimpleNamespace(instance_id="test", parallel_config=parallel, model_config=model)
        manager = loggers.StatLoggerManager(config, enable_default_loggers=False, **keywords)
        adapters = [each for each in manager.stat_loggers if isinstance(each, loggers.PerEngineStatLoggerAdapter)]
        return [type(each).__name__ for adapter in adapters for each in adapter.per_engine_stat_loggers.values()]

    custom = [loggers.LoggingStatLogger]
    monkeypatch.setattr(loggers.LoggingStatLogger, "__init__", lambda *_: None)
    assert made("auto") == made("auto", custom_stat_loggers=[]) == []
    assert made("vattn_vllm.CPUWorker", engine_idxs=[0, 1]) == ["Gauges", "Gauges"]
    assert made("vattn_vllm.CPUWorker", custom_stat_loggers=custom) == ["LoggingStatLogger", "Gauges"]
    assert custom == [loggers.LoggingStatLogger]


def test_vllm_keeps_no_statistics_for_the_plugin() -> None:
    """It does where there is an entry point of stat loggers, for all engines and in spite of --disable-log-stats."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert list(project["entry-points"]) == ["vllm.general_plugins"]


class Derived(CPUWorker):
    """A worker of somebody else's."""


def test_whose_workers_are_the_plugins() -> None:
    def chosen(worker: Any) -> bool:
        return selected(SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker)))

    for worker in ("vattn_vllm.CPUWorker", "vattn_vllm.worker.CUDAWorker", f"{__name__}.Derived", Derived):
        assert chosen(worker)
    for worker in ("auto", "vllm.v1.worker.cpu_worker.CPUWorker", f"{__name__}.SimpleNamespace", SimpleNamespace):
        assert not chosen(worker)


def test_it_is_installed_beside_another_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrap() -> None:
        stock = SchedulerConfig.get_scheduler_cls
        monkeypatch.setattr(SchedulerConfig, "get_scheduler_cls", functools.wraps(stock)(lambda self: stock(self)))

    hooks.install()
    ours = SchedulerConfig.get_scheduler_cls
    monkeypatch.setattr(SchedulerConfig, "get_scheduler_cls", ours.__wrapped__)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    monkeypatch.setattr(loggers.StatLoggerManager, "__init__", loggers.StatLoggerManager.__init__)
    wrap()
    assert not hooks.installed()
    hooks.install()
    assert hooks.installed()
    wrap()
    assert hooks.installed()
