"""What an attention kernel is asked to do in one packed step, and what it may assume.

A step packs the new tokens of several requests into one row of tokens. Their keys and values are stored before a
kernel is called, so a kernel sees queries, a batch, and a cache to read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, end)` of the request in `slot`: the ones that a step computes.

    Tokens `[0, start)` are in the cache already; after the step `[0, end)` are.
    """

    slot: int
    start: int
    end: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.end, f"empty or negative span {self}"

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class PackedBatch:
    """The spans of one step in the order of their rows: spans of one token first.

    The order lets a kernel treat the single tokens (decodes, above all) as one block of rows, and every
    longer chunk as a slice of them. Index tensors and masks are built once here and shared by all layers.
    """

    spans: tuple[Span, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        lengths = [len(span) for span in self.spans]
        singles = self.num_singles
        assert all(n > 1 for n in lengths[singles:]), "spans of one token come first"

    @classmethod
    def pack(cls, spans: Sequence[Span], device: torch.device | str = "cpu") -> PackedBatch:
        """A batch of `spans` in the required order: a stable sort, spans of one token first."""
        return cls(tuple(sorted(spans, key=lambda s: len(s) > 1)), torch.device(device))

    @cached_property
    def num_singles(self) -> int:
        """How many spans have one token; they are rows `[0, num_singles)`."""
        return sum(len(span) == 1 for span in self.spans)

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(span) for span in self.spans)

    @cached_property
    def slots(self) -> Tensor:
        """`[num_tokens]` int64: the slot of each row."""
        return torch.tensor([s.slot for s in self.spans for _ in range(len(s))], device=self.device)

    @cached_property
    def positions(self) -> Tensor:
        """`[num_tokens]` int64: the position of each row in its request."""
        return torch.tensor([p for s in self.spans for p in range(s.start, s.end)], device=self.device)

    def chunks(self) -> list[tuple[Span, int]]:
        """The spans of more than one token, each with the number of its first row."""
        row = self.num_singles
        rows = []
        for span in self.spans[row:]:
            rows.append((span, row))
            row += len(span)
        return rows

    @cached_property
    def _masks(self) -> dict[tuple[Span, int, int | None, torch.dtype], Tensor]:
        return {}

    def mask(self, span: Span, first_key: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """`[len(span), span.end - first_key]`: 0 where a query may look, -inf elsewhere.

        A query at position p sees the keys `(p - window, p]`. Built once per step and span, not per layer.
        """
        key = (span, first_key, window, dtype)
        if key not in self._masks:
            distance = (
                torch.arange(span.start, span.end, device=self.device)[:, None]
                - torch.arange(first_key, span.end, device=self.device)[None, :]
            )
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf"))
        return self._masks[key]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends.

    Attributes:
        scale: factor on the scores before the softmax; None for `head_dim ** -0.5`.
        window: a query sees this many keys, itself included; None for all.
        softcap: scores become `softcap * tanh(score / softcap)`; None for none.
        sinks: `[num_query_heads]` logits that take part in each softmax and add nothing to its sum; None for none.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def first_key(self, span: Span) -> int:
        """The first key that any query of `span` can see."""
        return 0 if self.window is None else max(0, span.start - self.window + 1)


class KVSource(Protocol):
    """A cache that kernels read from."""

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys `[1, num_kv_heads, length - start, head_dim]` and values of tokens `[start, length)` of a slot.

        Last dimension contiguous, other strides any. Valid until the next call: a backend may reuse its buffer.
        """
        ...


class Attention(Protocol):
    """One unmodified kernel behind a common call.

    Attributes:
        name: what `vattn.attention.get` knows it by.
        guard_rows: rows past a length that the kernel may read, and which must therefore be mapped and finite.
    """

    name: str
    guard_rows: int

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        """Causal attention of the packed queries.

        Args:
            query: `[num_tokens, num_query_heads, head_dim]`, rows in the order of `batch`.
            kv: holds keys and values of `[0, span.end)` of every span.
            layer: which layer's.

        Returns:
            `[num_tokens, num_query_heads, v_head_dim]`, contiguous.
        """
        ...
