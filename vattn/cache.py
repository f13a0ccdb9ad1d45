"""KVCache: what users of the library call.

It checks what it is given, takes the pool's lock, and says what there is; its parts decide (`vattn.memory`):

    SlotTable   what is decided about each slot: lengths, starts, known tokens
    Bands       what is mapped under the slots: pages, and blocks that several share
    Ledger      how many pages are held, by what they are for
    Reclaimer   which pages are taken back, in which order
    Backer      what is mapped, now and ahead; copy-on-write
    Prefixes    which slot a request gets; what is found and published
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from types import TracebackType
from typing import Self

import torch

from vattn import _native, drivers
from vattn.config import KVConfig, resolve
from vattn.errors import (
    CacheClosed,
    ConfigError,
    InvalidLength,
    InvalidSlot,
)
from vattn.integers import as_int, shown
from vattn.layout import TensorView
from vattn.memory.backer import Backer
from vattn.memory.bands import Bands
from vattn.memory.fences import Fences
from vattn.memory.journal import Change
from vattn.memory.ledger import Ledger
from vattn.memory.pool import PagePool, Plan, atomic, reading
from vattn.memory.prefixes import Prefixes
from vattn.memory.reclaimer import Reclaimer
from vattn.memory.slots import SlotTable
from vattn.prefix import Admission, as_ids, root_key
from vattn.stats import CacheStats, CallStats, Capacity, SlotPages
from vattn.units import format_bytes

Lengths = Mapping[int, int] | Sequence[int]
_log = logging.getLogger("vattn")


class KVCache:
    """K and V of up to `max_batch_size` requests, contiguous in virtual memory, on demand in physical memory.

    Usable from several threads; calls are serialised per pool. A step says that the kernels of all steps before it are
    launched, so threads with requests of their own take turns with step and kernels together where the cache has
    sliding windows, or is on CUDA.

    A call happens wholly or not at all, also where it ends with an exception from outside, a KeyboardInterrupt say.
    From a signal handler or a finaliser that runs inside another call on the same pool only `free_reqid`, which then
    takes effect with the next call, and calls that just look are possible. Also a context manager, which closes it.

    Args:
        config: what it holds and how it behaves.
        pool: physical pages to draw on, shared with other caches; by default a pool of its own. A pool decides the page
            size, and its budget bounds the cache as well.

    Raises:
        ConfigError: if the configuration cannot fit, saying what would.
        DriverError: if the address space cannot be reserved.
    """

    def __init__(self, config: KVConfig, *, pool: PagePool | None = None) -> None:
        if not isinstance(config, KVConfig) or not isinstance(pool, PagePool | None):
            raise ConfigError(
                f"KVCache(config, pool=...) takes a vattn.KVConfig and a vattn.PagePool, not {shown(config)} and "
                f"{shown(pool)}; vattn.init takes keywords"
            )
        layout, budget = resolve(
            config,
            pool_page_size=pool.page_size if pool else None,
            pool_budget=pool.total_pages * pool.page_size if pool else None,
        )
        if pool is not None and pool.driver.device is not drivers.find(config.device):
            raise ConfigError(
                f"the pool is on {pool.driver.device.torch_device}, the cache on {config.device}; they must agree"
            )
        if pool is not None and config.zero_on_free and not pool.native.zero_on_free:
            raise ConfigError("zero_on_free=True needs a pool that was made with it: PagePool(..., zero_on_free=True)")
        self._owns_pool = pool is None
        pool = pool or PagePool(
            budget * layout.page_size,
            device=config.device,
            page_size=layout.page_size,
            guard=config.guard,
            zero_on_free=config.zero_on_free,
        )
        with pool.lock:
            pool.enter()
            self.config = config
            self.layout = layout
            self._pool = pool
            self._fences = Fences(pool.driver)
            self._bands = Bands(layout, pool)
            self._slots = SlotTable(config, layout.slots, self._bands)
            self._ledger = Ledger(min(budget, pool.total_pages), layout, self._slots, self._bands, pool)
            self._reclaimer = Reclaimer(config, self._slots, self._bands, self._ledger, self._fences, pool)
            self._backer = Backer(
                config, layout, self._slots, self._bands, self._ledger, self._reclaimer, self._fences, pool
            )
            self._prefixes = Prefixes(config, self._slots, self._bands, self._ledger, self._backer, self._fences)
            self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # as they were asked for
            self._steps = 0
            self._step_ns = 0
            self._closed = False
            self._freed: set[int] = set()  # slots that the next call frees
            self._finalizer = weakref.finalize(self, _collected, pool, self._bands.give_back(), self._owns_pool)
            self._finalizer.atexit = False  # daemon threads may still use the memory; the system takes it back
            pool.join(self._reclaimer)
        if _log.isEnabledFor(logging.INFO):
            _log.info("cache on %s: %s", pool.driver.device.torch_device, self.capacity())

    # The interface

    @atomic
    def alloc_reqid(self, num_tokens: int | None = None, *, start: int = 0) -> int:
        """Gives a request a slot.

        The slot whose parked pages fit best, the fewest that back `num_tokens`, else the most; one that holds cached
        token blocks only where there is no other.

        Args:
            num_tokens: tokens that the request is known to need, its prompt say; a hint, nothing is mapped for it.
            start: the token with which its computation goes on: those before it are going to be copied in, and layers
                with a sliding window back no others than the window shows. Of those layers `commit` publishes what is
                computed from there on.

        Returns:
            The slot's index in `[0, max_batch_size)`.

        Raises:
            NoFreeSlot: if `max_batch_size` requests are running.
            InvalidLength: a number that is no whole one, below 0 or over `max_context_len`.
        """
        if num_tokens is not None:
            num_tokens = self._checked_length(num_tokens, "num_tokens", most=None)
        start = self._checked_length(start, "start")
        return self._give_slot(lambda change: self._prefixes.empty(change, num_tokens, start))

    @atomic
    def admit(self, token_ids: Sequence[int], salt: bytes = b"") -> Admission:
        """Gives a request a slot that holds the longest cached prefix of its tokens, in whole token blocks.

        The free slot that already holds the most of it is taken, and what is missing is mapped there read-only: the
        same pages that other slots have. Where nothing is missing there is no driver call. On CUDA the kernels that
        wrote the prefix have to be on the same stream as those that read it.

        Args:
            token_ids: all tokens that are to be computed, at least one.
            salt: whatever else the K and V of these tokens depend on: an adapter's id, an image's hash, a tenant.
                Requests with different salts share nothing.

        Returns:
            The slot, whose length is `cached_tokens`: whole token blocks, and fewer than `token_ids`.

        Raises:
            NoFreeSlot: if `max_batch_size` requests are running.
            InvalidTokens: ids that are no whole numbers, or a salt that is not bytes.
            InvalidLength: no token, or more than `max_context_len`.
            DriverError: a driver call failed. Nothing changed.
        """
        ids = as_ids(token_ids)
        if type(salt) is not bytes:
            root_key(salt)  # refuses it
        if not 1 <= len(ids) <= self.config.max_context_len:
            raise InvalidLength(
                f"{len(ids)} tokens; a request has from 1 to max_context_len={self.config.max_context_len}"
            )

        slot = self._give_slot(lambda change: self._prefixes.admit(change, ids, salt))
        admission, counted = Admission(slot, self._slots.length[slot]), False

        def uncount() -> None:
            nonlocal counted
            if counted:
                self._prefixes.count(-len(ids), -admission.cached_tokens)
                counted = False

        self._pool.repair(uncount)
        self._prefixes.count(len(ids), admission.cached_tokens)
        counted = True
        return admission

    @atomic
    def commit(self, reqid: int, token_ids: Sequence[int]) -> None:
        """Makes a request's whole token blocks available to requests that start with the same tokens.

        Their K and V must have been computed; on CUDA, the kernels that do it must have been launched. From then on
        those tokens must not be written any more: `step` to a lower length first. A block that another request has
        committed before is not published twice.

        Args:
            token_ids: the request's tokens, from the first one on, as far as they are computed: it may be called again
                as they become more, and does nothing where no block became full.

        Raises:
            InvalidSlot: if the slot is not allocated.
            InvalidTokens: ids that are no whole numbers.
            TokenMismatch: more than the slot's length, fewer than were committed, or others. Nothing changed.
        """
        slot, ids = self._checked_slot(reqid), as_ids(token_ids)
        self._prefixes.publish(self._pool.change(), slot, ids)

    @atomic
    def retract(self, reqid: int) -> None:
        """Takes back what a request has committed, because its K and V are wrong: not finite, say.

        Blocks that it was the first to commit are found by no request any more; those that it was admitted with, or
        that another request had committed before, stay. Running requests that were admitted with them keep them.

        Raises:
            InvalidSlot: if the slot is not allocated.
        """
        slot = self._checked_slot(reqid)
        self._pool.execute(lambda change: self._prefixes.retract(change, slot))

    @atomic
    def fork(self, reqid: int) -> int:
        """Gives a second request a slot with the tokens of a running one.

        Whole token blocks are shared, read-only in the new slot; what is behind them is copied, in one copy per tensor.
        On CUDA the kernels of the last step must have been launched; the copy goes to torch's current stream, which has
        to be theirs.

        Returns:
            The new slot, whose length is that of `reqid`.

        Raises:
            InvalidSlot: if the slot is not allocated.
            NoFreeSlot: if `max_batch_size` requests are running.
            OutOfPages: the budget does not have the pages for the copy. Nothing changed.
            StreamCapturing: the current stream captures a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        source = self._checked_slot(reqid)
        handle = self._fences.uncaptured(None, "fork was called")
        self._fences.launched()
        length = self._slots.length[source]
        first: list[int] = []  # per band, the first token that is copied
        # Rows are copied at once to what the new slot has already.
        self._backer.await_idle_growth(self._slots.backed(length))

        def plan(change: Change) -> int:
            slot, first[:] = self._prefixes.fork(change, source, handle)
            return slot

        slot = self._give_slot(plan)
        self._bands.copy(source, slot, first, length)
        return slot

    @atomic
    def evict_prefixes(self) -> int:
        """Forgets every cached token block that no running request uses.

        On CUDA the kernels of the last step must have been launched; it waits for those that use these blocks.

        Returns:
            Pages that became free.

        Raises:
            StreamCapturing: the current stream captures a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        handle = self._fences.uncaptured(None, "evict_prefixes was called")
        self._fences.launched()
        before = self._pool.free_pages
        self._pool.execute(
            lambda c: self._reclaimer.evict(c, self._ledger.budget + 1, wait=True, running=True, handle=handle)
        )
        return self._pool.free_pages - before

    @atomic
    def step(
        self, lengths: Lengths, next_lengths: Mapping[int, int] | None = None, *, stream: drivers.Stream | None = None
    ) -> None:
        """Backs tokens `[0, n)` of every slot named; to be called before the kernels of an iteration are launched, and
        after those of the iteration before.

        What is not backed yet is mapped before this returns. With `overlap`, what the next call will need is queued for
        the worker: one token more in every slot, or what `next_lengths` announces. Slots that are not named keep what
        they have.

        A length may go down; pages stay. Where it goes down into shared token blocks, the tokens from there on become
        the request's own again, by a copy if need be, when the length next rises (copy-on-write): so before committed
        tokens are written anew, step down to the first of them. In layers with a sliding window it may go down to what
        the last step started from, or to 0; whole token blocks before that token's window are given back.

        Args:
            lengths: tokens per slot: a mapping from reqid, or a sequence of `max_batch_size` lengths, 0 = not named.
            next_lengths: lengths of the next call where they are more than one token longer, a prefill's next chunk
                say.
            stream: on CUDA, the stream that the kernels are launched on; by default torch's current one. Pages that a
                running request has beyond its length are taken from it only after the kernels launched there so far.

        Raises:
            OutOfPages: the budget cannot cover it, with the pages that are missing. Nothing changed: preempt a request
                and call again.
            InvalidSlot: a slot that is not allocated.
            InvalidLength: a length that is no whole number, below 0 or over `max_context_len`, or so far back that its
                window was given back. Nothing changed.
            StreamCapturing: the stream captures a CUDA graph, and memory would have to be mapped. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        began = time.perf_counter_ns()
        if type(lengths) is not dict and not isinstance(lengths, Mapping):
            lengths = self._by_slot(lengths)
        limit = self._slots.limit
        try:
            crossing = [slot for slot, length in lengths.items() if not 1 < length <= limit[slot]]
            # A sum is an int where all are, and a bool, which counts as one, is at most 1 as a length.
            if not type(sum(lengths.values())) is int is type(sum(lengths)):
                raise TypeError
            if crossing and not all(type(slot) is int and lengths[slot] > 1 for slot in crossing):
                raise TypeError
        except Exception:  # something else is among them, or a length below 2
            lengths = self._checked_lengths(lengths)
            crossing = [slot for slot, length in lengths.items() if length > limit[slot]]
        announced = self._checked_lengths(next_lengths) if next_lengths else {}
        most = self.config.max_context_len
        for slot in crossing:
            if lengths[slot] > most:
                raise InvalidLength(
                    f"slot {slot}: a length of {lengths[slot]} tokens is over max_context_len={most}; stop the "
                    "request, or make the cache with a longer context"
                )
        self._backer.step(lengths, crossing, announced, stream)
        self._steps += 1
        self._step_ns += time.perf_counter_ns() - began

    def free_reqid(self, reqid: int, stream: drivers.Stream | None = None) -> None:
        """Ends a request. Its pages stay mapped for the slot's next request, or until needed elsewhere: token blocks
        that it committed are cached, the others parked.

        On CUDA they leave the slot only when all kernels have ended that were launched before the next call of `step`,
        as those of a step that is prepared may not be launched yet; the worker waits for them. Where no step follows,
        `step({})` says that everything is launched.

        Args:
            stream: the stream of those kernels: torch's, or its handle, which has to live until the next step; by
                default torch's current one.

        Raises:
            InvalidSlot: if the slot is not allocated.
            StreamCapturing: the stream captures a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        with self._pool.lock:
            if self._pool.is_inside():
                self._free_later(self._checked_slot(reqid), stream)
            else:
                self._free_now(reqid, stream)

    @atomic
    def _free_now(self, reqid: int, stream: drivers.Stream | None) -> None:
        self._end(self._checked_slot(reqid), self._fences.uncaptured(stream, "free_reqid was called"))

    def _free_later(self, slot: int, stream: drivers.Stream | None) -> None:
        """Ends the slot's request with the next call, as this one comes from inside another."""
        if slot in self._freed:
            raise self._invalid_slot(slot)
        handle = self._fences.handle(stream)

        def free() -> None:
            if slot in self._slots.length and slot in self._freed:
                self._end(slot, handle)
            self._freed.discard(slot)

        self._freed.add(slot)
        self._pool.postpone(free)

    def _end(self, slot: int, handle: int | None) -> None:
        change = self._pool.change()
        self._fences.freed(slot, handle)
        self._slots.leave(change, slot)
        stays = self.config.deferred_reclamation and not self.config.zero_on_free
        if not stays or not self._bands.begins(slot):
            self._slots.leaving[slot] = None
        self._backer.maintain()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer: views `[max_batch_size, max_context_len, num_kv_heads, head_dim]` in the layer's dtype.

        Strides depend on layout and kv_order; the last is 1. Only what `step` backed may be written; other reads see
        zeros (or fault, see `KVConfig.guard`).

        Raises:
            IndexError: for a layer that the cache does not have.
        """
        self._check_open()
        index = self._checked_layer(index)
        if index not in self._views:
            self._views[index] = self.lend(index, None)
        return self._views[index]

    def lend(self, index: int, owner: object) -> tuple[torch.Tensor, torch.Tensor]:
        """`layer`, as tensors that keep `owner` alive. An owner that refers to the cache keeps its memory mapped as
        long as somebody has one of them: a cache that is not closed gives it back when nobody refers to it any more.
        """
        self._check_open()
        index = self._checked_layer(index)
        spaces = self._bands.spaces

        def view(where: TensorView) -> torch.Tensor:
            base = spaces[where.kind].tensor(where.tensor, *self._pool.driver.dlpack_device, owner=owner)
            shape = (self.layout.slots, self.config.max_context_len, where.heads, where.head_dim)
            return base.view(where.dtype).as_strided(shape, where.strides, where.offset)

        # Outside inference mode: a tensor made inside it could not be written outside it.
        with torch.inference_mode(False):
            k, v = self.layout.views[index]
            return view(k), view(v)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that the cache has K and V of."""
        return tuple(self.layout.views)

    @property
    def total_pages(self) -> int:
        """The budget, in pages."""
        return self._ledger.budget

    @property
    def prefix_block_tokens(self) -> int:
        """Tokens of a block of the prefix cache: what requests share is a multiple of it."""
        return self._bands.block_tokens

    def capacity(self) -> Capacity:
        """What fits the budget. A new cache logs it (logger `"vattn"`, INFO)."""
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
        )

    @reading
    def available_pages(self) -> int:
        """Pages that a step may still take: free ones, those that no request uses (parked, or cached token blocks) of
        all caches on the pool, and what running requests have beyond their lengths. Below 0 where requests have yet to
        get pages of their own in place of shared ones.
        """
        takeable = self._pool.spare_pages + self._reclaimer.stuck_pages()
        held = self._pool.free_pages + takeable + self._ledger.owned
        return min(self._ledger.budget, held) - self._ledger.needed

    @reading
    def pages_needed(self, num_tokens: int, reqid: int | None = None, chunk_tokens: int | None = None) -> int:
        """Pages for `num_tokens` tokens: in all, or beyond those for the length of slot `reqid`, or a few more.

        A step to these lengths succeeds if the sum over its slots is at most `available_pages()`.

        Args:
            chunk_tokens: the most tokens by which one step grows a slot. Layers with a sliding window then need less
                for what takes several steps; None: all comes in one.

        Raises:
            InvalidSlot: if `reqid` is not allocated.
            InvalidLength: a number that is no whole one, or that no slot can have.
        """
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
            # A window that moves back needs what lies before it; what lies behind leaves with the next step only.
            return self.layout.pages(slots.needed_tokens(slot), num_tokens) - has
        replaced = self._bands.replaced_pages(slot, length // self._bands.block_tokens)
        return max(0, min(self.layout.pages(slots.backed(num_tokens), length), most) - has) + replaced

    @reading
    def stats(self) -> CacheStats:
        """A snapshot of pages, bytes, calls and times."""
        counts = self._pool.native.counts()
        slots, ledger, bands = self._slots, self._ledger, self._bands
        requests = [(slot, length, slots.start.get(slot, 0)) for slot, length in slots.length.items()]
        return CacheStats(
            page_size=self.layout.page_size,
            budget_pages=ledger.budget,
            owned_pages=ledger.owned,
            parked_pages=ledger.parked,
            cached_pages=ledger.cached,
            shared_pages=bands.shared_pages,
            other_pages=ledger.budget - ledger.held - ledger.free,
            free_pages=ledger.free,
            created_pages=counts.budget - counts.absent,
            peak_mapped_pages=ledger.peak,
            reserved_bytes=self.layout.reserved_bytes,
            live_tokens=sum(slots.length.values()),
            live_bytes=bands.live_bytes(requests),
            query_tokens=self._prefixes.query_tokens,
            hit_tokens=self._prefixes.hit_tokens,
            kernel_mappings=_native.host_usage().kernel_mappings,
            steps=self._steps,
            step_seconds=self._step_ns * 1e-9,
            waits=self._backer.waits,
            wait_seconds=self._backer.wait_ns * 1e-9,
            failures=self._pool.failures,
            calls={
                name: CallStats(count, seconds)
                for name, (count, seconds) in self._pool.driver.native.call_stats().items()
            },
        )

    @reading
    def page_map(self) -> list[SlotPages]:
        """What every slot holds, in tokens and pages."""
        return [
            SlotPages(
                reqid=slot,
                active=slot in self._slots.length,
                length=self._slots.length.get(slot, 0),
                mapped=self._bands.extent(slot),
                pages=self._bands.pages(slot),
            )
            for slot in range(self.layout.slots)
        ]

    @atomic
    def trim(self) -> int:
        """Gives back to the machine what no request holds: unmaps parked pages and releases free ones. What the prefix
        cache holds stays; `evict_prefixes` frees it.

        On CUDA the kernels of the last step must have been launched; it waits for those that use finished requests.

        Returns:
            Bytes of physical memory given back.

        Raises:
            StreamCapturing: the current stream captures a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        self._fences.uncaptured(None, "trim was called")
        self._fences.launched()
        self._pool.execute(lambda change: self._reclaimer.unpark(change, self._ledger.budget, wait=True))
        self._pool.commit()
        counts = self._pool.native.counts()

        def plan(change: Change) -> None:
            self._pool.native.release_free(change.transaction, counts.free)

        self._pool.execute(plan)
        return counts.free * self.layout.page_size

    def check(self) -> None:
        """Asserts that every page is where the books say, and nowhere else. Waits for the worker.

        Raises:
            AssertionError: naming what does not hold.
        """
        with self._pool.lock:
            self._enter()
            self._pool.drain()
            try:
                self._pool.native.check()
                self._bands.check(self._pool.native)
            except RuntimeError as error:
                raise AssertionError(str(error)) from error
            self._slots.check()
            self._ledger.check(alone=self._owns_pool)

    def close(self) -> None:
        """Unmaps everything and gives the memory back. Idempotent; afterwards every call raises CacheClosed.

        The tensors must not be touched any more; their address space goes when the last of them does.
        """
        with self._pool.lock:
            if not self._finalizer.alive:
                return
            if not self._closed:
                self._leave_pool()
            self._views = {}
            self._slots.clear()
            self._bands.clear()
            if self._owns_pool:
                self._pool.shut()
            self._finalizer.detach()

    def _leave_pool(self) -> None:
        give_back = self._bands.give_back()

        def plan(change: Change) -> None:
            change.on_revert(lambda: setattr(self, "_closed", False))
            self._closed = True
            give_back(change)

        if self._pool.mapper.broken:
            self._pool.leave_broken(self._reclaimer, plan)
        else:
            self._leave_by(plan)

    @atomic
    def _leave_by(self, plan: Plan) -> None:
        self._pool.leave(self._reclaimer, plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._slots.length)} of {self.layout.slots} slots active"
        budget = format_bytes(self._ledger.budget * self.layout.page_size)
        return (
            f"KVCache({state}; {self.layout.name}/{self.layout.kv_order}, {self.layout.page_tokens} tokens per page "
            f"of {format_bytes(self.layout.page_size)}, budget {budget}, "
            f"{format_bytes(self.layout.reserved_bytes)} reserved)"
        )

    def _give_slot(self, plan: Callable[[Change], int]) -> int:
        """Executes a plan that takes a slot, which it returns; the slot is idle again if the call fails later on."""
        taken: list[int] = []

        def decide(change: Change) -> None:
            slot = plan(change)
            taken[:] = [slot]
            self._pool.repair(lambda: self._slots.give_up(self._pool.change(), slot))

        executed = self._backer.execute(decide)
        (slot,) = taken
        if executed:
            self._backer.note_growth(slot)
            self._slots.set_limit(slot)
        self._backer.prepare_idle_slot()
        return slot

    def _by_slot(self, lengths: Sequence[int]) -> dict[int, int]:
        try:
            if isinstance(lengths, str | bytes | Set):
                raise TypeError(f"{type(lengths).__name__} is no sequence of lengths")
            values = list(lengths.tolist() if hasattr(lengths, "tolist") else lengths)
        except Exception as error:  # what iterates may raise anything
            raise InvalidLength(f"lengths must be a mapping from reqid, or a sequence of lengths: {error}") from error
        if len(values) != self.layout.slots:
            raise InvalidLength(
                f"{len(values)} lengths for {self.layout.slots} slots; give one per slot (0: not named), or a mapping"
            )
        if not {int}.issuperset(map(type, values)):
            values = [self._checked_length(value, f"the length of slot {slot}") for slot, value in enumerate(values)]
        return {slot: length for slot, length in enumerate(values) if length}

    def _checked_length(self, value: object, name: str, most: int | None = -1) -> int:
        """A number of tokens as an `int`, from 0 to `most`, by default `max_context_len`."""
        most = self.config.max_context_len if most == -1 else most
        try:
            length = as_int(value)
        except TypeError as error:
            raise InvalidLength(f"{name}: {error}; tokens are counted in whole numbers") from None
        if length < 0 or (most is not None and length > most):
            limit = "at least 0" if most is None else f"from 0 to max_context_len={most}"
            raise InvalidLength(f"{name}={shown(value)} must be {limit} tokens")
        return length

    def _checked_lengths(self, lengths: Mapping[int, int]) -> dict[int, int]:
        """Lengths by slot as plain numbers, of slots that are allocated."""
        if not isinstance(lengths, Mapping):
            raise InvalidLength(f"lengths must be a mapping from reqid, not {type(lengths).__name__}")
        return {
            (slot := self._checked_slot(reqid)): self._checked_length(length, f"the length of slot {slot}")
            for reqid, length in lengths.items()
        }

    def _checked_layer(self, index: object) -> int:
        """A layer that the cache has as an `int`."""
        with contextlib.suppress(TypeError):
            if (layer := as_int(index)) in self.layout.views:
                return layer
        raise IndexError(f"layer {shown(index)} is not one of the cache's: {', '.join(map(str, self.layers))}")

    def _checked_slot(self, reqid: object) -> int:
        """An allocated slot as an `int`."""
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

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosed("the cache is closed; make a new one, and do not touch this one's tensors")

    def _enter(self) -> None:
        self._check_open()
        self._pool.enter()


def _collected(pool: PagePool, give_back: Plan, owns_pool: bool) -> None:
    """Closes what a cache that was dropped without `close` leaves behind."""
    pool.leave_behind(give_back)
    if owns_pool:
        pool.shut()
