"""Packed batches through unmodified transformers models.

A packed step runs the new tokens of several requests as one row, `input_ids [1, T]`, with their positions. The model
calls the attention function registered here once per layer with those tokens' queries, keys and values; it hands
them to the step that is current in this context, which stores the keys and values and attends. Nothing here knows
what a scheduler or a cache is.

    register()
    model.set_attn_implementation("vattn")
    logits = run_packed(model, step, input_ids, position_ids, rows)

The step travels in a context variable because some models drop keyword arguments that they do not know. Outside a
packed step the name behaves as transformers' own sdpa, so that `generate()` works on the same model.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vattn.attention.base import AttentionParams
from vattn.attention.torch_sdpa import plain_attention
from vattn.errors import UnsupportedModel

NAME = "vattn"

# Attention that reads the mask, adds state or subtracts scores in ways that the packed function does not see.
_REFUSED_MODEL_TYPES = {
    "llama4": "its chunked attention",
    "llama4_text": "its chunked attention",
    "diffllama": "its differential attention",
    "deepseek_v32": "its indexer, which needs a mask",
    "recurrent_gemma": "its recurrent layers",
    "minimax": "its linear attention layers",
}
# Do not claim `_supports_attention_backend`, but call the interface and give the right tokens: the tests compare.
_SERVED_WITHOUT_CLAIM = {"stablelm"}
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


class PackedStep(Protocol):
    """What the attention function needs of a step."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Store the new keys and values of a layer, then attend to all that are stored.

        Args:
            query: `[T, num_query_heads, head_dim]`, rotary embedding applied, rows in the order of the step.
            key, value: `[T, num_kv_heads, head_dim]` and `[T, num_kv_heads, v_head_dim]`.

        Returns:
            `[T, num_query_heads, v_head_dim]`.
        """
        ...


@dataclass
class _Running:
    step: PackedStep
    masks: set[int | None] = field(default_factory=set)  # the windows of the masks that the model asked for


_running: ContextVar[_Running | None] = ContextVar("vattn_packed_step", default=None)


def register() -> None:
    """Register `"vattn"` as an attention implementation, and its mask function, in transformers."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, packed_mask)


def current_step() -> PackedStep | None:
    """The packed step that runs in this context, for whoever computes a layer in the model's place; None outside."""
    running = _running.get()
    return None if running is None else running.step


def run_packed(
    model: PreTrainedModel, step: PackedStep, input_ids: Tensor, position_ids: Tensor, rows: Tensor
) -> Tensor:
    """One forward pass over a packed step.

    Args:
        input_ids, position_ids: `[T]` int64.
        rows: `[S]` int64, the rows whose logits are wanted.

    Returns:
        Logits `[S, vocab_size]`.
    """
    token = _running.set(_Running(step))
    try:
        with torch.inference_mode():
            output = model(
                input_ids=input_ids[None],
                position_ids=position_ids[None],
                use_cache=False,
                logits_to_keep=rows,
            )
    finally:
        _running.reset(token)
    logits: Tensor = output.logits[0]
    return logits


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
    """
    running = _running.get()
    if running is None:
        return _outside_a_step(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, **kwargs)
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if attention_mask is not None or kwargs.get("position_bias") is not None or not causal:
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
    """The mask function: none in a packed step, which knows its own spans; transformers' sdpa mask otherwise."""
    running = _running.get()
    if running is None:
        return sdpa_mask(**kwargs)
    if kwargs.get("use_vmap"):
        raise UnsupportedModel(
            "the model lays a mask of its own over the causal one (images, prefixes); packed steps cannot. "
            "Use model.generate() for this model."
        )
    running.masks.add(kwargs.get("local_size"))
    return None


def _window(module: torch.nn.Module, kwargs: dict[str, Any], masks: set[int | None]) -> int | None:
    """The sliding window of this layer: what it passes, or, where it passes nothing, what its mask would say."""
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
    """For `generate()` and plain forward passes: transformers' sdpa, or plain attention for what sdpa cannot do."""
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask is None:  # the mask function skips what sdpa can do with `is_causal`
        past = key.shape[2] - query.shape[2]
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(past)
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, torch.finfo(query.dtype).min
        )
    params = AttentionParams(scaling, None, softcap, s_aux)
    return plain_attention(query, key, value, attention_mask, params).transpose(1, 2).contiguous(), None


def check_supported(model: PreTrainedModel) -> None:
    """Refuse a model that packed steps would run wrong or not at all.

    Raises:
        UnsupportedModel: says which property of the model is in the way.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__

    def refuse(why: str) -> None:
        raise UnsupportedModel(
            f"{name} (model_type {config.model_type!r}) cannot be served: {why}. "
            "Packed steps serve decoder-only models whose every layer attends through transformers' "
            "attention interface; use model.generate() for this one."
        )

    for model_type in (model.config.model_type, config.model_type):
        if model_type in _REFUSED_MODEL_TYPES:
            refuse(f"packed steps do not know {_REFUSED_MODEL_TYPES[model_type]}")
    if model.config.is_encoder_decoder:
        refuse("it is an encoder-decoder")
    if getattr(model, "_is_stateful", False):
        refuse("it keeps recurrent state besides keys and values")
    other = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if other:
        refuse(f"it has layers of type {', '.join(sorted(other))}")
    claims = getattr(model, "_supports_attention_backend", False)
    if not claims and config.model_type not in _SERVED_WITHOUT_CLAIM:
        refuse("it does not call transformers' attention interface")
    if not getattr(config, "is_causal", True):
        refuse("its attention is not causal")
    missing = {"position_ids", "logits_to_keep"} - inspect.signature(model.forward).parameters.keys()
    if missing:
        refuse(f"its forward takes no {' and no '.join(sorted(missing))}")


def max_context(config: PretrainedConfig) -> int | None:
    """The longest context in tokens that the model's positions allow in packed steps; None where it states none.

    Rotary embeddings of type `longrope` and `dynamic` change their frequencies for a whole batch once one request
    passes the original length, so requests from both sides must not meet in one step: that length is the limit.
    """
    config = config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(p for p in rope.values() if isinstance(p, dict))):
        if parameters.get("rope_type") in {"longrope", "dynamic"}:
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if original is not None:
                limit = original if limit is None else min(limit, original)
    return limit
