"""vLLM's `/metrics` shows how much memory the caches of an engine's workers have mapped and reserved.

Workers and the API server are separate processes. Each worker keeps two numbers in a small file in shared memory, which
the server reads when it is asked for its metrics.
"""

from __future__ import annotations

import atexit
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from vattn import BlockStats
from vattn_vllm.options import selected

_NUMBERS = struct.Struct("qq")
_FOLDER = Path("/dev/shm")


def _pattern(config: VllmConfig) -> str:
    return f"vattn-vllm-{os.getuid()}-{config.instance_id}"


class Usage:
    """The numbers of one worker, removed when its process exits."""

    def __init__(self, config: VllmConfig, rank: int) -> None:
        data_rank = config.parallel_config.data_parallel_rank
        self._path = _FOLDER / f"{_pattern(config)}-{data_rank}-{rank}-{os.getpid()}"
        self._path.write_bytes(bytes(_NUMBERS.size))
        with self._path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _NUMBERS.size)
        atexit.register(self._path.unlink, missing_ok=True)

    def set(self, stats: BlockStats) -> None:
        _NUMBERS.pack_into(self._map, 0, stats.mapped_bytes, stats.reserved_bytes)


class Gauges(StatLoggerBase):
    """`vattn:kv_mapped_bytes` and `vattn:kv_reserved_bytes`, over all workers of an engine.

    They are not named vllm:..., since vLLM removes metrics of that name that others have made.

    The entry point `vllm.stat_logger_plugins`; without the plugin's workers it does nothing.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        if not selected(vllm_config):
            return
        pattern = f"{_pattern(vllm_config)}-{engine_index}-*"
        for position, (name, what) in enumerate(
            (
                ("vattn:kv_mapped_bytes", "Physical memory under the blocks of the KV cache."),
                ("vattn:kv_reserved_bytes", "Address space of the KV cache: its blocks and their windows."),
            )
        ):
            gauge = _gauge(name, what)
            labels = gauge.labels(model_name=vllm_config.model_config.served_model_name, engine=str(engine_index))
            labels.set_function(lambda position=position: _total(pattern, position))

    def record(self, *args: Any, **keywords: Any) -> None:
        """Nothing: the numbers are read when they are asked for."""

    def log_engine_initialized(self) -> None:
        """Nothing."""


_made: dict[str, Gauge] = {}


def _gauge(name: str, what: str) -> Gauge:
    """The gauge of this name, which a process has once."""
    if name not in _made:
        _made[name] = Gauge(name, what, labelnames=["model_name", "engine"])
    return _made[name]


def _total(pattern: str, position: int) -> float:
    found = (_NUMBERS.unpack(path.read_bytes())[position] for path in _FOLDER.glob(pattern))
    return float(sum(found))
