"""Static batching, for comparison: a batch is padded to its longest request and runs until its slowest one ends.

This is what continuous batching replaced, with one advantage over the original: packed steps compute neither padding
nor finished requests. It costs memory (every slot is reserved at the batch's longest prompt and longest output, and
kept after its request has finished) and time (no request is admitted before the batch has ended).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..kv.base import KVBackend
from ..requests.request import Request, State
from .scheduler import Entry, Scheduler, StepPlan


class StaticScheduler(Scheduler):
    """Admits a batch when the previous one has ended, first come first served.

    Invariants: those of `Scheduler`; `finished_slots` has the slots of finished requests until the batch ends, and is
    empty while nothing runs.

    Args:
        max_num_seqs: most requests of a batch.
        max_num_batched_tokens: most tokens of one step; a batch's prompts are computed in several, where they have
            more.
        max_model_len: most tokens of a slot, which bounds the padding.

    Raises:
        ConfigError: as `Scheduler` does.
    """

    def __init__(self, kv: KVBackend, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        super().__init__(kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.max_model_len = max_model_len
        self.finished_slots: list[int] = []
        self._padded_tokens = 0

    def schedule(self, *, admit: bool = True) -> StepPlan:
        """Plan a step of the batch; the first step of a request reserves its slot up to the padded length."""
        if not self.running and self.waiting and admit:
            self._admit_batch()
        budget = self.max_num_batched_tokens
        entries = []
        for request in self.running:
            start = request.num_computed_tokens
            end = start + min(request.num_uncomputed_tokens, budget)
            if end > start:
                entries.append(Entry(request, start, end))
                budget -= end - start
        starting = [entry.request.slot for entry in entries if entry.start == 0]
        reserve = {slot: self._padded_tokens for slot in starting if slot is not None}
        return StepPlan(tuple(entries), reserve=reserve)

    def fork_siblings(self, leaders: Sequence[Request]) -> Iterator[tuple[Request, Request]]:
        """Nothing: a batch gets all its slots when it starts."""
        return iter(())

    def release(self, request: Request) -> None:
        """Forget a finished request; its slot is freed with the batch."""
        assert request.state is State.DONE
        if request.slot is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.finished_slots.append(request.slot)
        request.slot = None
        if not self.running:
            self._end_batch()

    def preempt_last(self, *, look_ahead: bool = True) -> Request:
        """As `Scheduler.preempt_last`; with its last request the batch ends."""
        request = super().preempt_last(look_ahead=look_ahead)
        if not self.running:
            self._end_batch()
        return request

    def _end_batch(self) -> None:
        for slot in self.finished_slots:
            self.kv.free(slot)
        self.finished_slots.clear()

    def restore(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """As `Scheduler.restore`; drops the slots of finished requests, too."""
        super().restore(running, waiting)
        self.finished_slots.clear()

    def check(self) -> None:
        """Assert the invariants of the queues."""
        super().check()
        assert self.running or not self.finished_slots, "a batch that has ended keeps slots"
        slots = {request.slot for request in self.running}
        assert slots.isdisjoint(self.finished_slots), "a slot that runs is among the finished"
        assert len(slots) + len(self.finished_slots) <= self.max_num_seqs

    def _admit_batch(self) -> None:
        """Start as many requests from the head of the queue, at least one, as memory holds when padded alike."""
        batch: list[Request] = []
        for request in self.waiting[: self.max_num_seqs]:
            if batch and len(batch) + 1 > self.kv.available() // self.kv.needed(self._padded([*batch, request])):
                break
            batch.append(request)
        self._padded_tokens = self._padded(batch)
        for request in batch:
            self.waiting.pop(0)
            request.admit(self.kv.allocate(self._padded_tokens))
            self.running.append(request)

    def _padded(self, batch: Sequence[Request]) -> int:
        """Padded length of a slot: the longest prompt plus the longest output, possibly of different requests."""
        prompts = [len(request.prompt_token_ids) for request in batch]
        outputs = [request.max_total_tokens - prompt for request, prompt in zip(batch, prompts, strict=True)]
        return min(max(prompts) + max(outputs), self.max_model_len)
