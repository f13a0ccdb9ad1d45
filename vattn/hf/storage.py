"""The memory of a `VirtualCache`: caches for its layers, made when the first update shows what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from vattn.cache import KVCache
from vattn.config import KVConfig, budget_bytes, resolve
from vattn.errors import CacheClosed, ConfigError, InvalidLength, VattnError
from vattn.groups import TensorGroup
from vattn.hf.batch_rows import BatchRows
from vattn.pool import PagePool
from vattn.quantised import Scales, dequantise, quantise, quantised_groups
from vattn.stats import CacheStats


@dataclass(frozen=True)
class Shape:
    """What a layer stores per token, and where."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Shape:
        # Under autocast K may be wider than V; the wider type holds both exactly.
        dtype = torch.promote_types(key.dtype, value.dtype)
        return cls(key.shape[1], key.shape[3], value.shape[3], dtype, key.device)

    def holds(self, other: Shape) -> bool:
        """Whether a layer of this shape stores the other's tokens without loss."""
        return replace(other, dtype=self.dtype) == self and torch.promote_types(self.dtype, other.dtype) == self.dtype

    def __str__(self) -> str:
        dims = (
            f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim} (K) and {self.v_head_dim} (V)"
        )
        return f"{self.num_kv_heads} KV heads of {dims} in {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True, slots=True)
class View:
    """K and V of the rows in use, `[batch, num_kv_heads, max_context_len, *]`; in 8 bits, their codes.

    Attributes:
        scales: what the codes of K and of V are multiples of, `[batch, num_kv_heads, max_context_len, 1]`.
        accepts: batch, heads, both head sizes and the type of K of an update that needs no second look.
        folds: the model's SDPA is to fold grouped queries.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None
    accepts: tuple[int, int, int, int, torch.dtype]
    folds: bool

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """All that is kept of a token."""
        return (self.keys, self.values, *(self.scales or ()))

    def store(self, key: Tensor, value: Tensor, start: int) -> None:
        """Writes new rows, from token `start` on."""
        new: tuple[Tensor, ...] = (key, value)
        if self.scales is not None:
            (key, key_scales), (value, value_scales) = quantise(key), quantise(value)
            new = (key, value, key_scales, value_scales)
        for tensor, rows in zip(self.stored, new, strict=True):
            tensor.narrow(2, start, rows.shape[2]).copy_(rows)

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens `[first, end)`: views, or copies of what codes stand for."""
        keys, values, *scales = (tensor.narrow(2, first, end - first) for tensor in self.stored)
        if not scales:
            return keys, values
        dtype = self.accepts[-1]
        keys, values = (
            dequantise(codes, factors, torch.empty(codes.shape, dtype=dtype, device=codes.device))
            for codes, factors in zip((keys, values), scales, strict=True)
        )
        return keys, values


@dataclass(frozen=True)
class _Place:
    """Where a layer's tokens are."""

    cache: KVCache
    layer: int
    scales: Scales | None
    shape: Shape


class Storage:
    """The memory behind the layers. It knows no layer, so that nothing but references keeps a cache alive.

    Attributes:
        views: per layer; None until its first update.
        lengths: tokens per layer. They differ within a forward pass only.
        end: what the lengths are after the forward pass under way; -1 where something was taken back since.
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
        self._config = config
        self._settings = settings
        self._max_batch_size = max_batch_size
        self._given_pool = pool
        self._pool = pool
        self._windows = windows
        self._quantised = quantised
        self._rows: BatchRows | None = None
        self._places: dict[int, _Place] = {}
        self._closed = False

    @property
    def count(self) -> int:
        """Rows in use."""
        return self._rows.count if self._rows else 0

    def check_open(self) -> None:
        if self._closed:
            raise CacheClosed("the cache is closed; make a new one, and do not touch this one's tensors")

    def open_caches(self) -> list[KVCache]:
        """The caches that the layers lie in."""
        self.check_open()
        return list(dict.fromkeys(place.cache for place in self._places.values()))

    # Tokens

    def observe(self, index: int, key: Tensor, value: Tensor) -> View:
        """Looks at an update that is the first of its layer, or unlike those before it."""
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
                except BaseException:  # in the first forward pass: what layers before this one stored is all there is
                    self.lengths = [0] * len(self.lengths)
                    self.end = -1
                    self.settle()
                    raise
            self._show(index)
        view = self.views[index]
        assert view is not None
        return view

    def advance(self, index: int, tokens: int) -> None:
        """Backs what a forward pass adds, before the first of its layers stores anything."""
        self.check_open()
        self._check_even()
        assert self._rows is not None
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

    def cut(self, lengths: Mapping[int, int]) -> None:
        """Forgets tokens of layers from these lengths on.

        Raises:
            InvalidLength: windows that were shown there are gone. Nothing changed.
        """
        self.check_open()
        after = [min(length, lengths.get(index, length)) for index, length in enumerate(self.lengths)]
        if self._rows is not None and max(after) < self._rows.length:
            self._rows.step(max(after))
        self.lengths = after
        self.end = -1

    def first_kept(self, index: int) -> int:
        """The first token of a layer that is still there."""
        window = self._windows[index]
        return 0 if window is None or self._rows is None else max(0, self._rows.start - window + 1)

    def restore(self, source: Storage) -> None:
        """Takes over what another storage of the same config keeps; this one is empty."""
        for index, length in enumerate(source.lengths):
            if not length:
                continue
            shape, first = source._places[index].shape, source.first_kept(index)
            rows = source.count, shape.num_kv_heads, 0
            key, value = (
                torch.empty(*rows, dim, dtype=shape.dtype, device=shape.device)
                for dim in (shape.head_dim, shape.v_head_dim)
            )
            view, kept = self.observe(index, key, value), source.views[index]
            assert kept is not None
            if length != self.end:
                self.advance(index, length)
            for tensor, other in zip(view.stored, kept.stored, strict=True):
                tensor.narrow(2, first, length - first).copy_(other.narrow(2, first, length - first))
            self.lengths[index] = length

    def settle(self) -> None:
        """Tells the caches that tokens were forgotten."""
        if self._rows is not None and max(self.lengths) < self._rows.length:
            self._rows.step(max(self.lengths))

    # Rows

    def select(self, sources: Sequence[int]) -> None:
        """Row i becomes what row `sources[i]` was; there are as many rows as sources afterwards."""
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
        if len(sources) > self._rows.capacity:
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
        """Other rows than before, of an empty cache."""
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
            for cache in self._reserve(self._max_batch_size or batch, batch, 0):
                cache.close()
        self._show_all()

    def _move(self, sources: Sequence[int]) -> None:
        """To a larger reservation."""
        length = max(self.lengths)
        before = {index: view.stored for index, view in enumerate(self.views) if view is not None}
        assert self._rows is not None
        start = self._rows.start
        left = self._reserve(len(sources), len(sources), length)
        self._rows.start = start
        rows = torch.tensor(sources)
        with torch.no_grad():
            for index, old in before.items():
                self._show(index)
                first = self.first_kept(index)
                view = self.views[index]
                assert view is not None
                for tensor, source in zip(view.stored, old, strict=True):
                    kept = source.narrow(2, first, length - first)
                    tensor.narrow(2, first, length - first).copy_(kept[rows.to(source.device)])
        for cache in left:
            cache.close()

    def _check_even(self) -> None:
        lengths = {self.lengths[index] for index in self._shown()}
        if len(lengths) > 1:
            raise VattnError(
                f"the layers hold {sorted(lengths)} tokens: a forward pass did not end, or another model's went "
                "through this cache. reset() it, or crop(n) it to its first n tokens; a cache serves one model"
            )

    # Memory

    def _place(self, index: int, shape: Shape) -> None:
        """Makes the cache of a layer and of those with its window that were not seen yet: they tend to be alike."""
        assert self._rows is not None
        window = self._windows[index]
        alike = [i for i, other in self._windows.items() if other == window and self.views[i] is None]
        if self._pool is None:
            everything = _kv_config(
                self._groups(shape, range(len(self._windows)), None)[0], self._rows.slots, self._settings
            )
            page_size = resolve(everything)[0].page_size
            budget = budget_bytes(everything.memory_budget, everything.device, everything.memory_utilization)
            self._pool = PagePool(budget, device=everything.device, page_size=page_size, guard=everything.guard)
        groups, scales = self._groups(shape, alike, window)
        cache = KVCache(_kv_config(groups, self._rows.slots, self._settings), pool=self._pool)
        self._rows.add(cache)
        self._places |= {layer: _Place(cache, layer, scales.get(layer), shape) for layer in alike}

    def _groups(
        self, shape: Shape, layers: Iterable[int], window: int | None
    ) -> tuple[list[TensorGroup], dict[int, Scales]]:
        """The tensor groups of layers of one shape and window, and where the scales of each are."""
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
        """New caches in place of all, for so many rows of that length; the old ones. A failure changes nothing."""
        rows = BatchRows(capacity, count)
        caches = {}
        for old in self.open_caches():
            caches[old] = KVCache(replace(old.config, max_batch_size=rows.slots), pool=self._pool)
            rows.add(caches[old])
        rows.step(length)
        self._rows = rows
        self._places = {index: replace(place, cache=caches[place.cache]) for index, place in self._places.items()}
        return list(caches)

    def _shown(self) -> list[int]:
        return [index for index, view in enumerate(self.views) if view is not None]

    def _show_all(self) -> None:
        for index in self._shown():
            self._show(index)

    def _show(self, index: int) -> None:
        place = self._places[index]
        keys, values = (tensor.transpose(1, 2).narrow(0, 0, self.count) for tensor in place.cache.layer(place.layer))
        shape = place.shape
        scales = None
        if place.scales is not None:
            # One row for all layers: as heads of one element, like the codes' heads.
            row = place.cache.layer(place.scales.layer)[0].narrow(0, 0, self.count)[:, :, 0].transpose(1, 2)[..., None]
            # V of no elements has no scales either, and takes K's place without a use.
            per_value = place.scales.values if shape.v_head_dim else place.scales.keys
            scales = row[:, place.scales.keys], row[:, per_value][..., : 1 if shape.v_head_dim else 0]
        self.views[index] = View(
            keys,
            values,
            scales,
            (self.count, shape.num_kv_heads, shape.head_dim, shape.v_head_dim, shape.dtype),
            folds=shape.device.type == "cpu"
            and self._config._attn_implementation in ("sdpa", "vattn")
            and getattr(self._config, "num_attention_heads", shape.num_kv_heads) != shape.num_kv_heads,
        )

    def stats(self) -> CacheStats:
        parts = [cache.stats() for cache in self.open_caches()]
        if not parts:
            raise VattnError("there are no stats before the first update, which decides what the cache holds")
        if len(parts) == 1:
            return parts[0]
        assert self._pool is not None
        budget, free = self._pool.total_pages, self._pool.free_pages
        owned, parked, cached = (
            sum(getattr(part, f"{name}_pages") for part in parts) for name in ("owned", "parked", "cached")
        )
        return replace(
            parts[0],
            budget_pages=budget,
            free_pages=free,
            owned_pages=owned,
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
        for cache in self.open_caches():
            cache.close()
        if self._pool is not None and self._pool is not self._given_pool:
            self._pool.close()
        self._closed = True
        self.views = [None] * len(self.views)
        self._places.clear()

    def __str__(self) -> str:
        if self._closed:
            return "closed"
        return f"{self.count} rows of {max(self.lengths)} tokens" + "".join(f", {c}" for c in self.open_caches())


def _kv_config(groups: Sequence[TensorGroup], slots: int, settings: dict[str, Any]) -> KVConfig:
    return KVConfig(groups=groups, max_batch_size=slots, **settings)
