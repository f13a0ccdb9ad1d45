"""Keys that make torch's SDPA fold grouped decode queries, which is faster on a CPU.

Without a mask, transformers calls SDPA with grouped queries (`enable_gqa`). On a CPU in bfloat16 this takes several
times as long as the same sum with the queries of a KV head folded into rows, `[batch, num_kv_heads, group, head_dim]`.
So the cache returns keys of a tensor subclass for which SDPA folds; the model's attention is not changed. With a mask
(a padded batch) transformers itself repeats the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class FoldingKeys(Tensor):
    """Keys `[batch, num_kv_heads, tokens, head_dim]` for which SDPA folds the queries of a decode step."""

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
    enable_gqa: bool = False,
    **kwargs: Any,
) -> Tensor:
    batch, heads, queries, _ = query.shape
    if enable_gqa and queries == 1 and not is_causal and (attn_mask is None or attn_mask.shape[-3:-1] == (1, 1)):
        folded = query.reshape(batch, key.shape[1], -1, query.shape[3])
        output = scaled_dot_product_attention(folded, key, value, attn_mask, dropout_p, **kwargs)
        return output.reshape(batch, heads, 1, value.shape[3])
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa, **kwargs
    )
