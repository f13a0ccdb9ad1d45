"""What a step did, for benchmarks and plots."""

from __future__ import annotations

from dataclasses import dataclass

from ..kv.base import KVStats


@dataclass(frozen=True)
class StepRecord:
    """One step, for benchmarks and plots. Times in seconds.

    Attributes:
        start_time: `time.monotonic()` at the beginning of the step.
        schedule_seconds: time spent planning.
        prepare_seconds: time spent in the backend's `prepare`, which provides memory.
        forward_seconds: time spent in model and sampling.
        decode_tokens, prefill_tokens: tokens computed for requests that have output tokens, and for others.
        num_running, num_waiting: requests after the step.
        num_preempted: requests preempted in this step.
        kv: the backend's figures after the step.
        drafted_tokens, accepted_tokens: those of `decode_tokens` that were drafts, and how many were accepted.
    """

    start_time: float
    schedule_seconds: float
    prepare_seconds: float
    forward_seconds: float
    decode_tokens: int
    prefill_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    kv: KVStats
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.schedule_seconds + self.prepare_seconds + self.forward_seconds
