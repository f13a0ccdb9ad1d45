"""What the plugin cannot serve, said when the engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import vllm.version
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from vattn.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vattn_vllm.options import Options

# Versions of vLLM for which all tests of the plugin passed.
TRIED = ("0.32.0",)


def check_engine(config: VllmConfig, options: Options) -> None:
    """Refuses an engine that the plugin cannot serve, before its model is loaded.

    Raises:
        ConfigError: what cannot be served, and what can.
    """
    refusal = next(_refusals(config, options), None)
    if refusal is not None:
        raise ConfigError(f"vattn: {refusal}")


def check_cache(config: KVCacheConfig) -> FullAttentionSpec:
    """What every layer stores.

    Raises:
        ConfigError: layers that differ, or that store something else than keys and values.
    """
    groups = [group for group in config.kv_cache_groups if group.layer_names]
    if len(groups) != 1:
        raise ConfigError(
            f"vattn: the model's layers form {len(groups)} KV cache groups, and windows show one block table; use a "
            "model whose layers store alike (for sliding windows: --disable-hybrid-kv-cache-manager)"
        )
    spec = groups[0].kv_cache_spec
    if isinstance(spec, MLAAttentionSpec) or type(spec) is not FullAttentionSpec:
        raise ConfigError(
            f"vattn: the cache holds {type(spec).__name__}, and the plugin serves keys and values of full attention "
            "only; leave out --worker-cls"
        )
    return spec


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
    if model.use_mla:
        yield "the model has multi-head latent attention; leave out --worker-cls"
    if model.is_encoder_decoder or model.runner_type != "generate":
        yield "the model has an encoder, or does not generate; leave out --worker-cls"
    if config.kv_transfer_config is not None:
        yield "KV connectors read vLLM's own layouts; leave out --kv-transfer-config or --worker-cls"
    if (
        config.parallel_config.decode_context_parallel_size > 1
        or config.parallel_config.prefill_context_parallel_size > 1
    ):
        yield "context parallelism divides a request's tokens; use tensor or pipeline parallelism"
    if config.model_config.enable_sleep_mode:
        yield "sleep mode allocates the cache by itself; the plugin gives memory back without it"
