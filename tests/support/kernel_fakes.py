"""Kernels that are not here, as their documentation has them: the same arguments, checked, and plain torch inside.

torch's own operator keeps its real schema: the fake is its implementation for the CPU. The others are put in the place
of their modules. All of them compute in float64 and read nothing past a length.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import library as torch_library

INT = torch.int32
OPERATOR = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: tuple[int, int], softcap: float) -> Tensor:
    """Causal attention of one request, aligned at the last key: q `[n, heads, d]`, k and v `[length, kv_heads, d]`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = distance < 0
    if window[0] >= 0:
        hidden |= distance > window[0]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def gather(pool: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one request, through its row of a block table."""
    size = pool.shape[1]
    assert -(-length // size) <= len(table), "the table is too short"
    return torch.cat([pool[table[t // size], : length - t] for t in range(0, length, size)])


def _check(*tensors: Tensor) -> None:
    assert all(x.dtype == INT and x.stride(-1) == 1 for x in tensors), "indices are contiguous int32"


def aten_flash(
    query: Tensor, key: Tensor, value: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_forward` with variable lengths (pytorch, flash_api.cpp, mha_varlen_fwd)."""
    assert seqused_k is not None
    _check(cum_q, cum_k, seqused_k)
    n = len(cum_q) - 1
    assert len(cum_k) == n + 1
    assert len(seqused_k) == n
    assert causal
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    starts, lengths = cum_q.tolist(), seqused_k.tolist()
    assert starts[-1] == len(query)
    assert max_k >= max(lengths)
    assert max_q == max(b - a for a, b in itertools.pairwise(starts))
    window = (-1 if window_size_left is None else window_size_left, -1 if window_size_right is None else 0)
    if block_table is not None:
        _check(block_table)
        assert key.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    else:
        assert len(key) < 2**31
        assert key.ndim == 3
    out = torch.empty_like(query)
    for i in range(n):
        if block_table is None:
            first = int(cum_k[i])
            keys, values = (x[first : first + lengths[i]] for x in (key, value))
        else:
            keys, values = (gather(x, block_table[i], lengths[i]) for x in (key, value))
        rows = slice(starts[i], starts[i + 1])
        out[rows] = attend(query[rows], keys, values, scale, window, 0.0)
    nothing = query.new_empty(0)
    return out, nothing, nothing, nothing, nothing


def need_operator_for(kernel: str, kv: str) -> None:
    """Skips a test of torch's operator over blocks where it has no argument for them."""
    if kernel == "torch_flash" and kv == "paged" and "block_table" not in OPERATOR:
        pytest.skip(f"the operator of torch {torch.__version__} has no block_table")


@contextmanager
def torch_flash() -> Iterator[None]:
    """`aten_flash` stands in for torch's operator on the CPU."""
    with torch_library._scoped_library("aten", "IMPL") as registered:
        registered.impl("_flash_attention_forward", aten_flash, "CPU")
        yield


def flash_attn_2() -> types.ModuleType:
    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, rotary_cos: None = None,
        rotary_sin: None = None, cache_seqlens: Tensor | None = None, cache_batch_idx: Tensor | None = None,
        cache_leftpad: None = None, block_table: Tensor | None = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        assert cache_seqlens is not None
        assert causal
        assert q.ndim == k_cache.ndim == 4
        _check(cache_seqlens)
        assert len(cache_seqlens) == len(q)
        assert block_table is None or cache_batch_idx is None, "Paged KVcache does not support cache_batch_idx"
        out = torch.empty_like(q)
        for i, length in enumerate(cache_seqlens.tolist()):
            if block_table is not None:
                _check(block_table)
                assert k_cache.shape[1] % 256 == 0
                keys, values = (gather(x, block_table[i], length) for x in (k_cache, v_cache))
            else:
                if cache_batch_idx is None:
                    assert len(k_cache) == len(q)
                else:
                    _check(cache_batch_idx)
                slot = i if cache_batch_idx is None else cache_batch_idx[i]
                assert length <= k_cache.shape[1]
                keys, values = (x[slot][:length] for x in (k_cache, v_cache))
            out[i] = attend(q[i], keys, values, softmax_scale, window_size, softcap)
        return out

    return _module("flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)


def flash_attn_3() -> types.ModuleType:
    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        _check(cache_seqlens)
        assert causal
        lengths = cache_seqlens.tolist()
        out = torch.empty_like(q)
        if page_table is None:
            # Loads take whole tiles: rows past the length would be read, rows past the tensor are zeros.
            assert q.ndim == k_cache.ndim == 4
            assert lengths == [k_cache.shape[1]] * len(q)
            for i, length in enumerate(lengths):
                out[i] = attend(q[i], k_cache[i][:length], v_cache[i][:length], softmax_scale, window_size, softcap)
            return out
        assert cu_seqlens_q is not None
        _check(page_table, cu_seqlens_q)
        assert q.ndim == 3
        starts = cu_seqlens_q.tolist()
        assert max_seqlen_q == max(b - a for a, b in itertools.pairwise(starts))
        for i, length in enumerate(lengths):
            keys, values = (gather(x, page_table[i], length) for x in (k_cache, v_cache))
            rows = slice(starts[i], starts[i + 1])
            out[rows] = attend(q[rows], keys, values, softmax_scale, window_size, softcap)
        return out

    return _module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)


def flashinfer() -> types.ModuleType:
    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
            assert kv_layout == "NHD"
            assert float_workspace_buffer.dtype == torch.uint8

        def plan(
            self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
            num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool,
            sm_scale: float | None, window_left: int, logits_soft_cap: float | None, q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
        ) -> None:  # fmt: skip
            _check(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            assert causal
            self.heads = num_qo_heads, num_kv_heads, head_dim_qk
            self.page_size, self.scale, self.window, self.softcap = page_size, sm_scale, window_left, logits_soft_cap
            self.rows, self.pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
            self.indices, self.last = paged_kv_indices, paged_kv_last_page_len.tolist()
            assert self.pages[-1] == len(paged_kv_indices)
            assert all(1 <= last <= page_size for last in self.last)

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            key, value = paged_kv_cache
            assert key.stride() == value.stride()
            assert key.shape[1] == self.page_size
            assert (q.shape[1], key.shape[2], q.shape[2]) == self.heads
            out = torch.empty_like(q)
            for i, last in enumerate(self.last):
                table = self.indices[self.pages[i] : self.pages[i + 1]]
                length = (len(table) - 1) * self.page_size + last
                keys, values = (gather(x, table, length) for x in (key, value))
                rows = slice(self.rows[i], self.rows[i + 1])
                out[rows] = attend(q[rows], keys, values, self.scale, (self.window, 0), self.softcap or 0.0)
            return out

    return _module("flashinfer", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)


def _module(name: str, **contents: Any) -> types.ModuleType:
    from importlib.machinery import ModuleSpec

    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    return module
