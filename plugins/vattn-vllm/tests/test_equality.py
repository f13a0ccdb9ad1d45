"""The same tokens as vLLM without the plugin, and the same prefix hits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from pools import NAME, serving_pool, wait_until
from safetensors.torch import save_file

Run = Callable[..., dict[str, Any]]

CASES: dict[str, dict[str, Any]] = {
    "prefix caching": {},
    "no prefix caching": {"llm": {"enable_prefix_caching": False}},
    "small chunks": {"llm": {"max_num_batched_tokens": 48}},
    "small blocks": {"llm": {"block_size": 32}},
    "preemption": {"llm": {"num_gpu_blocks_override": 10}},
    "drafts": {"llm": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}},
    # Of one token, since engines draw their random numbers in another order.
    "several samples": {"sampling": {"n": 3, "temperature": 1, "top_k": 1}},
    # vLLM puts requests that begin last, whatever their length.
    "prompts of one token": {"lengths": [3, 1, 20, 1, 2]},
    "a first chunk of one token": {"lengths": [63, 10, 40], "llm": {"max_num_batched_tokens": 64}},
    "compiled": {"llm": {"enforce_eager": False}},
    "bfloat16": {"llm": {"dtype": "bfloat16"}, "sampling": {"max_tokens": 2}},
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens_and_prefix_hits(name: str, run: Run) -> None:
    stock, ours = run(**CASES[name]), run(plugin={}, **CASES[name])
    if name == "bfloat16":  # kernels round differently, so only most tokens are equal
        pairs = list(zip(*(str(each["results"][0]["tokens"]).split() for each in (stock, ours)), strict=True))
        assert sum(a == b for a, b in pairs) > 0.7 * len(pairs)
    else:
        assert ours["results"] == stock["results"]
    (stats,) = ours["stats"]
    if name == "prefix caching":
        assert sum(ours["results"][1]["cached"]) > 0
    assert stats["mapped_bytes"] < 0.2 * stats["reserved_bytes"]


@pytest.mark.parametrize("plugin", [{"guard": "strict"}, {"kernel": "torch_sdpa"}])
@pytest.mark.parametrize("kind", ["full", "window"])
def test_rows_without_mappings(plugin: dict[str, Any], kind: str, model_of: Callable[[str], Path], run: Run) -> None:
    """They are read by their block table, in some steps and not in others."""
    llm = {"model": str(model_of(kind)), "max_num_batched_tokens": 100, "num_gpu_blocks_override": 100}
    answer = run(plugin=plugin, without_mappings=3, llm=llm)
    assert answer["results"] == run(llm=llm)["results"]
    assert answer["read_by_table"]


@pytest.mark.parametrize("plugin", [{"guard": "strict"}, {"kernel": "torch_sdpa"}])
def test_drafts_of_a_model(plugin: dict[str, Any], model_of: Callable[[str], Path], run: Run) -> None:
    """Its tokens that were rejected are computed again, and stored nowhere."""
    config = {"method": "draft_model", "model": str(model_of("draft")), "num_speculative_tokens": 3}
    order = {"llm": {"model": str(model_of("full")), "speculative_config": config}}
    tokens, expected = ([each["tokens"] for each in run(plugin=each, **order)["results"]] for each in (plugin, None))
    assert tokens == expected


@pytest.mark.parametrize("kind", [kind for kind in models.KINDS if kind != "full"])
def test_every_kind_of_model(kind: str, model_of: Callable[[str], Path], run: Run) -> None:
    llm = {"model": str(model_of(kind)), "max_num_batched_tokens": 100, "num_gpu_blocks_override": 100}
    answer = run(plugin={"guard": "strict"}, llm=llm, then_stock=True)
    assert answer["results"] == answer["stock"]
    assert sum(answer["results"][1]["cached"]) > 0


def test_windows_without_groups_of_their_own(model_of: Callable[[str], Path], run: Run) -> None:
    llm = {"model": str(model_of("full and window")), "disable_hybrid_kv_cache_manager": True}
    answer = run(plugin={"guard": "strict"}, llm=llm, then_stock=True)
    assert answer["results"] == answer["stock"]


@pytest.mark.parametrize("caching", [False, True])
def test_what_a_window_has_passed_is_given_back(caching: bool, model_of: Callable[[str], Path], run: Run) -> None:
    """While the request runs, which is all that there is."""
    llm = {"model": str(model_of("window")), "max_num_batched_tokens": 48, "block_size": 32}
    order = {"lengths": [900], "llm": {**llm, "enable_prefix_caching": caching}}
    (stats,) = run(plugin={"keep_free": 0}, **order)["stats"]
    row = 2 * 2 * 32 * 4  # keys and values of two heads
    peak = stats["peak_mapped_bytes"] / (2 * 32 * row)
    # 40 tokens that are seen, 48 new ones, parts of blocks, and the null block; 29 blocks are used in all.
    assert peak <= 6


@pytest.mark.parametrize("layout", ["layered", "fused"])
def test_every_layout_and_a_guard(layout: str, run: Run) -> None:
    ours = run(plugin={"layout": layout, "guard": "strict", "spare_windows": 0})
    assert ours["results"] == run()["results"]


def test_memory_that_is_given_back_costs_hits_and_no_tokens(run: Run) -> None:
    """Without anything to keep, whatever is left when the engine is idle goes."""
    ours = run(plugin={"keep_cached": 0, "keep_free": 0}, multiprocessing=True)
    stock = run(multiprocessing=True)
    assert [each["tokens"] for each in ours["results"]] == [each["tokens"] for each in stock["results"]]
    assert stock["results"][1]["cached"][0] > ours["results"][1]["cached"][0] == 0
    (stats,) = ours["stats"]
    assert stats["backed_blocks"] == stats["mapped_bytes"] == 0
    assert stats["peak_mapped_bytes"] > 0


def test_two_processes_share_the_heads(run: Run) -> None:
    parallel = {"llm": {"tensor_parallel_size": 2}, "multiprocessing": True}
    ours = run(plugin={}, **parallel)
    assert ours["results"] == run(**parallel)["results"]
    assert len(ours["stats"]) == 2


def test_an_engine_without_the_plugin_in_the_same_process_is_as_it_was(run: Run) -> None:
    answer = run(plugin={}, then_stock=True)
    assert answer["stock"] == run()["results"] == answer["results"]


def test_adapters(run: Run, model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    torch.manual_seed(1)
    weights = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, width) * 0.2
        weights[f"{name}.lora_B.weight"] = torch.randn(width, 8) * 0.2
    save_file(weights, tmp_path / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    order = {"llm": {"enable_lora": True, "max_lora_rank": 8}, "lora": str(tmp_path)}
    stock = run(**order)
    assert run(plugin={}, **order)["results"] == stock["results"]
    assert stock["results"] != run()["results"], "the adapter does something"


def test_two_processes_borrow_as_one_engine_and_leave_nothing_behind_when_they_are_killed(
    run: Run, model: Path
) -> None:
    parallel: dict[str, Any] = {"llm": {"tensor_parallel_size": 2}, "multiprocessing": True}
    with serving_pool(2**22) as pool:  # which is less than all prompts need
        ours = run(plugin={"kv_pool": NAME}, **parallel, killed=True)
        wait_until(lambda: not pool.of(model.name))
        top = pool.ask("top")
        assert top["free"] == top["budget"]
        assert pool.ask("check")["problems"] == []
    assert ours["results"][0]["tokens"] == run(**parallel)["results"][0]["tokens"]
    assert sum(stats["peak_mapped_bytes"] for stats in ours["stats"]) <= 2**22
