"""The keys and values that a model stores per token, from its config alone: for plans, before a model is loaded.

The engine and `VirtualCache` observe a loaded model instead (`vattn.packed.kv_shape`), since a config does not say
everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vattn.errors import ConfigError, UnsupportedModel
from vattn.groups import MOST_HEADS, TensorGroup, check_int, parse_dtype

_WINDOWED = ("sliding_attention", "chunked_attention")
_ATTENDING = ("full_attention", *_WINDOWED)

_YI = {"head_dim": 128, "dtype": "bfloat16", "max_position_embeddings": 200_000}
_LLAMA_3 = {"num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16", "max_position_embeddings": 131_072}
_QWEN = {"head_dim": 128, "dtype": "bfloat16", "max_position_embeddings": 32_768}
_DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16", "max_position_embeddings": 163_840}

# The fields that decide, as in the config.json of each model. Where a longer variant of the same shape is published
# (Yi-6B-200K, Llama-3.1), max_position_embeddings is that one's.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Yi-6B": {**_YI, "num_hidden_layers": 32, "num_key_value_heads": 4},
    "Yi-34B": {**_YI, "num_hidden_layers": 60, "num_key_value_heads": 8},
    "Llama-3-8B": {**_LLAMA_3, "num_hidden_layers": 32},
    "Llama-3-70B": {**_LLAMA_3, "num_hidden_layers": 80},
    "Mistral-7B-v0.1": {
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 4096,
        "dtype": "bfloat16",
        "max_position_embeddings": 32_768,
    },
    "Qwen2.5-7B": {**_QWEN, "num_hidden_layers": 28, "num_key_value_heads": 4},
    "Qwen3-8B": {**_QWEN, "num_hidden_layers": 36, "num_key_value_heads": 8, "max_position_embeddings": 40_960},
    "Gemma-2-9B": {
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 21,
        "dtype": "bfloat16",
        "max_position_embeddings": 8192,
    },
    "GPT-OSS-20B": {
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "dtype": "bfloat16",
        "max_position_embeddings": 131_072,
    },
    "DeepSeek-V2-Lite": {**_DEEPSEEK, "num_hidden_layers": 27},
    "DeepSeek-V3": {**_DEEPSEEK, "num_hidden_layers": 61},
}
PUBLISHED = tuple(_PUBLISHED)


@dataclass(frozen=True)
class ModelShape:
    """The keys and values that a model stores per token on one device.

    Attributes:
        name: as it was asked for.
        groups: the layers, with their element types; K/V heads are those of one device.
        max_context_len: most tokens that the model's positions allow; None if its config has no limit.
    """

    name: str
    groups: tuple[TensorGroup, ...]
    max_context_len: int | None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return sum(group.token_bytes for group in self.groups)

    def __str__(self) -> str:
        described = []
        for group in self.groups:
            heads, dim = group.num_kv_heads, group.head_dim
            dims = f"{dim}" if group.head_dims == (dim, dim) else " and ".join(map(str, filter(None, group.head_dims)))
            window = "" if group.sliding_window is None else f", window {group.sliding_window}"
            layers = len(group.indices)
            described.append(
                f"{layers} layer{'s' * (layers > 1)} of {heads} KV head{'s' * (heads > 1)} of {dims}{window}"
            )
        return f"{self.name}: {'; '.join(described)}; {str(self.groups[0].dtype).removeprefix('torch.')}"


def find_shape(
    model: str, *, tensor_parallel: int = 1, dtype: str | None = None, max_context_len: int | None = None
) -> ModelShape:
    """The shape of a model: one of `PUBLISHED`, or the path or hub id of a transformers config, its folder or its file.

    Args:
        tensor_parallel: devices among which the K/V heads are divided; a single head, and latents, each have whole.
        dtype: element type of the cache; by default the model's.
        max_context_len: a window of as many tokens is none; by default the most that the model's positions allow.

    Raises:
        ConfigError: the name is unknown, the heads cannot be divided so, or the element type is unknown.
        UnsupportedModel: layers that keep other state than keys and values, or a config that does not state their size.
        OSError: there is no config there.
    """
    known = {name.lower(): fields for name, fields in _PUBLISHED.items()}
    if model.lower() in known and not Path(model).exists():
        config: Any = SimpleNamespace(**known[model.lower()])
    elif "/" not in model and not Path(model).exists():
        raise ConfigError(f"{model!r} is no path, no hub id (owner/name), and none of {', '.join(PUBLISHED)}")
    else:
        from transformers import AutoConfig  # here, as it takes seconds

        try:
            config = AutoConfig.from_pretrained(model)
        except OSError:
            raise
        except Exception as error:  # of many types, for fields that are not possible
            raise UnsupportedModel(f"transformers does not know the config of {model!r}: {error}") from error
    return shape_of(config, model, tensor_parallel=tensor_parallel, dtype=dtype, max_context_len=max_context_len)


def shape_of(
    config: Any,
    name: str,
    *,
    tensor_parallel: int = 1,
    dtype: str | None = None,
    max_context_len: int | None = None,
) -> ModelShape:
    """The shape of a model with `config`: a transformers config, or an object with its fields. See `find_shape`."""
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)

    def field(*names: str) -> Any:
        return next((value for each in names if (value := getattr(config, each, None)) is not None), None)

    num_layers = field("num_hidden_layers")
    by_layer = field("per_layer_config")  # Gemma 4, from transformers 5.24 on
    stored = [_stored(config if by_layer is None else by_layer[layer]) for layer in range(num_layers or 0)]
    if not all(heads and head_dim for heads, head_dim, _ in stored) or not stored:
        raise UnsupportedModel(f"the config of {name!r} does not say its layers, K/V heads and head size")
    types = _layer_types(config, num_layers)
    if other := set(types) - {*_ATTENDING}:
        raise UnsupportedModel(
            f"{name!r} has layers of type {', '.join(sorted(other))}, which keep other state than keys and values"
        )
    check_int("tensor_parallel", tensor_parallel, at_least=1, at_most=MOST_HEADS)
    for heads in dict.fromkeys(heads for heads, _, _ in stored):
        if heads % tensor_parallel and tensor_parallel % heads:
            raise ConfigError(
                f"{heads} K/V heads cannot be divided among {tensor_parallel} devices; give a divisor or a multiple"
            )
    element = parse_dtype(dtype or str(field("dtype", "torch_dtype") or "bfloat16").removeprefix("torch."))
    longest = field("max_position_embeddings")
    limit = max_context_len or longest
    members: dict[tuple[int | None, int, int, int | None], list[int]] = {}
    apart = num_layers - (field("num_kv_shared_layers") or 0)  # the last layers may read those of earlier ones
    for layer, kind in enumerate(types[:apart]):
        window = field("sliding_window", "attention_chunk_size") if kind in _WINDOWED else None
        if window is not None and limit is not None and window >= limit:
            window = None
        own = stored[layer]
        if kind == "full_attention" and field("global_head_dim"):  # Gemma 4: wider heads where all tokens are seen
            own = (field("num_global_key_value_heads") or own[0], config.global_head_dim, None)
        members.setdefault((window, *own), []).append(layer)
    groups = tuple(
        TensorGroup(
            layers=layers,
            num_kv_heads=max(1, count // tensor_parallel),
            head_dim=dim,
            v_head_dim=v_head_dim,
            dtype=element,
            sliding_window=window,
        )
        for (window, count, dim, v_head_dim), layers in members.items()
    )
    return ModelShape(name, groups, longest)


def _stored(config: Any) -> tuple[int, int, int | None]:
    """Heads, head size, and head size of values if it is another, that are stored of a layer; 0 for what it does not
    say.
    """
    if getattr(config, "kv_lora_rank", None) is not None:  # latents, stored instead of keys and values
        return 1, config.kv_lora_rank + config.qk_rope_head_dim, 0
    queries = getattr(config, "num_attention_heads", None) or 0
    heads = getattr(config, "num_key_value_heads", None) or queries
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):  # Falcon
        heads = 1
    head_dim = getattr(config, "head_dim", None) or (queries and (getattr(config, "hidden_size", None) or 0) // queries)
    v_head_dim = getattr(config, "v_head_dim", None)
    return heads, head_dim, None if v_head_dim == head_dim else v_head_dim


def _layer_types(config: Any, num_layers: int) -> list[str]:
    """The type of each layer, by transformers' names."""
    if types := getattr(config, "layer_types", None):
        return list(types)
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * num_layers
