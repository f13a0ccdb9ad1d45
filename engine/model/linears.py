"""Linear layers with weights packed once, and single products in place of several.

A call computes what the module would; `plus` adds another tensor in the epilogue of the matrix product, in float32,
without another pass over memory. The products are vattn's own; on CPUs with AMX they are oneDNN's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vattn import cpu

_mkldnn = torch.ops.mkldnn
# The number of rows that oneDNN chooses a layout for. From 1 to 2048 rows no other choice was faster.
_ROWS = 32
# Of gate and up together, which the C library gives back to the kernel, page by page, from 32 MiB on.
_MOST_GATED_BYTES = 16 * 2**20


class Packed:
    """A linear layer over a weight `[out, in]` in bfloat16 that was packed once.

    Attributes:
        out: number of outputs.
        native: for vattn's kernels; None where oneDNN computes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self.out = len(weight)
        self.native: cpu.Weight | None = None
        if cpu.has_linear() and weight.shape[1] % 2 == 0:
            self.native = cpu.pack_weight(weight, self._bias)
        else:
            self._blocked = _pack_for_mkldnn(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        if self.native is not None:
            return self._linear(self.native, rows, None)
        output: Tensor = _mkldnn._linear_pointwise(rows, self._blocked, self._bias, "none", [], "")
        return output

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """The layer's output `+ other`."""
        if self.native is not None:
            return self._linear(self.native, rows, other.reshape(-1, self.out).contiguous())
        output: Tensor = _mkldnn._linear_pointwise.binary(rows, other, self._blocked, self._bias, "add")
        return output

    @staticmethod
    def _linear(weight: cpu.Weight, rows: Tensor, other: Tensor | None) -> Tensor:
        return cpu.linear(rows.reshape(-1, weight.width), weight, other).view(*rows.shape[:-1], weight.out)


def _pack_for_mkldnn(weight: Tensor) -> Tensor:
    packed: Tensor = _mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
    return packed


class PackedMLP:
    """`down(silu(gate(x)) * up(x))`; gate and up are one product, since two take 1.4 x as long for 21 rows."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        both = torch.cat((gate.weight, up.weight))
        self.gate_up = Packed(both, None)
        self._most_rows = max(1, _MOST_GATED_BYTES // (len(both) * both.element_size()))
        self.down = Packed(down.weight, None)

    def __call__(self, rows: Tensor) -> Tensor:
        return self.down(self._gated(rows))

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """The MLP's output `+ other`, both `[T, hidden_size]`; of many rows in several parts."""
        parts = zip(torch.split(rows, self._most_rows), torch.split(other, self._most_rows), strict=True)
        outputs = [self.down.plus(self._gated(part), beside) for part, beside in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _gated(self, rows: Tensor) -> Tensor:
        both = self.gate_up(rows.reshape(-1, rows.shape[-1]))
        return cpu.gate(both).view(*rows.shape[:-1], both.shape[-1] // 2)


class PackedTogether:
    """Several linear layers that share their input, as one product; right but slow if inputs differ."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        weights: list[Tensor] = [linear.weight for linear in linears]
        self.product = Packed(torch.cat(weights), torch.cat(biases) if biases else None)
        self._sizes = [linear.out_features for linear in linears]
        self._rows: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def part(self, index: int) -> Callable[[Tensor], Tensor]:
        """The layer number `index`."""

        def forward(rows: Tensor) -> Tensor:
            if self._rows is not rows or index not in self._outputs:
                self._rows = rows
                self._outputs = dict(enumerate(torch.split(self.product(rows), self._sizes, dim=-1)))
            output = self._outputs.pop(index)
            if not self._outputs:
                self._rows = None
            return output

        return forward
