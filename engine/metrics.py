"""What an engine has counted and holds, under vLLM's names: for `get_metrics`, and for a server's `/metrics`."""

from __future__ import annotations

import bisect
import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .kv.base import KVBackend
from .requests.request import FinishReason, Request
from .roles.decoder import RemotePrefills
from .scheduling.drafts import SpeculationStats
from .scheduling.scheduler import Scheduler
from .scheduling.stored import StoredPrefixes

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS = (*_SECONDS, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_TOKENS = tuple(scale * 10**power for power in range(6) for scale in (1, 2, 5))
_BOUNDS: dict[str, Sequence[float]] = {
    "vllm:time_to_first_token_seconds": _LONG_SECONDS,
    "vllm:inter_token_latency_seconds": _SECONDS,
    "vllm:request_time_per_output_token_seconds": _SECONDS,
    "vllm:e2e_request_latency_seconds": _LONG_SECONDS,
    "vllm:request_queue_time_seconds": _LONG_SECONDS,
    "vllm:request_prefill_time_seconds": _LONG_SECONDS,
    "vllm:request_decode_time_seconds": _LONG_SECONDS,
    "vllm:request_prompt_tokens": _TOKENS,
    "vllm:request_generation_tokens": _TOKENS,
    "vattn:step_seconds": (0.0005, *_SECONDS),
}
_TTFTS_KEPT = 512


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
    """A count since the engine was made; of seconds, for names that end in `seconds`."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counts since the engine was made, by position."""

    values: Sequence[int]


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value now."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """The distribution of values since the engine was made.

    Attributes:
        count, sum: of all values.
        buckets: upper bound, as text, to how many values are not above it; the last one is "+Inf".
    """

    count: int
    sum: float
    buckets: Mapping[str, int]


class Buckets:
    """A histogram that takes many equal values at once."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def count(self) -> int:
        """Of the values so far."""
        return sum(self._counts)

    def histogram(self, name: str) -> Histogram:
        """The values so far."""
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        return Histogram(name, {}, self.count, self._sum, dict(zip(names, accumulate(self._counts), strict=True)))


class Figures:
    """Running totals of one engine: the thread that steps it counts, and any may read.

    What a request did is read from the request when it ends.

    Attributes:
        prompt_tokens: of prompts that were computed, those from the prefix cache included.
        generation_tokens: output tokens.
        preemptions: how often a request lost its slot.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self._lock = threading.RLock()  # a signal handler may ask in the middle of a change
        self._finished: Tally[FinishReason] = Tally()
        self._histograms = {name: Buckets(bounds) for name, bounds in _BOUNDS.items()}
        self._ttfts: deque[float] = deque(maxlen=_TTFTS_KEPT)
        self._last_start = self._last_end = 0.0

    @property
    def steps(self) -> int:
        """How many computed something."""
        return self._histograms["vattn:step_seconds"].count

    def stepped(self, start: float, end: float, since: Sequence[float]) -> None:
        """Count a step, in `time.monotonic()` seconds; `since` is when each request with a new token had its last."""
        with self._lock:
            self._histograms["vattn:step_seconds"].add(end - start)
            latency = self._histograms["vllm:inter_token_latency_seconds"]
            earlier = [time for time in since if time < self._last_start]  # it was preempted, or had no turn
            for last in earlier:
                latency.add(end - last)
            if len(since) > len(earlier):
                latency.add(end - self._last_end, len(since) - len(earlier))
            self._last_start, self._last_end = start, end

    def ended(self, request: Request) -> None:
        """Count a request; one without a finish reason fell with the engine."""
        first, arrival = request.first_token_time, request.arrival_time
        scheduled, end = request.first_scheduled_time, request.finished_time
        generated = len(request.output_token_ids)
        values: dict[str, float] = {
            "vllm:request_prompt_tokens": len(request.prompt_token_ids),
            "vllm:request_generation_tokens": generated,
        }
        if scheduled is not None:
            values["vllm:request_queue_time_seconds"] = scheduled - arrival
        if scheduled is not None and first is not None:
            values["vllm:time_to_first_token_seconds"] = first - arrival
            values["vllm:request_prefill_time_seconds"] = first - scheduled
        if end is not None:
            values["vllm:e2e_request_latency_seconds"] = end - arrival
        if end is not None and first is not None:
            values["vllm:request_decode_time_seconds"] = end - first
            if generated > 1:
                values["vllm:request_time_per_output_token_seconds"] = (end - first) / (generated - 1)
        with self._lock:
            self._finished[request.finish_reason or FinishReason.ERROR] += 1
            if first is not None:
                self._ttfts.append(first - arrival)
            for name, value in values.items():
                self._histograms[name].add(value)

    def recent_ttfts(self) -> list[float]:
        """Seconds to the first token of the requests that ended last."""
        with self._lock:
            return list(self._ttfts)

    def metrics(self) -> list[Metric]:
        """All of it."""
        with self._lock:
            return [
                Counter("vllm:num_preemptions", {}, self.preemptions),
                Counter("vllm:prompt_tokens", {}, self.prompt_tokens),
                Counter("vllm:generation_tokens", {}, self.generation_tokens),
                *(
                    Counter("vllm:request_success", {"finished_reason": reason.value}, self._finished[reason])
                    for reason in FinishReason
                ),
                *(buckets.histogram(name) for name, buckets in self._histograms.items()),
            ]


def counted(figures: Figures, scheduler: Scheduler, drafts: SpeculationStats) -> list[Metric]:
    """What the parts of an engine have counted; for any thread, at any time."""
    return [
        *figures.metrics(),
        Counter("vllm:prefix_cache_queries", {}, scheduler.query_tokens),
        Counter("vllm:prefix_cache_hits", {}, scheduler.hit_tokens),
        Counter("vllm:spec_decode_num_drafts", {}, drafts.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", {}, drafts.num_drafted_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", {}, drafts.num_accepted_tokens),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", {}, tuple(drafts.num_accepted_per_position)),
        *([] if scheduler.stored is None else _of_store(scheduler.stored)),
        *([] if scheduler.remote is None else _of_remote(scheduler.remote)),
    ]


def _of_remote(remote: RemotePrefills) -> list[Metric]:
    return [
        Counter("vattn:remote_prefills", {}, remote.handed),
        Counter("vattn:remote_prefills_lost", {}, remote.lost),
        Counter("vattn:remote_prefill_row_tokens", {}, remote.row_tokens),
        Gauge("vattn:prefillers", {}, float(remote.prefillers)),
    ]


def _of_store(stored: StoredPrefixes) -> list[Metric]:
    return [
        Counter("vattn:store_queries", {}, stored.query_tokens),
        Counter("vattn:store_hits", {}, stored.hit_tokens),
        Counter("vattn:store_errors", {}, stored.errors),
        Counter("vattn:store_dropped", {}, stored.dropped),
        Counter("vattn:store_evicted", {}, stored.store.evicted),
        Gauge("vattn:store_bytes", {}, float(stored.num_bytes)),
    ]


def held(scheduler: Scheduler, kv: KVBackend, *, asleep: bool) -> list[Metric]:
    """What queues and cache of an engine hold, between two steps."""
    stats = kv.stats()
    memory = {
        "reserved": stats.reserved_bytes,
        "physical": stats.physical_bytes,
        "used": stats.used_bytes,
        "live": stats.live_bytes,
    }
    return [
        Gauge("vllm:num_requests_running", {}, float(len(scheduler.running))),
        Gauge("vllm:num_requests_waiting", {}, float(len(scheduler.waiting))),
        Gauge("vllm:kv_cache_usage_perc", {}, usage(kv)),
        Gauge("vllm:engine_sleep_state", {"sleep_state": "awake"}, float(not asleep)),
        *(Gauge("vattn:memory_bytes", {"kind": kind}, float(size)) for kind, size in memory.items()),
        Counter("vattn:map_calls", {}, stats.map_calls),
        Counter("vattn:wait_seconds", {}, stats.wait_seconds),
        *borrowed(kv),
    ]


def usage(kv: KVBackend) -> float:
    """The share of the cache that running requests hold; of a loan, the share of the most that may be lent."""
    free = kv.available() / kv.total()
    if kv.loan is not None:
        free += 1 - kv.loan.lent / kv.loan.at_most
    return min(1.0, max(0.0, 1 - free))


def borrowed(kv: KVBackend) -> list[Metric]:
    """What a backend has of a pool that a broker lends; nothing, for one with memory of its own."""
    loan = kv.loan
    if loan is None:
        return []
    label = {"pool": loan.pool}
    sizes = {
        "budget": loan.budget,
        "guaranteed": loan.at_least,
        "most": loan.at_most,
        "lent": loan.lent,
        "used": loan.usage.owned,
        "parked": loan.usage.parked,
        "cached": loan.usage.cached,
        "shared": loan.usage.shared,
        "asked_back": loan.asked_back,
    }
    return [
        Gauge("vattn:pool_broker_reachable", label, float(loan.reachable)),
        *(Gauge(f"vattn:pool_{kind}_bytes", label, float(size)) for kind, size in sizes.items()),
        Counter("vattn:pool_given_back_bytes", label, loan.given_back),
    ]
