"""What `BlockWindows` promises, without a page or a mapping: what was written to each block, and what windows show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.campaign.contents import MASK, rows

UNKNOWN = 0  # whatever the memory held before
ZERO = 1  # zeros


def numbers(stamp: int, start: int, end: int) -> Any:
    """Numbers for tokens `[start, end)` of a block, other ones for every write."""
    return np.array([(stamp << 20 | token) * 0x9E3779B97F4A7C15 & MASK | 2 for token in range(start, end)], np.uint64)


@dataclass
class BlockModel:
    """One `BlockWindows`.

    Attributes:
        contents: of every backed block, a number per token: what was written there last.
        rows: the rows of the last `show`, and the window of each; until the next one, windows show them.
        zeros: memory that is backed is zero.
    """

    num_blocks: int
    block_size: int
    num_windows: int
    most_blocks: int
    layers: int
    zeros: bool
    contents: dict[int, Any] = field(default_factory=dict)
    rows: list[tuple[int, list[int]]] = field(default_factory=list)

    def back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block not in self.contents:
                self.contents[block] = np.full(self.block_size, ZERO if self.zeros else UNKNOWN, np.uint64)

    def write(self, block: int, start: int, end: int, stamp: int) -> None:
        self.contents[block][start:end] = numbers(stamp, start, end)

    def trim(self, keep: Sequence[int]) -> None:
        """The others lose their memory; a row that had one is shown up to it only."""
        kept = set(keep)
        self.contents = {block: held for block, held in self.contents.items() if block in kept}
        shown = []
        for window, row in self.rows:
            count = next((i for i, block in enumerate(row) if block not in kept), len(row))
            shown.append((window, row[:count]))
        self.rows = shown


def expected(numbers: Any, layer: int, width: int) -> tuple[Any, Any]:
    """The rows of tokens with these numbers, as bytes `[tokens, width]`, and which of them are known."""
    made = rows(numbers, layer, 0, 1, width)[:, 0]
    made[numbers == ZERO] = 0
    return made, numbers != UNKNOWN
