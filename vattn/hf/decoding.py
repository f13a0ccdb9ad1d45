"""Keys whose decode steps are computed by vattn's own kernels, where torch's SDPA would be slower.

The cache returns keys of a tensor subclass, for which a call of SDPA with one query per sequence goes to the kernels of
`vattn.attention.decode`; the model's attention is not changed. Where those cannot compute it, the queries of a KV head
are folded into rows, `[batch, num_kv_heads, group, head_dim]`, which is several times as fast as SDPA's `enable_gqa` in
bfloat16. With a mask over padding transformers itself repeats the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vattn import cpu


class DecodedKeys(Tensor):
    """Keys `[batch, num_kv_heads, tokens, head_dim]` for which SDPA computes decode steps as this module says."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    batch, heads, queries, _ = query.shape
    single = queries == 1 and not is_causal
    if single and attn_mask is None and not dropout_p and _is_native(query, key, value):
        slots, lengths = _all(batch, key.shape[2])
        rows = [tensor.transpose(1, 2) for tensor in (key, value)]
        output = cpu.attend(query[:, :, 0], *rows, slots=slots, lengths=lengths, scale=scale)
        return output[:, :, None]
    if single and enable_gqa and (attn_mask is None or attn_mask.shape[-3:-1] == (1, 1)):
        folded = query.reshape(batch, key.shape[1], -1, query.shape[3])
        output = scaled_dot_product_attention(folded, key, value, attn_mask, dropout_p, scale=scale)
        return output.reshape(batch, heads, 1, value.shape[3])
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_native(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        query.dtype == key.dtype == value.dtype
        and cpu.refusal(query.dtype, key.shape[3], value.shape[3]) is None
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    )


@lru_cache(maxsize=4)  # a step asks for the same in every layer
def _all(batch: int, length: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return torch.arange(batch, dtype=torch.int32), torch.full((batch,), length, dtype=torch.int32)
