"""What a call has decided so far, and how it is reverted.

A call on a cache changes several books and can end at any point: with an error, or with an exception raised from
outside, such as the KeyboardInterrupt of Ctrl-C, at the entry of any function and after any call. It must then have
changed either all books or none. So decisions are recorded in a `Change`: code that changes the books first registers
how to restore them. A change becomes final when its transaction is handed to the worker, or when the call returns; a
change that is not final when the call fails is reverted.

State that is derived from other books (counts, orders, limits) is not restored but recomputed, by `refresh`.
"""

from __future__ import annotations

from collections.abc import Callable

from vattn import _native

Undo = Callable[[], object]


class Change:
    """Decisions that are not final: changes to the books, and operations for the worker.

    Attributes:
        transaction: the operations; it also restores the native module's books of pages and mappings.
        undo: functions that restore all other books, in the order in which these were changed.
    """

    __slots__ = ("transaction", "undo")

    def __init__(self) -> None:
        self.transaction = _native.Transaction()
        self.undo: list[Undo] = []

    def on_revert(self, undo: Undo) -> None:
        """Registers a function that restores the books. To be called before the books are changed.

        `undo` may run after the change was made, in whole, in part or not at all, and it may run twice.
        """
        self.undo.append(undo)

    @property
    def empty(self) -> bool:
        """Whether nothing was decided."""
        return not self.undo and self.transaction.empty

    def revert(self) -> None:
        """Reverts the decisions, last one first. If interrupted, it can be called again."""
        revert(self.transaction, self.undo)


def revert(transaction: _native.Transaction, undo: list[Undo]) -> None:
    """Reverts a transaction and the changes to other books that belong to it."""
    transaction.revert()
    while undo:
        undo[-1]()
        undo.pop()


# Makes decisions: changes the books and adds operations to the transaction. Its result is ignored.
Plan = Callable[[Change], object]
