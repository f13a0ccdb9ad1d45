"""What an engine has counted, under vLLM's names, for callers without a metrics server."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vattn.engine.requests.request import FinishReason

if TYPE_CHECKING:
    from vattn.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure.

    Attributes:
        name: vLLM's, or `vattn:` and a name where vLLM has none.
        labels: what distinguishes metrics of one name.
    """

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A count since the engine was made."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value now."""

    value: float


@dataclass
class Counts:
    """Running totals of one engine.

    Attributes:
        prompt_tokens: of prompts that have got a first token, those from the prefix cache included.
        generation_tokens: output tokens.
        preemptions: how often a request lost its slot to another.
        finished: completions by how they ended.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: Tally[FinishReason] = field(default_factory=Tally)


def collect(core: EngineCore) -> list[Metric]:
    """All metrics of an engine, between two steps."""
    scheduler, counts, kv = core.scheduler, core.counts, core.kv.stats()
    total = core.kv.total()

    def gauge(name: str, value: float, **labels: str) -> Gauge:
        return Gauge(name, labels, float(value))

    def counter(name: str, value: int, **labels: str) -> Counter:
        return Counter(name, labels, value)

    return [
        gauge("vllm:num_requests_running", len(scheduler.running)),
        gauge("vllm:num_requests_waiting", len(scheduler.waiting)),
        gauge("vllm:kv_cache_usage_perc", 1 - core.kv.available() / total),
        gauge("vllm:engine_sleep_state", not core.asleep, sleep_state="awake"),
        counter("vllm:prefix_cache_queries", scheduler.query_tokens),
        counter("vllm:prefix_cache_hits", scheduler.hit_tokens),
        counter("vllm:num_preemptions", counts.preemptions),
        counter("vllm:prompt_tokens", counts.prompt_tokens),
        counter("vllm:generation_tokens", counts.generation_tokens),
        *(
            counter("vllm:request_success", counts.finished[reason], finished_reason=reason.value)
            for reason in FinishReason
        ),
        counter("vllm:spec_decode_num_drafts", core.speculation.num_drafts),
        counter("vllm:spec_decode_num_draft_tokens", core.speculation.num_drafted_tokens),
        counter("vllm:spec_decode_num_accepted_tokens", core.speculation.num_accepted_tokens),
        gauge("vattn:kv_reserved_bytes", kv.reserved_bytes),
        gauge("vattn:kv_physical_bytes", kv.physical_bytes),
        gauge("vattn:kv_used_bytes", kv.used_bytes),
        gauge("vattn:kv_live_bytes", kv.live_bytes),
        counter("vattn:kv_map_calls", kv.map_calls),
        gauge("vattn:kv_wait_seconds", kv.wait_seconds),
    ]
