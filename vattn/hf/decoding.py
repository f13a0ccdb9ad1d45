"""Keys whose decode steps are computed by vattn's own kernels, where torch's SDPA would be slower.

The cache returns keys of a tensor subclass, for which a call of SDPA with one query per sequence goes to the kernels of
`vattn.attention.attend`; the model's attention is not changed. A mask may hide nothing, as that of a full sliding
window, or padding on the left. Where the kernels cannot compute a step, the queries of a KV head are folded into rows,
`[batch, num_kv_heads, group, head_dim]`, which is several times as fast as SDPA's `enable_gqa` in bfloat16. With a
mask, transformers itself folds them.

Of a cache in 8 bits, keys and values are another subclass: the kernels read its codes as they are stored, and any other
operation sees the keys or values that they stand for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from threading import local
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


_MOST_SLOTS = 2**31 - 1  # they are counted in 32 bits

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
    step = not is_causal and _is_step(query, key, value, attn_mask, enable_gqa)
    if step and not dropout_p and _is_native(query, key, value):
        batch, heads, queries, head_dim = query.shape
        stored, scales = [key, value], []
        if isinstance(key, Coded) and isinstance(value, Coded) and not key.is_read and not value.is_read:
            stored, scales = [key.codes, value.codes], [key.scales, value.scales]
        shown = _shown([rows.transpose(1, 2) for rows in stored + scales], attn_mask)
        if shown is not None:
            rows, slots, lengths = shown
            output = query.new_empty(batch, heads, queries, value.shape[3])
            cpu.attend(
                query.reshape(batch, heads * queries, head_dim),
                *rows[:2],
                slots=slots,
                lengths=lengths,
                scales=(rows[2], rows[3]) if scales else None,
                scale=scale,
                out=output.view(batch, heads * queries, -1),
            )
            return output
    key, value = (rows.plain() if isinstance(rows, Coded) else rows for rows in (key, value))
    if step and enable_gqa and query.shape[2] == 1 and (attn_mask is None or attn_mask.shape[-3:-1] == (1, 1)):
        batch, heads, _, head_dim = query.shape
        folded = query.reshape(batch, key.shape[1], -1, head_dim)
        output = scaled_dot_product_attention(folded, key, value, attn_mask, dropout_p, scale=scale)
        return output.reshape(batch, heads, 1, value.shape[3])
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    """Whether there is one query per sequence and head, with keys, in shapes that belong together. SDPA broadcasts
    others or refuses them; the kernels would read memory that is not there.

    With a mask that is the same for all of them, queries may be heads that transformers has folded.
    """
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    batch, heads, queries, head_dim = query.shape
    rows, kv_heads, tokens, key_dim = key.shape
    return (
        (queries == 1 or (queries > 1 and heads == kv_heads and mask is not None and mask.shape[-3:-1] == (1, 1)))
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


def _shown(rows: list[Tensor], mask: Tensor | None) -> tuple[list[Tensor], Tensor, Tensor] | None:
    """How the kernels read what a mask shows of `rows`, each `[batch, tokens, heads, dim]`.

    Returns:
        The rows, slots, and lengths, or None if it hides something else than the first tokens of sequences.
    """
    batch, tokens = rows[0].shape[:2]
    if mask is None:
        return rows, *_all(batch, tokens)
    hidden = _last_mask.hidden(mask, batch, tokens)
    if hidden is None:
        return None
    if not any(hidden):
        return rows, *_all(batch, tokens)
    # A slot for each token, which begins there: sequences are whole numbers of tokens apart, the same in all rows.
    apart = {divmod(each.stride(0), each.stride(1)) for each in rows} if batch > 1 else {(0, 0)}
    (between, rest), *others = apart
    if others or rest or between * batch + tokens > _MOST_SLOTS:
        return None
    places = [each.as_strided(each.shape, (each.stride(1), *each.stride()[1:])) for each in rows]
    return places, *_some(hidden, between, tokens)


def _hidden(mask: Tensor, batch: int, tokens: int) -> tuple[int, ...] | None:
    """How many tokens at the start of each sequence a mask hides; None if it hides others, or all of a sequence."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:] != (1, 1, tokens) or not mask.is_cpu:
        return None
    if mask.shape[0] not in (1, batch):
        return None
    flags = mask[:, 0, 0]
    if bool(flags.all()):
        return (0,) * batch
    first = flags.to(torch.uint8).argmax(1)
    if not bool((flags.sum(1) == tokens - first).logical_and_(flags[:, -1]).all()):
        return None
    hidden: list[int] = first.tolist()
    return tuple(hidden * (batch // len(hidden)))


class _LastMask(local):
    """What the last mask hides: the layers of a step have the same one."""

    _mask: Callable[[], Tensor | None] = staticmethod(lambda: None)
    _state: tuple[int, int, int] | None = None
    _hides: tuple[int, ...] | None = None

    def hidden(self, mask: Tensor, batch: int, tokens: int) -> tuple[int, ...] | None:
        # Inference tensors do not count their changes.
        state = None if mask.is_inference() else (mask._version, batch, tokens)
        if state is None or self._mask() is not mask or self._state != state:
            self._hides = _hidden(mask, batch, tokens)
            self._mask, self._state = weakref.ref(mask), state
        return self._hides


_last_mask = _LastMask()


@lru_cache(maxsize=4)  # a step asks for the same in every layer
def _all(batch: int, length: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        slots = torch.arange(batch, dtype=torch.int32, device="cpu")
        return slots, torch.full_like(slots, length)


@lru_cache(maxsize=4)
def _some(hidden: tuple[int, ...], between: int, length: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        slots = [sequence * between + first for sequence, first in enumerate(hidden)]
        lengths = [length - first for first in hidden]
        both = torch.tensor([slots, lengths], dtype=torch.int32, device="cpu")
        return both[0], both[1]
