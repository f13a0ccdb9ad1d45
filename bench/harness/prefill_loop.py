"""Prompts through the engine's own runner and backend, in whole steps."""

from __future__ import annotations

import time

from transformers import PreTrainedModel

from vattn.attention import Attention, Case
from vattn.attention import get as get_attention
from vattn.engine.kv.base import KVBackend
from vattn.engine.model.runner import ModelRunner
from vattn.engine.requests.request import Request
from vattn.engine.requests.sampling import SamplingParams
from vattn.engine.scheduling.scheduler import Entry


class PrefillLoop:
    """Each `prefill` is one request: it takes a slot, computes a prompt in chunks, and frees the slot.

    Args:
        chunk: most tokens of a step; by default a prompt is one step.
        attention: the kernel; the CPU's by default.

    Attributes:
        kv: the backend.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVBackend,
        *,
        chunk: int | None = None,
        attention: Attention | None = None,
    ) -> None:
        self.kv = kv
        self._chunk = chunk
        self._runner = ModelRunner(model, kv, attention or get_attention("auto", Case(model.device, model.dtype)))

    def prefill(self, length: int) -> tuple[float, float]:
        """Seconds from the arrival of a prompt to the logits of its first token; and those of them in `prepare`."""
        request = Request("0", [1] * length, SamplingParams(max_tokens=1), max_total_tokens=length + 1, seed=0)
        preparing = 0.0
        begin = time.perf_counter()
        slot = self.kv.allocate(length)
        request.admit(slot)
        chunk = self._chunk or length
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            upcoming = {slot: min(end + chunk, length)} if end < length else None
            before = time.perf_counter()
            self.kv.prepare({slot: end}, upcoming)
            preparing += time.perf_counter() - before
            self._runner.run([Entry(request, start, end)])
        seconds = time.perf_counter() - begin
        self.kv.free(slot)
        return seconds, preparing

    def close(self) -> None:
        """Leaves the model as it was."""
        self._runner.close()
