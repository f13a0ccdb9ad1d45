"""Small models with random weights, of the kinds that the plugin serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def _model(name: str, **options: Any) -> PreTrainedModel:
    model_class = getattr(transformers, f"{name}ForCausalLM")
    return model_class(model_class.config_class(**{**_SHAPE, **options}))  # type: ignore[no-any-return]


# `window` layers see 40 tokens, less than two blocks of the smallest size.
KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "full": lambda: _model("Qwen2", hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8),
    "draft": lambda: _model("Llama", num_hidden_layers=1),
    "mixture": lambda: _model("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "shared experts": lambda: _model(
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        decoder_sparse_step=1,
    ),
    "window": lambda: _model("Mistral", sliding_window=40),
    "mixture with a window": lambda: _model("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=40),
    # One full layer to two with a window: three KV cache groups, of which the last has a layer less.
    "full and window": lambda: _model(
        "Gemma3",
        num_hidden_layers=5,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ),
    # As many of one kind as of the other, and scores with a bound.
    "window and softcap": lambda: _model(
        "Gemma2",
        num_hidden_layers=4,
        sliding_window=100,
        layer_types=["sliding_attention", "full_attention"] * 2,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
    ),
    # Sinks, a mixture of experts, and windows.
    "sinks": lambda: _model(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def make(kind: str, folder: Path) -> Path:
    """Saves a model of this kind; the same one each time."""
    torch.manual_seed(0)
    network = KINDS[kind]()
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    if network.config.tie_word_embeddings:
        # Else every token would be its own successor.
        network.get_input_embeddings().weight.data.mul_(0.1)
        network.base_model.norm.weight.data.fill_(20.0)
    network.save_pretrained(folder)
    return folder
