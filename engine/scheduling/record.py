"""What a step did, for benchmarks and plots."""

from __future__ import annotations

from dataclasses import dataclass

from vattn.engine.kv.base import KVStats


@dataclass(frozen=True)
class StepRecord:
    """One step, for benchmarks and plots. Times in seconds.

    Attributes:
        start_time: `time.monotonic()` when the step began.
        schedule_seconds: planning.
        prepare_seconds: making memory ready: the backend's `prepare`.
        forward_seconds: model and sampling.
        decode_tokens, prefill_tokens: tokens computed for requests that have output, and for those that do not.
        num_running, num_waiting: requests after the step.
        num_preempted: requests that lost their cache in this step.
        drafted_tokens, accepted_tokens: of `decode_tokens` those of drafts, and of these the ones that were right.
        kv: the backend's figures after the step.
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
