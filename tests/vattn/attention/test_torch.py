"""The adapters of torch's own kernels against attention written out token by token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.effort import covering
from vattn import attention
from vattn.attention import AttentionParams, PackedBatch, Span, SpanColumns
from vattn.attention.native import Native
from vattn.attention.torch_sdpa import plain_attention

HEADS, LONGEST = 2, 64


@pytest.fixture(params=[attention.TorchSDPA, Native], ids=lambda kind: kind.name)
def kernel(request: pytest.FixtureRequest) -> attention.Attention:
    made: attention.Attention = request.param()
    return made


class Store:
    """A cache of random rows; what lies past the length asked for is NaN, so that a read of it shows."""

    def __init__(self, slots: int, dim: int, v_dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.key = torch.randn(slots, HEADS, LONGEST, dim, generator=generator).to(dtype)
        self.value = torch.randn(slots, HEADS, LONGEST, v_dim, generator=generator).to(dtype)

    def stored(self, layer: int) -> None:
        """No whole layer."""

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        assert layer == 3
        key, value = self.key.clone(), self.value.clone()
        key[slot, :, length:] = value[slot, :, length:] = float("nan")
        return key[slot : slot + 1, :, start:length], value[slot : slot + 1, :, start:length]


def by_hand(query: Tensor, store: Store, batch: PackedBatch, params: AttentionParams) -> Tensor:
    """One query row and head at a time, in float64, straight from the definition."""
    rows = [(span.slot, position) for span in batch.spans for position in range(span.start, span.end)]
    output = torch.zeros(len(rows), query.shape[1], store.value.shape[-1], dtype=torch.float64)
    scale = params.scale if params.scale is not None else query.shape[-1] ** -0.5
    for row, (slot, position) in enumerate(rows):
        first = 0 if params.window is None else max(0, position - params.window + 1)
        for head in range(query.shape[1]):
            kv_head = head // (query.shape[1] // HEADS)
            key = store.key[slot, kv_head, first : position + 1].double()
            value = store.value[slot, kv_head, first : position + 1].double()
            scores = key @ query[row, head].double() * scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            weights = scores.exp()
            total = weights.sum()
            if params.sinks is not None:
                total = total + math.exp(params.sinks[head])
            output[row, head] = weights @ value / total
    return output


@pytest.mark.parametrize(
    ("rows", "softcap", "with_sinks", "window"),
    covering(
        list(itertools.product([1, 3], [8, 12], ["packed", "mixed", "singles last"])),
        [None, 2.0],
        [False, True],
        [None, 1, 7, 18, 19, 1000],
    ),
)
def test_against_the_definition(
    kernel: attention.Attention,
    rows: tuple[int, int, str],
    softcap: float | None,
    with_sinks: bool,
    window: int | None,
) -> None:
    """Decodes, a first chunk and later chunks in one batch, with every option and in any order."""
    group, v_dim, order = rows
    spans = [Span(0, 0, 1), Span(3, 12, 30), Span(1, 40, 41), Span(2, 0, 19), Span(4, 62, 64)]
    if order == "mixed":
        batch = PackedBatch(tuple(spans))
    else:
        batch = PackedBatch.pack(spans)
        if order == "singles last":
            batch = PackedBatch(batch.spans[::-1])
    store = Store(5, 8, v_dim, torch.float32)
    generator = torch.Generator().manual_seed(1)
    # Laid out as models give it: a transposed view.
    query = torch.randn(HEADS * group, batch.num_tokens, 8, generator=generator).transpose(0, 1)
    sinks = torch.randn(HEADS * group, generator=generator) if with_sinks else None
    params = AttentionParams(scale=0.4, window=window, softcap=softcap, sinks=sinks)
    got = kernel(query, store, 3, batch, params)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), by_hand(query, store, batch, params), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernel: attention.Attention, dtype: torch.dtype) -> None:
    batch = PackedBatch.pack([Span(0, 0, 30), Span(1, 40, 41), Span(2, 20, 29)])
    store = Store(3, 8, 8, dtype)
    query = torch.randn(batch.num_tokens, 2 * HEADS, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    for params in (AttentionParams(), AttentionParams(softcap=2.0, window=6)):
        got = kernel(query, store, 3, batch, params)
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), by_hand(query, store, batch, params), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{"scale": 0.0, "softcap": 2.0}, {"scale": 0.0, "sinks": torch.randn(2)}, {"softcap": 1e20}]
    + [{"scale": scale} for scale in (0.0, -0.3, np.float32(0.3))],
)
def test_numbers_at_the_ends(kernel: attention.Attention, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A scale of 0 hides what keys say, and may be a number of numpy's; a softcap beyond the range of half precision
    changes nothing.
    """
    batch = PackedBatch.pack([Span(0, 0, 30), Span(1, 40, 41), Span(2, 20, 29)])
    store = Store(3, 8, 8, dtype)
    query = torch.randn(batch.num_tokens, HEADS, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    params = AttentionParams(**options)
    want = by_hand(query, store, batch, params)
    torch.testing.assert_close(kernel(query, store, 3, batch, params).double(), want, atol=2e-2, rtol=2e-2)


def test_queries_that_torch_negates(kernel: attention.Attention) -> None:
    batch = PackedBatch.pack([Span(0, 0, 30), Span(1, 40, 41)])
    store = Store(2, 8, 8, torch.float32)
    query = torch.randn(batch.num_tokens, HEADS, 8)
    got = kernel(torch._neg_view(query), store, 3, batch, AttentionParams())
    torch.testing.assert_close(got.double(), by_hand(-query, store, batch, AttentionParams()), atol=2e-6, rtol=1e-5)


def test_a_batch_of_one_kind(kernel: attention.Attention) -> None:
    store = Store(3, 8, 8, torch.float32)
    for spans in ([Span(0, 5, 6), Span(1, 9, 10)], [Span(0, 5, 9)], [Span(0, 0, 2), Span(1, 0, 2)]):
        batch = PackedBatch.pack(spans)
        query = torch.randn(batch.num_tokens, HEADS, 8, generator=torch.Generator().manual_seed(1))
        got = kernel(query, store, 3, batch, AttentionParams())
        torch.testing.assert_close(got.double(), by_hand(query, store, batch, AttentionParams()), atol=2e-6, rtol=1e-5)


def test_pack_puts_single_tokens_first_and_keeps_the_order() -> None:
    spans = [Span(0, 0, 2), Span(1, 4, 5), Span(2, 3, 6), Span(3, 0, 1)]
    batch = PackedBatch.pack(spans)
    assert [span.slot for span in batch.spans] == [1, 3, 0, 2]
    assert (batch.num_singles, batch.num_tokens) == (2, 7)
    assert batch.slots.tolist() == [1, 3, 0, 0, 2, 2, 2]
    assert batch.positions.tolist() == [4, 0, 0, 1, 3, 4, 5]
    assert [(span.slot, row) for span, row in batch.chunks()] == [(0, 2), (2, 4)]


def test_a_batch_in_another_order_has_single_tokens_among_its_chunks() -> None:
    batch = PackedBatch((Span(3, 0, 1), Span(0, 0, 2), Span(1, 4, 5)))
    assert (batch.num_singles, batch.num_tokens) == (1, 4)
    assert [(span.slot, row) for span, row in batch.chunks()] == [(0, 1), (1, 3)]
    assert [(group.rows, group.max_query) for group in batch.groups] == [(slice(0, 1), 1), (slice(1, 4), 2)]
    uniform = [(group.rows, group.slots.tolist()) for group in batch.uniform_groups]
    assert uniform == [(slice(0, 1), [3]), (slice(1, 3), [0]), (slice(3, 4), [1])]


@pytest.mark.parametrize(
    "spans",
    [
        [Span(3, 0, 1), Span(5, 8, 9), Span(0, 0, 2), Span(1, 4, 5)],
        [Span(0, 4, 8)],
        [Span(2, 6, 7), Span(1, 0, 1)],
    ],
)
def test_a_batch_of_columns_is_that_of_its_spans(spans: list[Span]) -> None:
    columns = SpanColumns(*torch.tensor([[s.slot, s.start, s.end] for s in spans], dtype=torch.int32).unbind(1))
    one, other = PackedBatch(tuple(spans)), PackedBatch(columns)
    assert list(other.spans) == [other.spans[i] for i in range(len(spans))] == spans
    assert (other.num_singles, other.num_tokens) == (one.num_singles, one.num_tokens)
    assert other.chunks() == one.chunks()
    for name in ("slots", "positions"):
        assert torch.equal(getattr(other, name), getattr(one, name))
    for got, expected in zip(
        (other.together, *other.groups, *other.uniform_groups),
        (one.together, *one.groups, *one.uniform_groups),
        strict=True,
    ):
        for name in ("slots", "lengths", "starts"):
            assert getattr(got, name).dtype == torch.int32
            assert torch.equal(getattr(got, name), getattr(expected, name))
        assert (got.rows, got.max_query, got.max_length) == (expected.rows, expected.max_query, expected.max_length)


def test_a_kernel_that_takes_tensors_makes_no_span_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SpanColumns, "__iter__")
    monkeypatch.delattr(SpanColumns, "__getitem__")
    columns = (torch.tensor(values, dtype=torch.int32) for values in ([1, 0], [2, 0], [3, 4]))
    batch = PackedBatch(SpanColumns(*columns))
    assert batch.together.lengths.tolist() == [3, 4]
    for values, what in (((0, 3, 3), "empty"), ((0, -1, 3), "negative")):
        with pytest.raises(AssertionError, match=f"{what} spans"):
            SpanColumns(*(torch.tensor([value], dtype=torch.int32) for value in values))


def test_masks_are_built_once_per_step() -> None:
    batch = PackedBatch.pack([Span(0, 4, 8)])
    span = batch.spans[0]
    mask = batch.mask(span, 2, 3, torch.float32)
    assert batch.mask(span, 2, 3, torch.float32) is mask
    assert (mask == 0).int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("keys", [125, 126, 127])
def test_a_row_that_is_not_finite_shows_in_no_other(keys: int) -> None:
    """torch's own products of bfloat16 let it into the row before it where the CPU has AMX."""
    query, key, value = torch.randn(1, 4, 16, 64), torch.randn(1, 2, keys, 64), torch.randn(1, 2, keys, 64)
    sinks = torch.tensor([0, math.nan, 0, 0])
    got = plain_attention(*(each.bfloat16() for each in (query, key, value)), None, AttentionParams(sinks=sinks))
    assert got.dtype == torch.bfloat16
    assert got[0].isnan().all(-1).all(-1).tolist() == [False, True, False, False]
    assert got[0, [0, 2, 3]].isfinite().all()
