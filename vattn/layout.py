"""The geometry of slots in memory: pure arithmetic, which touches no memory.

One formula serves every layout. A slot of a virtual tensor consists of *runs*; a run is a sequence of rows, one per
token, padded to whole pages and rows. The layouts differ in the contents of a row (N layers, H heads, D the size of a
head):

    layout   kv_order  virtual tensors  runs per slot  a row holds
    layer    NHD       2 N              1              H x D
    layer    HND       2 N              H              D
    sliced   NHD       2                1              N x H x D
    sliced   HND       2                H              N x D
    fused    NHD       1                1              N x (K: H x D, V: H x D)
    fused    HND       1                H              N x (K: D, V: D)

The longer the row, the fewer tokens a page covers: blocks are finer, and strides between tokens wider.

Layers that differ are in tensor groups, each with its own virtual tensors in the same layout (N its layers, H its
heads). Groups with the same window form a *band*: they back the same range of tokens of a slot.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from vattn.groups import TensorGroup

LayoutName = Literal["layer", "sliced", "fused"]
KVOrder = Literal["NHD", "HND"]
LAYOUTS: tuple[LayoutName, ...] = ("layer", "sliced", "fused")  # from coarse to fine blocks


@dataclass(frozen=True)
class TensorKind:
    """Virtual tensors of equal shape, which grow together.

    Attributes:
        tensors: their number.
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
        """Pages in a column, one per run of every tensor, which back the same tokens of a slot."""
        return self.tensors * self.runs

    @property
    def page_tokens(self) -> int:
        """Whole tokens that one page covers; 0 where a token is larger than a page."""
        return self.page_size // self.row_bytes

    def columns(self, tokens: int) -> int:
        """Columns that back tokens `[0, tokens)`."""
        return -(-tokens * self.row_bytes // self.page_size)

    def tokens(self, columns: int) -> int:
        """Whole tokens that `columns` columns back."""
        return columns * self.page_size // self.row_bytes


@dataclass(frozen=True)
class Band:
    """Kinds that back the same range of a slot's tokens: all of them, or those in a window.

    Attributes:
        window: tokens that stay backed up to and including the next one to be computed; None for all.
        kinds: one per group, or two if the rows of its K and its V differ in size.
        token_bytes: bytes of a token in all of its layers.
        block_tokens: tokens of a block, the unit in which slots share memory and windows give it back: the fewest that
            fill whole pages of every kind.
        window_guard: rows of the window that kernels read without using them.
    """

    window: int | None
    kinds: tuple[TensorKind, ...]
    token_bytes: int
    block_tokens: int
    window_guard: int = 0

    def floor(self, start: int) -> int:
        """The first token of the first block that queries from token `start` on can see."""
        if self.window is None:
            return 0
        return max(0, start - self.window + 1) // self.block_tokens * self.block_tokens

    def pages(self, tokens: int, start: int = 0) -> int:
        """Pages that back tokens `[0, tokens)` of a slot, without blocks that no query from `start` on sees."""
        floor = self.floor(start)
        return sum(kind.lanes * max(0, kind.columns(tokens) - kind.columns(floor)) for kind in self.kinds)

    def most_pages(self, tokens: int, chunk: int = 1) -> int:
        """The most pages that a slot takes while it grows to `tokens` tokens, by up to `chunk` at a time."""
        return self.pages(tokens if self.window is None else min(tokens, self.window + self.block_tokens + chunk - 2))

    def first_live(self, length: int, start: int) -> int:
        """The first of `length` tokens that the last query sees, or one from token `start` on."""
        if self.window is None:
            return 0
        return min(length, max(0, length - self.window, start - self.window + 1))


@dataclass(frozen=True)
class TensorView:
    """The location of a layer's K or V in its virtual tensor, in elements of type `dtype`.

    The view is `[max_batch_size, max_context_len, heads, head_dim]` over tensor `tensor` of kind `kind`.
    """

    kind: int
    tensor: int
    offset: int
    strides: tuple[int, int, int, int]
    heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """The geometry of a cache.

    Attributes:
        tokens: the most of a slot, guard rows included.
        bands: the kinds of virtual tensors, by the range of tokens that they back.
        views: K and V by layer, in order of the layers; `TensorView.kind` is an index into `kinds`.
    """

    name: LayoutName
    kv_order: KVOrder
    page_size: int
    slots: int
    tokens: int
    bands: tuple[Band, ...]
    views: dict[int, tuple[TensorView, TensorView]]

    @property
    def kinds(self) -> tuple[TensorKind, ...]:
        """The kinds of all bands."""
        return tuple(kind for band in self.bands for kind in band.kinds)

    @property
    def page_tokens(self) -> int:
        """Whole tokens that a page of the virtual tensor with the longest rows covers."""
        return min(kind.page_tokens for kind in self.kinds)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return sum(band.token_bytes for band in self.bands)

    @property
    def lanes(self) -> int:
        """Pages that a slot gains with one column of every kind."""
        return sum(kind.lanes for kind in self.kinds)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of address space."""
        return self.slots * sum(kind.lanes * kind.run_pages * self.page_size for kind in self.kinds)

    @functools.cached_property
    def _lasting(self) -> tuple[tuple[int, int], ...] | None:
        """Lanes and bytes of a row by kind, where no layer has a window."""
        if any(band.window is not None for band in self.bands):
            return None
        return tuple((kind.lanes, kind.row_bytes) for kind in self.kinds)

    def pages(self, tokens: int, start: int = 0) -> int:
        """Pages that back tokens `[0, tokens)` of a slot, without blocks that no query from `start` on sees."""
        if self._lasting is None:
            return sum(band.pages(tokens, start) for band in self.bands)
        pages = 0  # for every request in every step
        for lanes, row_bytes in self._lasting:
            pages -= lanes * (-tokens * row_bytes // self.page_size)
        return pages

    def most_pages(self, tokens: int, chunk: int = 1) -> int:
        """The most pages that a slot takes while it grows to `tokens` tokens, by up to `chunk` at a time."""
        return sum(band.most_pages(tokens, chunk) for band in self.bands)

    def most_tokens(self, pages: int, limit: int) -> int:
        """The most tokens, up to `limit`, to which a slot can grow one by one within `pages` pages."""
        return bisect.bisect_right(range(limit + 1), pages, key=self.most_pages) - 1

    def budget_pages(self, budget: int) -> int:
        """Pages of a budget in bytes, and no more than all slots need at full length."""
        slot = sum(kind.lanes * kind.run_pages for kind in self.kinds)
        return min(budget // self.page_size, slot * self.slots)

    def mappings(self, pages: int) -> int:
        """The most entries of the kernel's table of mappings that `pages` mapped pages take.

        A page without a neighbour takes a mapping of its own, and so does the rest of every run that has one.
        """
        return pages + min(pages, self.lanes * self.slots)

    @property
    def worst_waste(self) -> int:
        """Most bytes that a request can hold unused: the rest of a last page in every lane, and all but one token of a
        block before a window.
        """
        # The ends of rows fall on all multiples of the greatest common divisor.
        ends = sum(kind.lanes * (self.page_size - math.gcd(kind.row_bytes, self.page_size)) for kind in self.kinds)
        return ends + sum((band.block_tokens - 1) * band.token_bytes for band in self.bands if band.window is not None)

    @property
    def usual_waste(self) -> int:
        """Bytes that a request holds unused on average, if all lengths are as likely: half of the most."""
        return self.worst_waste // 2


def build(
    name: LayoutName,
    kv_order: KVOrder,
    *,
    groups: Sequence[TensorGroup],
    slots: int,
    tokens: int,
    page_size: int,
    window_guard: int = 0,
) -> Layout:
    """The layout `name` for `slots` slots of `tokens` tokens (guard rows included).

    Args:
        groups: the layers, each in one group; with their element types.
        page_size: bytes of a page, a multiple of every element's.
        window_guard: rows before a window that a kernel may read without using them.
    """
    return _build(name, kv_order, tuple(groups), slots, tokens, page_size, window_guard)


@functools.lru_cache(maxsize=512)  # a cache per call of generate() asks for the same again and again
def _build(
    name: LayoutName,
    kv_order: KVOrder,
    groups: tuple[TensorGroup, ...],
    slots: int,
    tokens: int,
    page_size: int,
    window_guard: int,
) -> Layout:
    views: dict[int, tuple[TensorView, TensorView]] = {}
    kinds: list[TensorKind] = []
    members: dict[int | None, tuple[list[TensorKind], list[TensorGroup]]] = {}
    for group in sorted(groups, key=lambda group: group.sliding_window or 0):
        made, placed = _place(name, kv_order, group, len(kinds), tokens, page_size)
        kinds += made
        views |= placed
        of_window = members.setdefault(group.sliding_window, ([], []))
        of_window[0].extend(made)
        of_window[1].append(group)
    block_tokens = math.lcm(*(page_size // math.gcd(page_size, kind.row_bytes) for kind in kinds))
    bands = tuple(
        Band(
            # At least two tokens, so that the last one stays whatever the next step is.
            None if window is None else max(2, window + window_guard),
            tuple(made),
            sum(group.token_bytes for group in of_groups),
            block_tokens,
            0 if window is None else window_guard,
        )
        for window, (made, of_groups) in members.items()
    )
    return Layout(name, kv_order, page_size, slots, tokens, bands, dict(sorted(views.items())))


def _place(
    name: LayoutName, kv_order: KVOrder, group: TensorGroup, first_kind: int, tokens: int, page_size: int
) -> tuple[list[TensorKind], dict[int, tuple[TensorView, TensorView]]]:
    """The kinds of one group, of which the first is number `first_kind`, and the views of its layers."""
    num_layers, head_dims, itemsize = len(group.indices), group.head_dims, group.torch_dtype.itemsize
    by_head = kv_order == "HND"
    runs = group.num_kv_heads if by_head else 1
    heads_per_row = 1 if by_head else group.num_kv_heads
    layers_per_row = 1 if name == "layer" else num_layers
    sides = tuple(heads_per_row * dim for dim in head_dims)  # a layer's K and V in one row, in elements

    rows = (layers_per_row * sum(sides),) if name == "fused" else tuple(layers_per_row * side for side in sides if side)
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
        # A V of no elements is an empty view of K's tensor.
        kind = 0 if len(kinds) == 1 else side
        tensor = 0 if name == "fused" else layer // layers_per_row
        if merged:
            tensor += side * tensors_per_side
        within = layer % layers_per_row
        offset = within * sum(sides) + side * sides[0] if name == "fused" else within * sides[side]
        run = kinds[kind].run_pages * page_size // itemsize
        head_stride = run if by_head else head_dims[side]
        strides = (runs * run, kinds[kind].row_bytes // itemsize, head_stride, 1)
        return TensorView(
            first_kind + kind, tensor, offset, strides, group.num_kv_heads, head_dims[side], group.torch_dtype
        )

    return kinds, {layer: (view(i, 0), view(i, 1)) for i, layer in enumerate(group.indices)}
