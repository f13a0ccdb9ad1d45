"""Linear layers with weights packed once, and single products in place of several.

A call computes what the module would; `plus` adds another tensor in the epilogue of the matrix product, in float32,
without another pass over memory. The products are vattn's own; on CPUs with AMX they are oneDNN's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vattn import cpu
from vattn.errors import ConfigError

_mkldnn = torch.ops.mkldnn
# The number of rows that oneDNN chooses a layout for. From 1 to 2048 rows no other choice was faster.
_ROWS = 32
# Of gate and up together, which the C library gives back to the kernel, page by page, from 32 MiB on.
_MOST_GATED_BYTES = 16 * 2**20


class Packed:
    """Linear layers over one input, in bfloat16, as a single one whose weight was packed once.

    Args:
        linears: of as many inputs.
        gated: whether they are gate and up, and what is asked for is `silu(gate) * up`.

    Attributes:
        out: number of outputs, of all together.
        native: for vattn's kernels; None where oneDNN computes.
    """

    def __init__(self, linears: Sequence[nn.Linear], *, gated: bool = False) -> None:
        self._linears = linears
        self._gated = gated
        self._features = sum(linear.out_features for linear in linears)
        self._shapes = [_shapes(linear) for linear in linears]
        self.out = self._features // 2 if gated else self._features
        self.native: cpu.Weight | None = None
        self.pack()

    @property
    def products(self) -> tuple[Packed, ...]:
        """It and nothing else."""
        return (self,)

    def check(self) -> None:
        """Raises a ConfigError if weights and biases are no longer of the shape and type that the layers had."""
        for linear, shapes in zip(self._linears, self._shapes, strict=True):
            if (now := _shapes(linear)) != shapes:
                raise ConfigError(
                    f"a linear layer's weight and bias, {shapes}, are now {now}; close every LLM over this "
                    "model and make another one"
                )

    def pack(self) -> None:
        """Packs the weights and biases that the layers have now. Where they lie stays: native calls have addresses."""
        weight = _together([linear.weight for linear in self._linears])
        biases: list[Tensor] = [linear.bias for linear in self._linears if linear.bias is not None]
        self._bias = _together(biases) if biases else None
        if not cpu.has_linear() or weight.shape[1] % 2:
            self._blocked = _pack_for_mkldnn(weight)
            return
        packed = cpu.pack_weight(weight, self._bias, gated=self._gated)
        if self.native is None:
            self.native = packed
            return
        self.native.panels.copy_(packed.panels)
        if self.native.bias is not None and packed.bias is not None:
            self.native.bias.copy_(packed.bias)

    def __call__(self, rows: Tensor) -> Tensor:
        if self.native is not None:
            return self._linear(self.native, rows, None)
        output: Tensor = _mkldnn._linear_pointwise(rows, self._blocked, self._bias, "none", [], "")
        if self._gated:
            return cpu.gate(output.view(-1, self._features)).view(*rows.shape[:-1], self.out)
        return output

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """The layer's output `+ other`, of layers that are not gated."""
        if self.native is not None:
            return self._linear(self.native, rows, _rows(other, self.out).contiguous())
        output: Tensor = _mkldnn._linear_pointwise.binary(rows, other, self._blocked, self._bias, "add")
        return output

    @staticmethod
    def _linear(weight: cpu.Weight, rows: Tensor, other: Tensor | None) -> Tensor:
        return cpu.linear(_rows(rows, weight.width), weight, other).view(*rows.shape[:-1], weight.out)


def _rows(tensor: Tensor, width: int) -> Tensor:
    """`[n, width]` as native calls read them: elements side by side."""
    if tensor.dtype != torch.bfloat16:
        raise RuntimeError(f"a linear layer in bfloat16 was given {tensor.dtype}; convert its input to its type")
    rows = tensor.reshape(-1, width)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _shapes(linear: nn.Linear) -> str:
    parts: tuple[Tensor | None, ...] = (linear.weight, linear.bias)
    return " and ".join(
        "none" if part is None else f"{list(part.shape)} in {str(part.dtype).removeprefix('torch.')}" for part in parts
    )


def _together(tensors: list[Tensor]) -> Tensor:
    return (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).detach()


def _pack_for_mkldnn(weight: Tensor) -> Tensor:
    packed: Tensor = _mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
    return packed


class PackedMLP:
    """`down(silu(gate(x)) * up(x))`; gate and up are one product, since two take 1.4 x as long for 21 rows."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        self.gate_up = Packed([gate, up], gated=True)
        self._most_rows = max(1, _MOST_GATED_BYTES // (2 * self.gate_up.out * gate.weight.element_size()))
        self.down = Packed([down])

    @property
    def products(self) -> tuple[Packed, ...]:
        return self.gate_up, self.down

    def __call__(self, rows: Tensor) -> Tensor:
        return self.down(self.gate_up(rows))

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """The MLP's output `+ other`, both `[T, hidden_size]`; of many rows in several parts."""
        parts = zip(torch.split(rows, self._most_rows), torch.split(other, self._most_rows), strict=True)
        outputs = [self.down.plus(self.gate_up(part), beside) for part, beside in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class PackedTogether:
    """Several linear layers that share their input, as one product; right but slow if inputs differ."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.product = Packed(linears)
        self._sizes = [linear.out_features for linear in linears]
        self._last = _LastProduct()

    @property
    def products(self) -> tuple[Packed, ...]:
        return (self.product,)

    def part(self, index: int) -> Callable[[Tensor], Tensor]:
        """The layer number `index`."""

        def forward(rows: Tensor) -> Tensor:
            last = self._last
            if last.rows is not rows or index not in last.outputs:
                last.rows = rows
                last.outputs = dict(enumerate(torch.split(self.product(rows), self._sizes, dim=-1)))
            output = last.outputs.pop(index)
            if not last.outputs:
                last.rows = None
            return output

        return forward


class _LastProduct(threading.local):
    """Of each thread: engines of several may share a model."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}
