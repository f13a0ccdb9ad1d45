"""The FlashAttention that is built into torch: `aten::_flash_attention_forward`, with `seqused_k`.

It is the default on CUDA where there is no flash-attn 3. The layer is flattened to one sequence, in which a request's
keys begin at its slot and `seqused_k` says how many there are. What its source says (`flash_api.cpp`,
`mha_varlen_fwd`):

- reads are predicated by the length: no guard rows, and memory past the length may hold NaN;
- starts are 32-bit rows, offsets 64-bit: up to 2^31 rows of address space, of any size;
- keys are split over the device only for single queries of grouped heads without a window, or with block tables:
  hence `Group`, and a window that hides no key is not passed. `max_k` determines the splits, so it is the longest
  length of the batch, not that of the virtual tensor;
- a paged cache needs blocks of a multiple of 256 tokens, and a torch whose operator has `block_table`;
- no softcap, no sinks; float16 and bfloat16; heads of a multiple of 8 up to 256, equal for keys and values.

Ampere or newer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vattn.attention.base import AttentionParams, Case, KVSource, Reads, flash_refusal, whole_layer
from vattn.attention.batch import Group, PackedBatch
from vattn.attention.stored import Contiguous


class TorchFlash:
    """The FlashAttention built into torch, over the whole batch; CUDA, half precision."""

    name = "torch_flash"
    guard_rows = 0
    reads: Reads = "layer"
    capturable = True

    def refusal(self, case: Case) -> str | None:
        schema = torch.ops.aten._flash_attention_forward.default._schema
        missing = {"seqused_k", *(["block_table"] if case.block_size else [])} - {a.name for a in schema.arguments}
        if missing:
            return f"the operator of torch {torch.__version__} has no {' and no '.join(sorted(missing))}"
        return flash_refusal(case, block_multiple=256, softcap=False)

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        params.expect(self.name, softcap=False)
        outputs = [self._attend(query[group.rows], kv, layer, batch, group, params) for group in batch.groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(
        self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, group: Group, params: AttentionParams
    ) -> Tensor:
        stored = whole_layer(kv, layer)
        left, right = params.window_size(group)
        options: dict[str, Any] = {"scale": params.scale, "window_size_left": left, "window_size_right": right}
        if isinstance(stored, Contiguous):
            key, value = stored.rows
            # One entry more than spans, which is not read: `seqused_k` says where keys end.
            starts = batch.once(
                (self.name, group.rows.start, stored.slot_rows),
                lambda: torch.nn.functional.pad(group.slots * stored.slot_rows, (0, 1)),
            )
        else:
            key, value, starts = stored.key, stored.value, group.starts
            options["block_table"] = stored.tables(batch, group)
        output: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, group.starts, starts, group.max_query, group.max_length, 0.0, True, False,
            seqused_k=group.lengths, **options,
        )[0]  # fmt: skip
        return output
