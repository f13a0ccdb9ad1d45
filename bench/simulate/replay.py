"""The engine's loop over a trace: the scheduler plans, the store provides memory, clocks advance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vattn.engine.kv.base import KVBackend
from vattn.engine.requests.request import Request, State
from vattn.engine.requests.sampling import SamplingParams
from vattn.engine.scheduling.scheduler import Scheduler, StepPlan
from vattn.errors import OutOfPages

from .gpus import StepTime, Work
from .provider import Clock
from .stores import Store
from .traces import Trace, Turn

TOKEN = 0  # what every output consists of
SAMPLED_STEPS = 16  # memory is looked at in one of as many steps
_WAITING = 4  # conversations in the queue, for each slot


@dataclass
class Result:
    """What a replay has counted.

    Attributes:
        steps: of the engine.
        requests, output_tokens: that are finished, and all that were made.
        computed_tokens: that went through the model; `output_tokens` and those of prompts, some again.
        preemptions: requests that lost their memory.
        running: requests per step, summed.
        used_bytes, live_bytes: memory of running requests, and of their tokens, summed over the steps looked at.
        map_calls: that mapped a page.
        driver_seconds: of all driver calls, whoever waited for them.
        seconds, waited: of each machine: in all, and for driver calls.
    """

    steps: int = 0
    requests: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    running: int = 0
    used_bytes: int = 0
    live_bytes: int = 0
    map_calls: int = 0
    driver_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)

    @property
    def waste(self) -> float:
        """Share of running requests' memory that holds no token."""
        return 1 - self.live_bytes / self.used_bytes if self.used_bytes else 0.0


class Replay:
    """One trace through one store.

    Args:
        machines: how long a step takes on each, and its clock. The schedule is the same on all.
        leap: make steps that differ in nothing but the clock together.
    """

    def __init__(
        self,
        store: Store,
        trace: Trace,
        machines: Mapping[str, tuple[StepTime, Clock]],
        *,
        requests: int,
        slots: int,
        tokens_per_step: int,
        leap: bool = True,
    ) -> None:
        self._store = store
        self._kv: KVBackend = store.kv
        self._machines = machines
        self._scheduler = Scheduler(
            store.kv, max_num_seqs=slots, max_num_batched_tokens=tokens_per_step, prefix_caching=trace.shares
        )
        self._trace = trace
        self._slots = slots
        self._leap = leap
        self._block = store.kv.prefix_block_tokens
        self._fresh: Iterator[Turn] = trace.begin()
        self._left = requests
        self._names = itertools.count()
        self._turns: dict[Request, Turn] = {}
        self.result = Result()

    def run(self) -> Result:
        """Serves all requests."""
        spent = self._store.spent
        calls = self._kv.stats().map_calls
        while self._feed():
            plan = self._step()
            if self._leap and self._steady(plan):
                self._leap_ahead(plan)
        result = self.result
        result.map_calls = self._kv.stats().map_calls - calls
        result.driver_seconds = self._store.spent - spent
        for name, (_, clock) in self._machines.items():
            result.seconds[name], result.waited[name] = clock.now, clock.waited
        return result

    def _feed(self) -> bool:
        """Keeps the queue filled; whether there is anything to do."""
        most = _WAITING * self._slots if self._trace.shares else self._slots
        while self._left and len(self._scheduler.waiting) < most:
            self._add(next(self._fresh))
        return self._scheduler.has_unfinished()

    def _add(self, turn: Turn) -> None:
        self._left -= 1
        total = len(turn.prompt) + turn.output
        params = SamplingParams(max_tokens=turn.output, ignore_eos=True)
        request = Request(str(next(self._names)), turn.prompt, params, max_total_tokens=total, seed=0)
        self._scheduler.check_fits(request)
        self._scheduler.add(request)
        self._turns[request] = turn

    def _step(self) -> StepPlan:
        """A step as `EngineCore` makes it, up to its model and its outputs."""
        scheduler, result = self._scheduler, self.result
        plan = scheduler.schedule()
        result.preemptions += len(plan.preempted)
        while True:
            try:
                self._kv.prepare(plan.lengths, plan.next_lengths)
                break
            except OutOfPages:
                if len(scheduler.running) == 1:
                    raise
                scheduler.preempt_last()
                plan = scheduler.schedule(admit=False)
                result.preemptions += 1 + len(plan.preempted)
        self._pass(work_of(plan), len(plan.entries))
        ended = []
        for entry in plan.entries:
            request, samples = entry.request, entry.samples
            request.advance(entry.end)
            if len(entry) > 1 and request.publishes:
                scheduler.publish(request)
            if samples:
                request.append(TOKEN)
                result.output_tokens += 1
                if request.state is State.DONE:
                    ended.append(request)
        for request in ended:
            scheduler.release(request)
            self._end(request)
        if result.steps % SAMPLED_STEPS == 0:
            stats = self._kv.stats()
            result.used_bytes += stats.used_bytes
            result.live_bytes += stats.live_bytes
        return plan

    def _end(self, request: Request) -> None:
        self.result.requests += 1
        turn = self._turns.pop(request)
        if turn.more is not None and self._left:
            following = turn.more.turn(request.token_ids(0, request.num_tokens))
            if following is not None:
                self._add(following)

    def _pass(self, work: Work, running: int) -> None:
        """Counts a step, and lets its time pass."""
        result = self.result
        result.steps += 1
        result.running += running
        result.computed_tokens += work.tokens
        for seconds, clock in self._machines.values():
            clock.now += seconds(work)

    def _steady(self, plan: StepPlan) -> bool:
        """Whether the next step differs from this one only in that every request has a token more, as far as it needs
        no memory and ends no request: nobody came, went or was computing a prompt, so nobody can come, either.
        """
        running = self._scheduler.running
        return (
            not plan.preempted
            and len(plan.entries) == len(running) == plan.num_tokens
            and all(request.state is State.DECODING and len(request.output_token_ids) > 1 for request in running)
        )

    def _leap_ahead(self, plan: StepPlan) -> None:
        """Makes all steps up to the next one that needs memory, or in which a request ends."""
        running, result = self._scheduler.running, self.result
        count = min(min(self._until_memory(r), r.max_total_tokens - r.num_tokens - 1) for r in running)
        if count < 1:
            return
        many = len(running)
        before = self._kv.stats()
        reads = sum(request.num_computed_tokens for request in running)
        more = many * self._kv.token_bytes
        for number in range(1, count + 1):
            reads += many
            self._pass(Work(many, reads, reads), many)
            if result.steps % SAMPLED_STEPS == 0:
                result.used_bytes += before.used_bytes
                result.live_bytes += before.live_bytes + number * more
        for request in running:
            request.output_token_ids += [TOKEN] * count
            request.advance(request.num_computed_tokens + count)
        self._kv.prepare({request.slot: request.num_computed_tokens for request in running if request.slot is not None})
        result.output_tokens += many * count

    def _until_memory(self, request: Request) -> int:
        """Steps in which the request surely stays within its last block, and does not come to its end."""
        filled = request.num_computed_tokens % self._block
        return self._block - 1 - filled if filled else 0


def work_of(plan: StepPlan) -> Work:
    """What a plan computes."""
    pairs = sum((entry.end - entry.start) * (entry.start + entry.end + 1) // 2 for entry in plan.entries)
    return Work(plan.num_tokens, pairs, sum(entry.end for entry in plan.entries))
