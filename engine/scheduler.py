"""Which tokens the next step computes: first come first served, under a token budget and the cache's memory.

Continuous batching: every step is planned anew from the requests that run, decodes and chunks of prefills together.
Running requests come first, oldest first; then waiting ones, in order of arrival, as far as tokens, slots and memory
reach. Where memory runs short, the youngest running request gives its cache up and computes it again later.

Why it cannot deadlock: a request that does not fit the whole pool alone is refused when it comes; only younger
requests are preempted for older ones; so the oldest always gets what it needs, and finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.kv import KVBackend
from engine.request import FinishReason, InvalidRequest, Request, State
from vattn.errors import ConfigError

# A newcomer must leave room for this many more tokens of every request, or it would be preempted within a few steps.
HEADROOM_TOKENS = 64

SCHEDULING = ("continuous", "static")


@dataclass(frozen=True, slots=True)
class Entry:
    """Tokens `[start, end)` of a request, to be computed in this step."""

    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the newest token, so that the next one can be sampled."""
        return self.end == self.request.num_tokens


@dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
        entries: what to compute, running requests first.
        preempted: requests that lost their cache to make this plan possible.
        reserve: slot to tokens that memory is taken for before it is prepared for `lengths`.
    """

    entries: tuple[Entry, ...] = ()
    preempted: tuple[Request, ...] = ()
    reserve: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(entry.end - entry.start for entry in self.entries)

    @property
    def num_decode_tokens(self) -> int:
        """Of them, tokens of requests that are decoding."""
        return sum(entry.request.state is State.DECODING for entry in self.entries)

    @property
    def lengths(self) -> dict[int, int]:
        """Slot to the tokens that it must hold in this step."""
        return {_slot(entry.request): entry.end for entry in self.entries}

    @property
    def next_lengths(self) -> dict[int, int]:
        """Slot to the tokens that it will hold in the next step, for prefills that go on: another such chunk."""
        return {
            _slot(entry.request): min(entry.request.num_tokens, 2 * entry.end - entry.start)
            for entry in self.entries
            if not entry.samples
        }


def check_limits(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raise a ConfigError for a limit below 1, or a step too small for one token of every running request."""
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs is {max_num_seqs}; it must be at least 1")
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_num_seqs ({max_num_seqs}), so a step "
            "could not hold one token of every running request; raise the one or lower the other"
        )


class Scheduler:
    """Queues, admission, preemption.

    Invariants: a request is in exactly one of `waiting` and `running`, until it is finished; exactly those in
    `running` hold a slot; `running` is in the order of admission, and no decode comes after a prefill, since nothing
    is admitted behind a prefill that a step could not finish. So every decode gets its token in every step.

    Args:
        max_num_seqs: most running requests.
        max_num_batched_tokens: most tokens of one step.

    Raises:
        ConfigError: a limit below 1, or a step too small for one token of every running request.
    """

    def __init__(self, kv: KVBackend, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        check_limits(max_num_seqs, max_num_batched_tokens)
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """Refuse a request that the whole pool could not hold alone.

        Raises:
            InvalidRequest: with what it would take and what there is.
        """
        needed, total = self.kv.needed(request.max_total_tokens), self.kv.total()
        if needed > total:
            raise InvalidRequest(
                f"request {request.request_id} may grow to {request.max_total_tokens} tokens, which takes {needed} "
                f"units of KV cache ({self.kv.name}), but there are {total} in all; lower max_tokens or shorten the "
                "prompt, or give the cache more memory"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it could never fit; see `check_fits`.
        """
        self.check_fits(request)
        self.waiting.append(request)

    def schedule(self, *, admit: bool = True) -> Plan:
        """Plan a step; admits (unless told not to) and preempts requests, computes nothing."""
        budget = self.max_num_batched_tokens
        free = self.kv.available()
        entries: list[Entry] = []
        preempted: list[Request] = []

        for request in tuple(self.running):
            if request.state is State.PREEMPTED:
                break
            start = request.num_computed_tokens
            end = start + min(request.num_uncomputed_tokens, budget)
            while request.slot is not None and self.kv.needed(end, request.slot) > free:
                before = self.kv.available()
                preempted.append(self.preempt_youngest())
                free += self.kv.available() - before
            if request.slot is not None and end > start:
                entries.append(Entry(request, start, end))
                budget -= end - start
                free -= self.kv.needed(end, request.slot)

        # Memory that was just taken from the youngest is not for a newcomer.
        admit = admit and not preempted
        room = self._room() if self.waiting and admit else 0
        while self.waiting and admit and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            room -= self._reserve(request)
            if room < 0 and self.running:
                break
            request.admit(self.kv.allocate(request.num_tokens))
            self.running.append(self.waiting.popleft())
            entries.append(Entry(request, 0, min(request.num_tokens, budget)))
            budget -= entries[-1].end
        return Plan(tuple(entries), tuple(preempted))

    def preempt_youngest(self) -> Request:
        """Take the cache of the request that was admitted last; it becomes the first of the queue."""
        request = self.running.pop()
        slot = request.slot
        assert slot is not None
        request.preempt()
        self.kv.free(slot)
        self.waiting.appendleft(request)
        return request

    def finish(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> None:
        """End a request from outside, in any state, and free what it holds; one that is done already stays as it is."""
        if request.state is not State.DONE:
            request.finish(reason, error)
            self.release(request)

    def release(self, request: Request) -> None:
        """Forget a finished request and free its slot."""
        assert request.state is State.DONE
        if request.slot is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.kv.free(request.slot)
        request.slot = None

    def check(self) -> None:
        """Assert the invariants of the queues."""
        assert all(r.slot is not None and r.state in (State.PREFILLING, State.DECODING) for r in self.running)
        assert all(r.slot is None and r.state in (State.WAITING, State.PREEMPTED) for r in self.waiting)
        decoding = [request.state is State.DECODING for request in self.running]
        assert decoding == sorted(decoding, reverse=True), "a prefill comes before a decode"
        slots = [request.slot for request in self.running]
        assert len(set(slots)) == len(slots) <= self.max_num_seqs, "two requests in one slot"

    def _reserve(self, request: Request) -> int:
        """Units that a request still takes, to hold the tokens it has and some to come."""
        return self.kv.needed(min(request.num_tokens + HEADROOM_TOKENS, request.max_total_tokens), request.slot)

    def _room(self) -> int:
        """Units that no running request is about to take."""
        return self.kv.available() - sum(self._reserve(request) for request in self.running)


def _slot(request: Request) -> int:
    assert request.slot is not None, f"{request!r} is in a plan without a slot"
    return request.slot
