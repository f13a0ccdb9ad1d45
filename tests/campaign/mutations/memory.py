"""Mutations of what caches and block windows have in common: their pool, their slots' pages, and what calls accept."""

from __future__ import annotations

from typing import Any

import torch

from tests.campaign.mutations import mutation
from vattn import block_windows
from vattn.pool import calls, core, member, pool
from vattn.slots import backer, band, prefixes, reclaimer, table
from vattn.windows import shown


@mutation("zero_on_free", "what has to leave a slot is forgotten once a request has it", "faults")
def leaving_forgotten() -> None:
    true = table.SlotTable.refresh

    def refresh(self: table.SlotTable, passed: Any) -> None:
        for slot in [slot for slot in self.leaving if slot in self.length]:
            del self.leaving[slot]
        true(self, passed)

    table.SlotTable.refresh = refresh  # type: ignore[method-assign]


@mutation("zero_on_free", "pages that come back to a slot that was vacated stay", "faults")
def comes_back_unmarked() -> None:
    reclaimer.Reclaimer._guard = (  # type: ignore[method-assign]
        lambda self, change, slot: lambda: self._fences.guard(change, slot)
    )


@mutation("zero_on_free", "a slot is given away before what has to leave it has left", "faults")
def given_away_early() -> None:
    backer.Backer.await_vacated = lambda self: None  # type: ignore[method-assign]


@mutation("zero_on_free", "blocks that only requests share stay in idle slots", "random")
def shared_blocks_stay() -> None:
    def kept(self: band.BandPages, slot: int) -> int:
        count = self.shared.cached_prefix(slot)
        return self.shared[slot].start + count if count else 0

    band.BandPages.kept = kept  # type: ignore[method-assign]


@mutation("zero_on_free", "retracted blocks stay in idle slots", "random")
def retracted_blocks_stay() -> None:
    def retract(self: prefixes.Prefixes, change: Any, slot: int) -> None:
        table = self._slots
        before = dict(table.leaving)
        true(self, change, slot)
        table.leaving.clear()
        table.leaving.update(before)

    true = prefixes.Prefixes.retract
    prefixes.Prefixes.retract = retract  # type: ignore[method-assign]


@mutation(
    "zero_on_free", "cached blocks that a request does not use stay for a first step that needs no page", "random"
)
def unused_blocks_stay() -> None:
    table.SlotTable.note_left_over = lambda self, change, slot: None  # type: ignore[method-assign]


@mutation("KVCache", "a step is planned again with what was left over before a failure", "faults")
def stale_left_over() -> None:
    def grow_now(self: backer.Backer, needs: Any, leftover: Any, lengths: Any, lowered: Any, handle: Any) -> None:
        kept = {slot: self._slots.length[slot] // self._bands.block_tokens for slot in leftover}

        def plan(change: Any) -> None:
            self._slots.set_lengths(change, lengths, lowered)
            for slot, count in kept.items():
                self.keep_only(change, slot, count, handle)
            self.grow(change, needs, now=True, handle=handle)
            for slot in needs:
                self._settle_rewound(change, slot)

        self._replace(plan, kept, handle)
        for slot in needs:
            self._slots.mapped(slot)

    backer.Backer._grow_now = grow_now  # type: ignore[method-assign]


@mutation("mappings", "a close whose undoing failed too counts as done", "faults")
def closed_although_refused() -> None:
    def leave_pool(self: member.PoolMember) -> None:
        give_back = self._give_back()

        def plan(change: Any) -> None:
            change.set(self, "_closed", True)
            give_back(change)

        if self._core.is_broken():
            self._core.leave_broken(self._tenant, plan)
        else:
            self._leave_by(plan)

    member.PoolMember._leave_pool = leave_pool  # type: ignore[method-assign]


@mutation("forked child", "tensors are handed out in a forked child", "random", "windows")
def tensors_in_children() -> None:
    member.PoolMember._check_usable = lambda self: self._check_open()  # type: ignore[method-assign]


@mutation("mappings", "an undo that failed is not tried again", "faults")
def broken_for_good() -> None:
    calls.Calls.is_broken = lambda self: self.worker.mapper.broken  # type: ignore[method-assign]


@mutation("BlockWindows", "counts are cut to whole numbers of 32 bits", "windows")
def counts_truncated() -> None:
    block_windows._whole = (  # type: ignore[assignment]
        lambda counts: torch.as_tensor(counts).to("cpu", torch.int32).to(torch.int64)
    )


@mutation("BlockWindows", "a budget of 0 means all", "windows")
def no_budget_is_all() -> None:
    true = block_windows.parse_bytes
    block_windows.parse_bytes = lambda value, what: true(value or "1GiB", what)


@mutation("BlockWindows", "any guard is taken", "windows")
def any_guard() -> None:
    for module in (block_windows, pool):
        module.check_choice = lambda name, value, choices: None  # type: ignore[attr-defined]


@mutation("BlockWindows", "check() rebuilds the indices that it compares with", "windows")
def check_rebuilds() -> None:
    def check(self: shown.ShownBlocks, native: Any) -> None:
        true(self, native)
        self.refresh()

    def refresh(self: shown.ShownBlocks) -> None:
        self._idle = self._without_row()
        self.backed_blocks = len(self.homes.occupied())
        self._first, self._last, self._filed = {}, {}, {}
        for window in range(self.windows.slots):
            self._file(window)

    true = shown.ShownBlocks.check
    shown.ShownBlocks.check = check  # type: ignore[method-assign]
    shown.ShownBlocks.refresh = refresh  # type: ignore[method-assign]


@mutation("BlockWindows", "a close that was interrupted cannot be repeated", "windows")
def close_once() -> None:
    block_windows.BlockWindows._forget = lambda self: delattr(self, "_shown")  # type: ignore[method-assign]


@mutation(None, "a window keeps showing a block whose memory is given back", "windows")
def trimmed_blocks_stay() -> None:
    def drop(self: shown.ShownBlocks, change: Any, blocks: Any, handle: Any) -> None:
        for block in blocks:
            self.homes.shrink(change.transaction, block, self._block_pages)
            self.backed_blocks -= 1

    shown.ShownBlocks.drop = drop  # type: ignore[method-assign]


@mutation(None, "rows are compared with windows by their last block alone", "windows")
def compared_by_the_end() -> None:
    true = shown.ShownBlocks.common

    def common(self: shown.ShownBlocks, table: Any, counts: Any, rows: Any, windows: Any) -> list[int]:
        found = true(self, table, counts, rows, windows)
        for i, (row, window) in enumerate(zip(rows, windows, strict=True)):
            count = int(counts[row])
            if count and self.shown_in(window) >= count and self._shown[window, count - 1] == table[row, count - 1]:
                found[i] = count
        return found

    shown.ShownBlocks.common = common  # type: ignore[method-assign]


@mutation(None, "what was attached is counted even if it failed", "windows")
def counted_at_once() -> None:
    true = shown.ShownBlocks.show

    def show(self: shown.ShownBlocks, change: Any, window: int, keep: int, blocks: Any) -> None:
        true(self, change, window, keep, blocks)
        attached = self.attached
        change.undo.insert(0, (setattr, self, "attached", attached))

    shown.ShownBlocks.show = show  # type: ignore[method-assign]


@mutation("pool", "a cache leaves without waiting for what it has planned before", "faults")
def leaves_at_once() -> None:
    core.Core._execute_last = core.Core.execute  # type: ignore[method-assign, assignment]
