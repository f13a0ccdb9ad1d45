"""Shape: where the blocks and windows of a block table lie, which layout and page size fit, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from vattn import drivers
from vattn.errors import ConfigError, VattnError
from vattn.groups import MOST_ADDRESSES, MOST_TOKENS, check_choice, check_int
from vattn.integers import shown
from vattn.units import format_bytes

BlockLayout = Literal["layered", "fused"]

# Of the kernel's mappings: what the rest of the process needs.
_OTHER_MAPPINGS = 4096

# Few enough that a typing error does not compute or allocate for long.
MOST_BLOCKS = 2**31 - 1  # block tables have 32 bits
_MOST_DIMENSIONS = 16  # of what a token stores
_MOST_SHOWN = 2**28  # blocks in all windows


@dataclass(frozen=True)
class Shape:
    """Where blocks lie.

    Attributes:
        layout: "layered": one tensor per layer; "fused": one tensor, in which a token's layers are neighbours.
        row: the shape of what a token stores in a layer.
    """

    layout: BlockLayout
    num_layers: int
    num_blocks: int
    block_size: int
    row: tuple[int, ...]
    dtype: torch.dtype
    page_size: int
    num_windows: int
    window_blocks: int

    @property
    def tensors(self) -> int:
        return 1 if self.layout == "fused" else self.num_layers

    @property
    def row_elements(self) -> int:
        """Elements between two tokens."""
        return math.prod(self.row) * (self.num_layers if self.layout == "fused" else 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in one tensor."""
        return self.block_size * self.row_elements * self.dtype.itemsize

    @property
    def block_pages(self) -> int:
        """Pages of a block in one tensor."""
        return self.block_bytes // self.page_size

    @property
    def reserved_bytes(self) -> int:
        """Addresses of all blocks and windows."""
        return self.tensors * self.block_bytes * (self.num_blocks + self.num_windows * self.window_blocks)

    @property
    def mappings(self) -> int:
        """The most that the kernel may have to keep while no two pages are neighbours and windows share no blocks."""
        windows = self.num_windows * self.window_blocks
        return self.tensors * self.block_pages * (self.num_blocks + min(windows, self.num_blocks))


def checked_row(row: Sequence[int]) -> tuple[int, ...]:
    """Validates the shape of what a token stores."""
    sizes = listed(islice(row, _MOST_DIMENSIONS + 1) if isinstance(row, Iterable) else row, "row", ConfigError)
    if not 1 <= len(sizes) <= _MOST_DIMENSIONS:
        raise ConfigError(
            f"row={shown(row)} stores nothing; give the shape of what a token stores in a layer"
            if not sizes
            else f"row={shown(row)} has more than {_MOST_DIMENSIONS} dimensions"
        )
    return tuple(check_int("row", size, at_least=1, at_most=MOST_TOKENS) for size in sizes)


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    """Validates that bytes can be seen as elements of a type."""
    try:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{type(dtype).__name__} is no torch.dtype")
        torch.empty(16, dtype=torch.uint8, device="cpu").view(dtype).clone()
    except Exception as error:
        raise ConfigError(f"dtype={shown(dtype)} is no torch.dtype of plain numbers") from error
    return dtype


def resolve(
    layout: str, page_size: int | Literal["auto"], device: drivers.Device, *, row: tuple[int, ...], **sizes: Any
) -> Shape:
    """Chooses layout and page size where they are "auto".

    Raises:
        ConfigError: a block is not whole pages, or there are too many mappings.
    """
    check_choice("layout", layout, ("layered", "fused", "auto"))
    pages = device.page_sizes if page_size == "auto" else (device.check_page_size(page_size),)
    names: tuple[BlockLayout, ...] = ("layered", "fused") if layout == "auto" else (layout,)  # type: ignore[assignment]
    tried = [Shape(layout=name, page_size=min(pages), row=row, **sizes) for name in names]
    fitting = [shape for shape in tried if shape.block_bytes % shape.page_size == 0]
    if not fitting:
        shape = tried[-1]
        token_bytes = shape.block_bytes // shape.block_size
        tokens = math.lcm(token_bytes, shape.page_size) // token_bytes
        raise ConfigError(
            f"a block of {shape.block_size} tokens takes {format_bytes(shape.block_bytes)} in a tensor of layout "
            f"{shape.layout!r}, which is not a whole number of pages of {format_bytes(shape.page_size)}; use a "
            f"block_size that is a multiple of {tokens}" + (", or layout='fused'" if shape.layout == "layered" else "")
        )
    smallest = min(fitting, key=lambda shape: shape.reserved_bytes)
    if smallest.reserved_bytes > MOST_ADDRESSES or smallest.num_windows * smallest.window_blocks > _MOST_SHOWN:
        raise ConfigError(
            f"{smallest.num_blocks} blocks and {smallest.num_windows} windows of {smallest.window_blocks} blocks need "
            f"{format_bytes(smallest.reserved_bytes)} of addresses; a process has {format_bytes(MOST_ADDRESSES)}, and "
            f"windows show at most {_MOST_SHOWN} blocks: use fewer blocks or windows, or a smaller max_context_len"
        )
    limit = device.mapping_limit()
    for shape in fitting:
        largest = max(size for size in pages if shape.block_bytes % size == 0)
        chosen = Shape(layout=shape.layout, page_size=largest, row=row, **sizes)
        if limit is None or chosen.mappings <= limit - _OTHER_MAPPINGS:
            return chosen
    raise ConfigError(
        f"{chosen.num_blocks} blocks in {chosen.tensors} tensors may take {chosen.mappings} mappings, but the kernel "
        f"allows {limit} (vm.max_map_count) to the whole process; use larger or fewer blocks"
        + (", layout='fused'" if chosen.layout == "layered" else "")
        + f", or raise it: sysctl vm.max_map_count={2 * chosen.mappings}"
    )


def listed(values: Iterable[Any], name: str, error: type[VattnError]) -> list[Any]:
    """The values of a caller's sequence, in their order; raises `error` if there is none."""
    try:
        if isinstance(values, str | bytes | Set | Mapping):
            raise TypeError(f"{type(values).__name__} is no sequence of numbers")
        return list(values)
    except Exception as cause:  # iterating over a caller's object may raise anything
        raise error(f"{name}={shown(values)}: {cause}") from cause
