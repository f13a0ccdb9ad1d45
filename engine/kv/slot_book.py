"""Which slots are allocated, for backends that hand them out themselves."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import TypeVar

from vattn.errors import InvalidLength, InvalidSlot, NoFreeSlot
from vattn.integers import shown

from ..checks import whole

State = TypeVar("State")


class SlotBook(dict[int, State]):
    """The state of each allocated slot, by slot; looking up any other slot raises `InvalidSlot`.

    Args:
        limit: number of slots.
        max_model_len: maximum tokens per slot.
    """

    def __init__(self, limit: int, max_model_len: int) -> None:
        super().__init__()
        self.limit = limit
        self.max_model_len = max_model_len
        self._given = 0  # slots from here on have never been taken
        self._returned: list[int] = []  # a heap of the free ones before

    def __missing__(self, slot: int) -> State:
        raise InvalidSlot(f"slot {shown(slot)} is not allocated; those that are: {shown(sorted(self))}")

    def __delitem__(self, slot: int) -> None:
        super().__delitem__(slot)
        heapq.heappush(self._returned, slot)

    def take(self, state: State) -> int:
        """The first free slot, now with `state`.

        Raises:
            NoFreeSlot: there is none.
        """
        if self._returned:
            slot = heapq.heappop(self._returned)
        elif self._given < self.limit:
            slot = self._given
            self._given += 1
        else:
            raise NoFreeSlot(f"all {self.limit} slots are taken; free one, or allow more requests or memory")
        self[slot] = state
        return slot

    def retain(self, slots: Collection[int]) -> None:
        """Free all slots but these, whatever an interrupted call left."""
        kept = {slot: self[slot] for slot in slots}
        super().clear()
        self.update(kept)
        self._given = max(kept, default=-1) + 1
        self._returned = [slot for slot in range(self._given) if slot not in kept]

    def clear(self) -> None:
        self.retain(())

    def checked(self, slot: int) -> int:
        """`slot` as an `int`; raises `InvalidSlot` unless it is allocated."""
        number = whole(slot)
        if number is None:
            raise InvalidSlot(f"slot {shown(slot)} is no whole number; those that are allocated: {shown(sorted(self))}")
        _ = self[number]
        return number

    def checked_lengths(self, lengths: Mapping[int, int]) -> dict[int, int]:
        """`lengths` with slots and tokens as `int`.

        Raises:
            InvalidSlot: a slot is not allocated.
            InvalidLength: not a whole number, below 0, or more than a slot can hold.
        """
        return {self.checked(slot): self.checked_length(length) for slot, length in lengths.items()}

    def checked_length(self, num_tokens: int) -> int:
        """`num_tokens` as an `int`; raises `InvalidLength` unless it is from 0 to `max_model_len`."""
        number = whole(num_tokens)
        if number is None or not 0 <= number <= self.max_model_len:
            raise InvalidLength(
                f"{shown(num_tokens)} tokens in one slot; give a number from 0 to max_model_len={self.max_model_len}"
            )
        return number

    def check(self) -> None:
        """Assert that every slot is either allocated or free."""
        free = set(self._returned)
        assert len(free) == len(self._returned), "a slot is free twice"
        assert free.isdisjoint(self), "a slot is allocated and free"
        assert free | set(self) == set(range(self._given)), "a slot is neither allocated nor free"
        assert self._given <= self.limit
