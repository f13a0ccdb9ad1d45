"""FlashInfer: `BatchPrefillWithPagedKVCacheWrapper` over a paged cache, or over contiguous slots as arithmetic pages.

Its ragged wrappers overflow 32 bits past 2^32 elements; the paged ones count pages, whose strides are small here and
whose offsets are 64-bit. Reads are predicated by the length: no guard rows. Keys and values must have equal strides.
`plan` runs on the host, once per step and kind of layer, so steps cannot be captured in a CUDA graph. No sinks; float16
and bfloat16; heads of 64, 128 or 256, equal for keys and values.
"""

from __future__ import annotations

import weakref
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from vattn.attention.base import AttentionParams, Case, KVSource, Reads, flash_refusal, whole_layer
from vattn.attention.batch import PackedBatch
from vattn.attention.stored import Blocks, Contiguous

_WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends


class FlashInfer:
    """FlashInfer's paged wrapper; CUDA, half precision, with softcap and windows."""

    name = "flashinfer"
    guard_rows = 0
    reads: Reads = "layer"
    capturable = False

    def __init__(self) -> None:
        self._wrappers: dict[Any, Any] = {}  # a wrapper has one plan, and layers of a kind share it
        self._planned: dict[Any, tuple[weakref.ref[PackedBatch], weakref.ref[Tensor]]] = {}

    def refusal(self, case: Case) -> str | None:
        if find_spec("flashinfer") is None:
            return "FlashInfer is not installed (pip install flashinfer-python)"
        return flash_refusal(case, head_dims=(64, 128, 256))

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        params.expect(self.name)
        stored = whole_layer(kv, layer)
        blocks = stored.blocks if isinstance(stored, Contiguous) else stored
        kind = params, query.shape[1:], blocks.key.shape[1:], query.dtype, blocks.key.dtype
        planned = self._planned.get(kind)
        if planned is None or planned[0]() is not batch or planned[1]() is not blocks.table:
            self._plan(kind, query, blocks, batch, params)
        output: Tensor = self._wrappers[kind].run(query.contiguous(), (blocks.key, blocks.value))
        return output

    def _plan(self, kind: Any, query: Tensor, blocks: Blocks, batch: PackedBatch, params: AttentionParams) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # type: ignore[import-not-found]

        ends = torch.tensor([0, *(span.end for span in batch.spans)], dtype=torch.int32, device="cpu")
        rows = torch.tensor([0, *map(len, batch.spans)], device="cpu").cumsum(0, dtype=torch.int32)
        pages = (ends + blocks.block_size - 1) // blocks.block_size
        slots = torch.tensor([span.slot for span in batch.spans], device="cpu").repeat_interleave(pages[1:])
        columns = torch.cat([torch.arange(count, device="cpu") for count in pages[1:].tolist()])
        if kind not in self._wrappers:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=batch.device)
            self._wrappers[kind] = BatchPrefillWithPagedKVCacheWrapper(workspace)
        self._wrappers[kind].plan(
            rows, pages.cumsum(0, dtype=torch.int32), blocks.table[slots.to(batch.device), columns.to(batch.device)],
            (ends[1:] - 1) % blocks.block_size + 1,
            query.shape[1], blocks.key.shape[2], query.shape[2], blocks.block_size, causal=True, sm_scale=params.scale,
            window_left=-1 if params.window is None else params.window - 1, logits_soft_cap=params.softcap,
            q_data_type=query.dtype, kv_data_type=blocks.key.dtype,
        )  # fmt: skip
        self._planned[kind] = weakref.ref(batch), weakref.ref(blocks.table)
