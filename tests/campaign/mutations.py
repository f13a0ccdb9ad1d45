"""Does the campaign find what it is there for? Each mutation takes one mend or one rule out of the library; the
campaign runs until it finds something, and a table says what, and after how many calls.

    python -m tests.campaign.mutations [NAME ...] --calls 200000

A mutation is a function that patches the library; it is called in the child processes that play. To add one, write it
here with the decorator, small: what was mended, as it was before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.campaign.campaign import MODES, run
from vattn import cache, layout, prefix, rows, sharing, slots

Patch = Callable[[], None]


@dataclass(frozen=True)
class Mutation:
    """One thing taken out.

    Attributes:
        what: in words, for the table.
        modes: those that should find it.
    """

    what: str
    modes: tuple[str, ...]
    patch: Patch


MUTATIONS: dict[str, Mutation] = {}


def mutation(what: str, *modes: str) -> Callable[[Patch], Patch]:
    """Registers a mutation under its function's name."""

    def register(patch: Patch) -> Patch:
        assert all(mode in MODES for mode in modes)
        MUTATIONS[patch.__name__] = Mutation(what, modes or tuple(MODES), patch)
        return patch

    return register


@mutation("fork does not copy what is behind the shared blocks", "random")
def no_copy() -> None:
    rows.Rows.write = lambda self, slot, start, rows: None  # type: ignore[method-assign]


@mutation("the salt is not part of a block's key", "random")
def no_salt() -> None:
    true = prefix.root_key
    for module in (slots, prefix):
        module.root_key = lambda salt: true(b"")  # type: ignore[attr-defined]


@mutation("a length that goes down into blocks leaves them in place", "random")
def no_rewind() -> None:
    slots.Slots._rewind = lambda self, slot: None  # type: ignore[method-assign]


@mutation("a window is a token shorter", "random")
def short_window() -> None:
    def floor(self: Any, start: int) -> int:
        if self.window is None:
            return 0
        return int(max(0, start - self.window + 2) // self.block_tokens * self.block_tokens)

    layout.Band.floor = floor  # type: ignore[method-assign]


@mutation("available_pages promises a page more", "random")
def a_page_more() -> None:
    true = cache.KVCache.available_pages
    cache.KVCache.available_pages = lambda self: true(self) + 1  # type: ignore[method-assign]


@mutation("where a driver call fails, who uses a block is not taken back", "faults")
def no_undo() -> None:
    true = sharing.SharedBlocks.use
    sharing.SharedBlocks.use = (  # type: ignore[method-assign]
        lambda self, slot, end, transaction=None: true(self, slot, end)
    )


@mutation("a prefix that is found may be the whole prompt", "random")
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
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| taken out | found as | mode | after calls |\n| --- | --- | --- | --- |", flush=True)
    found = [_found(name, options.seed, options.calls) for name in _chosen(options.names)]
    return 0 if all(found) else 1


def _chosen(names: Sequence[str]) -> list[str]:
    if unknown := set(names) - set(MUTATIONS):
        raise SystemExit(f"no such mutation: {', '.join(sorted(unknown))}; there are {', '.join(MUTATIONS)}")
    return list(names or MUTATIONS)


def _found(name: str, seed: int, calls: int) -> bool:
    """Prints a line of the table."""
    mutation = MUTATIONS[name]
    summary = run(seed, calls=calls, modes=mutation.modes, shrink_seconds=0, setup=mutation.patch)
    if not summary.findings:
        print(f"| {mutation.what} | **not found** | | {summary.calls:,} |", flush=True)
        return False
    (found,) = summary.findings
    print(f"| {mutation.what} | {found.played.kind} | {found.mode} | {found.calls:,} |", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
