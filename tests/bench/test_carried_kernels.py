"""The libraries of build_fa2.sh and fetch_fa3.sh in the place of flash-attn, over stand-ins for their operators."""

from __future__ import annotations

import importlib.util
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import library as torch_library

from bench.gpu import carried, engines, flash_attn_2, flash_attn_3, sides
from bench.gpu.parts import attention as attention_part
from bench.gpu.parts import engine as engine_part
from tests.support import kernel_fakes
from vattn import KVConfig, attention
from vattn.attention import AttentionParams, PackedBatch, Span
from vattn.engine.kv.base import KVBackend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV
from vattn.packed import KVShape

OPERATOR = Path(flash_attn_2.__file__).parent / "fa2" / "ops.cpp"
SLOTS, LENGTH, HEADS, GROUP, DIM = 3, 600, 2, 3, 64


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("flash_attn", "flash_attn_interface"):
        if importlib.util.find_spec(package):
            monkeypatch.setattr(carried, "find_spec", lambda _: None)
        monkeypatch.setitem(sys.modules, package, SimpleNamespace())
        monkeypatch.delitem(sys.modules, package)  # both are undone: whatever the test puts there goes


def fwd_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, cache_batch_idx: Tensor | None,
    block_table: Tensor | None, softmax_scale: float, causal: bool, window_left: int, window_right: int,
    softcap: float, num_splits: int,
) -> Tensor:  # fmt: skip
    assert num_splits == 0, "the number of splits is the kernel's choice"
    output: Tensor = kernel_fakes.flash_attn_2().flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, block_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=(window_left, window_right), softcap=softcap,
    )  # fmt: skip
    return output


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_installed: None) -> Iterator[Path]:
    """A file whose loading registers the operator, under the schema that the C++ file has."""
    schema = "".join(re.findall(r'"([^"]*)"', re.search(r"library\.def\((.*?)\);", OPERATOR.read_text(), re.S)[1]))  # type: ignore[index]
    file = tmp_path / "vattn_fa2.so"
    file.touch()
    with torch_library._scoped_library("vattn_fa2", "FRAGMENT") as registered:

        def load(path: Path) -> None:
            assert path == file
            registered.define(schema)
            registered.impl("fwd_kvcache", fwd_kvcache, "CPU")

        monkeypatch.setattr(torch.ops, "load_library", load)
        yield file


def make_backend(kv: str) -> KVBackend:
    if kv == "paged":
        shape = KVShape.uniform(1, HEADS, DIM, DIM)
        spec = KVSpec(shape, max_num_seqs=SLOTS, max_model_len=LENGTH, block_size=256)
        return PagedKV(spec, num_blocks=SLOTS * -(-LENGTH // 256))
    config = KVConfig.from_options(
        num_layers=1,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        max_batch_size=SLOTS,
        max_context_len=LENGTH,
        memory_budget="16MiB",
        page_size=4096,
        guard="strict",
    )
    return VirtualKV(config)


@pytest.mark.parametrize("params", [AttentionParams(), AttentionParams(scale=0.3, window=20, softcap=2.0)])
def test_the_adapter_over_the_library_equals_sdpa(kv: str, params: AttentionParams, library: Path) -> None:
    assert flash_attn_2.provide(library) is None
    assert flash_attn_2.provide(library) is None, "the second time it is there"
    assert flash_attn_2.lacks(128) is None
    assert flash_attn_2.lacks(256) == "vattn_fa2.so is built for heads of 64 and 128, not of 256"
    equals_sdpa("flash_attn_2", kv, params)


def equals_sdpa(name: str, kv: str, params: AttentionParams) -> None:
    kernel, reference = (attention._ADAPTERS[each]() for each in (name, "torch_sdpa"))
    backend = make_backend(kv)
    slots = [backend.allocate(LENGTH) for _ in range(SLOTS)]
    torch.manual_seed(0)
    for spans in ([Span(slots[1], 0, 300), Span(slots[0], 0, 7)], [Span(slots[0], 7, 8), Span(slots[1], 300, 400)]):
        batch = PackedBatch.pack(spans)
        backend.prepare({span.slot: span.end for span in spans})
        backend.write(0, batch, *(torch.randn(batch.num_tokens, HEADS, DIM) for _ in range(2)))
        query = torch.randn(batch.num_tokens, HEADS * GROUP, DIM)
        got, want = (adapter(query, backend, 0, batch, params) for adapter in (kernel, reference))
        torch.testing.assert_close(got, want)
    backend.close()


# As vLLM's library registers it.
FWD = (
    "fwd(Tensor(q!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(out!)? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_installed: None) -> Iterator[Path]:
    """A packed file whose loading registers vLLM's operator."""
    file = tmp_path / "vllm_fa3.so"
    with lzma.open(tmp_path / "vllm_fa3.so.xz", "wb") as target:
        target.write(b"the library")
    names = [argument.name for argument in torch._C.parse_schema(FWD).arguments]

    def fwd(*args: Any) -> list[Tensor]:
        given = dict(zip(names, args, strict=True))
        scale, left, right = (given.pop(name) for name in ("softmax_scale", "window_size_left", "window_size_right"))
        taken = {name: given.pop(name) for name in ("cu_seqlens_q", "max_seqlen_q", "page_table", "softcap")}
        query, key, value, lengths = (given.pop(name) for name in ("q", "k", "v", "seqused_k"))
        assert {name: value for name, value in given.items() if value is not None} == {
            "is_causal": True,
            "is_rotary_interleaved": True,
            "num_splits": 0,
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
        }
        output = kernel_fakes.flash_attn_3().flash_attn_with_kvcache(
            query,
            key,
            value,
            cache_seqlens=lengths,
            softmax_scale=scale,
            causal=True,
            window_size=(left, right),
            **taken,
        )
        return [output, lengths]

    with torch_library._scoped_library("_vllm_fa3_C", "FRAGMENT") as registered:

        def load(path: Path) -> None:
            assert path == file
            assert path.read_bytes() == b"the library"
            registered.define(FWD)
            registered.impl("fwd", fwd, "CPU")

        monkeypatch.setattr(torch.ops, "load_library", load)
        yield file


@pytest.mark.parametrize("params", [AttentionParams(), AttentionParams(scale=0.3, window=20, softcap=2.0)])
def test_flash_attn_3_over_the_library_equals_sdpa(kv: str, params: AttentionParams, packed: Path) -> None:
    assert flash_attn_3.provide(packed) is None
    assert [file.name for file in sorted(packed.parent.iterdir())] == ["vllm_fa3.so", "vllm_fa3.so.xz"]
    equals_sdpa("flash_attn_3", kv, params)


@pytest.mark.usefixtures("not_installed")
def test_why_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "vattn_fa2.so"
    assert flash_attn_2.provide(file) == "there is no vattn_fa2.so either (bench/gpu/build_fa2.sh builds it)"
    absent = flash_attn_3.provide(tmp_path / "vllm_fa3.so")
    assert absent == "there is no vllm_fa3.so either (bench/gpu/fetch_fa3.sh fetches it)"
    file.write_text("no library")
    why = flash_attn_2.provide(file)
    assert why is not None
    assert why.startswith("vattn_fa2.so does not load: ")
    assert "flash_attn" not in sys.modules


def test_a_package_that_is_installed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    package = kernel_fakes.flash_attn_2()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert flash_attn_2.provide(Path("/nowhere")) is None
    assert sys.modules["flash_attn"] is package
    assert flash_attn_2.lacks(256) is None


def kernels(monkeypatch: pytest.MonkeyPatch, **refusals: dict[bool, str | None]) -> None:
    """Adapters by name; what each says to blocks (True) and to contiguous slots (False). There is no flash-attn 3."""
    refusals = {"flash_attn_3": {True: "not installed", False: "not installed"}, **refusals}
    found = [
        SimpleNamespace(name=name, refusal=lambda case, says=says: says.get(case.block_size is not None))
        for name, says in refusals.items()
    ]
    monkeypatch.setattr(sides, "adapters", lambda: found)


def test_every_side_is_there_or_missing_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sides.KERNELS, raising=False)
    no_blocks = "its operator has no block_table"
    monkeypatch.setattr(flash_attn_2, "provide", lambda: None)
    kernels(monkeypatch, flash_attn_2={}, torch_flash={True: no_blocks}, torch_sdpa={})
    found = sides.sides()
    both = ["virtual with flash_attn_2", "static with flash_attn_2", "paged with flash_attn_2"]
    assert [str(side) for side in found] == [*both, "virtual with torch_flash", "static with torch_flash"]

    monkeypatch.setattr(flash_attn_2, "provide", lambda: "there is no library either")
    kernels(monkeypatch, flash_attn_2={True: "not installed", False: "not installed"}, torch_flash={})
    assert ({cache: kernel.name for cache, kernel in engines.kernels()[0].items()}, engines.kernels()[1]) == (
        dict.fromkeys(("virtual", "static", "paged"), "torch_flash"),
        [],
    )
    missing = [str(side) for side in sides.sides() if side.refusal]
    assert missing == [f"{side}: not installed; there is no library either" for side in both]

    kernels(monkeypatch, flash_attn_2={True: "not installed", False: "not installed"}, torch_flash={True: no_blocks})
    used, missing = engines.kernels()
    assert {cache: kernel.name for cache, kernel in used.items()} == dict.fromkeys(("virtual", "static"), "torch_flash")
    assert missing == ["paged with flash_attn_2: not installed; there is no library either"]


@pytest.mark.parametrize("there", [True, False])
def test_a_kernel_gives_way_to_a_better_one_that_is_there(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.delenv(sides.KERNELS, raising=False)
    monkeypatch.setattr(flash_attn_2, "provide", lambda: None)
    best: dict[str, dict[bool, str | None]] = {"flash_attn_3": {}} if there else {}
    kernels(monkeypatch, flash_attn_2={}, torch_flash={}, **best)
    found = [side.kernel.name for side in sides.sides(["flash_attn_3"], instead_of=["torch_flash"])]
    first, second = ("flash_attn_3", "flash_attn_2") if there else ("flash_attn_2", "torch_flash")
    assert found == [first] * 3 + [second] * 3
    monkeypatch.setenv(sides.KERNELS, "torch_flash")
    assert {side.kernel.name for side in sides.sides(["flash_attn_3"], instead_of=["torch_flash"])} == {"torch_flash"}


def test_kernels_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn_2, "provide", lambda: None)
    kernels(monkeypatch, flash_attn_2={}, flashinfer={False: "it is not installed"})
    monkeypatch.setenv(sides.KERNELS, "flashinfer")
    assert [str(side) for side in sides.sides()] == [
        "virtual with flashinfer: it is not installed",
        "static with flashinfer: it is not installed",
        "paged with flashinfer",
    ]
    monkeypatch.setenv(sides.KERNELS, "flashinfer,flash")
    with pytest.raises(
        ValueError, match="VATTN_GPU_KERNELS names flash; there are flash_attn_3, flash_attn_2, flashinfer"
    ):
        sides.sides()


FA2, TORCH = (attention._ADAPTERS[name]() for name in ("flash_attn_2", "torch_flash"))


def test_goals_and_rows_of_attention() -> None:
    virtual, static, paged, torchs = (
        sides.Side(*side) for side in (("virtual", FA2), ("static", FA2), ("paged", FA2), ("virtual", TORCH))
    )
    decode, prefill = attention_part.Work(64, 1, 1024), attention_part.Work(1, 32_768, 32_768)
    seconds: attention_part.Times = {
        decode: {virtual: 2.0, static: 1.0, paged: 3.0, torchs: 1.5},
        prefill: {virtual: 4.0, static: 4.0, paged: 3.0, torchs: 2.0},
    }
    goals = attention_part._goals(seconds)
    assert [(goal.what, goal.value) for goal in goals] == [
        ("decode, pre-allocated over virtual (10th percentile of 1 cases)", 0.5),
        ("decode, best paged over best virtual (10th percentile of 1 cases)", 2.0),
        ("prefill from 32K, best paged over best virtual (10th percentile of 1 cases)", 1.5),
    ]
    row = attention_part.row(decode, paged, seconds[decode], 1e9)
    assert (row["cache"], row["kernel"], row["us"], row["over virtual"]) == ("paged", "flash_attn_2", 3e6, 1.5)
    lost = sides.Side("paged", TORCH, "why not")
    row = attention_part.row(decode, lost, seconds[decode], 1e9)
    assert (row["cache"], row["kernel"], row["us"], row["over virtual"]) == ("paged", "torch_flash", "MISSING", "-")
    assert attention_part._goals({decode: {torchs: 1.0}}) == []


def test_goals_of_the_engine() -> None:
    caches = ("virtual", "static", "static again", "paged")
    virtual, static, again, paged = (sides.Side(cache, FA2) for cache in caches)
    times: engine_part.Times = {
        engine_part.Work(32, 1024, 1104): {virtual: 2.0, static: 1.0, again: 0.9, paged: 3.0},
        engine_part.Work(1, 4096, 2**17): {sides.Side("virtual", TORCH): 9.0},  # no other was captured
    }
    assert [(goal.what, goal.value, goal.bound) for goal in engine_part._goals(times)] == [
        ("seconds per step, pre-allocated over virtual (10th percentile of 1 cases)", 0.5, 0.99 * 0.9),
        ("seconds per step, best paged over best virtual (10th percentile of 1 cases)", 1.5, 1.0),
    ]
