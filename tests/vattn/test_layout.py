"""The arithmetic of layouts: no two elements share an address, no token leaves its pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

from vattn import layout
from vattn.groups import TensorGroup
from vattn.layout import Layout

LLAMA_3_8B = [TensorGroup(layers=range(32), num_kv_heads=8, head_dim=128, dtype="bfloat16")]


def make(
    name: str,
    order: str,
    groups: Sequence[TensorGroup] | None = None,
    head_dims: tuple[int, int] = (4, 4),
    **changes: int,
) -> Layout:
    groups = groups or [group(range(3), 2, *head_dims)]
    options = {"slots": 2, "tokens": 5, "page_size": 64}
    return layout.build(name, order, groups=groups, **(options | changes))  # type: ignore[arg-type]


def group(
    layers: Iterable[int], heads: int, k: int, v: int, dtype: str = "bfloat16", window: int | None = None
) -> TensorGroup:
    return TensorGroup(layers=layers, num_kv_heads=heads, head_dim=k, v_head_dim=v, dtype=dtype, sliding_window=window)


CASES = list(itertools.product(layout.LAYOUTS, ("NHD", "HND"), ((4, 4), (6, 2))))


@pytest.mark.parametrize(("name", "order", "head_dims"), CASES)
def test_every_element_has_an_address_of_its_own_within_its_column(
    name: str, order: str, head_dims: tuple[int, int]
) -> None:
    made = make(name, order, head_dims=head_dims)
    seen = set()
    for views in made.views.values():
        for view in views:
            kind = made.kinds[view.kind]
            run_bytes = kind.run_pages * made.page_size
            for slot, token, head, dim in itertools.product(range(2), range(5), range(2), range(view.head_dim)):
                index = (slot, token, head, dim)
                element = view.offset + sum(i * s for i, s in zip(index, view.strides, strict=True))
                address = element * 2
                key = (view.kind, view.tensor, address)
                assert key not in seen
                seen.add(key)
                assert address // (run_bytes * kind.runs) == slot
                assert address % run_bytes // made.page_size < kind.columns(token + 1)
    assert len(seen) == 3 * 2 * 2 * 5 * sum(head_dims)


@pytest.mark.parametrize(("name", "order", "head_dims"), CASES)
def test_columns_and_tokens_are_inverse(name: str, order: str, head_dims: tuple[int, int]) -> None:
    for kind in make(name, order, head_dims=head_dims).kinds:
        for tokens in range(1, 50):
            columns = kind.columns(tokens)
            assert kind.tokens(columns) >= tokens > kind.tokens(columns - 1)


@pytest.mark.parametrize(("name", "block_tokens"), [("layer", 1024), ("sliced", 32), ("fused", 16)])
def test_llama_3_8b_blocks_at_2_mib(name: str, block_tokens: int) -> None:
    """The paper's Table 8 (final version): 1024 tokens per 2 MiB page and layer, 32 with tensor slicing."""
    llama = make(name, "NHD", LLAMA_3_8B, slots=4, tokens=8192, page_size=2**21)
    assert llama.page_tokens == block_tokens
    assert llama.bytes_per_token == 131072
    assert llama.reserved_bytes == 4 * 8192 * 131072


def test_worst_waste_of_llama_3_8b_is_the_papers() -> None:
    """128 MB per request with a tensor per layer, 4 MB with slicing (less the one token that is there)."""
    for name, megabytes in (("layer", 128), ("sliced", 4)):
        llama = make(name, "NHD", LLAMA_3_8B, slots=1, tokens=8192, page_size=2**21)
        assert llama.worst_waste == megabytes * 2**20 - llama.bytes_per_token


@pytest.mark.parametrize(("name", "order"), list(itertools.product(layout.LAYOUTS, ("NHD", "HND"))))
def test_layers_that_differ_have_addresses_of_their_own(name: str, order: str) -> None:
    """Heads, sizes, element types and windows differ, one layer stores keys only, one nothing."""
    groups = [
        group((0, 4), 2, 4, 4),
        group((1,), 3, 8, 2, "float32", window=3),
        group((3,), 1, 6, 0, window=3),
        group((5, 6), 2, 4, 4, "int8", window=4),
    ]
    made = make(name, order, groups)
    assert sorted(made.views) == [0, 1, 3, 4, 5, 6]
    assert {band.window: len(band.kinds) for band in made.bands} == {None: 1, 3: 3 if name != "fused" else 2, 4: 1}
    assert made.bytes_per_token == 2 * (2 * 8 * 2) + 3 * 10 * 4 + 6 * 2 + 2 * 2 * 8
    seen = set()
    for views in made.views.values():
        for view in views:
            size = view.dtype.itemsize
            kind = made.kinds[view.kind]
            run_bytes = kind.run_pages * made.page_size
            indices = itertools.product(range(2), range(5), range(view.heads), range(view.head_dim))
            for slot, token, head, dim in indices:
                index = (slot, token, head, dim)
                address = size * (view.offset + sum(i * s for i, s in zip(index, view.strides, strict=True)))
                assert address // (run_bytes * kind.runs) == slot
                assert address % run_bytes // made.page_size < kind.columns(token + 1)
                for byte in range(size):
                    key = (view.kind, view.tensor, address + byte)
                    assert key not in seen
                    seen.add(key)
    assert len(seen) == 2 * 5 * made.bytes_per_token


def test_a_window_bounds_the_pages() -> None:
    """One row is 16 bytes, four tokens a page: a window of 6 touches up to three pages, however long the context."""
    made = make("layer", "NHD", [group(range(1), 2, 4, 4, window=6)], tokens=1000)
    ((band,), (kind,)) = made.bands, made.kinds
    assert (kind.lanes, band.block_tokens) == (2, 4)
    for start in range(1000):
        seen = range(max(0, start - 5), start + 1)
        assert band.floor(start) == seen[0] // 4 * 4
        assert made.pages(start + 1, start) == 2 * len({token // 4 for token in seen})
        assert made.most_pages(start + 1) >= made.pages(start + 1, start)
    assert made.most_pages(1000) == 6
    assert made.most_tokens(6, 10_000) == 10_000
    assert make("layer", "NHD", [group(range(1), 2, 4, 4)], tokens=1000).most_tokens(6, 10_000) == 12


def test_blocks_leave_a_window_together() -> None:
    """Rows of 16 and of 24 bytes: three and eight pages of 64 bytes are the fewest with the same whole tokens."""
    made = make("layer", "NHD", [group((0,), 2, 4, 4, window=6), group((1,), 2, 6, 6)], tokens=1000)
    assert [band.block_tokens for band in made.bands] == [8, 8]
    assert made.bands[1].floor(13) == 8 * (13 - 5 >= 8)


def test_what_a_kernel_reads_before_a_window_stays_backed() -> None:
    made = make("layer", "NHD", [group(range(1), 2, 4, 4, window=6)], tokens=1000, window_guard=10)
    assert made.bands[0].floor(100) == (100 - 16 + 1) // 4 * 4
