"""VirtualCache: the cache of `generate()`, in virtual memory.

    model.generate(**inputs, cache=vattn.VirtualCache(model, max_context_len=131072))

(`past_key_values=` before transformers 5.24.)

New keys and values are written in place, and the model gets views of them: growing copies nothing, only address space
is reserved, and memory is mapped for the tokens that are there. The shapes that a model stores are not read from its
config but taken from the first update of each layer.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Self, get_args

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from vattn.config import OF_ONE_GROUP, KVConfig
from vattn.errors import ConfigError, InvalidLength, UnsupportedModel, VattnError
from vattn.hf.attended import Attended, as_plain, reduced
from vattn.hf.storage import Saved, Storage, View
from vattn.integers import as_int, shown
from vattn.pool.pool import PagePool
from vattn.quantised import KVCacheDtype
from vattn.stats import CacheStats
from vattn.units import parse_bytes

try:
    from transformers.cache_utils import DummyLayer
except ImportError:  # before transformers 5.20; layers that use another's K and V have no entry there

    class DummyLayer:  # type: ignore[no-redef]
        pass


# Nothing is mapped or created ahead: most of these caches are short-lived, and one has few rows.
_ON_DEMAND = {"eager_pages": 0, "watermark": 0}
_CUDA_GRANULARITY = 2 * 2**20  # of all GPUs so far
# Options of KVConfig that the first update determines.
_OBSERVED = {*OF_ONE_GROUP, "groups", "dtype", "device"}


class VirtualCache(DynamicCache):
    """A transformers cache whose memory grows with its tokens, in place.

    Rows are contiguous in virtual memory. Pages are mapped as tokens arrive; those for the next token are mapped while
    the model computes. Batch size, heads, head sizes, element type and device are those of the first update. Supports
    everything that `generate()` does with a `DynamicCache`, which is its base class because code asks for one before it
    crops, for example; beams share the pages of their common prefix. On a CPU, vattn's own kernels compute attention
    where they can (`vattn.hf.attended`); the model itself is not changed.

    Also a context manager that closes the cache. The memory is freed with the last reference, too.

    Args:
        model_or_config: the model, or its config.
        max_context_len: most tokens of a row; only address space depends on it. By default the model's limit
            on positions; where tokens of images have none (GIT), it has to be larger.
        max_batch_size: most rows (prompts times beams). Address space is reserved for this many, so that rows added
            later share memory with the rows that they repeat. By default the rows of the first update; if more are
            needed later, all rows move to a larger reservation.
        memory_budget: physical memory that may be mapped, as in `KVConfig`. "auto" is measured at the first update,
            when the model is loaded.
        kv_cache_dtype: "int8" stores 8-bit codes with a scale per token and head (`vattn.quantised`): about half the
            memory of bfloat16, at the price of a small error and, where attention is not computed by vattn's kernels
            or a batch is padded, of a copy of the tokens that a layer attends to. "auto" stores keys and values as
            computed.
        pool: physical pages shared with other caches.
        options: other keywords of `KVConfig`: page_size, layout, kv_order, guard, overlap, watermark, ...
            `eager_pages` and `watermark` are 0 unless given.

    Raises:
        UnsupportedModel: the model has layers with other state than K and V (recurrent, chunked attention).
        ConfigError: an option is unknown, contradictory or out of range.
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PretrainedConfig,
        *,
        max_context_len: int | None = None,
        max_batch_size: int | None = None,
        memory_budget: int | str = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        pool: PagePool | None = None,
        **options: Any,
    ) -> None:
        config = _text_config(model_or_config)
        kinds = _model_layers(config)
        if max_context_len is None:
            max_context_len = getattr(config, "max_position_embeddings", None)
            if max_context_len is None:
                raise ConfigError(
                    f"the config of {config.model_type!r} states no longest context; give max_context_len"
                )
        KVConfig.check_options(options, _OBSERVED, "the first update decides")
        settings = {"max_context_len": max_context_len, "memory_budget": memory_budget, **_ON_DEMAND, **options}
        shape: dict[str, Any] = dict.fromkeys(("num_layers", "num_kv_heads", "head_dim"), 1)
        rows = 1 if max_batch_size is None else max_batch_size
        if memory_budget != "auto":
            parse_bytes(memory_budget, "memory_budget")
        device = _pages_of(model_or_config, settings.get("page_size", "auto"))
        KVConfig.from_options(**shape, dtype="float32", max_batch_size=rows, device=device, **settings)
        if kv_cache_dtype not in get_args(KVCacheDtype):
            raise ConfigError(f"kv_cache_dtype={kv_cache_dtype!r} is not one of {', '.join(get_args(KVCacheDtype))}")
        self._arguments = {
            **settings,
            "max_batch_size": max_batch_size,
            "pool": pool,
            "kv_cache_dtype": kv_cache_dtype,
        }
        self._config = config
        if pool is not None and not isinstance(pool, PagePool):
            raise ConfigError(f"pool is {shown(pool)}; give a vattn.PagePool, or None")
        # None stands for full attention; a dummy layer uses the K and V of another, or has no attention.
        windows = {
            index: getattr(kind, "sliding_window", None)
            for index, kind in enumerate(kinds)
            if not isinstance(kind, DummyLayer)
        }
        quantised = kv_cache_dtype == "int8"
        self._storage = Storage(config, settings, max_batch_size, pool, len(kinds), windows, quantised=quantised)
        # Not DynamicCache's, whose layers these replace.
        Cache.__init__(self, layers=[_layer(self._storage, index, kind) for index, kind in enumerate(kinds)])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the new tokens of a layer and returns views of all tokens that it attends to.

        Args:
            key_states, value_states: `[batch, num_kv_heads, new tokens, head_dim]`, V with its own head size.

        Returns:
            K and V `[batch, num_kv_heads, tokens, head_dim]`: views of the cache's memory for this forward pass. They
            are to be read: rows may share their pages. They may outlive it, but their contents change with the cache;
            keep `layers[i].keys` and `values` instead, or write to these. Outside of `torch.no_grad()` and
            `torch.inference_mode()`, copies: autograd may keep them, also where only queries need gradients.

        Raises:
            OutOfPages: the budget lacks pages. Nothing was stored; the cache is as before the forward pass.
            InvalidLength: more than `max_context_len` tokens.
            ConfigError: rows or shapes differ from those in the cache, which may be another model's; or K and V are not
                those of the same tokens.
            CacheClosed: the cache is closed.
        """
        if torch.compiler.is_compiling():
            # The driver's calls cannot be traced.
            traced: tuple[Tensor, Tensor] = _update_uncompiled(self, key_states, value_states, layer_idx)
            return traced
        if not 0 <= layer_idx < len(self.layers):
            raise ConfigError(
                f"layer {layer_idx} of a model; this cache was made for one of {len(self.layers)} layers "
                f"({self._config.model_type}). Make a cache per model"
            )
        stored: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states)  # type: ignore[union-attr]
        return stored

    def reset(self) -> None:
        """Discards all tokens; the next ones may be of another element type. The memory is kept for tokens of the same
        type; `trim` returns it to the machine.
        """
        self._storage.cut(dict.fromkeys(range(len(self._storage.lengths)), 0), reset=True)

    def crop(self, tokens_to_remove: int) -> None:
        """Discards the last tokens of every row; no memory is mapped or unmapped.

        Args:
            tokens_to_remove: their number, negated. A positive number is that of the tokens to keep, as in earlier
                releases of transformers.

        Raises:
            InvalidLength: a sliding window at the new length would reach tokens whose memory was given back; or this is
                not a whole number. Nothing changed; one call can always crop the tokens of the last forward pass, and a
                few more, and after `activate_past_recording` all tokens since then or since the last crop.
        """
        lengths = enumerate(self._storage.lengths)
        self._storage.cut({index: _kept(length, tokens_to_remove) for index, length in lengths})

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces row i by row `beam_idx[i]`. Short differences are copied, long ones are mapped (`BatchRows`).

        Raises:
            ConfigError: these are not row numbers, or more than `max_batch_size`. Nothing changed.
            OutOfPages, DriverError: a row could not be replaced. The cache is empty, or nothing changed.
        """
        self._storage.select(_row_numbers(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row; the copies share its pages if `max_batch_size` reserved rows for them. Errors are those of
        `reorder_cache`.
        """
        try:
            times = as_int(repeats)
        except TypeError as error:
            raise ConfigError(f"repeats: {error}") from None
        self._storage.select([row for row in range(self._storage.count) for _ in range(times)])

    def batch_select_indices(self, indices: Tensor | Sequence[int] | slice) -> None:
        """Keeps the rows that `indices` select of a tensor: row numbers, a mask or a slice. Errors are those of
        `reorder_cache`.
        """
        self._storage.check_open()
        if any(self._storage.lengths):
            self._storage.select(_selected(self._storage.count, indices))

    @property
    def max_context_len(self) -> int:
        """Most tokens of a row."""
        return self._storage.max_context_len

    def stats(self) -> CacheStats:
        """A snapshot of pages, bytes, calls and times.

        Raises:
            VattnError: there was no update yet, and so no memory.
        """
        return self._storage.stats()

    def check(self) -> None:
        """Asserts that all pages are where the cache's records say (`KVCache.check`), and that the next update has the
        memory that it is believed to have.
        """
        self._storage.check()

    def trim(self) -> int:
        """Returns memory without tokens to the machine, and the number of its bytes."""
        return self._storage.trim()

    def close(self) -> None:
        """Frees the memory; memory that tensors from the cache still show is freed with the last of them. Afterwards
        calls that need its contents raise `CacheClosed`.
        """
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> VirtualCache:
        """An independent cache with the same tokens: two caches cannot have one memory."""
        return _load(self._config, self._arguments, self._storage.saved())

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualCache:
        copied = memo[id(self)] = copy.copy(self)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Keys and values as independent tensors, and the cache's arguments except for the pool."""
        *rest, layers = self._storage.saved()
        kept = [
            None
            if layer is None
            else (*layer[:3], tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in layer[3]))
            for layer in layers
        ]
        return reduced(_load, (self._config, self._arguments | {"pool": None}, (*rest, kept)))

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Keys, values and sliding window of every layer, as `DynamicCache` yields and accepts them."""
        for layer in self.layers:
            window = getattr(layer, "sliding_window", None)
            yield layer.keys, layer.values, None if window is None else torch.tensor(window, device="cpu")  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return f"VirtualCache({self._storage})"


class VirtualLayer(CacheLayerMixin):
    """A layer of a `VirtualCache`: where its tokens end, and which of them queries see."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, storage: Storage, index: int) -> None:
        # Not the mixin's: `keys`, `values` and `is_initialized` are derived.
        self._storage = storage
        self._index = index

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether there was an update since the layer was made or reset: models recognise a prompt by it."""
        return self._storage.initialized[self._index] and self._storage.views[self._index] is not None

    @property
    def keys(self) -> Tensor | None:
        """K of all tokens, `[batch, num_kv_heads, tokens, head_dim]`; None before the first update, and after `reset`.

        Writing to it changes the cache, unless it is stored in 8 bits and this is a copy. It may be kept: its contents
        do not change with the cache. An assignment replaces K of all tokens. Rows that share pages, as beams do, get
        pages of their own first.

        Raises:
            ConfigError: an assigned tensor has another shape, or a type that the layer's cannot represent.
            OutOfPages: the budget has no pages for rows of their own, or for a copy beside tensors that were kept.
                Nothing changed.
        """
        return self._part(0)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._assign(0, keys)

    @property
    def values(self) -> Tensor | None:
        """V of all tokens; see `keys`."""
        return self._part(1)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._assign(1, values)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of keys and values."""
        return self._shown().dtype

    @property
    def device(self) -> torch.device:
        """The device of keys and values."""
        return self._shown().keys.device

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._storage.observe(self._index, key_states, value_states)
        self._storage.initialized[self._index] = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        storage, index = self._storage, self._index
        view = storage.views[index]
        if view is None or not storage.initialized[index] or not view.takes(key_states, value_states):
            view = None  # a traceback would keep its memory
            view = storage.observe(index, key_states, value_states)
        start, tokens = storage.lengths[index], key_states.shape[2]
        end = start + tokens
        if end != storage.end:
            view = None
            view = storage.advance(index, tokens)
        first = self._first_seen(start)
        if torch.is_grad_enabled():
            keys, values = self._update_for_autograd(view, key_states, value_states, first, start)
        elif view.scales is None:
            view.keys.narrow(2, start, tokens).copy_(key_states)
            view.values.narrow(2, start, tokens).copy_(value_states)
            keys, values = view.keys.narrow(2, first, end - first), view.values.narrow(2, first, end - first)
            if view.attended:
                keys = keys.as_subclass(Attended)
                if tokens > 1:  # only then transformers may repeat them
                    values = values.as_subclass(Attended)
        else:
            view.store(key_states, value_states, start)
            keys, values = view.coded(first, end) if view.attended else view.read(first, end)
        storage.lengths[index] = end
        storage.initialized[index] = True
        return keys, values

    def _update_for_autograd(
        self, view: View, key_states: Tensor, value_states: Tensor, first: int, start: int
    ) -> tuple[Tensor, Tensor]:
        """Stores new tokens; returns copies of K and V, which autograd may keep; gradients flow to new tokens only."""
        storage, index = self._storage, self._index
        graded, lost = key_states.requires_grad or value_states.requires_grad, start > storage.ungraded[index]
        with torch.no_grad():
            view.store(key_states, value_states, start)
            if not graded and not lost:  # the queries may need gradients all the same
                keys, values = view.read(first, start + key_states.shape[2])
                return (keys.clone(), values.clone()) if view.scales is None else (keys, values)
            before = view.read(first, start)
        if lost:
            anchor = torch.empty(0, requires_grad=True)
            before = _NoGradient.apply(before[0], anchor), _NoGradient.apply(before[1], anchor)
        if graded:
            storage.ungraded[index] = min(start, storage.ungraded[index])
        keys, values = (
            torch.cat([old, new.to(old.dtype)], dim=2)
            for old, new in zip(before, (key_states, value_states), strict=True)
        )
        return keys, values

    def get_seq_length(self) -> int:
        return self._storage.length(self._index)

    def get_max_length(self) -> int:
        return self._storage.max_context_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.get_seq_length()
        first = self._first_seen(length)
        return length + query_length - first, first

    def reset(self) -> None:
        self._storage.cut({self._index: 0}, reset=True)

    def crop(self, tokens_to_remove: int) -> None:
        self._storage.cut({self._index: _kept(self.get_seq_length(), tokens_to_remove)})

    def offload(self) -> None:
        raise ConfigError("a VirtualCache stays on the model's device; for offloading use transformers' own caches")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise _of_all_layers("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _of_all_layers("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise _of_all_layers("batch_select_indices")

    def _first_seen(self, start: int) -> int:
        """The first token that a query at `start` sees."""
        return 0

    def _part(self, which: int) -> Tensor | None:
        length = self.get_seq_length()
        part = self._storage.part(self._index, self._first_seen(length), length)
        return None if part is None else part[which]

    def _assign(self, which: int, rows: Tensor | None) -> None:
        self._storage.assign(self._index, which, self._first_seen(self.get_seq_length()), rows)

    def _shown(self) -> View:
        self._storage.check_open()
        view = self._storage.views[self._index]
        if view is None:  # as a DynamicLayer has it
            raise AttributeError(f"layer {self._index} has neither dtype nor device before its first update")
        return view

    def __reduce__(self) -> Any:
        raise VattnError("layers lie in one memory: copy or pickle the cache, not a layer")


class VirtualSlidingLayer(VirtualLayer):
    """A layer with a sliding window; memory behind it is given back in whole token blocks."""

    is_sliding = True

    def __init__(self, storage: Storage, index: int, window: int) -> None:
        super().__init__(storage, index)
        self.sliding_window = window

    @property
    def record_past(self) -> bool:
        """Whether tokens that leave the window are kept until the next `crop`, so that it can go back to them."""
        return self._storage.recording[self._index]

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self._storage.recording[self._index] = recording

    def activate_past_recording(self) -> None:
        self.record_past = True

    def _first_seen(self, start: int) -> int:
        return max(0, start - self.sliding_window + 1)


def _kept(length: int, tokens_to_remove: object) -> int:
    """The tokens of a layer that remain after `crop`."""
    try:
        tokens = as_int(tokens_to_remove)  # assisted generation passes a tensor in older releases of transformers
    except TypeError as error:
        raise InvalidLength(f"tokens_to_remove: {error}") from None
    return max(0, length + tokens) if tokens <= 0 else min(length, tokens)


def _selected(count: int, indices: Any) -> list[int]:
    """The numbers of the rows that torch's indexing selects of so many."""
    try:
        rows = torch.arange(count, device="cpu")[indices.cpu() if isinstance(indices, Tensor) else indices, ...]
        if rows.ndim != 1:
            raise IndexError("give one dimension")
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{shown(indices)} are no indices of {count} rows: {error}") from None
    return rows.tolist()


def _row_numbers(indices: object) -> list[int]:
    try:
        rows = indices if isinstance(indices, Tensor) else torch.tensor(indices, device="cpu")
        if rows.ndim == 1 and not rows.numel():
            return []
        if rows.ndim == 1 and rows.dtype in (torch.int32, torch.int64):  # as `index_select` takes them
            return rows.tolist()
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ConfigError(f"{shown(indices)} are no row numbers; give a tensor of integers with one dimension")


def _pages_of(model_or_config: Any, page_size: object) -> str:
    """The kind of device that has to have pages of this size: the model's. A config does not say where its model is, so
    sizes that only CUDA has may pass, and the first update decides.
    """
    parameter = next(model_or_config.parameters(), None) if isinstance(model_or_config, torch.nn.Module) else None
    if parameter is not None and parameter.device.type in ("cpu", "cuda"):
        return str(parameter.device.type)
    return "cuda" if isinstance(page_size, int) and page_size > 0 and page_size % _CUDA_GRANULARITY == 0 else "cpu"


def _text_config(model_or_config: Any) -> PretrainedConfig:
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, PretrainedConfig):
        raise ConfigError(f"{type(model_or_config).__name__} is neither a transformers model nor its config")
    if config.is_encoder_decoder:
        raise _unsupported(config, "is an encoder-decoder, whose cross-attention needs a cache of its own")
    text = config.get_text_config(decoder=True)
    # Of a hybrid that lists its layers, these say it: all of them may be attention.
    if getattr(model_or_config, "_is_stateful", False) and getattr(text, "layer_types", None) is None:
        raise _unsupported(config, "keeps recurrent state besides keys and values")
    return text


def _model_layers(config: PretrainedConfig) -> list[Any]:
    """The layers of a DynamicCache for the model, which tell the kind of each layer.

    Raises:
        UnsupportedModel: a layer has other state than K and V.
    """
    if getattr(config, "cross_attention_layers", None):
        raise _unsupported(config, "has cross-attention layers, whose length is an image's")
    kinds = getattr(config, "layer_types", None)
    if "chunked_attention" in kinds if kinds else getattr(config, "attention_chunk_size", None):
        raise _unsupported(config, "has chunked attention layers")
    if "recurrent" in getattr(config, "layers_block_type", ()):  # older DynamicCaches take them for attention
        raise _unsupported(config, "has recurrent layers, with state besides keys and values")
    if getattr(config, "recurrent_kv_cache_mode", None) == "per_loop" and config.n_recurrent_loops > 1:  # Dory
        raise _unsupported(config, "copies layers of its cache for every further loop through them")
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as error:
        raise _unsupported(config, f"has layers of type {error}") from error
    except AttributeError as error:  # Blt: several decoders, whose layers have different lengths
        raise _unsupported(config, "has a config that says nothing of its layers") from error
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer):
            raise _unsupported(config, f"has layers with state besides keys and values ({type(layer).__name__})")
    return layers


def _layer(storage: Storage, index: int, kind: Any) -> VirtualLayer | DummyLayer:
    if isinstance(kind, DummyLayer):
        return kind
    if isinstance(kind, DynamicSlidingWindowLayer):
        return VirtualSlidingLayer(storage, index, kind.sliding_window)
    return VirtualLayer(storage, index)


def _unsupported(config: PretrainedConfig, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model_type {config.model_type!r} {why}; a VirtualCache is for layers of full or sliding-window attention. "
        "Use transformers' DynamicCache for this model."
    )


class _NoGradient(torch.autograd.Function):
    """Passes stored tokens through, with a backward pass that raises."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, new: Tensor) -> Tensor:
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise VattnError(
            "a VirtualCache keeps no gradients of tokens of earlier forward passes, nor of keys and values that were "
            "assigned to its layers. Compute a prefix that needs none "
            "under torch.no_grad(); train the rest with use_cache=False, or a DynamicCache"
        )


def _load(config: PretrainedConfig, arguments: dict[str, Any], saved: Saved) -> VirtualCache:
    """A cache with these tokens."""
    cache = VirtualCache(config, **arguments)
    try:
        cache._storage.restore(saved)
    except BaseException as error:
        # The traceback may live long: it must keep neither this cache nor tensors of the copied one.
        del saved
        traceback.clear_frames(error.__traceback__)
        cache.close()
        raise
    return cache


def _of_all_layers(method: str) -> VattnError:
    return VattnError(f"rows move in all layers at once: call {method} of the cache, not of a layer")


@torch.compiler.disable
def _update_uncompiled(cache: VirtualCache, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    # Compiled graphs take no subclasses that answer calls of SDPA.
    keys, values = (as_plain(rows) for rows in cache.update(key, value, layer))
    return keys, values
