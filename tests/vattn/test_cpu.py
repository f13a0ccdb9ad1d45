"""Which kernels run on this CPU; and norm, rotation and gate against float64, for every instruction set that it has."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.cpu_kernels import KERNELS, asking_for, taking_keys
from tests.support.waiting import Background
from vattn import attention, cpu
from vattn.attention import Case
from vattn.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = 1e-6


def test_the_fastest_kernels_run_unless_others_are_asked_for() -> None:
    assert KERNELS[-1] == "portable", "it runs everywhere"
    fast = [each for each in cpu.kernels() if each.supported and each.worthwhile]
    with asking_for(None):
        assert cpu.chosen() == fast[0]
        assert cpu.describe().startswith(f"{fast[0].name}: this CPU has {fast[0].needs}")
    with asking_for("portable"):
        assert cpu.chosen().name == "portable"
        assert "portable: VATTN_CPU_KERNELS asks" in cpu.describe()


def test_kernels_that_a_measurement_ruled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay available, and `describe` says why they do not run."""
    portable = cpu.kernels()[-1]
    first, second = (replace(portable, name=name) for name in ("first", "second"))
    monkeypatch.setattr(cpu, "kernels", lambda: [replace(first, worthwhile=False), second, portable])
    with asking_for(None):
        assert cpu.chosen() == second
        assert (
            f"floats faster than the pairs of {first.name}; VATTN_CPU_KERNELS can name {first.name}" in cpu.describe()
        )
    with asking_for(first.name):
        assert cpu.chosen().name == first.name
        assert "pairs" not in cpu.describe()


def test_keys_are_taken_as_a_measurement_says_unless_one_way_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instruction set with products of 8-bit quads has measured it, and no other one."""
    measured = {each.name for each in cpu.kernels() if each.supported and each.panels}
    assert measured == set(KERNELS) & {"avx512_vnni", "avx512_bf16", "amx_bf16"}
    chosen = replace(cpu.kernels()[-1], panels=[False, True])
    monkeypatch.setattr(cpu, "kernels", lambda: [chosen])
    with asking_for(None):
        assert "8-bit keys of several rows are faster in panels, with gaps as they lie" in cpu.describe()
        with taking_keys("in_place"):
            assert "VATTN_CPU_KEYS asks for keys as they lie" in cpu.describe()
            assert "faster" not in cpu.describe()
        with (
            pytest.raises(ConfigError, match="VATTN_CPU_KEYS='rows'; give in_place or panels"),
            taking_keys("rows"),
        ):
            raise AssertionError("chosen() took it")


def test_kernels_that_this_cpu_cannot_run() -> None:
    with asking_for("neon"):
        for call in (cpu.chosen, lambda: cpu.norm(torch.ones(1, 8), cpu.NormWeight(torch.ones(8), EPSILON))):
            with pytest.raises(
                ConfigError, match=f"'neon'; of what this build has, this CPU can run {', '.join(KERNELS)}"
            ):
                call()
        assert cpu.describe().startswith("none: VATTN_CPU_KERNELS='neon'")
        assert any("VATTN_CPU_KERNELS='neon'" in line for line in attention.describe(Case()))


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
            got = cpu.norm(given, cpu.NormWeight(weight, EPSILON))
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
        weights = (cpu.NormWeight(norms[0], EPSILON), cpu.NormWeight(norms[1], EPSILON)) if norms else None
        cpu.rotate(given, queries, keys, cos, sin, weights)
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
        lowest = torch.tensor([torch.finfo(dtype).min, -1e30, -1e37, -1e38, -math.inf, math.nan], dtype=dtype)
        got = cpu.gate(torch.cat([lowest, torch.ones_like(lowest)])[None])[0]
        torch.testing.assert_close(got, silu(lowest), rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def linear_kernels(kernels: str) -> None:
    if not cpu.has_linear():
        pytest.skip(f"{kernels} has no linear layers")


@pytest.mark.usefixtures("linear_kernels")
@pytest.mark.parametrize("width", [2, 30, 64, 514, 1100])
@pytest.mark.parametrize("out", [1, 16, 40, 353])
def test_linear(width: int, out: int) -> None:
    """Rows next to each other and rows of a wider tensor, with and without what is added."""
    torch.manual_seed(width + out)
    weight = torch.randn(out, width).bfloat16()
    bias = torch.randn(out).bfloat16()
    plain, biased = cpu.pack_weight(weight), cpu.pack_weight(weight, bias)
    for n in (0, 1, 7, 9, 65, 300):
        wide = torch.full((n, width + 6), math.nan).bfloat16()
        rows = wide[:, 2 : 2 + width]
        rows[:] = torch.randn(n, width)
        product, terms = rows.double() @ weight.double().T, rows.double().abs() @ weight.double().abs().T
        other = torch.randn(n, out).bfloat16()
        # Up to 1,100 roundings in float32, of which few go the same way.
        assert_rounded_once(cpu.linear(rows, plain), product, 4 * terms)
        added = product + bias.double() + other.double()
        assert_rounded_once(cpu.linear(rows.contiguous(), biased, other), added, 4 * (terms + 8))


@pytest.mark.usefixtures("linear_kernels")
@pytest.mark.parametrize("n", [1, 2, 65])
def test_linear_over_rows_at_odd_distances(n: int) -> None:
    weight = cpu.pack_weight(torch.randn(40, 64).bfloat16())
    for first in (0, 1):
        rows = torch.randn(n, 67).bfloat16()[:, first : first + 64]
        assert torch.equal(cpu.linear(rows, weight), cpu.linear(rows.contiguous(), weight))


@pytest.mark.usefixtures("linear_kernels")
@pytest.mark.parametrize("gated", [False, True])
def test_a_large_weight_lies_in_huge_pages(gated: bool) -> None:
    """All that it fills, and nothing after it; where Linux has them."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this Linux has no transparent huge pages")
    weight = torch.randn(2_000, 1_500).bfloat16()
    panels = cpu.pack_weight(weight, gated=gated).panels
    size = 2**21
    assert panels.data_ptr() % size == 0
    whole = panels.numel() * 4 // size * size
    assert whole > size
    lines = Path("/proc/self/smaps").read_text().splitlines()
    mappings = [(i, found) for i, line in enumerate(lines) if (found := re.match(r"(\w+)-(\w+) ", line))]
    first, last = panels.data_ptr(), panels.data_ptr() + whole
    (at,) = [i for i, found in mappings if int(found[1], 16) <= first and last <= int(found[2], 16)]
    assert "hg" in next(line for line in lines[at:] if line.startswith("VmFlags")).split()


@pytest.mark.usefixtures("linear_kernels")
@pytest.mark.parametrize("width", [2, 64, 1100])
@pytest.mark.parametrize("out", [1, 16, 40, 353])
def test_a_gated_linear_layer(width: int, out: int) -> None:
    torch.manual_seed(width + out)
    weight = torch.randn(2 * out, width).bfloat16() * width**-0.5
    bias = torch.randn(2 * out).bfloat16()
    plain, biased = cpu.pack_weight(weight, gated=True), cpu.pack_weight(weight, bias, gated=True)
    assert plain.out == out
    for n in (0, 1, 7, 9, 65, 300):
        rows, other = torch.randn(n, width).bfloat16(), torch.randn(n, out).bfloat16()
        first, second = (rows.double() @ weight.double().T).chunk(2, dim=1)
        # Of both products, which are sums of up to 1,100 terms.
        terms = 4 * (first.abs() + 8) * (second.abs() + 8)
        assert_rounded_once(cpu.linear(rows, plain), silu(first) * second, terms)
        gate, up = (rows.double() @ weight.double().T + bias.double()).chunk(2, dim=1)
        assert_rounded_once(cpu.linear(rows, biased, other), silu(gate) * up + other.double(), terms + 64)


@pytest.mark.usefixtures("linear_kernels")
def test_a_gate_of_a_linear_layer_that_is_shut() -> None:
    """Where the sigmoid is below float32's range, the result is nothing, and not NaN."""
    weight = cpu.pack_weight(torch.ones(2, 2).bfloat16(), gated=True)
    rows = torch.tensor([[-50.0, -50.0], [-500.0, -500.0], [-30_000.0, -30_000.0]]).bfloat16()
    assert bool((cpu.linear(rows, weight).double().abs() < 1e-28).all())


@pytest.mark.usefixtures("linear_kernels")
def test_what_is_not_finite_stays_in_its_row() -> None:
    rows = torch.randn(9, 64).bfloat16()
    weight = torch.randn(40, 64).bfloat16()
    rows[4, 3] = math.nan
    for gated in (False, True):
        got = cpu.linear(rows, cpu.pack_weight(weight, gated=gated))
        assert got[4].isnan().all()
        assert got[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.usefixtures("linear_kernels")
@pytest.mark.parametrize("width", [30, 576, 1100])
@pytest.mark.parametrize("gated", [False, True])
def test_other_rows_do_not_change_a_row_of_a_linear_layer(width: int, gated: bool) -> None:
    rows, weight = torch.randn(300, width).bfloat16(), cpu.pack_weight(torch.randn(354, width).bfloat16(), gated=gated)
    together = cpu.linear(rows, weight)
    for n in (1, 2, 5, 23, 127, 128, 129, 256, 260):
        assert torch.equal(cpu.linear(rows[:n], weight), together[:n])


@pytest.mark.usefixtures("linear_kernels")
def test_attention_ends_no_threads_that_others_need() -> None:
    rows, weight = torch.ones(1, 512).bfloat16(), cpu.pack_weight(torch.ones(512, 512).bfloat16())
    query, keys = torch.ones(1, 8, 64), torch.ones(1, 600, 2, 64)

    def tasks() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def compute() -> None:
        """On a thread that has had no other team: what a smaller one no longer needs ends at any time."""
        torch.set_num_threads(4)
        others = tasks()
        cpu.linear(rows, weight)
        team = tasks() - others
        # Two parts, so two threads have nothing to do.
        cpu.attend(query, keys, keys, slots=None, lengths=torch.tensor([600], dtype=torch.int32))
        cpu.linear(rows, weight)
        assert len(team) == 3
        assert team <= tasks()

    threads = torch.get_num_threads()
    try:
        Background(compute).finish()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("linear_kernels")
@pytest.mark.parametrize("gated", [False, True])
def test_threads_do_not_change_a_linear_layer(gated: bool) -> None:
    rows, weight = torch.randn(37, 640).bfloat16(), cpu.pack_weight(torch.randn(1000, 640).bfloat16(), gated=gated)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpu.linear(rows, weight)
        torch.set_num_threads(3)
        assert torch.equal(cpu.linear(rows, weight), alone)
    finally:
        torch.set_num_threads(threads)


def _norm_weight(width: int) -> cpu.NormWeight:
    return cpu.NormWeight(torch.randn(width).bfloat16(), EPSILON)


def _weight(out: int, width: int, bias: bool = False, gated: bool = False) -> cpu.Weight:
    weight = torch.randn(out, width).bfloat16() * width**-0.5
    return cpu.pack_weight(weight, torch.randn(out).bfloat16() if bias else None, gated=gated)


@pytest.mark.usefixtures("linear_kernels")
@pytest.mark.parametrize("head_norms", [False, True])
def test_a_projection_is_norm_product_and_rotation(head_norms: bool) -> None:
    torch.manual_seed(0)
    queries, keys, values, head_dim, width = 6, 2, 2, 24, 90
    norm, weight = _norm_weight(width), _weight((queries + keys + values) * head_dim, width, bias=head_norms)
    norms = (_norm_weight(head_dim), _norm_weight(head_dim)) if head_norms else None
    project = cpu.Projection(norm, weight, queries, keys, head_dim, norms)
    for n in (0, 1, 9, 300, 2):
        rows, angles = torch.randn(n, width).bfloat16(), torch.randn(n, head_dim)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        want = cpu.linear(cpu.norm(rows, norm), weight).view(n, queries + keys + values, head_dim)
        cpu.rotate(want, queries, keys, cos, sin, norms)
        assert torch.equal(project(rows, cos, sin), want)


@pytest.mark.usefixtures("linear_kernels")
@pytest.mark.parametrize("bias", [False, True])
def test_a_residual_is_two_sums(bias: bool) -> None:
    """Of more rows than pass the MLP together, too."""
    torch.manual_seed(1)
    width, inner, heads = 90, 200, 72
    output, norm = _weight(width, heads, bias), _norm_weight(width)
    gate_up, down = _weight(2 * inner, width, gated=True), _weight(width, inner)
    add = cpu.Residual(output, norm, gate_up, down)
    for n in (0, 1, 9, 256, 257, 700, 3):
        rows, attended = torch.randn(n, width).bfloat16(), torch.randn(n, heads).bfloat16()
        before = rows.clone()
        sums = cpu.linear(attended, output, rows)
        want = cpu.linear(cpu.linear(cpu.norm(sums, norm), gate_up), down, sums)
        assert torch.equal(add(attended, rows), want)
        assert torch.equal(rows, before)


@pytest.mark.usefixtures("linear_kernels")
@pytest.mark.parametrize("paged", [False, True])
def test_layers_in_one_call(paged: bool) -> None:
    """The parts of each, one after the other, of which the second layer has a window, and sinks."""
    torch.manual_seed(2)
    queries, heads, dim, width, inner = 6, 2, 24, 90, 200
    # Three requests: one new token after 69, 9 after none, and 300 after 11.
    ends, counts, slots = torch.tensor([70, 9, 311]), torch.tensor([1, 9, 300]), torch.tensor([2, 0, 1])
    n = int(counts.sum())
    requests = {
        "slots": slots.int(),
        "lengths": ends.int(),
        "starts": torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
    }
    row_slots = slots.repeat_interleave(counts)
    positions = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    table = torch.randperm(3 * 20).view(3, 20).int() if paged else None
    places = (row_slots, positions)
    if table is not None:
        places = (table[row_slots, positions // 16] * 16 + positions % 16, None)

    layers, caches, options = [], [], [{}, {"window": 30, "sinks": torch.randn(queries)}]
    for each in options:
        stored = torch.randn(2, *(60, 16) if paged else (3, 320), heads, dim).bfloat16()
        homes = [rows.flatten(0, 1) if paged else rows for rows in stored]
        layers.append(
            (
                cpu.Projection(_norm_weight(width), _weight((queries + 2 * heads) * dim, width), queries, heads, dim),
                cpu.Layer(queries, *stored, *homes, block_table=table, **each),
                cpu.Residual(
                    _weight(width, queries * dim),
                    _norm_weight(width),
                    _weight(2 * inner, width, gated=True),
                    _weight(width, inner),
                ),
            )
        )
        caches.append((stored, stored.clone()))
    rows, angles = torch.randn(n, width).bfloat16(), torch.randn(n, dim)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    want = rows.clone()

    seconds = cpu.run_layers(layers, places, rows, cos, sin, **requests)

    for (project, _, add), (stored, stored_one_by_one), each in zip(layers, caches, options, strict=True):
        query, key, value = project(want, cos, sin).split_with_sizes((queries, heads, heads), 1)
        assert cpu.store(key, value, *(r.flatten(0, 1) if paged else r for r in stored_one_by_one), *places)
        attended = cpu.attend(query, *stored_one_by_one, block_table=table, **requests, **each)
        want = add(attended.flatten(1), want)
        assert torch.equal(stored, stored_one_by_one)
    assert torch.equal(rows, want)
    assert min(seconds) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 511, 512, 513, 3000])
def test_the_largest_of_a_row(dtype: torch.dtype, width: int) -> None:
    """As numpy finds it: the first of equal ones, whatever the signs of zeros, and NaN before infinities."""
    torch.manual_seed(width)
    rows = torch.randn(40, width + 3).to(dtype)[:, :width]
    rows[5:] = rows[5:].round()  # with many that are equal
    special = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, torch.finfo(dtype).tiny, -torch.finfo(dtype).max]
    for row, value in enumerate(special, 10):
        rows[row] = -1
        rows[row, width // 2 :: 7] = value
    rows[20], rows[21] = -math.inf, -0.0
    rows[21, width // 3] = 0.0
    rows[22, [0, -1]] = torch.tensor([math.inf, math.nan], dtype=dtype)
    want = torch.from_numpy(rows.float().numpy().argmax(axis=1))
    for number, row in enumerate(rows):
        found, finite = cpu.largest(row[None])
        assert found.tolist() == [want[number]]
        assert finite == bool(row[want[number]].isfinite())
    found, finite = cpu.largest(rows)
    assert torch.equal(found, want)
    assert not finite
    found, finite = cpu.largest(rows[:10])
    assert torch.equal(found, want[:10])
    assert finite
    found, finite = cpu.largest(rows[:0])
    assert found.tolist() == []
    assert finite
