"""Mutations of `KVCache` and its parts."""

from __future__ import annotations

import inspect
import textwrap
import threading
from typing import Any

from tests.campaign.mutations import mutation
from vattn import cache, layout, prefix
from vattn.pool import calls, journal, member, worker
from vattn.slots import backer, band, bands, blocks, prefixes, rows, table


@mutation(1, "parked pages pass for blocks that have left a window", "random")
def parked_pages_in_place() -> None:
    true = band.BandPages.in_place
    band.BandPages.in_place = (  # type: ignore[method-assign]
        lambda self, slot, blocks, end: not blocks or true(self, slot, blocks, end)
    )


@mutation(2, "commit publishes windows from before the first computed token", "random")
def origin_ignored() -> None:
    true = blocks.SharedBlocks.publish
    blocks.SharedBlocks.publish = (  # type: ignore[method-assign]
        lambda self, change, slot, keys, first=0: true(self, change, slot, keys)
    )


@mutation(2, "alloc_reqid(start=) does not note where computing begins", "random")
def no_origin() -> None:
    true = table.SlotTable.take
    table.SlotTable.take = (  # type: ignore[method-assign]
        lambda self, change, slot, length, start=None, origin=0: true(self, change, slot, length, start=start)
    )


@mutation(3, "lengths are stored as they come", "fuzz")
def any_length() -> None:
    cache.KVCache._checked_length = (  # type: ignore[method-assign]
        lambda self, value, name, most=-1: value  # type: ignore[return-value]
    )


@mutation(4, "a bad next_lengths raises after the lengths are stored", "fuzz")
def checked_too_late() -> None:
    true = cache.KVCache.step

    def step(self: cache.KVCache, lengths: Any, next_lengths: Any = None, **options: Any) -> None:
        true(self, lengths, **options)
        if next_lengths:
            true(self, {}, next_lengths, **options)

    cache.KVCache.step = step  # type: ignore[method-assign, assignment]


@mutation(8, "how to take back what is executed is kept", "random")
def undo_is_kept() -> None:
    worker.Worker.forget_done = lambda self: None  # type: ignore[method-assign]


@mutation(9, "a call that an exception from outside ends is not taken back", "interrupts")
def no_recovery() -> None:
    calls.Calls._recover = lambda self, error: setattr(self, "call", None)  # type: ignore[method-assign]


@mutation(9, "changes are forgotten instead of reverted", "interrupts")
def no_revert() -> None:
    journal.Change.revert = lambda self: self.undo.clear()  # type: ignore[method-assign]


@mutation(9, "a slot whose number nobody got is not given back", "interrupts")
def lost_slots() -> None:
    table.SlotTable.give_up = lambda self, change, slot: None  # type: ignore[method-assign]


@mutation(10, "a cache joins its pool without the lock", "processes")
def join_without_lock() -> None:
    source = textwrap.dedent(inspect.getsource(member.PoolMember._joining))
    assert "with core.lock:" in source
    source = source.replace("with core.lock:", "if True:")
    exec("from __future__ import annotations\n" + source, vars(member))
    member.PoolMember._joining = vars(member).pop("_joining")  # type: ignore[method-assign]


@mutation(10, "free_reqid inside another call frees at once", "processes")
def free_at_once() -> None:
    def free_reqid(self: cache.KVCache, reqid: int, stream: Any = None) -> None:
        with self._core.lock:
            if self._core.is_inside():
                self._end(self._checked_slot(reqid), self._fences.handle(stream))
            else:
                self._free_now(reqid, stream)

    cache.KVCache.free_reqid = free_reqid  # type: ignore[method-assign]


@mutation(10, "the pool's lock is not re-entrant", "processes")
def plain_lock() -> None:
    true = calls.Calls.__init__

    def init(self: calls.Calls, *args: Any, **options: Any) -> None:
        true(self, *args, **options)
        self.lock = threading.Lock()  # type: ignore[assignment]

    calls.Calls.__init__ = init  # type: ignore[method-assign]


@mutation(None, "fork does not copy what is behind the shared blocks", "random")
def no_copy() -> None:
    rows.TokenRows.write = lambda self, slot, start, rows: None  # type: ignore[method-assign]


@mutation(None, "fork does not wait until the pages that it copies to are mapped", "random")
def no_wait() -> None:
    backer.Backer.await_idle_growth = lambda self, tokens: None  # type: ignore[method-assign]


@mutation(None, "the salt is not part of a block's key", "random")
def no_salt() -> None:
    true = prefix.root_key
    for module in (prefixes, prefix):
        module.root_key = lambda salt: true(b"")  # type: ignore[attr-defined]


@mutation(None, "a length that goes down into blocks leaves them in place", "random")
def no_rewind() -> None:
    table.SlotTable._rewind = lambda self, change, slot: None  # type: ignore[method-assign]


@mutation(None, "a window is a token shorter", "random")
def short_window() -> None:
    def floor(self: Any, start: int) -> int:
        if self.window is None:
            return 0
        return int(max(0, start - self.window + 2) // self.block_tokens * self.block_tokens)

    layout.Band.floor = floor  # type: ignore[method-assign]


@mutation(None, "available_pages promises a page more", "random")
def a_page_more() -> None:
    true = cache.KVCache.available_pages
    cache.KVCache.available_pages = lambda self: true(self) + 1  # type: ignore[method-assign]


@mutation(None, "where a driver call fails, who uses a block is not taken back", "faults")
def no_undo() -> None:
    true = bands.Bands.use
    bands.Bands.use = (  # type: ignore[method-assign]
        lambda self, change, slot, count: true(self, journal.Change(), slot, count)
    )


@mutation(None, "a prefix that is found may be the whole prompt", "random")
def a_whole_prompt() -> None:
    true = prefixes.Prefixes.find
    prefixes.Prefixes.find = (  # type: ignore[method-assign]
        lambda self, token_ids, salt: true(self, [*token_ids[:-1], 0, 0], salt)
    )


@mutation(None, "what a request left behind its last block is found when its pages have gone", "random")
def kept_for_good() -> None:
    table.SlotTable._has = lambda self, slot, kept: True  # type: ignore[method-assign]


@mutation(None, "a pool whose closing was interrupted keeps its thread", "interrupts")
def stopped_once() -> None:
    worker.Worker.stop = lambda self: self.finalizer()  # type: ignore[method-assign]
