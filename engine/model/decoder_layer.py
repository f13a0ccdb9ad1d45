"""A decoder layer in a packed step with few kernels: little more than norms and rotation between the matrix products.

transformers' own layer takes about fifty small operations. Here the residual sums are in the epilogues of the products,
and vattn's kernels for CPUs compute norms, rotation and activation in one pass each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vattn import cpu, packed
from vattn.attention import AttentionParams

from .linears import Packed, PackedMLP


class Norm:
    """RMS norm over the last dimension, with the weight and epsilon of a transformers module."""

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        epsilons = {name: value for name, value in vars(module).items() if name in ("variance_epsilon", "eps")}
        if list(parameters) != ["weight"] or len(epsilons) != 1:
            raise ValueError(f"{type(module).__name__} is no RMS norm that is known here")
        self.weight = parameters["weight"].detach()
        if self.weight.dtype != torch.bfloat16 or self.weight.ndim != 1:
            raise ValueError(f"the weight is {list(self.weight.shape)} {self.weight.dtype}")
        self.epsilon = float(epsilons.popitem()[1])

    def __call__(self, rows: Tensor) -> Tensor:
        return cpu.norm(rows, self.weight, self.epsilon)


@dataclass(frozen=True)
class DecoderLayer:
    """`h = x + o(attention(qkv(norm(x))))`, then `h + mlp(norm(h))`.

    Attributes:
        layer: its index in the packed step.
        params: of its attention.
        head_norms: of each query and of each key, before rotation, with one epsilon; None without.
        num_heads: numbers of query, key and value heads.
    """

    layer: int
    params: AttentionParams
    attention_norm: Norm
    qkv: Packed
    head_norms: tuple[Norm, Norm] | None
    output: Packed
    mlp_norm: Norm
    mlp: PackedMLP
    num_heads: tuple[int, int, int]

    def __call__(
        self,
        step: packed.PackedStep,
        hidden: Tensor,
        embeddings: tuple[Tensor, Tensor],
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states `[1, T, hidden_size]` after the layer, of those before.

        Args:
            wanted: of these rows only, `[S]` int64; the keys and values of all are stored.
        """
        rows = hidden[0]
        queries, keys, values = self.num_heads
        heads = self.qkv(self.attention_norm(rows)).view(len(rows), queries + keys + values, -1)
        cos, sin = (part[0].contiguous() for part in embeddings)
        for factors in (cos, sin):
            if factors.shape != (len(rows), heads.shape[2]) or factors.dtype != heads.dtype:
                raise ValueError(f"rotary factors {list(factors.shape)} {factors.dtype} for heads {list(heads.shape)}")
        if self.head_norms is None:
            cpu.rotate(heads, queries, keys, cos, sin)
        else:
            query_norm, key_norm = self.head_norms
            cpu.rotate(heads, queries, keys, cos, sin, (query_norm.weight, key_norm.weight), query_norm.epsilon)
        parts = heads[:, :queries], heads[:, queries : queries + keys], heads[:, queries + keys :]
        if wanted is None:
            attended = step.attend(self.layer, *parts, self.params)
        else:
            rows = rows[wanted]
            if isinstance(step, packed.RowsStep):
                attended = step.attend_rows(self.layer, *parts, self.params, wanted)
            else:
                attended = step.attend(self.layer, *parts, self.params)[wanted]
        rows = self.output.plus(attended.flatten(1), rows)
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
