"""vattn inside vLLM. Experimental: not tested on a GPU.

    VLLM_PLUGINS=vattn vllm serve MODEL --worker-cls vattn_vllm.CPUWorker

vLLM keeps its scheduler, block pool, prefix cache and parallelism. Its block table is the page table: every block is
mapped where vLLM writes it, and again in a contiguous window of each request that has it, so that kernels for
contiguous memory compute the attention (`vattn.BlockWindows`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vattn_vllm.worker import CPUWorker, CUDAWorker

__all__ = ["CPUWorker", "CUDAWorker", "register"]


def register() -> None:
    """The entry point `vllm.general_plugins`, called in every process of vLLM. Nothing changes for other workers."""
    from vattn_vllm import hooks

    hooks.install()


def __getattr__(name: str) -> Any:
    if name in ("CPUWorker", "CUDAWorker"):
        return getattr(importlib.import_module("vattn_vllm.worker"), name)
    raise AttributeError(f"module 'vattn_vllm' has no attribute {name!r}")
