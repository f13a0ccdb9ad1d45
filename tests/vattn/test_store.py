"""`cpu.store`: new keys and values, copied to where a cache has its rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vattn import cpu

pytestmark = pytest.mark.skipif(cpu.unusable() is not None, reason="no native module")


def _rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("tokens", [1, 40, 700])  # alone, further than is fetched ahead, by several threads
def test_stores_what_indexing_would(tokens: int, order: str, dtype: torch.dtype) -> None:
    slots, length, heads, dims = 5, 200, 3, (24, 16)
    stored = []
    for dim in dims:
        rows = torch.zeros(slots, length, heads, dim, dtype=dtype)
        stored.append(rows if order == "NHD" else rows.transpose(1, 2).contiguous().transpose(1, 2))
    # As a projection makes them: a slice of each token's queries, keys and values.
    both = _rows(tokens, heads, sum(dims) + 8, dtype=dtype)
    key, value = both[..., 8 : 8 + dims[0]], both[..., 8 + dims[0] :]
    places = torch.randperm(slots * length)[:tokens]
    slot, position = places // length, places % length
    expected = [rows.clone() for rows in stored]
    for rows, new in zip(expected, (key, value), strict=True):
        rows[slot, position] = new

    assert cpu.store(key, value, *stored, slot, position)

    assert all(torch.equal(rows, wanted) for rows, wanted in zip(stored, expected, strict=True))


def test_stores_rows_without_positions() -> None:
    keys, values = torch.zeros(2, 50, 2, 8, dtype=torch.bfloat16)
    new = _rows(3, 2, 8)
    rows = torch.tensor([7, 49, 0])

    assert cpu.store(new, new, keys, values, rows)

    assert torch.equal(keys[rows], new)
    assert torch.equal(values[rows], new)
    assert keys.count_nonzero() <= new.numel()


@pytest.mark.parametrize(
    "key",
    [
        _rows(3, 2, 8, dtype=torch.float32),
        _rows(3, 4, 8),
        _rows(3, 2, 16)[..., ::2],
        torch._neg_view(_rows(3, 2, 8)),
        _rows(3, 2, 8).to("meta"),
    ],
    ids=["another type", "other heads", "not contiguous", "negated by a bit", "another device"],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_leaves_what_it_cannot_copy_to_others(key: Tensor, swapped: bool) -> None:
    keys, values = torch.zeros(2, 50, 2, 8, dtype=torch.bfloat16)
    pair = (_rows(3, 2, 8), key) if swapped else (key, _rows(3, 2, 8))

    assert not cpu.store(*pair, keys, values, torch.arange(3))

    assert not keys.any()
    assert not values.any()
