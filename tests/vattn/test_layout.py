"""The arithmetic of layouts: no two elements share an address, no token leaves its pages."""

from __future__ import annotations

import itertools

import pytest

from vattn import layout
from vattn.layout import Layout


def make(name: str, order: str, **changes: object) -> Layout:
    options: dict[str, object] = {
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dims": (4, 4),
        "itemsize": 2,
        "slots": 2,
        "tokens": 5,
        "page_size": 64,
    }
    return layout.build(name, order, **(options | changes))  # type: ignore[arg-type]


CASES = list(itertools.product(layout.LAYOUTS, ("NHD", "HND"), ((4, 4), (6, 2))))


@pytest.mark.parametrize(("name", "order", "head_dims"), CASES)
def test_every_element_has_an_address_of_its_own_within_its_column(
    name: str, order: str, head_dims: tuple[int, int]
) -> None:
    made = make(name, order, head_dims=head_dims)
    seen = set()
    for views in made.views:
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
    llama = make(
        name, "NHD", num_layers=32, num_kv_heads=8, head_dims=(128, 128), slots=4, tokens=8192, page_size=2**21
    )
    assert llama.block_tokens == block_tokens
    assert llama.bytes_per_token == 131072
    assert llama.reserved_bytes == 4 * 8192 * 131072


def test_worst_waste_of_llama_3_8b_is_the_papers() -> None:
    """128 MB per request with a tensor per layer, 4 MB with slicing (less the one token that is there)."""
    for name, megabytes in (("layer", 128), ("sliced", 4)):
        llama = make(
            name, "NHD", num_layers=32, num_kv_heads=8, head_dims=(128, 128), slots=1, tokens=8192, page_size=2**21
        )
        assert llama.worst_waste == megabytes * 2**20 - llama.bytes_per_token
