"""Multi-head latent attention (DeepSeek V2 and V3, and others): latents are stored instead of keys and values.

Such a layer projects one short vector per token, the latent, to the keys and values of all heads. transformers' modules
do this in the method `expand_kv` (in older releases inside `forward`; those layers store keys and values). In a packed
step that stores latents, the method is replaced by one that passes them on. Stored per token is one row for all heads:
the latent and the part of the key with the rotary embedding, `kv_lora_rank + qk_rope_head_dim` elements.

If the projection is folded into the query and the output (*absorbed*), attention over latents is attention with one KV
head whose keys are also its values. Otherwise the module first *expands* the latents. Per head, query and key,
absorbed attention takes `2 kv_lora_rank + qk_rope_head_dim` products, about three times as many as expanded attention
in published shapes; expansion takes `kv_lora_rank` per token and element of its key and value. So single tokens and
short chunks are absorbed. Measured (`python -m bench mla`), the two break even as the products do, near 160 new tokens.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vattn.attention import Attention, AttentionParams, Blocks, Contiguous, KVSource, PackedBatch, Span
from vattn.cpu import copied
from vattn.errors import ConfigError
from vattn.packed.calls import is_put, only_forward
from vattn.packed.shape import KVShape, LayerShape

_handing: ContextVar[Mapping[nn.Module, LatentAttention]] = ContextVar("_handing", default=MappingProxyType({}))
_lock = threading.Lock()


class _ExpandKV:
    """`expand_kv` of a module during steps. Other threads may run the model meanwhile, with another kind of cache.

    Attributes:
        steps: that run.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.steps = 0

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        latent = _handing.get().get(self._module)
        if latent is None:
            return type(self._module).expand_kv(self._module, *args, **keywords)
        return latent.hand_on(*args, **keywords)


class LatentAttention:
    """An attention module whose latents are stored.

    Attributes:
        layer: its index.
        stored: the shape that it stores per token.
        expand_from: chunks of at least this many tokens are expanded.
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
        # Products per query and stored token that expansion saves, to make up for those of expanding the token.
        saved = 2 * width - (self._nope + rope + v_head_dim)
        self.expand_from = self._rank * (self._nope + v_head_dim) / saved if saved > 0 else math.inf
        self._v_head_dim = v_head_dim
        self._packed: tuple[Tensor, Tensor] | None = None
        self.pack()

    def check(self) -> None:
        """Raises a ConfigError if the projection's weight is no longer of the shape and type that it had."""
        weight = self._module.kv_b_proj.weight
        rows = len(self._to_keys) * (self._nope + self._v_head_dim)
        shapes = [
            f"{list(shape)} in {str(dtype).removeprefix('torch.')}"
            for shape, dtype in ((weight.shape, weight.dtype), ((rows, self._rank), self._to_keys.dtype))
        ]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"kv_b_proj is now {shapes[0]} and was {shapes[1]}; close every LLM over this model and make another "
                "one"
            )

    def pack(self) -> None:
        """Takes the weights that the module has now. Where they lie stays: captured graphs have addresses."""
        sizes = [self._nope, self._v_head_dim]
        weight = self._module.kv_b_proj.weight.detach().view(-1, sum(sizes), self._rank)
        to_keys, to_values = torch.split(weight, sizes, dim=1)
        # [num_heads, qk_nope_head_dim, kv_lora_rank] and [num_heads, kv_lora_rank, v_head_dim]. Copies, since a product
        # of a batch with a part of the weight is slow: for one row in bfloat16 1015 us where a copy takes 80.
        packed = copied(to_keys), copied(to_values.transpose(1, 2))
        if self._packed is None:
            self._packed = self._to_keys, self._to_values = packed
            return
        for mine, now in zip(self._packed, packed, strict=True):
            mine.copy_(now)

    @classmethod
    def of(cls, module: nn.Module, shape: LayerShape) -> LatentAttention | None:
        """For the `module` of a layer with this shape; None if its keys and values are not a plain projection of a
        latent, or somebody has changed how they are computed, or looks on.
        """
        projection = getattr(module, "kv_b_proj", None)
        if type(projection) is not nn.Linear or projection.bias is not None or not hasattr(module, "expand_kv"):
            return None
        if type(projection.weight.data) is not Tensor:  # quantised
            return None
        if not only_forward(projection) or not isinstance(vars(module).get("expand_kv"), _ExpandKV | None):
            return None
        if any("forward" in vars(each) and not is_put(each) for each in (projection, module)):
            return None
        sizes = [getattr(module, name, None) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")]
        if not all(isinstance(size, int) for size in sizes):
            return None
        latent = cls(module, shape.window)
        return latent if latent._agrees(shape) else None

    def _agrees(self, shape: LayerShape) -> bool:
        """Whether the module expands latents as this class assumes, judged by its results."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(1, 1, 3, self.stored.head_dim, generator=generator, device="cpu").to(self._to_keys)
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
        """Replaces the module's `expand_kv`: returns the rows to store as keys, and empty values."""
        rows = torch.cat((latent, rope), dim=-1)
        return rows, rows[..., :0]

    def attend(
        self, attention: Attention, query: Tensor, kv: KVSource, batch: PackedBatch, params: AttentionParams
    ) -> Tensor:
        """Attention over the stored latents; arguments and result are those of `Attention.__call__`."""
        if params.scale is None:
            params = replace(params, scale=query.shape[-1] ** -0.5)
        # Expanded latents are not stored, so kernels that read whole layers cannot have them.
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
        """`attend` with one method for the whole batch; `expanded` requires a kernel that reads request by request."""
        if expanded:
            return attention(query, _Expanded(kv, self), self.layer, batch, params)
        latents = attention(self._absorb(query), _Latents(kv), self.layer, batch, params)
        output: Tensor = latents[..., : self._rank].transpose(0, 1) @ self._to_values
        return output.transpose(0, 1)

    def _absorb(self, query: Tensor) -> Tensor:
        """Queries `[n, num_heads, head_dim]` projected to those for latents, `[n, num_heads, kv_lora_rank + rope]`."""
        absorbed = query[..., : self._nope].transpose(0, 1) @ self._to_keys
        return torch.cat((absorbed.transpose(0, 1), query[..., self._nope :]), dim=-1)


def find_latents(model: PreTrainedModel, shape: KVShape) -> dict[int, LatentAttention]:
    """The layers of `model`, which has this shape, that can store latents instead of keys and values."""
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
    """Makes these modules call the attention function with latents as keys and without values."""
    handing = {latent._module: latent for latent in latents}
    with _lock:
        for module in handing:
            vars(module).setdefault("expand_kv", _ExpandKV(module)).steps += 1
    token = _handing.set(handing)
    try:
        yield
    finally:
        _handing.reset(token)
        with _lock:
            for module in handing:
                vars(module)["expand_kv"].steps -= 1
                if not vars(module)["expand_kv"].steps:
                    del vars(module)["expand_kv"]


def store_latents(shape: KVShape, latents: Mapping[int, LatentAttention]) -> KVShape:
    """`shape` with latents in place of keys and values."""
    layers = (latents[i].stored if i in latents else layer for i, layer in enumerate(shape.layers))
    return replace(shape, layers=tuple(layers))


def _parts(batch: PackedBatch, expand_from: float) -> list[tuple[slice, PackedBatch, bool]]:
    """The batch divided into runs of spans that are expanded and runs that are not."""

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
    """Stored latents as keys and as values: both have one size, as fused kernels require."""

    kv: KVSource

    def stored(self, layer: int) -> Contiguous | Blocks | None:
        stored = self.kv.stored(layer)
        if isinstance(stored, Contiguous) and stored.scales is not None:
            return replace(stored, value=stored.key, scales=(stored.scales[0], stored.scales[0]))
        return None if stored is None else replace(stored, value=stored.key)

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        latents, _ = self.kv.read(layer, slot, length, start)
        return latents, latents


@dataclass(frozen=True)
class _Expanded:
    """Stored latents as the keys and values of all heads."""

    kv: KVSource
    latent: LatentAttention

    def stored(self, layer: int) -> None:
        """None: expanded latents are not stored."""

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        latents, _ = self.kv.read(layer, slot, length, start)
        return self.latent._expand(latents)
