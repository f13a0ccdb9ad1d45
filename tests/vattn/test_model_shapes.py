"""Shapes from configs are those that a loaded model is observed to have, and those that papers print."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import FalconConfig, Gemma4TextConfig

from tests.support.tiny_models import FAMILIES, make_model
from vattn import packed
from vattn.errors import ConfigError, UnsupportedModel
from vattn.model_shapes import PUBLISHED, find_shape, shape_of

LIMIT = 256  # positions of the tiny models


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_says_what_its_model_stores(family: str) -> None:
    model = make_model(family)
    config = copy.copy(model.config)
    if family == "opt":  # OPT has no such field; the tiny model's config was given one
        del config.num_key_value_heads
    shape = shape_of(config, family)
    packed.register()
    before = model.config._attn_implementation
    model.set_attn_implementation(packed.NAME)
    try:
        observed = packed.kv_shape(model)
        latents = packed.find_latents(model, observed)
    finally:
        model.set_attn_implementation(before)
    stored = [latents[index].stored if index in latents else layer for index, layer in enumerate(observed.layers)]
    said = {}
    for group in shape.groups:
        assert group.dtype == torch.float32
        for layer in group.indices:
            said[layer] = (group.num_kv_heads, *group.head_dims, group.sliding_window)
    windows = [None if layer.window is None or layer.window >= LIMIT else layer.window for layer in stored]
    assert said == {
        index: (layer.num_kv_heads, layer.head_dim, layer.v_head_dim, window)
        for index, (layer, window) in enumerate(zip(stored, windows, strict=True))
    }
    assert shape.max_context_len == LIMIT


def test_heads_that_differ_from_layer_to_layer() -> None:
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
    full = {"num_key_value_heads": 2, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = Gemma4TextConfig(
        **shape, **full, sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2
    )
    windowed, whole = shape_of(config, "gemma4").groups
    assert (windowed.num_kv_heads, windowed.head_dims, windowed.sliding_window) == (2, (8, 8), 64)
    assert (whole.num_kv_heads, whole.head_dims, whole.sliding_window) == (1, (16, 16), None)


@pytest.mark.parametrize(("options", "heads"), [({}, 1), ({"multi_query": False}, 71)])
def test_one_head_for_all_queries(options: dict[str, Any], heads: int) -> None:
    (group,) = shape_of(FalconConfig(**options), "falcon-7b").groups
    assert (group.num_kv_heads, group.head_dims) == (heads, (64, 64))


def test_values_of_another_size_than_keys() -> None:
    config = SimpleNamespace(
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=24, v_head_dim=16
    )
    (group,) = shape_of(config, "a model").groups
    assert group.head_dims == (24, 16)


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("Yi-6B", 64 << 10),
        ("Llama-3-8B", 128 << 10),
        ("yi-34b", 240 << 10),
        ("Llama-3-70B", 320 << 10),
        ("DeepSeek-V2-Lite", 31_104),
        ("DeepSeek-V3", 70_272),
        ("GPT-OSS-20B", 48 << 10),
    ],
)
def test_published_shapes_take_as_many_bytes_per_token(name: str, token_bytes: int) -> None:
    assert find_shape(name).token_bytes == token_bytes


def test_heads_are_divided_among_devices() -> None:
    assert find_shape("Llama-3-8B", tensor_parallel=2).token_bytes == 64 << 10
    assert find_shape("Yi-6B", tensor_parallel=8).groups[0].num_kv_heads == 1, "a head that all have"
    assert find_shape("DeepSeek-V3", tensor_parallel=8).token_bytes == 70_272, "latents are of all heads"
    with pytest.raises(ConfigError, match="8 K/V heads cannot be divided among 3 devices"):
        find_shape("Llama-3-8B", tensor_parallel=3)


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert find_shape("Mistral-7B-v0.1").groups[0].sliding_window == 4096
    assert find_shape("Mistral-7B-v0.1", max_context_len=4096).groups[0].sliding_window is None
    (alike,) = find_shape("Gemma-2-9B", max_context_len=4096).groups
    assert len(alike.indices) == 42


def test_other_types_of_elements_and_layers() -> None:
    assert find_shape("Llama-3-8B", dtype="float8_e4m3fn").token_bytes == 64 << 10
    config = make_model("llama").config
    with pytest.raises(UnsupportedModel, match="layers of type linear_attention"):
        shape_of(type("Config", (), {**config.to_dict(), "layer_types": ["linear_attention"] * 3})(), "hybrid")
    with pytest.raises(UnsupportedModel, match="does not say its layers"):
        shape_of(object(), "nothing")


def test_unknown_names_are_refused_without_the_network() -> None:
    with pytest.raises(ConfigError, match=re.escape(f"none of {', '.join(PUBLISHED)}")):
        find_shape("Llama-9")


def test_a_config_that_no_model_can_have(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 0, "num_attention_heads": 0}')
    with pytest.raises(UnsupportedModel, match="transformers does not know the config of"):
        find_shape(str(tmp_path))
