"""Multi-head latent attention (DeepSeek V2 and V3, and others): the latents are stored, not the keys and values.

Such a layer makes the keys and values of all heads from one short vector per token, by one projection. transformers'
modules do it in `expand_kv`, a method of their own; in a packed step that stores latents it hands them on as they are.
What is stored of a token is then one row, the latent and the part of the key that has the rotary embedding:
`kv_lora_rank + qk_rope_head_dim` elements for all heads together.

Attention over latents is attention with one KV head whose keys are its values too, once the projection is folded into
the query and the output (*absorbed*); or the latents are *expanded* by the module first. A query and key cost a head
`2 kv_lora_rank + qk_rope_head_dim` products absorbed, three times as many as expanded in published shapes; expanding
a key costs it `kv_lora_rank` times the size of its key and value. So single tokens and short chunks are absorbed.

"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vattn.attention import Attention, AttentionParams, Blocks, KVSource, PackedBatch, Slots, Span, TorchSDPA
from vattn.hf.shape import KVShape, LayerShape

# Chunks of this many tokens or more are expanded.
EXPAND_FROM = 128


class LatentAttention:
    """One attention module whose latents are stored.

    Attributes:
        layer: its index.
        stored: what it stores per token.
    """

    def __init__(self, module: Any, window: int | None = None) -> None:
        self._module = module
        self.layer: int = module.layer_idx
        self._rank: int = module.kv_lora_rank
        self._nope: int = module.qk_nope_head_dim
        rope: int = module.qk_rope_head_dim
        v_head_dim: int = module.v_head_dim
        width = self._rank + rope
        self.stored = LayerShape(1, width, 0, window, attended=((width, width), (self._nope + rope, v_head_dim)))
        weight = module.kv_b_proj.weight.detach().view(-1, self._nope + v_head_dim, self._rank)
        self._to_keys, to_values = weight.split([self._nope, v_head_dim], dim=1)
        self._to_values = to_values.transpose(1, 2)

    @classmethod
    def of(cls, module: nn.Module, shape: LayerShape) -> LatentAttention | None:
        """For `module` of a layer that attends as `shape` says; None where its keys and values are not a plain
        projection of a latent.
        """
        projection = getattr(module, "kv_b_proj", None)
        if type(projection) is not nn.Linear or projection.bias is not None or not hasattr(module, "expand_kv"):
            return None
        sizes = [getattr(module, name, None) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")]
        if not all(isinstance(size, int) for size in sizes):
            return None
        latent = cls(module, shape.window)
        return latent if latent._agrees(shape) else None

    def _agrees(self, shape: LayerShape) -> bool:
        """Whether the module expands latents as it is understood here; only its results say."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(1, 1, 3, self.stored.head_dim, generator=generator).to(self._to_keys)
        with torch.inference_mode():
            key, value = self._expand(rows)
            latent, rope = rows[0].split([self._rank, rows.shape[-1] - self._rank], dim=-1)
            keys = torch.cat((latent @ self._to_keys.mT, rope.expand(len(self._to_keys), -1, -1)), dim=-1)
            values = latent @ self._to_values
        if (key.shape[1:], value.shape[1:]) != (keys.shape, values.shape):
            return False
        if (key.shape[1], key.shape[3], value.shape[3]) != (shape.num_kv_heads, shape.head_dim, shape.v_head_dim):
            return False
        return all(
            bool((theirs[0] - ours).float().norm() <= 0.02 * ours.float().norm())
            for theirs, ours in ((key, keys), (value, values))
        )

    def _expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[1, num_heads, n, head_dim]` and values of stored rows `[1, 1, n, kv_lora_rank + rope]`."""
        latent, rope = rows.split([self._rank, rows.shape[-1] - self._rank], dim=-1)
        key, value = type(self._module).expand_kv(self._module, latent, rope)
        return key, value

    def hand_on(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """In place of the module's `expand_kv`: what is to be stored, and no values."""
        rows = torch.cat((latent, rope), dim=-1)
        return rows, rows[..., :0]

    def attend(
        self, attention: Attention, query: Tensor, kv: KVSource, batch: PackedBatch, params: AttentionParams
    ) -> Tensor:
        """Attention over the stored latents, with the arguments and the result of attention over keys and values."""
        if params.scale is None:
            params = replace(params, scale=query.shape[-1] ** -0.5)
        outputs = []
        # Kernels that take a layer as it lies have nothing to take once it is expanded.
        expands = isinstance(attention, TorchSDPA)
        for rows, part, expanded in batch.once(("latents", expands), lambda: _parts(batch, expands)):
            if expanded:
                outputs.append(attention(query[rows], _Expanded(kv, self), self.layer, part, params))
            else:
                latents = attention(self._absorb(query[rows]), _Latents(kv), self.layer, part, params)
                mixed = latents[..., : self._rank].transpose(0, 1) @ self._to_values
                outputs.append(mixed.transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _absorb(self, query: Tensor) -> Tensor:
        """Queries `[n, num_heads, head_dim]` for latents as keys, `[n, num_heads, kv_lora_rank + rope]`."""
        nope, rope = query.split([self._nope, query.shape[-1] - self._nope], dim=-1)
        return torch.cat(((nope.transpose(0, 1) @ self._to_keys).transpose(0, 1), rope), dim=-1)


def find_latents(model: PreTrainedModel, shape: KVShape) -> dict[int, LatentAttention]:
    """The layers of `model`, which attends as `shape` says, whose latents can be stored instead."""
    found: dict[int, LatentAttention] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < shape.num_layers:
            latent = LatentAttention.of(module, shape.layers[layer])
            if latent is not None:
                found[layer] = latent
    return found


@contextmanager
def handing_on(latents: Iterable[LatentAttention]) -> Iterator[None]:
    """Within it, these modules call the attention function with latents as keys, and no values."""
    # Only for the step: others may run the model in between, and with another kind of cache.
    attributes = [(vars(latent._module), latent.hand_on) for latent in latents]
    for attribute, hand_on in attributes:
        attribute["expand_kv"] = hand_on
    try:
        yield
    finally:
        for attribute, _ in attributes:
            del attribute["expand_kv"]


def store_latents(shape: KVShape, latents: Mapping[int, LatentAttention]) -> KVShape:
    """`shape` with latents in place of keys and values."""
    layers = (latents[i].stored if i in latents else layer for i, layer in enumerate(shape.layers))
    return replace(shape, layers=tuple(layers))


def _parts(batch: PackedBatch, expands: bool) -> list[tuple[slice, PackedBatch, bool]]:
    """The batch in runs of spans that are expanded, or are not."""

    def expanded(span: Span) -> bool:
        return expands and len(span) >= EXPAND_FROM

    if not any(map(expanded, batch.spans)):
        return [(slice(None), batch, False)]
    parts = []
    row = 0
    for expand, spans in itertools.groupby(batch.spans, expanded):
        part = PackedBatch(tuple(spans), batch.device)
        parts.append((slice(row, row + part.num_tokens), part, expand))
        row += part.num_tokens
    return parts


@dataclass(frozen=True)
class _Latents:
    """Stored latents as keys, and as values: so both have one size, as fused kernels want it."""

    kv: KVSource

    def stored(self, layer: int) -> Slots | Blocks:
        stored = self.kv.stored(layer)
        return replace(stored, value=stored.key)

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        latents, _ = self.kv.read(layer, slot, length, start)
        return latents, latents


@dataclass(frozen=True)
class _Expanded:
    """Stored latents as the keys and values of all heads."""

    kv: KVSource
    latent: LatentAttention

    def stored(self, layer: int) -> Slots | Blocks:
        raise NotImplementedError

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        latents, _ = self.kv.read(layer, slot, length, start)
        return self.latent._expand(latents)
