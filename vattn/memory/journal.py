"""What a call has decided so far, and how it is taken back.

A call on a cache changes books in several places, and it can end anywhere: with an error, or with an exception from
outside, such as the KeyboardInterrupt of Ctrl-C, at the entry of any function and behind any call. Then it must have
changed all of them or none. So decisions are written into a `Change`: whoever changes the books says first how they are
restored. A change becomes final when the worker gets its transaction, or when the call returns; one that is not final
when the call ends is taken back.

What the books derive from each other (counts, orders, limits) is not restored but derived anew, by `refresh`.
"""

from __future__ import annotations

from collections.abc import Callable

from vattn import _native

Undo = Callable[[], object]


class Change:
    """Decisions that are not final: changes of the books, and operations for the worker.

    Attributes:
        transaction: the operations, with the books of pages and mappings, which the native module restores by itself.
        undo: how all other books are restored, in the order in which they were changed.
    """

    __slots__ = ("transaction", "undo")

    def __init__(self) -> None:
        self.transaction = _native.Transaction()
        self.undo: list[Undo] = []

    def on_revert(self, undo: Undo) -> None:
        """To be called before the books are changed, with what restores them.

        `undo` may run where the change was made, made in part, or not made at all, and it may run twice.
        """
        self.undo.append(undo)

    def revert(self) -> None:
        """Takes the decisions back, last one first. Interrupted, it can be called again."""
        revert(self.transaction, self.undo)


def revert(transaction: _native.Transaction, undo: list[Undo]) -> None:
    """Takes back what a transaction and the changes of books that belong to it decided."""
    transaction.revert()
    while undo:
        undo[-1]()
        undo.pop()


class Call:
    """A call that is under way, under the pool's lock.

    Attributes:
        change: what is decided and not final; None where that is nothing.
        repairs: what has to be done if the call ends with an exception although some of its changes are final, or all:
            give a slot back whose number nobody got, say. Like an undo, each may run twice; and after another thread's
            call.
        failed: it ended with an exception, and is being taken back.
    """

    __slots__ = ("change", "failed", "repairs")

    def __init__(self) -> None:
        self.change: Change | None = None
        self.repairs: list[Undo] = []
        self.failed = False
