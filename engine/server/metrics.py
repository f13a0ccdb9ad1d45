"""`/metrics`: vLLM's names, so that its routers and dashboards work, and vattn's own under `vattn:`.

What a request did is read from the request when it ends, and what the engine holds when somebody asks, so that a step
costs no more than two additions.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vattn.engine.async_engine import AsyncEngine
from vattn.engine.requests.outputs import RequestGroup
from vattn.engine.requests.request import FinishReason, Request

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS = (*_SECONDS, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_STEP_SECONDS = (0.0005, *_SECONDS)
_TOKENS = tuple(scale * 10**power for power in range(6) for scale in (1, 2, 5))
_TTFTS_KEPT = 512

_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", _LONG_SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two tokens of a running request.", _SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Mean time per token after the first, by request.", _SECONDS),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end.", _LONG_SECONDS),
    "vllm:request_queue_time_seconds": ("From arrival to the first step.", _LONG_SECONDS),
    "vllm:request_prefill_time_seconds": ("From the first step to the first token.", _LONG_SECONDS),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", _LONG_SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "vllm:request_generation_tokens": ("Output tokens of a request.", _TOKENS),
    "vattn:step_seconds": ("Duration of a step.", _STEP_SECONDS),
}


class Buckets:
    """A histogram that takes many equal values at once."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Pairs of an upper bound and how many values are not above it; and the sum of all values."""
        total = 0
        pairs = []
        for bound, count in zip([*map(float, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            pairs.append((str(bound), float(total)))
        return pairs, self._sum


class Totals:
    """Tokens and preemptions of some requests."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0

    def add(self, request: Request) -> None:
        # Completions of one prompt compute it once.
        if request.index == 0 and _prompt_computed(request):
            self.prompt_tokens += len(request.prompt_token_ids)
        self.generation_tokens += len(request.output_token_ids)
        self.preemptions += request.num_preemptions


class Metrics(Collector):
    """An engine's `Observer`, and a collector of its figures.

    Attributes:
        refused: requests that found the queue full.
        held: what the cache holds, as `state.StateReader` saw it last.
    """

    def __init__(self, model_name: str) -> None:
        self.refused = 0
        self.held: dict[str, Any] = {}
        self._engine: AsyncEngine | None = None
        self._labels = [model_name]
        self._lock = threading.Lock()
        self._live: dict[str, RequestGroup] = {}
        self._totals = Totals()
        self._ends: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self._histograms = {name: Buckets(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._ttfts: deque[float] = deque(maxlen=_TTFTS_KEPT)
        self._last_end = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch(self, engine: AsyncEngine) -> None:
        """Report the queues of this engine, too."""
        self._engine = engine

    # What the engine tells.

    def added(self, group: RequestGroup) -> None:
        with self._lock:
            self._live[group.request_id] = group

    def ended(self, group: RequestGroup) -> None:
        with self._lock:
            del self._live[group.request_id]
            for request in group.requests:
                self._totals.add(request)
                self._ends[(request.finish_reason or FinishReason.ERROR).value] += 1
                self._note_times(request)

    def stepped(self, start: float, end: float, decoding: int) -> None:
        with self._lock:
            self._histograms["vattn:step_seconds"].add(end - start)
            if decoding:
                self._histograms["vllm:inter_token_latency_seconds"].add(end - self._last_end, decoding)
            self._last_end = end

    def _note_times(self, request: Request) -> None:
        first, arrival = request.first_token_time, request.arrival_time
        scheduled, end = request.first_scheduled_time, request.finished_time
        generated = len(request.output_token_ids)
        found = {
            "vllm:request_prompt_tokens": len(request.prompt_token_ids),
            "vllm:request_generation_tokens": generated,
        }
        times: dict[str, float] = {}
        if scheduled is not None:
            times["vllm:request_queue_time_seconds"] = scheduled - arrival
        if scheduled is not None and first is not None:
            times["vllm:time_to_first_token_seconds"] = first - arrival
            times["vllm:request_prefill_time_seconds"] = first - scheduled
            self._ttfts.append(first - arrival)
        if end is not None:
            times["vllm:e2e_request_latency_seconds"] = end - arrival
        if end is not None and first is not None:
            times["vllm:request_decode_time_seconds"] = end - first
            if generated > 1:
                times["vllm:request_time_per_output_token_seconds"] = (end - first) / (generated - 1)
        for name, value in (found | times).items():
            self._histograms[name].add(value)

    # What others ask.

    def totals(self) -> Totals:
        """Of all requests so far, running ones included."""
        with self._lock:
            totals = Totals()
            totals.prompt_tokens = self._totals.prompt_tokens
            totals.generation_tokens = self._totals.generation_tokens
            totals.preemptions = self._totals.preemptions
            for group in self._live.values():
                for request in group.requests:
                    totals.add(request)
        return totals

    def requests(self) -> list[Request]:
        """Those that have not ended."""
        with self._lock:
            return [request for group in self._live.values() for request in group.requests]

    def recent_ttfts(self) -> list[float]:
        """Seconds to the first token of the requests that ended last."""
        with self._lock:
            return list(self._ttfts)

    def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        totals = self.totals()
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got a token.", totals.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Output tokens.", totals.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Preemptions of running requests.", totals.preemptions)
        yield self._counter("vattn:requests_refused", "Requests that found the queue full.", self.refused)
        ends = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        with self._lock:
            for reason, count in self._ends.items():
                ends.add_metric([*self._labels, reason], count)
            histograms = {name: buckets.cumulative() for name, buckets in self._histograms.items()}
        yield ends
        for name, (pairs, total) in histograms.items():
            family = HistogramMetricFamily(name, _HISTOGRAMS[name][0], labels=["model_name"])
            family.add_metric(self._labels, pairs, total)
            yield family
        if self._engine is not None:
            yield from self._of_queues(self._engine)
        yield from self._of_memory()

    def _of_queues(self, engine: AsyncEngine) -> Iterator[Metric]:
        scheduler = engine.llm.scheduler
        unfinished, running = engine.num_unfinished, len(scheduler.running)
        yield self._gauge("vllm:num_requests_running", "Requests that run.", min(running, unfinished))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", max(0, unfinished - running))
        for name in ("vllm:prefix_cache", "vllm:gpu_prefix_cache"):
            yield self._counter(f"{name}_queries", "Tokens looked up in the prefix cache.", scheduler.query_tokens)
            yield self._counter(f"{name}_hits", "Tokens found in the prefix cache.", scheduler.hit_tokens)

    def _of_memory(self) -> Iterator[Metric]:
        memory = self.held.get("memory")
        if memory is None:
            return
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of the cache that running requests hold, 0 to 1.", memory["usage"])
        family = GaugeMetricFamily(
            "vattn:memory_bytes",
            "Bytes of the cache: address space, memory, used, live.",
            labels=["model_name", "kind"],
        )
        for kind in ("reserved", "physical", "used", "live"):
            family.add_metric([*self._labels, kind], memory[f"{kind}_bytes"])
        yield family
        for kind, count in memory.get("pages", {}).items():
            yield self._gauge(f"vattn:pages_{kind}", f"Pages: {kind}.", count)
        driver = self.held["driver"]
        yield self._counter("vattn:map_calls", "Driver calls that mapped memory.", driver["map_calls"])
        yield self._counter("vattn:unmap_calls", "Driver calls that unmapped memory.", driver["unmap_calls"])
        yield self._counter("vattn:waits", "Steps that waited for the worker that maps memory.", driver["waits"])
        yield self._counter("vattn:wait_seconds", "Seconds that steps waited for it.", driver["wait_seconds"])

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family


def _prompt_computed(request: Request) -> bool:
    return request.first_token_time is not None or request.finish_reason is FinishReason.LENGTH
