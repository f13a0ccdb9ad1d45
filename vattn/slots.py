"""Which pages each slot has: all decisions about memory, taken on the caller's thread, under the pool's lock.

Every slot is contiguous address space for `max_context_len` tokens. What is backed is a prefix of it, counted in
columns (`vattn.layout`); the pool's worker executes what is decided. A slot is *active* (a request has it) or *idle*;
the pages of an idle slot are *parked*, save those of token blocks that are cached or that other slots use
(`vattn.sharing`).

    [0 ........ length ........ ready ........ extent ........ max_context_len)
     live tokens        backed          being backed    address space only
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from vattn import _native
from vattn.config import KVConfig
from vattn.errors import DriverError, InvalidLength, NoFreeSlot, OutOfPages
from vattn.fences import Fences, refusal
from vattn.layout import Layout
from vattn.pool import PagePool, Plan
from vattn.rows import Rows
from vattn.sharing import PageBlock, SharedBlocks, State
from vattn.units import format_bytes


class Slots:
    """The slots of one cache, and what is mapped under them; used under the pool's lock.

    Args:
        config: what the cache was asked to be.
        layout: its geometry.
        budget: the most pages that it may hold.
        pool: where they come from.
    """

    def __init__(self, config: KVConfig, layout: Layout, budget: int, pool: PagePool) -> None:
        self.config = config
        self.layout = layout
        self._budget = budget
        self._pool = pool
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
        self._waits = 0  # times that a step waited for the driver
        self._wait_ns = 0

    # For the pool

    def refresh(self) -> None:
        """Derives counts and limits anew from the books, after decisions were taken back; under the pool's lock."""
        for slot in range(self.layout.slots):
            self._note_growth(slot)
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

    def _execute(self, plan: Plan) -> None:
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
        private = self._private_pages(slot)
        self._private_idle -= private
        self._private_active += private
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
            if self._pending[slot]:
                self._note_growth(slot)
        return waited

    def _note_growth(self, slot: int) -> None:
        """All that the slot has is in place, unless growth in the background is still under way."""
        if self._pool.mapper.passed(self._pending[slot]):
            self._pending[slot] = 0
            self._ready[slot] = self._extent(slot)

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
            backed = self._backed(length)
            # By kind: a slot may have too many pages of one and too few of another.
            if any(
                space.columns(slot) > kind.columns(backed)
                for kind, space in zip(self.layout.kinds, self._spaces, strict=True)
            ):
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

    def _in_background(self, plan: Plan) -> int:
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

    def _give_back(self) -> Plan:
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
