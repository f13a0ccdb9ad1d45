"""The reference serving engine over vattn: continuous batching on unmodified transformers models.

from engine import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine, EngineStopped, QueueFull, Stream
    from engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from engine.exclusive import EngineBusy, EngineClosed
    from engine.llm import LLM, StepRecord
    from engine.logprobs import Logprob
    from engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from engine.request import FinishReason, IllegalTransition, InvalidRequest
    from engine.sampling import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineBusy",
    "EngineClosed",
    "EngineStopped",
    "FinishReason",
    "IllegalTransition",
    "InvalidRequest",
    "Logprob",
    "QueueFull",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StepRecord",
    "Stream",
]

_HOMES = {
    "engine.async_engine": ("AsyncEngine", "EngineStopped", "QueueFull", "Stream"),
    "engine.beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "engine.exclusive": ("EngineBusy", "EngineClosed"),
    "engine.llm": ("LLM", "StepRecord"),
    "engine.logprobs": ("Logprob",),
    "engine.outputs": ("CompletionOutput", "RequestMetrics", "RequestOutput"),
    "engine.request": ("FinishReason", "IllegalTransition", "InvalidRequest"),
    "engine.sampling": ("RequestOutputKind", "SamplingParams"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Loaded when first used: `vattn --help` must not wait seconds for transformers."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
