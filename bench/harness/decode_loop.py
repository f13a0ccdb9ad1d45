"""A decoding batch at any context without a prefill, through the engine's own runner and backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vattn import packed
from vattn.attention import Attention, AttentionParams, Case, PackedBatch, Span
from vattn.attention import get as get_attention
from vattn.engine.kv.base import KVBackend
from vattn.engine.model.runner import ModelRunner
from vattn.engine.requests.request import Request
from vattn.engine.requests.sampling import SamplingParams
from vattn.engine.scheduling.scheduler import Entry


class DecodeLoop:
    """`batch` requests with `length` tokens each in the cache, filled with random rows; every `step` adds one token.

    All requests have the same length, so they all reach the end of a block in the same step.

    Args:
        attention: the kernel; the CPU's by default.
        logits: compute the logits of every step, as sampling would need them.
        graphs: run decode steps as CUDA graphs where possible; only steps with logits can be.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVBackend,
        *,
        batch: int,
        length: int,
        max_length: int,
        attention: Attention | None = None,
        logits: bool = False,
        graphs: bool = False,
    ) -> None:
        self.length = length
        self._kv = kv
        self._attention = attention or get_attention("auto", Case(model.device, model.dtype))
        self._runner = ModelRunner(model, kv, self._attention, graphs_up_to=batch if graphs else None)
        self._shape = packed.kv_shape(model)
        self._dtype = model.dtype
        self._device = model.device
        self._query_heads: int = model.config.num_attention_heads
        self._slots = [kv.allocate(length) for _ in range(batch)]
        kv.prepare(dict.fromkeys(self._slots, length))
        for slot in self._slots:
            rows = PackedBatch.pack([Span(slot, 0, length)], self._device)
            for layer in range(self._shape.num_layers):
                kv.write(layer, rows, *self._random_rows(length))
        self._requests = []
        for number, slot in enumerate(self._slots):
            params = SamplingParams(max_tokens=max_length)
            tokens = [1] * (length if logits else max_length)
            request = Request(str(number), tokens, params, max_total_tokens=max_length + 1, seed=0)
            request.admit(slot)
            self._requests.append(request)

    def close(self) -> None:
        """Drops the graphs with their memory, and leaves the model as it was."""
        self._runner.close()

    @property
    def captured(self) -> bool:
        """Whether steps are replayed from a CUDA graph."""
        return self._runner.graphs is not None and self._runner.graphs.captured

    def step(self) -> Tensor:
        """Runs one decode step, memory and model, and returns its logits. Sampling does not depend on the backend."""
        self.length += 1
        for request in self._requests:  # logits are those of a request's newest token
            request.prompt_token_ids += [1] * (self.length - request.num_tokens)
        self._kv.prepare(dict.fromkeys(self._slots, self.length), look_ahead=not self._runner.launches)
        entries = [Entry(request, self.length - 1, self.length) for request in self._requests]
        logits = self._runner.run(entries).logits
        if self._runner.launches:
            self._kv.look_ahead()
        return logits

    def attention_steps(self, count: int) -> Callable[[], None]:
        """The attention of the next `count` steps: in every layer, store the new rows, read, attend.

        Each call is one step, one token further. Memory and the index tensors of slots and positions are prepared in
        advance; what a backend derives from them is not.
        """
        batches = []
        for length in range(self.length + 1, self.length + count + 1):
            batch = PackedBatch.pack([Span(slot, length - 1, length) for slot in self._slots], self._device)
            assert len(batch.slots) == len(batch.positions)  # builds both
            batches.append(batch)
        self.length += count
        self._kv.prepare(dict.fromkeys(self._slots, self.length))
        upcoming = iter(batches)
        query = torch.randn(
            len(self._slots), self._query_heads, self._shape.layers[0].head_dim, dtype=self._dtype, device=self._device
        )
        key, value = self._random_rows(len(self._slots))
        params = AttentionParams()

        def action() -> None:
            batch = next(upcoming)
            with torch.inference_mode():
                for layer in range(self._shape.num_layers):
                    self._kv.write(layer, batch, key, value)
                    self._attention(query, self._kv, layer, batch, params)

        return action

    def _random_rows(self, count: int) -> tuple[Tensor, Tensor]:
        shape = self._shape.layers[0]
        key, value = (
            torch.randn(count, shape.num_kv_heads, dim, dtype=self._dtype, device=self._device)
            for dim in (shape.head_dim, shape.v_head_dim)
        )
        return key, value
