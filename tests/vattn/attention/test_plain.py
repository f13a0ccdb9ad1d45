"""`decode` against float64, for every instruction set that this machine has."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import vattn
from tests.support.cpu_kernels import taking_keys
from tests.support.effort import effort
from vattn.attention import decode
from vattn.errors import ConfigError
from vattn.quantised import quantise, quantised_groups

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


@settings(max_examples=effort(25, 60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    threads=st.sampled_from([1, 2, 5]),
    longest=st.sampled_from([20, 400, 5000]),
    keys=st.sampled_from(["", "in_place", "panels"]),
)
def test_against_float64(kernels: str, seed: int, threads: int, longest: int, keys: str) -> None:
    case = Case(seed, longest)
    case.poison()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with taking_keys(keys):
            got = decode(
                case.query, case.key, case.value, case.lengths, slots=case.slots, starts=case.starts, **case.options
            )
    finally:
        torch.set_num_threads(before)
    case.assert_near(got, case.want())


@pytest.mark.parametrize("new", [1, 3, 9, 40])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_what_an_earlier_call_left(kernels: str, new: int, head_dim: int) -> None:
    """What kernels keep between calls, and what pads their tiles, takes part in nothing."""
    generator = torch.Generator().manual_seed(new)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).bfloat16()

    query, key, value = drawn(new, 14, head_dim), drawn(1, 300, 2, head_dim), drawn(1, 300, 2, head_dim)
    starts, length = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, new], [245]))
    ends = torch.tensor([0, 128], dtype=torch.int32), torch.tensor([300], dtype=torch.int32)
    nothing = [torch.full_like(each, math.nan) for each in (drawn(128, 14, head_dim), key, value)]
    results = []
    for _ in range(2):
        results.append(decode(query, key, value, length, starts=starts))
        decode(*nothing, ends[1], starts=ends[0])
    want = reference(query, key, value, length, torch.tensor([0]), starts)
    assert (results[0].double() - want).abs().max() / want.abs().max() < TOLERANCE[torch.bfloat16]
    assert torch.equal(*results)


@settings(max_examples=effort(8, 20), deadline=None)
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
    """As attention over dequantised keys and values, whose error is that of the codes; the same bits however keys are
    taken.
    """
    case = Case(seed, 700)
    (key, key_scales), (value, value_scales) = quantise(case.key), quantise(case.value)
    case.key, case.value = key.double() * key_scales.double(), value.double() * value_scales.double()

    def taking(keys: str) -> Tensor:
        with taking_keys(keys):
            return decode(
                case.query,
                key,
                value,
                case.lengths,
                slots=case.slots,
                starts=case.starts,
                scales=(key_scales, value_scales),
                **case.options,
            )

    got = taking("panels")
    assert torch.equal(got, taking("in_place"))
    # Queries have 16 bits: with heads of 200 elements and a scale of 0.2, scores are off by up to 1e-4.
    case.assert_near(got, case.want(), factor=50 if case.dtype == torch.float32 else 1)


@pytest.mark.parametrize("new", [1, 9])
@pytest.mark.parametrize("head_dim", [512, 520, 528, 576, 1024])
def test_codes_of_large_heads(kernels: str, head_dim: int, new: int) -> None:
    """Rows are constant, so that the sums of products are as large as they can be."""
    codes = torch.tensor([127, 0, -128, 100], dtype=torch.int8).repeat(3).view(1, 12, 1, 1).repeat(1, 1, 1, head_dim)
    scales = torch.full((1, 12, 1, 1), 1 / 127)
    query = torch.tensor([1.0, -1.0]).view(1, 2, 1).repeat(new, 1, head_dim)
    lengths, starts = torch.tensor([12], dtype=torch.int32), torch.tensor([0, new], dtype=torch.int32)
    rows = codes.double() * scales.double()
    want = reference(query, rows, rows, lengths, torch.tensor([0]), starts)
    for keys in ("in_place", "panels"):
        with taking_keys(keys):
            got = decode(query, codes, codes, lengths, starts=starts, scales=(scales, scales))
        assert (got.double() - want).abs().max() < 1e-3


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


@pytest.mark.parametrize("kv_order", ["HND", "NHD"])
def test_nothing_past_the_last_scale(kernels: str, kv_order: str) -> None:
    """As above, for bfloat16 scales: the last one ends with the page."""
    groups, places = quantised_groups([vattn.TensorGroup(layers=[0], num_kv_heads=4, head_dim=64)], torch.bfloat16)
    config = vattn.KVConfig(
        groups=groups,
        dtype=torch.bfloat16,
        max_batch_size=2,
        max_context_len=1024,
        page_size=4096,
        kv_order=kv_order,
        layout="layer",
        guard="strict",
        eager_pages=0,
        overlap=False,
        memory_budget="16MiB",
    )
    with vattn.KVCache(config) as cache:
        slot = cache.alloc_reqid(1)
        codes, scales = cache.layer(0), places[0].views(cache.layer(places[0].layer)[0])
        in_a_page = 4096 // (2 * 2 * 4)
        for length in (1, in_a_page - 1, in_a_page, 3 * in_a_page):
            cache.step({slot: length})
            want = []
            for tensor, scale in zip(codes, scales, strict=True):
                tensor[slot, :length], scale[slot, :length] = quantise(torch.randn(length, 4, 64).bfloat16())
                want.append((tensor[slot, :length].double() * scale[slot, :length].double())[None])
            lengths, slots = torch.tensor([length], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32)
            query = torch.randn(1, 8, 64).bfloat16()
            got = decode(query, *codes, lengths, slots=slots, scales=scales)
            expected = reference(query, *want, lengths, torch.arange(1), torch.arange(2))
            assert (got - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.parametrize("blocks", [False, True])
def test_the_longest_length(kernels: str, blocks: bool) -> None:
    """The largest number of 32 bits, over a token that is repeated."""
    most = 2**31 - 1
    key, value = (torch.randn(1, 1, 1, 8).expand(1, most, 1, 8) for _ in range(2))
    table = torch.zeros(1, 1, dtype=torch.int32) if blocks else None
    for window in (1, 130, 1000):
        lengths = torch.tensor([most], dtype=torch.int32)
        got = decode(torch.randn(1, 1, 8), key, value, lengths, window=window, block_table=table)
        torch.testing.assert_close(got[0], value[0, 0])


@pytest.mark.parametrize("size", [-1e4, 1e4, -5e4, 3e5, -1e8, 1e8, -1e15, 1e15])
def test_large_scores(kernels: str, size: float) -> None:
    """Keys with equal scores share the weight; where they differ, all of it is the largest one's."""
    query, key = torch.full((1, 1, 8), abs(size)), torch.full((1, 300, 1, 8), size)
    value, lengths = torch.randn(1, 300, 1, 8), torch.tensor([300], dtype=torch.int32)
    torch.testing.assert_close(decode(query, key, value, lengths)[0, 0], value[0, :, 0].mean(0), atol=1e-5, rtol=1e-5)
    key[0, 170] *= 1.01 if size > 0 else 0.99
    torch.testing.assert_close(decode(query, key, value, lengths)[0, 0], value[0, 170, 0])


@pytest.mark.parametrize("scale", [1e38, 2.4e38, 3.4e38])
def test_scales_at_the_end_of_float32(kernels: str, scale: float) -> None:
    """Equal scores share the weight; of others, all of it is the largest one's."""
    query, key, value = torch.ones(1, 1, 8), torch.full((1, 300, 1, 8), 0.125), torch.randn(1, 300, 1, 8)
    lengths = torch.tensor([300], dtype=torch.int32)
    got = decode(query, key, value, lengths, scale=scale)
    torch.testing.assert_close(got[0, 0], value[0, :, 0].mean(0), atol=1e-5, rtol=1e-5)
    key[0, 170] *= 1.01
    torch.testing.assert_close(decode(query, key, value, lengths, scale=scale)[0, 0], value[0, 170, 0])


@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 1.0, 50.0, 1e3, 1e5, 1e8, 1e20, 1e38])
def test_any_softcap(kernels: str, softcap: float) -> None:
    """Large ones cost no digits: scores that are small beside them stay as they are."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 64), torch.randn(1, 300, 4, 64), torch.randn(1, 300, 4, 64)
    lengths = torch.tensor([300], dtype=torch.int32)
    want = reference(query, key, value, lengths, torch.arange(1), torch.arange(2), softcap=softcap)
    error = (decode(query, key, value, lengths, softcap=softcap).double() - want).abs().max()
    assert error < 2e-6, error


@pytest.mark.parametrize("logit", [-math.inf, -1e38, -3.0, 100.0, 1e38])
def test_any_sink(kernels: str, logit: float) -> None:
    """Beside any scale, alone and over several parts of a request that threads share."""
    query, key, value = torch.randn(1, 2, 16), torch.randn(1, 900, 1, 16), torch.randn(1, 900, 1, 16) + 1
    sinks = torch.tensor([logit, 0.5])
    threads = torch.get_num_threads()
    try:
        for scale in (None, 1e-5, 1e-7, 1e-40, -1.0, 0.0):
            for torch_threads, length in ((1, 1), (1, 200), (3, 900)):
                torch.set_num_threads(torch_threads)
                lengths = torch.tensor([length], dtype=torch.int32)
                got = decode(query, key, value, lengths, sinks=sinks, scale=scale)
                want = reference(query, key, value, lengths, torch.arange(1), torch.arange(2), sinks=sinks, scale=scale)
                torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)
    finally:
        torch.set_num_threads(threads)


def test_sinks_that_are_not_finite_show(kernels: str) -> None:
    query, key, value = torch.randn(2, 3, 16), torch.randn(2, 200, 1, 16), torch.randn(2, 200, 1, 16)
    lengths = torch.tensor([200, 1], dtype=torch.int32)
    got = decode(query, key, value, lengths, sinks=torch.tensor([math.nan, 0.0, math.inf]))
    assert got[:, [0, 2]].isnan().all()
    assert got[:, 1].isfinite().all()


def test_scales_below_zero_show(kernels: str) -> None:
    """In the rows that see them."""
    codes, scales = quantise(torch.randn(2, 50, 1, 16))
    for i in range(2):
        wrong = scales.clone()
        wrong[1, 30] = -1
        pair = (wrong, scales) if i == 0 else (scales, wrong)
        for length, seen in ((50, True), (30, False)):
            lengths = torch.tensor([50, length], dtype=torch.int32)
            got = decode(torch.randn(2, 3, 16), codes, codes, lengths, scales=pair)
            assert got[0].isfinite().all()
            assert got[1].isnan().all() == seen


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


class Unwilling(Fraction):
    """A number that raises whatever is asked of it."""

    def __float__(self) -> float:
        raise ValueError("no")

    __abs__ = __le__ = __ge__ = __repr__ = __float__  # type: ignore[assignment]


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
        ({"starts": torch.tensor([0, 2**31 - 1, -(2**31), 3], dtype=torch.int32)}, "follow each other"),
        ({"starts": torch.tensor([-1, 1, 2, 3], dtype=torch.int32)}, "rows -1 to 3"),
        ({"lengths": torch.tensor(3, dtype=torch.int32)}, "lengths has shape"),
        ({"lengths": torch.tensor([1, -(2**31), 7], dtype=torch.int32)}, "new tokens"),
        ({"slots": torch.tensor([0, -1, 1], dtype=torch.int32)}, "there are 3"),
        ({"window": 0}, "window=0"),
        ({"window": -(10**400)}, "hides every key"),
        ({"window": 1.5}, "window: 1.5"),
        ({"window": True}, "window: True"),
        ({"scale": math.nan}, "scale=nan"),
        ({"scale": -math.inf}, "scale=-inf"),
        ({"scale": 1e39}, r"scale=1e\+39"),
        ({"scale": 10**400}, "scale="),
        ({"scale": "0.5"}, "scale='0.5'"),
        ({"scale": True}, "scale=True"),
        ({"scale": np.float16("inf")}, "scale=np.float16.inf"),
        ({"scale": Unwilling(1)}, "scale=a Unwilling"),
        ({"softcap": np.float16("inf")}, "softcap=np.float16.inf"),
        ({"softcap": Unwilling(1)}, "softcap=a Unwilling"),
        ({"softcap": 1e39}, r"softcap=1e\+39"),
        ({"softcap": 1e-39}, "softcap=1e-39"),
        ({"softcap": torch.tensor(30.0)}, r"softcap=tensor\(30"),
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
        (
            {
                "block_table": torch.zeros(3, 1, dtype=torch.int32),
                "key": torch.randn(3, 0, 2, 16),
                "value": torch.randn(3, 0, 2, 8),
            },
            "blocks have 0 tokens",
        ),
        ({"scales": (torch.ones(3, 32, 2, 1),)}, "scales="),
        ({"scales": torch.ones(2, 3, 32, 2, 1)}, "scales="),
        ({"query": torch.randn(1, 1, 16).expand(3, 2**25, 16)}, "count up to"),
        (
            {
                "query": torch.ones(1, 1, 2**18).expand(3, 4, -1),
                "key": torch.ones(1, 1, 1, 2**18).char().expand(3, 32, 2, -1),
                "value": torch.ones(3, 32, 2, 8).char(),
                "scales": (torch.ones(3, 32, 2, 1), torch.ones(3, 32, 2, 1)),
            },
            "heads of 262144 codes",
        ),
        ({"key": torch.randn(1, 1, 1, 16).expand(3, 2**31, 2, 16)}, "count up to"),
    ],
)
def test_what_is_refused(change: dict[str, Tensor], message: str) -> None:
    given = arguments() | change
    out = given.setdefault("out", torch.full((3, 4, 8), 7.0))
    before = out.clone()
    with pytest.raises(ConfigError, match=message):
        decode(**given)  # type: ignore[arg-type]
    assert torch.equal(out, before) or change.keys() == {"out"}


class Wrapper(Tensor):
    """A subclass that has no memory, but a tensor that has."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.inner if isinstance(each, Wrapper) else each for each in args), **(kwargs or {}))


def emptied(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(tensor: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


NOT_PLAIN: dict[str, Callable[[Tensor], object]] = {
    "text": lambda tensor: "query",
    "number": lambda tensor: 1.5,
    "bool": lambda tensor: True,
    "complex": lambda tensor: 1j,
    "list": lambda tensor: tensor.tolist(),
    "array": lambda tensor: tensor.numpy(),
    "none": lambda tensor: None,
    "0-d": lambda tensor: tensor.flatten()[0],
    "another dimension": lambda tensor: tensor[None],
    "a longer row": lambda tensor: torch.cat([tensor, tensor], dim=-1),
    "float64": lambda tensor: tensor.double(),
    "int64": lambda tensor: tensor.long(),
    "bools": lambda tensor: tensor.bool(),
    "complex64": lambda tensor: tensor.to(torch.complex64),
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "nested": lambda tensor: torch.nested.as_nested_tensor(list(tensor.float())),
    "jagged": lambda tensor: torch.nested.as_nested_tensor(list(tensor.float()[:, None]), layout=torch.jagged),
    "negated": lambda tensor: torch._neg_view(tensor),
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "quantised": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    "fake": fake,
    "wrapper": Wrapper,
    "emptied": lambda tensor: emptied(tensor.clone()),
}
# Arguments that may be left out, and those that pass for others.
FINE = {("out", "none"), ("sinks", "none"), ("starts", "none"), ("slots", "none"), ("block_table", "none")} | {
    ("block_table", "a longer row")
}


@pytest.mark.filterwarnings("ignore")  # of torch's prototypes
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_no_plain_tensor(kind: str) -> None:
    """As every argument that is a tensor; scales go with codes, the others with floats."""
    plain = arguments() | {
        "starts": torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        "sinks": torch.randn(4),
        "block_table": torch.zeros(3, 2, dtype=torch.int32),
        "out": torch.zeros(3, 4, 8),
    }
    codes = {"key": torch.zeros(3, 32, 2, 16).char(), "value": torch.zeros(3, 32, 2, 8).char()}
    scales = torch.ones(3, 32, 2, 1), torch.ones(3, 32, 2, 1)
    decode(**plain)
    decode(**plain | codes, scales=scales)
    for name, tensor in plain.items():
        changed = plain | {name: NOT_PLAIN[kind](tensor)}
        if (name, kind) in FINE:
            decode(**changed)  # type: ignore[arg-type]
            continue
        with pytest.raises(ConfigError):
            decode(**changed)  # type: ignore[arg-type]
    for i in range(2):
        pair = list(scales)
        pair[i] = NOT_PLAIN[kind](scales[i])  # type: ignore[call-overload]
        with pytest.raises(ConfigError):
            decode(**plain | codes, scales=tuple(pair))  # type: ignore[arg-type]


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_transforms_of_functions_are_refused(transform: Callable[..., Any]) -> None:
    given = arguments()

    def attended(query: Tensor) -> Tensor:
        return decode(query, **{name: given[name] for name in given if name != "query"}).sum()

    query = given["query"] if transform is torch.func.grad else given["query"][None]
    with pytest.raises(ConfigError, match="plain tensor"):
        transform(attended)(query)


def test_subclasses_with_memory_are_read() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("it was asked")

    given = arguments()
    want = decode(**given)
    for wrap in (torch.nn.Parameter, lambda tensor: tensor.as_subclass(Loud)):
        got = decode(**given | {name: wrap(given[name]) for name in ("query", "key", "value")})
        assert type(got) is Tensor
        assert torch.equal(got, want)
        assert not got.requires_grad


def test_memory_that_is_written_is_not_read() -> None:
    given = arguments() | {"value": torch.randn(3, 32, 2, 16)}
    want = decode(**given)
    query = given["query"].clone()
    assert decode(**given | {"query": query}, out=query) is query
    assert torch.equal(query, want)
    room = torch.zeros(300)
    room[:192].view(3, 4, 16)[:] = given["query"]
    shifted = {"query": room[:192].view(3, 4, 16), "out": room[16:208].view(3, 4, 16)}
    with pytest.raises(ConfigError, match="out shares memory with query"):
        decode(**given | shifted)
    with pytest.raises(ConfigError, match="out shares memory with value"):
        decode(**given, out=given["value"].view(-1)[:192].view(3, 4, 16))
    with pytest.raises(ConfigError, match="out shares memory with sinks"):
        decode(**given, out=room[:192].view(3, 4, 16), sinks=room[188:192])


def test_autograd_notices_what_is_written() -> None:
    with pytest.raises(ConfigError, match="gradients"):
        decode(**arguments(), out=torch.zeros(3, 4, 8, requires_grad=True))
    out, weight = torch.zeros(3, 4, 8), torch.ones(3, 4, 8, requires_grad=True)
    product = (weight * out).sum()
    decode(**arguments(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        decode(**arguments(), out=torch.zeros(3, 4, 8))


def test_no_gradient_flows() -> None:
    given = arguments()
    for name in ("query", "key", "value"):
        given[name].requires_grad_()
    assert not decode(**given).requires_grad


def test_no_request_no_row() -> None:
    given = arguments() | {"query": torch.randn(0, 4, 16), "lengths": torch.zeros(0, dtype=torch.int32)}
    assert decode(**given | {"slots": torch.zeros(0, dtype=torch.int32)}).shape == (0, 4, 8)
