"""What the plugin cannot serve is said when the engine starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vattn_vllm.options import Options
from vattn_vllm.refusals import check_cache, check_drafter, check_engine
from vllm.config import SpeculativeConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vattn.errors import ConfigError


@pytest.mark.parametrize(
    ("plugin", "llm", "match"),
    [
        ({"page": 1}, {}, "there is no option 'page'; there are kernel, page_size"),
        ({"untested_vllm": "no"}, {}, "untested_vllm='no' is not true or false"),
        ({"keep_free": 2}, {}, "keep_free=2 is a share of the blocks"),
        ({"kernel": "flash_attn"}, {}, "flash_attn"),
        ({"kernel": "warp"}, {}, "warp"),
        ({"page_size": 2**21}, {}, "not a whole number of pages of 2.0 MiB; use a block_size that is a multiple of"),
        ({"layout": "layered"}, {"block_size": 4}, "not a whole number of pages of 4.0 KiB.*or layout='fused'"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        ({}, {"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype='bfloat16' for a model in float32"),
        ({"layout": "layered"}, {"block_size": 8}, "larger or fewer blocks, layout='fused'"),
    ],
)
def test_refused_when_it_starts(
    plugin: dict[str, Any], llm: dict[str, Any], match: str, run: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)ConfigError: .*{match}"):
        run(plugin=plugin, llm=llm)


def engine(**changes: Any) -> Any:
    """As much of an engine's configuration as the checks look at."""
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto", kv_sharing_fast_prefill=False),
        model_config=SimpleNamespace(
            use_mla=False,
            is_encoder_decoder=False,
            runner_type="generate",
            enable_sleep_mode=False,
            is_mm_prefix_lm=False,
            is_diffusion=False,
            rswa_window=None,
            dtype=torch.float32,
        ),
        kv_transfer_config=None,
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            use_ubatching=False,
            world_size=1,
        ),
    )
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if name:
            setattr(getattr(config, part), name, value)
        else:
            setattr(config, part, value)
    return config


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_config__use_mla": True}, "multi-head latent attention"),
        ({"cache_config__cache_dtype": "float16"}, "'float16' for a model in float32; .* use 'auto'"),
        ({"speculative_config": SimpleNamespace(method="dflash")}, "dflash sees tokens in both directions"),
        ({"speculative_config": SimpleNamespace(method="dspark")}, "dspark sees tokens in both directions"),
        ({"model_config__is_diffusion": True}, "tokens see later ones"),
        ({"model_config__is_encoder_decoder": True}, "encoder"),
        ({"model_config__runner_type": "pooling"}, "does not generate"),
        ({"model_config__enable_sleep_mode": True}, "sleep mode"),
        ({"model_config__is_mm_prefix_lm": True}, "images in both directions; serve its text alone"),
        ({"model_config__rswa_window": 64}, "leaves the prompt visible"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "leave out --kv-sharing-fast-prefill"),
        ({"kv_transfer_config": object()}, "leave out --kv-transfer-config"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__use_ubatching": True}, "leave out --enable-dbo"),
    ],
)
def test_engines_that_it_cannot_serve(changes: dict[str, Any], match: str) -> None:
    check_engine(engine(), Options())
    with pytest.raises(ConfigError, match=match):
        check_engine(engine(**changes), Options())


def test_without_its_entry_point(run: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)has not loaded the plugin 'vattn' \(VLLM_PLUGINS='another'\)"):
        run(plugin={}, loaded="another")


def test_the_type_of_the_model_may_be_named() -> None:
    check_engine(engine(cache_config__cache_dtype="float32"), Options())


def test_a_pool_counts_one_device() -> None:
    options = Options(kv_pool="a")
    check_engine(engine(parallel_config__world_size=2), options)
    check_engine(engine(device_config__device_type="cuda"), options)
    cuda = engine(device_config__device_type="cuda", parallel_config__world_size=2)
    with pytest.raises(ConfigError, match="counts the memory of one device"):
        check_engine(cuda, options)
    check_engine(cuda, Options())


def test_a_pool_counts_the_layers_of_no_drafter_in_the_last_stage() -> None:
    drafter: Any = object.__new__(SpeculativeConfig)
    stages = {"parallel_config__pipeline_parallel_size": 2, "parallel_config__world_size": 2}
    for method, has_layers in ("draft_model", True), ("mtp", True), ("ngram", False):
        drafter.method = method
        check_engine(engine(**stages, speculative_config=drafter), Options())
        check_engine(engine(speculative_config=drafter), Options(kv_pool="a"))
        with pytest.raises(ConfigError, match="those of a drafter") if has_layers else nullcontext():
            check_engine(engine(**stages, speculative_config=drafter), Options(kv_pool="a"))


def test_a_version_that_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", "0.99.0+cpu")
    with pytest.raises(ConfigError, match=r"tried with vLLM 0.32.0, and this is 0.99.0; .*untested_vllm"):
        check_engine(engine(), Options())
    check_engine(engine(), Options(untested_vllm=True))


SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)


def cache(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_groups_that_store_alike() -> None:
    specs = FULL, SlidingWindowSpec(**SHAPE, sliding_window=8), replace(FULL, sliding_window=8)
    assert check_cache(cache(*specs)) == list(specs)


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        ([object()], "holds object, and the plugin serves keys and values of full and sliding-window attention only"),
        ([MLAAttentionSpec(**SHAPE)], "holds MLAAttentionSpec"),
        ([replace(FULL, attention_chunk_size=8)], "sees chunks of the context"),
        ([replace(FULL, dtype=torch.uint8)], "stores torch.uint8, as the checkpoint's kv_cache_scheme may ask for"),
        ([replace(FULL, non_causal=True)], "is not causal"),
        ([replace(FULL, head_size_v=32)], "keys have 64 elements and values 32"),
        (
            [UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": replace(FULL, num_kv_heads=2)})],
            "layers differ in the size of what they store",
        ),
        ([FULL, SlidingWindowSpec(**SHAPE | {"block_size": 32}, sliding_window=8)], r"tokens per block \(16, 32\)"),
        ([FULL, SlidingWindowSpec(**SHAPE | {"num_kv_heads": 2}, sliding_window=8)], r"KV heads \(1, 2\)"),
        ([FULL, SlidingWindowSpec(**SHAPE, sliding_window=8, page_size_padded=2**14)], "bytes per block"),
    ],
)
def test_caches_that_it_cannot_serve(specs: list[Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_cache(cache(*specs))


def test_a_draft_model_outside_of_the_first_group() -> None:
    drafter: Any = object.__new__(SpeculativeConfig)
    layers = ["model.layers.0.attn", "model.layers.2.attn"], ["model.layers.1.attn", "draft_model.layers.0.attn"]
    first, second = (SimpleNamespace(layer_names=names) for names in layers)
    groups: Any = SimpleNamespace(kv_cache_groups=[first, second])
    turned: Any = SimpleNamespace(kv_cache_groups=[second, first])
    config = engine(speculative_config=drafter, use_v2_model_runner=False)
    for method, refused in ("draft_model", True), ("ngram", False):
        drafter.method = method
        with pytest.raises(ConfigError, match="use --disable-hybrid") if refused else nullcontext():
            check_drafter(config, groups)
    drafter.method = "draft_model"
    check_drafter(config, turned)
    check_drafter(engine(speculative_config=drafter, use_v2_model_runner=True), groups)
    check_drafter(engine(), groups)


def test_a_draft_model_beside_windows_in_some_layers(
    model_of: Callable[[str], Path], run: Callable[..., dict[str, Any]]
) -> None:
    config = {"method": "draft_model", "model": str(model_of("draft")), "num_speculative_tokens": 3}
    llm = {"model": str(model_of("full and window")), "max_num_batched_tokens": 100, "num_gpu_blocks_override": 100}
    with pytest.raises(RuntimeError, match="ConfigError: vattn: vLLM computes the draft model with blocks of"):
        run(plugin={}, llm={**llm, "speculative_config": config})
    llm["disable_hybrid_kv_cache_manager"] = True
    drafted, plain = (run(plugin={}, llm={**llm, **more}) for more in ({"speculative_config": config}, {}))
    tokens, expected = ([each["tokens"] for each in answer["results"]] for answer in (drafted, plain))
    assert tokens == expected
