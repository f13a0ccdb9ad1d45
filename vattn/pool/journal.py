"""What a call has decided so far, and how it is reverted.

A call on a cache changes several books and can end at any point: with an error, or with an exception raised from
outside, such as the KeyboardInterrupt of Ctrl-C, at the entry of any function and after any call. It must then have
changed either all books or none. So decisions are made through a `Change`, which records what was there and then
stores. A change becomes final when its transaction is handed to the worker, or when the call returns; a change that is
not final when the call fails is reverted.

State that is derived from other books (counts, orders, limits) is not restored but recomputed, by `refresh`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from vattn import _native

# A function that restores something, and its arguments.
Undo = tuple[Any, ...]

# What `Change.put` stores in a dict to have no entry there.
GONE: Final[Any] = object()


class Change:
    """Decisions that are not final: changes to the books, and operations for the worker.

    Attributes:
        transaction: the operations; it also restores the native module's books of pages and mappings.
        undo: what restores all other books, in the order in which these were changed. Each may run although its change
            was made in part or not at all, and may run twice.
        for_books: whether the books alone change, and nobody executes the transaction.
    """

    __slots__ = ("for_books", "transaction", "undo")

    def __init__(self, *, for_books: bool = False) -> None:
        self.for_books = for_books
        self.transaction = _native.Transaction()
        self.undo: list[Undo] = []

    def put(self, books: Any, key: Any, value: Any) -> None:
        """`books[key] = value`, in a dict, a list or an array; `GONE` removes the entry of a dict."""
        before = books.get(key, GONE) if type(books) is dict else books[key]
        if isinstance(before, np.ndarray):  # a view
            before = before.copy()
        self.undo.append((_put, books, key, before))
        _put(books, key, value)

    def set(self, owner: object, name: str, value: object) -> None:
        """`owner.name = value`."""
        self.undo.append((setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def splice(self, items: list[Any], start: int, new: Iterable[Any] = ()) -> None:
        """`items[start:] = new`."""
        self.undo.append((items.__setitem__, slice(start, None), items[start:]))
        items[start:] = new

    def on_revert(self, undo: Callable[..., object], *args: object) -> None:
        """Registers a function, with its arguments, that restores what is more than an assignment. To be called before
        the books are changed.
        """
        self.undo.append((undo, *args))

    @property
    def empty(self) -> bool:
        """Whether nothing was decided."""
        return not self.undo and self.transaction.empty

    def revert(self) -> None:
        """Reverts the decisions, last one first. If interrupted, it can be called again."""
        revert(self.transaction, self.undo)


# Makes decisions: changes the books and adds operations to the transaction. Its result is ignored.
Plan = Callable[[Change], object]


def revert(transaction: _native.Transaction, undo: list[Undo]) -> None:
    """Reverts a transaction and the changes to other books that belong to it."""
    transaction.revert()
    while undo:
        restore, *args = undo[-1]
        restore(*args)
        undo.pop()


def _put(books: Any, key: Any, value: Any) -> None:
    if value is GONE:
        books.pop(key, None)
    else:
        books[key] = value
