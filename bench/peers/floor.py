"""What vattn's engine cannot do without: the products of its steps, and their attention at the machine's limit.

The engine runs a workload once, and every product of weights is noted, and how much each call of attention multiplies
and reads. A round repeats the products, by the same weights and with as many rows, and in place of attention it either
multiplies or reads as much, whichever takes longer. Nothing else is computed. Options: those of `vattn.LLM`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any
from unittest import mock

import torch
from protocol import serve  # type: ignore[import-not-found]
from torch import Tensor
from vattn_engine import generate  # type: ignore[import-not-found]

from vattn import cpu
from vattn.attention import PackedBatch
from vattn.engine import LLM
from vattn.engine.model.linears import Packed
from vattn.engine.model.native_layers import CacheLayers

_MEASURED = 256 * 2**20  # products, and bytes, which no cache holds
_TIMES = 5

Calls = list[Callable[[], object]]


def load(model: str, options: dict[str, Any]) -> tuple[str, str, Callable[[list[dict[str, Any]]], int]]:
    llm = LLM(model, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    known: list[dict[str, Any]] = []
    calls: Calls = []

    def run(requests: list[dict[str, Any]]) -> int:
        if requests != known:
            known[:], calls[:] = requests, _note(llm, requests)
        for call in calls:
            call()
        return sum(request["max_tokens"] for request in requests)

    return "floor", metadata.version("vattn"), run


def _note(llm: LLM, requests: list[dict[str, Any]]) -> Calls:
    """The calls of a round, of a model without windows."""
    runner = llm.core.runner
    config, dtype = runner.model.config, runner.model.dtype
    attention = type(runner.attention)
    memory = torch.zeros(_MEASURED, dtype=torch.uint8)
    per_product = _seconds(lambda: cpu.products(dtype, _MEASURED)) / _MEASURED
    per_byte = _seconds(lambda: cpu.read(memory)) / _MEASURED
    calls: Calls = []
    operands: dict[tuple[int, ...], Tensor] = {}

    def operand(*shape: int) -> Tensor:
        return operands.setdefault(shape, torch.randn(shape).to(dtype))

    def noting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def product(self: Packed, *rows: Tensor) -> Tensor:
            calls.append(partial(original, self, *(operand(*part.shape) for part in rows)))
            return original(self, *rows)

        return product

    def project(self: cpu.Projection, rows: Tensor, *factors: Tensor) -> Tensor:
        calls.append(partial(cpu.linear, operand(len(rows), self.weight.width), self.weight))
        return original_project(self, rows, *factors)

    def add(self: cpu.Residual, attended: Tensor, rows: Tensor) -> Tensor:
        for weight, other in zip(self.weights, (True, False, True), strict=True):
            given = operand(len(rows), weight.width), weight, operand(len(rows), weight.out) if other else None
            calls.append(partial(cpu.linear, *given))
        return original_add(self, attended, rows)

    def attend(self: Any, query: Tensor, kv: Any, layer: int, batch: PackedBatch, params: Any) -> Tensor:
        heads, head_dim = query.shape[1:]
        seen = sum((span.start + 1 + span.end) * len(span) // 2 for span in batch.spans)
        products = 2 * heads * head_dim * seen
        read = 2 * config.num_key_value_heads * head_dim * dtype.itemsize * sum(span.end for span in batch.spans)
        if products * per_product > read * per_byte:
            calls.append(partial(cpu.products, dtype, products))
        else:
            assert read <= memory.nbytes
            calls.append(partial(cpu.read, memory[:read]))
        return original_attend(self, query, kv, layer, batch, params)

    original_attend: Callable[..., Tensor] = attention.__call__
    original_project, original_add = cpu.Projection.__call__, cpu.Residual.__call__
    with (
        mock.patch.object(Packed, "__call__", noting(Packed.__call__)),
        mock.patch.object(Packed, "plus", noting(Packed.plus)),
        mock.patch.object(cpu.Projection, "__call__", project),
        mock.patch.object(cpu.Residual, "__call__", add),
        mock.patch.object(attention, "__call__", attend),
        mock.patch.object(CacheLayers, "parts", return_value=None),  # which would be one call
    ):
        generate(llm, requests)
    return calls


def _seconds(call: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(_TIMES):
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return least


if __name__ == "__main__":
    serve(load)
