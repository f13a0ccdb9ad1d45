"""Which tokens the next step computes: by rank, under a token budget and the cache's memory.

Continuous batching: every step is planned anew, and mixes decodes with chunks of prefills. Running requests come first,
then waiting ones as far as tokens, slots and memory allow. Requests are ranked by arrival, or by priority and then
arrival. When memory runs short, the running request of the lowest rank is preempted: it loses its slot and is queued
again, with a copy of its cache if copying is cheaper than recomputing.

Why it cannot deadlock or thrash: a request that would not fit an empty cache is refused on arrival; a request is
preempted only for one of a higher rank, and ranks never change, so the highest-ranked request always gets the memory it
needs, and finishes. No request is admitted in a step that preempts, nor without headroom for some more tokens.

Of a pool that other caches use, it gets what they leave: a request that runs alone and does not fit beside them is in
the plan nevertheless. What then happens is for whoever is told that its memory cannot be had: preempted for itself, it
would begin anew again and again, and never get further.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

from vattn.errors import ConfigError, DriverError, OutOfPages
from vattn.prefix import Admission, TokenIds

from ..checks import checked_choice, checked_whole
from ..kv.base import KVBackend
from ..requests.request import FinishReason, InvalidRequest, Request, State
from ..roles.decoder import RemotePrefills
from .drafts import NgramProposer
from .stored import StoredPrefixes
from .swap import SwapSpace

logger = logging.getLogger(__name__)

# An admission leaves room for this many more tokens of every running request; with less it would soon be preempted.
HEADROOM_TOKENS = 64
# A request waits for another one to compute a shared prefix of at least this many tokens.
HEAD_TOKENS = 64

# Above what any machine can run: each slot costs bookkeeping, and each token of a step a row.
MOST_SEQS = 2**16
MOST_BATCHED_TOKENS = 2**24

Policy = Literal["fcfs", "priority"]
SCHEDULING = ("continuous", "static")


@dataclass(frozen=True, slots=True)
class Entry:
    """Tokens `[start, end)` of a request, to be computed in this step; the draft comes last."""

    request: Request
    start: int
    end: int
    draft: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the step reaches the newest token, so that the next one can be sampled."""
        return self.end - len(self.draft) == self.request.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step.

    Attributes:
        entries: what to compute, running requests first.
        preempted: requests that were preempted to make this plan possible.
        reserve: slot to the tokens that memory is reserved for before `lengths` are prepared.
    """

    entries: tuple[Entry, ...] = ()
    preempted: tuple[Request, ...] = ()
    reserve: Mapping[int, int] = field(default_factory=dict)

    @property
    def requests(self) -> list[Request]:
        return [entry.request for entry in self.entries]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.entries))

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of requests that are decoding."""
        return sum(len(entry) for entry in self.entries if entry.request.state is State.DECODING)

    @property
    def lengths(self) -> dict[int, int]:
        """Slot to its length in this step."""
        return {_slot(entry.request): entry.end for entry in self.entries}

    @property
    def next_lengths(self) -> dict[int, int]:
        """Slot to its expected length in the next step, for prefills with another chunk to come."""
        return {
            _slot(entry.request): min(entry.request.num_tokens, 2 * entry.end - entry.start)
            for entry in self.entries
            if not entry.samples
        }


class PrefixSource(Protocol):
    """Where prefixes come from that memory lacks: a store on disk, or another engine."""

    def look_ahead(self, request: Request) -> None:
        """Begin to get what memory lacks of a waiting request's tokens."""

    def is_ready(self, request: Request) -> bool:
        """Whether the request can be admitted: nothing more comes."""

    def wait(self, request: Request) -> bool:
        """Wait until `is_ready`, but not for long; returns whether it is."""

    def forget(self, request: Request) -> None:
        """Get nothing more for a request."""

    def stop(self) -> None:
        """Get nothing from here on: it may not be what this engine would compute."""


def check_limits(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, int]:
    """Both as integers; a ConfigError for one that is out of range, or a step too small for all running requests."""
    max_num_seqs = checked_whole("max_num_seqs", max_num_seqs, 1, MOST_SEQS)
    max_num_batched_tokens = checked_whole("max_num_batched_tokens", max_num_batched_tokens, 1, MOST_BATCHED_TOKENS)
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_num_seqs ({max_num_seqs}), so a step "
            "could not hold one token of every running request; raise the one or lower the other"
        )
    return max_num_seqs, max_num_batched_tokens


class Scheduler:
    """Queues, admission, preemption.

    Invariants: a request is in exactly one of `waiting` and `running`, until it is finished; exactly those in
    `running` hold a slot; `waiting` is in order of rank. Decodes come before prefills in a step, so each of them gets
    its token in every step.

    Args:
        max_num_seqs: most running requests.
        max_num_batched_tokens: most tokens of one step.
        policy: how requests are ranked: "fcfs" by arrival, "priority" by priority, lower first, then by arrival. The
            request of the lowest rank is preempted first.
        swap: stores the caches of preempted requests; None to recompute them.
        prefix_caching: look requests up in the backend's prefix cache.
        stored: what of it survives the process; None for nothing. A request whose prefix is being read keeps its place
            in the queue, and room for it, while others go on.
        remote: what of it other engines compute; None for nothing. It is waited for likewise.
        long_prefill: most tokens of one prompt in a step with other requests; 0 for no limit.
        proposer: makes drafts for decoding requests; None for no drafts. Drafts only use tokens of the step that no
            other request needs, and never memory that would require a preemption.

    Attributes:
        query_tokens: tokens looked up in the prefix cache; a request counts when it is first admitted.
        hit_tokens: how many of them were found.
        sources: where other prefixes come from.

    Raises:
        ConfigError: a limit below 1, or a step too small for one token of every running request.
    """

    def __init__(
        self,
        kv: KVBackend,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy = "fcfs",
        swap: SwapSpace | None = None,
        prefix_caching: bool = False,
        stored: StoredPrefixes | None = None,
        remote: RemotePrefills | None = None,
        long_prefill: int = 0,
        proposer: NgramProposer | None = None,
    ) -> None:
        max_num_seqs, max_num_batched_tokens = check_limits(max_num_seqs, max_num_batched_tokens)
        checked_choice("scheduling_policy", policy, get_args(Policy))
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy
        self.swap = swap
        self.prefix_caching = prefix_caching
        self.stored = stored
        self.remote = remote
        self.sources: list[PrefixSource] = [source for source in (stored, remote) if source is not None]
        self.long_prefill = long_prefill
        self.proposer = proposer
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.query_tokens = 0
        self.hit_tokens = 0
        self._numbers = itertools.count()
        self._lent = kv.loan is not None

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """Refuse a request that would not fit an empty cache.

        Raises:
            InvalidRequest: says what it may need and what there is.
        """
        needed, total = self.kv.needed(request.max_total_tokens), self.kv.total()
        if needed > total:
            raise InvalidRequest(
                f"request {request.request_id} may grow to {request.max_total_tokens} tokens, which takes {needed} "
                f"units of KV cache ({self.kv.name}), but there are {total} in all; lower max_tokens or shorten the "
                "prompt, or give the cache more memory"
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check_fits` accepts."""
        request.arrival_number = next(self._numbers)
        self.queue(request)

    def queue(self, request: Request, *, look_ahead: bool = True) -> None:
        """Put a request with an arrival number into `waiting`, by its rank.

        Args:
            look_ahead: get what memory lacks of its tokens from elsewhere.
        """
        bisect.insort(self.waiting, request, key=self._rank)
        if look_ahead and self.sources and request.index == 0 and self._shares(request):
            for source in self.sources:
                source.look_ahead(request)

    def schedule(self, *, admit: bool = True) -> StepPlan:
        """Plan a step; admits (unless told not to) and preempts requests, computes nothing."""
        if self.stored is not None:
            self.stored.heed(self.running)
        budget = self.max_num_batched_tokens
        spare = self._spare_tokens()
        # Looked up for the first claim: most steps grow no request beyond what it has.
        free: int | None = None
        alone = len(self.running) + len(self.waiting) == 1
        chunk = self.long_prefill if self.long_prefill and not alone else budget
        entries: dict[Request, Entry] = {}
        claims: dict[Request, int] = {}  # of `free`
        preempted: list[Request] = []
        for request in sorted(self.running, key=self._turn):
            start = request.num_computed_tokens
            end = start + min(request.num_uncomputed_tokens, budget, chunk)
            while request.slot is not None and (claim := self.kv.needed(end, request.slot)):
                if free is None:
                    free = self.kv.available()
                if claim <= free or len(self.running) == 1:
                    free -= claim
                    claims[request] = claim
                    break
                before = self.kv.available()
                victim = self.preempt_last()
                free += self.kv.available() - before + claims.pop(victim, 0)
                budget += len(entries.pop(victim, ()))
                preempted.append(victim)
            if request.slot is not None and end > start:
                entries[request] = Entry(request, start, end)
                budget -= end - start
        if spare and not preempted:
            budget -= self._add_drafts(entries, spare, self.kv.available() if free is None else free, claims)

        # Memory that was just taken from a request must not go to a newcomer.
        admit = admit and not preempted
        comes = bool(self.waiting) and admit and budget > 0 and len(self.running) < self.max_num_seqs
        room = self._room() if comes else 0
        underway = _Underway(
            self.running if comes else (), self.kv.prefix_block_tokens if self.prefix_caching else None
        )
        held = 0  # requests at the head of the queue that wait: for another with their prompt or the start of it,
        coming: list[tuple[PrefixSource, Request]] = []  # for their prefixes, which come from elsewhere,
        scored = 0  # or for other beams
        while held < len(self.waiting) and admit and budget and len(self.running) + held - scored < self.max_num_seqs:
            request = self.waiting[held]
            if request.scored:
                held += 1
                scored += 1
                continue
            room -= self._reserve(request)
            if underway.leads(request):
                held += 1
                continue
            if source := next((each for each in self.sources if not each.is_ready(request)), None):
                coming.append((source, request))
                underway.expect(request)
                held += 1
                continue
            if self._shares(request) and underway.computes_prefix(request):
                held += 1
                continue
            if room < 0 and self.running:
                room += self.kv.borrow(-room, self._following(held, budget)) if self._lent else 0
                if room < 0:
                    break
            self._start(request)
            self.running.append(self.waiting.pop(held))
            underway.add(request)
            start = request.num_computed_tokens
            entries[request] = Entry(request, start, start + min(request.num_uncomputed_tokens, budget, chunk))
            budget -= len(entries[request])
        if coming and not self.running:
            source, request = coming[0]
            return self.schedule() if source.wait(request) else StepPlan()
        if admit and not entries and self.running and self.waiting:
            # Scored beams wait for queued beams of their search, which need the memory of one of them.
            victim = self.preempt_last()
            plan = self.schedule()
            return replace(plan, preempted=(victim, *plan.preempted))
        return StepPlan(tuple(entries.values()), tuple(preempted))

    def fork(self, parent: Request, child: Request, room: int | None = None) -> bool:
        """Start a request with the tokens of a running one, all of them computed, in a fork of its slot.

        Args:
            room: `_room()`, if known.

        Returns:
            Whether there was a slot, and memory for the copy and some more tokens; if not, nothing changed.
        """
        assert parent.slot is not None
        headroom = min(HEADROOM_TOKENS, child.max_total_tokens - child.num_tokens)
        if len(self.running) >= self.max_num_seqs:
            return False
        if (self._room() if room is None else room) < self.kv.needed(headroom):
            return False
        try:
            slot = self.kv.fork(parent.slot)
        except Exception:  # it can still be computed; the next step reports a lasting error
            return False
        child.publishes = parent.publishes
        child.num_shared_tokens = child.num_tokens
        child.admit(slot, child.num_tokens)
        self.running.append(child)
        return True

    def fork_siblings(self, leaders: Sequence[Request]) -> Iterator[tuple[Request, Request]]:
        """Start the other completions of prompts that were just computed, as far as there is room.

        Yields:
            The request whose slot was forked, and the one that was started, before the next one is.
        """
        by_parent = {leader.parent_id: leader for leader in leaders}
        room = self._room()
        while self.waiting:
            request = self.waiting[0]
            leader = by_parent.get(request.parent_id)
            available = self.kv.available()
            if leader is None or not _may_fork(leader, request) or not self.fork(leader, request, room):
                break
            yield leader, self.waiting.pop(0)
            room -= available - self.kv.available() + self._reserve(request)

    def preempt_last(self, *, look_ahead: bool = True) -> Request:
        """Preempt the running request of the lowest rank: free its slot and queue it again.

        Args:
            look_ahead: as for `queue`.
        """
        request = max(self.running, key=self._rank)
        slot = request.slot
        assert slot is not None
        computed = self.publish(request)
        if request.saved is None and self.swap is not None:
            request.saved = self.swap.save(request)
        request.preempt()
        self.running.remove(request)
        self.kv.free(slot, computed)
        self.queue(request, look_ahead=look_ahead)
        return request

    def preempt_all(self) -> None:
        """Preempt every running request, and drop all copies of caches: each request will be computed again."""
        while self.running:
            self.preempt_last()
        self.drop_copies()

    def drop_copies(self) -> None:
        """Drop all copies of caches: waiting requests will be computed again."""
        for request in self.waiting:
            self._drop_copy(request)

    def _drop_copy(self, request: Request) -> None:
        """Have a waiting request computed again."""
        request.scored = False
        if request.saved is not None and self.swap is not None:
            self.swap.forget(request)
            request.num_computed_tokens = 0

    def finish(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> None:
        """End a request in any state and free what it holds; no effect on one that is done."""
        if request.state is not State.DONE:
            request.finish(reason, error)
            self.release(request)

    def release(self, request: Request) -> None:
        """Forget a finished request and free its slot."""
        assert request.state is State.DONE
        if self.swap is not None:
            self.swap.forget(request)
        for source in self.sources:
            source.forget(request)
        if request.slot is None:
            self.waiting.remove(request)
            return
        computed = None
        if request.finish_reason is FinishReason.ERROR:
            self.kv.retract(request.slot)  # what it computed before may be wrong, too
            if request.num_preemptions and request.num_shared_tokens is not None:  # and in slots that it had before
                ids = request.first_ids(request.num_tokens)
                self.kv.retract_tokens(ids, request.cache_salt, request.num_shared_tokens)
            for other in self.waiting:
                if other.saved is not None and _begin_alike(request, other):  # the copy may have it
                    self._drop_copy(other)
            if self.stored is not None:
                self.stored.retract(request, self.running)
        else:
            computed = self.publish(request)
        self.running.remove(request)
        self.kv.free(request.slot, computed)
        request.slot = None

    def publish(self, request: Request, since: int | None = None) -> TokenIds | None:
        """Let later requests find what a running one has computed: these tokens, or None if it is kept to itself.

        Args:
            since: the first token that the last step computed; by default the one after the last.
        """
        if not request.publishes or request.slot is None:
            return None
        computed = request.first_ids(request.num_computed_tokens)
        self.kv.commit(request.slot, computed)
        if self.stored is not None:
            self.stored.save(request, since)
        return computed

    def restore(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Make these the queues, whatever an interrupted call left of them and of the backend's slots."""
        for request in {*self.running, *self.waiting} - {*running, *waiting}:
            for source in self.sources:
                source.forget(request)
        for request in waiting:
            request.num_computed_tokens = 0 if request.saved is None else request.saved.length
        self.running[:] = running
        self.waiting[:] = sorted(waiting, key=self._rank)
        if self.swap is not None:
            self.swap.recount([*running, *waiting])
        self.kv.retain([_slot(request) for request in running])

    def check(self) -> None:
        """Assert the invariants of the queues."""
        assert all(r.slot is not None and r.state in (State.PREFILLING, State.DECODING) for r in self.running)
        assert all(r.slot is None and r.state in (State.WAITING, State.PREEMPTED) for r in self.waiting)
        assert self.waiting == sorted(self.waiting, key=self._rank), "the queue is out of order"
        slots = [request.slot for request in self.running]
        assert len(set(slots)) == len(slots) <= self.max_num_seqs, "two requests in one slot"

    def _start(self, request: Request) -> None:
        """Give a waiting request a slot, with what the cache has of its tokens."""
        admission = self._admit(request) if self._shares(request) else None
        request.publishes = admission is not None
        if admission is not None:
            slot, cached = admission
            if request.first_scheduled_time is None:
                self.query_tokens += request.num_tokens
                self.hit_tokens += cached
            if self.stored is not None:
                self.stored.heed(self.running)  # `admit` may have heard of wrong blocks, which are not to be read again
                cached = self.stored.restore(request, slot, cached)
            if self.remote is not None:
                cached = self.remote.restore(request, slot, cached)
            shared = request.num_shared_tokens
            request.num_shared_tokens = cached if shared is None else min(shared, cached)
            request.admit(slot, cached)
        else:
            for source in self.sources:
                source.forget(request)
            request.admit(self.kv.allocate(request.num_tokens, request.saved.length if request.saved else 0))

    def _admit(self, request: Request) -> Admission | None:
        """A slot with a request's cached prefix; None if the prefix cannot be mapped, but it can still be computed."""
        try:
            return self.kv.admit(request.first_ids(request.num_tokens), request.cache_salt)
        except (OutOfPages, DriverError) as error:
            logger.warning("a cached prefix was not used: %s", error)
            return None

    def _shares(self, request: Request) -> bool:
        """Whether a waiting request may use what others have computed, and they what it computes."""
        # The rows of cached tokens are never computed, and somebody may have asked for what they say.
        return self.prefix_caching and request.saved is None and request.prompt_logprobs is None

    def _spare_tokens(self) -> int:
        """Tokens of a step that are left for drafts, after all that running and next waiting requests need."""
        if self.proposer is None:
            return 0
        comers = self.waiting[: self.max_num_seqs - len(self.running)]
        needed = sum(request.num_uncomputed_tokens for request in [*self.running, *comers])
        return max(0, self.max_num_batched_tokens - needed)

    def _add_drafts(self, entries: dict[Request, Entry], most: int, free: int, claims: Mapping[Request, int]) -> int:
        """Give decoding requests drafts; the entries of all of them are known, so a draft takes nobody's memory.

        Args:
            most: tokens.
            free: units of memory that are left beside the `claims` of the entries.

        Returns:
            Tokens of all drafts.
        """
        assert self.proposer is not None
        left = most
        longest = HEADROOM_TOKENS if self.waiting else most  # an admission leaves room for no more
        for request, entry in list(entries.items()):
            may = min(left, longest)
            draft = self.proposer.propose(request, may) if may and request.state is State.DECODING else ()
            end = entry.end + len(draft)
            if draft and (more := self.kv.needed(end, request.slot) - claims.get(request, 0)) <= max(0, free):
                entries[request] = replace(entry, end=end, draft=draft)
                free -= more
                left -= len(draft)
        return most - left

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.policy == "priority" else 0, request.arrival_number)

    def _turn(self, request: Request) -> tuple[bool, tuple[int, int]]:
        return (request.state is not State.DECODING, self._rank(request))

    def _reserve(self, request: Request) -> int:
        """Units that a request still needs for its tokens and some headroom."""
        return self.kv.needed(min(request.num_tokens + HEADROOM_TOKENS, request.max_total_tokens), request.slot)

    def _following(self, place: int, budget: int) -> int:
        """Units of the waiting requests that may start in one step with the one at this place, for which, and all of
        them, `budget` tokens are left.
        """
        units, budget = 0, budget - self.waiting[place].num_uncomputed_tokens
        for request in self.waiting[place + 1 : place + self.max_num_seqs - len(self.running)]:
            if budget <= 0:
                break
            budget -= request.num_uncomputed_tokens
            units += self._reserve(request)
        return units

    def _room(self) -> int:
        """Units that are available beyond what running requests still need."""
        return self.kv.available() - sum(self._reserve(request) for request in self.running)


class _Underway:
    """Prompts that are being computed or come from elsewhere, so that waiting requests can be compared with them.

    Args:
        running: running requests; `add` takes further ones.
        block_tokens: tokens per block of the prefix cache; None without one.
    """

    def __init__(self, running: Sequence[Request], block_tokens: int | None) -> None:
        self._block = block_tokens
        self._leaders: set[str] = set()
        self._by_head: dict[tuple[bytes, tuple[int, ...]], list[Request]] = {}
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        if request.state is not State.PREFILLING:
            return
        if not request.output_token_ids:
            self._leaders.add(request.parent_id)
        if request.publishes and (head := self._head(request)) is not None:
            self._by_head.setdefault(head, []).append(request)

    def expect(self, request: Request) -> None:
        """Note a waiting request whose prefix comes from elsewhere: other completions of its prompt will be forked."""
        if not request.output_token_ids:
            self._leaders.add(request.parent_id)

    def leads(self, request: Request) -> bool:
        """Whether a waiting request is another completion of a prompt that is underway, and will be forked."""
        return _may_be_fork(request) and request.parent_id in self._leaders

    def computes_prefix(self, request: Request) -> bool:
        """Whether a block of this prompt is being computed: it will soon be in the cache."""
        head = self._head(request)
        return head is not None and any(
            self._shares_next_block(other, request) for other in self._by_head.get(head, ())
        )

    def _head(self, request: Request) -> tuple[bytes, tuple[int, ...]] | None:
        """A key that prompts with a shared block worth waiting for have in common."""
        if self._block is None or len(request.prompt_token_ids) < HEAD_TOKENS:
            return None
        return request.cache_salt, tuple(request.prompt_token_ids[:HEAD_TOKENS])

    def _shares_next_block(self, other: Request, request: Request) -> bool:
        assert self._block is not None
        prompt, theirs = request.prompt_token_ids, other.prompt_token_ids
        start = other.num_computed_tokens // self._block * self._block
        end = max(HEAD_TOKENS, start + self._block)
        # What is computed is compared last: it is long, and of prompts with a beginning in common it is the same.
        return len(prompt) >= end and theirs[start:end] == prompt[start:end] and theirs[:start] == prompt[:start]


def _begin_alike(one: Request, other: Request) -> bool:
    """Whether the first block of one may be that of the other."""
    return one.cache_salt == other.cache_salt and one.token_ids(0, 1) == other.token_ids(0, 1)


def _may_fork(leader: Request, request: Request) -> bool:
    """Whether a waiting request is another completion, not yet started, of the prompt that `leader` computes."""
    return (
        leader.parent_id == request.parent_id
        and leader.state is State.PREFILLING
        and not leader.output_token_ids
        and _may_be_fork(request)
    )


def _may_be_fork(request: Request) -> bool:
    return not request.output_token_ids and request.saved is None


def _slot(request: Request) -> int:
    assert request.slot is not None, f"{request!r} is in a plan without a slot"
    return request.slot
