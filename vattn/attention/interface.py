"""The attention function that transformers knows as `"vattn"`, and the packed step that it serves.

transformers calls an attention function once per layer, with the queries, keys and values of the new tokens. This one
passes them to the `PackedStep` that runs in the current context, which stores the keys and values and attends. Outside
a packed step it behaves as transformers' own sdpa, so `generate()` works on the same model.

The step is a context variable because some models drop keyword arguments that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vattn.attention.base import AttentionParams
from vattn.attention.torch_sdpa import plain_attention
from vattn.errors import UnsupportedModel

NAME = "vattn"

# The keys that an indexer chose, as models give them to kernels that read them.
_CHOSEN_KEYS = ("indices", "block_indices")


class PackedStep(Protocol):
    """A step as the attention function sees it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Stores the new keys and values of a layer, then attends to all that are stored.

        Args:
            query: `[T, num_query_heads, head_dim]`, rotary embedding applied, rows in the order of the step.
            key, value: `[T, num_kv_heads, head_dim]` and `[T, num_kv_heads, v_head_dim]`.

        Returns:
            `[T, num_query_heads, v_head_dim]`.
        """
        ...


@runtime_checkable
class RowsStep(PackedStep, Protocol):
    """A step that can leave out rows whose attention nobody reads."""

    def attend_rows(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, rows: Tensor
    ) -> Tensor:
        """As `attend`, whose arguments these are; returns rows `[S]` int64 of its result only."""
        ...


@dataclass
class _Running:
    step: PackedStep
    rows: Tensor | None
    masks: set[int | None] = field(default_factory=set)  # the windows of the masks that the model asked for


_running: ContextVar[_Running | None] = ContextVar("vattn_packed_step", default=None)


def register() -> None:
    """Register `"vattn"` as an attention implementation, and its mask function, in transformers."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, packed_mask)


def current_step() -> PackedStep | None:
    """The packed step that runs in this context, for code that computes a layer in place of the model; None outside."""
    running = _running.get()
    return None if running is None else running.step


def wanted_rows() -> Tensor | None:
    """The rows of the packed step whose logits are asked for, `[S]` int64, for code that computes a layer in place of
    the model: after the attention of the last layer, no other row is read. None for all, and outside of a step.
    """
    running = _running.get()
    return None if running is None else running.rows


@contextmanager
def running(step: PackedStep, rows: Tensor | None = None) -> Iterator[None]:
    """Makes `step` the packed step of this context, through which models with attention `"vattn"` attend.

    Args:
        rows: those whose logits are asked for, `[S]` int64; None for all.
    """
    token = _running.set(_Running(step, rows))
    try:
        yield
    finally:
        _running.reset(token)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function in transformers' signature.

    Args:
        query: `[1, num_query_heads, T, head_dim]`.
        key, value: `[1, num_kv_heads, T, *]`.

    Returns:
        `[1, T, num_query_heads, v_head_dim]`, and None in place of attention weights.

    Raises:
        UnsupportedModel: the layer asks for what neither a packed step nor plain attention computes.
    """
    if any(kwargs.get(name) is not None for name in _CHOSEN_KEYS):
        raise UnsupportedModel(
            f"{type(module).__name__} attends to keys that an indexer chooses, and makes no mask of them for attention "
            f'{NAME!r}, which would attend to all; use attn_implementation="sdpa" for this model'
        )
    running = _running.get()
    if running is None:
        return _outside_a_step(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, **kwargs)
    if attention_mask is not None or kwargs.get("position_bias") is not None or not _is_causal(module, kwargs):
        raise UnsupportedModel(
            f"{type(module).__name__} asks for a mask of its own, a position bias or attention that is not causal; "
            "packed steps serve causal self-attention only. Use model.generate() for this model."
        )
    params = AttentionParams(scaling, _window(module, kwargs, running.masks), softcap, s_aux)
    output = running.step.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        params,
    )
    return output[None], None


def packed_mask(**kwargs: Any) -> Tensor | None:
    """The mask function: None in a packed step, whose kernels mask by spans; transformers' sdpa mask otherwise."""
    running = _running.get()
    if running is None:
        if kwargs["q_length"] > 1 and getattr(kwargs.get("config"), "num_kv_shared_layers", 0):
            # Gemma 4 computes its last layers, which share keys, for the asked queries only: sdpa's mask, which starts
            # at the first key, is not theirs.
            kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(**kwargs)
    if kwargs.get("use_vmap"):
        raise UnsupportedModel(
            "the model lays a mask of its own over the causal one (images, prefixes); packed steps cannot. "
            "Use model.generate() for this model."
        )
    running.masks.add(kwargs.get("local_size"))
    return None


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether attention without a mask is causal: as the call says, or else the layer."""
    causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _window(module: torch.nn.Module, kwargs: dict[str, Any], masks: set[int | None]) -> int | None:
    """The sliding window of this layer: the one that it passes, or else the one of its mask."""
    if "sliding_window" in kwargs:
        window: int | None = kwargs["sliding_window"]
        return window
    if masks <= {None}:
        return None
    config: Any = module.config
    layer_idx: Any = module.layer_idx
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return config.sliding_window if layer_types[layer_idx] == "sliding_attention" else None
    if len(masks) == 1:
        return next(iter(masks))
    raise UnsupportedModel(
        f"{type(module).__name__} uses several masks and does not say which one is this layer's; "
        "use model.generate() for this model"
    )


def _outside_a_step(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa for `generate()` and plain forward passes, or plain attention for softcap and sinks."""
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} asks for a position bias beside a softcap or sinks, which attention {NAME!r} "
            'does not compute; use attn_implementation="eager" for this model'
        )
    rows = query.shape[2]
    if attention_mask is None and rows > 1 and _is_causal(module, kwargs):
        # The mask function skips what sdpa can do with `is_causal`: queries from the first key on. Further keys are the
        # rest of a static cache, without tokens.
        key, value = key[:, :, :rows], value[:, :, :rows]
        attention_mask = torch.ones(rows, key.shape[2], dtype=torch.bool, device=key.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, torch.finfo(query.dtype).min
        )
    params = AttentionParams(scaling, None, softcap, s_aux)
    output = plain_attention(query, key, value, attention_mask, params, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None
