"""The virtual backend with 8-bit keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from vattn.attention import Contiguous, PackedBatch
from vattn.config import KVConfig
from vattn.errors import ConfigError
from vattn.quantised import KVCacheDtype, dequantise, quantise, quantised_groups

from .base import KVStats, StoredAs, register, to_host
from .contiguous import ContiguousKV
from .spec import PoolShare
from .virtual import VirtualKV


@register
class QuantisedKV(VirtualKV):
    """A `VirtualKV` of codes and scales: quantises what is written; dequantises for kernels that cannot read codes.

    Args:
        config: of the cache without quantisation, in the model's element type.

    Raises:
        ConfigError: the configuration does not fit, or its element type cannot be quantised.
    """

    kv_cache_dtype: ClassVar[KVCacheDtype] = "int8"
    stored_as: ClassVar[StoredAs] = None

    def __init__(self, config: KVConfig, *, chunk_tokens: int | None = None, share: PoolShare | None = None) -> None:
        dtypes = {group.torch_dtype for group in config.tensor_groups}
        if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
            raise ConfigError(f"only floating point of one type can be quantised, not {sorted(map(str, dtypes))}")
        self._dtype = dtypes.pop()
        layers = sorted(index for group in config.tensor_groups for index in group.indices)
        groups, places = quantised_groups(config.tensor_groups, self._dtype)
        super().__init__(replace(config, groups=groups), chunk_tokens=chunk_tokens, share=share)
        scales = (places[layer] for layer in layers)
        self._scales = ContiguousKV([place.views(self.cache.layer(place.layer)[0]) for place in scales])
        self._codes = [
            replace(self._stored[layer], scales=(scales.key, scales.value))
            for layer, scales in zip(layers, map(self._scales.stored, layers), strict=True)
        ]
        self._device = config.device
        # What `read` dequantises keys and values into. Kernels that read codes never call it.
        self._buffers: list[Tensor | None] = [None, None]
        self._most_buffered = 0  # bytes

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        (key, key_scales), (value, value_scales) = quantise(key), quantise(value)
        super().write(layer, batch, key, value)
        self._scales.write(layer, batch, key_scales, value_scales)

    def homes(self, layer: int) -> None:
        """As the protocol says: what is stored are codes."""

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        codes = super().read(layer, slot, length, start)
        scales = self._scales.read(layer, slot, length, start)
        key, value = (dequantise(codes[side], scales[side], self._buffer(side, codes[side].shape)) for side in (0, 1))
        return key, value

    def stored(self, layer: int) -> Contiguous:
        """As the protocol says: codes with scales."""
        return self._codes[layer]

    def copy_out(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, ...]:
        codes, scales = super().read(layer, slot, length, start), self._scales.read(layer, slot, length, start)
        return to_host(*codes, *scales)

    def copy_in(self, layer: int, batch: PackedBatch, rows: Sequence[Tensor]) -> None:
        super().write(layer, batch, *rows[:2])
        self._scales.write(layer, batch, *rows[2:])

    def trim(self) -> int:
        freed = super().trim() + self._buffered()
        self._buffers = [None, None]
        return freed

    def stats(self) -> KVStats:
        stats, buffered = super().stats(), self._buffered()
        return replace(
            stats,
            reserved_bytes=stats.reserved_bytes + buffered,
            physical_bytes=stats.physical_bytes + buffered,
            peak_physical_bytes=stats.peak_physical_bytes + self._most_buffered,
        )

    def close(self) -> None:
        self._scales.close()
        self._codes, self._buffers = [], [None, None]
        super().close()

    def _buffered(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def _buffer(self, side: int, shape: Sequence[int]) -> Tensor:
        """Room for keys (0) or values (1) of a slot; reused for all slots, since a kernel reads one at a time."""
        size, buffer = math.prod(shape), self._buffers[side]
        if buffer is None or buffer.numel() < size:
            self._buffers[side] = buffer = None  # so that there are never two
            with torch.inference_mode(False):
                buffer = torch.empty(size + size // 4, dtype=self._dtype, device=self._device)
            self._buffers[side] = buffer
            self._most_buffered = max(self._most_buffered, self._buffered())
        return buffer[:size].view(shape)
