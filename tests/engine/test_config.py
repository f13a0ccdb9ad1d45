"""One source for the keywords of `LLM`, the flags of the command line and what they mean."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.tiny_models import make_model
from vattn.engine import LLM
from vattn.engine.config import EngineConfig
from vattn.engine.options import options_of
from vattn.errors import ConfigError

FIELDS = {field.name: field for field in fields(EngineConfig)}


def test_the_keywords_of_llm_are_the_fields() -> None:
    keywords = dict(inspect.signature(LLM).parameters)
    assert list(keywords) == list(FIELDS) == list(options_of(EngineConfig))
    for name, keyword in keywords.items():
        assert keyword.default == FIELDS[name].default, name
        assert keyword.annotation == FIELDS[name].type, name
        assert keyword.kind is (keyword.POSITIONAL_OR_KEYWORD if name == "model" else keyword.KEYWORD_ONLY)
    with pytest.raises(TypeError, match="kw_cache"):
        LLM(kw_cache=1)  # type: ignore[call-arg]


def test_every_keyword_is_documented_in_order() -> None:
    args = (inspect.getdoc(LLM) or "").split("Args:\n")[1].split("\n\n")[0]
    assert re.findall(r"^    (\w+):", args, flags=re.MULTILINE) == list(FIELDS)


def test_values_are_pythons_own() -> None:
    config = EngineConfig(
        model=Path("a/b"), tokenizer=Path("c"), max_num_seqs=np.int64(3), dtype="bfloat16", seed=np.int8(5)
    )
    assert (config.model, config.tokenizer, config.dtype) == ("a/b", "c", torch.bfloat16)
    assert [type(value) for value in (config.max_num_seqs, config.seed)] == [int, int]
    with pytest.raises(FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


def resolved(config: EngineConfig) -> tuple[str, int, int | str]:
    device = config.resolved_device()
    return str(device), config.resolved_max_num_batched_tokens(device), config.resolved_memory_budget(device)


def test_what_is_not_given_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolved(EngineConfig("a/b")) == ("cpu", 512, "4GiB")
    assert resolved(EngineConfig("a/b", max_num_seqs=600)) == ("cpu", 600, "4GiB")
    with pytest.raises(ConfigError, match=r"device='cuda', but torch .* can use no GPU here"):
        EngineConfig("a/b", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolved(EngineConfig("a/b")) == ("cuda", 2048, "auto")
    given = EngineConfig("a/b", device="cuda:1", max_num_batched_tokens=np.int64(300), memory_budget="1GiB")
    assert resolved(given) == ("cuda:1", 300, "1GiB")
    assert resolved(EngineConfig("a/b", device=torch.device("cpu"))) == ("cpu", 512, "4GiB")
    model = make_model("llama")
    assert resolved(EngineConfig(model)) == resolved(EngineConfig(model, device="cpu")) == ("cpu", 512, "4GiB")
    with pytest.raises(ConfigError, match=r"the loaded model is on cpu, not on device='cuda:1'; move it first"):
        EngineConfig(model, device="cuda:1")
    with pytest.raises(ConfigError, match="device='tpu' has no memory driver"):
        EngineConfig("a/b", device="tpu")


def test_what_no_model_could_serve_is_refused_before_one_is_loaded() -> None:
    for keywords, message in (
        ({"kv": "stack"}, "'stack' is not a backend"),
        ({"kv": "paged", "kv_cache_dtype": "int8"}, "kv='virtual'"),
        ({"memory_budget": "much"}, "memory_budget='much' is not a size"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"dtype": "int4"}, "'int4' is not one of"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but a model runs on one device; run one engine per"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; give a whole number, at least 1"),
        ({"revision": 5}, "revision is 5; give a branch"),
        ({"hf_overrides": "x"}, "hf_overrides is 'x'; give a mapping"),
        ({"generation_config": None}, "generation_config is None; give auto, vllm or a folder"),
        ({"kv_cache_memory_bytes": "1GiB"}, "kv_cache_memory_bytes is '1GiB'; give a whole number"),
        ({"kv_cache_memory_bytes": 10**6, "memory_budget": "1GiB"}, "both size the cache; give one"),
        ({"kv_cache_memory_bytes": 10**6, "gpu_memory_utilization": 0.5}, "both size the cache; give one"),
        ({"max_logprobs": -2}, "max_logprobs is -2; give how many"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1"),
        ({"num_threads": 5000}, "num_threads is 5000; it can be at most 1024"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM("/nowhere/at/all", **keywords)  # type: ignore[arg-type]


def test_a_loaded_model_has_no_revision_and_no_overrides() -> None:
    for keywords in ({"revision": "main"}, {"hf_overrides": {"use_cache": False}}):
        with pytest.raises(ConfigError, match="the model is loaded already; leave it out"):
            LLM(make_model("llama"), **keywords)  # type: ignore[arg-type]


def test_the_size_of_the_cache() -> None:
    cpu = torch.device("cpu")
    assert EngineConfig(model="m").resolved_memory_budget(cpu) == "4GiB"
    assert EngineConfig(model="m", memory_budget="1GiB").resolved_memory_budget(cpu) == "1GiB"
    config = EngineConfig(model="m", kv_cache_memory_bytes=np.int64(2**20))  # type: ignore[arg-type]
    assert config.resolved_memory_budget(cpu) == 2**20
    assert type(config.kv_cache_memory_bytes) is int


def test_the_longest_request() -> None:
    assert EngineConfig(model="m").resolved_max_model_len(64) == 64
    assert EngineConfig(model="m", max_model_len=32).resolved_max_model_len(64) == 32
    assert EngineConfig(model="m", max_model_len=32).resolved_max_model_len(None) == 32
    with pytest.raises(ConfigError, match="states no longest context"):
        EngineConfig(model="m").resolved_max_model_len(None)
    with pytest.raises(ConfigError, match="give at most 16"):
        EngineConfig(model="m", max_model_len=32).resolved_max_model_len(16)


def test_a_switch_is_true_or_false() -> None:
    switches = [each.name for each in fields(EngineConfig) if isinstance(each.default, bool)]
    assert "kv_share_prefixes" in switches
    for name in switches:
        with pytest.raises(ConfigError, match=f"{name} is 'no'; give True or False"):
            EngineConfig("some/model", **{name: "no"})  # type: ignore[arg-type]
