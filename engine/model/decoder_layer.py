"""A decoder layer in a packed step with few kernels, where transformers' own takes about fifty small operations.

What comes before attention is one call of vattn's kernels for CPUs, and what comes after it another: residual sums are
in the epilogues of products, and norms, rotation and activation are one pass each. Where oneDNN multiplies, products
and passes are calls of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vattn import cpu, packed
from vattn.attention import AttentionParams
from vattn.packed import current_step
from vattn.packed.calls import untouched

from .linears import Packed, PackedMLP


def norm_weight(module: nn.Module) -> cpu.NormWeight:
    """Weight and epsilon of a transformers module that looks like an RMS norm over the last dimension."""
    if not untouched(module):
        raise ValueError(f"{type(module).__name__} has hooks, or a forward of its own")
    parameters = dict(module.named_parameters())
    epsilons = {name: value for name, value in vars(module).items() if name in ("variance_epsilon", "eps")}
    if list(parameters) != ["weight"] or len(epsilons) != 1:
        raise ValueError(f"{type(module).__name__} is no RMS norm that is known here")
    weight = parameters["weight"].detach()
    if weight.dtype != torch.bfloat16 or weight.ndim != 1:
        raise ValueError(f"the weight is {list(weight.shape)} {weight.dtype}")
    return cpu.NormWeight(cpu.copied(weight), float(epsilons.popitem()[1]))


def projection(
    norm: cpu.NormWeight,
    qkv: Packed,
    head_norms: tuple[cpu.NormWeight, cpu.NormWeight] | None,
    num_heads: tuple[int, int, int],
    head_dim: int,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of rows and rotary factors, as `cpu.Projection`: `rotate(qkv(norm(rows)))`."""
    queries, keys, values = num_heads
    if qkv.native is not None:
        _check_chain((len(norm.weight), qkv.native.width))
        return cpu.Projection(norm, qkv.native, queries, keys, head_dim, head_norms)

    def project(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = qkv(cpu.norm(rows, norm)).view(len(rows), queries + keys + values, head_dim)
        cpu.rotate(heads, queries, keys, cos, sin, head_norms)
        return heads

    return project


def residual(output: Packed, norm: cpu.NormWeight, mlp: PackedMLP) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of attended and other rows, as `cpu.Residual`: `h = rows + output(attended)`, `h + mlp(norm(h))`."""
    native = output.native, mlp.gate_up.native, mlp.down.native
    if native[0] is not None and native[1] is not None and native[2] is not None:
        out, gate_up, down = native[0], native[1], native[2]
        _check_chain(
            (out.out, len(norm.weight)), (out.out, gate_up.width), (gate_up.out, down.width), (down.out, out.out)
        )
        return cpu.Residual(out, norm, gate_up, down)

    def add(attended: Tensor, rows: Tensor) -> Tensor:
        rows = output.plus(attended, rows)
        return mlp.plus(cpu.norm(rows, norm), rows)

    return add


def _check_chain(*widths: tuple[int, int]) -> None:
    """Refuses modules of which one gives more or less than the next one takes: native calls would read past them."""
    if wrong := [pair for pair in widths if pair[0] != pair[1]]:
        raise ValueError(f"widths {wrong} do not fit each other")


class RotaryTable:
    """A model's rotary embedding that computes the factors of a position once.

    Args:
        embedding: of hidden states and positions, `[1, T, *]` and `[1, T]`; factors depend on their position only.
    """

    def __init__(self, embedding: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._embedding = embedding
        self._tables: tuple[Tensor, ...] = ()

    def __call__(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[1, T, head_dim]` each."""
        count = int(positions.max()) + 1 if positions.numel() else 0
        tables = self._tables  # read once: engines in several threads may share a model
        if not tables or count > len(tables[0]):
            known = torch.arange(max(1024, 1 << (count - 1).bit_length()), device=positions.device)
            tables = tuple(factors[0] for factors in self._embedding(hidden, known[None]))
            if not self._tables or len(tables[0]) > len(self._tables[0]):
                self._tables = tables
        cos, sin = (table.index_select(0, positions[0])[None] for table in tables)
        return cos, sin


@dataclass(frozen=True)
class DecoderLayer:
    """`project`, attention, `add`.

    Attributes:
        layer: its index in the packed step.
        params: of its attention.
        num_heads: numbers of query, key and value heads.
        head_dim: of all of them.
        project, add: of `projection` and `residual`.
    """

    layer: int
    params: AttentionParams
    num_heads: tuple[int, int, int]
    head_dim: int
    project: Callable[[Tensor, Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor], Tensor]

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
        rows, cos, sin = self.rows_and_factors(hidden, embeddings)
        query, key, value = self.project(rows, cos, sin).split_with_sizes(self.num_heads, 1)
        if wanted is None:
            attended = step.attend(self.layer, query, key, value, self.params)
        else:
            rows = rows[wanted]
            if isinstance(step, packed.RowsStep):
                attended = step.attend_rows(self.layer, query, key, value, self.params, wanted)
            else:
                attended = step.attend(self.layer, query, key, value, self.params)[wanted]
        return self.add(attended.flatten(1).contiguous(), rows)[None]

    def rows_and_factors(self, hidden: Tensor, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states `[T, hidden_size]`, and the rotary factors that fit them."""
        rows = hidden[0].contiguous()
        cos, sin = (factors.contiguous() for factors in embeddings)
        for factors in (cos, sin):
            if factors.shape != (1, len(rows), self.head_dim) or {factors.dtype, rows.dtype} != {torch.bfloat16}:
                raise ValueError(
                    f"rotary factors {list(factors.shape)} {factors.dtype} for {len(rows)} rows in {rows.dtype}; the "
                    f"layer was packed for heads of {self.head_dim} in bfloat16"
                )
        return rows, cos, sin


@dataclass(frozen=True, eq=False)
class InSteps:
    """The forward of a decoder layer's module: `layer` in packed steps, `plain` outside of them."""

    layer: DecoderLayer
    plain: Callable[..., Tensor]

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        wanted: Tensor | None = None,
        **keywords: Any,
    ) -> Tensor:
        step = current_step()
        if step is None or position_embeddings is None:
            return self.plain(hidden_states, *args, position_embeddings=position_embeddings, **keywords)
        return self.layer(step, hidden_states, position_embeddings, wanted)


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
