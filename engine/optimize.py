"""The same model, faster on a CPU: weights laid out for oneDNN once, and products that read the same rows made one.

Three changes, each to the `forward` of single modules, which keep their names and types:

    linear      the weight in oneDNN's blocked layout, instead of being reordered at every call
    q, k, v     one product for the three projections of an attention module
    gated MLP   the activation, and the product with the other branch, in the epilogue of a matrix product

Measured in bfloat16 on two cores (us; hidden size 896, MLP of 4864; as transformers does it, and so): the MLP's
products for 1 row 957 and 610, 32 rows 1828 and 1350, 512 rows 18100 and 15800; q, k, v and output projection for 1
row 106 and 55, 32 rows 240 and 184.

For bfloat16 only. Float32 would win little, and its tokens are to be those of transformers, bit by bit; here they
differ by rounding, since the epilogues work on float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_mkldnn = torch.ops.mkldnn
# The number of rows that oneDNN chooses a layout for. From 1 to 2048 rows no other choice was faster.
_ROWS = 32
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MLP = ("gate_proj", "up_proj", "down_proj")
_QKV = ("q_proj", "k_proj", "v_proj")


def supported(model: PreTrainedModel) -> bool:
    """Whether `optimize` can do something for this model, here."""
    return (
        model.device.type == "cpu"
        and model.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(_mkldnn._is_mkldnn_bf16_supported())
    )


def keep_freed_memory() -> None:
    """Have the C library keep large blocks that are freed, for the next layer's activations, up to 512 MiB.

    By default glibc gives blocks over 128 KiB back to the kernel at once, and every layer pays for zeroed pages again:
    400,000 page faults, a second of eight, in the short set of `bench throughput`. It holds for the whole process; C
    libraries without `mallopt` do better by themselves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 512 << 20)


def optimize(model: PreTrainedModel, *, keep_weights: bool = True) -> Callable[[], None]:
    """Change how the linear layers of `model` compute.

    Args:
        model: in eval mode, and `supported`.
        keep_weights: the packed weights are kept beside the original ones. False gives the originals' memory back;
            the model is then good for inference alone, and only as it is.

    Returns:
        What takes the change back; with `keep_weights=False` it must not be called.
    """
    faster: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    with torch.inference_mode():
        for module in model.modules():
            mlp = _gated_mlp(module)
            if mlp is not None:
                faster[module] = mlp
                faster |= dict.fromkeys(_linears(module, _MLP), mlp)
            shared = _shared_product(module)
            if shared is not None:
                faster |= {part: shared.part(i) for i, part in enumerate(_linears(module, _QKV))}
            if _is_plain(module) and module not in faster:
                faster[module] = _Packed(module.weight, module.bias)
    for module, forward in faster.items():
        module.forward = forward
    if not keep_weights:
        others = {id(p) for m in model.modules() if m not in faster for p in m.parameters(recurse=False)}
        for module in faster:
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in others:
                    parameter.data = parameter.data.new_empty(0)

    def restore() -> None:
        for module in faster:
            module.__dict__.pop("forward", None)

    return restore


class _Packed:
    """A linear layer over a weight `[out, in]` that was packed once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight: Tensor = _mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self.bias = None if bias is None else bias.detach()

    def __call__(self, rows: Tensor, activation: str = "none") -> Tensor:
        output: Tensor = _mkldnn._linear_pointwise(rows, self.weight, self.bias, activation, [], "")
        return output


class _GatedMLP:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        self.gate, self.up, self.down = (_Packed(linear.weight, None) for linear in (gate, up, down))

    def __call__(self, rows: Tensor) -> Tensor:
        gated = self.gate(rows, "swish")
        return self.down(_mkldnn._linear_pointwise.binary(rows, gated, self.up.weight, None, "mul"))


def _gated_mlp(module: nn.Module) -> _GatedMLP | None:
    """A faster `module`, where it is a gated MLP with SiLU.

    Its attributes say that it might be; whether its forward computes just that, only its results say.
    """
    linears = _linears(module, _MLP)
    if not linears or any(linear.bias is not None for linear in linears):
        return None
    mlp = _GatedMLP(*linears)
    rows = torch.randn(4, linears[0].in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        expected = module(rows)
        same = (mlp(rows) - expected).float().norm() <= 0.02 * expected.float().norm()
    except (TypeError, ValueError, RuntimeError):  # it takes other arguments
        return None
    return mlp if same else None


class _SharedProduct:
    """Several linear layers that are called with the same tensor, as one; with different ones right, but slow."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        weights: list[Tensor] = [linear.weight for linear in linears]
        self._product = _Packed(torch.cat(weights), torch.cat(biases) if biases else None)
        self._sizes = [linear.out_features for linear in linears]
        self._rows: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def part(self, index: int) -> Callable[[Tensor], Tensor]:
        """The layer number `index`."""

        def forward(rows: Tensor) -> Tensor:
            if self._rows is not rows or index not in self._outputs:
                self._rows = rows
                self._outputs = dict(enumerate(torch.split(self._product(rows), self._sizes, dim=-1)))
            output = self._outputs.pop(index)
            if not self._outputs:
                self._rows = None
            return output

        return forward


def _shared_product(module: nn.Module) -> _SharedProduct | None:
    linears = _linears(module, _QKV)
    alike = len({(linear.in_features, linear.bias is None) for linear in linears}) == 1
    return _SharedProduct(linears) if alike else None


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The children of these names, where all are plain linear layers; or none."""
    children = [module._modules.get(name) for name in names]
    linears = [child for child in children if _is_plain(child)]
    return linears if len(linears) == len(names) else []


def _is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer in bfloat16, and no adapter or quantised one: those differ in a type."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor and module.weight.dtype == torch.bfloat16
