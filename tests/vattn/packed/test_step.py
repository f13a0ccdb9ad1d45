"""The attention function and its place in transformers: what is served, what is refused, what generate() gets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from bench.harness.models import CACHE
from tests.support.tiny_models import FAMILIES, VOCAB, make_model, make_prompts, random_model
from vattn import attention, packed
from vattn.attention import AttentionParams
from vattn.attention.interface import attention_forward
from vattn.engine import LLM
from vattn.errors import ConfigError, UnsupportedModel
from vattn.packed.shape import _Probe


@contextmanager
def under_vattn(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    attention.register()
    previous = model.config._attn_implementation
    model.set_attn_implementation("vattn")
    try:
        yield model
    finally:
        model.set_attn_implementation(previous)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gpt-oss", "phi3"])
def test_generate_under_the_name_is_as_before(family: str) -> None:
    """Outside a packed step nothing changes: a padded batch, softcap, sinks and windows included."""
    model = make_model(family)
    prompts = make_prompts([20, 9])
    ids = torch.zeros(2, 20, dtype=torch.int64)
    mask = torch.zeros(2, 20, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, 20 - len(prompt) :] = torch.tensor(prompt)
        mask[row, 20 - len(prompt) :] = 1
    keywords: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    want = model.generate(ids, **keywords)
    with under_vattn(model):
        got = model.generate(ids, **keywords)
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_a_prompt_into_a_static_cache_under_the_name(family: str) -> None:
    """Its queries start at the first key, and the keys behind them are those of no token."""
    model = make_model(family)
    prompt, token = torch.tensor(make_prompts([20])), torch.tensor([[7]])

    def logits() -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        known = torch.ones(1, 21, dtype=torch.int64)
        with torch.no_grad():
            parts = [model(prompt, **{CACHE: cache}), model(token, attention_mask=known, **{CACHE: cache})]
        return torch.cat([part.logits for part in parts], dim=1)

    want = logits()
    with under_vattn(model):
        torch.testing.assert_close(logits(), want)


def test_attention_that_is_not_causal_under_the_name() -> None:
    """That of an encoder, and of a decoder to what the encoder says, with a softcap."""
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 8}
    part = {**shape, **heads, "attn_logit_softcapping": 3.0}
    config = transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=VOCAB, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    prompt = torch.tensor(make_prompts([20]))

    def logits() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=prompt, decoder_input_ids=prompt[:, :7], use_cache=False).logits
        return logits

    want = logits()
    with under_vattn(model):
        torch.testing.assert_close(logits(), want)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kept", [1, 3])
def test_layers_that_compute_the_asked_queries_only_under_the_name(kept: int, static: bool) -> None:
    """Gemma 4's, which share the keys of earlier ones: the masks that are cut for them have to be there."""
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 16, "num_global_key_value_heads": 1}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    embeddings = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "pad_token_id": 0}
    model = random_model("Gemma4TextConfig", **shape, **heads, **layers, **embeddings)
    prompt = torch.tensor(make_prompts([20]))

    def logits() -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=40) if static else None
        with torch.no_grad():
            logits: Tensor = model(prompt, logits_to_keep=kept, **{CACHE: cache}).logits
        return logits

    want = logits()
    with under_vattn(model):
        torch.testing.assert_close(logits(), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_dropout_under_the_name(family: str) -> None:
    model = random_model(FAMILIES[family][0], **make_model(family).config.to_dict() | {"attention_dropout": 0.5})
    model.set_attn_implementation("eager")
    model.train()
    prompt = torch.tensor(make_prompts([20]))

    def logits() -> Tensor:
        torch.manual_seed(0)
        logits: Tensor = model(prompt, use_cache=False).logits
        return logits

    want = logits()
    with under_vattn(model):
        torch.testing.assert_close(logits(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"indices": torch.zeros(1, 3, 2, dtype=torch.int64)}, 'an indexer chooses.*attn_implementation="sdpa"'),
        ({"block_indices": torch.zeros(1, 1, 3, 2, dtype=torch.int64)}, "an indexer chooses"),
        ({"position_bias": torch.zeros(1, 2, 3, 3), "softcap": 2.0}, 'position bias.*attn_implementation="eager"'),
    ],
)
def test_what_would_be_left_out_is_refused(asked: dict[str, Any], why: str) -> None:
    query, key, value = torch.randn(3, 1, 2, 3, 8)
    with pytest.raises(UnsupportedModel, match=why):
        attention_forward(torch.nn.Module(), query, key, value, None, **asked)


def test_a_model_that_attends_otherwise_is_refused() -> None:
    """Its tokens would not see each other as the step says."""
    zero = torch.zeros(1, dtype=torch.int64)
    for call in (lambda m: packed.run_packed(m, _Attend(), zero, zero, zero), packed.kv_shape):
        with pytest.raises(ConfigError, match=r"by 'sdpa'.*model\.set_attn_implementation\('vattn'\) first"):
            call(make_model("llama"))


def test_registering_again_is_harmless() -> None:
    attention.register()
    attention.register()
    assert "vattn" in transformers.AttentionInterface()


def _windows(*windows: int | None) -> tuple[packed.LayerShape, ...]:
    return tuple(packed.LayerShape(2, 8, 8, window) for window in windows)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", packed.KVShape.uniform(2, 2, 8, 8)),
        ("mistral-window", packed.KVShape.uniform(3, 2, 8, 8, window=9)),
        ("gpt-oss", packed.KVShape(_windows(6, None, 6), sinks=True)),
        ("gemma2", packed.KVShape(_windows(8, None, 8), softcap=True)),
        ("gemma3n", packed.KVShape(_windows(8, None), shared={2: 0, 3: 1})),
        ("gemma4", packed.KVShape(_windows(8, None), shared={2: 0, 3: 1})),
        ("qwen2-moe-window", packed.KVShape(_windows(7, None, 7))),
        ("phimoe-window", packed.KVShape.uniform(3, 2, 8, 8, window=7)),
        ("deepseek-v3", packed.KVShape.uniform(3, 4, 16, 12)),
    ],
)
def test_kv_shape(family: str, shape: packed.KVShape) -> None:
    with under_vattn(make_model(family)) as model:
        assert packed.kv_shape(model) == shape


def test_keys_and_values_that_layers_share() -> None:
    """Tensors with other contents or another window are others, also where they lie in one place."""
    probe = _Probe()
    query, key, value = torch.randn(3, 1, 2, 8)
    probe.attend(0, query, key, value, AttentionParams())
    probe.attend(1, query, key, value.neg_(), AttentionParams())
    probe.attend(2, query, key, value, AttentionParams(window=4))
    assert not probe.shared
    probe.attend(3, query, key, value, AttentionParams())
    assert probe.shared == {3: 1}


def test_layers_by_what_they_store_and_for_how_long() -> None:
    shape = packed.KVShape((*_windows(8, None, 8), packed.LayerShape(1, 16, 8)))
    groups = [(g.indices, g.num_kv_heads, g.head_dims, g.sliding_window) for g in shape.groups(100)]
    assert groups == [((0, 2), 2, (8, 8), 8), ((1,), 2, (8, 8), None), ((3,), 1, (16, 8), None)]
    assert [group.indices for group in shape.groups(8)] == [(0, 1, 2), (3,)]  # a window that hides nothing is none
    assert shape.token_elements == 3 * 2 * 16 + 24
    assert shape.stored_alike is None
    assert packed.KVShape(_windows(8, None)).stored_alike == packed.LayerShape(2, 8, 8)


def tiny(name: str, **changes: Any) -> PreTrainedModel:
    config_class = getattr(transformers, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_class(**changes)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)


_TINY = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_REFUSED = {
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "interface"),
    "mpt": ("MptConfig", {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4}, "interface"),
    "falcon": ("FalconConfig", _TINY, "interface"),
    "mamba": ("MambaConfig", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}, "recurrent state"),
    "qwen3-next": (
        "Qwen3NextConfig",
        {**_TINY, "intermediate_size": 32, "num_experts": 2, "layer_types": ["linear_attention", "full_attention"]},
        "recurrent state|linear_attention",
    ),
    "diffllama": ("DiffLlamaConfig", {**_TINY, "intermediate_size": 32}, "differential"),
    "llama4": (
        "Llama4TextConfig",
        {**_TINY, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_local_experts": 2, "head_dim": 8},
        "chunked",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_models_that_would_run_wrong_are_refused_by_name(name: str) -> None:
    config_name, changes, why = _REFUSED[name]
    model = tiny(config_name, **changes)
    with pytest.raises(UnsupportedModel, match=why) as caught:
        packed.check_supported(model)
    assert type(model).__name__ in str(caught.value)
    assert "generate()" in str(caught.value)


def test_a_model_without_layers_is_refused() -> None:
    with (
        under_vattn(random_model("LlamaConfig", **{**_TINY, "num_hidden_layers": 0})) as model,
        pytest.raises(UnsupportedModel, match="num_hidden_layers is 0"),
    ):
        packed.kv_shape(model)


def test_encoder_decoders_are_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        packed.check_supported(model)


def test_a_refused_model_keeps_its_attention() -> None:
    """A layer that never calls the attention function is noticed when the model is loaded."""
    model = make_model("qwen3")
    before = model.config._attn_implementation
    layer = model.model.layers[1]  # type: ignore[index]
    layer.self_attn.layer_idx = 0
    try:
        with pytest.raises(UnsupportedModel, match="share the layer index 0"):
            LLM(model, kv="paged")
    finally:
        layer.self_attn.layer_idx = 1
    assert model.config._attn_implementation == before


class _Attend:
    """A packed step whose attention is the value, repeated; it notes the parameters of each layer."""

    def __init__(self) -> None:
        self.params: dict[int, AttentionParams] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self.params[layer] = params
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", [None, None]),
        ("mistral-window", [9, 9, 9]),
        ("qwen2-window", [None, 7, 7]),
        ("gemma2", [8, None, 8]),
        ("gpt-oss", [6, None, 6]),
        ("qwen2-moe-window", [7, None, 7]),
        ("phimoe-window", [7, 7, 7]),
    ],
)
def test_windows_per_layer(family: str, windows: list[int | None]) -> None:
    """Also of the families that do not pass their window to the attention function."""
    step = _Attend()
    with under_vattn(make_model(family)) as model:
        ids = torch.tensor([3, 4])
        packed.run_packed(model, step, ids, torch.tensor([0, 1]), torch.tensor([1]))
    assert [step.params[layer].window for layer in sorted(step.params)] == windows
    assert all((params.softcap is not None) == (family == "gemma2") for params in step.params.values())
    assert all((params.sinks is not None) == (family == "gpt-oss") for params in step.params.values())


def test_a_step_ends_with_its_forward_even_if_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    ids = torch.tensor([3, 4])
    with under_vattn(model):
        want = model(ids[None]).logits
        with pytest.raises(IndexError):
            packed.run_packed(model, _Attend(), torch.tensor([10**6]), torch.tensor([0]), torch.tensor([0]))
        assert torch.equal(model(ids[None]).logits, want)


def test_only_the_asked_rows_have_logits() -> None:
    with under_vattn(make_model("llama")) as model:
        ids = torch.tensor([3, 4, 5, 6])
        every = packed.run_packed(model, _Attend(), ids, torch.arange(4), torch.arange(4))
        some = packed.run_packed(model, _Attend(), ids, torch.arange(4), torch.tensor([3, 1]))
    assert some.shape == (2, VOCAB)
    torch.testing.assert_close(some, every[[3, 1]])


def test_longrope_stays_on_one_side_of_its_threshold() -> None:
    config = transformers.Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
        pad_token_id=0,
    )
    assert packed.max_context(config) == 64
    assert packed.max_context(make_model("llama").config) == 256


def test_every_family_of_the_suite_is_supported() -> None:
    for family in FAMILIES:
        packed.check_supported(make_model(family))
