"""How a slot's tokens lie in memory: pure arithmetic, no memory is touched here.

One formula serves every layout. A slot of a virtual tensor is a number of *runs*; a run is one row per token, the rows
adjacent, padded to whole pages and rows. What a row holds is what the layouts differ in (N layers, H heads, D the size
of a head):

    layout   kv_order  virtual tensors  runs per slot  a row holds
    layer    NHD       2 N              1              H x D
    layer    HND       2 N              H              D
    sliced   NHD       2                1              N x H x D
    sliced   HND       2                H              N x D
    fused    NHD       1                1              N x (K: H x D, V: H x D)
    fused    HND       1                H              N x (K: D, V: D)

The longer the row, the fewer tokens a page covers: finer blocks, at the price of wider strides between tokens.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Literal

LayoutName = Literal["layer", "sliced", "fused"]
KVOrder = Literal["NHD", "HND"]
LAYOUTS: tuple[LayoutName, ...] = ("layer", "sliced", "fused")  # from coarse to fine blocks


@dataclass(frozen=True)
class TensorKind:
    """Virtual tensors of equal shape, which grow together.

    Attributes:
        tensors: how many there are.
        runs: runs per slot.
        row_bytes: bytes of one token in a run.
        run_pages: pages of a run, a whole number of rows.
        page_size: bytes of a page.
    """

    tensors: int
    runs: int
    row_bytes: int
    run_pages: int
    page_size: int

    @property
    def lanes(self) -> int:
        """Pages in a column: one per run of every tensor; they back the same tokens of a slot."""
        return self.tensors * self.runs

    @property
    def block_tokens(self) -> int:
        """Whole tokens that one page covers; 0 where a token is larger than a page."""
        return self.page_size // self.row_bytes

    def columns(self, tokens: int) -> int:
        """Columns that back tokens `[0, tokens)`."""
        return -(-tokens * self.row_bytes // self.page_size)

    def tokens(self, columns: int) -> int:
        """Whole tokens that `columns` columns back."""
        return columns * self.page_size // self.row_bytes


@dataclass(frozen=True)
class TensorView:
    """Where one layer's K (or V) lies in its virtual tensor, in elements.

    The view is `[max_batch_size, max_context_len, heads, head_dim]` over tensor `tensor` of kind `kind`.
    """

    kind: int
    tensor: int
    offset: int
    strides: tuple[int, int, int, int]
    head_dim: int


@dataclass(frozen=True)
class Layout:
    """The geometry of a cache. `kinds` has two entries where the rows of K and of V differ in size, else one."""

    name: LayoutName
    kv_order: KVOrder
    page_size: int
    slots: int
    kinds: tuple[TensorKind, ...]
    views: tuple[tuple[TensorView, TensorView], ...]
    bytes_per_token: int

    @property
    def block_tokens(self) -> int:
        """Whole tokens that a page covers in the virtual tensor with the longest rows."""
        return min(kind.block_tokens for kind in self.kinds)

    @property
    def lanes(self) -> int:
        """Pages that a slot gains with one column of every kind."""
        return sum(kind.lanes for kind in self.kinds)

    @property
    def reserved_bytes(self) -> int:
        """Address space, in bytes."""
        return self.slots * sum(kind.lanes * kind.run_pages * self.page_size for kind in self.kinds)

    def pages(self, tokens: int) -> int:
        """Pages that back tokens `[0, tokens)` of one slot."""
        return sum(kind.lanes * kind.columns(tokens) for kind in self.kinds)

    def most_tokens(self, pages: int, limit: int) -> int:
        """Tokens of one slot, up to `limit`, that `pages` pages back."""
        return bisect.bisect_right(range(limit + 1), pages, key=self.pages) - 1

    @property
    def worst_waste(self) -> int:
        """Bytes that a request can hold without using them: a last page of every lane with one token in it."""
        return sum(kind.lanes * (self.page_size - min(kind.row_bytes, self.page_size)) for kind in self.kinds)


def build(
    name: LayoutName,
    kv_order: KVOrder,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    itemsize: int,
    slots: int,
    tokens: int,
    page_size: int,
) -> Layout:
    """The layout `name` for `slots` slots of `tokens` tokens (guard rows included).

    Args:
        head_dims: head sizes of K and V, in elements.
        itemsize: bytes of an element.
        page_size: bytes of a page, a multiple of `itemsize`.
    """
    by_head = kv_order == "HND"
    runs = num_kv_heads if by_head else 1
    heads_per_row = 1 if by_head else num_kv_heads
    layers_per_row = 1 if name == "layer" else num_layers
    sides = tuple(heads_per_row * dim for dim in head_dims)  # a layer's K and V in one row, in elements

    rows = (layers_per_row * sum(sides),) if name == "fused" else tuple(layers_per_row * side for side in sides)
    merged = len(rows) == 2 and rows[0] == rows[1]
    tensors_per_side = 1 if name == "fused" else num_layers // layers_per_row
    kinds = []
    for row in rows[:1] if merged else rows:
        row_bytes = row * itemsize
        # Whole rows too, so that flash kernels can take all slots for one long sequence; it costs address space only.
        whole = row_bytes // math.gcd(row_bytes, page_size)
        run_pages = -(-tokens * row_bytes // (page_size * whole)) * whole
        kinds.append(TensorKind(tensors_per_side * (2 if merged else 1), runs, row_bytes, run_pages, page_size))

    def view(layer: int, side: int) -> TensorView:
        kind = 0 if name == "fused" or merged else side
        tensor = 0 if name == "fused" else layer // layers_per_row
        if merged:
            tensor += side * tensors_per_side
        within = layer % layers_per_row
        offset = within * sum(sides) + side * sides[0] if name == "fused" else within * sides[side]
        run = kinds[kind].run_pages * page_size // itemsize
        head_stride = run if by_head else head_dims[side]
        strides = (runs * run, kinds[kind].row_bytes // itemsize, head_stride, 1)
        return TensorView(kind, tensor, offset, strides, head_dims[side])

    return Layout(
        name=name,
        kv_order=kv_order,
        page_size=page_size,
        slots=slots,
        kinds=tuple(kinds),
        views=tuple((view(layer, 0), view(layer, 1)) for layer in range(num_layers)),
        bytes_per_token=num_layers * num_kv_heads * sum(head_dims) * itemsize,
    )
