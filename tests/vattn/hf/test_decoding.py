"""Keys and values of which codes are stored: decode steps read the codes, anything else what they stand for."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vattn.hf.decoding import Coded, DecodedKeys, as_plain
from vattn.quantised import dequantise, quantise


def coded(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Coded, Tensor]:
    """Coded rows, and what they stand for."""
    codes, scales = quantise(torch.randn(*shape).to(dtype))
    return Coded(codes, scales, dtype), dequantise(codes, scales, torch.empty(codes.shape, dtype=dtype))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
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


@pytest.mark.parametrize("how", [{"attn_mask": torch.ones(1, 1, 1, 50, dtype=torch.bool)}, {"dropout_p": 1e-9}])
def test_steps_that_the_kernels_cannot_compute(how: dict[str, object]) -> None:
    keys, plain_keys = coded(1, 2, 50, 16)
    values, plain_values = coded(1, 2, 50, 16)
    query = torch.randn(1, 2, 1, 16)
    output = scaled_dot_product_attention(query, keys, values, **how)  # type: ignore[arg-type]
    torch.testing.assert_close(output, scaled_dot_product_attention(query, plain_keys, plain_values))
    assert keys.is_read


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of its own kernel under vmap
def test_queries_without_memory_are_torchs() -> None:
    keys, values = (torch.randn(1, 2, 50, 16).as_subclass(DecodedKeys) for _ in range(2))
    with pytest.raises(RuntimeError, match="same device"):
        scaled_dot_product_attention(torch.empty(1, 2, 1, 16, device="meta"), keys, values)
    queries = torch.randn(3, 1, 2, 1, 16)
    output = torch.vmap(lambda query: scaled_dot_product_attention(query, keys, values))(queries)
    expected = [scaled_dot_product_attention(query, *map(as_plain, (keys, values))) for query in queries]
    torch.testing.assert_close(as_plain(output), torch.stack(expected))


def test_views_that_torch_negates() -> None:
    """As the imaginary part of a conjugate is."""
    query, keys, values = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    output = scaled_dot_product_attention(torch._neg_view(query), keys.as_subclass(DecodedKeys), values)
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
        key = plain.as_subclass(DecodedKeys)

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
    decoded = plain.as_subclass(DecodedKeys)
    for each in (rows, decoded):
        copied = copy.deepcopy(each)
        assert type(copied) is Tensor
        assert torch.equal(copied, plain)
        assert np.array_equal(each.numpy(), plain.numpy())
        assert np.array_equal(np.asarray(each), plain.numpy())
        assert each.tolist() == plain.tolist()


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
