"""KVCache: slots whose tokens are backed by physical pages on demand.

Every slot is contiguous address space for `max_context_len` tokens. What is backed is a prefix of it, counted in
columns (`vattn.layout`): all decisions are taken here, on the caller's thread, under the pool's lock; the pool's
worker executes them. A slot is *active* (a request has it) or *idle*; the pages of an idle slot are *parked*.

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

        self._length: dict[int, int] = {}  # of active slots
        self._limit: dict[int, int] = {}  # of active slots: up to here, a step has nothing to do
        self._idle: dict[int, None] = dict.fromkeys(range(layout.slots))  # longest idle first
        self._ready = [0] * layout.slots  # tokens whose backing is in place
        self._pending = dict.fromkeys(range(layout.slots), 0)  # ticket of the last growth in the background, or 0
        self._leaving: dict[int, None] = {}  # idle slots whose pages are to go as soon as no kernel reads them
        self._fences = Fences(self._pool.driver)
        self._owned = 0  # pages
        self._parked = 0
        self._peak = 0
        self._steps = 0
        self._step_ns = 0
        self._waits = 0
        self._wait_ns = 0
        self._closed = False
        self._pool.join(self)
        self._finalizer = weakref.finalize(self, _collected, self._pool, self._spaces, self._owns_pool)
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
            if not self._idle:
                raise NoFreeSlot(
                    f"all {self.layout.slots} slots are taken; free one with free_reqid, or raise max_batch_size"
                )
            want = num_tokens if num_tokens is not None else self.config.max_context_len

            def fit(slot: int) -> tuple[bool, int]:
                extent = self._extent(slot)
                return (extent < want, extent if extent >= want else -extent)

            slot = min(self._idle, key=fit)
            del self._idle[slot]
            self._leaving.pop(slot, None)
            pages = self._slot_pages(slot)
            self._parked -= pages
            self._owned += pages
            self._length[slot] = 0
            self._set_limit(slot)
            self._prepare_idle_slot()
            return slot

    def step(
        self, lengths: Lengths, next_lengths: Mapping[int, int] | None = None, *, stream: drivers.Stream | None = None
    ) -> None:
        """Backs tokens `[0, n)` of every slot named; to be called before the kernels of an iteration are launched, and
        after those of the iteration before.

        What is not backed yet is mapped before this returns. With `overlap`, what the next call will need is queued for
        the worker: one token more in every slot, or what `next_lengths` announces. Slots that are not named keep what
        they have. A length may go down; pages stay.

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
            self._steps += 1
            self._step_ns += time.perf_counter_ns() - start

    def free_reqid(self, reqid: int, stream: drivers.Stream | None = None) -> None:
        """Ends a request. Its pages stay mapped (parked) for the slot's next request, or until needed elsewhere.

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
            pages = self._slot_pages(reqid)
            self._owned -= pages
            self._parked += pages
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
        """Pages that a step may still take: free ones, parked ones of all caches on the pool, and what running requests
        have beyond their lengths.
        """
        with self._pool.lock:
            self._enter()
            needed = sum(
                kind.lanes * sum(kind.columns(self._backed(length)) for length in self._length.values())
                for kind in self.layout.kinds
            )
            held = self._pool.free_pages + self._pool.parked_pages + self._open_pages() + self._owned
            return min(self._budget, held) - needed

    def pages_needed(self, num_tokens: int, reqid: int | None = None) -> int:
        """Pages for `num_tokens` tokens: in all, or beyond those for the length of slot `reqid`.

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
        return max(0, pages - self.layout.pages(self._backed(length)))

    def stats(self) -> CacheStats:
        """A snapshot of pages, bytes, calls and times."""
        with self._pool.lock:
            self._enter()
            counts = self._pool.native.counts()
            live = sum(self._length.values())
            return CacheStats(
                page_size=self.layout.page_size,
                budget_pages=self._budget,
                owned_pages=self._owned,
                parked_pages=self._parked,
                other_pages=self._budget - self._owned - self._parked - self._free(),
                free_pages=self._free(),
                created_pages=counts.budget - counts.absent,
                peak_mapped_pages=self._peak,
                reserved_bytes=self.layout.reserved_bytes,
                live_tokens=live,
                live_bytes=live * self.layout.bytes_per_token,
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
        """Gives back to the machine what no request holds: unmaps parked pages and releases free ones.

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
            self._reclaim_all()
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
            except RuntimeError as error:
                raise AssertionError(str(error)) from error
            active, idle = set(self._length), set(self._idle)
            assert active == set(self._limit), "limits are not those of the active slots"
            assert set(self._leaving) <= idle, "the pages of a running request are to go"
            assert not active & idle, "a slot is both active and idle"
            assert active | idle == set(range(self.layout.slots)), "a slot is neither active nor idle"
            owned = sum(map(self._slot_pages, active))
            parked = sum(map(self._slot_pages, idle))
            assert (owned, parked) == (self._owned, self._parked), "owned and parked pages are miscounted"
            assert owned + parked <= self._pool.native.counts().taken, "more pages are mapped than taken"
            assert owned + parked <= self._budget, "more pages are mapped than the budget has"
            if self._owns_pool:
                assert owned + parked == self._pool.native.counts().taken, "a page was lost"
            for slot, length in self._length.items():
                extent = self._extent(slot)
                assert self._ready[slot] <= extent, "a slot counts on tokens that are not backed"
                assert self._backed(length) <= extent, "a live token is not backed"

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
            try:
                self._pool.leave(self, self._spaces)
            finally:
                self._spaces = []
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
        self._owned = sum(map(self._slot_pages, self._length))
        self._parked = sum(map(self._slot_pages, self._idle))
        for slot in self._length:
            self._set_limit(slot)

    def reclaim(self, transaction: _native.Transaction, pages: int, *, wait: bool) -> int:
        """Plans to unmap parked pages, of the longest idle slot first; returns how many. Under the pool's lock."""
        reclaimed = 0
        for slot in self._idle:
            if reclaimed >= pages:
                break
            if wait or self._fences.passed(slot):
                reclaimed += self._unmap(transaction, slot, pages - reclaimed)
        return reclaimed

    @property
    def parked_pages(self) -> int:
        """Pages that `reclaim` can give."""
        return self._parked - self._open_pages()

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
        short = {slot: tokens for slot, tokens in needs.items() if tokens > self._extent(slot)}
        if short and capturing:
            raise refusal(f"step has to map memory for {len(short)} slots")
        before = self._length.copy()
        self._length.update(lengths)
        if short:
            waited = True
            try:
                self._grow_now(short, handle)
            except BaseException:
                self._length = before
                raise
        if waited:
            self._waits += 1
            self._wait_ns += time.perf_counter_ns() - start
        for slot in targets:
            self._set_limit(slot)

    def _grow_now(self, needs: dict[int, int], handle: int | None) -> None:
        def plan(transaction: _native.Transaction) -> None:
            self._grow_all(transaction, needs, now=True, handle=handle)

        try:
            self._pool.execute(plan)
        except OutOfPages as error:
            # The budget has the pages, but the machine has no memory or no mapping for new ones: parked ones are both.
            if not self._parked or error.__cause__ is None:
                raise
            self._reclaim_all()
            self._pool.execute(plan)
        for slot in needs:
            self._ready[slot] = self._extent(slot)

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

        Where free pages do not do, out of parked ones that no kernel reads any more. `now`, when a step cannot go on
        without them, also out of those that kernels still read, and out of what running requests have beyond their
        length: mapped ahead, or left over from a longer request.
        """
        need = sum(self._growth(slot, tokens) for slot, tokens in targets.items())
        missing = need - self._free()
        if missing > 0:
            missing -= self.reclaim(transaction, missing, wait=now)
        if missing > 0 and now:
            missing -= self._reclaim_surplus(transaction, missing, handle)
        if missing > 0 and need <= self._budget - self._owned - self._parked:
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

    def _unmap(self, transaction: _native.Transaction, slot: int, pages: int) -> int:
        """Plans to unmap `pages` pages that the slot has beyond its length, in columns; returns how many.

        The worker waits for the slot's fences. A slot without one yet keeps its pages.
        """
        unmapped = 0
        needed = self._backed(self._length.get(slot, 0))
        if self._fences.is_open(slot) or self._slot_pages(slot) == self.layout.pages(needed):
            return 0
        self._fences.guard(transaction, slot)
        for kind, space in zip(self.layout.kinds, self._spaces, strict=True):
            surplus = space.columns(slot) - kind.columns(needed)
            columns = min(surplus, -(-(pages - unmapped) // space.lanes))
            if columns > 0:
                space.shrink(transaction, slot, columns)
                unmapped += columns * space.lanes
        self._ready[slot] = min(self._ready[slot], self._extent(slot))
        if slot in self._length:
            self._set_limit(slot)
        self._count(slot, -unmapped)
        return unmapped

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

    def _reclaim_all(self) -> None:
        self._pool.execute(lambda transaction: self.reclaim(transaction, self._parked, wait=True))

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
                lambda transaction: [self._unmap(transaction, slot, self._slot_pages(slot)) for slot in leaving]
            )
        low = self._low_water()
        if self._parked and self._free() < low:
            self._in_background(lambda transaction: self.reclaim(transaction, low - self._free(), wait=False))
        self._prepare_idle_slot()

    def _prepare_idle_slot(self) -> None:
        """Backs the start of the best idle slot, so that the next request's prefill finds its pages mapped."""
        if not self.config.eager_pages or not self._idle:
            return
        slot = max(self._idle, key=self._extent)
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

    def _open_pages(self) -> int:
        """Parked pages that stay until the next step, because kernels that use them may not be launched yet."""
        return sum(self._slot_pages(slot) for slot in self._fences.open_slots if slot in self._idle)

    def _slot_pages(self, slot: int) -> int:
        return sum(space.lanes * space.columns(slot) for space in self._spaces)

    def _count(self, slot: int, pages: int) -> None:
        if slot in self._length:
            self._owned += pages
        else:
            self._parked += pages
        self._peak = max(self._peak, self._owned + self._parked)

    def _free(self) -> int:
        """Pages that a slot can take without any being unmapped."""
        return min(self._budget - self._owned - self._parked, self._pool.free_pages)

    def _low_water(self) -> int:
        return int(self.config.watermark * self._budget)

    def _set_limit(self, slot: int) -> None:
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


def _collected(pool: PagePool, spaces: list[_native.AddressSpace], owns_pool: bool) -> None:
    """Closes what a cache that was dropped without `close` leaves behind."""
    pool.leave_behind(spaces)
    if owns_pool:
        pool.shut()
