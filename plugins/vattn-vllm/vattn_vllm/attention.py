"""vLLM's attention backend over windows: vattn's kernels on contiguous keys and values.

Metadata builders say which rows of vLLM's block tables are shown in windows, once for all layers of a step. An
implementation writes new keys and values where vLLM says, at home, and reads them in windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

import vattn.attention
import vattn.cpu
from vattn.attention import AttentionParams, Blocks, Case, Contiguous, PackedBatch, SpanColumns
from vattn.attention.native import Native
from vattn.errors import ConfigError
from vattn_vllm.memory import KVMemory
from vattn_vllm.options import Options
from vattn_vllm.steps import Step


class WindowBackend(AttentionBackend):
    """Says to vLLM what it serves; `CPU_ATTN` or `CUSTOM` in vLLM's register."""

    forward_includes_kv_cache_update = True
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012 (vLLM's own type)
    supported_kv_cache_dtypes = ["auto", "bfloat16", "float16"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if get_current_vllm_config().device_config.device_type == "cpu" else "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # What vLLM computes sizes by. Where blocks really lie is the windows' affair: vLLM gets strided views.
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[WindowAttention]:
        return WindowAttention

    @staticmethod
    def get_builder_cls() -> type[WindowBuilder]:
        return WindowBuilder


@dataclass
class WindowMetadata:
    """A step, for the layers of one KV cache group.

    Attributes:
        num_actual_tokens: tokens without padding.
        slots: where each of them is written, by vLLM's number, int64; below 0 for nowhere, as tokens of a draft that
            were rejected are, and those of runs that warm up.
    """

    num_actual_tokens: int
    slots: Tensor
    _step: Step
    _group: int
    _starts: Tensor
    _ends: Tensor
    _device: torch.device

    @cached_property
    def batch(self) -> PackedBatch:
        """The rows' windows, lengths and new tokens; to be asked for when all groups have their metadata. Where there
        are no windows, row i of the block table is slot i.
        """
        windows = self._step.windows(self._group)
        slots = torch.arange(len(self._ends), dtype=torch.int32, device="cpu") if windows is None else windows
        return PackedBatch(SpanColumns(slots, self._starts, self._ends), self._device)

    @cached_property
    def table(self) -> Tensor | None:
        """The block table by which kernels find rows that are not in windows; None if all are."""
        return None if self._step.windows(self._group) is not None else self._step.table(self._group)

    @cached_property
    def stored(self) -> Tensor | None:
        """Which tokens are written, their numbers; None for all."""
        stored = (self.slots >= 0).nonzero().flatten()
        return None if len(stored) == len(self.slots) else stored


class WindowBuilder(AttentionMetadataBuilder[WindowMetadata]):
    """Prepares to show the rows of a block table, and packs the batch.

    On CUDA, vLLM puts single tokens first, as kernels have them best, except those of requests that begin.
    """

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._layers = vllm_config.compilation_config.static_forward_context
        self._name = layer_names[0]
        self._block_size = kv_cache_spec.block_size
        self.reorder_batch_threshold = 1 if device.type == "cuda" else None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> WindowMetadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise ConfigError("vattn: a step in which tokens see later ones; leave out --worker-cls for this model")
        first_rows = step.query_start_loc_cpu[: step.num_reqs + 1].numpy()
        counts = first_rows[1:] - first_rows[:-1]
        rows = int(np.count_nonzero(counts))  # without padding, which comes last
        tokens = int(first_rows[rows])
        blocks = -(-step.max_seq_len // self._block_size)
        table, ends = on_host(step.block_table_tensor[:rows, :blocks], step.seq_lens[:rows])
        starts = torch.from_numpy(ends.numpy() - counts[:rows])
        attention: WindowAttention = self._layers[self._name].impl
        shown, offsets = attention.memory.rows(attention.group, table, starts, ends)
        if offsets is not None:
            starts, ends = starts - offsets, ends - offsets
        slots = step.slot_mapping[:tokens].long()
        return WindowMetadata(tokens, slots, shown, attention.group, starts, ends, self.device)


def on_host(table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """A block table and the lengths of its rows, int32 on the CPU; by one transfer, since each waits for the device."""
    if table.device.type == "cpu":
        return table, lengths
    both = torch.cat((lengths[:, None], table), 1).cpu()
    return both[:, 1:], both[:, 0]


class WindowAttention(AttentionImpl[WindowMetadata]):
    """One layer.

    Raises:
        ConfigError: attention that no kernel computes.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ConfigError("vattn: its kernels have no ALiBi; leave out --worker-cls for this model")
        if attn_type != AttentionType.DECODER:
            raise ConfigError(f"vattn: it serves causal self-attention, not {attn_type}; leave out --worker-cls")
        config = get_current_vllm_config()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self._shares = kv_sharing_target_layer_name
        case = Case(
            device=torch.device(config.device_config.device_type),
            dtype=config.model_config.dtype,
            head_dim=head_size,
            softcap=bool(logits_soft_cap),
            sinks=sinks is not None,
            window=sliding_window is not None,
        )
        self._kernel = vattn.attention.get(Options.of(config).kernel, case)
        self._params = AttentionParams(
            scale=self.scale, window=sliding_window, softcap=logits_soft_cap or None, sinks=sinks
        )
        self.memory: KVMemory
        self.group: int

    def use(self, memory: KVMemory, name: str) -> None:
        """Gives the layer its memory, when the cache is allocated.

        Args:
            name: the layer whose keys and values are read.
        """
        self.memory, self.group, self._name = memory, memory.group_of(name), name
        self._stored = memory.stored(name)
        rows = memory.slots(name)
        self._keys, self._values = rows[..., : self.head_size], rows[..., self.head_size :]
        self._layer: vattn.cpu.Layer | None = None
        self._sinks: Tensor | None = None  # a copy for the layer, which reads only float32
        if isinstance(self._kernel, Native) and self._shares is None:
            sinks = self._params.sinks
            if sinks is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous()):
                sinks = self._sinks = torch.empty(sinks.shape, dtype=torch.float32, device=sinks.device)
            self._layer = vattn.cpu.Layer(
                self.num_heads,
                self._stored.key,
                self._stored.value,
                self._keys,
                self._values,
                scale=self.scale,
                softcap=self._params.softcap,
                window=self._params.window,
                sinks=sinks,
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: WindowMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # a run that only warms up
            return output
        count, slots = attn_metadata.num_actual_tokens, attn_metadata.slots
        batch = attn_metadata.batch  # which shows the rows of this step
        table = attn_metadata.table
        if self._layer is not None and table is None and self._layer.takes(query, key, value):
            group = batch.together
            if self._sinks is not None:  # the parameter may have been loaded again
                self._sinks.copy_(self._params.sinks)
            self._layer.step(
                query, key, value, slots, output, slots=group.slots, lengths=group.lengths, starts=group.starts
            )
            return output
        if self._shares is None:
            key, value = key[:count], value[:count]
            if not vattn.cpu.store(key, value, self._keys, self._values, slots):
                if (stored := attn_metadata.stored) is not None:
                    key, value, slots = key[stored], value[stored], slots[stored]
                self._keys.index_copy_(0, slots, key)
                self._values.index_copy_(0, slots, value)
        query = query[:count].view(count, self.num_heads, self.head_size)
        source = self if table is None else _ByTable(self.memory.blocks(self._name, table))
        found = self._kernel(query, source, 0, batch, self._params)
        output[:count].view(count, self.num_heads, self.head_size).copy_(found)
        return output

    # What kernels read

    def stored(self, layer: int) -> Contiguous:
        return self._stored

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        key, value = (rows[slot, start:length].transpose(0, 1)[None] for rows in (self._stored.key, self._stored.value))
        return key, value


@dataclass(frozen=True)
class _ByTable:
    """What kernels read where rows are not in windows."""

    blocks: Blocks

    def stored(self, layer: int) -> Blocks:
        return self.blocks

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        numbers = self.blocks.table[slot, : -(-length // self.blocks.block_size)].long()
        key, value = (
            blocks[numbers].flatten(0, 1)[start:length].transpose(0, 1)[None]
            for blocks in (self.blocks.key, self.blocks.value)
        )
        return key, value
