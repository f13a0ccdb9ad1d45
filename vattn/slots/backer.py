"""Backer: maps pages under slots, when a step needs them or ahead of it, and replaces blocks that are written to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vattn.drivers import Stream
from vattn.errors import DriverError, OutOfPages, VattnError
from vattn.pool.fences import refusal
from vattn.pool.journal import Change, Plan
from vattn.slots.parts import Decisions, Parts
from vattn.slots.reclaimer import Reclaimer

# Of a step: the slots that crossed their limit, and the announced lengths by slot.
Due = tuple[Sequence[int], Mapping[int, int]]

# How many of the idle slots with the largest extent are considered for preparation.
_CANDIDATES = 4


class _CameBack(VattnError):
    """Pages came back to a slot: unmapping them had been decided before, and failed in the background."""


class Backer(Decisions):
    """Grows the slots of one cache.

    Attributes:
        waits: how often a step waited for the driver, for `wait_ns` nanoseconds in total.
    """

    def __init__(self, parts: Parts, reclaimer: Reclaimer) -> None:
        super().__init__(parts)
        self._reclaimer = reclaimer
        config, bands, ledger = parts.config, parts.bands, parts.ledger
        # Parked pages are unmapped if fewer pages are free.
        self._low_water = min(int(config.watermark * ledger.budget), parts.core.low_water)
        # An idle slot with this extent has its eager pages. None with windows, where the extent alone does not tell.
        kinds = bands.kinds if config.eager_pages and not bands.windowed else ()
        self._eager_tokens = max((k.tokens(min(config.eager_pages, k.run_pages)) for k in kinds), default=None)
        self.waits = 0
        self.wait_ns = 0

    # For a step

    def step(
        self, lengths: Mapping[int, int], crossing: Sequence[int], announced: Mapping[int, int], stream: Stream | None
    ) -> Due | None:
        """Sets the lengths of slots and backs all tokens that they need, or changes nothing.

        Args:
            lengths: the new lengths, by slot.
            crossing: those of the slots whose length exceeds their limit.
            announced: lengths of the next step.
            stream: the stream of the kernels that are launched next.

        Returns:
            What `look_ahead` is due for; None if memory must not change in the background now, or need not.

        Raises:
            InvalidLength: a length goes back to a window that was given back.
            OutOfPages, ConfigError, StreamCapturing, DriverError: as `KVCache.step`.
        """
        slots = self._slots
        receding: Sequence[int] = ()  # slots whose queries may come from earlier tokens than before
        if self._bands.windowed:
            before, start = slots.length, slots.start
            receding = [slot for slot, n in lengths.items() if n < before[slot] or n < start[slot]]
            for slot in receding:
                slots.check_seen(slot, lengths[slot])
                if lengths[slot] and not before[slot] and slot not in crossing and slots.leftover(slot, lengths[slot]):
                    crossing = [*crossing, slot]  # shorter than announced, and its window was unmapped already
        used = self._bands.used_tokens
        lowered: Sequence[int] = [slot for slot, end in used.items() if lengths.get(slot, end) < end] if used else ()
        if receding:  # those that begin anew lose the window that launched kernels may read
            anew = (slot for slot in receding if not lengths[slot] and not self._bands.sees(slot, 0))
            lowered = [*lowered, *(slot for slot in anew if slot not in used)]
        if slots.sound:
            lowered = [*{*lowered, *slots.mended(lengths)}]
        given = None if stream is None else self._fences.handle(stream)
        closed = self._fences.launched()
        act = bool(crossing or announced or closed or slots.leaving)
        handle = self._fences.handle(None) if act and stream is None else given
        capturing = self._fences.capturing(handle)
        if crossing:
            self._back({slot: lengths[slot] for slot in crossing}, lengths, lowered, handle, capturing)
        elif lowered or receding:
            slots.set_lengths(self._core.change(), lengths, lowered)
        else:
            slots.advance(lengths)
        for slot in receding:
            slots.set_limit(slot)
        if not act or capturing:
            return None
        if self._bands.windowed:
            self._release_windows(crossing, handle)
        return crossing, announced

    def _back(
        self,
        targets: Mapping[int, int],
        lengths: Mapping[int, int],
        lowered: Sequence[int],
        handle: int | None,
        capturing: bool,
    ) -> None:
        """Sets the lengths and backs every target, or changes nothing.

        Args:
            targets: the lengths of the slots in which pages may have to be mapped.
            lengths: the lengths of all slots of the step.
            lowered: as for `SlotTable.set_lengths`.
            handle: the stream of the caller's kernels.
            capturing: whether that stream is capturing a graph.
        """
        slots = self._slots
        needs = {slot: slots.backed(length) for slot, length in targets.items()}
        begin = time.perf_counter_ns()
        waited = False
        while True:
            waited |= self._await_growth(needs)
            leftover = [slot for slot, length in targets.items() if slots.leftover(slot, length)]
            short = {slot: n for slot, n in needs.items() if n > self._bands.extent(slot) or slot in leftover}
            if not short:
                slots.set_lengths(self._core.change(), lengths, lowered)
                break
            if capturing:
                raise refusal(f"step has to map memory for {len(short)} slots")
            waited = True
            with contextlib.suppress(_CameBack):
                self._grow_now(short, leftover, lengths, lowered, handle)
                break
        if waited:
            self.waits += 1
            self.wait_ns += time.perf_counter_ns() - begin
        for slot in targets:
            slots.set_limit(slot)

    def _grow_now(
        self,
        needs: Mapping[int, int],
        leftover: Sequence[int],
        lengths: Mapping[int, int],
        lowered: Sequence[int],
        handle: int | None,
    ) -> None:
        """Sets the lengths and backs the slots in `needs`, some of which have left-over blocks.

        Raises:
            _CameBack: so have others by now. Nothing changed.
        """
        slots, block_tokens = self._slots, self._bands.block_tokens
        kept = {slot: slots.length[slot] // block_tokens for slot in leftover}

        def plan(change: Change) -> None:
            if any(slot not in kept and slots.leftover(slot, lengths[slot]) for slot in needs):
                raise _CameBack
            slots.set_lengths(change, lengths, lowered)
            for slot, count in kept.items():
                self.keep_only(change, slot, count, handle)
            self.grow(change, needs, now=True, handle=handle)
            for slot in needs:
                self._settle_rewound(change, slot)

        self._replace(plan, kept, handle)
        for slot in needs:
            slots.mapped(slot)

    def _replace(self, plan: Plan, kept: Mapping[int, int], handle: int | None) -> None:
        """Executes a plan after which slots have only their first `kept` blocks and private pages: the live tokens of
        the others are copied to the pages that replace them.
        """
        slots, bands = self._slots, self._bands
        with self._fences.on_stream(handle):
            saved = {
                slot: bands.save(slot, count * bands.block_tokens, slots.length[slot], slots.start[slot])
                for slot, count in kept.items()
                if count * bands.block_tokens < slots.length[slot]
            }
        replaced: list[int] = []

        def planned(change: Change) -> None:
            change.splice(replaced, 0, saved)
            plan(change)

        def write_saved() -> None:
            with self._fences.on_stream(handle):
                for slot in replaced:
                    bands.write(slot, saved[slot])
            replaced.clear()

        if saved:
            self._core.repair(write_saved)
        self._core.execute_reclaiming(planned)
        write_saved()

    def _settle_rewound(self, change: Change, slot: int) -> None:
        """Notes that all blocks behind the slot's length have left the slot, if they have: a step that maps guard rows
        may itself have gone back into a block.
        """
        slots, bands = self._slots, self._bands
        if slots.known[slot].rewound and bands.stop(slot) * bands.block_tokens <= slots.length[slot]:
            slots.know(change, slot, replace(slots.known[slot], rewound=False))

    def _release_windows(self, slots: Sequence[int], handle: int | None) -> None:
        """Queues the unmapping of what has left the windows of these slots; the worker waits for launched kernels."""
        starts, is_open = self._slots.start, self._fences.is_open
        slots = [slot for slot in slots if self._bands.outlived(slot, starts[slot]) and not is_open(slot)]
        if not slots:
            return

        def plan(change: Change) -> None:
            self._fences.guard_running(change, handle)
            for slot in slots:
                self._reclaimer.retire(change, slot)

        self.in_background(plan)
        for slot in slots:
            self._slots.set_limit(slot)

    def look_ahead(self, due: Due) -> None:
        """Queues what the next steps will need, for those slots of a step that have not been freed since."""
        length = self._slots.length
        crossing, announced = due
        self._grow_ahead(
            [slot for slot in crossing if length.get(slot)],
            {slot: tokens for slot, tokens in announced.items() if slot in length},
        )
        self.maintain()
        if crossing:
            self._core.stock()

    def _grow_ahead(self, crossing: Sequence[int], announced: Mapping[int, int]) -> None:
        """Queues the pages that the next steps will need, for slots that crossed their limit and announced lengths."""
        if not self._config.overlap:
            return
        slots, most = self._slots, self._config.max_context_len
        expected = {slot: slots.length[slot] + slots.ahead(slot) for slot in crossing} | dict(announced)
        needs = {
            slot: tokens
            for slot, length in expected.items()
            if (tokens := slots.backed(min(length, most))) > self._bands.extent(slot) and not slots.leftover(slot)
        }
        if not needs:
            return
        # If pages are insufficient, nothing is mapped ahead; the next step reports it if it still needs them.
        with contextlib.suppress(OutOfPages):
            ticket = self._core.submit(lambda change: self.grow(change, needs))
            slots.growing(needs, ticket)

    def maintain(self) -> None:
        """Keeps some pages free, and the start of an idle slot backed, for upcoming requests."""
        slots = self._slots
        leaving = [slot for slot in slots.leaving if slot in slots.idle and self._fences.passed(slot)]
        if leaving:
            self.in_background(lambda change: self._reclaimer.vacate(change, leaving))
        low, ledger = self._low_water, self._ledger
        if ledger.parked and ledger.free < low:
            self.in_background(lambda change: self._reclaimer.unpark(change, low - ledger.free, wait=False))
        self.prepare_idle_slot()

    def prepare_idle_slot(self) -> None:
        """Backs the start of the best idle slot, so that the next request's prefill finds pages mapped."""
        pages_per_run = self._config.eager_pages
        if not pages_per_run:
            return
        idle = self._slots.idle
        empty = idle.largest_empty(_CANDIDATES)
        if empty and self._eager_tokens is not None and idle[empty[0]].extent >= self._eager_tokens:
            return
        slot = next(filter(self._bands.begins, empty), None)
        if slot is None:
            return
        pages = self._bands.eager_growth(slot, pages_per_run)
        if not pages or not self.can_spare(pages):
            return

        if ticket := self.in_background(lambda change: self._bands.grow_eagerly(change, slot, pages_per_run)):
            self._slots.growing([slot], ticket)

    def can_spare(self, pages: int) -> bool:
        """Whether so many pages are free beyond those that are kept free: for what is mapped on a guess."""
        return self._ledger.free - pages >= self._low_water

    # For any call

    def grow(self, change: Change, targets: Mapping[int, int], *, now: bool = False, handle: int | None = None) -> None:
        """Plans the growth of slots to their targets, in tokens. `now` and `handle` as in `Reclaimer.make_room`.

        Raises:
            OutOfPages: there are not enough pages.
        """
        starts = self._slots.start
        need = sum([self._bands.growth(slot, tokens, starts.get(slot, 0)) for slot, tokens in targets.items()])
        self._reclaimer.make_room(change, need, now=now, handle=handle)
        for slot, tokens in targets.items():
            self._bands.grow(change, slot, tokens, starts.get(slot, 0))

    def keep_only(self, change: Change, slot: int, count: int, handle: int | None) -> None:
        """Plans that a slot about to be written to keeps only its first `count` blocks (copy-on-write).

        Raises:
            StreamCapturing: kernels that read the slot may not be launched yet.
        """
        if self._fences.is_open(slot):
            raise refusal(f"slot {slot} needs other pages")
        if self._slots.known[slot].rewound:
            self._fences.guard_running(change, handle)
        if self._bands.used(slot) > count:
            self._bands.use(change, slot, count)
        self._reclaimer.cut(change, slot, count)

    def unshare(self, slot: int, handle: int | None) -> None:
        """Replaces the blocks of an active slot by private pages with the same contents.

        Raises:
            OutOfPages, StreamCapturing, DriverError: nothing changed.
        """
        slots = self._slots
        target = slots.backed(slots.length[slot])

        def plan(change: Change) -> None:
            known = slots.known[slot]
            slots.know(change, slot, replace(known, tokens=known.tokens[:0], keys=[], admitted=0, rewound=True))
            self.keep_only(change, slot, 0, handle)
            self.grow(change, {slot: target}, now=True, handle=handle)
            self._settle_rewound(change, slot)

        self._replace(plan, {slot: 0}, handle)
        slots.mapped(slot)
        slots.set_limit(slot)

    def await_vacated(self) -> None:
        """With `zero_on_free`, waits until what leaves idle slots has left, before a request gets one: if a driver call
        failed, it comes back, and a first step that needs no page would not learn of it. Any change may take cached
        blocks from there, of another cache on the pool too.
        """
        if self._config.zero_on_free:
            self._core.drain()

    def await_idle_growth(self, tokens: int) -> None:
        """Waits for background growth of idle slots that the next request may rely on for `tokens` tokens."""
        slots = [slot for slot in self._slots.pending if slot in self._slots.idle]
        self._await_growth(dict.fromkeys(slots, tokens))

    def note_growths(self) -> None:
        """Notes which background growth has finished: running requests need not stop at it then.

        Raises:
            DriverError: as `Calls.settle`.
        """
        slots = self._slots
        for slot in list(slots.pending):
            self.note_growth(slot)
            if slot in slots.length and slot not in slots.pending:
                slots.set_limit(slot)
        if self._core.mapper.failed:  # since the call began: tickets of growth that failed have passed too
            self._core.settle()

    def note_growth(self, slot: int) -> None:
        """Notes that the slot's whole extent is ready, unless background growth is still under way."""
        if self._core.mapper.passed(self._slots.pending.get(slot, 0)):
            self._slots.mapped(slot)

    def _await_growth(self, needs: Mapping[int, int]) -> bool:
        """Waits for background growth that these slots rely on; returns whether it had to wait."""
        mapper, pending, ready = self._core.mapper, self._slots.pending, self._slots.ready
        tickets = [pending[slot] for slot, tokens in needs.items() if slot in pending and tokens > ready[slot]]
        waited = bool(tickets) and not mapper.passed(max(tickets))
        self._core.wait(max(tickets, default=0))
        for slot in needs:
            if slot in pending:
                self.note_growth(slot)
        return waited

    def in_background(self, plan: Plan) -> int:
        """Queues work that nobody waits for, or executes it at once without `overlap`; its ticket, or 0 without any.

        What the call decided before becomes final, so the call does not fail with this work, which is reverted then.
        """
        self._core.commit()
        run = self._core.submit if self._config.overlap else self._core.execute
        with contextlib.suppress(OutOfPages, DriverError):
            return run(plan)
        return 0
