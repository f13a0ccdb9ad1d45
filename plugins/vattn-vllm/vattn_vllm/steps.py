"""The rows of a step: which blocks of vLLM's block tables are shown, and the windows in which kernels find them.

Layers of one KV cache group have a block table in common. vLLM frees the blocks behind a sliding window while their
numbers stay in the row, so a row of such a group is shown from a later block on. The first block moves in strides as
long as the window: the blocks that stay visible are mapped again once per stride, instead of once per block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from vattn import BlockWindows, MappingLimit

# Seconds after which rows for which the kernel had no mappings are shown again, and the most, as they double: a call
# that fails has taken most of a second.
_AGAIN, _LATEST = 1.0, 64.0
_log = logging.getLogger("vattn")

# vLLM's block 0 stands for "no block": nobody reads what it holds.
NULL_BLOCK = 0


@dataclass
class Group:
    """A KV cache group.

    Attributes:
        block_size: tokens per block.
        window: tokens that a query sees, where vLLM frees the blocks behind them; None where it keeps all blocks.
    """

    block_size: int
    window: int | None
    _shown: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int32))

    @property
    def stride(self) -> int:
        """Blocks by which the first one that is shown moves."""
        assert self.window is not None
        return -(-self.window // self.block_size)

    def tokens(self, max_model_len: int, max_chunk: int) -> int:
        """The most tokens of a row that are shown."""
        if self.window is None:
            return max_model_len
        return min(max_model_len, self.window + max_chunk + self.stride * self.block_size)

    def rows(self, table: Tensor, starts: Tensor, ends: Tensor, has: Tensor) -> Rows:
        """The blocks to show.

        Args:
            table: vLLM's block table, `[rows, blocks]` int32.
            starts, ends: the new tokens of each row, `[rows]` int32.
            has: for each block, whether it has memory.
        """
        if self.window is None:
            # numpy's calls on a few numbers take a third of torch's.
            counts = torch.from_numpy(-(-ends.numpy() // self.block_size))
            # Only a run that warms up has rows of the null block.
            return Rows(table, counts, None, null=bool((table.numpy()[:, 0] == NULL_BLOCK).any()))
        counts = (ends + (self.block_size - 1)) // self.block_size
        behind = (starts - self.window + 1).clamp_(min=0) // self.block_size
        first = behind // self.stride * self.stride
        columns = torch.arange(int((counts - first).max()))
        blocks = table.gather(1, (first[:, None] + columns).clamp_(max=table.shape[1] - 1))
        # Blocks that no query sees may have lost their memory; and what once was replaced stays so, since each change
        # maps all blocks after it again.
        unseen = columns < (behind - first)[:, None]
        gone = ~has[blocks.long()]
        before = self._shown[: len(blocks), : len(columns)]
        gone[: before.shape[0], : before.shape[1]] |= before == NULL_BLOCK
        replaced = unseen & gone
        self._shown = blocks.masked_fill_(replaced, NULL_BLOCK)
        # A run that warms up has rows of the null block where queries see it, too.
        null = (blocks == NULL_BLOCK) & (columns < (counts - first)[:, None])
        return Rows(blocks, counts - first, first * self.block_size, null=bool(null.any()))


@dataclass(frozen=True)
class Rows:
    """What a step shows of a group.

    Attributes:
        blocks: `[rows, blocks]` int32.
        counts: `[rows]`, how many blocks of each row count.
        offsets: `[rows]`, the token with which each row begins; None: all with the first.
        null: whether a row has the null block.
    """

    blocks: Tensor
    counts: Tensor
    offsets: Tensor | None
    null: bool


class ShownRows:
    """Shows rows in windows, and remembers them: a step with the rows of the one before, as most steps of decoding are,
    makes no call.
    """

    def __init__(self, windows: BlockWindows) -> None:
        self._windows = windows
        self._last: tuple[Tensor, Tensor, Tensor] | None = None
        self._full_until = self._pause = 0.0

    def show(self, table: Tensor, counts: Tensor) -> Tensor | None:
        """The window of each row of a block table, `[rows]` int32; arguments are those of `BlockWindows.show`. None if
        the kernel has no mappings for it: rows that share blocks need them for each, which no check at the start knows.
        """
        if time.monotonic() < self._full_until:
            return None
        if self._last is not None:
            before, has, found = self._last
            if torch.equal(counts, has) and torch.equal(table, before):
                return found
            self._last = None
        try:
            found = torch.tensor(self._windows.show(table, counts), dtype=torch.int32)
        except MappingLimit as error:
            if not self._pause:
                _log.warning(
                    "while the kernel has no mappings for windows, rows are read by their block tables, more slowly; "
                    """give {"layout": "fused"}, a larger --block-size or a smaller --max-num-seqs. %s""",
                    error,
                )
            self._pause = min(max(_AGAIN, 2 * self._pause), _LATEST)
            self._full_until = time.monotonic() + self._pause
            self.hide()
            return None
        self._pause = 0.0
        self._last = table.clone(), counts, found  # the table is vLLM's, which changes it
        return found

    def forget(self) -> None:
        """To be called when windows may have lost what they showed."""
        self._last = None

    def hide(self) -> None:
        """Has windows show no row, so that what they have is free for others."""
        self.forget()
        self._windows.show([])


class Step:
    """The rows of all groups in one step.

    They are shown by one call, when the first layer asks for windows: windows that a call does not name are free for
    other rows, while the kernels of this step have yet to read them.

    Args:
        shown_rows: what shows them.
        back: gives blocks memory.
    """

    def __init__(self, shown_rows: ShownRows, back: Callable[[list[int]], None]) -> None:
        self._shown_rows = shown_rows
        self._back = back
        self._rows: dict[int, Rows] = {}
        self._found: dict[int, Tensor] | None = {}

    @property
    def shown(self) -> bool:
        return self._found is None or bool(self._found)

    def add(self, group: int, rows: Rows) -> None:
        """Adds the rows of a group, or replaces them."""
        self._rows[group] = rows

    def table(self, group: int) -> Tensor:
        """The blocks of the rows of a group, `[rows, blocks]` int32, for kernels that find no windows."""
        return self._rows[group].blocks

    def windows(self, group: int) -> Tensor | None:
        """The window of each row of a group, `[rows]` int32; None where rows are to be read by their blocks."""
        if not self.shown:
            parts = list(self._rows.values())
            if any(part.null for part in parts):
                self._back([NULL_BLOCK])
            if len(parts) == 1:
                blocks, counts = parts[0].blocks, parts[0].counts
            else:
                width = max(part.blocks.shape[1] for part in parts)
                blocks = torch.cat([pad(part.blocks, (0, width - part.blocks.shape[1])) for part in parts])
                counts = torch.cat([part.counts for part in parts])
            found = self._shown_rows.show(blocks, counts)
            each = None if found is None else found.split([len(part.counts) for part in parts])
            self._found = None if each is None else dict(zip(self._rows, each, strict=True))
        return None if self._found is None else self._found[group]
