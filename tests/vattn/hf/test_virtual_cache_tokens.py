"""generate() with a VirtualCache gives the tokens that it gives with a DynamicCache, in every way that it generates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import vattn
from bench.harness.models import CACHE
from tests.support.effort import effort
from tests.support.tiny_models import FAMILIES, VOCAB, expected, make_model, make_prompts
from vattn.hf.virtual_cache import VirtualLayer

pytestmark = pytest.mark.slow(1)

# Small pages, so that every block boundary is crossed.
OPTIONS: dict[str, Any] = {"max_context_len": 256, "memory_budget": "64MiB", "page_size": 4096}

WAYS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([23], {}),
    "one-token": ([1], {}),
    "left-padded": ([20, 9, 14], {}),
    "beams": ([20, 9], {"num_beams": 3}),
    "long-beams": ([150], {"num_beams": 4, "num_return_sequences": 4}),
    "sampling": ([20, 9], {"do_sample": True, "num_return_sequences": 2}),
    "chunked-prefill": ([30], {"prefill_chunk_size": 7}),
    "prompt-lookup": ([24], {"prompt_lookup_num_tokens": 3}),
}
# transformers has no sdpa for softcap and sinks.
CASES = [(family, "eager") for family in FAMILIES] + [
    (family, "sdpa") for family in FAMILIES if family not in ("gemma2", "gpt-oss")
]
# A short run: each family with one of the implementations that it has, in turn.
EACH = effort([(family, ("eager", "sdpa")[n % 2]) for n, family in enumerate(FAMILIES)], CASES)
EACH = [case if case in CASES else (case[0], "eager") for case in EACH]


def padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths as one batch, padded on the left, and its mask."""
    longest = max(lengths)
    ids, mask = (torch.zeros(len(lengths), longest, dtype=torch.int64) for _ in range(2))
    for row, prompt in enumerate(make_prompts(lengths)):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


@contextmanager
def attending(model: PreTrainedModel, implementation: str) -> Iterator[PreTrainedModel]:
    previous = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield model
    finally:
        model.set_attn_implementation(previous)


def dynamic(model: PreTrainedModel) -> Cache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def tokens(model: PreTrainedModel, cache: Cache, ids: Tensor, mask: Tensor, **options: Any) -> list[list[int]]:
    torch.manual_seed(3)
    keywords = {"max_new_tokens": 10, "do_sample": False, **options}
    output: Tensor = model.generate(ids, attention_mask=mask, **{CACHE: cache}, **keywords)
    return output.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "implementation"), EACH)
def test_tokens_equal_those_of_a_dynamic_cache(family: str, implementation: str) -> None:
    first = [*FAMILIES].index(family) // 2 % 2
    with attending(make_model(family), implementation) as model:
        for way in effort(list(WAYS)[first::2], list(WAYS)):
            lengths, options = WAYS[way]
            ids, mask = padded(lengths)
            want = tokens(model, dynamic(model), ids, mask, **options)
            with vattn.VirtualCache(model, **OPTIONS) as cache:
                assert tokens(model, cache, ids, mask, **options) == want, way
                cache.check()


@pytest.mark.parametrize(("family", "implementation"), EACH)
def test_turns_of_a_chat_reuse_the_cache(family: str, implementation: str) -> None:
    with (
        attending(make_model(family), implementation) as model,
        vattn.VirtualCache(model, **OPTIONS) as cache,
    ):
        reference = dynamic(model)
        ids, mask = padded([21, 12])
        for turn in range(3):
            want = tokens(model, reference, ids, mask)
            assert tokens(model, cache, ids, mask) == want, turn
            more = torch.tensor(make_prompts([5, 5], seed=turn))
            ids = torch.cat([torch.tensor(want), more], dim=1)
            mask = torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.int64)], dim=1)
        cache.reset()
        ids, mask = padded([9, 17, 4])
        assert tokens(model, cache, ids, mask) == tokens(model, dynamic(model), ids, mask)
        cache.check()


def test_an_assistant_model() -> None:
    model, assistant = make_model("llama"), make_model("llama-mha")
    ids, mask = padded([20])
    want = tokens(model, dynamic(model), ids, mask)
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        assert tokens(model, cache, ids, mask, assistant_model=assistant) == want


_SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "layers that share K and V": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": _SLIDING,
            "sliding_window": 8,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "intermediate_size": [48] * 5,
            "activation_sparsity_pattern": [0.0] * 5,
            "head_dim": 8,
        },
    ),
    "head sizes that differ": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": _SLIDING,
            "sliding_window": 8,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
        },
    ),
    "no attention interface": ("GPTJConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "alibi": ("BloomConfig", {"n_layer": 3, "n_head": 4}),
    "differential": ("DiffLlamaConfig", {"head_dim": 8}),
}


@pytest.mark.parametrize("what", _OTHER)
def test_models_that_packed_steps_do_not_serve(what: str) -> None:
    name, changes = _OTHER[what]
    base = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, name)(
            **base
            | {"num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0, "eos_token_id": None}
            | changes
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.7 * parameter.shape[-1] ** -0.5)
    model.train(False)
    first = list(_OTHER).index(what) % 2
    for way in effort(list(WAYS)[first::2], list(WAYS)):
        lengths, options = WAYS[way]
        ids, mask = padded(lengths)
        want = tokens(model, dynamic(model), ids, mask, **options)
        with vattn.VirtualCache(model, **OPTIONS) as cache:
            assert tokens(model, cache, ids, mask, **options) == want, way
            cache.check()
            with copy.deepcopy(cache) as copied:
                assert copied.get_seq_length() == cache.get_seq_length()


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models' tokens depend on what the cache holds: one that forgets every tenth token is noticed."""
    update = VirtualLayer.update

    def forgetful(self: VirtualLayer, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(self, keys, values)
        values[:, :, ::10] = 0
        return keys, values

    monkeypatch.setattr(VirtualLayer, "update", forgetful)
    ids, mask = padded([40, 23])
    for family in FAMILIES:
        model = make_model(family)
        with vattn.VirtualCache(model, **OPTIONS) as cache:
            assert tokens(model, cache, ids, mask) != tokens(model, dynamic(model), ids, mask), family


@pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, "expand_kv"),
    reason="this transformers expands latents inside forward, so keys and values are stored",
)
@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3"])
def test_latents_are_stored(family: str) -> None:
    """transformers updates a cache before it expands latents: the cache holds latents and rotary parts."""
    model = make_model(family)
    prompt = make_prompts([25])[0]
    ids = torch.tensor([prompt])
    with vattn.VirtualCache(model) as cache:
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **{CACHE: cache}
        )
        for layer in cache.layers:
            assert isinstance(layer, VirtualLayer)
            assert layer.keys is not None
            assert layer.values is not None
            config = model.config
            assert (layer.keys.shape[-1], layer.values.shape[-1]) == (config.kv_lora_rank, config.qk_rope_head_dim)
            assert layer.keys.shape[:3] == layer.values.shape[:3] == (1, 1, 30)
    assert output[0, len(prompt) :].tolist() == expected(family, prompt, 6)
