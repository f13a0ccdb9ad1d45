"""A forward pass of an unmodified transformers model over the new tokens of several requests.

The tokens are packed into one row, `input_ids [1, T]`, with the position of each in its request. Attention goes to a
`PackedStep`; nothing here knows what a scheduler or a cache is.

    register()
    model.set_attn_implementation("vattn")
    logits = run_packed(model, step, input_ids, position_ids, rows)
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from vattn.attention.interface import NAME, PackedStep, running
from vattn.errors import ConfigError, UnsupportedModel

# Attention that reads the mask, adds state or subtracts scores in ways that the packed function does not see.
_REFUSED_MODEL_TYPES = {
    "llama4": "its chunked attention",
    "llama4_text": "its chunked attention",
    "diffllama": "its differential attention",
    "deepseek_v32": "its indexer, which needs a mask",
    "recurrent_gemma": "its recurrent layers",
    "minimax": "its linear attention layers",
    "doge": "its attention's own mask",
}
# They do not claim `_supports_attention_backend`, but call the interface; the tests compare their tokens.
_SERVED_WITHOUT_CLAIM = {"stablelm"}
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def run_packed(
    model: PreTrainedModel, step: PackedStep, input_ids: Tensor, position_ids: Tensor, rows: Tensor
) -> Tensor:
    """Runs one forward pass over a packed step.

    Args:
        input_ids, position_ids: `[T]` int64.
        rows: `[S]` int64, the rows whose logits are computed.

    Returns:
        Logits `[S, vocab_size]`.

    Raises:
        ConfigError: the model attends by other means than vattn, and would compute something else.
    """
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention != NAME:
        raise ConfigError(
            f"{type(model).__name__} attends by {attention!r}, not through the step; call "
            f"model.set_attn_implementation({NAME!r}) first"
        )
    with running(step, rows), torch.inference_mode():
        output = model(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, logits_to_keep=rows)
    logits: Tensor = output.logits[0]
    return logits


def check_supported(model: PreTrainedModel) -> None:
    """Refuses a model that packed steps would run incorrectly or not at all.

    Raises:
        UnsupportedModel: names the property that is not supported.
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
    """The longest context in tokens that the model's positions allow in packed steps; None if the config has no limit.

    Rotary embeddings of type `longrope` and `dynamic` change their frequencies for the whole batch once one request
    exceeds the original length. Requests of both kinds must not share a step, so the original length is the limit.
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
