"""What keys and values depend on besides tokens and salt, as 32 bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from torch.nn.modules import module as every
from transformers import PreTrainedModel

import vattn
from vattn.errors import ConfigError
from vattn.packed.calls import is_put
from vattn.store.blockfile import FORMAT, KEY_BYTES

# Bytes of weights that are copied to the host and hashed at a time.
_PIECE = 1 << 26
_MOST_THREADS = 8
# Of a configuration: where it was loaded from, and what `save_pretrained` writes into it.
_OF_THE_FILE = "_name_or_path", "transformers_version", "architectures"
# Of adapters' layers: what decides beside their weights.
_OF_ADAPTERS = "disable_adapters", "active_adapters", "merged_adapters", "scaling"


def fingerprint(model: PreTrainedModel, **facts: Any) -> bytes:
    """Of a model, its contents included, and of how it is computed.

    Two processes have the same only with the same versions of vattn, torch and transformers: each of them may change
    how values are rounded, or what they are.

    Args:
        facts: whatever else they depend on; of a type whose text says all of it.
    """
    config = model.config.to_dict()
    for name in _OF_THE_FILE:
        config.pop(name, None)
    stated = {
        "format": FORMAT,
        "versions": [vattn.__version__, torch.__version__, transformers.__version__],
        "model": _name(model),
        "adapters": [
            (name, _name(module), {key: getattr(module, key, None) for key in _OF_ADAPTERS})
            for name, module in model.named_modules()
            if isinstance(getattr(module, "disable_adapters", None), bool)  # of models it is a method
        ],
        "config": config,
        "dtype": model.dtype,
        "device": model.device.type,
        **facts,
    }
    text = json.dumps(stated, sort_keys=True, default=str).encode()
    return blake2b(text + _weights(model), digest_size=KEY_BYTES, person=b"vattn print").digest()


def check_hashable(model: PreTrainedModel) -> None:
    """Refuses a model of which `fingerprint` does not show all that it computes.

    Raises:
        ConfigError: modules have hooks, or forwards that are not their classes' and not `optimize`'s.
    """

    def refuse(which: str, has: str) -> NoReturn:
        raise ConfigError(
            f"kv_store and kv_share_prefixes need a model whose weights and config say what it computes, and {which} "
            f"has {has}; remove it, or leave both options out"
        )

    if _may_change(every._global_forward_hooks, every._global_forward_pre_hooks):
        refuse("every module", "a hook")
    for name, module in model.named_modules():
        which = f"{name or 'the model'} ({type(module).__name__})"
        if _may_change(module._forward_hooks, module._forward_pre_hooks):
            refuse(which, "a hook")
        if "forward" in vars(module) and not is_put(module):
            refuse(which, "a forward of its own")


def _may_change(*kinds: Mapping[int, Callable[..., Any]]) -> bool:
    """Whether hooks may change what is computed; those of transformers note outputs, or act in training only."""
    hooks = (hook for hooks in kinds for hook in hooks.values())
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] != "transformers" for hook in hooks)


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _weights(model: PreTrainedModel) -> bytes:
    """Of all parameters and buffers; those of rotary embeddings are buffers that no checkpoint has."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        digests = pool.map(_digest, (tensor.detach() for _, tensor in tensors))
        found = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]
        return blake2b(repr(found).encode() + b"".join(digests)).digest()


def _digest(tensor: Tensor) -> bytes:
    digest = blake2b(digest_size=KEY_BYTES)
    for piece in _pieces(tensor):
        digest.update(piece.view(torch.uint8).numpy().data)
    return digest.digest()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat, most = tensor.reshape(-1), max(1, _PIECE // tensor.element_size())
    for start in range(0, flat.numel(), most):
        yield flat[start : start + most].cpu()
