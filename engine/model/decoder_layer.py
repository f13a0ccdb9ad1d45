"""A decoder layer in a packed step with few kernels: little more than norms and rotation between the matrix products.

transformers' own layer takes about fifty small operations. Here the residual sums are in the epilogues of the products,
queries and keys are rotated together in the output of their product, and the rotation's factors are laid out once per
step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from vattn import packed
from vattn.attention import AttentionParams
from vattn.engine.model.linears import Packed, PackedMLP


class Norm:
    """RMS norm over the last dimension, with the weight and epsilon of a transformers module."""

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        epsilons = {name: value for name, value in vars(module).items() if name in ("variance_epsilon", "eps")}
        if list(parameters) != ["weight"] or len(epsilons) != 1:
            raise ValueError(f"{type(module).__name__} is no RMS norm that is known here")
        self._weight = parameters["weight"].detach()
        self._epsilon = float(epsilons.popitem()[1])

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self._weight.shape, self._weight, self._epsilon)


class Rotary:
    """Rotary embedding of heads whose halves are rotated against each other. One for all layers of a model."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, heads: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated copies of `heads` `[T, num_heads, head_dim]`; of `embeddings` both `[1, T, head_dim]`."""
        half = heads.shape[-1] // 2
        last = self._last
        if last is None or last[0] is not embeddings[0]:
            # Spread over the heads once per step, so that the layers' passes read straight on.
            cos, sin = (part[0, :, None].repeat(1, heads.shape[1], 1) for part in embeddings)
            sin[..., :half].neg_()
            self._last = last = embeddings[0], cos, sin
        _, cos, sin = last
        return (heads * cos).addcmul_(heads.roll(half, dims=-1), sin)


@dataclass(frozen=True)
class DecoderLayer:
    """`h = x + o(attention(qkv(norm(x))))`, then `h + mlp(norm(h))`.

    Attributes:
        layer: its index in the packed step.
        params: of its attention.
        query_norm, key_norm: norms of each head, before rotation; None without.
        num_heads: numbers of query, key and value heads.
    """

    layer: int
    params: AttentionParams
    rotary: Rotary
    attention_norm: Norm
    qkv: Packed
    query_norm: Norm | None
    key_norm: Norm | None
    output: Packed
    mlp_norm: Norm
    mlp: PackedMLP
    num_heads: tuple[int, int, int]

    def __call__(self, step: packed.PackedStep, hidden: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states `[1, T, hidden_size]` after the layer, of those before."""
        rows = hidden[0]
        queries, keys, values = self.num_heads
        heads = self.qkv(self.attention_norm(rows)).view(len(rows), queries + keys + values, -1)
        positioned = heads[:, : queries + keys]
        if self.query_norm is not None and self.key_norm is not None:
            positioned = torch.cat(
                (self.query_norm(positioned[:, :queries]), self.key_norm(positioned[:, queries:])), dim=1
            )
        rotated = self.rotary(positioned, embeddings)
        attended = step.attend(
            self.layer, rotated[:, :queries], rotated[:, queries:], heads[:, queries + keys :], self.params
        )
        rows = self.output.plus(attended.reshape(len(rows), -1), rows)
        return self.mlp.plus(self.mlp_norm(rows), rows)[None]


class Recorder:
    """A packed step that records a layer's last call, and answers with a function of all its arguments."""

    def __init__(self) -> None:
        self.layer = -1
        self.tensors: tuple[Tensor, Tensor, Tensor] = (torch.empty(0),) * 3
        self.params = AttentionParams()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self.layer, self.tensors, self.params = layer, (query, key, value), params
        group = query.shape[1] // key.shape[1]
        scores = query.sum(dim=-1, keepdim=True) + key.repeat_interleave(group, dim=1).sum(dim=-1, keepdim=True)
        return (scores.sigmoid() + value.repeat_interleave(group, dim=1)).contiguous()
