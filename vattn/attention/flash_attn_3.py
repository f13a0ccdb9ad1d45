"""flash-attn 3 (Hopper): `flash_attn_with_kvcache` of `flash_attn_interface`, over a page table or a slice of a slot.

Its loads by TMA take whole tiles, up to 224 rows past a length, and a NaN there reaches the output (0 * NaN). Rows past
the end of a tensor are zeros, however:

- a chunk of a contiguous slot is a call of its own, over a slice that ends where the request does: it is loaded by TMA,
  and no row past it is read;
- single tokens and other short spans share a call, and their slots end at different rows. They get an arithmetic page
  table: pages that are no multiple of the tile are loaded row by row, predicated by the length. Hence no guard rows. On
  an H100 that costs single tokens nothing; it would cost chunks a tenth of their time;
- several chunks of up to 512 rows share such a call too. One each would be a launch per chunk and layer, where a block
  table takes one for all.

Blocks of a paged cache may have any size; those of a multiple of the tile are loaded by TMA too, mapped as they always
are, but what they hold past a length must be finite. No sinks; float16 and bfloat16; heads of a multiple of 8 up to
256 (with a window 128), equal for keys and values.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from vattn.attention.base import AttentionParams, Case, KVSource, Reads, flash_refusal, whole_layer
from vattn.attention.batch import PackedBatch
from vattn.attention.stored import Contiguous

# With a window, heads of 256 differ from float64 by up to 0.5, over every cache, and those of 64 and 128 do not: vLLM
# 0.24's build on an H100. What lies between has not been tried.
_WINDOW_HEAD_DIM = 128
_SHORT = 64  # rows of a span that needs no TMA: drafts, for example
_TOGETHER = 512  # rows of a chunk that is computed with others, where there are others; the bound is not measured


class FlashAttn3:
    """flash-attn 3's flash_attn_with_kvcache; Hopper, half precision, with softcap, and windows up to heads of 128."""

    name = "flash_attn_3"
    guard_rows = 0
    reads: Reads = "layer"
    capturable = True

    def refusal(self, case: Case) -> str | None:
        if find_spec("flash_attn_interface") is None:
            return "flash-attn 3 is not installed (hopper/ of github.com/Dao-AILab/flash-attention)"
        refusal = flash_refusal(case)
        if refusal is None and torch.cuda.get_device_capability(case.device)[0] != 9:
            return "it is for Hopper (compute capability 9)"
        if refusal is None and case.window and case.head_dim > _WINDOW_HEAD_DIM:
            return f"windows over heads of {case.head_dim} come out wrong"
        return refusal

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        params.expect(self.name)
        from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

        stored = whole_layer(kv, layer)
        blocks = stored.blocks if isinstance(stored, Contiguous) else stored
        slots = {row: span.slot for span, row in batch.chunks()}
        outputs = []
        for group in batch.split(_TOGETHER) if isinstance(stored, Contiguous) else batch.groups:
            rows, key, value = query[group.rows], blocks.key, blocks.value
            where: dict[str, Any] = {}
            window = params.window_size(group)
            if window != (-1, -1) and query.shape[-1] > _WINDOW_HEAD_DIM:
                params.expect(self.name, window=False)
            if isinstance(stored, Contiguous) and group.max_query > _SHORT and len(group.slots) == 1:
                rows = rows.unsqueeze(0)
                key, value = stored.slot(slots[group.rows.start], group.max_length)
            else:
                table = blocks.tables(batch, group)
                where = {"page_table": table, "cu_seqlens_q": group.starts, "max_seqlen_q": group.max_query}
            output = flash_attn_with_kvcache(
                rows, key, value, cache_seqlens=group.lengths, softmax_scale=params.scale, causal=True,
                window_size=window, softcap=params.softcap or 0.0, **where,
            )  # fmt: skip
            outputs.append(output.view(-1, *output.shape[-2:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
