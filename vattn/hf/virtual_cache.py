"""VirtualCache: the cache of `generate()`, in virtual memory.

    model.generate(**inputs, past_key_values=vattn.VirtualCache(model, max_context_len=131072))

New keys and values are written in place, and the model gets views of what is there: nothing is copied to grow, nothing
is reserved but address space, and the memory is that of the tokens. What a model stores is not asked of its config but
seen in the first update of each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from vattn.cache import KVCache
from vattn.config import KVConfig, budget_bytes, resolve
from vattn.errors import CacheClosed, ConfigError, InvalidLength, UnsupportedModel, VattnError
from vattn.hf.batch_rows import BatchRows
from vattn.hf.folding import FoldingKeys
from vattn.pool import PagePool
from vattn.stats import CacheStats

# What the first update decides, and what a batch in lockstep has no use for.
_OBSERVED = {"num_layers", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "device"}


class VirtualCache(Cache):
    """A transformers cache whose memory grows with its tokens, in place.

    Rows are kept contiguous in virtual memory; pages are mapped under them as tokens arrive, those of the next token
    while the model computes. Batch size, heads, head sizes, element type and device are those of the first update. Works
    with everything that `generate()` does with a `DynamicCache`; beams share the pages of their common prefix. Decode steps
    on a CPU fold grouped queries, which torch's SDPA is slow at otherwise (`vattn.hf.folding`); the model stays as it is.

    Also a context manager, which closes it; losing the last reference gives the memory back as well.

    Args:
        model_or_config: the model that it is for, or its config.
        max_context_len: most tokens of a row; only address space depends on it. By default the model's own limit.
        max_batch_size: most rows (prompts times beams). Address space for so many is reserved, so that rows added later
            share memory with those that they repeat. By default the rows of the first update; where more are needed
            later, they move to a larger reservation.
        memory_budget: physical memory that may be mapped, as in `KVConfig`; measured at the first update where it is
            "auto", so after the model is loaded.
        pool: physical pages to draw on, shared with other caches.
        options: further keywords of `KVConfig`: page_size, layout, kv_order, guard, overlap, watermark, ...

    Raises:
        UnsupportedModel: a model with recurrent, chunked or other layers that do not just keep K and V.
        ConfigError: an option that is unknown, contradictory or out of range.
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PretrainedConfig,
        *,
        max_context_len: int | None = None,
        max_batch_size: int | None = None,
        memory_budget: int | str = "auto",
        pool: PagePool | None = None,
        **options: Any,
    ) -> None:
        config = _text_config(model_or_config)
        if max_context_len is None:
            max_context_len = getattr(config, "max_position_embeddings", None)
            if max_context_len is None:
                raise ConfigError(
                    f"the config of {config.model_type!r} states no longest context; give max_context_len"
                )
        if taken := sorted(_OBSERVED & options.keys()):
            raise ConfigError(f"{', '.join(taken)}: the first update decides; leave out")
        settings = {"max_context_len": max_context_len, "memory_budget": memory_budget, "eager_pages": 0, **options}
        shape: dict[str, Any] = dict.fromkeys(("num_layers", "num_kv_heads", "head_dim"), 1)
        KVConfig.from_options(**shape, dtype="float32", max_batch_size=max_batch_size or 1, **settings)
        if max_batch_size is not None and max_batch_size < 1:
            raise ConfigError(f"max_batch_size={max_batch_size} must be at least 1")
        self._arguments = {**settings, "max_batch_size": max_batch_size, "pool": pool}
        self._config = config
        models = _model_layers(config)
        windows = [getattr(layer, "sliding_window", None) for layer in models]
        self._storage = storage = _Storage(config, settings, max_batch_size, pool, windows)

        def layer(index: int) -> VirtualLayer | DummyLayer:
            if isinstance(models[index], DummyLayer):  # it uses the K and V of another
                return DummyLayer()
            window = windows[index]
            return VirtualLayer(storage, index) if window is None else VirtualSlidingLayer(storage, index, window)

        super().__init__(layers=[layer(index) for index in range(len(models))])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the new tokens of a layer and gives all that it attends to, as views.

        Args:
            key_states, value_states: `[batch, num_kv_heads, new tokens, head_dim]`, V with its own head size.

        Returns:
            K and V `[batch, num_kv_heads, tokens, head_dim]`, valid until the cache is reset, reordered or closed.

        Raises:
            OutOfPages: the budget does not have the pages. Nothing is stored; the cache is as before the forward pass.
            InvalidLength: more than `max_context_len` tokens.
            ConfigError: other rows or shapes than the cache holds, of another model say.
            CacheClosed: after `close`.
        """
        if torch.compiler.is_compiling():
            return _update_uncompiled(self, key_states, value_states, layer_idx)  # the driver's calls cannot be traced
        if layer_idx >= len(self.layers):
            raise ConfigError(
                f"layer {layer_idx} of a model; this cache was made for one of {len(self.layers)} layers "
                f"({self._config.model_type}). Make a cache per model"
            )
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        return keys, values

    def reset(self) -> None:
        """Forgets all tokens. The memory stays, for the next ones; `trim` gives it back."""
        super().reset()
        self._storage.settle()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens of every row; no memory moves.

        Args:
            tokens_to_remove: how many, as a negative number; a positive one is how many to keep, as transformers once had it.
        """
        super().crop(tokens_to_remove)
        self._storage.settle()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was. Short differences are copied, longer ones mapped (`BatchRows`)."""
        self._storage.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row; the copies share its pages where rows of `max_batch_size` are reserved."""
        self._storage.select([row for row in range(self._storage.count) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, numbers or a mask."""
        kept = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._storage.select(kept.tolist())

    @property
    def max_context_len(self) -> int:
        """Most tokens of a row."""
        return self._storage.max_context_len

    def stats(self) -> CacheStats:
        """A snapshot of pages, bytes, calls and times.

        Raises:
            VattnError: before the first update, which decides what there is.
        """
        return self._storage.stats()

    def check(self) -> None:
        """Asserts that every page is where the books say (`KVCache.check`)."""
        for cache in self._storage.open_caches():
            cache.check()

    def trim(self) -> int:
        """Gives memory that holds no tokens back to the machine, and returns its bytes."""
        return self._storage.trim()

    def close(self) -> None:
        """Gives all memory back; afterwards every call raises, and tensors got from `update` must not be touched."""
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualCache:
        """A cache of its own with the same tokens."""
        storage = self._storage
        storage.check_open()
        copied = VirtualCache(self._config, **self._arguments)
        memo[id(self)] = copied
        for index, length in enumerate(storage.lengths):
            if length:
                keys, values = storage.tensors(index)
                copied.update(keys.narrow(2, 0, length), values.narrow(2, 0, length), index)
        return copied

    def __repr__(self) -> str:
        return f"VirtualCache({self._storage})"


class VirtualLayer(CacheLayerMixin):
    """One layer of a `VirtualCache`: where its tokens end, and which of them are seen."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, storage: _Storage, index: int) -> None:
        # Not the mixin's: `keys`, `values` and `is_initialized` are derived.
        self._storage = storage
        self._index = index

    @property
    def is_initialized(self) -> bool:
        """Whether its shapes are known."""
        return self._storage.views[self._index] is not None

    @property
    def keys(self) -> Tensor | None:
        """K of the tokens it has, `[batch, num_kv_heads, tokens, head_dim]`; None before the first update."""
        return self._part(0)

    @property
    def values(self) -> Tensor | None:
        """V of the tokens it has."""
        return self._part(1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._storage.observe(self._index, key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        storage, index = self._storage, self._index
        view = storage.views[index]
        batch, heads, tokens, key_dim = key_states.shape
        if view is None or (batch, heads, key_dim, value_states.shape[3], key_states.dtype) != view.accepts:
            view = storage.observe(index, key_states, value_states)
        start = storage.lengths[index]
        end = start + tokens
        if end != storage.end:
            storage.advance(index, tokens)
        first = self._first_seen(start)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            keys, values = _store_without_gradient(view, key_states, value_states, first, start, end)
        else:
            view.keys.narrow(2, start, tokens).copy_(key_states)
            view.values.narrow(2, start, tokens).copy_(value_states)
            keys, values = view.keys.narrow(2, first, end - first), view.values.narrow(2, first, end - first)
            if view.folds:
                keys = keys.as_subclass(FoldingKeys)
        storage.lengths[index] = end
        return keys, values

    def get_seq_length(self) -> int:
        self._storage.check_open()
        return self._storage.lengths[self._index]

    def get_max_length(self) -> int:
        return self._storage.max_context_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.get_seq_length()
        first = self._first_seen(length)
        return length + query_length - first, first

    def reset(self) -> None:
        self._storage.cut(self._index, 0)

    def crop(self, tokens_to_remove: int) -> None:
        length = self.get_seq_length()
        kept = length + tokens_to_remove if tokens_to_remove <= 0 else min(length, tokens_to_remove)
        self._storage.cut(self._index, max(0, kept))

    def offload(self) -> None:
        raise ConfigError("a VirtualCache stays on the model's device; for offloading use transformers' own caches")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise VattnError("rows move in all layers at once: call reorder_cache of the cache, not of a layer")

    def _first_seen(self, start: int) -> int:
        """The first token that a query at `start` sees."""
        return 0

    def _part(self, which: int) -> Tensor | None:
        self._storage.check_open()
        if self._storage.views[self._index] is None:
            return None
        length = self._storage.lengths[self._index]
        first = self._first_seen(length)
        return self._storage.tensors(self._index)[which].narrow(2, first, length - first)


class VirtualSlidingLayer(VirtualLayer):
    """A layer that sees a window; what is behind it stays, so that any length can be cropped to."""

    is_sliding = True

    def __init__(self, storage: _Storage, index: int, window: int) -> None:
        super().__init__(storage, index)
        self.sliding_window = window

    def _first_seen(self, start: int) -> int:
        return max(0, start - self.sliding_window + 1)


@dataclass(frozen=True)
class _Shape:
    """What a layer stores per token, and where."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _Shape:
        # Under autocast K may be wider than V; the wider type holds both exactly.
        dtype = torch.promote_types(key.dtype, value.dtype)
        return cls(key.shape[1], key.shape[3], value.shape[3], dtype, key.device)

    def holds(self, other: _Shape) -> bool:
        """Whether a layer of this shape stores the other's tokens without loss."""
        return replace(other, dtype=self.dtype) == self and torch.promote_types(self.dtype, other.dtype) == self.dtype

    def __str__(self) -> str:
        dims = (
            f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim} (K) and {self.v_head_dim} (V)"
        )
        return f"{self.num_kv_heads} KV heads of {dims} in {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True, slots=True)
class _View:
    """K and V of the rows in use, `[batch, num_kv_heads, max_context_len, *]`.

    Attributes:
        accepts: batch, heads, both head sizes and the type of K of an update that needs no second look.
        folds: the model's SDPA is to fold grouped queries.
    """

    keys: Tensor
    values: Tensor
    accepts: tuple[int, int, int, int, torch.dtype]
    folds: bool


@dataclass(frozen=True)
class _Place:
    """Where a layer's tokens are."""

    cache: KVCache
    layer: int
    shape: _Shape


class _Storage:
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
        windows: Sequence[int | None],
    ) -> None:
        self.max_context_len: int = settings["max_context_len"]
        self.views: list[_View | None] = [None] * len(windows)
        self.lengths = [0] * len(windows)
        self.end = -1
        self._config = config
        self._settings = settings
        self._max_batch_size = max_batch_size
        self._given_pool = pool
        self._pool = pool
        self._windows = windows
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

    def tensors(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, `[batch, num_kv_heads, max_context_len, *]`."""
        view = self.views[index]
        assert view is not None
        return view.keys, view.values

    # Tokens

    def observe(self, index: int, key: Tensor, value: Tensor) -> _View:
        """Looks at an update that is the first of its layer, or unlike those before it."""
        self.check_open()
        shape, batch = _Shape.of(key, value), key.shape[0]
        place = self._places.get(index)
        if self.views[index] is not None and place is not None and not place.shape.holds(shape):
            raise ConfigError(
                f"layer {index} holds {place.shape}; the update has {shape}. A cache serves one model: make one per model"
            )
        if batch != self.count:
            self._set_batch(batch)
        if self.views[index] is None:
            if place is None or not place.shape.holds(shape):
                self._place(index, shape)
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
                f"{start} tokens and {tokens} more are over max_context_len={self.max_context_len}; make the cache with a "
                "larger one: only address space depends on it"
            )
        if start < self._rows.length:
            self._rows.step(start)
        self._rows.step(start + tokens)
        self.end = start + tokens

    def cut(self, index: int, length: int) -> None:
        """Forgets a layer's tokens from `length` on."""
        self.check_open()
        self.lengths[index] = min(length, self.lengths[index])
        self.end = -1

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
        self.settle()
        try:
            if len(sources) > self._rows.capacity and self._max_batch_size is None:
                self._move(sources)
            else:
                self._rows.select(sources, [tensor for cache in self.open_caches() for tensor in _tensors(cache)])
        except ConfigError:
            raise
        except BaseException:
            self._forget()
            raise
        for index in self._shown():
            self._show(index)

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
            caches = self.open_caches()
            self._rows = BatchRows(self._max_batch_size or batch, batch)
            for cache in caches:
                cache.close()
            self._replace_caches(caches)
        for index in self._shown():
            self._show(index)

    def _move(self, sources: Sequence[int]) -> None:
        """To a larger reservation."""
        caches, length = self.open_caches(), max(self.lengths)
        before = {index: self.tensors(index) for index in self._shown()}
        self._rows = BatchRows(len(sources), len(sources))
        self._replace_caches(caches)
        self._rows.step(length)
        rows = torch.tensor(sources)
        with torch.no_grad():
            for index, old in before.items():
                self._show(index)
                for tensor, source in zip(self.tensors(index), old, strict=True):
                    tensor.narrow(2, 0, length).copy_(source.narrow(2, 0, length)[rows.to(source.device)])
        for cache in caches:
            cache.close()

    def _forget(self) -> None:
        self.lengths = [0] * len(self.lengths)
        self.end = -1

    def _check_even(self) -> None:
        lengths = {self.lengths[index] for index in self._shown()}
        if len(lengths) > 1:
            raise VattnError(
                f"the layers hold {sorted(lengths)} tokens: a forward pass did not end, or another model's went through this "
                "cache. reset() it, or crop(n) it to its first n tokens; a cache serves one model"
            )

    # Memory

    def _place(self, index: int, shape: _Shape) -> None:
        """Makes the cache of a layer, and of all those with its window that have not been seen yet: they tend to be alike."""
        assert self._rows is not None
        alike = [
            i for i, window in enumerate(self._windows) if window == self._windows[index] and self.views[i] is None
        ]
        if self._pool is None:
            everything = _kv_config(shape, len(self._windows), self._rows.slots, self._settings)
            page_size = resolve(everything)[0].page_size
            budget = budget_bytes(everything.memory_budget, everything.device, everything.memory_utilization)
            self._pool = PagePool(budget, device=everything.device, page_size=page_size, guard=everything.guard)
        cache = KVCache(_kv_config(shape, len(alike), self._rows.slots, self._settings), pool=self._pool)
        self._rows.add(cache)
        self._places |= {layer: _Place(cache, position, shape) for position, layer in enumerate(alike)}

    def _replace_caches(self, caches: list[KVCache]) -> None:
        """A new cache in place of each, for as many rows as there are now."""
        assert self._rows is not None
        for old in caches:
            new = KVCache(replace(old.config, max_batch_size=self._rows.slots), pool=self._pool)
            self._rows.add(new)
            self._places = {
                index: replace(place, cache=new) if place.cache is old else place
                for index, place in self._places.items()
            }

    def _shown(self) -> Iterator[int]:
        return (index for index, view in enumerate(self.views) if view is not None)

    def _show(self, index: int) -> None:
        place = self._places[index]
        keys, values = (tensor.transpose(1, 2).narrow(0, 0, self.count) for tensor in place.cache.layer(place.layer))
        shape = place.shape
        self.views[index] = _View(
            keys,
            values,
            (self.count, shape.num_kv_heads, shape.head_dim, shape.v_head_dim, shape.dtype),
            folds=shape.device.type == "cpu"
            and self._config._attn_implementation in ("sdpa", "vattn")
            and getattr(self._config, "num_attention_heads", shape.num_kv_heads) != shape.num_kv_heads,
        )

    def stats(self) -> CacheStats:
        parts = [cache.stats() for cache in self.open_caches()]
        if not parts:
            raise VattnError("there are no stats before the first update, which decides what the cache holds")
        owned, parked, cached = (
            sum(getattr(p, f"{name}_pages") for p in parts) for name in ("owned", "parked", "cached")
        )
        first = parts[0]
        return replace(
            first,
            owned_pages=owned,
            parked_pages=parked,
            cached_pages=cached,
            other_pages=first.budget_pages - first.free_pages - owned - parked - cached,
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
        caches = self.open_caches()
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


def _kv_config(shape: _Shape, num_layers: int, slots: int, settings: dict[str, Any]) -> KVConfig:
    """The cache of `num_layers` layers of one shape."""
    return KVConfig(
        num_layers=num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        dtype=shape.dtype,
        device=shape.device,
        max_batch_size=slots,
        **settings,
    )


def _tensors(cache: KVCache) -> Iterator[Tensor]:
    """All K and V of a cache, `[slots, num_kv_heads, max_context_len, *]`."""
    for index in range(cache.config.num_layers):
        for tensor in cache.layer(index):
            yield tensor.transpose(1, 2)


def _text_config(model_or_config: Any) -> PretrainedConfig:
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, PretrainedConfig):
        raise ConfigError(f"{type(model_or_config).__name__} is neither a transformers model nor its config")
    if getattr(model_or_config, "_is_stateful", False):
        raise _unsupported(config, "keeps recurrent state besides keys and values")
    return config.get_text_config(decoder=True)


def _model_layers(config: PretrainedConfig) -> list[Any]:
    """The layers that a DynamicCache of the model has: what kind each is.

    Raises:
        UnsupportedModel: one is of a kind that does not just keep K and V.
    """
    kinds = getattr(config, "layer_types", None)
    if "chunked_attention" in kinds if kinds else getattr(config, "attention_chunk_size", None):
        raise _unsupported(config, "has chunked attention layers")
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as error:
        raise _unsupported(config, f"has layers of type {error}") from error
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer):
            raise _unsupported(config, f"has layers with state besides keys and values ({type(layer).__name__})")
    return layers


def _unsupported(config: PretrainedConfig, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model_type {config.model_type!r} {why}; a VirtualCache is for layers of full or sliding-window attention. "
        "Use transformers' DynamicCache for this model."
    )


class _NoGradient(torch.autograd.Function):
    """Gives what is stored, with a backward pass that says why there is none."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, new: Tensor) -> Tensor:
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise VattnError(
            "a VirtualCache keeps no gradients of what it stores; train with use_cache=False, or a DynamicCache"
        )


def _store_without_gradient(
    view: _View, key: Tensor, value: Tensor, first: int, start: int, end: int
) -> tuple[Tensor, Tensor]:
    """An update in grad mode: the same, and `backward` raises instead of being wrong."""
    stored = []
    for tensor, new in ((view.keys, key), (view.values, value)):
        with torch.no_grad():
            tensor.narrow(2, start, end - start).copy_(new)
        stored.append(_NoGradient.apply(tensor.narrow(2, first, end - first), new))
    return stored[0], stored[1]


@torch.compiler.disable
def _update_uncompiled(cache: VirtualCache, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    return cache.update(key, value, layer)
