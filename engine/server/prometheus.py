"""`/metrics`: vLLM's names, so that its routers and dashboards work, and vattn's own under `vattn:`.

The engine counts; here its figures get their help, the model's name, and what only a server knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..async_engine import AsyncEngine
from ..metrics import Counter, Gauge, Histogram, Vector, borrowed
from ..metrics import Metric as Figure

_HELP = {
    "vllm:prompt_tokens": "Tokens of prompts that were computed.",
    "vllm:generation_tokens": "Output tokens.",
    "vllm:num_preemptions": "Preemptions of running requests.",
    "vllm:request_success": "Requests that ended, by reason.",
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens found in the prefix cache.",
    "vllm:spec_decode_num_drafts": "Drafts that were computed.",
    "vllm:spec_decode_num_draft_tokens": "Tokens of drafts.",
    "vllm:spec_decode_num_accepted_tokens": "Tokens of drafts that were accepted.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Tokens of drafts that were accepted, by place in the draft.",
    "vllm:time_to_first_token_seconds": "From arrival to the first token.",
    "vllm:inter_token_latency_seconds": "Between two tokens of a running request.",
    "vllm:request_time_per_output_token_seconds": "Mean time per token after the first, by request.",
    "vllm:e2e_request_latency_seconds": "From arrival to the end.",
    "vllm:request_queue_time_seconds": "From arrival to the first step.",
    "vllm:request_prefill_time_seconds": "From the first step to the first token.",
    "vllm:request_decode_time_seconds": "From the first token to the last.",
    "vllm:request_prompt_tokens": "Tokens of a prompt.",
    "vllm:request_generation_tokens": "Output tokens of a request.",
    "vattn:step_seconds": "Duration of a step.",
    "vattn:remote_prefills": "Prompts that were handed to prefilling engines.",
    "vattn:remote_prefills_lost": "Those of them that were computed here after all.",
    "vattn:remote_prefill_row_tokens": "Tokens behind their last whole blocks whose rows came with them.",
    "vattn:prefillers": "Prefilling engines that take prompts.",
    "vattn:pool_broker_reachable": "Whether the broker of the pool answers.",
    "vattn:pool_budget_bytes": "Memory of all borrowers of the pool together.",
    "vattn:pool_guaranteed_bytes": "What the engine can always have of the pool.",
    "vattn:pool_most_bytes": "The most that the engine may have of the pool.",
    "vattn:pool_lent_bytes": "What the engine may have of the pool now.",
    "vattn:pool_used_bytes": "What running requests have of the pool.",
    "vattn:pool_parked_bytes": "What no request and no cached prefix has.",
    "vattn:pool_cached_bytes": "What cached prefixes have that no request uses.",
    "vattn:pool_shared_bytes": "Of prefixes that other engines hold, which this one has mapped.",
    "vattn:pool_asked_back_bytes": "What the broker wants back now.",
    "vattn:pool_given_back_bytes": "What the broker asked for and got back.",
    "vattn:pool_free_bytes": "What nobody has of the pool.",
    "vattn:store_queries": "Tokens of prompts that were not in memory, looked up in the store.",
    "vattn:store_hits": "Tokens read from the store, in place of being computed.",
    "vattn:store_errors": "Failures of the store's disk, and files that were cut off or changed.",
    "vattn:store_dropped": "Blocks that were not written to the store.",
    "vattn:store_evicted": "Blocks that this engine deleted to keep the quota.",
    "vattn:store_bytes": "Bytes in the store, of all engines that use it.",
}
# What vLLM called them before.
_OLDER = {
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
}


class Exporter(Collector):
    """A collector of an engine's figures.

    Attributes:
        refused: requests that found the queue full.
        held: what the cache holds, as `state.StateReader` saw it last.
    """

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.refused = 0
        self.held: dict[str, Any] = {}
        self._engine = engine
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._of_engine()
        yield self._counter("vattn:requests_refused", "Requests that found the queue full.", self.refused)
        unfinished, running = self._engine.num_unfinished, len(self._engine.core.scheduler.running)
        yield self._gauge("vllm:num_requests_running", "Requests that run.", min(running, unfinished))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", max(0, unfinished - running))
        yield from self._of_memory()
        yield from self._of_pool()

    def _of_engine(self) -> Iterator[Metric]:
        """One family for the metrics of each name."""
        for name, same in groupby(self._engine.core.counted(), key=lambda metric: metric.name):
            metrics = list(same)
            yield self._family(name, _HELP[name], metrics)
            if name in _OLDER:
                yield self._family(_OLDER[name], _HELP[name], metrics)

    def _family(self, name: str, help: str, metrics: Sequence[Figure]) -> Metric:
        labels = ["model_name", *metrics[0].labels]
        if isinstance(metrics[0], Vector):
            labels.append("position")
        counters = CounterMetricFamily(name, help, labels=labels)
        histograms = HistogramMetricFamily(name, help, labels=labels)
        gauges = GaugeMetricFamily(name, help, labels=labels)
        for metric in metrics:
            values = [self._model_name, *metric.labels.values()]
            match metric:
                case Counter():
                    counters.add_metric(values, metric.value)
                case Vector():
                    for position, count in enumerate(metric.values):
                        counters.add_metric([*values, str(position)], count)
                case Gauge():
                    gauges.add_metric(values, metric.value)
                case Histogram():
                    histograms.add_metric(values, list(metric.buckets.items()), metric.sum)
        return {Histogram: histograms, Gauge: gauges}.get(type(metrics[0]), counters)

    def _of_pool(self) -> Iterator[Metric]:
        """What the engine borrows, and what the broker said last."""
        told = self.held.get("kv_pool")
        for metric in borrowed(self._engine.core.kv):
            if metric.name == "vattn:pool_broker_reachable" and told is not None and not told["reachable"]:
                metric = Gauge(metric.name, metric.labels, 0.0)
            yield self._family(metric.name, _HELP[metric.name], [metric])
            if metric.name == "vattn:pool_budget_bytes" and told is not None and told["free"] is not None:
                free = Gauge("vattn:pool_free_bytes", metric.labels, float(told["free"]))
                yield self._family(free.name, _HELP[free.name], [free])

    def _of_memory(self) -> Iterator[Metric]:
        memory = self.held.get("memory")
        if memory is None:
            return
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of the cache that running requests hold, 0 to 1.", memory["usage"])
        kinds = ("reserved", "physical", "used", "live")
        yield self._family(
            "vattn:memory_bytes",
            "Bytes of the cache: address space, memory, used, live.",
            [Gauge("vattn:memory_bytes", {"kind": kind}, memory[f"{kind}_bytes"]) for kind in kinds],
        )
        for kind, count in memory.get("pages", {}).items():
            yield self._gauge(f"vattn:pages_{kind}", f"Pages: {kind}.", count)
        driver = self.held["driver"]
        yield self._counter("vattn:map_calls", "Driver calls that mapped memory.", driver["map_calls"])
        yield self._counter("vattn:unmap_calls", "Driver calls that unmapped memory.", driver["unmap_calls"])
        yield self._counter("vattn:waits", "Steps that waited for the worker that maps memory.", driver["waits"])
        yield self._counter("vattn:wait_seconds", "Seconds that steps waited for it.", driver["wait_seconds"])

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        return self._family(name, help, [Gauge(name, {}, value)])

    def _counter(self, name: str, help: str, value: float) -> Metric:
        return self._family(name, help, [Counter(name, {}, value)])
