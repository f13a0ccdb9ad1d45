"""What the plugin cannot serve, said when the engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import vllm.version
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vattn.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vattn_vllm.options import Options

# Versions of vLLM for which all tests of the plugin passed.
TRIED = ("0.32.0",)

# What all KV cache groups have to have in common, as `AttentionSpec` names it.
_STORED = (
    ("block_size", "tokens per block"),
    ("num_kv_heads", "KV heads"),
    ("head_size", "head sizes"),
    ("head_size_v", "head sizes of values"),
    ("dtype", "element types"),
    ("page_size_bytes", "bytes per block"),
)


def check_engine(config: VllmConfig, options: Options) -> None:
    """Refuses an engine that the plugin cannot serve, before its model is loaded.

    Raises:
        ConfigError: what cannot be served, and what can.
    """
    refusal = next(_refusals(config, options), None)
    if refusal is not None:
        raise ConfigError(f"vattn: {refusal}")


def check_cache(config: KVCacheConfig) -> list[AttentionSpec]:
    """What the layers of each KV cache group store.

    Raises:
        ConfigError: layers that differ in size, or that store something else than keys and values.
    """
    specs: list[AttentionSpec] = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            raise ConfigError("vattn: the model's layers differ in the size of what they store; leave out --worker-cls")
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise ConfigError(
                f"vattn: the cache holds {type(spec).__name__}, and the plugin serves keys and values of full and "
                "sliding-window attention only; leave out --worker-cls"
            )
        if getattr(spec, "attention_chunk_size", None) is not None or getattr(spec, "non_causal", False):
            kind = "is not causal" if getattr(spec, "non_causal", False) else "sees chunks of the context"
            raise ConfigError(f"vattn: the model has attention that {kind}; leave out --worker-cls")
        specs.append(spec)
    for name, what in _STORED:
        found = [getattr(spec, name) for spec in specs]
        if len(set(found)) > 1:
            raise ConfigError(
                f"vattn: the model's KV cache groups differ in their {what} ({', '.join(map(str, found))}), and they "
                "share one memory; leave out --worker-cls"
            )
    if not specs[0].dtype.is_floating_point or specs[0].dtype.itemsize == 1:
        raise ConfigError(
            f"vattn: the cache stores {specs[0].dtype}, as the checkpoint's kv_cache_scheme may ask for, and the "
            "plugin stores keys and values as they are; give the model's type by --kv-cache-dtype, or leave out "
            "--worker-cls"
        )
    if specs[0].head_size_v != specs[0].head_size:
        raise ConfigError(
            f"vattn: keys have {specs[0].head_size} elements and values {specs[0].head_size_v}; leave out --worker-cls"
        )
    return specs


def check_drafter(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Checks that a draft model is computed with blocks of its own.

    Raises:
        ConfigError: vLLM's first runner gives it those of the first KV cache group, and it is in another one.
    """
    speculative = config.speculative_config
    if speculative is None or not speculative.uses_draft_model() or config.use_v2_model_runner:
        return
    others = [name for group in cache.kv_cache_groups[1:] for name in group.layer_names]
    if any(name.startswith("draft_model.") for name in others):
        raise ConfigError(
            "vattn: vLLM computes the draft model with blocks of the first KV cache group, and its layers are in "
            "another: it would overwrite keys of the model; use --disable-hybrid-kv-cache-manager, or another method "
            "of --speculative-config"
        )


def _refusals(config: VllmConfig, options: Options) -> Iterator[str]:
    version = vllm.version.__version__.split("+")[0]
    if version not in TRIED and not options.untested_vllm:
        yield (
            f"it was tried with vLLM {', '.join(TRIED)}, and this is {version}; "
            """--additional-config '{"vattn": {"untested_vllm": true}}' runs it all the same"""
        )
    model = config.model_config
    if config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        yield f"kv_cache_dtype={config.cache_config.cache_dtype!r}; it stores keys and values as they are: use 'auto'"
    elif config.cache_config.cache_dtype not in ("auto", stored := str(model.dtype).removeprefix("torch.")):
        yield (
            f"kv_cache_dtype={config.cache_config.cache_dtype!r} for a model in {stored}; it stores keys and values as "
            "they are: use 'auto', or --dtype for both"
        )
    if model.use_mla:
        yield "the model has multi-head latent attention; leave out --worker-cls"
    if model.is_encoder_decoder or model.runner_type != "generate":
        yield "the model has an encoder, or does not generate; leave out --worker-cls"
    if model.is_mm_prefix_lm:
        yield (
            "the model sees its images in both directions; serve its text alone (--language-model-only), or leave out "
            "--worker-cls"
        )
    if model.rswa_window is not None:
        yield "the model's window leaves the prompt visible; leave out --worker-cls"
    if config.cache_config.kv_sharing_fast_prefill:
        yield "layers that share keys skip a part of the prefill; leave out --kv-sharing-fast-prefill"
    if config.kv_transfer_config is not None:
        yield "KV connectors read vLLM's own layouts; leave out --kv-transfer-config or --worker-cls"
    if (
        config.parallel_config.decode_context_parallel_size > 1
        or config.parallel_config.prefill_context_parallel_size > 1
    ):
        yield "context parallelism divides a request's tokens; use tensor or pipeline parallelism"
    if config.parallel_config.use_ubatching:
        yield "micro-batches have metadata of their own in one step; leave out --enable-dbo and --ubatch-size"
    if config.model_config.enable_sleep_mode:
        yield "sleep mode allocates the cache by itself; the plugin gives memory back without it"
    if config.speculative_config is not None and config.speculative_config.method in ("dflash", "dspark"):
        method = config.speculative_config.method
        yield f"the drafter of {method} sees tokens in both directions; use another method of --speculative-config"
    if config.model_config.is_diffusion:
        yield "a diffusion model's tokens see later ones; leave out --worker-cls"
    on_cpu = config.device_config.device_type == "cpu"
    if options.kv_pool is not None and not on_cpu and config.parallel_config.world_size > 1:
        yield "a kv_pool counts the memory of one device, and the engine has several; leave it out"
    speculative, stages = config.speculative_config, config.parallel_config.pipeline_parallel_size
    if options.kv_pool is not None and stages > 1 and speculative is not None and speculative.uses_draft_kv_cache():
        yield (
            "a kv_pool counts the model's layers, and the last stage has those of a drafter too; leave out "
            "--pipeline-parallel-size, --speculative-config or the kv_pool"
        )
