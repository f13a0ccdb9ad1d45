"""Every kind of assignment of a `Change` is reverted from wherever it was interrupted, and so is its reverting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.campaign.injection import events, interrupted
from vattn.pool.journal import GONE, Change


class Books:
    """One book of each type."""

    def __init__(self) -> None:
        self.number = 1
        self.by_name = {"a": 1, "b": 2}
        self.items = [1, 2, 3, 4]
        self.array = np.arange(6, dtype=np.int32).reshape(2, 3)

    def state(self) -> tuple[Any, ...]:
        return self.number, copy.copy(self.by_name), self.items.copy(), self.array.tolist()


ASSIGNMENTS: dict[str, Callable[[Change, Books], None]] = {
    "an attribute": lambda c, b: c.set(b, "number", 2),
    "an entry that a dict has": lambda c, b: c.put(b.by_name, "a", 5),
    "a new entry of a dict": lambda c, b: c.put(b.by_name, "c", 5),
    "an entry that leaves a dict": lambda c, b: c.put(b.by_name, "a", GONE),
    "an entry that a dict does not have": lambda c, b: c.put(b.by_name, "c", GONE),
    "an item of a list": lambda c, b: c.put(b.items, 2, 5),
    "an item of an array": lambda c, b: c.put(b.array, (0, 1), 9),
    "a row of an array": lambda c, b: c.put(b.array, 1, [7, 8, 9]),
    "a part of a row": lambda c, b: c.put(b.array, (1, slice(1, 3)), [8, 9]),
    "the end of a list": lambda c, b: c.splice(b.items, 1, [9]),
    "more at the end of a list": lambda c, b: c.splice(b.items, 4, [9, 10]),
    "nothing in place of a list": lambda c, b: c.splice(b.items, 0),
    "the same twice": lambda c, b: (c.put(b.by_name, "a", 5), c.put(b.by_name, "a", GONE))[0],
    "a list that grows and shrinks": lambda c, b: (c.splice(b.items, 4, [5]), c.splice(b.items, 2))[0],
}
KINDS = pytest.mark.parametrize("kind", ASSIGNMENTS)


def points(event: str, act: Callable[[], object]) -> int:
    """At how many points `act` can be interrupted."""
    interrupted(act, event, 1 << 30)
    return events()


def all_points(event: str, act: Callable[[Change, Books], object]) -> Iterator[tuple[Change, Books]]:
    """Books and a change after `act` was interrupted, once at each point."""
    change, books = Change(), Books()
    total = points(event, partial(act, change, books))
    for nth in range(1, total + 1):
        change, books = Change(), Books()
        with pytest.raises(KeyboardInterrupt):
            interrupted(partial(act, change, books), event, nth)
        yield change, books


@KINDS
def test_it_assigns(kind: str) -> None:
    books, change = Books(), Change()
    assert change.empty
    ASSIGNMENTS[kind](change, books)
    assert not change.empty
    assert (books.state() != Books().state()) == (kind != "an entry that a dict does not have")


@KINDS
@pytest.mark.parametrize("event", ["call", "check"])
def test_it_is_reverted_from_wherever_it_was_interrupted(kind: str, event: str) -> None:
    count = 0
    for change, books in all_points(event, ASSIGNMENTS[kind]):
        change.revert()
        assert books.state() == Books().state()
        count += 1
    assert count >= 1


@KINDS
@pytest.mark.parametrize("event", ["call", "check"])
def test_reverting_goes_on_where_it_was_interrupted(kind: str, event: str) -> None:
    books, change = Books(), Change()
    ASSIGNMENTS[kind](change, books)
    total = points(event, change.revert)
    assert books.state() == Books().state()
    for nth in range(1, total + 1):
        books, change = Books(), Change()
        ASSIGNMENTS[kind](change, books)
        with pytest.raises(KeyboardInterrupt):
            interrupted(change.revert, event, nth)
        change.revert()
        assert books.state() == Books().state()


@KINDS
def test_an_undo_may_run_twice_and_without_its_assignment(kind: str) -> None:
    books, change = Books(), Change()
    ASSIGNMENTS[kind](change, books)
    undo = change.undo.copy()
    for _ in range(2):
        for restore, *args in reversed(undo):
            restore(*args)
            restore(*args)
        assert books.state() == Books().state()


def test_what_cannot_be_assigned_leaves_what_was_there() -> None:
    books, change = Books(), Change()
    with pytest.raises(ValueError, match="broadcast"):
        change.put(books.array, 1, [1, 2])
    with pytest.raises(IndexError):
        change.put(books.items, 9, 1)
    change.revert()
    assert books.state() == Books().state()
