"""Slots of the backends that hand them out themselves."""

from __future__ import annotations

from typing import TypeVar

from vattn.errors import ConfigError, InvalidSlot, NoFreeSlot

State = TypeVar("State")


class Slots(dict[int, State]):
    """What a backend keeps per allocated slot; looking another one up raises `InvalidSlot`.

    Args:
        limit: slots in all.
        max_model_len: most tokens of a slot.
    """

    def __init__(self, limit: int, max_model_len: int) -> None:
        super().__init__()
        self.limit = limit
        self.max_model_len = max_model_len

    def __missing__(self, slot: int) -> State:
        raise InvalidSlot(f"slot {slot} is not allocated; those that are: {sorted(self)}")

    def take(self, state: State) -> int:
        """The first free slot, now with `state`.

        Raises:
            NoFreeSlot: there is none.
        """
        for slot in range(self.limit):
            if slot not in self:
                self[slot] = state
                return slot
        raise NoFreeSlot(f"all {self.limit} slots are taken; free one, or allow more requests or memory")

    def check_length(self, num_tokens: int) -> None:
        """Raise a ConfigError for more tokens than a slot can have."""
        if num_tokens > self.max_model_len:
            raise ConfigError(
                f"{num_tokens} tokens in one slot, but max_model_len is {self.max_model_len}; set it higher"
            )


def check_sizes(**sizes: int) -> None:
    """Raise a ConfigError for a size below 1; values may have no elements, beside keys that are all there is."""
    for name, size in sizes.items():
        least = 0 if name == "v_head_dim" else 1
        if size < least:
            raise ConfigError(f"{name} is {size}; it must be at least {least}")
