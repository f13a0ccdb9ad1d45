"""Does the campaign find what it is there for? Each mutation takes one mend or one rule out of the library; the
campaign runs until it finds something, and a table says what, and after how many calls.

    python -m tests.campaign.mutations [NAME ...] --calls 200000 --seed 0 1

A mutation is a function that patches the library; it is called in the child processes that play. To add one, write it
here with the decorator, small: what was mended, as it was before.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.campaign.campaign import MODES, run
from vattn import cache, layout, prefix
from vattn.memory import bands, journal, pool, rows, sharing, slots

Patch = Callable[[], None]


@dataclass(frozen=True)
class Mutation:
    """One thing taken out.

    Attributes:
        defect: of the campaign before this one, whose mend it takes out; None for a rule that always was.
        what: in words, for the table.
        modes: those that should find it.
    """

    defect: int | None
    what: str
    modes: tuple[str, ...]
    patch: Patch


MUTATIONS: dict[str, Mutation] = {}


def mutation(defect: int | None, what: str, *modes: str) -> Callable[[Patch], Patch]:
    """Registers a mutation under its function's name."""

    def register(patch: Patch) -> Patch:
        assert all(mode in MODES for mode in modes)
        MUTATIONS[patch.__name__] = Mutation(defect, what, modes or tuple(MODES), patch)
        return patch

    return register


@mutation(1, "parked pages pass for blocks that have left a window", "random")
def parked_pages_in_place() -> None:
    true = bands.BandPages.in_place
    bands.BandPages.in_place = (  # type: ignore[method-assign]
        lambda self, slot, blocks, end: not blocks or true(self, slot, blocks, end)
    )


@mutation(2, "commit publishes windows from before the first computed token", "random")
def origin_ignored() -> None:
    true = sharing.SharedBlocks.publish
    sharing.SharedBlocks.publish = (  # type: ignore[method-assign]
        lambda self, change, slot, keys, first=0: true(self, change, slot, keys)
    )


@mutation(2, "alloc_reqid(start=) does not note where computing begins", "random")
def no_origin() -> None:
    true = slots.Slots._take
    slots.Slots._take = (  # type: ignore[method-assign]
        lambda self, change, slot, length, start=None, origin=0: true(self, change, slot, length, start)
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
    pool.PagePool._forget_done = lambda self: None  # type: ignore[method-assign]


@mutation(9, "a call that an exception from outside ends is not taken back", "interrupts")
def no_recovery() -> None:
    pool.PagePool.recover = lambda self, error: setattr(self, "call", None)  # type: ignore[method-assign]


@mutation(9, "changes are forgotten instead of reverted", "interrupts")
def no_revert() -> None:
    pool.Change.revert = lambda self: self.undo.clear()  # type: ignore[method-assign]


@mutation(9, "a slot whose number nobody got is not given back", "interrupts")
def lost_slots() -> None:
    slots.Slots._give_up = lambda self, slot: None  # type: ignore[method-assign]


@mutation(10, "a cache joins its pool without the lock", "processes")
def join_without_lock() -> None:
    source = textwrap.dedent(inspect.getsource(cache.KVCache.__init__))
    for held, free in (("with pool.lock:", "if True:"), ("super()", "super(KVCache, self)")):
        assert held in source
        source = source.replace(held, free)
    exec("from __future__ import annotations\n" + source, vars(cache))
    cache.KVCache.__init__ = vars(cache).pop("__init__")  # type: ignore[method-assign]


@mutation(10, "free_reqid inside another call frees at once", "processes")
def free_at_once() -> None:
    def free_reqid(self: cache.KVCache, reqid: int, stream: Any = None) -> None:
        with self._pool.lock:
            if self._pool.is_inside():
                self._end(self._checked_slot(reqid), self._fences.handle(stream))
            else:
                self._free_now(reqid, stream)

    cache.KVCache.free_reqid = free_reqid  # type: ignore[method-assign]


@mutation(10, "the pool's lock is not re-entrant", "processes")
def plain_lock() -> None:
    true = pool.PagePool.__init__

    def init(self: pool.PagePool, *args: Any, **options: Any) -> None:
        true(self, *args, **options)
        self.lock = threading.Lock()  # type: ignore[assignment]

    pool.PagePool.__init__ = init  # type: ignore[method-assign]


@mutation(None, "fork does not copy what is behind the shared blocks", "random")
def no_copy() -> None:
    rows.Rows.write = lambda self, slot, start, rows: None  # type: ignore[method-assign]


@mutation(None, "fork does not wait until the pages that it copies to are mapped", "random")
def no_wait() -> None:
    true = slots.Slots._await_growth
    slots.Slots._await_growth = (  # type: ignore[method-assign]
        lambda self, needs: any(slot in self._length for slot in needs) and true(self, needs)
    )


@mutation(None, "the salt is not part of a block's key", "random")
def no_salt() -> None:
    true = prefix.root_key
    for module in (slots, prefix):
        module.root_key = lambda salt: true(b"")  # type: ignore[attr-defined]


@mutation(None, "a length that goes down into blocks leaves them in place", "random")
def no_rewind() -> None:
    slots.Slots._rewind = lambda self, change, slot: None  # type: ignore[method-assign]


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
    true = sharing.SharedBlocks.use
    sharing.SharedBlocks.use = (  # type: ignore[method-assign]
        lambda self, change, slot, end: true(self, journal.Change(), slot, end)
    )


@mutation(None, "a prefix that is found may be the whole prompt", "random")
def a_whole_prompt() -> None:
    true = slots.Slots._find
    slots.Slots._find = (  # type: ignore[method-assign]
        lambda self, token_ids, salt: true(self, [*token_ids[:-1], 0, 0], salt)
    )


def main() -> int:
    """Runs the campaign under every mutation named, or all; the exit status says whether each was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MUTATIONS)}")
    parser.add_argument("--calls", type=int, default=200_000, help="give up after so many")
    parser.add_argument("--seconds", type=float, default=300, help="give up after so many")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or more, each a run of its own")
    options = parser.parse_args()
    print("| defect | taken out | mode | found as | after calls | seconds |\n" + "| --- " * 6 + "|", flush=True)
    found = [_found(MUTATIONS[name], options) for name in _chosen(options.names)]
    return 0 if all(found) else 1


def _chosen(names: Sequence[str]) -> list[str]:
    if unknown := set(names) - set(MUTATIONS):
        raise SystemExit(f"no such mutation: {', '.join(sorted(unknown))}; there are {', '.join(MUTATIONS)}")
    return list(names or MUTATIONS)


def _found(mutation: Mutation, options: argparse.Namespace) -> bool:
    """Prints a line of the table; whether every seed found it."""
    runs = [
        run(
            seed,
            calls=options.calls,
            seconds=options.seconds,
            modes=mutation.modes,
            shrink_seconds=0,
            setup=mutation.patch,
        )
        for seed in options.seed
    ]
    kinds = [summary.findings[0].played.kind if summary.findings else "**not found**" for summary in runs]
    cells = (
        mutation.defect or "",
        mutation.what,
        ", ".join(mutation.modes),
        "; ".join(str(kind).replace("AssertionError: ", "") for kind in dict.fromkeys(kinds)),
        " / ".join(f"{summary.calls:,}" for summary in runs),
        " / ".join(f"{summary.seconds:.1f}" for summary in runs),
    )
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return all(summary.findings for summary in runs)


if __name__ == "__main__":
    sys.exit(main())
