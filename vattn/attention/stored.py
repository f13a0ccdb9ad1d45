"""The keys and values of a whole layer as kernels take them: contiguous slots, or blocks with a block table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from vattn.attention.batch import Group, PackedBatch
from vattn.errors import ConfigError

# Tokens per page when contiguous slots are presented to a paged kernel. It is no multiple of any kernel's tile: for
# multiples, kernels load whole tiles, which include rows past the length.
ARITHMETIC_PAGE = 16


@dataclass(frozen=True)
class Blocks:
    """A layer's keys and values in blocks, for paged kernels.

    Attributes:
        key, value: `[num_blocks, block_size, num_kv_heads, *]`; the last stride is 1, others are arbitrary.
        table: `[slots, max_blocks]` int32, the blocks of each slot in the order of its tokens. Entries past a slot's
            length are valid block numbers, but the blocks must not be read.
    """

    key: Tensor
    value: Tensor
    table: Tensor

    @property
    def block_size(self) -> int:
        return self.key.shape[1]

    def tables(self, batch: PackedBatch, group: Group) -> Tensor:
        """The rows of the table for a group, `[n, blocks of max_length]`; the same for all layers of a step."""
        used = -(-group.max_length // self.block_size)
        made: Tensor = batch.once(
            ("tables", group.rows.start, id(self.table)), lambda: self.table[:, :used].index_select(0, group.slots)
        )
        return made


@dataclass(frozen=True)
class Contiguous:
    """A layer's keys and values, contiguous per slot.

    Attributes:
        key, value: `[slots, max_context_len, num_kv_heads, *]`; the last stride is 1, the stride of a slot a multiple
            of that of a token, others are arbitrary. Tokens `[0, length)` of a slot and the kernel's guard rows may be
            read.
        scales: of keys and values that are codes of 8 bits, `[slots, max_context_len, num_kv_heads, 1]` each; or None.
    """

    key: Tensor
    value: Tensor
    scales: tuple[Tensor, Tensor] | None = None

    @cached_property
    def slot_rows(self) -> int:
        """The distance between the starts of two slots, in tokens."""
        rows, rest = divmod(self.key.stride(0), self.key.stride(1))
        assert not rest, "a slot does not begin at a whole row"
        return rows

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values as one sequence, `[rows, num_kv_heads, *]`, in which a slot begins at `slot * slot_rows`.

        Raises:
            ConfigError: more rows than kernels can address, which count them in 32 bits.
        """
        count = (self.key.shape[0] - 1) * self.slot_rows + self.key.shape[1]
        if count >= 2**31:
            raise ConfigError(
                f"{self.key.shape[0]} slots of {self.slot_rows} tokens are over 2^31 rows, which flash kernels "
                "count in 32 bits; lower max_batch_size or max_context_len"
            )
        return self._view(self.key, count), self._view(self.value, count)

    def slot(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `[0, length)` of a slot, `[1, length, num_kv_heads, *]`."""
        return self.key[slot : slot + 1, :length], self.value[slot : slot + 1, :length]

    @cached_property
    def blocks(self) -> Blocks:
        """The same memory as small pages with an arithmetic block table, for kernels that only exist in paged form."""
        page = math.gcd(self.slot_rows, ARITHMETIC_PAGE)
        slots, used, step = self.key.shape[0], -(-self.key.shape[1] // page), self.slot_rows // page
        key, value = (
            self._view(tensor, ((slots - 1) * step + used) * page).view(-1, page, *tensor.shape[2:])
            for tensor in (self.key, self.value)
        )
        return Blocks(key, value, _arithmetic_table(slots, used, step, self.key.device))

    @staticmethod
    def _view(tensor: Tensor, rows: int) -> Tensor:
        return tensor.as_strided((rows, *tensor.shape[2:]), tensor.stride()[1:])


@lru_cache(maxsize=16)
def _arithmetic_table(slots: int, used: int, step: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        first = torch.arange(slots, dtype=torch.int32, device=device)[:, None] * step
        return first + torch.arange(used, dtype=torch.int32, device=device)
