"""Mutations: each takes one mend or one rule out of the library, so that the campaign has something to find.

One file per part of the library. A mutation is a function that patches it; it is called in the child processes that
play. To add one, write it in the file of its part with the decorator, small: what was mended, as it was before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.campaign.campaign import MODES

Patch = Callable[[], None]


@dataclass(frozen=True)
class Mutation:
    """One thing taken out.

    Attributes:
        defect: what was mended and is taken out again: its number in the first campaign from outside, or where the
            second found it; None for a rule that always was.
        what: in words, for the table.
        modes: those that should find it.
    """

    defect: int | str | None
    what: str
    modes: tuple[str, ...]
    patch: Patch


MUTATIONS: dict[str, Mutation] = {}


def mutation(defect: int | str | None, what: str, *modes: str) -> Callable[[Patch], Patch]:
    """Registers a mutation under its function's name."""

    def register(patch: Patch) -> Patch:
        assert patch.__name__ not in MUTATIONS
        assert all(mode in MODES for mode in modes)
        MUTATIONS[patch.__name__] = Mutation(defect, what, modes or tuple(MODES), patch)
        return patch

    return register
