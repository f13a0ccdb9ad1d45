"""`cpu.store`: new keys and values, copied to where a cache has its rows; `cpu.Layer`, which also attends."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("tokens", [5, 3000])
def test_rows_below_0_are_stored_nowhere(tokens: int) -> None:
    """As those of rejected drafts; a large batch is divided among threads, and fetches ahead."""
    home = torch.zeros(tokens, 2, 40)
    new = torch.randn(tokens, 2, 40)
    rows = torch.randperm(tokens)
    rows[::3] = -1
    rows[1::9] = -(2**40)
    kept = rows >= 0
    expected = home.index_copy(0, rows[kept], new[kept])
    values = home.clone()
    assert cpu.store(new, new, home, values, rows)
    assert torch.equal(home, expected)
    assert torch.equal(values, expected)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 7, "softcap": 20.0}, {"sinks": torch.tensor([-1.0, 0.5, 0.0, 2.0])}],
    ids=["plain", "window and softcap", "sinks"],
)
def test_a_layer_stores_and_attends(options: dict[str, Any], dtype: torch.dtype) -> None:
    heads, dim, v_dim = 2, 24, 16
    key, value = (_rows(4, 60, heads, each, dtype=dtype) for each in (dim, v_dim))
    slots, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([2, 0, 3], [31, 60, 5]))
    starts = torch.tensor([0, 1, 9, 10], dtype=torch.int32)
    homes = torch.tensor([2 * 60 + 30, *range(52, 60), 3 * 60 + 4])
    # As a projection makes them; and two more rows, of no meaning.
    both = _rows(12, 4 * dim + heads * (dim + v_dim), dtype=dtype)
    query, new_key, new_value = both.split([4 * dim, heads * dim, heads * v_dim], dim=1)
    query, new_key, new_value = query.view(12, 4, dim), new_key.view(12, heads, dim), new_value.view(12, heads, v_dim)
    expected_key, expected_value = key.clone(), value.clone()
    assert cpu.store(new_key[:10], new_value[:10], *_flat(expected_key, expected_value), homes)
    expected = cpu.attend(
        query[:10], expected_key, expected_value, slots=slots, lengths=lengths, starts=starts, scale=0.2, **options
    )
    out = torch.full((12, 4 * v_dim), 3.0, dtype=dtype)

    layer = cpu.Layer(4, key, value, *_flat(key, value), scale=0.2, **options)
    assert layer.takes(query, new_key, new_value)
    layer.step(query, new_key, new_value, homes, out, slots=slots, lengths=lengths, starts=starts)

    assert torch.equal(out[:10].view(10, 4, v_dim), expected)
    assert (out[10:] == 3).all()
    assert torch.equal(key, expected_key)
    assert torch.equal(value, expected_value)


def _flat(*stored: Tensor) -> tuple[Tensor, ...]:
    return tuple(rows.flatten(0, 1) for rows in stored)


@pytest.mark.parametrize(
    "rows",
    [_rows(3, 2, 8, dtype=torch.float32), _rows(3, 2, 16)[..., ::2], torch._neg_view(_rows(3, 2, 8))],
    ids=["another type", "not contiguous", "negated by a bit"],
)
def test_a_layer_says_what_it_does_not_take(rows: Tensor) -> None:
    stored = torch.zeros(2, 50, 2, 8, dtype=torch.bfloat16)
    layer = cpu.Layer(2, stored, stored, *_flat(stored, stored), scale=1.0)
    assert not layer.takes(_rows(3, 2, 8), rows)
