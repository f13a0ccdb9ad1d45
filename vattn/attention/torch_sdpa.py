"""PyTorch's scaled dot product attention, one call per sequence: for the CPU, and where no other kernel fits.

A batched call would read the padding up to the longest sequence, which is not mapped. This one reads nothing past the
length, so it needs no guard rows, and accepts any strides but on the last dimension. Lengths are shapes of its
arguments, so its steps cannot be captured in a CUDA graph.

Measured on one core (us per call; 14 query heads on 2 KV heads of 64, bf16): a decode over 4096 keys takes 375 with
the query heads of a KV head folded into rows, 5470 with `enable_gqa`; in prefill `enable_gqa` equals keys
expanded with stride 0 and is never slower than repeated ones. Calling the aten flash kernel directly gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vattn.attention.base import AttentionParams, Case, KVSource, Reads
from vattn.attention.batch import PackedBatch, Span


class TorchSDPA:
    """PyTorch's scaled dot product attention, one call per sequence; any device, dtype and head size."""

    name = "torch_sdpa"
    guard_rows = 0
    reads: Reads = "request"
    capturable = False

    def refusal(self, case: Case) -> str | None:
        return None

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        singles = batch.num_singles
        parts = []
        if singles:
            parts.append(self._decode(query[:singles], kv, layer, batch.spans[:singles], params))
        for span, row in batch.chunks():
            parts.append(self._prefill(query[row : row + len(span)], kv, layer, batch, span, params))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self, query: Tensor, kv: KVSource, layer: int, spans: Sequence[Span], params: AttentionParams
    ) -> Tensor:
        """One query per span: it sees every key from `first_key` on, so no mask; its heads fold into rows."""
        count, num_heads, head_dim = query.shape
        folded: tuple[Tensor, ...] | None = None
        outputs = []
        for i, span in enumerate(spans):
            key, value = kv.read(layer, span.slot, span.end, params.first_key(span))
            if folded is None:
                num_kv_heads = key.shape[1]
                folded = query.reshape(count, 1, num_kv_heads, num_heads // num_kv_heads, head_dim).unbind()
            if params.softcap is None and params.sinks is None:
                output = scaled_dot_product_attention(folded[i], key, value, scale=params.scale)
            else:
                output = plain_attention(folded[i].reshape(1, num_heads, 1, head_dim), key, value, None, params)
            outputs.append(output)
        return torch.stack(outputs).reshape(count, num_heads, -1)

    def _prefill(
        self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, span: Span, params: AttentionParams
    ) -> Tensor:
        """The queries of `span` over the keys from `first_key` on."""
        first = params.first_key(span)
        key, value = kv.read(layer, span.slot, span.end, first)
        queries = query.transpose(0, 1).unsqueeze(0)
        plain = params.softcap is not None or params.sinks is not None
        # `is_causal` aligns the first query with the first key: right for a first chunk that no window cuts.
        # Its kernel scales the -inf of hidden scores too, so the scale has to be positive.
        whole = span.start == 0 and (params.window is None or span.end <= params.window)
        causal = whole and not plain and (params.scale is None or bool(params.scale > 0))
        mask = None if causal else batch.mask(span, first, params.window, query.dtype)
        if plain:
            output = plain_attention(queries, key, value, mask, params)
        else:
            output = scaled_dot_product_attention(
                queries,
                key,
                value,
                attn_mask=mask,
                is_causal=causal,
                scale=params.scale,
                enable_gqa=queries.shape[1] != key.shape[1],
            )
        return output[0].transpose(0, 1)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, params: AttentionParams, *, dropout: float = 0.0
) -> Tensor:
    """Attention spelled out, for what the fused kernel has no argument for: softcap and sinks.

    Args:
        query: `[batch, num_query_heads, num_queries, head_dim]`.
        key, value: `[batch, num_kv_heads, num_keys, *]`.
        mask: added to the scores, broadcast against `[batch, 1, num_queries, num_keys]`; None for none.
        dropout: the probability with which a weight is left out, in training.

    Returns:
        `[batch, num_query_heads, num_queries, v_head_dim]`; all but the products is computed in float32 or more, and on
        a CPU the products too: with AMX, torch 2.13's products of bfloat16 let NaN of a row into the row before it.
    """
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = (each.to(torch.promote_types(dtype, torch.float32)) for each in (query, key, value))
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.reshape(batch, num_kv_heads, -1, head_dim)
    scores = grouped @ key.transpose(-1, -2)
    scale = head_dim**-0.5 if params.scale is None else params.scale
    # What follows is of scores beside a softcap or a sink, which half precision may not hold.
    exact = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.reshape(batch, num_heads, num_queries, -1).to(exact) * scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if mask is not None:
        scores = scores + mask
    if params.sinks is not None:
        sinks = params.sinks.reshape(1, num_heads, 1, 1).expand(batch, num_heads, num_queries, 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.softmax(dim=-1).to(value.dtype)
    if params.sinks is not None:
        weights = weights[..., :-1]
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    output = weights.reshape(batch, num_kv_heads, -1, weights.shape[-1]) @ value
    return output.reshape(batch, num_heads, num_queries, -1).to(dtype)
