"""vLLM's workers with `KVMemory` for a cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import vllm.v1.worker.gpu.attn_utils as runner_v2
import vllm.v1.worker.gpu_model_runner as runner_v1
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker as StockCPUWorker
from vllm.v1.worker.gpu_worker import Worker as StockCUDAWorker

from vattn.errors import ConfigError
from vattn_vllm import hooks
from vattn_vllm.attention import WindowAttention, WindowBackend
from vattn_vllm.gauge import Usage
from vattn_vllm.memory import KVMemory
from vattn_vllm.options import Options
from vattn_vllm.refusals import check_drafter, check_engine

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_BACKEND = f"{WindowBackend.__module__}.{WindowBackend.__qualname__}"


class _WindowWorker(StockCUDAWorker):
    """What both workers have in common. vLLM's CPU worker is a subclass of its CUDA worker."""

    # The register's name that layers find the backend by.
    backend = AttentionBackendEnum.CUSTOM

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if not hooks.installed():
            raise ConfigError(
                f"vattn: vLLM has not loaded the plugin 'vattn' (VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS', '')!r}), "
                "without which no scheduler gives memory back; add it there, or leave the variable out"
            )
        self._options = Options.of(self.vllm_config)
        check_engine(self.vllm_config, self._options)
        self._memory: KVMemory | None = None
        self._usage = Usage(self.vllm_config, self.rank)

    def load_model(self, *args: Any, **keywords: Any) -> None:
        with _registered(self.backend):
            super().load_model(*args, **keywords)
        for name, layer in self._attention().items():
            if not isinstance(getattr(layer, "impl", None), WindowAttention):
                raise ConfigError(
                    f"vattn: layer {name}, {type(layer).__name__}, has another attention backend; use "
                    "--attention-backend CUSTOM on CUDA, or leave out --worker-cls for this model"
                )

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        def allocate(cache: KVCacheConfig, device: torch.device, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
            check_drafter(self.vllm_config, cache)
            self._memory = KVMemory(self.vllm_config, cache, device, self._options)
            for name, layer in self._attention().items():
                layer.impl.use(self._memory, getattr(layer, "kv_sharing_target_layer_name", None) or name)
            return self._memory.views()

        with _replaced(runner_v1, "allocate_kv_cache", allocate), _replaced(runner_v2, "allocate_kv_cache", allocate):
            super().initialize_from_config(kv_cache_config)
        if self._memory is None:
            raise ConfigError("vattn: vLLM allocated its KV cache by itself; this version of it is not supported")
        self._usage.set(self._memory.windows.stats())

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        memory = self._memory
        assert memory is not None
        memory.begin_step(hooks.allocated(scheduler_output), hooks.given_back(scheduler_output))
        output = super().execute_model(scheduler_output)
        if memory.changed():
            self._usage.set(memory.windows.stats())
        return output

    def _attention(self) -> dict[str, Any]:
        """The layers with attention; vLLM's context has others too, such as mixtures of experts."""
        return get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]

    def vattn_stats(self) -> dict[str, int]:
        """For `collective_rpc`: bytes that are mapped and reserved, and blocks."""
        assert self._memory is not None
        stats = self._memory.windows.stats()
        return {
            "mapped_bytes": stats.mapped_bytes,
            "peak_mapped_bytes": stats.peak_mapped_bytes,
            "reserved_bytes": stats.reserved_bytes,
            "backed_blocks": stats.backed_blocks,
            "shown_blocks": stats.shown_blocks,
            "attached_blocks": stats.attached_blocks,
            "detached_blocks": stats.detached_blocks,
            "kernel_mappings": stats.kernel_mappings,
        }

    def vattn_check(self) -> None:
        """For `collective_rpc`: asserts that every block is mapped where the books say."""
        assert self._memory is not None
        self._memory.check()


class CUDAWorker(_WindowWorker):
    """`--worker-cls vattn_vllm.CUDAWorker --attention-backend CUSTOM`. It has not run on a GPU yet."""


class CPUWorker(_WindowWorker, StockCPUWorker):
    """`--worker-cls vattn_vllm.CPUWorker`."""

    # vLLM's CPU platform does not ask which backend is wanted.
    backend = AttentionBackendEnum.CPU_ATTN

    def determine_available_memory(self) -> int:
        size: int | None = self.cache_config.kv_cache_memory_bytes
        if size is None or self._options.kv_pool is None:
            return super().determine_available_memory()
        # Addresses: what others of the pool hold at the moment does not matter, as the broker lends what is free.
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
        return size


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _registered(backend: AttentionBackendEnum) -> Iterator[None]:
    """The windows' backend under a name of vLLM's register, for layers that are made within the context."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    register_backend(backend, _BACKEND)
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        backend.clear_override()
        _cached_get_attn_backend.cache_clear()
