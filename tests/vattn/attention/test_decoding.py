"""`decode` against float64, for every instruction set that this machine has."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import vattn
from vattn.attention import decode
from vattn.errors import ConfigError
from vattn.quantised import quantise

# Of the largest magnitude of the result: one rounding of the output, and what weights of the same type cost.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    slots: Tensor,
    starts: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same in float64, request by request."""
    group = query.shape[1] // key.shape[2]
    outputs = []
    for i, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        queries = query[starts[i] : starts[i + 1]].double()
        keys, values = (x[slot, :length].double().repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (query.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length - len(queries), length)[:, None] - torch.arange(length)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(queries), 1)], dim=-1)
        weights = scores.softmax(-1)[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def rows(slots: int, tokens: int, heads: int, dim: int, *, heads_first: bool, dtype: torch.dtype) -> Tensor:
    """Random `[slots, tokens, heads, dim]`, with odd distances between slots and tokens."""
    shape = (slots + 1, heads, tokens + 3, dim + 8) if heads_first else (slots + 1, tokens + 3, heads, dim + 8)
    made = torch.randn(shape).to(dtype)
    return (made.transpose(1, 2) if heads_first else made)[1:, 3:, :, :dim]


class Case:
    """Random shapes, lengths and options."""

    def __init__(self, seed: int, longest: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4, 7, 8, 9, 16])
        dim = draw.choice([8, 16, 40, 64, 72, 128, 200])
        v_dim = draw.choice([dim, dim, 8, 56, 128])
        count = draw.choice([1, 2, 5])
        lengths = [draw.choice([draw.randint(1, longest), 128, 129, 1]) for _ in range(count)]
        new = [min(length, draw.choice([1, 1, 2, 5, 33])) for length in lengths]
        if draw.random() < 0.4:
            new = [1] * count
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([sum(new[:i]) for i in range(count + 1)], dtype=torch.int32)
        self.slots = torch.tensor(draw.sample(range(count + 2), count), dtype=torch.int32)
        heads_first = draw.random() < 0.5
        tokens = max(lengths) + 1
        self.key = rows(count + 2, tokens, kv_heads, dim, heads_first=heads_first, dtype=self.dtype)
        self.value = rows(count + 2, tokens, kv_heads, v_dim, heads_first=heads_first, dtype=self.dtype)
        self.query = torch.randn(sum(new), kv_heads * group, dim).to(self.dtype)
        self.options = {
            "scale": draw.choice([None, 0.2, -0.05]),
            "softcap": draw.choice([None, None, 3.0, 30.0]),
            "window": draw.choice([None, None, 1, 7, 150, 5000]),
            "sinks": draw.choice([None, None, torch.randn(kv_heads * group)]),
        }

    def poison(self) -> None:
        """What is not part of a request is NaN."""
        for tensor in (self.key, self.value):
            kept = tensor.clone()
            tensor.fill_(math.nan)
            for slot, length in zip(self.slots.tolist(), self.lengths.tolist(), strict=True):
                tensor[slot, :length] = kept[slot, :length]

    def want(self) -> Tensor:
        return reference(self.query, self.key, self.value, self.lengths, self.slots, self.starts, **self.options)

    def assert_near(self, got: Tensor, want: Tensor, factor: float = 1) -> None:
        assert got.dtype == self.dtype
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < factor * TOLERANCE[self.dtype], (error, self.dtype, self.query.shape, self.options)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), threads=st.sampled_from([1, 2, 5]), longest=st.sampled_from([20, 400, 5000]))
def test_against_float64(kernels: str, seed: int, threads: int, longest: int) -> None:
    case = Case(seed, longest)
    case.poison()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = decode(
            case.query, case.key, case.value, case.lengths, slots=case.slots, starts=case.starts, **case.options
        )
    finally:
        torch.set_num_threads(before)
    case.assert_near(got, case.want())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_neither_threads_nor_other_requests_change_a_result(kernels: str, seed: int) -> None:
    """Not by a bit: the order of a sum follows from its own request."""
    case = Case(seed, 5000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(
                decode(
                    case.query, case.key, case.value, case.lengths, slots=case.slots, starts=case.starts, **case.options
                )
            )
            alone = []
            for i, (start, end) in enumerate(itertools.pairwise(case.starts.tolist())):
                alone.append(
                    decode(
                        case.query[start:end],
                        case.key,
                        case.value,
                        case.lengths[i : i + 1],
                        slots=case.slots[i : i + 1],
                        starts=torch.tensor([0, end - start], dtype=torch.int32),
                        **case.options,
                    )
                )
            results.append(torch.cat(alone))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 8, 16, 24, 256]))
def test_block_tables(kernels: str, seed: int, block_size: int) -> None:
    """Blocks in any order, of which only those of the requests are read."""
    case = Case(seed, 700)
    want = case.want()
    per_slot = -(-case.key.shape[1] // block_size)
    table = torch.randperm(len(case.key) * per_slot).view(len(case.key), per_slot)
    pools = []
    for tensor in (case.key, case.value):
        pool = tensor.new_full((table.numel() + 1, block_size, *tensor.shape[2:]), math.nan)
        for slot, length in zip(case.slots.tolist(), case.lengths.tolist(), strict=True):
            for token in range(length):
                pool[table[slot, token // block_size], token % block_size] = tensor[slot, token]
        pools.append(pool)
    got = decode(
        case.query, *pools, case.lengths, slots=case.slots, starts=case.starts, block_table=table.int(), **case.options
    )
    case.assert_near(got, want)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_codes_of_8_bits(kernels: str, seed: int) -> None:
    """As attention over dequantised keys and values, whose error is that of the codes."""
    case = Case(seed, 700)
    (key, key_scales), (value, value_scales) = quantise(case.key), quantise(case.value)
    case.key, case.value = key.double() * key_scales.double(), value.double() * value_scales.double()
    got = decode(
        case.query,
        key,
        value,
        case.lengths,
        slots=case.slots,
        starts=case.starts,
        scales=(key_scales, value_scales),
        **case.options,
    )
    # Queries have 16 bits: with heads of 200 elements and a scale of 0.2, scores are off by up to 1e-4.
    case.assert_near(got, case.want(), factor=50 if case.dtype == torch.float32 else 1)


def test_no_worse_than_torch(kernels: str) -> None:
    """The mean error against float64 is at most that of torch's SDPA, but for some of the last bit."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for length in (100, 1000, 5000):
            key, value = torch.randn(2, length, 2, 64).to(dtype), torch.randn(2, length, 2, 64).to(dtype)
            query = torch.randn(2, 8, 64).to(dtype)
            lengths = torch.full((2,), length, dtype=torch.int32)
            want = reference(query, key, value, lengths, torch.arange(2), torch.arange(3))
            folded = query.view(2, 2, 4, 64)
            theirs = scaled_dot_product_attention(folded, key.transpose(1, 2), value.transpose(1, 2)).reshape(2, 8, 64)
            errors = [float((got.double() - want).abs().mean()) for got in (decode(query, key, value, lengths), theirs)]
            assert errors[0] <= 1.2 * errors[1], (dtype, length, errors)


@pytest.mark.parametrize("kv_order", ["HND", "NHD"])
def test_nothing_past_the_last_page(kernels: str, kv_order: str) -> None:
    """Lengths around the end of a page, behind which nothing is mapped: reading there would end the process."""
    config = vattn.KVConfig(
        num_layers=1,
        num_kv_heads=2,
        head_dim=72,
        dtype=torch.bfloat16,
        max_batch_size=2,
        max_context_len=1024,
        page_size=4096,
        kv_order=kv_order,
        guard="strict",
        memory_budget="4MiB",
    )
    with vattn.KVCache(config) as cache:
        slot = cache.alloc_reqid(1)
        key, value = cache.layer(0)
        page = cache.layout.page_tokens
        for length in (1, page - 1, page, page + 1, 3 * page):
            cache.step({slot: length})
            for tensor in (key, value):
                tensor[slot, :length] = torch.randn(length, 2, 72)
            lengths, slots = torch.tensor([length], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32)
            query = torch.randn(1, 6, 72).bfloat16()
            for window in (None, 3, page // 2):
                got = decode(query, key, value, lengths, slots=slots, window=window)
                want = reference(query, key, value, lengths, slots, torch.arange(2), window=window)
                assert (got - want).abs().max() < 1e-2 * want.abs().max()


def test_nan_shows(kernels: str) -> None:
    """What is not finite comes out as NaN, in the rows that see it and in no other."""
    for where in ("query", "key", "value"):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = {
                "query": torch.randn(2, 4, 64).to(dtype),
                "key": torch.randn(2, 200, 2, 64).to(dtype),
                "value": torch.randn(2, 200, 2, 64).to(dtype),
            }
            tensors[where][1] = math.nan
            got = decode(**tensors, lengths=torch.tensor([200, 150], dtype=torch.int32))
            assert got[0].isfinite().all()
            assert got[1].isnan().all()
            codes = {name: quantise(tensors[name]) for name in ("key", "value")}
            got = decode(
                tensors["query"],
                codes["key"][0],
                codes["value"][0],
                torch.tensor([200, 150], dtype=torch.int32),
                scales=(codes["key"][1], codes["value"][1]),
            )
            assert got[0].isfinite().all()
            assert got[1].isnan().all()


def arguments() -> dict[str, Tensor]:
    return {
        "query": torch.randn(3, 4, 16),
        "key": torch.randn(3, 32, 2, 16),
        "value": torch.randn(3, 32, 2, 8),
        "lengths": torch.tensor([1, 32, 7], dtype=torch.int32),
        "slots": torch.tensor([2, 0, 1], dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.randn(3, 64)}, "give"),
        ({"query": torch.randn(3, 4, 8)}, "do not fit"),
        ({"value": torch.randn(3, 31, 2, 8)}, "do not fit"),
        ({"query": torch.randn(3, 3, 16)}, "evenly"),
        ({"value": torch.randn(3, 32, 2, 4)}, "multiple of 8"),
        ({"query": torch.randn(3, 4, 16).double()}, "float32"),
        ({"key": torch.randn(3, 32, 2, 16).half()}, "float32"),
        ({"key": torch.randn(3, 32, 16, 2).transpose(2, 3)}, "neighbours"),
        ({"lengths": torch.tensor([1, 32, 7])}, "int32"),
        ({"lengths": torch.tensor([1, 33, 7], dtype=torch.int32)}, "room for 32"),
        ({"lengths": torch.tensor([0, 32, 7], dtype=torch.int32)}, "new tokens"),
        ({"slots": torch.tensor([0, 1, 3], dtype=torch.int32)}, "there are 3"),
        ({"slots": torch.tensor([0, 1], dtype=torch.int32)}, r"\[3\]"),
        ({"starts": torch.tensor([0, 1, 1, 3], dtype=torch.int32)}, "one or more"),
        ({"starts": torch.tensor([0, 1, 2, 4], dtype=torch.int32)}, "rows 0 to 4"),
        ({"window": 0}, "window=0"),
        ({"softcap": 0.0}, "softcap=0"),
        ({"softcap": -30.0}, "softcap=-30"),
        ({"softcap": math.nan}, "softcap=nan"),
        ({"softcap": math.inf}, "softcap=inf"),
        ({"sinks": torch.zeros(3)}, r"\[4\]"),
        ({"out": torch.empty(3, 4, 16)}, r"\[3, 4, 8\]"),
        ({"out": torch.empty(3, 8, 4).transpose(1, 2)}, "neighbours"),
        ({"scales": (torch.ones(3, 32, 2, 1), torch.ones(3, 32, 2, 1))}, "int8"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32) + 3}, "there are 3"),
        ({"block_table": torch.zeros(3, dtype=torch.int32)}, "block_table"),
    ],
)
def test_what_is_refused(change: dict[str, Tensor], message: str) -> None:
    given = arguments() | change
    out = given.setdefault("out", torch.full((3, 4, 8), 7.0))
    before = out.clone()
    with pytest.raises(ConfigError, match=message):
        decode(**given)  # type: ignore[arg-type]
    assert torch.equal(out, before) or change.keys() == {"out"}


def test_no_gradient_flows() -> None:
    given = arguments()
    for name in ("query", "key", "value"):
        given[name].requires_grad_()
    assert not decode(**given).requires_grad


def test_no_request_no_row() -> None:
    given = arguments() | {"query": torch.randn(0, 4, 16), "lengths": torch.zeros(0, dtype=torch.int32)}
    assert decode(**given | {"slots": torch.zeros(0, dtype=torch.int32)}).shape == (0, 4, 8)
