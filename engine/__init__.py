"""The reference serving engine over vattn: continuous batching on unmodified transformers models.

from vattn.engine import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vattn.engine.absent import NotOffered
    from vattn.engine.async_engine import AsyncEngine, EngineStopped, QueueFull, Stream
    from vattn.engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from vattn.engine.exclusive import EngineAsleep, EngineBusy, EngineClosed
    from vattn.engine.llm import LLM
    from vattn.engine.metrics import Counter, Gauge, Histogram, Metric, Vector
    from vattn.engine.requests.logprobs import Logprob
    from vattn.engine.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from vattn.engine.requests.request import FinishReason, IllegalTransition, InvalidRequest
    from vattn.engine.requests.sampling import RequestOutputKind, SamplingParams
    from vattn.engine.requests.structured import StructuredOutputs
    from vattn.engine.scheduling.record import StepRecord

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
    "vattn.engine.absent": ("NotOffered",),
    "vattn.engine.async_engine": ("AsyncEngine", "EngineStopped", "QueueFull", "Stream"),
    "vattn.engine.beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "vattn.engine.exclusive": ("EngineAsleep", "EngineBusy", "EngineClosed"),
    "vattn.engine.llm": ("LLM",),
    "vattn.engine.metrics": ("Counter", "Gauge", "Histogram", "Metric", "Vector"),
    "vattn.engine.requests.logprobs": ("Logprob",),
    "vattn.engine.requests.outputs": ("CompletionOutput", "RequestMetrics", "RequestOutput"),
    "vattn.engine.requests.request": ("FinishReason", "IllegalTransition", "InvalidRequest"),
    "vattn.engine.requests.sampling": ("RequestOutputKind", "SamplingParams"),
    "vattn.engine.requests.structured": ("StructuredOutputs",),
    "vattn.engine.scheduling.record": ("StepRecord",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Names are imported on first use, so that `vattn --help` does not wait seconds for transformers."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'vattn.engine' has no attribute {name!r}")
