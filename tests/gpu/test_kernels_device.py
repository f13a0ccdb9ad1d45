"""The kernels themselves: equal to float64, whatever lies past a length, over both backends, in every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.gpu import flash_attn_2
from tests.gpu import tails
from tests.support.backends import PAGED_WINDOWS
from vattn import KVConfig, VattnError, attention, drivers
from vattn.attention import Attention, AttentionParams, Case, PackedBatch, Span
from vattn.engine.kv.base import KVBackend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.paged_windows import PagedWindowsKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV
from vattn.packed import KVShape

SLOTS, LENGTH, LAYERS, HEADS, GROUP = 5, 1500, 2, 8, 4


def missing() -> str | None:
    try:
        drivers.find("cuda")
    except VattnError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
NAMES = [name for name in attention.names() if name != "torch_sdpa"]


def usable(name: str, **wanted: object) -> Attention:
    """The kernel, or a skip that says why it cannot be used here."""
    case = Case(torch.device("cuda"), torch.bfloat16, **wanted)  # type: ignore[arg-type]
    kernel = next(kernel for kernel in attention.adapters() if kernel.name == name)
    lacks = flash_attn_2.lacks(case.head_dim) if name == "flash_attn_2" else None
    if (refusal := kernel.refusal(case) or lacks) is not None:
        pytest.skip(refusal)
    return kernel


def make_backend(kv: str, head_dim: int, block_size: int = 256, **options: object) -> KVBackend:
    if kv != "virtual":
        return (PagedKV if kv == "paged" else PagedWindowsKV)(
            KVSpec(
                KVShape.uniform(LAYERS, HEADS, head_dim, head_dim),
                max_num_seqs=SLOTS,
                max_model_len=LENGTH,
                block_size=block_size,
                dtype=torch.bfloat16,
                device=torch.device("cuda"),
            ),
            num_blocks=SLOTS * -(-LENGTH // block_size),
        )
    config = KVConfig.from_options(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        max_batch_size=SLOTS,
        max_context_len=LENGTH,
        device="cuda",
        memory_budget="2GiB",
        **options,
    )
    return VirtualKV(config)


def compare(kernel: Attention, backend: KVBackend, head_dim: int, params: AttentionParams) -> None:
    """Prefill in chunks, mixed steps, decodes; each against float64."""
    steps: list[dict[int, int]] = [
        {3: 700, 0: 17},
        {3: 1400, 0: 18, 4: 1},
        {3: 1401, 0: 19, 4: 2, 1: 330, 2: 129},
        {0: 20, 1: 331, 3: 1402, 4: 3, 2: 130},
        {4: 4},
    ]
    lengths = dict.fromkeys(range(SLOTS), 0)
    for slot in range(SLOTS):
        assert backend.allocate(LENGTH) == slot
    torch.manual_seed(0)
    with torch.inference_mode():
        for step in steps:
            batch = PackedBatch.pack([Span(slot, lengths[slot], end) for slot, end in step.items()], "cuda")
            lengths |= step
            backend.prepare({span.slot: span.end for span in batch.spans})
            for layer in range(LAYERS):
                shape = batch.num_tokens, HEADS, head_dim
                key, value = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
                backend.write(layer, batch, key, value)
                shape = GROUP * HEADS, batch.num_tokens, head_dim
                query = torch.randn(shape, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
                got = kernel(query, backend, layer, batch, params)
                want = tails.reference(query, backend, layer, batch, params)
                torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
    backend.close()


@pytest.mark.parametrize("window", [None, 100, 5000])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv", ["virtual", "paged", PAGED_WINDOWS])
@pytest.mark.parametrize("name", NAMES)
def test_equals_float64(name: str, kv: str, head_dim: int, window: int | None) -> None:
    kernel = usable(name, head_dim=head_dim, block_size=256 if kv == "paged" else None, window=window is not None)
    # Over windows a block is whole pages of 2 MiB.
    backend = make_backend(kv, head_dim, 512 if kv == PAGED_WINDOWS else 256)
    compare(kernel, backend, head_dim, AttentionParams(window=window))


@pytest.mark.parametrize("name", NAMES)
def test_softcap(name: str) -> None:
    kernel = usable(name, head_dim=128, softcap=True)
    compare(kernel, make_backend("virtual", 128), 128, AttentionParams(scale=0.2, softcap=5.0))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_16(name: str) -> None:
    kernel = usable(name, head_dim=128, block_size=16)
    compare(kernel, make_backend("paged", 128, 16), 128, AttentionParams())


@pytest.mark.parametrize("kv_order", ["NHD", "HND"])
@pytest.mark.parametrize("layout", ["layer", "sliced", "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_every_layout(name: str, layout: str, kv_order: str) -> None:
    compare(
        usable(name, head_dim=128),
        make_backend("virtual", 128, layout=layout, kv_order=kv_order),
        128,
        AttentionParams(),
    )


@pytest.mark.parametrize("kind", tails.KINDS)
@pytest.mark.parametrize("name", [*attention.names(), tails.CUDNN])
def test_tails(name: str, kind: str, record_property: Callable[[str, object], None]) -> None:
    """An unmapped page, and NaN, after the length; in a process of its own: a stray read ends the CUDA context."""
    if name != tails.CUDNN:
        usable(name, head_dim=128)
    elif not torch.backends.cudnn.is_available():
        pytest.skip("this torch has no cuDNN")
    error = tails.in_a_process(name, kind)
    record_property("largest error", error)
    assert error <= tails.TOLERANCE
