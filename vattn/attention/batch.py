"""The tokens of a packed step: the requests that they belong to, and index tensors for kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, end)` of the request in `slot`, which a step computes.

    The cache holds tokens `[0, start)` before the step and `[0, end)` after it.
    """

    slot: int
    start: int
    end: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.end, f"empty or negative span {self}"

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class SpanColumns(Sequence[Span]):
    """Spans as tensors, for engines that have them so: a batch makes its index tensors of them, and no object per span.

    Attributes:
        slots, starts, ends: `[n]` int32 on the CPU.
    """

    slots: Tensor
    starts: Tensor
    ends: Tensor

    def __post_init__(self) -> None:
        # On a few numbers, numpy's calls take a third of torch's, and reductions of lists a half of numpy's.
        assert min(self.starts.tolist(), default=0) >= 0, "negative spans"
        assert min(self.lengths.tolist(), default=1) > 0, "empty spans"

    @cached_property
    def lengths(self) -> Tensor:
        return torch.from_numpy(self.ends.numpy() - self.starts.numpy())

    @property
    def num_singles(self) -> int:
        """The number of spans of one token at the front."""
        return int((self.lengths == 1).cumprod(0).sum())

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self.slots.tolist(), self.starts.tolist(), self.ends.tolist())

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> SpanColumns: ...
    def __getitem__(self, index: int | slice) -> Span | SpanColumns:
        columns = self.slots[index], self.starts[index], self.ends[index]
        return SpanColumns(*columns) if isinstance(index, slice) else Span(*map(int, columns))


@dataclass(frozen=True)
class Group:
    """Neighbouring spans of a batch for one kernel call. Index tensors are int32 on the batch's device.

    Attributes:
        rows: the packed rows of the spans.
        slots: `[n]`, the slot of each span.
        lengths: `[n]`, cached tokens of each request, including the new ones.
        starts: `[n + 1]`, offsets of the spans' first rows from `rows.start`, then the number of rows.
        max_query: rows of the longest span.
        max_length: an upper bound on `lengths`, by which kernels size their grids.
    """

    rows: slice
    slots: Tensor
    lengths: Tensor
    starts: Tensor
    max_query: int
    max_length: int

    @classmethod
    def of(cls, spans: Sequence[Span], first_row: int, device: torch.device) -> Group:
        if isinstance(spans, SpanColumns):
            return cls._of_columns(spans, first_row, device)
        starts = [0]
        for span in spans:
            starts.append(starts[-1] + len(span))
        ends = [span.end for span in spans]
        # One transfer, then views.
        packed = _to_device([span.slot for span in spans] + ends + starts, torch.int32, device)
        slots, lengths, offsets = packed[: len(spans)], packed[len(spans) : -len(starts)], packed[-len(starts) :]
        return cls(slice(first_row, first_row + starts[-1]), slots, lengths, offsets, max(map(len, spans)), max(ends))

    @classmethod
    def _of_columns(cls, spans: SpanColumns, first_row: int, device: torch.device) -> Group:
        slots, ends, n = spans.slots, spans.ends, len(spans)
        starts = torch.zeros(n + 1, dtype=torch.int32, device="cpu")
        spans.lengths.numpy().cumsum(out=starts.numpy()[1:])
        rows = slice(first_row, first_row + int(starts[-1]))
        if device.type == "cuda":
            packed = torch.cat((slots, ends, starts)).pin_memory().to(device, non_blocking=True)
            slots, ends, starts = packed[:n], packed[n : 2 * n], packed[2 * n :]
        most, longest = max(spans.lengths.tolist()), max(spans.ends.tolist())
        return cls(rows, slots.contiguous(), ends.contiguous(), starts, most, longest)


@dataclass(frozen=True)
class PackedBatch:
    """The spans of a step in the order of their rows.

    Any order is correct. Those of one token (mostly decodes) at the front are one block of rows, which kernels and
    caches handle in one call; each span after them is a slice, so `pack` puts spans of one token first. Index tensors
    and masks are built once and shared by all layers.
    """

    spans: Sequence[Span]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def pack(cls, spans: Sequence[Span], device: torch.device | str = "cpu") -> PackedBatch:
        """A batch of `spans` in the fastest order: a stable sort, spans of one token first."""
        return cls(tuple(sorted(spans, key=lambda s: len(s) > 1)), torch.device(device))

    @cached_property
    def num_singles(self) -> int:
        """The number of spans of one token at the front; they are rows `[0, num_singles)`."""
        if isinstance(self.spans, SpanColumns):
            return self.spans.num_singles
        return sum(1 for _ in itertools.takewhile(lambda span: len(span) == 1, self.spans))

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(span) for span in self.spans)

    @cached_property
    def slots(self) -> Tensor:
        """`[num_tokens]` int64: the slot of each row."""
        return _to_device([s.slot for s in self.spans for _ in range(len(s))], torch.int64, self.device)

    @cached_property
    def positions(self) -> Tensor:
        """`[num_tokens]` int64: the position of each row in its request."""
        return _to_device([p for s in self.spans for p in range(s.start, s.end)], torch.int64, self.device)

    def singles(self, rows: Tensor) -> PackedBatch:
        """A batch of these rows, `[S]` int64, each of them a span of its own: the last token of what it attends to."""
        places = zip(self.slots[rows].tolist(), self.positions[rows].tolist(), strict=True)
        return PackedBatch(tuple(Span(slot, position, position + 1) for slot, position in places), self.device)

    @cached_property
    def single_places(self) -> tuple[Tensor, Tensor]:
        """Slots and positions of the single tokens at the front: an index into `[slots, tokens, ...]`."""
        return self.slots[: self.num_singles], self.positions[: self.num_singles]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The spans of one token at the front and the others, as two groups; an empty group is left out.

        They are separate because kernels split the keys over the device for single queries only.
        """
        cut = self.num_singles
        parts = ((self.spans[:cut], 0), (self.spans[cut:], cut))
        return tuple(Group.of(spans, row, self.device) for spans, row in parts if spans)

    @cached_property
    def together(self) -> Group:
        """All spans, for kernels that take single tokens and longer spans alike."""
        return Group.of(self.spans, 0, self.device)

    @cached_property
    def uniform_groups(self) -> tuple[Group, ...]:
        """`groups` for kernels that need spans of equal length: every span of the second is a group of its own."""
        return self.split(0)

    def split(self, short: int) -> tuple[Group, ...]:
        """The single tokens at the front; of the other spans those of up to `short` rows that are neighbours, together,
        and every longer one on its own.
        """

        def make() -> tuple[Group, ...]:
            groups = list(self.groups[:1]) if self.num_singles else []
            for is_short, neighbours in itertools.groupby(self.chunks(), lambda chunk: len(chunk[0]) <= short):
                chunks = list(neighbours)
                for part in [chunks] if is_short else [[chunk] for chunk in chunks]:
                    groups.append(Group.of([span for span, _ in part], part[0][1], self.device))
            return tuple(groups)

        made: tuple[Group, ...] = self.once(("split", short), make)
        return made

    def chunks(self) -> Sequence[tuple[Span, int]]:
        """The spans after the single tokens at the front, each with its first row."""
        row = self.num_singles
        if row == len(self.spans):
            return ()
        rows = []
        for span in self.spans[row:]:
            rows.append((span, row))
            row += len(span)
        return rows

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make`, computed once per key: for values that depend on the batch but not on the layer."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def mask(self, span: Span, first_key: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """`[len(span), span.end - first_key]`: 0 for visible keys, -inf for others; built once for all layers.

        A query at position p sees the keys `(p - window, p]`.
        """

        def make() -> Tensor:
            distance = (
                torch.arange(span.start, span.end, device=self.device)[:, None]
                - torch.arange(first_key, span.end, device=self.device)[None, :]
            )
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
            return mask.masked_fill_(hidden, float("-inf"))

        mask: Tensor = self.once((span, first_key, window, dtype), make)
        return mask


def _to_device(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies from pinned memory on CUDA, so that the caller does not wait."""
    on_host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
