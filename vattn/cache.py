"""KVCache: slots whose tokens are backed by physical pages on demand.

Every slot is contiguous address space for `max_context_len` tokens. What is backed is a prefix of it, counted in
columns (`vattn.layout`): all decisions are taken here, on the caller's thread, under the pool's lock; the pool's
worker executes them. A slot is *active* (a request has it) or *idle*; the pages of an idle slot are *parked*, save
those of token blocks that are cached or that other slots use (`vattn.sharing`).

    [0 ........ length ........ ready ........ extent ........ max_context_len)
     live tokens        backed          being backed    address space only
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from vattn import _native, drivers
from vattn.config import KVConfig, resolve
from vattn.errors import (
    CacheClosed,
    ConfigError,
    DriverError,
    InvalidLength,
    InvalidSlot,
    NoFreeSlot,
    OutOfPages,
)
from vattn.fences import Fences, refusal
from vattn.layout import TensorView
from vattn.pool import PagePool
from vattn.prefix import Admission, as_ids
from vattn.rows import Rows
from vattn.sharing import PageBlock, SharedBlocks, State
from vattn.stats import CacheStats, CallStats, Capacity, SlotPages
from vattn.units import format_bytes

Lengths = Mapping[int, int] | Sequence[int]
_log = logging.getLogger("vattn")
_Plan = Callable[[_native.Transaction], object]


class KVCache:
    """K and V of up to `max_batch_size` requests, contiguous in virtual memory, on demand in physical memory.

    Usable from several threads; calls are serialised per pool. Also a context manager, which closes it.

    Args:
        config: what it holds and how it behaves.
        pool: physical pages to draw on, shared with other caches; by default a pool of its own. A pool decides the page
            size, and its budget bounds the cache as well.

    Raises:
        ConfigError: if the configuration cannot fit, saying what would.
        DriverError: if the address space cannot be reserved.
    """

    def __init__(self, config: KVConfig, *, pool: PagePool | None = None) -> None:
        layout, budget = resolve(
            config,
            pool_page_size=pool.page_size if pool else None,
            pool_budget=pool.total_pages * pool.page_size if pool else None,
        )
        if pool is not None and pool.driver.device is not drivers.find(config.device):
            raise ConfigError(
                f"the pool is on {pool.driver.device.torch_device}, the cache on {config.device}; they must agree"
            )
        self.config = config
        self.layout = layout
        self._owns_pool = pool is None
        self._pool = pool or PagePool(
            budget * layout.page_size, device=config.device, page_size=layout.page_size, guard=config.guard
        )
        with self._pool.lock:
            self._pool.enter()
        self._budget = min(budget, self._pool.total_pages)
        self._spaces = [
            _native.AddressSpace(
                self._pool.driver.native,
                self._pool.native,
                tensors=kind.tensors,
                slots=layout.slots,
                runs=kind.runs,
                run_pages=kind.run_pages,
            )
            for kind in layout.kinds
        ]
        self._views = self._make_views()
        self._rows = Rows(layout, self._spaces, self._pool.driver.dlpack_device)

        self._length: dict[int, int] = {}  # of active slots
        self._limit: dict[int, int] = {}  # of active slots: up to here, a step has nothing to do
        self._idle: dict[int, None] = dict.fromkeys(range(layout.slots))  # longest idle first
        self._ready = [0] * layout.slots  # tokens whose backing is in place
        self._shared = SharedBlocks(layout, self._pool.native, self._spaces)
        self._pending = dict.fromkeys(range(layout.slots), 0)  # ticket of the last growth in the background, or 0
        self._leaving: dict[int, None] = {}  # idle slots whose pages are to go as soon as no kernel reads them
        self._fences = Fences(self._pool.driver)
        self._private_active = 0  # pages of active slots that are in no block
        self._private_idle = 0
        self._peak = 0
        self._steps = 0
        self._step_ns = 0
        self._waits = 0
        self._wait_ns = 0
        self._closed = False
        self._pool.join(self)
        self._finalizer = weakref.finalize(self, _collected, self._pool, self._give_back(), self._owns_pool)
        _log.info("cache on %s: %s", self._pool.driver.device.torch_device, self.capacity())

    # The interface

    def alloc_reqid(self, num_tokens: int | None = None) -> int:
        """Gives a request a slot.

        The slot whose parked pages fit best: the fewest that back `num_tokens`, else the most.

        Args:
            num_tokens: tokens that the request is known to need, its prompt say; a hint, nothing is mapped for it.

        Returns:
            The slot's index in `[0, max_batch_size)`.

        Raises:
            NoFreeSlot: if `max_batch_size` requests are running.
        """
        with self._pool.lock:
            self._enter()
            slot = self._choose((), num_tokens)
            self._take(slot, 0)
            self._prepare_idle_slot()
            return slot

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
        if not 1 <= len(ids) <= self.config.max_context_len:
            raise InvalidLength(
                f"{len(ids)} tokens; a request has from 1 to max_context_len={self.config.max_context_len}"
            )
        with self._pool.lock:
            self._enter()
            blocks = self._shared.index.find(ids, self._shared.block_tokens, salt)
            slot = self._choose(blocks, len(ids))
            if self._fences.is_open(slot):
                del blocks[self._shared.common(slot, blocks) :]
            self._pool.execute(lambda transaction: self._put(transaction, slot, blocks))
            cached = len(blocks) * self._shared.block_tokens
            self._take(slot, cached)
            self._shared.use(slot, len(blocks))
            self._shared[slot].tokens = ids[:cached]
            self._shared[slot].salt = salt
            self._shared.index.count(len(ids), cached)
            self._ready[slot] = self._extent(slot)
            self._set_limit(slot)
            self._prepare_idle_slot()
            return Admission(slot, cached)

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
        ids = as_ids(token_ids)
        with self._pool.lock:
            self._enter()
            length = self._length.get(reqid)
            if length is None:
                raise self._invalid_slot(reqid)
            self._shared.publish(reqid, ids, length)
            self._recount()

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
        with self._pool.lock:
            self._enter()
            length = self._length.get(reqid)
            if length is None:
                raise self._invalid_slot(reqid)
            handle = self._fences.uncaptured(None, "fork was called")
            self._fences.launched()
            shared, mine = self._shared, self._shared[reqid]
            listed, count = len(mine.blocks), length // shared.block_tokens
            shared.adopt(reqid, count)
            self._recount()
            blocks = mine.blocks[:count]

            def plan(transaction: _native.Transaction) -> None:
                self._put(transaction, slot, blocks)
                if shared.leftover(slot, shared.block_tokens * count):
                    self._cut(transaction, slot, count)
                shared.use(slot, count, transaction)
                self._grow_all(transaction, {slot: self._backed(length)}, now=True, handle=handle)

            idle = self._idle.copy()
            try:
                slot = self._choose(blocks, length)
                if self._fences.is_open(slot):
                    raise refusal("fork was called")
                self._take(slot, length)
                self._execute(plan)
            except BaseException:
                for taken in idle.keys() - self._idle.keys():
                    del self._length[taken], self._limit[taken]
                self._idle = idle
                if count > listed:
                    shared.disown(reqid, listed)
                self.refresh()
                raise
            self._ready[slot] = self._extent(slot)
            self._shared[slot].tokens = mine.tokens[: count * shared.block_tokens]
            self._shared[slot].salt = mine.salt
            self._set_limit(slot)
            start = count * shared.block_tokens
            self._rows.write(slot, start, self._rows.views(reqid, start, length))
            return slot

    def evict_prefixes(self) -> int:
        """Forgets every cached token block that no running request uses.

        On CUDA the kernels of the last step must have been launched; it waits for those that use these blocks.

        Returns:
            Pages that became free.

        Raises:
            StreamCapturing: the current stream captures a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        with self._pool.lock:
            self._enter()
            handle = self._fences.uncaptured(None, "evict_prefixes was called")
            self._fences.launched()
            before = self._pool.free_pages
            self._pool.execute(lambda t: self._evict(t, self._budget + 1, wait=True, running=True, handle=handle))
            return self._pool.free_pages - before

    def step(
        self, lengths: Lengths, next_lengths: Mapping[int, int] | None = None, *, stream: drivers.Stream | None = None
    ) -> None:
        """Backs tokens `[0, n)` of every slot named; to be called before the kernels of an iteration are launched, and
        after those of the iteration before.

        What is not backed yet is mapped before this returns. With `overlap`, what the next call will need is queued for
        the worker: one token more in every slot, or what `next_lengths` announces. Slots that are not named keep what
        they have. A length may go down; pages stay. Where it goes down into shared token blocks, the tokens from there
        on become the request's own again, by a copy if need be, when the length next rises (copy-on-write): so before
        committed tokens are written anew, step down to the first of them.

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
            InvalidLength: a length below 0 or over `max_context_len`.
            StreamCapturing: the stream captures a CUDA graph, and memory would have to be mapped. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        with self._pool.lock:
            start = time.perf_counter_ns()
            self._enter()
            if not isinstance(lengths, Mapping):
                lengths = self._by_slot(lengths)
            limit = self._limit
            try:
                crossing = [slot for slot, length in lengths.items() if length > limit[slot]]
                for slot in next_lengths or ():
                    limit[slot]
            except KeyError as error:
                raise self._invalid_slot(error.args[0]) from None
            if lengths and min(lengths.values()) < 0:
                raise InvalidLength("a length is below 0; lengths count tokens from the start of the slot")
            ends = self._shared.ends
            lowered = [slot for slot, end in ends.items() if lengths.get(slot, end) < end] if ends else ()
            closed = self._fences.launched()
            if crossing or next_lengths or closed or self._leaving:
                handle = self._fences.handle(stream)
                capturing = self._fences.capturing(handle)
                if crossing:
                    self._back({slot: lengths[slot] for slot in crossing}, lengths, handle, capturing)
                else:
                    self._length.update(lengths)
                if not capturing:
                    self._look_ahead(crossing, lengths, next_lengths or {})
                    self._maintain()
            else:
                self._length.update(lengths)
            for slot in lowered:
                self._rewind(slot)
            self._steps += 1
            self._step_ns += time.perf_counter_ns() - start

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
            self._enter()
            if reqid not in self._length:
                raise self._invalid_slot(reqid)
            self._fences.freed(reqid, self._fences.uncaptured(stream, "free_reqid was called"))
            del self._length[reqid], self._limit[reqid]
            self._idle[reqid] = None
            self._shared.use(reqid, 0)
            self._shared[reqid].tokens = []
            self._shared[reqid].rewound = False
            self._recount()
            if not self.config.deferred_reclamation:
                self._leaving[reqid] = None
            self._maintain()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer: views `[max_batch_size, max_context_len, num_kv_heads, head_dim]` in the cache's dtype.

        Strides depend on layout and kv_order; the last is 1. Only what `step` backed may be written; other reads see
        zeros (or fault, see `KVConfig.guard`).

        Raises:
            IndexError: for a layer that the cache does not have.
        """
        self._check_open()
        if not 0 <= index < len(self._views):
            raise IndexError(f"layer {index} is not in [0, {len(self._views)})")
        return self._views[index]

    @property
    def total_pages(self) -> int:
        """The budget, in pages."""
        return self._budget

    def capacity(self) -> Capacity:
        """What fits the budget. A new cache logs it (logger `"vattn"`, INFO)."""
        layout, guard, longest = self.layout, self.config.guard_rows, self.config.max_context_len

        def alone(pages: int) -> int:
            return max(0, layout.most_tokens(pages, longest + guard) - guard)

        requests, rest = divmod(self._budget, layout.pages(longest + guard))
        return Capacity(
            budget_bytes=self._budget * layout.page_size,
            requests=min(layout.slots, self._budget // layout.pages(1 + guard)),
            tokens=layout.slots * longest if requests >= layout.slots else requests * longest + alone(rest),
            longest_context=alone(self._budget),
        )

    def available_pages(self) -> int:
        """Pages that a step may still take: free ones, those that no request uses (parked, or cached token blocks) of
        all caches on the pool, and what running requests have beyond their lengths. Below 0 where requests have yet to
        get pages of their own in place of shared ones.
        """
        with self._pool.lock:
            self._enter()
            needed = sum(
                kind.lanes * sum(kind.columns(self._backed(length)) for length in self._length.values())
                for kind in self.layout.kinds
            )
            held = self._pool.free_pages + self._pool.spare_pages + self._stuck_pages() + self._owned
            return min(self._budget, held) - needed + self._shared.saved_pages

    def pages_needed(self, num_tokens: int, reqid: int | None = None) -> int:
        """Pages for `num_tokens` tokens: in all, or beyond those for the length of slot `reqid`, or a few more.

        A step to these lengths succeeds if the sum over its slots is at most `available_pages()`.

        Raises:
            InvalidSlot: if `reqid` is not allocated.
        """
        self._check_open()
        pages = self.layout.pages(self._backed(num_tokens))
        if reqid is None:
            return pages
        length = self._length.get(reqid)
        if length is None:
            raise self._invalid_slot(reqid)
        more = max(0, pages - self.layout.pages(self._backed(length)))
        if num_tokens > length and (replaced := self._shared[reqid].used - length // self._shared.block_tokens) > 0:
            more += replaced * self._shared.block_pages
        return more

    def stats(self) -> CacheStats:
        """A snapshot of pages, bytes, calls and times."""
        with self._pool.lock:
            self._enter()
            counts = self._pool.native.counts()
            live = sum(self._length.values())
            block_bytes = self._shared.block_tokens * self.layout.bytes_per_token
            saved_bytes = self._shared.saved_pages // self._shared.block_pages * block_bytes
            index = self._shared.index
            return CacheStats(
                page_size=self.layout.page_size,
                budget_pages=self._budget,
                owned_pages=self._owned,
                parked_pages=self._parked,
                cached_pages=self._cached,
                shared_pages=self._shared.shared_pages(),
                other_pages=self._budget - self._held - self._free(),
                free_pages=self._free(),
                created_pages=counts.budget - counts.absent,
                peak_mapped_pages=self._peak,
                reserved_bytes=self.layout.reserved_bytes,
                live_tokens=live,
                live_bytes=max(0, live * self.layout.bytes_per_token - saved_bytes),
                query_tokens=index.query_tokens,
                hit_tokens=index.hit_tokens,
                kernel_mappings=_native.host_usage().kernel_mappings,
                steps=self._steps,
                step_seconds=self._step_ns * 1e-9,
                waits=self._waits,
                wait_seconds=self._wait_ns * 1e-9,
                failures=self._pool.failures,
                calls={
                    name: CallStats(count, seconds)
                    for name, (count, seconds) in self._pool.driver.native.call_stats().items()
                },
            )

    def page_map(self) -> list[SlotPages]:
        """What every slot holds, in tokens and pages."""
        with self._pool.lock:
            self._enter()
            return [
                SlotPages(
                    reqid=slot,
                    active=slot in self._length,
                    length=self._length.get(slot, 0),
                    mapped=self._extent(slot),
                    pages=self._slot_pages(slot),
                )
                for slot in range(self.layout.slots)
            ]

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
        with self._pool.lock:
            self._enter()
            self._fences.uncaptured(None, "trim was called")
            self._fences.launched()
            self._pool.execute(lambda transaction: self._reclaim_parked(transaction, self._budget, wait=True))
            counts = self._pool.native.counts()

            def plan(transaction: _native.Transaction) -> None:
                self._pool.native.release_free(transaction, counts.free)

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
                for space in self._spaces:
                    space.check()
                _native.check_references(self._pool.native, self._spaces, list(self._shared.held()))
            except RuntimeError as error:
                raise AssertionError(str(error)) from error
            active, idle = set(self._length), set(self._idle)
            assert active == set(self._limit), "limits are not those of the active slots"
            assert set(self._leaving) <= idle, "the pages of a running request are to go"
            assert not active & idle, "a slot is both active and idle"
            assert active | idle == set(range(self.layout.slots)), "a slot is neither active nor idle"
            self._shared.check()
            counted = self._private_active, self._private_idle
            self._recount()
            assert counted == (self._private_active, self._private_idle), "private pages are miscounted"
            assert self._held <= self._pool.native.counts().taken, "more pages are held than taken"
            assert self._held <= self._budget, "more pages are held than the budget has"
            if self._owns_pool:
                assert self._held == self._pool.native.counts().taken, "a page was lost"
            for slot, length in self._length.items():
                extent = self._extent(slot)
                assert self._ready[slot] <= extent, "a slot counts on tokens that are not backed"
                # Guard rows are backed by a step, so not yet behind tokens that a request was admitted with.
                admitted = length == self._shared[slot].used * self._shared.block_tokens
                assert (length if admitted else self._backed(length)) <= extent, "a live token is not backed"

    def close(self) -> None:
        """Unmaps everything and gives the memory back. Idempotent; afterwards every call raises CacheClosed.

        The tensors must not be touched any more; their address space goes when the last of them does.
        """
        with self._pool.lock:
            if self._closed:
                return
            self._closed = True
            self._finalizer.detach()
            self._views = []
            self._rows.clear()
            try:
                self._pool.leave(self, self._give_back())
            finally:
                self._spaces.clear()  # the books of shared blocks have the same list
            if self._owns_pool:
                self._pool.shut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._length)} of {self.layout.slots} slots active"
        return (
            f"KVCache({state}; {self.layout.name}/{self.layout.kv_order}, {self.layout.block_tokens} tokens per page "
            f"of {format_bytes(self.layout.page_size)}, budget {format_bytes(self._budget * self.layout.page_size)}, "
            f"{format_bytes(self.layout.reserved_bytes)} reserved)"
        )

    # For the pool

    def refresh(self) -> None:
        """Derives counts and limits anew from the books, after decisions were taken back; under the pool's lock."""
        for slot in range(self.layout.slots):
            if self._pool.mapper.passed(self._pending[slot]):
                self._pending[slot] = 0
                self._ready[slot] = self._extent(slot)
            self._ready[slot] = min(self._ready[slot], self._extent(slot))
        self._recount()
        for slot in self._length:
            self._set_limit(slot)

    def reclaim(self, transaction: _native.Transaction, pages: int, *, wait: bool) -> int:
        """Plans to free parked pages, of the longest idle slot first, then cached ones; returns how many. Under the
        pool's lock.
        """
        reclaimed = self._reclaim_parked(transaction, pages, wait=wait)
        if reclaimed < pages:
            reclaimed += self._evict(transaction, pages - reclaimed, wait=wait)
        return reclaimed

    @property
    def spare_pages(self) -> int:
        """Pages that `reclaim` can give."""
        return self._parked + self._cached - self._stuck_pages()

    # Backing slots; all under the pool's lock

    def _back(self, targets: dict[int, int], lengths: Mapping[int, int], handle: int | None, capturing: bool) -> None:
        """Takes on the lengths, with every target backed when it returns; or changes nothing.

        Args:
            handle: the stream of the caller's kernels; `capturing`: it captures a graph.
        """
        for length in targets.values():
            if length > self.config.max_context_len:
                raise InvalidLength(
                    f"a length of {length} tokens is over max_context_len={self.config.max_context_len}; "
                    "stop the request, or make the cache with a longer context"
                )
        needs = {slot: self._backed(length) for slot, length in targets.items()}
        start = time.perf_counter_ns()
        waited = self._await_growth(needs)
        shared = self._shared
        leftover = [slot for slot in targets if shared.leftover(slot, self._length[slot])]
        short = {slot: n for slot, n in needs.items() if n > self._extent(slot) or slot in leftover}
        if short and capturing:
            raise refusal(f"step has to map memory for {len(short)} slots")
        before = self._length.copy()
        # The live tokens of the last block, where it is left over in part, go over to the pages that replace it.
        starts = {slot: before[slot] // shared.block_tokens * shared.block_tokens for slot in leftover}
        saved = {
            slot: [rows.clone() for rows in self._rows.views(slot, start, before[slot])]
            for slot, start in starts.items()
            if start < before[slot]
        }
        self._length.update(lengths)
        if short:
            waited = True
            try:
                self._grow_now(short, handle, starts)
            except BaseException:
                self._length = before
                self.refresh()  # limits depend on lengths where blocks are left over
                raise
            for slot, rows in saved.items():
                self._rows.write(slot, starts[slot], rows)
        if waited:
            self._waits += 1
            self._wait_ns += time.perf_counter_ns() - start
        for slot in targets:
            self._set_limit(slot)

    def _grow_now(self, needs: dict[int, int], handle: int | None, starts: dict[int, int]) -> None:
        """Backs slots. Blocks that are left over behind `starts`, in tokens, leave theirs."""

        def plan(transaction: _native.Transaction) -> None:
            for slot, start in starts.items():
                self._release(transaction, slot, start // self._shared.block_tokens, handle)
            self._grow_all(transaction, needs, now=True, handle=handle)

        self._execute(plan)
        for slot in needs:
            self._shared[slot].rewound = False
            self._ready[slot] = self._extent(slot)

    def _execute(self, plan: _Plan) -> None:
        """Executes a plan for which memory has to be found."""
        try:
            self._pool.execute(plan)
        except OutOfPages as error:
            # The budget has the pages, but the machine has no memory or no mapping for new ones: those that no request
            # uses are both.
            if not self._parked + self._cached or error.__cause__ is None:
                raise
            self._pool.execute(lambda transaction: self.reclaim(transaction, self._budget, wait=True))
            self._pool.execute(plan)

    def _release(self, transaction: _native.Transaction, slot: int, count: int, handle: int | None) -> None:
        """Plans that the slot, which is to be written to, keeps only its first `count` blocks."""
        if self._fences.is_open(slot):
            raise refusal(f"slot {slot} needs other pages")
        if self._shared[slot].rewound:
            self._fences.guard_running(transaction, handle)
        if count < self._shared[slot].used:
            self._shared.use(slot, count, transaction)
        self._cut(transaction, slot, count)

    def _rewind(self, slot: int) -> None:
        """The length went down into blocks that the slot's request uses."""
        mine, length = self._shared[slot], self._length[slot]
        blocks = -(-self._backed(length) // self._shared.block_tokens)
        self._shared.use(slot, min(mine.used, blocks))
        if slot in self._shared.ends:
            self._shared.ends[slot] = length
        del mine.tokens[length // self._shared.block_tokens * self._shared.block_tokens :]
        mine.rewound = True
        self._set_limit(slot)

    # Slots and their blocks

    def _choose(self, blocks: Sequence[PageBlock], num_tokens: int | None) -> int:
        """The idle slot in which most of a prefix can be had, with the least to map and the least to lose."""
        if not self._idle:
            raise NoFreeSlot(
                f"all {self.layout.slots} slots are taken; free one with free_reqid, or raise max_batch_size"
            )
        want = num_tokens if num_tokens is not None else self.config.max_context_len

        def rank(slot: int) -> tuple[int, int, int, bool, bool, int]:
            common = self._shared.common(slot, blocks)
            usable = common if self._fences.is_open(slot) else len(blocks)
            lost = len(self._shared[slot].blocks) - common
            extent = self._extent(slot)
            waits = bool(lost or common < usable) and not self._fences.passed(slot)
            # Blocks that another request could find in place here are worth as much as those to be mapped.
            cost = usable - min(usable, common) + lost
            return (-usable, cost, lost, waits, extent < want, extent if extent >= want else -extent)

        return min(self._idle, key=rank)

    def _take(self, slot: int, length: int) -> None:
        """The slot is a request's."""
        del self._idle[slot]
        self._leaving.pop(slot, None)
        self._length[slot] = length
        self._recount()
        self._set_limit(slot)

    def _put(self, transaction: _native.Transaction, slot: int, blocks: Sequence[PageBlock]) -> None:
        """Plans that the slot starts with these blocks."""
        common = self._shared.common(slot, blocks)
        if common < len(blocks):
            self._cut(transaction, slot, common)
            self._shared.attach(transaction, slot, blocks[common:])

    def _cut(self, transaction: _native.Transaction, slot: int, count: int) -> None:
        """Plans to unmap all that the slot has but its first `count` blocks; the worker waits for its fences."""
        keep = [count * columns for columns in self._shared.columns]
        if all(space.columns(slot) <= columns for space, columns in zip(self._spaces, keep, strict=True)):
            return
        self._fences.guard(transaction, slot)
        private = self._private_pages(slot)
        for space, columns in zip(self._spaces, keep, strict=True):
            space.shrink(transaction, slot, space.columns(slot) - columns)
        self._shared.detach(transaction, slot, count)
        self._count(slot, -private)
        self._ready[slot] = min(self._ready[slot], self._extent(slot))

    def _evict(
        self,
        transaction: _native.Transaction,
        pages: int,
        *,
        wait: bool,
        running: bool = False,
        handle: int | None = None,
    ) -> int:
        """Plans to forget cached blocks until `pages` pages became free; returns how many did.

        Args:
            wait: also such as kernels of earlier requests may still read: the worker waits for them.
            running: also such as are left over in slots of running requests, of which kernels on stream `handle` may
                still read: the worker waits for all of those.
        """
        before = self._pool.free_pages

        def stuck(slot: int) -> bool:
            if slot in self._length:
                return not running or self._fences.is_open(slot)
            return not self._fences.passed(slot) if not wait else self._fences.is_open(slot)

        for block in self._shared.index.victims():
            if self._pool.free_pages - before >= pages:
                break
            if any(map(stuck, block.slots)):
                continue
            for slot in tuple(block.slots):
                if self._shared[slot].rewound:
                    self._fences.guard_running(transaction, handle)
                self._cut(transaction, slot, block.depth)
            self._shared.evict(transaction, block)
        return self._pool.free_pages - before

    # Growing and shrinking slots

    def _await_growth(self, needs: dict[int, int]) -> bool:
        """Waits for growth in the background that these slots count on; whether it had to."""
        mapper = self._pool.mapper
        tickets = [
            self._pending[slot] for slot, tokens in needs.items() if tokens > self._ready[slot] and self._pending[slot]
        ]
        waited = bool(tickets) and not mapper.passed(max(tickets))
        if tickets:
            mapper.wait(max(tickets))
        if mapper.failed:
            self._pool.settle()
        for slot in needs:
            if self._pending[slot] and mapper.passed(self._pending[slot]):
                self._pending[slot] = 0
                self._ready[slot] = self._extent(slot)
        return waited

    def _grow_all(
        self,
        transaction: _native.Transaction,
        targets: Mapping[int, int],
        *,
        now: bool = False,
        handle: int | None = None,
    ) -> None:
        """Plans the growth of slots to their targets.

        Where free pages do not do, out of parked and cached ones that no kernel reads any more. `now`, when a step
        cannot go on without them, also out of those that kernels still read, and out of what running requests have
        beyond their length: mapped ahead, or left over from a longer request.
        """
        need = sum(self._growth(slot, tokens) for slot, tokens in targets.items())
        missing = need - self._free()
        if missing > 0:
            missing -= self.reclaim(transaction, missing, wait=now)
        if missing > 0 and now:
            missing -= self._reclaim_surplus(transaction, missing, handle)
            if missing > 0:
                missing -= self._evict(transaction, missing, wait=True, running=True, handle=handle)
        if missing > 0 and need <= self._budget - self._held:
            missing -= self._pool.reclaim(transaction, missing, wait=now)
        if missing > 0:
            raise OutOfPages(
                f"{need} pages of {format_bytes(self.layout.page_size)} are needed and {need - missing} are left of a "
                f"budget of {self._budget}: {missing} ({format_bytes(missing * self.layout.page_size)}) are missing; "
                "free or preempt a request, or raise memory_budget",
                missing_pages=missing,
                missing_bytes=missing * self.layout.page_size,
            )
        for slot, tokens in targets.items():
            self._grow(transaction, slot, tokens)

    def _grow(self, transaction: _native.Transaction, slot: int, tokens: int) -> None:
        pages = self._growth(slot, tokens)
        for kind, space in zip(self.layout.kinds, self._spaces, strict=True):
            space.grow(transaction, slot, max(0, kind.columns(tokens) - space.columns(slot)))
        self._count(slot, pages)

    def _unmap(self, transaction: _native.Transaction, slot: int, pages: int, *, cached: bool = False) -> int:
        """Plans to unmap what the slot has beyond its length until `pages` pages are free; returns how many are.

        The worker waits for the slot's fences. A slot without one yet keeps its pages.

        Args:
            cached: whether cached blocks at the start of an idle slot go as well (and are cached without being mapped).
        """
        if self._fences.is_open(slot):
            return 0
        shared, before = self._shared, self._pool.free_pages
        blocks, keep = shared[slot].blocks, shared[slot].used
        if slot in self._idle and not cached:
            keep = shared.cached_prefix(slot)
        needed = self._backed(self._length.get(slot, 0))
        private = 0
        columns_gone = []
        for kind, space, block_columns in zip(self.layout.kinds, self._spaces, shared.columns, strict=True):
            surplus = space.columns(slot) - max(kind.columns(needed), len(blocks) * block_columns)
            columns_gone.append(max(0, min(surplus, -(-(pages - private) // space.lanes))))
            private += columns_gone[-1] * space.lanes
        count, freed = len(blocks), private
        while count > keep and (freed < pages or cached):
            count -= 1
            block = blocks[count]
            if not block.users and not block.published and len(block.slots) == 1:
                freed += shared.block_pages
        if count < len(blocks):
            self._cut(transaction, slot, count)
        elif private:
            self._fences.guard(transaction, slot)
            for space, columns in zip(self._spaces, columns_gone, strict=True):
                if columns:
                    space.shrink(transaction, slot, columns)
            self._ready[slot] = min(self._ready[slot], self._extent(slot))
            self._count(slot, -private)
        if slot in self._length:
            self._set_limit(slot)
        return self._pool.free_pages - before

    def _reclaim_parked(self, transaction: _native.Transaction, pages: int, *, wait: bool) -> int:
        reclaimed = 0
        for slot in self._idle:
            if reclaimed >= pages:
                break
            if wait or self._fences.passed(slot):
                reclaimed += self._unmap(transaction, slot, pages - reclaimed)
        return reclaimed

    def _reclaim_surplus(self, transaction: _native.Transaction, pages: int, handle: int | None) -> int:
        """Plans to unmap pages that active slots have beyond their lengths; returns how many.

        A length went down after kernels were launched that read up to the old one, so the worker waits for those.
        """
        reclaimed = 0
        for slot, length in self._length.items():
            if reclaimed >= pages:
                break
            if self._slot_pages(slot) > self.layout.pages(self._backed(length)):
                if not reclaimed:
                    self._fences.guard_running(transaction, handle)
                reclaimed += self._unmap(transaction, slot, pages - reclaimed)
        return reclaimed

    def _look_ahead(self, crossing: list[int], lengths: Mapping[int, int], announced: Mapping[int, int]) -> None:
        """Queues what the next step will need: for slots at the end of what is backed, and where it is announced."""
        if not self.config.overlap:
            return
        most = self.config.max_context_len
        expected = {slot: lengths[slot] + 1 for slot in crossing} | dict(announced)
        needs = {
            slot: tokens
            for slot, length in expected.items()
            if (tokens := self._backed(min(length, most))) > self._extent(slot)
            and not self._shared.leftover(slot, self._length[slot])
        }
        if not needs:
            return
        # Without pages there is nothing to do ahead: the next step finds out, and says so.
        with contextlib.suppress(OutOfPages):
            ticket = self._pool.submit(lambda transaction: self._grow_all(transaction, needs))
            self._pending.update(dict.fromkeys(needs, ticket))

    def _maintain(self) -> None:
        """Keeps pages free, and an idle slot backed, for what comes next."""
        leaving = [slot for slot in self._leaving if self._fences.passed(slot)]
        if leaving:
            for slot in leaving:
                del self._leaving[slot]
            self._in_background(
                lambda transaction: [self._unmap(transaction, slot, self._budget, cached=True) for slot in leaving]
            )
        low = self._low_water()
        if self._parked and self._free() < low:
            self._in_background(lambda transaction: self._reclaim_parked(transaction, low - self._free(), wait=False))
        self._prepare_idle_slot()

    def _prepare_idle_slot(self) -> None:
        """Backs the start of the best idle slot, so that the next request's prefill finds its pages mapped."""
        empty = [slot for slot in self._idle if not self._shared[slot].blocks] if self.config.eager_pages else ()
        if not empty:
            return
        slot = max(empty, key=self._extent)
        growth = [
            max(0, min(self.config.eager_pages, kind.run_pages) - space.columns(slot))
            for kind, space in zip(self.layout.kinds, self._spaces, strict=True)
        ]
        pages = sum(n * space.lanes for n, space in zip(growth, self._spaces, strict=True))
        if not pages or self._free() - pages < self._low_water():
            return

        def plan(transaction: _native.Transaction) -> None:
            for n, space in zip(growth, self._spaces, strict=True):
                space.grow(transaction, slot, n)
            self._count(slot, pages)

        if ticket := self._in_background(plan):
            self._pending[slot] = ticket

    def _in_background(self, plan: _Plan) -> int:
        """Queues what nobody waits for (does it at once without `overlap`); its ticket, or 0 if there is none."""
        if self.config.overlap:
            return self._pool.submit(plan)
        with contextlib.suppress(OutOfPages, DriverError):  # it is taken back, and counted
            return self._pool.execute(plan)
        return 0

    # Books

    def _backed(self, length: int) -> int:
        """Tokens to back for a slot of `length` tokens."""
        return length + self.config.guard_rows if length else 0

    def _growth(self, slot: int, tokens: int) -> int:
        """Pages that the slot lacks to back `tokens` tokens."""
        return sum(
            space.lanes * max(0, kind.columns(tokens) - space.columns(slot))
            for kind, space in zip(self.layout.kinds, self._spaces, strict=True)
        )

    def _extent(self, slot: int) -> int:
        """Tokens that the slot's pages back, once the worker is done with them."""
        return min(
            kind.tokens(space.columns(slot)) for kind, space in zip(self.layout.kinds, self._spaces, strict=True)
        )

    def _stuck_pages(self) -> int:
        """Parked and cached pages that only a step of this cache can take: kernels that use them may not be launched
        yet, or they are left over in a slot of a running request.
        """
        shared = self._shared
        open_slots = [slot for slot in self._fences.open_slots if slot in self._idle]
        left = [slot for slot in self._length if len(shared[slot].blocks) > shared[slot].used]
        blocks = {block for slot in (*open_slots, *left) for block in shared[slot].blocks if not block.users}
        return sum(map(self._private_pages, open_slots)) + len(blocks) * shared.block_pages

    def _slot_pages(self, slot: int) -> int:
        return sum(space.lanes * space.columns(slot) for space in self._spaces)

    def _private_pages(self, slot: int) -> int:
        """Pages of the slot that are in no block."""
        return self._slot_pages(slot) - len(self._shared[slot].blocks) * self._shared.block_pages

    def _recount(self) -> None:
        self._private_active = sum(map(self._private_pages, self._length))
        self._private_idle = sum(map(self._private_pages, self._idle))

    @property
    def _owned(self) -> int:
        """Pages that running requests have."""
        return self._private_active + self._shared.pages(State.USED)

    @property
    def _parked(self) -> int:
        """Pages that are mapped, and neither theirs nor cached."""
        return self._private_idle + self._shared.pages(State.PARKED)

    @property
    def _cached(self) -> int:
        """Pages of cached blocks that no running request uses."""
        return self._shared.pages(State.CACHED)

    @property
    def _held(self) -> int:
        return self._owned + self._parked + self._cached

    def _count(self, slot: int, pages: int) -> None:
        """The slot has that many private pages more."""
        if slot in self._length:
            self._private_active += pages
        else:
            self._private_idle += pages
        self._peak = max(self._peak, self._held)

    def _free(self) -> int:
        """Pages that a slot can take without any being unmapped."""
        return min(self._budget - self._held, self._pool.free_pages)

    def _low_water(self) -> int:
        return int(self.config.watermark * self._budget)

    def _set_limit(self, slot: int) -> None:
        if self._shared.leftover(slot, self._length[slot]):
            self._limit[slot] = self._length[slot]
            return
        ready = self._ready[slot] - self.config.guard_rows
        most = self.config.max_context_len
        # With overlap the last backed token is already a reason to act: the next one has to be queued.
        self._limit[slot] = most if ready >= most else ready - self.config.overlap

    def _by_slot(self, lengths: Sequence[int]) -> dict[int, int]:
        if len(lengths) != self.layout.slots:
            raise InvalidLength(
                f"{len(lengths)} lengths for {self.layout.slots} slots; give one per slot (0: not named), or a mapping"
            )
        values = lengths.tolist() if hasattr(lengths, "tolist") else lengths
        return {slot: length for slot, length in enumerate(values) if length}

    def _invalid_slot(self, reqid: object) -> InvalidSlot:
        if isinstance(reqid, int) and 0 <= reqid < self.layout.slots:
            return InvalidSlot(
                f"slot {reqid} is not allocated; alloc_reqid gives out slots, free_reqid takes them back"
            )
        return InvalidSlot(f"slot {reqid!r} is not in [0, {self.layout.slots})")

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosed("the cache is closed; make a new one, and do not touch this one's tensors")

    def _enter(self) -> None:
        self._check_open()
        self._pool.enter()

    def _give_back(self) -> _Plan:
        """Plans to give up every page; knows nothing of the cache itself, which may be gone."""
        spaces, shared = self._spaces, self._shared

        def plan(transaction: _native.Transaction) -> None:
            if any(space.columns(slot) for space in spaces for slot in range(space.slots)):
                transaction.wait_for(None)  # kernels that read them, on whichever stream
            for space in spaces:
                for slot in range(space.slots):
                    space.shrink(transaction, slot, space.columns(slot))
            shared.forget(transaction)

        return plan

    def _make_views(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        dtype = self.config.torch_dtype
        shape = (self.layout.slots, self.config.max_context_len, self.config.num_kv_heads)
        # Outside inference mode: a tensor made inside it could not be written outside it.
        with torch.inference_mode(False):
            bases = [
                [space.tensor(i, *self._pool.driver.dlpack_device).view(dtype) for i in range(kind.tensors)]
                for kind, space in zip(self.layout.kinds, self._spaces, strict=True)
            ]

            def view(where: TensorView) -> torch.Tensor:
                base = bases[where.kind][where.tensor]
                return base.as_strided((*shape, where.head_dim), where.strides, where.offset)

            return [(view(k), view(v)) for k, v in self.layout.views]


def _collected(pool: PagePool, give_back: _Plan, owns_pool: bool) -> None:
    """Closes what a cache that was dropped without `close` leaves behind."""
    pool.leave_behind(give_back)
    if owns_pool:
        pool.shut()
