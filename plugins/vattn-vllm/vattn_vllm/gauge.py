"""vLLM's `/metrics` shows how much memory the caches of an engine's workers have mapped and reserved.

Workers and the API server are separate processes. Each worker answers with two numbers on a socket in the abstract
namespace, which ends with its process however that ends, and leaves no file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from vattn import BlockStats

logger = init_logger(__name__)

_NUMBERS = struct.Struct("qq")
_SECONDS = 1.0  # that a worker may take to answer
_MULTIPLE = "PROMETHEUS_MULTIPROC_DIR"  # set where several processes serve /metrics


def _address(config: VllmConfig, engine: int, rank: int) -> str:
    if directory := os.environ.get(_MULTIPLE):  # which all processes have; each API server has another instance
        instance = hashlib.sha256(directory.encode()).hexdigest()[:16]
    else:
        instance = config.instance_id.removesuffix(f"_dp{engine}")  # which vLLM adds in engines that Ray runs
    return f"\0vattn-vllm-{os.getuid()}-{instance}-{engine}-{rank}"


class Usage:
    """The numbers of one worker, until it is dropped or its process ends."""

    def __init__(self, config: VllmConfig, rank: int) -> None:
        self._numbers = bytearray(_NUMBERS.size)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(_address(config, config.parallel_config.data_parallel_index, rank))
        except OSError as error:
            server.close()
            logger.warning("vattn: /metrics lacks the memory of worker %d: %s", rank, error)
            return
        server.listen()
        threading.Thread(target=_answer, args=(server, self._numbers), name="vattn-usage", daemon=True).start()
        weakref.finalize(self, server.shutdown, socket.SHUT_RDWR)

    def set(self, stats: BlockStats) -> None:
        _NUMBERS.pack_into(self._numbers, 0, stats.mapped_bytes, stats.reserved_bytes)


def _answer(server: socket.socket, numbers: bytearray) -> None:
    """Sends the numbers to whoever connects, until the server is shut down."""
    with server:
        while True:
            try:
                reader, _ = server.accept()
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return
                time.sleep(_SECONDS)  # no descriptor is left
                continue
            with reader, suppress(OSError):  # it may have left
                reader.send(numbers)


class Gauges(StatLoggerBase):
    """`vattn:kv_mapped_bytes` and `vattn:kv_reserved_bytes`, over all workers of an engine.

    They are not named vllm:..., since vLLM removes metrics of that name that others have made.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        ranks = range(vllm_config.parallel_config.world_size)
        addresses = [_address(vllm_config, engine_index, rank) for rank in ranks]
        for position, (name, what) in enumerate(
            (
                ("vattn:kv_mapped_bytes", "Physical memory under the blocks of the KV cache."),
                ("vattn:kv_reserved_bytes", "Address space of the KV cache: its blocks and their windows."),
            )
        ):
            gauge = _gauge(name, what)
            labels = gauge.labels(model_name=vllm_config.model_config.served_model_name, engine=str(engine_index))
            if _MULTIPLE in os.environ:
                threading.Thread(
                    target=_keep_set, args=(labels, addresses, position), name="vattn-gauge", daemon=True
                ).start()
            else:
                labels.set_function(lambda position=position: _total(addresses, position))

    def record(self, *args: Any, **keywords: Any) -> None:
        """Nothing: the numbers are read when they are asked for, or every second."""

    def log_engine_initialized(self) -> None:
        """Nothing."""


_made: dict[str, Gauge] = {}


def _gauge(name: str, what: str) -> Gauge:
    """The gauge of this name, which a process has once."""
    if name not in _made:
        _made[name] = Gauge(name, what, labelnames=["model_name", "engine"], multiprocess_mode="mostrecent")
    return _made[name]


def _keep_set(gauge: Gauge, addresses: Sequence[str], position: int) -> None:
    """Of several API servers each shows what all have stored, and functions are not asked."""
    while True:
        gauge.set(_total(addresses, position))
        time.sleep(_SECONDS)


def _total(addresses: Sequence[str], position: int) -> float:
    """One of the numbers, over all workers that answer."""
    total = 0
    for address in addresses:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker, suppress(OSError):
            worker.settimeout(_SECONDS)
            worker.connect(address)
            answer = worker.recv(_NUMBERS.size)
            if len(answer) == _NUMBERS.size:
                total += _NUMBERS.unpack(answer)[position]
    return float(total)
