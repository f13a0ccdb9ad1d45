"""Multi-head latent attention (DeepSeek V2 and V3, and others): the latents are stored, not the keys and values.

Such a layer makes the keys and values of all heads from one short vector per token, by one projection. transformers'
modules do it in `expand_kv`, a method of their own (those of older releases do not, and store keys and values); in a
packed step that stores latents it hands them on as they are. What is stored of a token is then one row, the latent and
the part of the key that has the rotary embedding: `kv_lora_rank + qk_rope_head_dim` elements for all heads together.

Attention over latents is attention with one KV head whose keys are its values too, once the projection is folded into
the query and the output (*absorbed*); or the latents are *expanded* by the module first. A query and key cost a head
`2 kv_lora_rank + qk_rope_head_dim` products absorbed, three times as many as expanded in published shapes; expanding
a token costs it `kv_lora_rank` for each element of its key and value. So single tokens and short chunks are absorbed;
measured (`python -m bench mla`), the ways meet where the products do, near 160 new tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vattn.attention import Attention, AttentionParams, Blocks, Contiguous, KVSource, PackedBatch, Span
from vattn.packed.shape import KVShape, LayerShape


class LatentAttention:
    """One attention module whose latents are stored.

    Attributes:
        layer: its index.
        stored: what it stores per token.
        expand_from: chunks of this many tokens or more are expanded.
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
        # Of the products of a query and a stored token, what expansion saves; it has to pay for that of the token.
        saved = 2 * width - (self._nope + rope + v_head_dim)
        self.expand_from = self._rank * (self._nope + v_head_dim) / saved if saved > 0 else math.inf
        weight = module.kv_b_proj.weight.detach().view(-1, self._nope + v_head_dim, self._rank)
        to_keys, to_values = torch.split(weight, [self._nope, v_head_dim], dim=1)
        # [num_heads, qk_nope_head_dim, kv_lora_rank] and [num_heads, kv_lora_rank, v_head_dim]. Copies, since a product
        # of a batch with a part of the weight is slow: for one row in bfloat16 1015 us where a copy takes 80.
        self._to_keys, self._to_values = to_keys.contiguous(), to_values.transpose(1, 2).contiguous()

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
            latent, rope = rows[0, ..., : self._rank], rows[0, ..., self._rank :]
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
        key, value = type(self._module).expand_kv(self._module, rows[..., : self._rank], rows[..., self._rank :])
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
        # Expanded latents are no layer that a kernel could take as it is stored.
        expand_from = self.expand_from if attention.reads == "request" else math.inf
        outputs = [
            self.attend_as(attention, query[rows], kv, part, params, expanded=expanded)
            for rows, part, expanded in batch.once(("latents", expand_from), lambda: _parts(batch, expand_from))
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def attend_as(
        self,
        attention: Attention,
        query: Tensor,
        kv: KVSource,
        batch: PackedBatch,
        params: AttentionParams,
        *,
        expanded: bool,
    ) -> Tensor:
        """The same one way for all of the batch; expanded only with kernels that read request by request."""
        if expanded:
            return attention(query, _Expanded(kv, self), self.layer, batch, params)
        latents = attention(self._absorb(query), _Latents(kv), self.layer, batch, params)
        output: Tensor = latents[..., : self._rank].transpose(0, 1) @ self._to_values
        return output.transpose(0, 1)

    def _absorb(self, query: Tensor) -> Tensor:
        """Queries `[n, num_heads, head_dim]` for latents as keys, `[n, num_heads, kv_lora_rank + rope]`."""
        absorbed = query[..., : self._nope].transpose(0, 1) @ self._to_keys
        return torch.cat((absorbed.transpose(0, 1), query[..., self._nope :]), dim=-1)


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


def _parts(batch: PackedBatch, expand_from: float) -> list[tuple[slice, PackedBatch, bool]]:
    """The batch in runs of spans that are expanded, or are not."""

    def expanded(span: Span) -> bool:
        return len(span) >= expand_from

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

    def stored(self, layer: int) -> Contiguous | Blocks:
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

    def stored(self, layer: int) -> Contiguous | Blocks:
        raise NotImplementedError

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        latents, _ = self.kv.read(layer, slot, length, start)
        return self.latent._expand(latents)
