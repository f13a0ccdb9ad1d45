"""KVCache: the class that users of the library call.

It validates arguments, takes the pool's lock and returns snapshots. Decisions are left to its parts (`vattn.slots`):

    SlotTable   the state of each slot: length, start, known tokens
    Bands       the pages mapped under the slots, and the blocks that slots share
    Ledger      how many pages are held, by purpose
    Reclaimer   which pages are taken back, and in which order
    Backer      mapping now and ahead; copy-on-write
    Prefixes    which slot a request gets; finding and publishing prefixes
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set

import torch

from vattn import _native, drivers
from vattn.config import KVConfig, resolve
from vattn.errors import ConfigError, InvalidLength, InvalidSlot
from vattn.integers import as_int, shown
from vattn.layout import TensorView
from vattn.pool.calls import atomic, reading
from vattn.pool.core import Tenant
from vattn.pool.journal import Change, Plan
from vattn.pool.member import PoolMember
from vattn.pool.pool import PagePool
from vattn.prefix import Admission, Key, TokenIds, as_ids, root_key
from vattn.slots.backer import Backer, Due
from vattn.slots.exchange import Exchange
from vattn.slots.kept import Kept
from vattn.slots.parts import Parts
from vattn.slots.prefixes import Prefixes
from vattn.slots.reclaimer import Reclaimer
from vattn.stats import CacheStats, CallStats, Capacity, SlotPages
from vattn.units import format_bytes

Lengths = Mapping[int, int] | Sequence[int]
_log = logging.getLogger("vattn")


class KVCache(PoolMember):
    """K and V of up to `max_batch_size` requests, contiguous in virtual memory and backed by physical memory on demand.

    A cache may be used from several threads; calls are serialised per pool. A step implies that the kernels of all
    earlier steps have been launched, so on CUDA, or with sliding windows, threads that serve separate requests must
    treat `step` and the launch of its kernels as one unit, and take turns.

    Every call is atomic, even if it ends with an exception raised from outside, such as a KeyboardInterrupt. In a
    signal handler or a finaliser that runs inside another call on the same pool, only read-only calls and `free_reqid`
    are possible; the latter then takes effect at the next call. A cache is also a context manager, which closes it.

    Args:
        config: what the cache holds and how it behaves.
        pool: the physical pages to draw on, shared with other caches; by default the cache creates a pool of its own. A
            given pool determines the page size, and its budget bounds the cache as well.

    Raises:
        ConfigError: the configuration cannot fit; the message says what would.
        DriverError: the address space cannot be reserved.
    """

    def __init__(self, config: KVConfig, *, pool: PagePool | None = None) -> None:
        if not isinstance(config, KVConfig):
            raise ConfigError(f"KVCache takes a vattn.KVConfig, not {shown(config)}; vattn.init takes keywords")
        self._check_pool(pool, config.device)
        layout, budget = resolve(
            config, pool_page_size=pool.page_size if pool else None, pool_budget=pool.budget if pool else None
        )
        if pool is not None and config.zero_on_free and not pool.zero_on_free:
            raise ConfigError("zero_on_free=True needs a pool that was made with it: PagePool(..., zero_on_free=True)")
        if pool is not None and config.guard == "strict" and pool.guard != "strict":
            raise ConfigError("guard='strict' needs a pool that was made with it: PagePool(..., guard='strict')")

        def own_pool() -> PagePool:
            return PagePool(
                budget * layout.page_size,
                device=config.device,
                page_size=layout.page_size,
                guard=config.guard,
                zero_on_free=config.zero_on_free,
            )

        with self._joining(pool, own_pool) as core:
            self.config = config
            self.layout = layout
            parts = Parts.of(config, layout, budget, core)
            self._slots, self._bands, self._ledger, self._fences = parts.slots, parts.bands, parts.ledger, parts.fences
            self._reclaimer = Reclaimer(parts)
            self._backer = Backer(parts, self._reclaimer)
            self._prefixes = Prefixes(parts, self._backer, Exchange.of(parts, layout, self._reclaimer))
            self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # created on first use
            self._steps = 0
            self._step_ns = 0
            self._due: Due | None = None  # what the last step left to `look_ahead`
            self._freed: set[int] = set()  # slots to be freed by the next call
        if _log.isEnabledFor(logging.INFO):
            _log.info("cache on %s: %s", self._pool.device, self.capacity())

    # The interface

    @atomic
    def alloc_reqid(self, num_tokens: int | None = None, *, start: int = 0) -> int:
        """Allocates a slot for a request.

        The slot whose parked pages fit best is chosen: the fewest that back `num_tokens`, or else the most. A slot that
        holds cached token blocks is chosen only if there is no other.

        Args:
            num_tokens: how many tokens the request is known to need, for example the length of its prompt. This is a
                hint: no memory is mapped for it.
            start: the first token that will be computed; the caller copies in the tokens before it. Layers with a
                sliding window back only those of them that the window covers, and `commit` publishes what these layers
                compute from `start` on.

        Returns:
            The index of the slot, in `[0, max_batch_size)`.

        Raises:
            NoFreeSlot: `max_batch_size` requests are running.
            InvalidLength: a number is not an integer, below 0, or (for `start`) over `max_context_len`.
        """
        if num_tokens is not None:
            num_tokens = self._checked_length(num_tokens, "num_tokens", most=None)
        start = self._checked_length(start, "start")
        return self._give_slot(lambda change: self._prefixes.empty(change, num_tokens, start))

    @atomic
    def admit(self, token_ids: Sequence[int], salt: bytes = b"") -> Admission:
        """Allocates a slot that holds the longest cached prefix of a request's tokens, in whole token blocks.

        The idle slot that already holds most of the prefix is chosen, with what `free_reqid(token_ids=...)` left there
        after it, and the missing blocks are mapped there read-only, onto the same pages as in other slots. If no block
        is missing, no driver call is made. On CUDA, the kernels that wrote the prefix must be on the same stream as
        those that read it.

        Args:
            token_ids: all tokens of the request, at least one.
            salt: whatever else the K and V of these tokens depend on: the id of an adapter, the hash of an image, a
                tenant. Requests with different salts share nothing.

        Returns:
            The slot, whose length is `cached_tokens`, less than `len(token_ids)`: whole token blocks, and what was left
            there after them.

        Raises:
            NoFreeSlot: `max_batch_size` requests are running.
            InvalidTokens: ids that are not integers, or a salt that is not bytes.
            InvalidLength: no tokens, or more than `max_context_len`.
            DriverError: a driver call failed. Nothing changed.
        """
        ids = self._checked_prompt(token_ids, salt)
        self._prefixes.await_ahead()
        slot = self._give_slot(lambda change: self._prefixes.admit(change, ids, salt))
        admission, counted = Admission(slot, self._slots.length[slot]), False

        def uncount() -> None:
            nonlocal counted
            if counted:
                self._prefixes.count(-len(ids), -admission.cached_tokens)
                counted = False

        self._core.repair(uncount)
        self._prefixes.count(len(ids), admission.cached_tokens)
        counted = True
        return admission

    @reading
    def find_prefix(self, token_ids: Sequence[int], salt: bytes = b"", *, rows: bool = False) -> int:
        """How many tokens `admit` would find cached in whole token blocks: for an engine that has to choose a request,
        or a router that has to choose an engine. It changes nothing, not even the order of eviction. What only other
        processes have (`PagePool.connect(fingerprint=)`) is not counted.

        Args:
            token_ids, salt: as for `admit`.
            rows: count tokens after the last whole block, too, that a slot keeps of a request that ended
                (`free_reqid(token_ids=...)`). Only one request can have them.

        Raises:
            InvalidTokens, InvalidLength: as for `admit`.
        """
        ids = self._checked_prompt(token_ids, salt)
        keys = self._prefixes.find(ids, salt)
        behind = self._prefixes.most_kept(keys, ids, salt) if rows else 0
        return len(keys) * self.prefix_block_tokens + behind

    @atomic
    def commit(self, reqid: int, token_ids: Sequence[int]) -> None:
        """Makes a request's whole token blocks available to requests that start with the same tokens.

        Their K and V must have been computed; on CUDA, the kernels that compute them must have been launched. Committed
        tokens must not be overwritten unless `step` lowers the length first. A block that another request has already
        committed is not published twice.

        Args:
            token_ids: the request's tokens from the first one on, as far as they are computed. The call may be repeated
                as tokens are added; it does nothing if no further block is full.

        Raises:
            InvalidSlot: the slot is not allocated.
            InvalidTokens: ids that are not integers.
            TokenMismatch: more ids than the slot's length, fewer than were committed, or different ones. Nothing
                changed.
        """
        slot, ids = self._checked_slot(reqid), as_ids(token_ids)
        self._prefixes.publish(self._core.change(), slot, ids)

    @atomic
    def retract(self, reqid: int) -> None:
        """Takes back what a request has committed, because its K and V are wrong (for example, not finite).

        Blocks that it was the first to commit can no longer be found, nor can those that were computed on blocks that
        it committed, by whichever request; blocks that it was admitted with, or that another request had committed
        before, stay cached. Running requests that were admitted with a retracted block keep it. Neither they nor
        `reqid` publish what follows such a block, unless their length first goes back to before it.

        Raises:
            InvalidSlot: the slot is not allocated.
        """
        slot = self._checked_slot(reqid)
        self._retract(lambda change: self._prefixes.retract(change, slot))

    @atomic
    def retract_tokens(self, token_ids: Sequence[int], salt: bytes = b"", since: int = 0) -> None:
        """`retract` for what a request committed in slots that it no longer has.

        The blocks of these tokens can no longer be found, whichever request committed them, nor can those that were
        computed on them, or what was left behind them.

        Args:
            token_ids, salt: as for `admit`.
            since: how many of the tokens are right, whose blocks stay cached: the request had found them.

        Raises:
            InvalidTokens, InvalidLength: as for `admit`; or `since` is no number of tokens.
        """
        ids, since = self._checked_prompt(token_ids, salt), self._checked_length(since, "since")
        self._retract(lambda change: self._prefixes.retract_tokens(change, ids, salt, since))

    def _retract(self, plan: Plan) -> None:
        self._core.execute(plan)
        if not self._fences.capturing(self._fences.handle(None)):
            self._backer.maintain()

    @atomic
    def take_withdrawn(self) -> Set[Key]:
        """The keys (`vattn.prefix.block_keys` from `root_key(salt)`, of `prefix_block_tokens`) of blocks of other
        processes that these have found to be wrong while they were mapped here, and of what was computed on them, since
        the last call: for whoever keeps copies. This cache has taken them back by itself. Nothing is noted before the
        first call.

        Raises:
            DriverError: a driver call failed. Nothing changed.
        """
        exchange = self._prefixes.exchange
        if exchange is None:
            return frozenset()
        if exchange.behind:
            self._core.execute(exchange.heed)
        return exchange.take_withdrawn(self._core.change())

    @atomic
    def fork(self, reqid: int) -> int:
        """Allocates a slot for a second request with the tokens of a running one.

        Whole token blocks are shared, read-only in the new slot; the tokens after them are copied, with one copy per
        tensor. On CUDA, the kernels of the last step must have been launched, on torch's current stream, which also
        runs the copy.

        Returns:
            The new slot, whose length is that of `reqid`.

        Raises:
            InvalidSlot: the slot is not allocated.
            NoFreeSlot: `max_batch_size` requests are running.
            OutOfPages: the budget does not have enough pages for the copy. Nothing changed.
            StreamCapturing: the current stream is capturing a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        source = self._checked_slot(reqid)
        handle = self._fences.uncaptured(None, "fork was called")
        self._fences.launched()
        length = self._slots.length[source]
        first: list[int] = []  # per band, the first token to copy
        # Rows are copied at once, so the pages that the new slot already has must be in place.
        self._backer.await_idle_growth(self._slots.backed(length))

        def plan(change: Change) -> int:
            slot, first[:] = self._prefixes.fork(change, source, handle)
            return slot

        slot = self._give_slot(plan)
        self._bands.copy(source, slot, first, length)
        return slot

    @atomic
    def unshare(self, reqid: int) -> None:
        """Gives a request pages of its own in place of its token blocks, with the same contents, so that all of its
        tokens may be written; `step` does so for the tokens past a length that goes down.

        What it committed stays cached. The copy passes through temporary tensors as large as the request. On CUDA, the
        kernels of the last step must have been launched, on torch's current stream, which also runs the copy.

        Raises:
            InvalidSlot: the slot is not allocated.
            OutOfPages: the budget does not have enough pages. Nothing changed.
            StreamCapturing: the current stream is capturing a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        slot = self._checked_slot(reqid)
        if self._bands.stop(slot):
            handle = self._fences.uncaptured(None, "unshare was called")
            self._fences.launched()
            self._backer.unshare(slot, handle)

    @atomic
    def evict_prefixes(self) -> int:
        """Evicts every cached token block that no running request uses, and forgets what was left after blocks.

        On CUDA, the kernels of the last step must have been launched; the call waits for those that use these blocks.

        Returns:
            The number of pages that became free.

        Raises:
            StreamCapturing: the current stream is capturing a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        handle = self._fences.uncaptured(None, "evict_prefixes was called")
        self._fences.launched()
        before = self._core.taken_pages

        def plan(change: Change) -> None:
            for slot in list(self._slots.kept.rows):
                self._slots.kept.forget(change, slot)
            most = self._ledger.budget + 1
            self._reclaimer.evict(change, most, wait=True, running=True, handle=handle, everything=True)

        self._core.execute(plan)
        return before - self._core.taken_pages

    @atomic
    def stop_sharing(self) -> None:
        """Ends what `PagePool.connect(fingerprint=)` began, because what is computed may no longer be what the
        fingerprint says: other processes find no block of this one any more, and this one none of theirs. What they
        have mapped stays as it is until they give it up.
        """
        if self._prefixes.exchange is not None:
            self._core.execute(self._prefixes.exchange.stop)

    @atomic
    def step(
        self,
        lengths: Lengths,
        next_lengths: Mapping[int, int] | None = None,
        *,
        stream: drivers.Stream | None = None,
        look_ahead: bool = True,
    ) -> None:
        """Backs tokens `[0, n)` of every slot in `lengths`. To be called before the kernels of an iteration are
        launched, and after those of the previous iteration have been launched.

        Missing pages are mapped before the call returns. With `overlap`, pages that the next calls will need are queued
        for the worker: for the lengths in `next_lengths`, and in other slots for one more token, or up to eight (at
        most a quarter of a token block). Slots differ in this, so that not all of those that grow alike are mapped in
        the same step. Slots that are not in `lengths` keep their length and their pages.

        A length may decrease; the pages stay. If it decreases into shared token blocks, the request gets pages of its
        own for the tokens from there on, by a copy if necessary, when the length next increases (copy-on-write); so
        step down to the first committed token that is to be overwritten. In layers with a sliding window, a length may
        decrease to the first token that the last step computed, or to 0; whole token blocks before the window of that
        token are given back.

        Args:
            lengths: tokens per slot: a mapping from reqid, or a sequence of `max_batch_size` lengths, in which 0 leaves
                a slot out.
            next_lengths: lengths of the next call, for slots that grow by more than one token, such as by the next
                chunk of a prefill.
            stream: on CUDA, the stream on which the kernels are launched; by default torch's current one. The surplus
                of a running request is taken only after the kernels launched there so far have finished. It also runs
                the copies of copy-on-write.
            look_ahead: queue what the next calls will need before this one returns; if not, `look_ahead()` does. Where
                kernels run asynchronously, it is better called once they are launched: deciding takes up to some tenths
                of a millisecond, and the driver's calls hold up launches.

        Raises:
            OutOfPages: the budget cannot back the lengths; the error has the number of missing pages. Nothing changed:
                preempt a request and call again.
            InvalidSlot: a slot is not allocated.
            InvalidLength: a length is not an integer, below 0, over `max_context_len`, or so far back that its window
                was given back. Nothing changed.
            ConfigError: `stream` is no stream. Nothing changed.
            StreamCapturing: the stream is capturing a CUDA graph, and memory would have to be mapped. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        began = time.perf_counter_ns()
        if type(lengths) is not dict and not isinstance(lengths, Mapping):
            lengths = self._by_slot(lengths)
        if self._slots.pending:
            self._backer.note_growths()
        limit = self._slots.limit
        try:
            crossing = [slot for slot, length in lengths.items() if not 1 < length <= limit[slot]]
            # A sum is an int only if all its terms are ints or bools, and a bool is at most 1, so it is in `crossing`.
            if not type(sum(lengths.values())) is int is type(sum(lengths)):
                raise TypeError
            if crossing and not all(type(slot) is int and lengths[slot] > 1 for slot in crossing):
                raise TypeError
        except Exception:  # values of another type, or a length below 2
            lengths = self._checked_lengths(lengths)
            crossing = [slot for slot, length in lengths.items() if length > limit[slot]]
        announced = {} if next_lengths is None else self._checked_lengths(next_lengths)
        most = self.config.max_context_len
        for slot in crossing:
            if lengths[slot] > most:
                raise InvalidLength(
                    f"slot {slot}: a length of {lengths[slot]} tokens is over max_context_len={most}; stop the "
                    "request, or make the cache with a longer context"
                )
        self._due = self._backer.step(lengths, crossing, announced, stream)
        if look_ahead and self._due is not None:
            self._look_ahead()
        self._steps += 1
        self._step_ns += time.perf_counter_ns() - began

    @atomic
    def look_ahead(self, *, stream: drivers.Stream | None = None) -> None:
        """Queues for the worker what the last `step(..., look_ahead=False)` left out. No effect after other steps, and
        none while the stream is capturing a CUDA graph.

        Args:
            stream: as for `step`.

        Raises:
            ConfigError: `stream` is no stream.
        """
        began = time.perf_counter_ns()
        if self._slots.pending:
            self._backer.note_growths()
        if self._due is not None and not self._fences.capturing(self._fences.handle(stream)):
            self._look_ahead()
        self._step_ns += time.perf_counter_ns() - began

    def _look_ahead(self) -> None:
        due, self._due = self._due, None
        assert due is not None
        self._backer.look_ahead(due)
        self._prefixes.look_ahead()

    def free_reqid(
        self, reqid: int, stream: drivers.Stream | None = None, *, token_ids: Sequence[int] | None = None
    ) -> None:
        """Ends a request. Its pages stay mapped for the next request in the slot, or until they are needed elsewhere:
        token blocks that it committed are cached, its other pages parked.

        With `token_ids`, the request's tokens are committed first, and as long as its parked pages stay where they are,
        `admit` finds the tokens after the last whole block too, for one request that goes on with them in this slot.
        That is not so with a sliding window, with `zero_on_free`, or without `deferred_reclamation`.

        On CUDA, pages are unmapped only after all kernels launched before the next call of `step` have finished,
        because the kernels of the current step may not have been launched yet; the worker waits for them. If no step
        follows, `step({})` declares that all kernels have been launched. The next request in the slot gets its pages
        without a wait: if its kernels run on another stream, have that wait for this one.

        Args:
            stream: the stream of those kernels, as torch's stream or as a handle, which must stay valid until the next
                step; by default torch's current one.
            token_ids: as for `commit`. A call from inside another one, such as a finaliser's, commits nothing.

        Raises:
            InvalidSlot: the slot is not allocated.
            InvalidTokens, TokenMismatch: as for `commit`. Nothing changed.
            ConfigError: `stream` is no stream. Nothing changed.
            StreamCapturing: the stream is capturing a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        with self._core.lock:
            if self._core.is_inside():
                self._check_open()
                self._free_later(self._checked_slot(reqid), stream)
            else:
                self._free_now(reqid, stream, token_ids)

    @atomic
    def _free_now(self, reqid: int, stream: drivers.Stream | None, token_ids: Sequence[int] | None) -> None:
        slot, kept = self._checked_slot(reqid), None
        handle = self._fences.uncaptured(stream, "free_reqid was called")
        if token_ids is not None:
            ids = as_ids(token_ids)
            self._prefixes.publish(self._core.change(), slot, ids)
            kept = self._prefixes.kept(slot, ids)
        self._end(slot, handle, kept)

    def _free_later(self, slot: int, stream: drivers.Stream | None) -> None:
        """Defers the end of the slot's request to the next call, because this one comes from inside another."""
        if slot in self._freed:
            raise self._invalid_slot(slot)
        handle = self._fences.handle(stream)

        def free() -> None:
            # The call that this one came from may have been `close`.
            if not self._closed and slot in self._slots.length and slot in self._freed:
                self._end(slot, handle)
            self._freed.discard(slot)

        self._freed.add(slot)
        self._core.postpone(free)

    def _end(self, slot: int, handle: int | None, kept: Kept | None = None) -> None:
        change = self._core.change()
        self._fences.freed(slot, handle)
        self._slots.leave(change, slot, kept)
        self._backer.maintain()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer: views `[max_batch_size, max_context_len, num_kv_heads, head_dim]` in the layer's dtype.

        Strides depend on layout and kv_order; the last is 1. Only tokens that `step` has backed may be written; reads
        elsewhere see zeros, or fault (see `KVConfig.guard`). What a backed token holds before it is written is
        arbitrary: whatever its page held before, and on CUDA whatever new memory holds.

        Raises:
            IndexError: the cache does not have this layer.
            ForkedProcess: this is a child of the process that made the cache.
        """
        self._check_usable()
        index = self._checked_layer(index)
        if index not in self._views:
            self._views[index] = self.lend(index, None)
        return self._views[index]

    def lend(self, index: int, owner: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `layer`, but the tensors keep `owner` alive. An owner that references the cache thereby keeps its memory
        mapped as long as one of the tensors exists: a cache that is not closed gives its memory back when the last
        reference to it is dropped.
        """
        self._check_usable()
        index = self._checked_layer(index)
        spaces = self._bands.spaces

        def view(where: TensorView) -> torch.Tensor:
            base = spaces[where.kind].tensor(where.tensor, *self._core.driver.dlpack_device, owner=owner)
            shape = (self.layout.slots, self.config.max_context_len, where.heads, where.head_dim)
            return base.view(where.dtype).as_strided(shape, where.strides, where.offset)

        # A tensor created in inference mode could not be written outside it.
        with torch.inference_mode(False):
            k, v = self.layout.views[index]
            return view(k), view(v)

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices of the layers whose K and V the cache holds."""
        return tuple(self.layout.views)

    @property
    def total_pages(self) -> int:
        """The budget, in pages; of a pool that a broker lends, as far as its operator allows now."""
        return min(self._ledger.budget, self._core.most_pages)

    @property
    def prefix_block_tokens(self) -> int:
        """Tokens per block of the prefix cache: running requests share multiples of it."""
        return self._bands.block_tokens

    def capacity(self) -> Capacity:
        """What the budget can hold, in which layout and pages. A new cache logs it (logger `"vattn"`, level INFO)."""
        layout, guard, longest = self.layout, self.config.guard_rows, self.config.max_context_len
        budget = self._ledger.budget

        def alone(pages: int) -> int:
            return max(0, layout.most_tokens(pages, longest + guard) - guard)

        requests, rest = divmod(budget, layout.most_pages(longest + guard))
        return Capacity(
            budget_bytes=budget * layout.page_size,
            requests=min(layout.slots, budget // layout.pages(1 + guard)),
            tokens=layout.slots * longest if requests >= layout.slots else requests * longest + alone(rest),
            longest_context=alone(budget),
            layout=layout.name,
            page_size=layout.page_size,
            page_tokens=layout.page_tokens,
            usual_waste=layout.usual_waste,
        )

    def length(self, reqid: int) -> int:
        """The live tokens of a slot, as last given to `step`, or as `admit` and `fork` returned it.

        Raises:
            InvalidSlot: the slot is not allocated.
        """
        # A `VirtualCache` asks in every forward pass.
        readable = type(reqid) is int and not self._closed and self._core.settled
        length = self._slots.length.get(reqid) if readable else None
        return self._length(reqid) if length is None else length

    @reading
    def _length(self, reqid: int) -> int:
        return self._slots.length[self._checked_slot(reqid)]

    @reading
    def available_pages(self) -> int:
        """Pages that a step can still get: free pages, the parked and cached pages of all caches on the pool, and the
        surplus of running requests. Negative if running requests have yet to get pages of their own in place of shared
        ones.
        """
        self._core.refill()
        return min(self._most_owned, self._obtainable()) - self._ledger.needed

    @property
    def _most_owned(self) -> int:
        """The most pages of the budget that running requests can hold."""
        return self._ledger.budget - self._ledger.pinned

    def _obtainable(self) -> int:
        """Pages that running requests have or can get, of those that are there."""
        own = self._ledger.held - self._ledger.pinned
        return own + self._core.free_pages + self._core.spare_beside(self._reclaimer)

    @reading
    def borrow_pages(self, pages: int, following: int = 0) -> int:
        """Has up to so many pages more become available, of a pool that a broker lends: what other processes can do
        without, for which it waits a moment. None of a pool of its own.

        Args:
            following: pages that the next calls will ask for: other processes are asked for them now, and this call
                does not wait for them. No more than the budget can hold are asked for.

        Returns:
            How many did.

        Raises:
            InvalidLength: a number is not an integer, or below 0.
        """
        try:
            pages, following = as_int(pages), as_int(following)
        except TypeError as error:
            raise InvalidLength(f"pages and following: {error}; pages are counted in whole numbers") from None
        if pages < 0 or following < 0:
            raise InvalidLength(f"pages and following: {shown(min(pages, following))} is below 0")
        most = self._most_owned - self._obtainable()
        pages = min(pages, most)
        return self._core.borrow(pages, needed=False, following=min(following, most - pages)) if pages > 0 else 0

    def pages_needed(self, num_tokens: int, reqid: int | None = None, chunk_tokens: int | None = None) -> int:
        """Pages that `num_tokens` tokens need: in total, or beyond those for the current length of slot `reqid`. The
        result may be a few pages too high.

        A step succeeds if the sum over its slots is at most `available_pages()`.

        Args:
            num_tokens: the length to reach.
            reqid: the slot to grow; None for a request without a slot.
            chunk_tokens: the most tokens by which one step grows a slot; layers with a sliding window need fewer pages
                if the growth takes several steps. None: it takes one.

        Raises:
            InvalidSlot: `reqid` is not allocated.
            InvalidLength: a number is not an integer, or no slot can have that length.
        """
        # An engine asks about every request in every step, and mostly about one that just grows.
        if (
            type(num_tokens) is int
            and (reqid is None or type(reqid) is int)
            and (chunk_tokens is None or (type(chunk_tokens) is int and chunk_tokens >= 0))
            and not self._closed
            and self._core.settled
            and (pages := self._growth(reqid, num_tokens)) is not None
        ):
            return pages
        return self._pages_needed(num_tokens, reqid, chunk_tokens)

    @reading
    def _pages_needed(self, num_tokens: int, reqid: int | None, chunk_tokens: int | None) -> int:
        num_tokens = self._checked_length(num_tokens, "num_tokens")
        chunk = num_tokens if chunk_tokens is None else self._checked_length(chunk_tokens, "chunk_tokens", most=None)
        slots = self._slots
        most = self.layout.most_pages(slots.backed(num_tokens), slots.backed(chunk or num_tokens))
        if reqid is None:
            return most
        slot = self._checked_slot(reqid)
        length = slots.length[slot]
        has = self.layout.pages(slots.needed_tokens(slot), length)
        if num_tokens <= length:
            # A window that moves back needs the pages before it; those past it are unmapped only by the next step.
            return self.layout.pages(slots.needed_tokens(slot), num_tokens) - has
        replaced = self._bands.replaced_pages(slot, length // self._bands.block_tokens)
        return max(0, min(self.layout.pages(slots.backed(num_tokens), length), most) - has) + replaced

    @reading
    def stats(self) -> CacheStats:
        """A snapshot of page counts, bytes, calls and times."""
        counts, stocked = self._core.native.counts(), self._core.mapper.stocked
        slots, ledger, bands = self._slots, self._ledger, self._bands
        requests = [(slot, length, slots.start.get(slot, 0)) for slot, length in slots.length.items()]
        owned, live_bytes = ledger.owned, bands.live_bytes(requests)
        # With windows, what the last step's queries saw is live, and the next ones need less.
        needed = max(ledger.needed, -(-live_bytes // self.layout.page_size))
        return CacheStats(
            page_size=self.layout.page_size,
            budget_pages=ledger.budget,
            owned_pages=owned,
            surplus_pages=max(0, owned - needed),
            parked_pages=ledger.parked,
            cached_pages=ledger.cached,
            shared_pages=bands.shared_pages,
            other_pages=ledger.budget - ledger.held - max(0, ledger.free),
            free_pages=max(0, ledger.free),
            created_pages=min(counts.budget, counts.budget - counts.absent + stocked),
            stocked_pages=stocked,
            peak_mapped_pages=ledger.peak,
            reserved_bytes=self.layout.reserved_bytes,
            live_tokens=sum(slots.length.values()),
            live_bytes=live_bytes,
            query_tokens=self._prefixes.query_tokens,
            hit_tokens=self._prefixes.hit_tokens,
            kernel_mappings=_native.host_usage().kernel_mappings,
            steps=self._steps,
            step_seconds=self._step_ns * 1e-9,
            waits=self._backer.waits,
            wait_seconds=self._backer.wait_ns * 1e-9,
            failures=self._core.worker.failures,
            shared_read_only=self._core.driver.native.read_only,
            calls={
                name: CallStats(count, seconds)
                for name, (count, seconds) in self._core.driver.native.call_stats().items()
            },
        )

    @reading
    def page_map(self) -> list[SlotPages]:
        """A snapshot of every slot, in tokens and pages."""
        return [
            SlotPages(
                reqid=slot,
                active=slot in self._slots.length,
                length=self._slots.length.get(slot, 0),
                mapped=self._bands.extent(slot),
                pages=self._bands.pages(slot),
                shared=self._bands.shared_tokens(slot),
            )
            for slot in range(self.layout.slots)
        ]

    @atomic
    def trim(self) -> int:
        """Gives memory back to the machine: unmaps parked pages, releases free ones and the stock. Cached pages stay;
        `evict_prefixes` frees them.

        On CUDA, the kernels of the last step must have been launched; the call waits for those that use pages of
        finished requests.

        Returns:
            Bytes of physical memory given back.

        Raises:
            StreamCapturing: the current stream is capturing a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        self._fences.uncaptured(None, "trim was called")
        self._fences.launched()
        self._core.execute(lambda change: self._reclaimer.unpark(change, self._ledger.budget, wait=True, kept=True))
        self._core.commit()
        return self._core.release_free()

    def check(self) -> None:
        """Asserts that every page is exactly where the books say. Waits for the worker.

        Raises:
            AssertionError: an invariant is violated; the message names it.
        """
        with self._checking():
            self._bands.check(self._core.native)
            self._slots.check()
            self._ledger.check(alone=self._owns_pool)

    @property
    def _tenant(self) -> Tenant:
        return self._reclaimer

    def _give_back(self) -> Plan:
        return self._bands.give_back()

    def _forget(self) -> None:
        self._views = {}
        self._prefixes.clear()
        self._slots.clear()
        self._bands.clear()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._slots.length)} of {self.layout.slots} slots active"
        budget = format_bytes(self._ledger.budget * self.layout.page_size)
        return (
            f"KVCache({state}; {self.layout.name}/{self.layout.kv_order}, {self.layout.page_tokens} tokens per page "
            f"of {format_bytes(self.layout.page_size)}, budget {budget}, "
            f"{format_bytes(self.layout.reserved_bytes)} reserved)"
        )

    def _give_slot(self, plan: Callable[[Change], int]) -> int:
        """Executes a plan that takes and returns a slot; the slot becomes idle again if the call fails later."""
        self._backer.await_vacated()
        taken: list[int] = []

        def decide(change: Change) -> None:
            slot = plan(change)
            taken[:] = [slot]
            self._core.repair(lambda: self._slots.give_up(self._core.change(), slot))

        executed = self._core.execute_reclaiming(decide)
        (slot,) = taken
        if executed:
            self._backer.note_growth(slot)
            self._slots.set_limit(slot)
        self._backer.prepare_idle_slot()
        return slot

    def _growth(self, slot: int | None, length: int) -> int | None:
        """Pages by which a slot, or a request without one, grows to `length`; None if it may have to give up blocks or
        windows for that, or does not grow.
        """
        slots, bands, pages = self._slots, self._bands, self.layout.pages
        before, used = (0, 0) if slot is None else (slots.length.get(slot, -1), bands.used_tokens.get(slot, 0))
        if not 0 <= before <= length <= self.config.max_context_len:
            return None
        if bands.windowed or used > before - before % bands.block_tokens:
            return None
        return pages(slots.backed(length)) - pages(slots.backed(before))

    def _by_slot(self, lengths: Sequence[int]) -> dict[int, int]:
        try:
            if isinstance(lengths, str | bytes | Set):
                raise TypeError(f"{type(lengths).__name__} is no sequence of lengths")
            values = list(lengths.tolist() if hasattr(lengths, "tolist") else lengths)
        except Exception as error:  # iterating over a caller's object may raise anything
            raise InvalidLength(f"lengths must be a mapping from reqid, or a sequence of lengths: {error}") from error
        if len(values) != self.layout.slots:
            raise InvalidLength(
                f"{len(values)} lengths for {self.layout.slots} slots; give one per slot (0: not named), or a mapping"
            )
        if not {int}.issuperset(map(type, values)):
            values = [self._checked_length(value, f"the length of slot {slot}") for slot, value in enumerate(values)]
        return {slot: length for slot, length in enumerate(values) if length}

    def _checked_prompt(self, token_ids: Sequence[int], salt: bytes) -> TokenIds:
        ids = as_ids(token_ids)
        if type(salt) is not bytes:
            root_key(salt)  # raises InvalidTokens
        if not 1 <= len(ids) <= self.config.max_context_len:
            raise InvalidLength(
                f"{len(ids)} tokens; a request has from 1 to max_context_len={self.config.max_context_len}"
            )
        return ids

    def _checked_length(self, value: object, name: str, most: int | None = -1) -> int:
        """Validates a number of tokens from 0 to `most` (None: no limit; default: `max_context_len`); an `int`."""
        most = self.config.max_context_len if most == -1 else most
        try:
            length = as_int(value)
        except TypeError as error:
            raise InvalidLength(f"{name}: {error}; tokens are counted in whole numbers") from None
        if length < 0 or (most is not None and length > most):
            limit = "at least 0" if most is None else f"from 0 to max_context_len={most}"
            raise InvalidLength(f"{name} is {shown(value)}, but must be {limit} tokens")
        return length

    def _checked_lengths(self, lengths: Mapping[int, int]) -> dict[int, int]:
        """Validates lengths of allocated slots; a dict of `int`."""
        if not isinstance(lengths, Mapping):
            raise InvalidLength(f"lengths must be a mapping from reqid, not {type(lengths).__name__}")
        return {
            (slot := self._checked_slot(reqid)): self._checked_length(length, f"the length of slot {slot}")
            for reqid, length in lengths.items()
        }

    def _checked_layer(self, index: object) -> int:
        """Validates the index of a layer; an `int`."""
        with contextlib.suppress(TypeError):
            if (layer := as_int(index)) in self.layout.views:
                return layer
        raise IndexError(f"layer {shown(index)} is not one of the cache's: {', '.join(map(str, self.layers))}")

    def _checked_slot(self, reqid: object) -> int:
        """Validates that a slot is allocated; an `int`."""
        try:
            slot = as_int(reqid)
        except TypeError as error:
            raise InvalidSlot(f"reqid: {error}; alloc_reqid gives out slots") from None
        if slot not in self._slots.length:
            raise self._invalid_slot(slot)
        return slot

    def _invalid_slot(self, slot: int) -> InvalidSlot:
        if 0 <= slot < self.layout.slots:
            return InvalidSlot(f"slot {slot} is not allocated; alloc_reqid gives out slots, free_reqid takes them back")
        return InvalidSlot(f"slot {shown(slot)} is not in [0, {self.layout.slots})")
