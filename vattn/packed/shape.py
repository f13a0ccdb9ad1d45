"""The keys and values that a model stores per token, observed in a forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vattn.attention.base import AttentionParams
from vattn.errors import UnsupportedModel
from vattn.groups import TensorGroup
from vattn.packed.step import run_packed


@dataclass(frozen=True)
class LayerShape:
    """The keys and values that a layer stores per token.

    Attributes:
        window: tokens that a query sees, its own included; None for all.
        attended: pairs of key and value head sizes that attention kernels see, if they differ from the stored ones.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    attended: tuple[tuple[int, int], ...] = ()

    @property
    def attends(self) -> tuple[tuple[int, int], ...]:
        """Pairs of key and value head sizes that attention kernels see."""
        return self.attended or ((self.head_dim, self.v_head_dim),)

    @property
    def token_elements(self) -> int:
        """Elements that one token takes, keys and values together."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True)
class KVShape:
    """The keys and values that a model stores per token, by layer, and what its attention requires.

    Attributes:
        layers: those that store; the model's first ones.
        softcap: whether any layer caps its scores.
        sinks: whether any layer has sinks.
        shared: of each later layer, by its index, the one of `layers` to whose keys and values it attends.
    """

    layers: tuple[LayerShape, ...]
    softcap: bool = False
    sinks: bool = False
    shared: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def uniform(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, v_head_dim: int, *, window: int | None = None
    ) -> KVShape:
        """The shape of a model with identical layers."""
        return cls((LayerShape(num_kv_heads, head_dim, v_head_dim, window),) * num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def token_elements(self) -> int:
        """Elements that one token takes in all layers."""
        return sum(layer.token_elements for layer in self.layers)

    @property
    def stored_alike(self) -> LayerShape | None:
        """The shape that all layers store, windows aside; None if they differ."""
        stored = {replace(layer, window=None) for layer in self.layers}
        return stored.pop() if len(stored) == 1 else None

    @property
    def head_dims(self) -> list[tuple[int, int]]:
        """Pairs of key and value head sizes that attention kernels see."""
        return sorted(set(itertools.chain.from_iterable(layer.attends for layer in self.layers)))

    def groups(self, max_context_len: int) -> list[TensorGroup]:
        """The layers as tensor groups; a window of `max_context_len` tokens or more is left out."""
        members: dict[LayerShape, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.window is not None and layer.window >= max_context_len:
                layer = replace(layer, window=None)
            members.setdefault(layer, []).append(index)
        return [
            TensorGroup(
                layers=indices,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                v_head_dim=layer.v_head_dim,
                sliding_window=layer.window,
            )
            for layer, indices in members.items()
        ]


class _Probe:
    """A packed step of one token, which attends to its own value; records the keys and values of each layer.

    Attributes:
        shared: of a layer that was given the very tensors of an earlier one, that one.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.params: list[AttentionParams] = []
        self.shared: dict[int, int] = {}
        # Of the others. The tensors stay, so that no later one lies in their place; what is written over them shows.
        self._given: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        if layer in self.layers:
            raise UnsupportedModel(
                f"two attention modules of the model share the layer index {layer}; each needs its own cache"
            )
        self.params.append(params)
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], params.window)
        for earlier, given in self._given.items():
            if self.layers[earlier] == self.layers[layer] and all(map(_is_same, given, (key, value))):
                self.shared[layer] = earlier
                break
        else:
            self._given[layer] = [(tensor, tensor.clone()) for tensor in (key, value)]
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _is_same(given: tuple[Tensor, Tensor], tensor: Tensor) -> bool:
    """Whether a tensor is one that was given before, and has the contents of then."""
    before, contents = given
    return tensor.data_ptr() == before.data_ptr() and torch.equal(tensor, contents)


def kv_shape(model: PreTrainedModel) -> KVShape:
    """The shape of `model`, observed in a forward pass of one token; its attention must be `"vattn"`.

    The config does not suffice: model families name heads, head sizes and windows differently, and a layer that never
    calls the attention function would silently be served wrong.

    Raises:
        UnsupportedModel: layers are missing or share an index, or there are none.
    """
    probe = _Probe()
    zero = torch.zeros(1, dtype=torch.int64, device=model.device)
    run_packed(model, probe, zero, zero, zero)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if num_layers == 0:
        raise UnsupportedModel(f"{type(model).__name__} has no layers (num_hidden_layers is 0), and so no KV cache")
    if sorted(probe.layers) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{type(model).__name__} has {num_layers} layers, but layers {sorted(probe.layers)} called the attention "
            "function; every layer must. Use model.generate() for this model."
        )
    softcap = any(params.softcap is not None for params in probe.params)
    sinks = any(params.sinks is not None for params in probe.params)
    num_stored = num_layers
    while num_stored - 1 in probe.shared:
        num_stored -= 1
    layers = tuple(probe.layers[layer] for layer in range(num_stored))
    shared = {layer: probe.shared[layer] for layer in range(num_stored, num_layers)}
    return KVShape(layers, softcap, sinks, shared)
