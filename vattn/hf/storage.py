"""The memory of a `VirtualCache`: caches for its layers, created when the first update shows their shapes."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from vattn.cache import KVCache
from vattn.config import KVConfig, budget_bytes, resolve
from vattn.errors import CacheClosed, ConfigError, ForkedProcess, InvalidLength, OutOfPages, VattnError
from vattn.groups import TensorGroup
from vattn.hf.attended import Coded
from vattn.hf.batch_rows import BatchRows
from vattn.layout import Layout
from vattn.pool.pool import PagePool
from vattn.pool.shared import is_shared, shared_pool
from vattn.quantised import Scales, quantise, quantised_groups
from vattn.stats import CacheStats

# A saved layer: its length, the first token that is still stored, the element type of its keys, and `View.stored` from
# that token on. A saved cache: the start of the last forward pass, `Storage.recording`, and its layers.
SavedLayer = tuple[int, int, torch.dtype, tuple[Tensor, ...]]
Saved = tuple[int, list[bool], list[int], list[SavedLayer | None]]  # start, recording, ungraded, layers

# Figures of several caches that add up; the others are the pool's, or the same in all.
_SUMMED = (
    *("owned_pages", "surplus_pages", "parked_pages", "cached_pages", "shared_pages", "peak_mapped_pages"),
    *("reserved_bytes", "live_bytes", "steps", "step_seconds", "waits", "wait_seconds"),
)

# Bytes that all rows may always leave unused; more only where the first update stores as much, or on CUDA, whose memory
# is dear, so many times as much. A share of the budget, as for an engine that fills it, would be a gigabyte for a few
# short prompts: an automatic one is half of the machine.
_ALLOWED_WASTE = 64 * 2**20
_STORED_PER_WASTE_ON_CUDA = 8

_storages: weakref.WeakSet[Storage] = weakref.WeakSet()


@dataclass(frozen=True)
class Shape:
    """The keys and values that a layer stores per token, and their device."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Shape:
        """The shape of an update.

        Raises:
            ConfigError: they are not K and V of the same tokens.
        """
        given = [f"{list(each.shape)} in {each.dtype} on {each.device}" for each in (key, value)]
        if (
            not key.ndim == value.ndim == 4
            or key.shape[:3] != value.shape[:3]
            or key.device != value.device
            or not key.shape[0]
            or not (key.is_floating_point() and value.is_floating_point())
        ):
            raise ConfigError(
                f"keys {given[0]} and values {given[1]}; both are [batch, num_kv_heads, tokens, head_dim] of "
                "floating-point numbers, alike but for the head sizes, for one row or more"
            )
        # Under autocast K may have a wider type than V; the wider one represents both exactly.
        dtype = torch.promote_types(key.dtype, value.dtype)
        return cls(key.shape[1], key.shape[3], value.shape[3], dtype, key.device)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one layer."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize

    def holds(self, other: Shape) -> bool:
        """Whether a layer of this shape can store tokens of the other without loss."""
        return replace(other, dtype=self.dtype) == self and torch.promote_types(self.dtype, other.dtype) == self.dtype

    def __str__(self) -> str:
        dims = (
            f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim} (K) and {self.v_head_dim} (V)"
        )
        return f"{self.num_kv_heads} KV heads of {dims} in {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True, slots=True)
class View:
    """K and V of the rows in use, `[batch, num_kv_heads, max_context_len, *]`, or their 8-bit codes.

    Attributes:
        scales: scales of the codes of K and of V, `[batch, num_kv_heads, max_context_len, 1]`; None without codes.
        shape: batch, heads and both head sizes.
        dtype: the element type of keys and values.
        accepts: the element types that it represents without loss.
        attended: whether SDPA computes as `vattn.hf.attended` says.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    accepts: frozenset[torch.dtype]
    attended: bool

    def takes(self, key: Tensor, value: Tensor) -> bool:
        """Whether an update with these K and V needs no further checks."""
        if len(key.shape) != 4:
            return False
        batch, heads, tokens, head_dim = key.shape
        v_head_dim = self.shape[3]
        return (
            self.shape == (batch, heads, head_dim, v_head_dim)
            and value.shape == (batch, heads, tokens, v_head_dim)
            and key.dtype in self.accepts
            and value.dtype in self.accepts
            and key.device == value.device == self.keys.device
        )

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """All tensors that store a token."""
        return (self.keys, self.values, *(self.scales or ()))

    def store(self, key: Tensor, value: Tensor, start: int) -> None:
        """Writes K and V of new tokens from token `start` on."""
        self.store_part(0, key, start)
        self.store_part(1, value, start)

    def store_part(self, which: int, rows: Tensor, start: int) -> None:
        """Writes K (0) or V (1) of new tokens from token `start` on."""
        tokens = rows.shape[2]
        if self.scales is not None:
            rows, scales = quantise(rows)
            self.scales[which].narrow(2, start, tokens).copy_(scales)
        (self.keys, self.values)[which].narrow(2, start, tokens).copy_(rows)

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens `[first, end)`: views, or dequantised copies."""
        if self.scales is None:
            tokens = first, end - first
            return self.keys.narrow(2, *tokens), self.values.narrow(2, *tokens)
        keys, values = self.coded(first, end)
        return keys.plain(), values.plain()

    def coded(self, first: int, end: int) -> tuple[Coded, Coded]:
        """K and V of tokens `[first, end)`, of which codes are stored."""
        keys, values, *scales = (tensor.narrow(2, first, end - first) for tensor in self.stored)
        return Coded(keys, scales[0], self.dtype), Coded(values, scales[1], self.dtype)


@dataclass(frozen=True)
class _Place:
    """The location of a layer's tokens."""

    cache: KVCache
    layer: int
    scales: Scales | None
    shape: Shape


class _Lease:
    """The owner of tensors that show a cache's memory, which keeps the cache from being collected."""

    __slots__ = ("__weakref__", "cache")

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache


class Storage:
    """The memory behind the layers. It has no reference to them, so that only users' references keep a cache alive.

    A tensor that shows this memory keeps it alive (`_Lease`): a cache is left to such tensors instead of being closed.
    The contents of a tensor that a user asked for (`part`) never change: before they would, the storage moves to other
    memory. It may be written, so no other row shares its pages: they are made the row's own before it is handed out,
    and the storage moves before rows are forked. Tensors returned by an update belong to the model, which only reads
    them, so rows may share them, and has finished with them before anything changes.

    An exception from outside, such as a KeyboardInterrupt, leaves the tokens of before or of after a call, or none. So
    what a call changes here is stored last, in adjacent assignments without a call between them, where CPython handles
    no signals.

    Attributes:
        views: per layer; None until its first update.
        lengths: tokens that each layer holds; they differ only during a forward pass. How many are backed is
            asked of the caches (`BatchRows.length`): more during a pass, and other ones after an interrupt.
        end: the length to which the forward pass under way brings each layer; -1 if tokens were taken back since, so
            that the next update begins a pass.
        initialized: per layer whether there was an update, even of no tokens, since it was made or reset.
        ungraded: per layer the first token that was stored without its gradient; `max_context_len` if there is none.
        recording: per layer whether tokens behind its window stay until the next crop.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        settings: dict[str, Any],
        max_batch_size: int | None,
        pool: PagePool | None,
        num_layers: int,
        windows: Mapping[int, int | None],
        *,
        quantised: bool,
    ) -> None:
        self.max_context_len: int = settings["max_context_len"]
        self.views: list[View | None] = [None] * num_layers
        self.lengths = [0] * num_layers
        self.end = -1
        self.initialized = [False] * num_layers
        self.ungraded = [self.max_context_len] * num_layers
        self.recording = [False] * num_layers
        self._config = config
        self._settings = settings
        self._max_batch_size = max_batch_size
        self._pool = pool
        self._owns_pool = False
        self._windows = windows
        self._quantised = quantised
        self._rows: BatchRows | None = None
        self._places: dict[int, _Place] = {}
        self._leases: dict[KVCache, _Lease] = {}
        self._lent: weakref.WeakSet[_Lease] = weakref.WeakSet()  # of tensors that `part` gave, of the caches now used
        self._closed = False
        self._forked: ForkedProcess | None = None
        _storages.add(self)

    @property
    def count(self) -> int:
        """Rows in use."""
        return self._rows.count if self._rows else 0

    def check_open(self) -> None:
        if self._forked is not None:
            raise self._forked
        if self._closed:
            raise CacheClosed("the cache is closed; make a new one")

    def length(self, index: int) -> int:
        """Tokens of a layer, also in a forked child."""
        if self._closed:
            self.check_open()
        return self.lengths[index]

    def refuse_in_child(self) -> None:
        """Makes later updates raise in a forked child, in which this memory is not mapped."""
        self.views = [None] * len(self.views)
        self._forked = ForkedProcess(
            f"this cache belongs to process {os.getppid()}, and this is a fork of it (process {os.getpid()}): its "
            "memory does not survive a fork; make a cache here, hand over a saved one (pickle), or start workers with "
            "'spawn'"
        )

    def open_caches(self) -> list[KVCache]:
        """The caches that hold the layers."""
        self.check_open()
        return list(dict.fromkeys(place.cache for place in self._places.values()))

    def check(self) -> None:
        """As `VirtualCache.check`."""
        for cache in self.open_caches():
            cache.check()
        if self._rows is not None:
            self._rows.check()
            assert self.end in (-1, self._rows.length), f"{self.end} tokens have memory, not {self._rows.length}"

    # Tokens

    def observe(self, index: int, key: Tensor, value: Tensor) -> View:
        """Checks an update that is the first of its layer or differs from earlier ones, and makes memory for it."""
        self.check_open()
        shape, batch = Shape.of(key, value), key.shape[0]
        held = self._places[index].shape if index in self._places else None
        if held is not None and held != shape:
            if not any(self.initialized) and replace(held, dtype=shape.dtype) == shape:
                self._start_anew()
                held = None
            elif self.views[index] is not None and not (self.initialized[index] and held.holds(shape)):
                raise ConfigError(
                    f"layer {index} holds {held}; the update has {shape}. A cache serves one model, in one element "
                    "type until a reset: make one per model"
                )
        if batch != self.count:
            self._set_batch(batch)
        if self.views[index] is None:
            if held != shape:
                try:
                    self._place(index, shape, batch * key.shape[2])
                except BaseException:  # in the first forward pass: only the layers before this one have tokens
                    self._lose()
                    self.settle()
                    raise
            self._show([index])
        view = self.views[index]
        assert view is not None
        return view

    def advance(self, index: int, tokens: int) -> View:
        """Backs the tokens of a forward pass before its first layer stores any; returns that layer's view."""
        self.check_open()
        self._check_even()
        assert self._rows is not None
        start = self.lengths[index]
        if start + tokens > self.max_context_len:
            raise InvalidLength(
                f"{start} tokens and {tokens} more are over max_context_len={self.max_context_len}; make the cache "
                "with a larger one: only address space depends on it"
            )
        if self._lent and any(window is not None for window in self._windows.values()):
            self._detach()  # memory behind the window is given back
        recording = any(self.recording)
        self.end = -1
        if start < self._rows.length:
            self._rows.step(start, recording=recording)
        self._rows.step(start + tokens, recording=recording)
        self.end = start + tokens
        view = self.views[index]
        assert view is not None
        return view

    def cut(self, lengths: Mapping[int, int], *, reset: bool = False) -> None:
        """Discards the tokens of layers from these lengths on.

        Args:
            reset: whether these layers are then as before their first update.

        Raises:
            InvalidLength: a window there would reach tokens whose memory was given back. Nothing changed.
        """
        self.check_open()
        after = [min(length, lengths.get(index, length)) for index, length in enumerate(self.lengths)]
        longest = max(after)
        ungraded = [
            self.max_context_len if length <= first else first
            for length, first in zip(after, self.ungraded, strict=True)
        ]
        initialized = [had and not (reset and index in lengths) for index, had in enumerate(self.initialized)]
        self._check_windows(after)
        if after != self.lengths:
            if longest:
                self._detach()
            elif self._lent:
                self._move(range(self.count), 0)
        rows, self.end = self._rows, -1
        shorter = rows is not None and longest < rows.length
        if rows is not None and shorter and longest:
            rows.go_back(longest)
        before = self.lengths, self.ungraded, self.initialized
        self.lengths, self.ungraded, self.initialized = after, ungraded, initialized
        try:
            if rows is not None and shorter:  # even if all layers have windows and are back already: queries start here
                rows.step(longest)
            self.settle()
        except VattnError:
            self.lengths, self.ungraded, self.initialized = before
            raise
        if rows is not None and any(self.recording):
            rows.release_past()

    def _check_windows(self, after: Sequence[int]) -> None:
        """Checks that windows of layers that are to be shorter than others reach only tokens that are stored then, too.

        Raises:
            InvalidLength: they do not.
        """
        longest = max(after)
        # The memory of all goes back with the longest, and gives back what is behind its window.
        start = longest if self._rows is not None and longest < self._rows.length else 0
        for index, window in self._windows.items():
            if window is None or not 0 < after[index] < longest or (after[index] == self.lengths[index] and not start):
                continue
            if max(0, after[index] - window + 1) < max(start - window + 1, self.first_kept(index)):
                raise InvalidLength(
                    f"layer {index} cannot hold {after[index]} tokens while another holds {longest}: memory that its "
                    f"window of {window} tokens reaches there is given back; crop all layers at once, or reset"
                )

    def first_kept(self, index: int) -> int:
        """The first token of a layer that is still stored, whatever its length: layers share their rows' memory."""
        window = self._windows[index]
        if window is None or self._rows is None:
            return 0
        # An interrupted crop leaves the start where it was.
        return max(0, min(self._rows.start, max(self.lengths)) - window + 1)

    def part(self, index: int, first: int, end: int) -> tuple[Tensor, Tensor] | None:
        """K and V of tokens `[first, end)` of a layer, which a user may keep; None before the layer's first update, and
        after a reset.
        """
        self.check_open()
        if self.views[index] is None or not self.initialized[index]:
            return None
        place = self._places[index]
        if place.scales is not None:
            view = self.views[index]
            assert view is not None
        else:
            self._unshare()
            lease = _Lease(place.cache)
            view = self._view(place, lease, self.count)
            self._lent.add(lease)
        return view.read(first, end)

    def assign(self, index: int, which: int, first: int, rows: Tensor | None) -> None:
        """Replaces K (0) or V (1) of a layer from token `first` on.

        Raises:
            ConfigError: rows, tokens or shapes differ from those stored, or the layer's type cannot hold the new one.
        """
        self.check_open()
        name = ("keys", "values")[which]
        if self.views[index] is None:
            raise ConfigError(f"layer {index} has no {name} before its first update; give them to update()")
        shape = self._places[index].shape
        dim = (shape.head_dim, shape.v_head_dim)[which]
        held = (self.count, shape.num_kv_heads, self.lengths[index] - first, dim)
        if not isinstance(rows, Tensor) or tuple(rows.shape) != held:
            given = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ConfigError(
                f"the {name} of layer {index} are {list(held)}, the new ones {given}. An assignment replaces values; "
                "tokens and rows change in all layers at once: crop(), reset(), reorder_cache(), "
                "batch_select_indices() and batch_repeat_interleave() of the cache"
            )
        if torch.promote_types(shape.dtype, rows.dtype) != shape.dtype:
            raise ConfigError(f"layer {index} holds {shape}; it cannot hold {name} in {rows.dtype} without loss")
        if self._shows(index, which, first, rows):  # `layer.keys *= 2` assigns what it has written to
            self._lose_gradient(index, first, rows)
            return
        new = rows.detach().clone()  # they may be a part of what is replaced
        self._detach()
        self._unshare()
        view = self.views[index]
        assert view is not None
        with torch.no_grad():
            try:
                view.store_part(which, new, first)
            except BaseException:  # an interrupt, maybe after the scales and before the codes
                view.store_part(which, new, first)
                raise
        self._lose_gradient(index, first, rows)

    def _lose_gradient(self, index: int, first: int, rows: Tensor) -> None:
        """Has `backward()` refuse what attends to these tokens of a layer, if they need a gradient."""
        if rows.requires_grad:
            self.ungraded[index] = min(first, self.ungraded[index])

    def _shows(self, index: int, which: int, first: int, rows: Tensor) -> bool:
        """Whether rows are this layer's present memory of K (0) or V (1) from token `first` on."""
        view = self.views[index]
        assert view is not None
        mine = (view.keys, view.values)[which].narrow(2, first, rows.shape[2])
        return (rows.data_ptr(), rows.stride(), rows.dtype) == (mine.data_ptr(), mine.stride(), mine.dtype)

    def saved(self) -> Saved:
        """The stored tokens, as views; of an initialized layer without tokens, that there are none."""
        self.check_open()
        self._check_even()
        layers: list[SavedLayer | None] = [None] * len(self.views)
        for index, view in enumerate(self.views):
            length = self.lengths[index]
            if view is not None and self.initialized[index]:
                first = self.first_kept(index)
                stored = tuple(tensor.narrow(2, first, length - first) for tensor in view.stored)
                layers[index] = (length, first, view.dtype, stored)
        start = 0 if self._rows is None else min(self._rows.start, max(self.lengths))
        return start, self.recording.copy(), self.ungraded.copy(), layers

    def restore(self, saved: Saved) -> None:
        """Copies the saved tokens of a cache for the same model into this one, which is empty."""
        start, self.recording, self.ungraded, layers = saved
        held = {index: layer for index, layer in enumerate(layers) if layer is not None}
        for index, (_, _, dtype, stored) in held.items():
            rows, heads = stored[0].shape[:2]
            key, value = (
                torch.empty(rows, heads, 0, tensor.shape[3], dtype=dtype, device=tensor.device) for tensor in stored[:2]
            )
            self.observe(index, key, value)
            self.initialized[index] = True
        if self._rows is not None:
            self._rows.begin(start)
        for index, (length, first, _, stored) in held.items():
            view = self.advance(index, length) if length != self.end else self.views[index]
            assert view is not None
            with torch.no_grad():
                for tensor, other in zip(view.stored, stored, strict=True):
                    tensor.narrow(2, first, length - first).copy_(other)
            self.lengths[index] = length
        if self._rows is not None:
            self._rows.arrived(start)

    def settle(self) -> None:
        """Makes the caches back what the layers hold, after tokens were discarded or a call was interrupted."""
        if self._rows is not None and not self._rows.start <= max(self.lengths) == self._rows.length:
            self.end = -1
            self._rows.step(max(self.lengths))

    # Rows

    def select(self, sources: Sequence[int]) -> None:
        """Replaces row i by row `sources[i]`; afterwards there are as many rows as sources."""
        self.check_open()
        self._check_even()
        if self._rows is None or not max(self.lengths):
            return
        sources = [row + self.count if row < 0 else row for row in sources]
        if bad := [row for row in sources if not 0 <= row < self.count]:
            raise ConfigError(f"rows {bad} do not exist; the cache holds {self.count}")
        if not sources:
            raise ConfigError("no rows are left; reset() empties a cache")
        if self._max_batch_size is not None and len(sources) > self._max_batch_size:
            raise ConfigError(f"{len(sources)} rows; the cache was made for max_batch_size={self._max_batch_size}")
        self.settle()
        if len(sources) > self._rows.capacity or self._lent:
            self._move(sources, max(self.lengths))
            return
        shown = self._shown()
        try:
            self._rows.select(sources)
            self._show(shown)
        except BaseException:
            self._lose()
            raise

    def _set_batch(self, batch: int) -> None:
        """Changes the number of rows of an empty cache."""
        if any(self.lengths):
            raise ConfigError(
                f"the cache holds {self.count} rows, the update has {batch}; reset() it first, or use a cache per batch"
            )
        if self._max_batch_size is not None and batch > self._max_batch_size:
            raise ConfigError(
                f"{batch} rows, beams included; the cache was made for max_batch_size={self._max_batch_size}"
            )
        if self._rows is None:
            self._rows = BatchRows(self._max_batch_size or batch, batch)
        elif batch > self._rows.capacity:
            self._move(range(batch), 0)
        else:
            shown, none = self._shown(), [None] * len(self.views)
            self.end = -1
            self._rows.step(0)
            self.views = [*none]  # the next update shows what an interrupt leaves out
            self._rows.resize(batch)
            self._show(shown)

    def _unshare(self) -> None:
        """Gives every row pages of its own, before anything but an update writes to them."""
        assert self._rows is not None
        try:
            self._rows.unshare()
        except OutOfPages as error:
            error.add_note(
                "rows that share pages get pages of their own before a layer's keys or values are handed out or "
                "assigned, since they may be written; raise memory_budget, or select fewer rows"
            )
            raise

    def _detach(self) -> None:
        """Leaves the memory to tensors from `part`, if there are any, and continues in a copy."""
        if self._lent:
            self._move(range(self.count), max(self.lengths))

    def _move(self, sources: Sequence[int], length: int) -> None:
        """Moves the first `length` tokens of the rows `sources` to another reservation, of at least the present
        capacity. A failure changes nothing.
        """
        assert self._rows is not None
        capacity, start = max(self._rows.capacity, len(sources)), min(self._rows.start, length)
        try:
            rows, places, leases = self._reserve(capacity, len(sources), length, start)
        except OutOfPages as error:
            if self._lent:
                error.add_note(
                    "keys and values that were taken from the cache still show its memory, so that it has to move; "
                    "delete them, or keep clones"
                )
            raise
        views: list[View | None] = [None] * len(self.views)
        try:
            rows.arrived(start)
            for index in self._shown():
                view = views[index] = self._view(places[index], leases[places[index].cache], rows.count)
                self._copy(index, view, sources, length)
        except BaseException:
            _close(leases)
            raise
        lengths, end = [min(each, length) for each in self.lengths], self.end if self.end == length else -1
        left, shown, lent = self._leases, {lease.cache for lease in self._lent}, weakref.WeakSet[_Lease]()
        self._rows, self._places, self._leases, self._lent = rows, places, leases, lent
        self.views, self.lengths, self.end = views, lengths, end
        self._retire(left, shown)

    def _copy(self, index: int, view: View, sources: Sequence[int], length: int) -> None:
        """Copies the first `length` tokens of these rows of a layer to another memory."""
        first, old = self.first_kept(index), self.views[index]
        assert old is not None
        if first < length:
            rows = torch.tensor(sources, device="cpu")
            with torch.no_grad():
                for tensor, source in zip(view.stored, old.stored, strict=True):
                    kept = source.narrow(2, first, length - first)
                    tensor.narrow(2, first, length - first).copy_(kept[rows.to(source.device)])

    def _lose(self) -> None:
        """Empties a cache whose rows may be lost."""
        count = len(self.views)
        lengths, views, initialized = [0] * count, [None] * count, [False] * count
        ungraded = [self.max_context_len] * count
        self.lengths, self.ungraded, self.views, self.end = lengths, ungraded, [*views], -1
        self.initialized = initialized

    def _start_anew(self) -> None:
        """Gives up the memory of an empty cache, whose next tokens are of another element type."""
        self._lose()
        leases, shown, lent = self._leases, {lease.cache for lease in self._lent}, weakref.WeakSet[_Lease]()
        self._rows, self._places, self._leases, self._lent = None, {}, {}, lent
        self._retire(leases, shown)

    def _retire(self, leases: dict[KVCache, _Lease], shown: Set[KVCache]) -> None:
        """Closes unused caches. One that tensors still show is freed with the last of them."""
        while leases:
            cache, lease = leases.popitem()
            alive = weakref.ref(lease)
            del lease
            if alive() is None and cache not in shown:
                _close([cache])

    def _check_even(self) -> None:
        lengths = {self.lengths[index] for index in self._shown()}
        if len(lengths) > 1:
            raise VattnError(
                f"the layers hold {sorted(lengths)} tokens: a forward pass did not end, or another model's went "
                "through this cache. reset() it, or crop(n) it to its first n tokens; a cache serves one model"
            )

    # Memory

    def _place(self, index: int, shape: Shape, tokens: int) -> None:
        """Finds a layer its place, or creates a cache for it and for those with its window that had no update yet and
        are probably alike.

        Args:
            tokens: of all rows, that the first update stores.
        """
        assert self._rows is not None
        if place := self._spare_place(index, shape):
            self._places = self._places | {index: place}
            return
        if self._pool is not None and self._pool.device != shape.device:
            raise ConfigError(
                f"layer {index} computes on {shape.device}, and the cache's memory is on {self._pool.device}; a "
                'VirtualCache is on one device. Load the model onto one (device_map="cuda:0"), with a pool there if '
                "one is given, or use transformers' DynamicCache for a model whose device_map has several"
            )
        window = self._windows[index]
        alike = [i for i, other in self._windows.items() if other == window and self.views[i] is None]
        stored = tokens * len(self._windows) * shape.token_bytes
        share = _STORED_PER_WASTE_ON_CUDA if shape.device.type == "cuda" else 1
        most_waste = max(_ALLOWED_WASTE, stored // share)
        layout = self._find_pool(shape, most_waste) if self._pool is None else None
        assert self._pool is not None
        groups, scales = self._groups(shape, alike, window)
        config = _kv_config(groups, shape.device, self._rows.slots, self._settings)
        if config.layout == "auto" and config.block_tokens is None:
            if layout is None:
                sizes = {"pool_page_size": self._pool.page_size, "pool_budget": self._pool.budget}
                layout, _ = resolve(config, **sizes, most_waste=most_waste)
            config = replace(config, layout=layout.name)
        cache = self._make(config, self._rows)
        places = self._places | {layer: _Place(cache, layer, scales.get(layer), shape) for layer in alike}
        leases = self._leases | {cache: _Lease(cache)}
        self._rows.add(cache)
        self._places, self._leases = places, leases

    def _spare_place(self, index: int, shape: Shape) -> _Place | None:
        """A place in a cache that was created for other layers and, since it was probably alike, for this one."""
        for place in self._places.values():
            layers = place.cache.config.tensor_groups[0].indices
            if index in layers and place.shape == shape:
                scales = self._groups(place.shape, layers, self._windows[index])[1]
                return replace(place, layer=index, scales=scales.get(index))
        return None

    def _make(self, config: KVConfig, rows: BatchRows) -> KVCache:
        """A cache with the rows' slots and tokens, which is closed if it cannot have them: a traceback may keep it."""
        assert self._pool is not None
        cache = KVCache(config, pool=self._pool)
        try:
            rows.prepare(cache)
        except BaseException:
            _close([cache])
            raise
        return cache

    def _find_pool(self, shape: Shape, most_waste: int) -> Layout | None:
        """Chooses the pool, assuming that all layers have this shape, and returns their layout; None where they differ
        in their windows. `most_waste` is that of `resolve`.

        A given budget limits all layers together, and so does an automatic one if layers differ in their windows. This
        requires a pool of its own, since a shared pool does not limit the sum of several caches.
        """
        assert self._rows is not None
        settings = self._settings.copy()
        asked = settings["memory_budget"]
        budget = budget_bytes(asked, shape.device, settings.pop("memory_utilization", "auto"))
        settings["memory_budget"] = budget
        layouts = []
        for window in dict.fromkeys(self._windows.values()):
            alike = [index for index, other in self._windows.items() if other == window]
            config = _kv_config(self._groups(shape, alike, window)[0], shape.device, self._rows.slots, settings)
            layouts.append(resolve(config, most_waste=most_waste * len(alike) // len(self._windows))[0])
        page_size = min(layout.page_size for layout in layouts)  # in large ones a block may be longer than a window
        owns = asked != "auto" or len(layouts) > 1 or config.zero_on_free
        if owns:
            pool = PagePool(
                budget,
                device=shape.device,
                page_size=page_size,
                guard=config.guard,
                zero_on_free=config.zero_on_free,
            )
        else:
            pool = shared_pool(budget, shape.device, page_size, config.guard)
        pool._core.takes_unused = True  # as a cache that torch allocates has it
        self._pool, self._owns_pool, self._settings = pool, owns, settings
        return layouts[0] if len(layouts) == 1 else None

    def _groups(
        self, shape: Shape, layers: Iterable[int], window: int | None
    ) -> tuple[list[TensorGroup], dict[int, Scales]]:
        """The tensor groups of layers with one shape and window, and the location of each layer's scales."""
        group = TensorGroup(
            layers=layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            dtype=shape.dtype,
            sliding_window=None if window is None or window >= self.max_context_len else window,
        )
        return quantised_groups([group], shape.dtype) if self._quantised else ([group], {})

    def _reserve(
        self, capacity: int, count: int, length: int, start: int
    ) -> tuple[BatchRows, dict[int, _Place], dict[KVCache, _Lease]]:
        """Memory like the present one for this many rows of this length, into which what queries from `start` on see is
        copied: rows, places and leases. A failure leaves nothing behind.
        """
        rows = BatchRows(capacity, count)
        caches: dict[KVCache, KVCache] = {}
        try:
            for old in self.open_caches():
                caches[old] = self._make(replace(old.config, max_batch_size=rows.slots), rows)
                rows.add(caches[old])
            rows.begin(start)
            rows.step(length)
        except BaseException:
            _close(caches.values())
            raise
        places = {index: replace(place, cache=caches[place.cache]) for index, place in self._places.items()}
        return rows, places, {cache: _Lease(cache) for cache in caches.values()}

    def _shown(self) -> list[int]:
        return [index for index, view in enumerate(self.views) if view is not None]

    def _show(self, layers: Iterable[int]) -> None:
        for index in layers:
            place = self._places[index]
            self.views[index] = self._view(place, self._leases[place.cache], self.count)

    def _view(self, place: _Place, lease: _Lease, count: int) -> View:
        """The first `count` rows of a layer, as tensors that hold the lease."""
        shape = place.shape
        keys, values = (tensor.transpose(1, 2).narrow(0, 0, count) for tensor in place.cache.lend(place.layer, lease))
        scales = None
        if place.scales is not None:
            per_key, per_value = place.scales.views(place.cache.lend(place.scales.layer, lease)[0])
            scales = per_key.transpose(1, 2)[:count], per_value.transpose(1, 2)[:count]
        return View(
            keys,
            values,
            scales,
            (count, shape.num_kv_heads, shape.head_dim, shape.v_head_dim),
            shape.dtype,
            _represented(shape.dtype),
            attended=shape.device.type == "cpu" and self._config._attn_implementation in ("sdpa", "vattn"),
        )

    def stats(self) -> CacheStats:
        parts = [cache.stats() for cache in self.open_caches()]
        if not parts:
            raise VattnError("there are no stats before the first update, which decides what the cache holds")
        if len(parts) == 1:
            return parts[0]
        assert self._pool is not None
        total: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
        budget = sum(part.budget_pages for part in parts) if is_shared(self._pool) else self._pool.total_pages
        rest = budget - total["owned_pages"] - total["parked_pages"] - total["cached_pages"]
        free = min(self._pool.free_pages, rest)
        return replace(parts[0], **total, budget_pages=budget, free_pages=free, other_pages=rest - free)

    def trim(self) -> int:
        self.check_open()
        if self._rows is None:
            return 0
        self.settle()
        return self._rows.trim()

    def close(self) -> None:
        if self._closed:
            return
        self.check_open()
        leases, shown = self._leases, {lease.cache for lease in self._lent}
        pool, views = self._pool if self._owns_pool else None, [None] * len(self.views)
        self._closed, self.views, self._places, self._leases, self._rows, self._pool = (
            True,
            [*views],
            {},
            {},
            None,
            None,
        )
        self._retire(leases, shown)
        if pool is not None:
            with contextlib.suppress(VattnError):  # it ends with the last cache that tensors show
                pool.close()

    def __str__(self) -> str:
        if self._forked is not None:
            return "of the parent process"
        if self._closed:
            return "closed"
        return f"{self.count} rows of {max(self.lengths)} tokens" + "".join(f", {c}" for c in self.open_caches())


def _refuse_in_child() -> None:
    for storage in _storages:
        storage.refuse_in_child()


os.register_at_fork(after_in_child=_refuse_in_child)


def _close(caches: Iterable[KVCache]) -> None:
    """Closes caches; one that cannot be closed now gives its memory back by a later call on any pool."""
    for cache in caches:
        with contextlib.suppress(VattnError):
            cache.close()


@functools.cache
def _represented(dtype: torch.dtype) -> frozenset[torch.dtype]:
    """The floating-point types whose values a type represents without loss."""
    types = {each for each in vars(torch).values() if isinstance(each, torch.dtype) and each.is_floating_point}
    promoted = set()
    for each in types:
        with contextlib.suppress(RuntimeError):  # types of 8 bits and less are not promoted
            if torch.promote_types(dtype, each) == dtype:
                promoted.add(each)
    return frozenset(promoted | {dtype})


def _kv_config(groups: Sequence[TensorGroup], device: torch.device, slots: int, settings: dict[str, Any]) -> KVConfig:
    return KVConfig(groups=groups, device=device, max_batch_size=slots, **settings)
