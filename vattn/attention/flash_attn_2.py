"""flash-attn 2: `flash_attn_with_kvcache` with `cache_batch_idx`, or with `block_table` over a paged cache.

From its source (`flash_api.cpp`, `mha_fwd_kvcache`):

- reads are predicated by `cache_seqlens`: no guard rows, and memory past the length may hold NaN; offsets are 64-bit;
- the cache's second dimension determines how the keys are split, so the kernel gets `[:, :max_length]`;
- the queries of a call have one length: all single tokens share a call, every longer chunk has its own;
- `cache_batch_idx` selects the kernel that splits keys, whose tiles have fewer queries; a chunk's slot is therefore a
  slice of the cache;
- head sizes that are no multiple of 8 would copy the whole cache in every call: refused;
- a paged cache needs blocks of a multiple of 256 tokens;
- no sinks; float16 and bfloat16; heads up to 256, equal for keys and values.

It is not asked to append (`k=`, `v=`). Ampere or newer.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from vattn.attention.base import AttentionParams, Case, KVSource, Reads, flash_refusal, whole_layer
from vattn.attention.batch import PackedBatch
from vattn.attention.stored import Contiguous


class FlashAttn2:
    """flash-attn 2's flash_attn_with_kvcache; CUDA, half precision, with softcap and windows."""

    name = "flash_attn_2"
    guard_rows = 0
    reads: Reads = "layer"
    capturable = True

    def refusal(self, case: Case) -> str | None:
        if find_spec("flash_attn") is None:
            return "flash-attn is not installed (pip install flash-attn --no-build-isolation)"
        return flash_refusal(case, block_multiple=256)

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        params.expect(self.name)
        from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

        stored = whole_layer(kv, layer)
        chunks = {row: span.slot for span, row in batch.chunks()}
        outputs = []
        for group in batch.uniform_groups:
            if not isinstance(stored, Contiguous):
                key, value, where = stored.key, stored.value, {"block_table": stored.tables(batch, group)}
            elif group.max_query == 1:
                key, value = stored.key[:, : group.max_length], stored.value[:, : group.max_length]
                where = {"cache_batch_idx": group.slots}
            else:
                key, value = stored.slot(chunks[group.rows.start], group.max_length)
                where = {}
            output = flash_attn_with_kvcache(
                query[group.rows].view(-1, group.max_query, *query.shape[1:]),
                key,
                value,
                cache_seqlens=group.lengths,
                softmax_scale=params.scale,
                causal=True,
                window_size=params.window_size(group),
                softcap=params.softcap or 0.0,
                **where,
            )
            outputs.append(output.flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
