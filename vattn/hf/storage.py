"""The memory of a `VirtualCache`: caches for its layers, created when the first update shows their shapes."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from vattn.cache import KVCache
from vattn.config import KVConfig, budget_bytes, resolve
from vattn.errors import CacheClosed, ConfigError, ForkedProcess, InvalidLength, OutOfPages, StreamCapturing, VattnError
from vattn.groups import TensorGroup
from vattn.hf.batch_rows import BatchRows
from vattn.hf.decoding import Coded
from vattn.hf.shared_pool import SharedPool, shared_pool
from vattn.memory.pool import PagePool
from vattn.quantised import Scales, quantise, quantised_groups
from vattn.stats import CacheStats

# A saved layer: its length, the first token that is still stored, the element type of its keys, and `View.stored` from
# that token on. A saved cache: the start of the last forward pass, and its layers.
SavedLayer = tuple[int, int, torch.dtype, tuple[Tensor, ...]]
Saved = tuple[int, list[SavedLayer | None]]

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
        # Under autocast K may have a wider type than V; the wider one represents both exactly.
        dtype = torch.promote_types(key.dtype, value.dtype)
        return cls(key.shape[1], key.shape[3], value.shape[3], dtype, key.device)

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
        accepts: batch, heads, both head sizes and the type of K of an update that needs no further checks.
        decodes: whether SDPA's decode steps are computed as `vattn.hf.decoding` says.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None
    accepts: tuple[int, int, int, int, torch.dtype]
    decodes: bool

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
        return Coded(keys, scales[0], self.accepts[-1]), Coded(values, scales[1], self.accepts[-1])


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
    memory. Tensors returned by an update belong to the model, which has finished with them before anything changes.

    Attributes:
        views: per layer; None until its first update.
        lengths: tokens per layer, which differ only during a forward pass.
        end: the length after the forward pass under way; -1 if tokens were taken back since.
        ungraded: per layer the first token that was stored without its gradient; `max_context_len` if there is none.
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
        self.ungraded = [self.max_context_len] * num_layers
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
        self._left: weakref.WeakSet[KVCache] = weakref.WeakSet()  # to tensors
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
        self.end = -1
        self._forked = ForkedProcess(
            f"this cache belongs to process {os.getppid()}, and this is a fork of it (process {os.getpid()}): its "
            "memory does not survive a fork; make a cache here, hand over a saved one (pickle), or start workers with "
            "'spawn'"
        )

    def open_caches(self) -> list[KVCache]:
        """The caches that hold the layers."""
        self.check_open()
        return list(dict.fromkeys(place.cache for place in self._places.values()))

    # Tokens

    def observe(self, index: int, key: Tensor, value: Tensor) -> View:
        """Checks an update that is the first of its layer or differs from earlier ones, and makes memory for it."""
        self.check_open()
        shape, batch = Shape.of(key, value), key.shape[0]
        place = self._places.get(index)
        if self.views[index] is not None and place is not None and not place.shape.holds(shape):
            raise ConfigError(
                f"layer {index} holds {place.shape}; the update has {shape}. A cache serves one model: make one per "
                "model"
            )
        if batch != self.count:
            self._set_batch(batch)
        if self.views[index] is None:
            if place is None or not place.shape.holds(shape):
                try:
                    self._place(index, shape)
                except BaseException:  # in the first forward pass: only the layers before this one have tokens
                    self.lengths = [0] * len(self.lengths)
                    self.end = -1
                    self.settle()
                    raise
            self._show(index)
        view = self.views[index]
        assert view is not None
        return view

    def advance(self, index: int, tokens: int) -> View:
        """Backs the tokens of a forward pass before its first layer stores any; returns that layer's view."""
        self.check_open()
        self._check_even()
        assert self._rows is not None
        if self._lent and any(window is not None for window in self._windows.values()):
            self._detach()  # memory behind the window is given back
        start = self.lengths[index]
        if start + tokens > self.max_context_len:
            raise InvalidLength(
                f"{start} tokens and {tokens} more are over max_context_len={self.max_context_len}; make the cache "
                "with a larger one: only address space depends on it"
            )
        if start < self._rows.length:
            self._rows.step(start)
        self._rows.step(start + tokens)
        self.end = start + tokens
        view = self.views[index]
        assert view is not None
        return view

    def cut(self, lengths: Mapping[int, int]) -> None:
        """Discards the tokens of layers from these lengths on.

        Raises:
            InvalidLength: a window there would reach tokens whose memory was given back. Nothing changed.
        """
        self.check_open()
        after = [min(length, lengths.get(index, length)) for index, length in enumerate(self.lengths)]
        if after != self.lengths and max(after):
            self._detach()
        if self._rows is not None and max(after) < self._rows.length:
            self._rows.step(max(after))
        self.lengths = after
        self.ungraded = [
            self.max_context_len if length <= first else first
            for length, first in zip(after, self.ungraded, strict=True)
        ]
        if not max(after):
            self._detach()  # to empty memory
        self.end = -1

    def first_kept(self, index: int) -> int:
        """The first token of a layer that is still stored."""
        window = self._windows[index]
        return 0 if window is None or self._rows is None else max(0, self._rows.start - window + 1)

    def part(self, index: int, first: int, end: int) -> tuple[Tensor, Tensor] | None:
        """K and V of tokens `[first, end)` of a layer, which a user may keep; None before the layer's first update."""
        self.check_open()
        view = self.views[index]
        if view is None:
            return None
        if view.scales is None:
            lease = _Lease(self._places[index].cache)
            view = self._view(index, lease)
            self._lent.add(lease)
        return view.read(first, end)

    def assign(self, index: int, which: int, first: int, rows: Tensor | None) -> None:
        """Replaces K (0) or V (1) of a layer from token `first` on.

        Raises:
            ConfigError: rows, tokens or shapes differ from those stored, or the layer's type cannot hold the new one.
        """
        self.check_open()
        name, view = ("keys", "values")[which], self.views[index]
        if view is None:
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
        new = rows.detach().clone()  # they may be a part of what is replaced
        self._detach()
        view = self.views[index]
        assert view is not None
        with torch.no_grad():
            view.store_part(which, new, first)

    def saved(self) -> Saved:
        """The stored tokens, as views."""
        self.check_open()
        self._check_even()
        layers: list[SavedLayer | None] = [None] * len(self.views)
        for index, view in enumerate(self.views):
            length, first = self.lengths[index], self.first_kept(index)
            if view is not None and length:
                stored = tuple(tensor.narrow(2, first, length - first) for tensor in view.stored)
                layers[index] = (length, first, view.accepts[-1], stored)
        return (0 if self._rows is None else self._rows.start), layers

    def restore(self, saved: Saved) -> None:
        """Copies the saved tokens of a cache for the same model into this one, which is empty."""
        start, layers = saved
        for index, layer in enumerate(layers):
            if layer is None:
                continue
            length, first, dtype, stored = layer
            rows, heads = stored[0].shape[:2]
            key, value = (
                torch.empty(rows, heads, 0, tensor.shape[3], dtype=dtype, device=tensor.device) for tensor in stored[:2]
            )
            view = self.observe(index, key, value)
            if length != self.end:
                view = self.advance(index, length)
            with torch.no_grad():
                for tensor, other in zip(view.stored, stored, strict=True):
                    tensor.narrow(2, first, length - first).copy_(other)
            self.lengths[index] = length
        if self._rows is not None:
            self._rows.arrived(start)

    def settle(self) -> None:
        """Tells the caches that tokens were discarded."""
        if self._rows is not None and max(self.lengths) < self._rows.length:
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
            self._move(sources)
        else:
            try:
                self._rows.select(sources)
            except BaseException:
                self.lengths = [0] * len(self.lengths)
                self.end = -1
                raise
        self._show_all()

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
        if self._rows is not None and batch <= self._rows.capacity:
            self._rows.step(0)
            self._rows.resize(batch)
        else:
            left = self._reserve(self._max_batch_size or batch, batch, 0)
            self._show_all()
            self._retire(left)
            return
        self._show_all()

    def _detach(self) -> None:
        """Leaves the memory to tensors from `part`, if there are any, and continues in a copy."""
        if self._lent:
            try:
                self._move(range(self.count))
            except OutOfPages as error:
                error.add_note(
                    "keys and values that were taken from the cache still show its memory, so that it has to move; "
                    "delete them, or keep clones"
                )
                raise

    def _move(self, sources: Sequence[int]) -> None:
        """Moves the rows `sources` to another reservation, of at least the present capacity."""
        assert self._rows is not None
        length, start = max(self.lengths), self._rows.start
        left = self._reserve(max(self._rows.capacity, len(sources)), len(sources), length)
        self._rows.arrived(start)
        rows = torch.tensor(sources)
        for index in self._shown():
            self._take_over(index, rows, length)
        self._retire(left)

    def _take_over(self, index: int, rows: Tensor, length: int) -> None:
        """Copies these rows of a layer from its old view to its present memory, which becomes its view."""
        first, old = self.first_kept(index), self.views[index]
        assert old is not None
        self._show(index)
        view = self.views[index]
        assert view is not None
        if first < length:
            with torch.no_grad():
                for tensor, source in zip(view.stored, old.stored, strict=True):
                    kept = source.narrow(2, first, length - first)
                    tensor.narrow(2, first, length - first).copy_(kept[rows.to(source.device)])

    def _retire(self, caches: Sequence[KVCache]) -> None:
        """Closes unused caches; one that tensors still show is freed with the last of them, as is one that a capture
        keeps from being closed.
        """
        shown = {lease.cache for lease in self._lent}
        self._lent = weakref.WeakSet()
        for cache in caches:
            lease = weakref.ref(self._leases.pop(cache))
            if lease() is None and cache not in shown:
                with contextlib.suppress(StreamCapturing):  # its pages leave after the capture
                    cache.close()
                    continue
            self._left.add(cache)

    def _check_even(self) -> None:
        lengths = {self.lengths[index] for index in self._shown()}
        if len(lengths) > 1:
            raise VattnError(
                f"the layers hold {sorted(lengths)} tokens: a forward pass did not end, or another model's went "
                "through this cache. reset() it, or crop(n) it to its first n tokens; a cache serves one model"
            )

    # Memory

    def _place(self, index: int, shape: Shape) -> None:
        """Creates a cache for a layer and for those with its window that had no update yet and are probably alike."""
        assert self._rows is not None
        window = self._windows[index]
        alike = [i for i, other in self._windows.items() if other == window and self.views[i] is None]
        if self._pool is None:
            self._find_pool(shape)
        groups, scales = self._groups(shape, alike, window)
        assert self._pool is not None
        cache = KVCache(_kv_config(groups, shape.device, self._rows.slots, self._settings), pool=self._pool)
        self._rows.add(cache)
        self._leases[cache] = _Lease(cache)
        self._places |= {layer: _Place(cache, layer, scales.get(layer), shape) for layer in alike}

    def _find_pool(self, shape: Shape) -> None:
        """Chooses the pool, assuming that all layers have this shape.

        A given budget limits all layers together, and so does an automatic one if layers differ in their windows. This
        requires a pool of its own, since a shared pool does not limit the sum of several caches.
        """
        assert self._rows is not None
        groups = self._groups(shape, range(len(self._windows)), None)[0]
        settings = self._settings.copy()
        asked = settings["memory_budget"]
        budget = budget_bytes(asked, shape.device, settings.pop("memory_utilization", "auto"))
        settings["memory_budget"] = budget
        config = _kv_config(groups, shape.device, self._rows.slots, settings)
        page_size = resolve(config)[0].page_size
        self._owns_pool = asked != "auto" or len(set(self._windows.values())) > 1 or config.zero_on_free
        if self._owns_pool:
            self._pool = PagePool(
                budget,
                device=shape.device,
                page_size=page_size,
                guard=config.guard,
                zero_on_free=config.zero_on_free,
            )
        else:
            self._pool = shared_pool(budget, shape.device, page_size, config.guard)
        self._settings = settings

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

    def _reserve(self, capacity: int, count: int, length: int) -> list[KVCache]:
        """Replaces all caches by new ones for this many rows of this length; returns the old ones. A failure changes
        nothing.
        """
        rows = BatchRows(capacity, count)
        caches = {}
        for old in self.open_caches():
            caches[old] = KVCache(replace(old.config, max_batch_size=rows.slots), pool=self._pool)
            rows.add(caches[old])
        rows.step(length)
        self._rows = rows
        self._leases |= {cache: _Lease(cache) for cache in caches.values()}
        self._places = {index: replace(place, cache=caches[place.cache]) for index, place in self._places.items()}
        return list(caches)

    def _shown(self) -> list[int]:
        return [index for index, view in enumerate(self.views) if view is not None]

    def _show_all(self) -> None:
        for index in self._shown():
            self._show(index)

    def _show(self, index: int) -> None:
        self.views[index] = self._view(index, self._leases[self._places[index].cache])

    def _view(self, index: int, lease: _Lease) -> View:
        """The rows in use of a layer, as tensors that hold the lease."""
        place = self._places[index]
        shape = place.shape
        keys, values = (
            tensor.transpose(1, 2).narrow(0, 0, self.count) for tensor in place.cache.lend(place.layer, lease)
        )
        scales = None
        if place.scales is not None:
            per_key, per_value = place.scales.views(place.cache.lend(place.scales.layer, lease)[0])
            scales = per_key.transpose(1, 2)[: self.count], per_value.transpose(1, 2)[: self.count]
        return View(
            keys,
            values,
            scales,
            (self.count, shape.num_kv_heads, shape.head_dim, shape.v_head_dim, shape.dtype),
            decodes=shape.device.type == "cpu" and self._config._attn_implementation in ("sdpa", "vattn"),
        )

    def stats(self) -> CacheStats:
        parts = [cache.stats() for cache in self.open_caches()]
        if not parts:
            raise VattnError("there are no stats before the first update, which decides what the cache holds")
        if len(parts) == 1:
            return parts[0]
        assert self._pool is not None
        owned, parked, cached = (
            sum(getattr(part, f"{name}_pages") for part in parts) for name in ("owned", "parked", "cached")
        )
        shared = isinstance(self._pool, SharedPool)
        budget = sum(part.budget_pages for part in parts) if shared else self._pool.total_pages
        free = min(self._pool.free_pages, budget - owned - parked - cached)
        return replace(
            parts[0],
            budget_pages=budget,
            free_pages=free,
            owned_pages=owned,
            surplus_pages=sum(p.surplus_pages for p in parts),
            parked_pages=parked,
            cached_pages=cached,
            other_pages=budget - free - owned - parked - cached,
            shared_pages=sum(p.shared_pages for p in parts),
            peak_mapped_pages=sum(p.peak_mapped_pages for p in parts),
            reserved_bytes=sum(p.reserved_bytes for p in parts),
            live_bytes=sum(p.live_bytes for p in parts),
            steps=sum(p.steps for p in parts),
            step_seconds=sum(p.step_seconds for p in parts),
            waits=sum(p.waits for p in parts),
            wait_seconds=sum(p.wait_seconds for p in parts),
        )

    def trim(self) -> int:
        self.check_open()
        if self._rows is None:
            return 0
        self.settle()
        return self._rows.trim()

    def close(self) -> None:
        if self._closed:
            return
        caches = self.open_caches()
        self.views = [None] * len(self.views)
        self._places.clear()
        self._rows = None
        self._closed = True
        self._retire(caches)
        if self._pool is not None and self._owns_pool and not self._left:
            self._pool.close()
        self._pool = None

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


def _kv_config(groups: Sequence[TensorGroup], device: torch.device, slots: int, settings: dict[str, Any]) -> KVConfig:
    return KVConfig(groups=groups, device=device, max_batch_size=slots, **settings)
