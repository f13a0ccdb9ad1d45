"""Tiny random models of real families, and what `generate` says each prompt alone should give."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 96

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
# The last two of four layers attend to the keys and values of the first two.
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": _SLIDING[:2] * 2,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

# family: config class, and what differs from the base
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 2}),  # most tests take this one
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9}),
    "gemma2": (
        "Gemma2Config",
        {"layer_types": _SLIDING, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3TextConfig", {"layer_types": _SLIDING, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3n": ("Gemma3nTextConfig", {**_SHARED, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}),
    "gemma4": ("Gemma4TextConfig", {**_SHARED, "global_head_dim": 8}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "gpt-oss": (
        "GptOssConfig",
        {**_MOE, "layer_types": _SLIDING, "sliding_window": 6, "rope_parameters": _YARN},
    ),
    "mixtral": ("MixtralConfig", {**_MOE, "sliding_window": None}),
    "qwen2-moe-window": (
        "Qwen2MoeConfig",
        {**_MOE, "use_sliding_window": True, "sliding_window": 7, "layer_types": _SLIDING},
    ),
    "phimoe-window": ("PhimoeConfig", {**_MOE, "sliding_window": 7}),
    "stablelm": ("StableLmConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "deepseek-v2": (
        "DeepseekV2Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
}


@functools.cache
def make_model(family: str) -> PreTrainedModel:
    """A model of `family` in float32 whose weights are large enough for attention to decide the tokens."""
    name, changes = FAMILIES[family]
    keywords = {**_BASE, **changes}
    if family == "deepseek-v3":
        del keywords["head_dim"]
    return random_model(name, **keywords)


@functools.cache
def make_smallest_model() -> PreTrainedModel:
    """A Llama so small that a step's time is not the model's; a token takes 256 bytes in its cache.

    In float64: no two tokens are ever so close that the order of a sum decides between them.
    """
    changes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return random_model("LlamaConfig", **{**_BASE, **changes}).double()


def random_model(config_class: str, **keywords: Any) -> PreTrainedModel:
    """A model of that configuration in float32, with random weights as large as `make_model` says."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about configs, from transformers itself
        config = getattr(transformers, config_class)(**keywords)
        # SDPA has no softcap; older releases of transformers choose it nevertheless.
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                scale = 1.7 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif parameter.ndim == 1 and not parameter.any():  # biases, sinks
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.train(False)
    return model


@functools.cache
def _expected(family: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    model = make_model(family)
    assert model.config._attn_implementation != "vattn", "the reference would run the code under test"
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return tuple(output[0, len(prompt) :].tolist())


def expected(family: str, prompt: list[int], max_tokens: int, found: list[int] | None = None) -> list[int]:
    """Greedy tokens of transformers' own `generate` for this prompt alone.

    Tokens that were `found` are accepted after one pass of the model over all of them, without a cache, in place of a
    pass per token: each must be the most likely one after those before it.
    """
    if found and len(found) == max_tokens and _most_likely(family, tuple(prompt), tuple(found)) == found:
        return list(found)
    return list(_expected(family, tuple(prompt), max_tokens))


@functools.cache
def _most_likely(family: str, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[int]:
    """The model's first choice in the place of each of `tokens`."""
    model = make_model(family)
    assert model.config._attn_implementation != "vattn", "the reference would run the code under test"
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0]
    choices: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return choices


def make_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random token ids, one prompt of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word per token id: `w5` is 5."""
    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")
