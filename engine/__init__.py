"""The reference serving engine over vattn: continuous batching on unmodified transformers models.

from vattn.engine import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .absent import NotOffered
    from .async_engine import AsyncEngine, EngineStopped, QueueFull
    from .beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from .config import EngineConfig
    from .exclusive import EngineAsleep, EngineBusy, EngineClosed
    from .llm import LLM
    from .metrics import Counter, Gauge, Histogram, Metric, Vector
    from .requests.logprobs import Logprob
    from .requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from .requests.request import FinishReason, IllegalTransition, InvalidRequest
    from .requests.sampling import RequestOutputKind, SamplingParams
    from .requests.structured import StructuredOutputs
    from .scheduling.record import StepRecord
    from .streams import Stream

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Counter",
    "EngineAsleep",
    "EngineBusy",
    "EngineClosed",
    "EngineConfig",
    "EngineStopped",
    "FinishReason",
    "Gauge",
    "Histogram",
    "IllegalTransition",
    "InvalidRequest",
    "Logprob",
    "Metric",
    "NotOffered",
    "QueueFull",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StepRecord",
    "Stream",
    "StructuredOutputs",
    "Vector",
]

_HOMES = {
    ".absent": ("NotOffered",),
    ".async_engine": ("AsyncEngine", "EngineStopped", "QueueFull"),
    ".beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    ".config": ("EngineConfig",),
    ".exclusive": ("EngineAsleep", "EngineBusy", "EngineClosed"),
    ".llm": ("LLM",),
    ".metrics": ("Counter", "Gauge", "Histogram", "Metric", "Vector"),
    ".requests.logprobs": ("Logprob",),
    ".requests.outputs": ("CompletionOutput", "RequestMetrics", "RequestOutput"),
    ".requests.request": ("FinishReason", "IllegalTransition", "InvalidRequest"),
    ".requests.sampling": ("RequestOutputKind", "SamplingParams"),
    ".requests.structured": ("StructuredOutputs",),
    ".scheduling.record": ("StepRecord",),
    ".streams": ("Stream",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Names are imported on first use, so that `vattn --help` does not wait seconds for transformers."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module 'vattn.engine' has no attribute {name!r}")
