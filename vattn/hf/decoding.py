"""Keys whose decode steps are computed by vattn's own kernels, where torch's SDPA would be slower.

The cache returns keys of a tensor subclass, for which a call of SDPA with one query per sequence goes to the kernels of
`vattn.attention.attend`; the model's attention is not changed. Where those cannot compute it, the queries of a KV head
are folded into rows, `[batch, num_kv_heads, group, head_dim]`, which is several times as fast as SDPA's `enable_gqa` in
bfloat16. With a mask over padding transformers itself repeats the keys and values.

Of a cache in 8 bits, keys and values are another subclass: the kernels read its codes as they are stored, and any other
operation sees the keys or values that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from vattn import cpu
from vattn.quantised import dequantise


class DecodedKeys(Tensor):
    """Keys `[batch, num_kv_heads, tokens, head_dim]` for which SDPA computes decode steps as this module says."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **(kwargs or {}))
            if func in _COPYING:
                args = tree_map_only(DecodedKeys, as_plain, args)
            return func(*args, **(kwargs or {}))


class Coded(DecodedKeys):
    """Keys or values `[batch, num_kv_heads, tokens, head_dim]` of which codes and scales are stored.

    They are computed when an operation needs them; from then on this is a tensor of its own.
    """

    codes: Tensor
    scales: Tensor
    _plain: Tensor | None

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Coded:
        made: Coded = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made._plain = codes, scales, None
        return made

    @property
    def is_read(self) -> bool:
        """Whether an operation needed them."""
        return self._plain is not None

    def plain(self) -> Tensor:
        """The keys or values, in contiguous memory."""
        if self._plain is None:
            room = torch.empty(self.codes.shape, dtype=self.dtype, device=self.codes.device)
            self._plain = dequantise(self.codes, self.scales, room)
        return self._plain

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub of torch says it is no class method
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Coded, Coded.plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.plain())


# These refuse subclasses, before any dispatch.
_COPYING = {Tensor.__deepcopy__, Tensor.__array__, Tensor.numpy, Tensor.tolist}


def as_plain(rows: Tensor) -> Tensor:
    """Keys or values as a tensor without behaviour of its own: the same memory, or what codes stand for."""
    return rows.plain() if isinstance(rows, Coded) else rows.as_subclass(Tensor)


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
    single = not is_causal and _is_step(query, key, value, enable_gqa)
    if single and attn_mask is None and not dropout_p and _is_native(query, key, value):
        batch, heads, _, _ = query.shape
        slots, lengths = _all(batch, key.shape[2])
        stored, scales = [key, value], None
        if isinstance(key, Coded) and isinstance(value, Coded) and not key.is_read and not value.is_read:
            stored, scales = [key.codes, value.codes], (key.scales.transpose(1, 2), value.scales.transpose(1, 2))
        rows = [tensor.transpose(1, 2) for tensor in stored]
        output = query.new_empty(batch, heads, 1, value.shape[3])
        cpu.attend(query.squeeze(2), *rows, slots=slots, lengths=lengths, scales=scales, scale=scale, out=output)
        return output
    key, value = (rows.plain() if isinstance(rows, Coded) else rows for rows in (key, value))
    if single and enable_gqa and (attn_mask is None or attn_mask.shape[-3:-1] == (1, 1)):
        batch, heads, _, head_dim = query.shape
        folded = query.reshape(batch, key.shape[1], -1, head_dim)
        output = scaled_dot_product_attention(folded, key, value, attn_mask, dropout_p, scale=scale)
        return output.reshape(batch, heads, 1, value.shape[3])
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_step(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether there is one query per sequence, with keys, in shapes that belong together. SDPA broadcasts others or
    refuses them; the kernels would read memory that is not there.
    """
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    batch, heads, queries, head_dim = query.shape
    rows, kv_heads, tokens, key_dim = key.shape
    return (
        queries == 1
        and tokens > 0
        and batch == rows
        and head_dim == key_dim
        and value.shape[:3] == key.shape[:3]
        and heads > 0
        and (heads == kv_heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0))
    )


def _is_native(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and query.dtype == key.dtype == value.dtype
        and cpu.refusal(query.dtype, key.shape[3], value.shape[3]) is None
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and not (query.is_neg() or key.is_neg() or value.is_neg())
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        # Not one without memory, of FakeTensorMode or torch.func. Last, as torch.compile cannot look into it.
        and type(query) in (Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(query)
    )


@lru_cache(maxsize=4)  # a step asks for the same in every layer
def _all(batch: int, length: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        slots = torch.arange(batch, dtype=torch.int32, device="cpu")
        return slots, torch.full_like(slots, length)
