"""Which kernels run on this CPU; and norm, rotation and gate against float64, for every instruction set that it has."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_kernels import KERNELS, asking_for
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from vattn import cpu
from vattn.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = 1e-6


def test_the_fastest_kernels_run_unless_others_are_asked_for() -> None:
    assert KERNELS[-1] == "portable", "it runs everywhere"
    with asking_for(None):
        assert cpu.chosen().name == KERNELS[0]
        assert cpu.describe().startswith(f"{KERNELS[0]}: this CPU has {cpu.chosen().needs}")
    with asking_for("portable"):
        assert cpu.chosen().name == "portable"
        assert "portable: VATTN_CPU_KERNELS asks" in cpu.describe()


def test_kernels_that_this_cpu_cannot_run() -> None:
    with asking_for("neon"):
        for call in (cpu.chosen, lambda: cpu.norm(torch.ones(1, 8), torch.ones(8), EPSILON)):
            with pytest.raises(ConfigError, match=f"'neon'; this CPU can run {', '.join(KERNELS)}"):
                call()
        assert cpu.describe().startswith("none: VATTN_CPU_KERNELS='neon'")


def test_types_and_head_sizes_that_attention_cannot_have() -> None:
    assert cpu.refusal(torch.bfloat16, 64, 8) is None
    assert "not in float64" in (cpu.refusal(torch.float64, 64) or "")
    assert "not 20" in (cpu.refusal(torch.bfloat16, 64, 20) or "")
    assert "not 0" in (cpu.refusal(torch.float32, 0) or "")


def assert_rounded_once(got: Tensor, want: Tensor, terms: Tensor | None = None) -> None:
    """Computed in float32 and rounded to the type of `got`; `terms` are the magnitudes of which `want` is a sum."""
    single, info = 8 * torch.finfo(torch.float32).eps, torch.finfo(got.dtype)
    bound = info.eps / 2 * want.abs() + single * (want.abs() if terms is None else terms) + info.tiny * info.eps
    error = (got.double() - want).abs()
    assert got.shape == want.shape
    assert bool((error <= bound).all()), ((error / bound).max(), got.dtype, got.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 15, 16, 17, 33, 100, 897, 4864])
def test_norm(kernels: str, width: int, dtype: torch.dtype) -> None:
    """Rows next to each other, and rows of a wider tensor whose other elements are NaN."""
    torch.manual_seed(width)
    weight = torch.randn(width).to(dtype)
    for n in (0, 1, 3, 41):
        rows = (torch.randn(n, width) * 10 ** torch.empty(n, 1).uniform_(-2, 2)).to(dtype)
        want = rms_norm(rows.double(), (width,), weight.double(), EPSILON)
        wide = rows.new_full((n, width + 12), math.nan)
        wide[:, 5 : 5 + width] = rows
        for given in (rows, wide[:, 5 : 5 + width]):
            got = cpu.norm(given, weight, EPSILON)
            assert got.is_contiguous()
            assert got.dtype == dtype
            assert_rounded_once(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 6, 16, 30, 34, 64, 72, 128, 200])
@pytest.mark.parametrize("head_norms", [False, True])
def test_rotate(kernels: str, head_dim: int, head_norms: bool, dtype: torch.dtype) -> None:
    """As transformers rotates; values, and what lies between the tokens, stay as they are."""
    torch.manual_seed(head_dim)
    for n, queries, keys, values in ((0, 2, 1, 1), (1, 3, 1, 2), (5, 7, 2, 2), (67, 14, 2, 3)):
        heads = queries + keys + values
        wide = torch.randn(n, heads + 1, head_dim).to(dtype)
        given, before = wide[:, :heads], wide.clone()
        angles = torch.randn(n, head_dim) * 100
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        norms = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if head_norms else None
        cpu.rotate(given, queries, keys, cos, sin, norms, EPSILON if head_norms else 0.0)
        parts = before[:, : queries + keys].double().split([queries, keys], dim=1)
        if norms:
            parts = [
                rms_norm(part, (head_dim,), weight.double(), EPSILON) for part, weight in zip(parts, norms, strict=True)
            ]
        want = torch.cat(apply_rotary_pos_emb(*parts, cos.double(), sin.double()), dim=1)
        sizes = torch.cat(parts, dim=1).abs()
        terms = sizes * cos[:, None].abs() + sizes.roll(head_dim // 2, -1) * sin[:, None].abs()
        assert_rounded_once(given[:, : queries + keys], want, terms)
        assert torch.equal(wide[:, queries + keys :], before[:, queries + keys :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 15, 16, 17, 33, 100, 897, 4864])
def test_gate(kernels: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    for n in (0, 1, 3, 41):
        rows = (torch.randn(n, 2 * width) * 10 ** torch.empty(n, 1).uniform_(-2, 1.5)).clamp(-80).to(dtype)
        first, second = rows.double().chunk(2, dim=1)
        got = cpu.gate(rows)
        assert got.dtype == dtype
        want = silu(first) * second
        # exp of a large negative number has the relative error of its argument's absolute one.
        assert_rounded_once(got, want, want.abs() * (1 + first.clamp(max=0).abs()))


def test_a_gate_that_is_shut(kernels: str) -> None:
    """Where the sigmoid is below float32's range, the result is nothing, and not NaN."""
    for dtype in DTYPES:
        rows = torch.tensor([[-100.0, -1000.0, -60_000.0, 7.0, -7.0, 7.0]], dtype=dtype)
        assert bool((cpu.gate(rows).double().abs() < 1e-30).all())
