"""Linear layers with weights packed for oneDNN once, and single products in place of several.

A call computes what the module would; `plus` and `times` add or multiply another tensor in the epilogue of the matrix
product, in float32, without another pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_mkldnn = torch.ops.mkldnn
# The number of rows that oneDNN chooses a layout for. From 1 to 2048 rows no other choice was faster.
_ROWS = 32


class Packed:
    """A linear layer over a weight `[out, in]` that was packed once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight: Tensor = _mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self.bias = None if bias is None else bias.detach()

    def __call__(self, rows: Tensor, activation: str = "none") -> Tensor:
        output: Tensor = _mkldnn._linear_pointwise(rows, self.weight, self.bias, activation, [], "")
        return output

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """The layer's output `+ other`."""
        output: Tensor = _mkldnn._linear_pointwise.binary(rows, other, self.weight, self.bias, "add")
        return output

    def times(self, rows: Tensor, other: Tensor) -> Tensor:
        """The layer's output `* other`."""
        output: Tensor = _mkldnn._linear_pointwise.binary(rows, other, self.weight, self.bias, "mul")
        return output


class PackedMLP:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        self._gate, self._up, self._down = (Packed(linear.weight, None) for linear in (gate, up, down))

    def __call__(self, rows: Tensor) -> Tensor:
        return self._down(self._up.times(rows, self._gate(rows, "swish")))

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """The MLP's output `+ other`."""
        return self._down.plus(self._up.times(rows, self._gate(rows, "swish")), other)


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
