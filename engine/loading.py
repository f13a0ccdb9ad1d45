"""From a config to a model that is ready for packed steps: weights, tokenizer, what is stored per token, the kernel."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vattn import packed
from vattn.attention import Attention, Blocks, Case
from vattn.attention import get as get_attention
from vattn.errors import ConfigError, VattnError
from vattn.integers import shown

from .config import EngineConfig
from .kv.make import find_backend
from .model import optimize
from .requests.sampling import SamplingParams


@dataclass
class _Changes:
    """What engines have changed of a model.

    Attributes:
        users: a token of each of them.
        undo: the changes, the latest last; for when the last one leaves.
        optimized: what can be done with packed weights.
    """

    users: set[object] = field(default_factory=set)
    undo: list[Callable[[], None]] = field(default_factory=list)
    optimized: optimize.Optimized | None = None


_changes: weakref.WeakKeyDictionary[PreTrainedModel, _Changes] = weakref.WeakKeyDictionary()
# Reentrant, since a finalizer may leave a model at any moment.
_changing = threading.RLock()


class LoadedModel:
    """A model whose attention implementation is `"vattn"` until `close`, and what the engine needs to know of it.

    Engines that were given the same object share the changes to it; the last one that closes undoes them.

    Attributes:
        tokenizer: None without one.
        max_model_len: most tokens of a request.
        max_num_batched_tokens: most tokens of a step.
        vocab_size: token ids are `0 .. vocab_size - 1`.
        eos_token_ids: the tokens that end an output.
        eos_token_id: the one that does so without being a `stop_reason`; others count as stop tokens, as in vLLM.
        sampling_defaults: what the generation config says of sampling, in the words of `SamplingParams`.
        sampling_params: those of requests without any.
        shape: what is stored per token, layer by layer.
        latents: the layers of which latents are stored.
        attention: the kernel.
        is_ours: the model was read from a path, so nobody else changes it.

    Raises:
        ConfigError: it cannot be loaded or served, or not as the config asks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.model = _load_model(config)
        self.tokenizer = None if config.skip_tokenizer_init else _load_tokenizer(config)
        packed.check_supported(self.model)
        self.max_model_len = config.resolved_max_model_len(packed.max_context(self.model.config))
        self.max_num_batched_tokens = config.resolved_max_num_batched_tokens(self.model.device)
        embedding: Any = self.model.get_input_embeddings()
        self.vocab_size: int = embedding.num_embeddings
        generation = _generation_config(config, self.model)
        eos_token_ids = _eos_token_ids(generation, self.model, self.tokenizer)
        self.eos_token_ids = eos_token_ids & frozenset(range(self.vocab_size))
        self.eos_token_id = _eos_token_id(self.tokenizer, self.eos_token_ids)
        self.sampling_defaults = {} if config.generation_config == "vllm" else _sampling_defaults(generation)
        self.sampling_params = _default_sampling_params(self.sampling_defaults)
        self.latents: Mapping[int, packed.LatentAttention] = {}
        self.is_ours = isinstance(config.model, str)
        # Also where this object is dropped, or an interrupt keeps its owner from getting it.
        self._undo: list[Callable[[], None]] = []
        weakref.finalize(self, _undo_all, self._undo).atexit = False

        if self.model.device.type == "cpu":
            optimize.keep_freed_memory()
        packed.register()
        try:
            self._undo.append(partial(_leave, self.model, user := object()))
            _enter(self.model, user)
            _pack_again(self.model)  # another engine may have packed weights that were changed since
            self.shape = packed.kv_shape(self.model)
            if not config.enforce_eager:
                self.latents = packed.find_latents(self.model, self.shape)
            self.shape = packed.store_latents(self.shape, self.latents)
            self.attention = _choose_kernel(config, self.model, self.shape, self.max_model_len)
        except BaseException:
            self.close()
            raise

    def optimize(self) -> None:
        """Pack the weights, where that helps here and no other engine has."""
        with _changing:
            changes = _changes[self.model]
            if changes.optimized is None and optimize.supported(self.model):
                optimized = optimize.optimize(self.model, keep_weights=not self.is_ours)
                if not self.is_ours:
                    changes.undo.append(optimized.restore)
                changes.optimized = optimized

    def pack_again(self) -> None:
        """Pack the weights that a model that was given as an object has now.

        Raises:
            ConfigError: some are no longer of the shape and type that they had; none is packed then.
        """
        for latent in self.latents.values():
            latent.check()
        _pack_again(self.model)
        for latent in self.latents.values():
            latent.pack()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; a ConfigError where there is none."""
        if self.tokenizer is None:
            raise ConfigError("this LLM has no tokenizer; pass tokenizer=...")
        return self.tokenizer

    def close(self) -> None:
        """Leave a model that was given as an object as it was, unless other engines use it. Idempotent."""
        _undo_all(self._undo)


def _enter(model: PreTrainedModel, user: object) -> None:
    """Put the model in eval mode, with vattn's attention."""
    with _changing:
        changes = _changes.setdefault(model, _Changes())
        changes.users.add(user)
        if training := [module for module in model.modules() if module.training]:
            changes.undo.append(partial(_train, training))
            model.train(False)
        previous = model.config._attn_implementation
        if previous != packed.NAME:
            changes.undo.append(partial(model.set_attn_implementation, previous))
            model.set_attn_implementation(packed.NAME)


def _train(modules: Iterable[torch.nn.Module]) -> None:
    for module in modules:
        module.training = True  # without those in it, which may have been in eval mode


def _pack_again(model: PreTrainedModel) -> None:
    with _changing:
        if (optimized := _changes[model].optimized) is not None:
            optimized.pack()


def _leave(model: PreTrainedModel, user: object) -> None:
    with _changing:
        changes = _changes.get(model)
        if changes is None:
            return
        changes.users.discard(user)
        if not changes.users:
            _undo_all(changes.undo)
            del _changes[model]


def _undo_all(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo[-1]()  # may be interrupted, and called again
        undo.pop()


def _choose_kernel(
    config: EngineConfig, model: PreTrainedModel, shape: packed.KVShape, max_model_len: int
) -> Attention:
    """The kernel for every pair of head sizes that the model has."""
    backend = find_backend(config.kv, config.kv_cache_dtype, config.kv_options)
    cases = [
        Case(
            model.device,
            model.dtype,
            head_dim,
            v_head_dim,
            config.block_size if backend.stored_as is Blocks else None,
            shape.softcap,
            shape.sinks,
            any(
                layer.window is not None and layer.window < max_model_len
                for layer in shape.layers
                if (head_dim, v_head_dim) in layer.attends
            ),
            whole_layers=backend.stored_as is not None,
        )
        for head_dim, v_head_dim in shape.head_dims
    ]
    return get_attention(config.attention, *cases)


@contextmanager
def _loading(what: str, path: str, overrides: Mapping[str, Any] | None = None) -> Iterator[None]:
    """One ConfigError for the many types that transformers raises about files and fields that are missing or wrong."""
    try:
        yield
    except (VattnError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        there = os.path.exists(path)
        where = "" if there else "there is no such folder, and as the name of a model on the Hugging Face Hub: "
        changed = f" with hf_overrides={shown(overrides)}" if overrides else ""
        raise ConfigError(f"the {what} {path!r} cannot be loaded{changed}: {where}{error}") from error


def _load_model(config: EngineConfig) -> PreTrainedModel:
    """The model: read from a path, in eval mode, or the given object as it is."""
    model, dtype = config.model, config.dtype
    if isinstance(model, str):
        with _loading("model", model, config.hf_overrides):
            loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                model,
                dtype=dtype,
                trust_remote_code=config.trust_remote_code,
                revision=config.revision,
                **_overrides(config, model),
            )
        loaded.train(False)
        loaded.to(config.resolved_device())  # type: ignore[arg-type]  # as its decorator declares it
        return loaded
    given = cast(PreTrainedModel, model)
    if isinstance(dtype, torch.dtype) and given.dtype != dtype:
        raise ConfigError(f"the loaded model is {given.dtype}, not dtype={dtype}; convert it first: model.to({dtype})")
    devices = sorted({str(parameter.device) for parameter in given.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ConfigError(
            f"the loaded model is on {' and '.join(devices)}, and an LLM computes on one device: load all of it onto "
            'one, as with device_map={"": 0}, or choose a smaller or a quantised model'
        )
    return given


def _overrides(config: EngineConfig, path: str) -> dict[str, Any]:
    """The model's config with `hf_overrides`, as a keyword for loading it; none without overrides."""
    if not config.hf_overrides:
        return {}
    loaded = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, revision=config.revision)
    _override(loaded, config.hf_overrides, "")
    return {"config": loaded}


def _override(config: Any, changes: Mapping[str, Any], prefix: str) -> None:
    for key, value in changes.items():
        if key == "rope_scaling":  # its old name
            key = "rope_parameters"
        if not hasattr(config, key):
            raise ConfigError(f"hf_overrides has {prefix + key!r}, which is no field of the model's config")
        part = getattr(config, key)
        if isinstance(value, Mapping) and isinstance(part, PreTrainedConfig):
            _override(part, value, f"{prefix}{key}.")
        elif isinstance(value, Mapping) and isinstance(part, Mapping):
            setattr(config, key, _merged(part, value, f"{prefix}{key}."))
        else:
            setattr(config, key, value)
    if changes.keys() & {"rope_parameters", "rope_scaling"}:
        config.standardize_rope_params()
        config.validate_rope()


def _merged(part: Mapping[str, Any], changes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """`part` with `changes`. Those of rotary embeddings by layer type are changed by layer type, others are not."""
    by_layer_type = any(isinstance(each, Mapping) for each in part.values())
    merged = dict(part)
    for key, value in changes.items():
        if key == "type" and "rope_type" in part:  # its old name
            key = "rope_type"
        if part and key not in part and (by_layer_type or isinstance(value, Mapping)):
            raise ConfigError(f"hf_overrides has {prefix + key!r}, which is no field of the model's config")
        before = part.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = _merged(before, value, f"{prefix}{key}.")
        merged[key] = value
    return merged


# Fields of generation configs that set defaults, as in vLLM, to those of `SamplingParams`.
_SAMPLING_DEFAULTS = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def _generation_config(config: EngineConfig, model: PreTrainedModel) -> Any:
    """That of the folder `generation_config`; the model's, if it has one, for "auto" and "vllm"."""
    if config.generation_config in ("auto", "vllm"):
        return getattr(model, "generation_config", None)
    path = str(config.generation_config)
    with _loading("generation config", path):
        return GenerationConfig.from_pretrained(path)


def _sampling_defaults(generation: Any) -> dict[str, Any]:
    """What the generation config says that is not transformers' own default; `do_sample` does not count, as in vLLM."""
    said = {} if generation is None else generation.to_diff_dict()
    return {name: said[key] for key, name in _SAMPLING_DEFAULTS.items() if said.get(key) is not None}


def _default_sampling_params(params: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**params)
    except ConfigError as error:
        raise ConfigError(
            f"the generation config says {shown(params)}, which cannot be the default: {error}; give "
            "generation_config='vllm' to do without"
        ) from None


def _load_tokenizer(config: EngineConfig) -> PreTrainedTokenizerBase | None:
    tokenizer = config.tokenizer
    if tokenizer is None and isinstance(config.model, str):
        tokenizer = config.model
    if isinstance(tokenizer, str):
        with _loading("tokenizer", tokenizer):
            loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                tokenizer, trust_remote_code=config.trust_remote_code, revision=config.revision
            )
        return loaded
    return cast(PreTrainedTokenizerBase | None, tokenizer)


def _eos_token_ids(
    generation: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Those of the generation config, the model's where it states none, and the tokenizer's: checkpoints exist in which
    either of the last two lacks the other's.
    """
    stated = (getattr(each, "eos_token_id", None) for each in (generation, getattr(model, "generation_config", None)))
    eos = next((each for each in stated if each is not None), None)
    found = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return frozenset(found)


def _eos_token_id(tokenizer: PreTrainedTokenizerBase | None, eos_token_ids: frozenset[int]) -> int | None:
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return cast(int, tokenizer.eos_token_id)
    return next(iter(eos_token_ids)) if len(eos_token_ids) == 1 else None
