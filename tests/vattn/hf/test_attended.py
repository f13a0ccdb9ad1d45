"""What SDPA computes by vattn's kernels, for which masks, and what other operations see of codes and repeated keys."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

from vattn import cpu
from vattn.hf.attended import Attended, Coded, Repeated, as_plain
from vattn.quantised import dequantise, quantise


def coded(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Coded, Tensor]:
    """Coded rows, and what they stand for."""
    codes, scales = quantise(torch.randn(*shape).to(dtype))
    return Coded(codes, scales, dtype), dequantise(codes, scales, torch.empty(codes.shape, dtype=dtype))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_decode_steps_read_codes(dtype: torch.dtype, tolerance: float) -> None:
    keys, plain_keys = coded(2, 3, 300, 64, dtype=dtype)
    values, plain_values = coded(2, 3, 300, 40, dtype=dtype)
    query = torch.randn(2, 12, 1, 64).to(dtype)
    output = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    expected = scaled_dot_product_attention(query.double(), plain_keys.double(), plain_values.double(), enable_gqa=True)
    assert type(output) is Tensor
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    assert not keys.is_read
    assert not values.is_read


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What the kernels are called with."""
    spy = Mock(side_effect=cpu.attend)
    monkeypatch.setattr(cpu, "attend", spy)
    return spy


def rows(order: str, hidden: list[int], tokens: int, heads: int, head_dim: int) -> Tensor:
    """Keys or values `[batch, heads, tokens, head_dim]` in larger memory, NaN where they are hidden, or no tokens."""
    batch, room = len(hidden), tokens + 7
    shape = (batch, room, heads, head_dim) if order == "NHD" else (batch, heads, room, head_dim)
    memory = torch.full(shape, torch.nan)
    shown = (memory.transpose(1, 2) if order == "NHD" else memory)[:, :, :tokens]
    for row, first in zip(shown, hidden, strict=True):
        row[:, first:] = torch.randn(heads, tokens - first, head_dim)
    return shown


def padding(hidden: list[int], tokens: int) -> Tensor:
    return torch.tensor([[[[token >= first for token in range(tokens)]]] for first in hidden])


def exactly(query: Tensor, keys: Tensor, values: Tensor, hidden: list[int]) -> Tensor:
    """In float64, sequence by sequence, without what is hidden."""
    return torch.cat(
        [
            scaled_dot_product_attention(
                query[[row]].double(),
                *(each[[row], :, first:].double() for each in (keys, values)),
                enable_gqa=True,
            )
            for row, first in enumerate(hidden)
        ]
    ).float()


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("hidden", [[0, 0, 0], [3, 0, 1], [7], [0, 49]])
def test_padding_on_the_left(order: str, hidden: list[int], folded: bool, native: Mock) -> None:
    """As a step of transformers has it, whose queries are folded where heads are grouped."""
    keys, values = (rows(order, hidden, 50, 2, head_dim) for head_dim in (16, 24))
    query = torch.randn(len(hidden), 6, 1, 16)
    expected = exactly(query, keys, values, hidden)
    asked, gqa = (query.view(len(hidden), 2, 3, 16), False) if folded else (query, True)
    for _ in range(2):
        output = scaled_dot_product_attention(
            asked, keys.as_subclass(Attended), values, padding(hidden, 50), enable_gqa=gqa
        )
        torch.testing.assert_close(output.reshape(expected.shape), expected)
    assert native.call_count == 2


def causal(hidden: list[int], queries: int, tokens: int, window: int = 10**6) -> Tensor:
    """The mask of the last `queries` of `tokens` tokens."""
    place = torch.arange(tokens)
    query = place[tokens - queries :, None]
    return (place <= query) & (place > query - window) & (place >= torch.tensor(hidden)[:, None, None, None])


def repeated(rows: Tensor, times: int) -> Tensor:
    """As transformers repeats keys and values of grouped heads."""
    batch, heads, tokens, head_dim = rows.shape
    opened = rows[:, :, None, :, :].expand(batch, heads, times, tokens, head_dim)
    return opened.reshape(batch, heads * times, tokens, head_dim)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("hidden", "queries", "window"),
    [
        ([0, 0], 50, None),  # a prompt
        ([0, 0], 7, None),  # a chunk, or drafts
        ([30, 0], 7, None),
        ([45, 2], 7, None),  # some queries are of padding
        ([9, 0, 1], 50, None),
        ([0, 0], 50, 20),
        ([0], 7, 20),
    ],
)
def test_several_queries_with_a_mask(
    order: str, hidden: list[int], queries: int, window: int | None, times: int, native: Mock
) -> None:
    keys, values = (rows(order, hidden, 50, 2, head_dim) for head_dim in (16, 24))
    for row, first in enumerate(hidden):  # there is something in padding, too
        keys[row, :, :first], values[row, :, :first] = torch.randn(2, first, 16), torch.randn(2, first, 24)
    query, mask = torch.randn(len(hidden), 2 * times, queries, 16), causal(hidden, queries, 50, window or 50)
    exact = [repeated(each, times).double() for each in (keys, values)]
    expected = scaled_dot_product_attention(query.double(), *exact, mask).float()
    with torch.no_grad():
        ours = [repeated(each.as_subclass(Attended), times) for each in (keys, values)]
    output = scaled_dot_product_attention(query, *ours, mask)
    torch.testing.assert_close(output, expected)
    assert native.call_count == 1
    if times > 1:
        assert all(isinstance(each, Repeated) and not each.is_read for each in ours)


@pytest.mark.parametrize("kind", ["plain", "coded"])
def test_a_prompt(kind: str, native: Mock) -> None:
    keys, plain_keys = coded(2, 2, 50, 16)
    values, plain_values = coded(2, 2, 50, 24)
    query = torch.randn(2, 50, 6, 16).transpose(1, 2)
    expected = scaled_dot_product_attention(
        *(each.double() for each in (query, plain_keys, plain_values)), is_causal=True, enable_gqa=True
    )
    asked = (keys, values) if kind == "coded" else (plain_keys.as_subclass(Attended), plain_values)
    output = scaled_dot_product_attention(query, *asked, is_causal=True, enable_gqa=True)
    tolerance = 5e-4 if kind == "coded" else 1e-5  # the kernels read codes with queries of 16 bits
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    assert native.call_count == 1
    assert not keys.is_read


def test_repeated_keys_are_keys() -> None:
    """For anything else than SDPA; and where gradients may be asked for, they are torch's from the start."""
    plain, codes = torch.randn(2, 3, 5, 8), coded(2, 3, 5, 8)[0]
    for rows in (plain.as_subclass(Attended), codes):
        with torch.no_grad():
            lazy = repeated(rows, 4)
        assert isinstance(lazy, Repeated)
        assert torch.equal(lazy + 0, repeated(as_plain(rows), 4))
        assert torch.equal(copy.deepcopy(lazy), repeated(as_plain(rows), 4))
        assert repr(lazy) == repr(repeated(as_plain(rows), 4))
        assert not isinstance(repeated(rows, 4), Repeated)
    rows = plain.as_subclass(Attended)
    with torch.no_grad():
        for other in (
            rows[:, :, None, :2, :],
            rows[:, :, None],
            rows[:, :, None, :, :].reshape(6, 5, 8),
            rows[:, :, None, :, :].expand(2, 3, 4, 5, 8)[0],
            rows[:, :, None, :, :].expand(2, 3, 4, 5, 8).reshape(2, 3, 20, 8),
            rows[:, :, None, :, :].expand(2, 3, -1, 5, 8),
        ):
            assert not isinstance(other, Repeated)
    torch.testing.assert_close(rows[:, :, None, :, :].expand(2, 3, 4, 5, 8)[1, 2, 3], plain[1, 2])


def test_what_is_written_to_repeated_values_is_used() -> None:
    query, keys, values = torch.randn(1, 6, 7, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    with torch.no_grad():
        ours = [repeated(each.as_subclass(Attended), 3) for each in (keys, values)]
        ours[1][:, 0] = 0
        output = scaled_dot_product_attention(query, *ours, causal([0], 7, 50))
        opened = values.as_subclass(Attended)[:, :, None, :, :]
        opened[:, 1] = 0
        assert not repeated(opened.squeeze(2), 3)[:, 3:].any()
        again = opened.expand(1, 2, 3, 50, 16).reshape(1, 6, 50, 16)
    assert not output[:, 0].any()
    assert output[:, 1:].any()
    assert not again[:, 3:].any()


@pytest.mark.parametrize("heads", [2, 12])
def test_queries_of_other_heads_than_are_repeated(heads: int) -> None:
    keys, values = torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    with torch.no_grad():
        ours = [repeated(each.as_subclass(Attended), 3) for each in (keys, values)]
        with pytest.raises(RuntimeError):
            scaled_dot_product_attention(torch.randn(1, heads, 7, 16), *ours, causal([0], 7, 50))
        opened = [each.as_subclass(Attended)[:, :, None, :, :] for each in (keys, values)]
        output = scaled_dot_product_attention(query := torch.randn(1, 2, 1, 7, 16), *opened)
    torch.testing.assert_close(output, scaled_dot_product_attention(query, keys[:, :, None], values[:, :, None]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of its own kernel under vmap
def test_masks_without_memory_are_torchs() -> None:
    query, keys, values = (torch.randn(1, 2, length, 16) for length in (1, 50, 50))
    masks = torch.rand(3, 1, 1, 1, 50) > 0.5
    output = torch.vmap(lambda mask: scaled_dot_product_attention(query, keys.as_subclass(Attended), values, mask))(
        masks
    )
    expected = [scaled_dot_product_attention(query, keys, values, mask) for mask in masks]
    torch.testing.assert_close(as_plain(output), torch.stack(expected))


def test_only_keys_are_repeated(native: Mock) -> None:
    query, keys, values = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 4, 50, 16)
    with torch.no_grad():
        lazy = repeated(keys.as_subclass(Attended), 2)
    output = scaled_dot_product_attention(query, lazy, values)
    torch.testing.assert_close(output, scaled_dot_product_attention(query, repeated(keys, 2), values))


def test_a_mask_that_changes_between_layers(native: Mock) -> None:
    mask = padding([5, 0], 50)
    for hidden in ([5, 0], [5, 9], [0, 9]):
        mask.copy_(padding(hidden, 50))
        query, keys, values = torch.randn(2, 2, 1, 16), rows("HND", hidden, 50, 2, 16), rows("HND", hidden, 50, 2, 16)
        output = scaled_dot_product_attention(query, keys.as_subclass(Attended), values, mask)
        torch.testing.assert_close(output, exactly(query, keys, values, hidden))
    assert native.call_count == 3


def _masks() -> dict[str, Tensor]:
    hole, right, ragged = torch.ones(3, 2, 1, 1, 50, dtype=torch.bool)
    hole[1, ..., 20] = False
    right[0, ..., 40:] = False
    ragged[:, ..., :9] = torch.rand(9) > 0.5
    ragged[:, ..., :2] = torch.tensor([True, False])
    everything = padding([0, 50], 50)
    by_head = torch.ones(2, 4, 1, 50, dtype=torch.bool)
    by_head[:, 1, :, :5] = False
    seen_by_another = causal([0, 0], 50, 50)[:, :, 3:4]
    added = torch.randn(2, 1, 1, 50)
    return dict(locals())


@pytest.mark.parametrize(
    "change", [(0, 0, 3, 2, False), (1, 0, 0, 49, True), (0, 0, 6, 49, False), (1, 0, slice(None), 10, False)]
)
def test_masks_of_several_queries_that_the_kernels_do_not_know(
    change: tuple[int | slice | bool, ...], native: Mock
) -> None:
    query, keys, values = torch.randn(2, 4, 7, 16), torch.randn(2, 4, 50, 16), torch.randn(2, 4, 50, 16)
    mask = causal([0, 4], 7, 50)
    mask[change[:-1]] = change[-1]
    output = scaled_dot_product_attention(query, keys.as_subclass(Attended), values, mask)
    torch.testing.assert_close(output, scaled_dot_product_attention(query, keys, values, mask))
    assert native.call_count == 0


@pytest.mark.parametrize("name", list(_masks()))
def test_masks_that_the_kernels_do_not_know(name: str, native: Mock) -> None:
    query, keys, values = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 50, 16), torch.randn(2, 4, 50, 16)
    mask = _masks()[name]
    output = scaled_dot_product_attention(query, keys.as_subclass(Attended), values, mask)
    torch.testing.assert_close(output, scaled_dot_product_attention(query, keys, values, mask), equal_nan=True)
    assert native.call_count == 0


def test_codes_whose_sequences_are_padded(native: Mock) -> None:
    """Codes and scales are not the same number of tokens apart: a copy, but of a full window, which hides nothing."""
    codes, scales = quantise(torch.randn(2, 3, 57, 64))
    memory = scales.transpose(1, 2).contiguous().transpose(1, 2)
    keys, values = (Coded(codes[:, :, :50], memory[:, :, :50], torch.float32) for _ in range(2))
    query = torch.randn(2, 3, 1, 64)
    for hidden, calls in (([0, 0], 1), ([4, 0], 1)):
        output = scaled_dot_product_attention(query, keys, values, padding(hidden, 50))
        plain = dequantise(codes, scales, torch.empty(codes.shape))[:, :, :50]
        torch.testing.assert_close(output, exactly(query, plain, plain, hidden), atol=5e-4, rtol=5e-4)
        assert native.call_count == calls


@pytest.mark.parametrize("how", [{"attn_mask": torch.zeros(1, 1, 1, 50)}, {"dropout_p": 1e-9}])
def test_steps_that_the_kernels_cannot_compute(how: dict[str, object]) -> None:
    keys, plain_keys = coded(1, 2, 50, 16)
    values, plain_values = coded(1, 2, 50, 16)
    query = torch.randn(1, 2, 1, 16)
    output = scaled_dot_product_attention(query, keys, values, **how)  # type: ignore[arg-type]
    torch.testing.assert_close(output, scaled_dot_product_attention(query, plain_keys, plain_values))
    assert keys.is_read


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of its own kernel under vmap
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("coded_rows", [False, True])
def test_masks_that_know_themselves_what_they_hide(bias: Callable[[int, int], Tensor], coded_rows: bool) -> None:
    """torch's biases are tensors without contents: what they hide is in what they do when SDPA gets them."""
    query = torch.randn(1, 2, 3, 16)
    keys, values = (coded(1, 2, 9, 16) for _ in range(2))
    expected = scaled_dot_product_attention(query, keys[1], values[1], attn_mask=bias(3, 9))
    given = [each[0] if coded_rows else each[1].as_subclass(Attended) for each in (keys, values)]
    torch.testing.assert_close(scaled_dot_product_attention(query, *given, attn_mask=bias(3, 9)), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_queries_without_memory_are_torchs() -> None:
    keys, values = (torch.randn(1, 2, 50, 16).as_subclass(Attended) for _ in range(2))
    with pytest.raises(RuntimeError, match="same device"):
        scaled_dot_product_attention(torch.empty(1, 2, 1, 16, device="meta"), keys, values)
    queries = torch.randn(3, 1, 2, 1, 16)
    output = torch.vmap(lambda query: scaled_dot_product_attention(query, keys, values))(queries)
    expected = [scaled_dot_product_attention(query, *map(as_plain, (keys, values))) for query in queries]
    torch.testing.assert_close(as_plain(output), torch.stack(expected))


def test_views_that_torch_negates() -> None:
    """As the imaginary part of a conjugate is."""
    query, keys, values = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    output = scaled_dot_product_attention(torch._neg_view(query), keys.as_subclass(Attended), values)
    torch.testing.assert_close(output, scaled_dot_product_attention(-query, keys, values))


@pytest.mark.parametrize(
    ("queries", "keys", "values", "gqa"),
    [
        ((3, 2, 1, 16), (1, 2, 50, 16), (1, 2, 50, 16), False),
        ((2, 2, 1, 16), (2, 2, 50, 16), (1, 2, 50, 16), False),
        ((1, 2, 1, 16), (1, 2, 50, 16), (1, 1, 50, 16), False),
        ((1, 2, 1, 16), (1, 2, 50, 16), (1, 2, 4, 16), False),
        ((1, 2, 1, 16), (1, 2, 50, 8), (1, 2, 50, 8), False),
        ((1, 4, 1, 16), (1, 2, 50, 16), (1, 2, 50, 16), False),
        ((1, 3, 1, 16), (1, 2, 50, 16), (1, 2, 50, 16), True),
        ((3, 4, 1, 16), (1, 2, 50, 16), (1, 2, 50, 16), True),
        ((2, 1, 16), (1, 2, 50, 16), (1, 2, 50, 16), False),
        ((1, 2, 1, 16), (1, 2, 0, 16), (1, 2, 0, 16), False),
        ((1, 4, 1, 16), (1, 2, 0, 16), (1, 2, 0, 16), True),
        ((1, 2, 1, 16), (1, 2, 50, 16), (2, 50, 16), False),
        ((1, 0, 1, 16), (1, 0, 50, 16), (1, 0, 50, 16), False),
        ((1, 0, 1, 16), (1, 2, 50, 16), (1, 2, 50, 16), True),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "coded"])
def test_shapes_that_do_not_belong_together_are_for_torch(
    kind: str, queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], gqa: bool
) -> None:
    """It broadcasts some, refuses others, and has zeros without keys; the kernels would read what is not there."""
    query, value = torch.randn(queries), torch.randn(values)
    key: Tensor
    key, plain = coded(*keys)
    if kind == "plain":
        key = plain.as_subclass(Attended)

    def result(rows: Tensor) -> Tensor | str:
        try:
            return scaled_dot_product_attention(query, rows, value, enable_gqa=gqa)
        except RuntimeError as error:
            return str(error)

    expected, found = result(plain), result(key)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_copies_are_plain() -> None:
    rows, plain = coded(1, 2, 5, 8)
    decoded = plain.as_subclass(Attended)
    for each in (rows, decoded):
        for copied in (copy.copy(each), copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
            assert type(copied) is Tensor
            assert torch.equal(copied, plain)
        assert np.array_equal(each.numpy(), plain.numpy())
        assert np.array_equal(np.asarray(each), plain.numpy())
        assert each.tolist() == plain.tolist()


@pytest.mark.parametrize("kind", ["plain", "coded"])
def test_only_a_shallow_copy_shares_what_is_written(kind: str) -> None:
    rows, plain = coded(1, 2, 5, 8)
    each = rows if kind == "coded" else plain.clone().as_subclass(Attended)
    shallow, deep, saved = copy.copy(each), copy.deepcopy(each), pickle.dumps(each)
    each.zero_()
    assert not shallow.any()
    assert torch.equal(deep, plain)
    assert torch.equal(pickle.loads(saved), plain)
    shallow.fill_(1)
    deep.fill_(2)
    assert bool((each == 1).all())


def test_several_queries() -> None:
    keys, plain_keys = coded(1, 2, 50, 16)
    values, plain_values = coded(1, 2, 50, 16)
    query = torch.randn(1, 2, 5, 16)
    output = scaled_dot_product_attention(query, keys, values)
    assert torch.equal(output, scaled_dot_product_attention(query, plain_keys, plain_values))


def test_other_operations_see_what_the_codes_stand_for() -> None:
    rows, plain = coded(1, 2, 5, 8, dtype=torch.bfloat16)
    assert (rows.shape, rows.dtype, rows.device) == (plain.shape, plain.dtype, plain.device)
    assert not rows.is_read
    for result, expected in (
        (rows + 1, plain + 1),
        (torch.cat([rows, plain], dim=2), torch.cat([plain, plain], dim=2)),
        (rows.transpose(1, 2).reshape(5, 16), plain.transpose(1, 2).reshape(5, 16)),
        (rows.float(), plain.float()),
        (rows[:, :, 2:], plain[:, :, 2:]),
    ):
        assert type(result) is Tensor
        assert torch.equal(result, expected)
    assert repr(rows) == repr(plain)


def test_what_is_written_is_used() -> None:
    """A write changes this tensor, and not the codes, as it would change a copy."""
    keys, plain_keys = coded(1, 2, 50, 16)
    values, plain_values = coded(1, 2, 50, 16)
    before = values.codes.clone()
    values.zero_()
    query = torch.randn(1, 2, 1, 16)
    assert not scaled_dot_product_attention(query, keys, values).any()
    keys.mul_(2)
    torch.testing.assert_close(
        scaled_dot_product_attention(query, keys, plain_values),
        scaled_dot_product_attention(query, 2 * plain_keys, plain_values),
    )
    assert torch.equal(values.codes, before)
