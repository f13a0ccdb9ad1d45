"""Codes and scales: how far from the values they are, and how their groups lie in memory."""

from __future__ import annotations

import pytest
import torch

from vattn import KVConfig, TensorGroup
from vattn.config import build_layout
from vattn.quantised import dequantise, quantise, quantised_groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_half_a_step(dtype: torch.dtype, magnitude: float) -> None:
    """A value is off by half a step at most, a step being the row's largest over 127, and by the type's rounding."""
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(50, 3, 64, generator=generator) * magnitude).to(dtype)
    codes, scales = quantise(rows)
    assert (codes.dtype, scales.dtype, scales.shape) == (
        torch.int8,
        torch.float32 if dtype == torch.float16 else dtype,
        (50, 3, 1),
    )
    back = dequantise(codes, scales, torch.empty_like(rows)).float()
    largest = rows.float().abs().amax(dim=-1, keepdim=True)
    rounding = 2 * torch.finfo(dtype).eps * largest
    assert ((back - rows.float()).abs() <= largest / 254 + rounding).all()
    assert (back - rows.float()).abs().max() > 0, "nothing was rounded: the bound says nothing"
    assert codes.abs().max() == 127


def test_rows_that_are_left_alone() -> None:
    """Zeros come back as zeros, the caller's rows stay as they are, and rows may have no elements."""
    rows = torch.randn(4, 2, 8)
    rows[1] = 0
    before = rows.clone()
    codes, scales = quantise(rows)
    assert torch.equal(rows, before)
    assert not dequantise(codes, scales, torch.empty(4, 2, 8))[1].any()
    codes, scales = quantise(rows[..., :0])
    assert dequantise(codes, scales, torch.empty(4, 2, 0)).shape == (4, 2, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    rows = torch.randn(2, 1, 8)
    rows[0, 0, 3] = bad
    codes, scales = quantise(rows)
    back = dequantise(codes, scales, torch.empty(2, 1, 8))
    assert back[0].isnan().any()
    assert back[1].isfinite().all()


def test_groups() -> None:
    """A group of scales per window, one row for all layers; every layer's columns are its own."""
    groups = [
        TensorGroup(layers=[0, 2], num_kv_heads=3, head_dim=64, v_head_dim=32, dtype="bfloat16"),
        TensorGroup(layers=[1, 3], num_kv_heads=2, head_dim=64, dtype="bfloat16", sliding_window=100),
        TensorGroup(layers=[4], num_kv_heads=1, head_dim=96, v_head_dim=0, dtype="bfloat16"),
    ]
    made, places = quantised_groups(groups, torch.bfloat16)
    assert [group.torch_dtype for group in made] == [torch.int8] * 3 + [torch.bfloat16] * 2
    everything, window = made[3:]
    assert (everything.indices, everything.sliding_window) == ((5,), None)
    assert (window.indices, window.sliding_window) == ((6,), 100)
    columns: dict[int, list[int]] = {5: [], 6: []}
    for layer, place in places.items():
        heads = {0: (3, 3), 1: (2, 2), 2: (3, 3), 3: (2, 2), 4: (1, 0)}[layer]
        sides = [list(range(side.start, side.stop)) for side in (place.keys, place.values)]
        assert tuple(map(len, sides)) == heads
        columns[place.layer] += sides[0] + sides[1]
    assert columns == {5: list(range(13)), 6: list(range(8))}
    assert (everything.head_dims, window.head_dims) == ((16, 0), (8, 0))


@pytest.mark.parametrize("page_size", [4096, 65536])
@pytest.mark.parametrize(("num_layers", "heads", "head_dim"), [(5, 2, 32), (24, 2, 64), (27, 16, 128), (32, 8, 128)])
def test_scales_do_not_make_blocks_longer(num_layers: int, heads: int, head_dim: int, page_size: int) -> None:
    """What slots share at a time is what the codes alone would make it; and the scales take little."""
    group = TensorGroup(layers=range(num_layers), num_kv_heads=heads, head_dim=head_dim, dtype="bfloat16")
    made, _ = quantised_groups([group], torch.bfloat16)
    options = {"max_batch_size": 1, "max_context_len": 4096}
    codes = build_layout(KVConfig(groups=made[:1], **options), "layer", page_size)  # type: ignore[arg-type]
    both = build_layout(KVConfig(groups=made, **options), "layer", page_size)  # type: ignore[arg-type]
    assert both.bands[0].block_tokens == codes.bands[0].block_tokens
    assert 1 < both.bytes_per_token / codes.bytes_per_token < 1.13
