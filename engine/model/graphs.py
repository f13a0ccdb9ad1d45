"""Decode steps as CUDA graphs: one per batch size and length class, captured when first needed, replayed as the cache
grows.

A step of single tokens launches the same kernels every time; only slots, positions and lengths change, and they are
read from one tensor that is filled before each replay. Newly mapped memory needs no new capture, since no address
changes. A batch is padded to the next size with a graph by repeating its shortest request: the same computation, which
stores the same keys and values twice in one place. (A cheaper padding row would be another computation, and would store
other values there.)

A kernel divides keys over the device's cores by the longest length that a graph may meet. Captured for 128K tokens, it
would give a request of 4,000 a thirtieth of them, so a graph serves lengths up to a power of two.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vattn.attention import Attention, Contiguous, Group, PackedBatch, Span, whole_layer
from vattn.attention.base import KVSource

logger = logging.getLogger(__name__)

_SHORTEST = 1024  # tokens: below, how keys are divided matters little

# Held by a thread that captures: torch allows one capture at a time in a process, and begins it with a wait for the
# device, which would invalidate another thread's. Reentrant, since a model's first run may be a step of another engine.
_capturing = threading.RLock()

# Runs a decode step of the batch, token ids `[n]`, and the rows whose logits are wanted: all of them.
Forward = Callable[[PackedBatch, Tensor, Tensor], Tensor]


class _Recorded(PackedBatch):
    """Single tokens whose index tensors are derived, on the device, from `inputs`: slots, positions and lengths.

    Its spans only have the right number: no host value that depends on the step can be part of a graph.
    """

    def __init__(self, inputs: Tensor, max_length: int) -> None:
        slots, positions, lengths = inputs
        size = len(slots)
        super().__init__((Span(0, max_length - 1, max_length),) * size, inputs.device)
        starts = torch.arange(size + 1, dtype=torch.int32, device=inputs.device)
        group = Group(slice(0, size), slots.int(), lengths.int(), starts, 1, max_length)
        vars(self).update(slots=slots, positions=positions, groups=(group,))


class DecodeGraphs:
    """Captures and replays steps in which every request computes one token and samples.

    After a capture that failed, steps run without graphs. With torch below 2.12 that holds for the whole process: its
    allocator takes the failed capture for one that is still under way, and a later one may fail an assertion (pytorch
    pull request 180395).

    Args:
        forward: runs a step; captured.
        kv: its layers tell the longest length.
        max_batch_size: maximum number of requests in a step.
    """

    _torch_broken = False  # a capture failed, and this torch does not recover from that

    def __init__(self, forward: Forward, kv: KVSource, device: torch.device, max_batch_size: int) -> None:
        stored = whole_layer(kv, 0)
        self._max_length = (
            stored.key.shape[1] if isinstance(stored, Contiguous) else stored.table.shape[1] * stored.block_size
        )
        self._forward = forward
        self._device = device
        self._sizes = [size for size in (1, 2, 4, 8, *range(16, max_batch_size, 16)) if size < max_batch_size]
        self._sizes.append(max_batch_size)
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Callable[[], None]]] = {}  # by size, longest length
        self._stream: torch.cuda.Stream | None = None  # of all captures: blocks of their pool are a stream's
        self._pool: Any = None
        self._failed = False

    @staticmethod
    def possible(device: torch.device, attention: Attention) -> bool:
        """Whether there is a device to capture on, and the kernel can be captured."""
        return device.type == "cuda" and attention.capturable and attention.reads == "layer"

    @property
    def captured(self) -> bool:
        """Whether there is a graph, so that steps are replayed."""
        return bool(self._graphs) and not self._failed

    def run(self, spans: Sequence[Span], tokens: Sequence[int]) -> Tensor | None:
        """Logits `[n, vocab_size]` of one token per span, valid until the next call; None if it cannot be captured."""
        if self._failed:
            return None
        count = len(spans)
        size = next(size for size in self._sizes if size >= count)
        longest = self._length_class(max(span.end for span in spans))
        if (size, longest) not in self._graphs:
            self._graphs[size, longest] = self._new(size, longest, self._filled(spans, tokens, size))
            if self._failed:
                return None
        inputs, logits, replay = self._graphs[size, longest]
        inputs.copy_(self._filled(spans, tokens, size), non_blocking=True)
        replay()
        return logits[:count]

    def drop(self) -> None:
        """Forget the graphs, which have the addresses of weights: steps are captured anew."""
        self._graphs.clear()
        self._pool = None

    def _length_class(self, length: int) -> int:
        """The longest length that the graph for `length` serves."""
        return min(self._max_length, max(_SHORTEST, 1 << (length - 1).bit_length()))

    def _filled(self, spans: Sequence[Span], tokens: Sequence[int], size: int) -> Tensor:
        """`[4, size]` on the host: slots, positions, lengths, tokens."""
        shortest = min(range(len(spans)), key=lambda row: spans[row].end)
        order = [*range(len(spans)), *[shortest] * (size - len(spans))]
        padded = [spans[row] for row in order]
        rows = [
            [s.slot for s in padded],
            [s.start for s in padded],
            [s.end for s in padded],
            [tokens[r] for r in order],
        ]
        return torch.tensor(rows, device="cpu", pin_memory=self._device.type == "cuda")

    def _new(self, size: int, longest: int, first: Tensor) -> tuple[Tensor, Tensor, Callable[[], None]]:
        inputs = first.to(self._device)

        def step() -> Tensor:
            batch = _Recorded(inputs[:3], longest)
            return self._forward(batch, inputs[3], torch.arange(size, device=self._device))

        try:
            with _capturing:
                if DecodeGraphs._torch_broken:
                    raise RuntimeError(
                        f"an earlier capture in this process failed, from which torch {torch.__version__} does not "
                        "recover (2.12 does)"
                    )
                return (inputs, *self._capture(step))
        except RuntimeError as error:
            # For example, the model reads values on the host, as the routing of some mixtures of experts does.
            logger.warning("decode steps cannot be captured in a CUDA graph and run without one: %s", error)
            self._failed = True
            return inputs, inputs, lambda: None

    def _capture(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """The output of `step`, and a function that computes it again in the same place.

        The first run is outside the capture, since libraries initialise themselves in it.
        """
        if self._stream is None:
            # torch's own for captures is of one device, whichever was current when the process first captured.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context restores the stream, since a capture whose end fails leaves its own current.
            # thread_local: the worker thread maps memory meanwhile, which must not disturb the capture.
            with (
                _no_collection(),
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                output = step()
        except BaseException:
            DecodeGraphs._torch_broken = _release(torch.__version__) < (2, 12)
            raise
        self._pool = graph.pool()
        return output, graph.replay


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collects garbage first, and holds automatic collection off within the context.

    A cache that is collected waits for all kernels of the device, which is an error while a stream captures.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: (2, 12) of "2.12.0a0+cu130"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
