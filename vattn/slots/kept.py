"""KeptRows: what requests that ended left behind their last whole block.

Blocks are what slots share; rows behind them lie in pages of one slot. While these stay mapped in it, a request that
goes on with the same tokens finds them there: the next turn of a conversation computes what is new, and not the rest of
a block, which may be thousands of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vattn.pool.journal import GONE, Change
from vattn.prefix import Key, TokenIds


@dataclass(frozen=True)
class Kept:
    """Rows in an idle slot.

    Attributes:
        parent: the key of the block before them, or the root key.
        start: the first of them, at the end of that block.
        tokens: their tokens, at least one; never modified in place.
    """

    parent: Key
    start: int
    tokens: TokenIds

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class KeptRows:
    """The kept rows of all idle slots; used under the pool's lock.

    Attributes:
        rows: by slot.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Kept] = {}
        # Slots by what all rows that can go on there start with; the latest last.
        self._slots: dict[tuple[Key, int], dict[int, None]] = {}

    def keep(self, change: Change, slot: int, kept: Kept) -> None:
        """Notes rows of a slot that becomes idle."""
        change.put(self.rows, slot, kept)
        self._enter(slot, kept)

    def forget(self, change: Change, slot: int) -> None:
        """Forgets the rows of a slot, if it has any."""
        if slot in self.rows:
            kept = self.rows[slot]
            change.put(self.rows, slot, GONE)
            self._leave(slot, kept)

    def lost(self, slot: int) -> None:
        """Forgets the rows of a slot from which their pages have gone; nothing brings them back."""
        self._leave(slot, self.rows.pop(slot))

    def common(self, slot: int, parent: Key, tokens: Sequence[int]) -> int:
        """How many of the tokens after a block the slot, which keeps rows, has rows of."""
        kept = self.rows[slot]
        if kept.parent != parent:
            return 0
        pairs = zip(kept.tokens, tokens, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(kept.tokens), len(tokens)))

    def holders(self, parent: Key, tokens: Sequence[int], limit: int) -> Iterator[int]:
        """Up to `limit` slots that have a row of the first of these tokens, the latest first."""
        slots: Iterable[int] = self._slots.get((parent, tokens[0]), ()) if tokens else ()
        return itertools.islice(reversed(list(slots)), limit)

    def refresh(self) -> None:
        """Recomputes what is derived from the rows."""
        self._slots.clear()
        for slot, kept in self.rows.items():
            self._enter(slot, kept)

    def check(self) -> None:
        """Asserts that what is derived from the rows agrees with them."""
        listed = {slot for slots in self._slots.values() for slot in slots}
        assert listed == set(self.rows), "kept rows are not found, or found where there are none"
        for slot, kept in self.rows.items():
            assert slot in self._slots[kept.parent, kept.tokens[0]], "kept rows are found by another start"

    def _enter(self, slot: int, kept: Kept) -> None:
        self._slots.setdefault((kept.parent, kept.tokens[0]), {})[slot] = None

    def _leave(self, slot: int, kept: Kept) -> None:
        slots = self._slots[kept.parent, kept.tokens[0]]
        del slots[slot]
        if not slots:
            del self._slots[kept.parent, kept.tokens[0]]
