"""Prefill as two matrix products and a softmax per KV head, in bfloat16 on a CPU.

By default it serves where `native` cannot: for head sizes that are no multiple of 8.

Torch's fused CPU kernel multiplies small tiles, which in bfloat16 without AMX reach a fifth of what oneDNN reaches in
a large product. Here all keys of a KV head, in place, are one operand, and its query heads are rows of the other,
which is possible because the cache is contiguous. Scores are rounded to bfloat16, as in transformers' eager attention.

Measured (us, two cores, 14 query heads on 2 KV heads of 64, bfloat16; new tokens after cached ones):

    new after cached      64 + 0   256 + 0   512 + 0   512 + 1024   512 + 2048
    fused                    180      1908      7420        22150        37196
    this one                 248       776      2293         9513        21359

In float32 there is nothing to gain. Decodes use the fused kernel, since for one query the calls cost more than they
save. The exception is many long heads that share their keys, as over latents, where decodes and short chunks use
products too (us, one core, 16 heads of 576 on one KV head):

    decode over           64      512     2048     8192
    fused                 38      282     1134     4824
    this one              45      111      315     1160

It needs no guard rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.attention.base import AttentionParams, Case
from vattn.attention.batch import PackedBatch, Span
from vattn.attention.torch_sdpa import TorchSDPA

# Rows of queries per product. Fewer would leave the products small, more would compute scores that causality hides.
_BLOCK = 128
# With fewer queries the fused kernel is faster,
_LEAST = 96
# unless all heads share their keys and have at least this many elements together.
_WIDE = 4096


class TorchMatmul(TorchSDPA):
    """Matrix products for a prefill, and for long heads that share keys; torch_sdpa for all else; bfloat16 on a CPU."""

    name = "torch_matmul"

    def refusal(self, case: Case) -> str | None:
        if case.device.type != "cpu" or case.dtype != torch.bfloat16:
            return f"it is for bfloat16 on a CPU; torch_sdpa takes {case.dtype} on {case.device.type}"
        return None

    def _single(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        _, num_kv_heads, group, head_dim = query.shape
        if not _wide(num_kv_heads, group * head_dim):
            return super()._single(query, key, value, scale)
        alpha = head_dim**-0.5 if scale is None else scale
        scores = torch.addmm(query.new_empty(()), query[0, 0], key[0, 0].t(), beta=0, alpha=alpha)
        return (scores.softmax(dim=-1) @ value[0, 0])[None, None]

    def _chunk(
        self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, span: Span, params: AttentionParams
    ) -> Tensor:
        count, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        few = count < _LEAST and not _wide(num_kv_heads, num_heads * head_dim)
        if few or params.softcap is not None or params.sinks is not None:
            return super()._chunk(query, key, value, batch, span, params)
        first = params.first_key(span)
        group = num_heads // num_kv_heads
        scale = head_dim**-0.5 if params.scale is None else params.scale
        # [num_kv_heads, count, group, head_dim]: a block of queries of one KV head is one matrix.
        grouped = query.reshape(count, num_kv_heads, group, head_dim).transpose(0, 1).contiguous()
        output = query.new_empty(count, num_kv_heads, group, value.shape[-1])
        unused = query.new_empty(())
        for low in range(0, count, _BLOCK):
            high = min(low + _BLOCK, count)
            rows = high - low
            start = 0 if params.window is None else max(0, span.start + low - params.window + 1 - first)
            end = span.start + high - first
            future = _hidden(query, rows).triu_(1)
            past = None
            if params.window is not None:
                past = _hidden(query, rows).tril_(span.start + low - params.window - first - start)
            for head in range(num_kv_heads):
                queries = grouped[head, low:high].view(rows * group, head_dim)
                scores = torch.addmm(unused, queries, key[0, head, start:end].t(), beta=0, alpha=scale)
                square = scores.view(rows, group, end - start)
                square[..., -rows:].add_(future[:, None])
                if past is not None:
                    square[..., :rows].add_(past[:, None])
                mixed = scores.softmax(dim=-1) @ value[0, head, start:end]
                output[low:high, head] = mixed.view(rows, group, -1)
        return output.view(count, num_heads, -1)


def _wide(num_kv_heads: int, query_elements: int) -> bool:
    return num_kv_heads == 1 and query_elements >= _WIDE


def _hidden(like: Tensor, size: int) -> Tensor:
    return like.new_full((size, size), float("-inf"))
