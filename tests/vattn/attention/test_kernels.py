"""The adapters of GPU kernels: which is chosen, and what they give to fakes with the kernels' own semantics."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import kernel_fakes
from tests.support.backends import KVS, chosen
from tests.support.effort import covering
from tests.support.tiny_models import make_model
from vattn import KVConfig, attention
from vattn.attention import AttentionParams, Case, Contiguous, PackedBatch, Span
from vattn.engine import LLM, SamplingParams
from vattn.engine.kv.base import KVBackend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV
from vattn.errors import ConfigError
from vattn.packed import KVShape

SLOTS, LENGTH, LAYERS, HEADS, GROUP, DIM = 5, 600, 2, 2, 3, 8
CUDA = torch.device("cuda")
KERNELS = ["torch_flash", "flash_attn_2", "flash_attn_3", "flashinfer"]
FAKES = {
    "flash_attn": kernel_fakes.flash_attn_2,
    "flash_attn_interface": kernel_fakes.flash_attn_3,
    "flashinfer": kernel_fakes.flashinfer,
}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, make in FAKES.items():
        monkeypatch.setitem(sys.modules, name, make())
    with kernel_fakes.torch_flash():
        yield


def make_backend(kv: str, block_size: int = 256, kv_heads: int = HEADS, **options: object) -> KVBackend:
    if kv == "paged":
        return PagedKV(
            KVSpec(
                KVShape.uniform(LAYERS, kv_heads, DIM, DIM),
                max_num_seqs=SLOTS,
                max_model_len=LENGTH,
                block_size=block_size,
            ),
            num_blocks=SLOTS * -(-LENGTH // block_size),
        )
    config = KVConfig.from_options(
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        dtype=torch.float32,
        max_batch_size=SLOTS,
        max_context_len=LENGTH,
        memory_budget="16MiB",
        page_size=4096,
        guard="strict",  # a read past the mapped pages faults
        **options,
    )
    return VirtualKV(config)


def poison(kv: KVBackend) -> None:
    """NaN in all memory that a batch has not written."""
    for layer in range(LAYERS):
        stored = kv.stored(layer)
        for side in (stored.key, stored.value):
            if isinstance(stored, Contiguous):
                for slot in range(SLOTS):
                    kv.prepare({slot: LENGTH})
                    side[slot, :LENGTH] = float("nan")
            else:
                side.fill_(float("nan"))


def batches(packed: bool) -> Iterator[PackedBatch]:
    """Prefill in chunks, then mixed steps, then decodes: slots in changing order, one of them across blocks of 256."""
    steps: list[dict[int, int]] = [
        {3: 70, 0: 17},
        {3: 140, 0: 18, 4: 1},
        {3: 280, 0: 19, 4: 2, 1: 33},
        {4: 3, 3: 530, 1: 34},
        {0: 20, 1: 35, 3: 531, 4: 4},
        {4: 5, 0: 21},
    ]
    lengths = dict.fromkeys(range(SLOTS), 0)
    for step in steps:
        spans = [Span(slot, lengths[slot], end) for slot, end in step.items()]
        yield PackedBatch.pack(spans) if packed else PackedBatch(tuple(spans))
        lengths |= step


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("kernel_and_kv", "window", "softcap", "packed"),
    covering([*itertools.product(KERNELS, KVS)], [None, 1, 20, 1000], [None, 2.0], [True, False]),
)
def test_equals_sdpa(kernel_and_kv: tuple[str, str], window: int | None, softcap: float | None, packed: bool) -> None:
    name, kv = kernel_and_kv
    if name == "torch_flash" and softcap is not None:
        pytest.skip("it has none")
    kernel_fakes.need_operator_for(name, kv)
    kernel, reference = attention._ADAPTERS[name](), attention.get("torch_sdpa")
    backend = make_backend(kv)
    for slot in range(SLOTS):
        assert backend.allocate(LENGTH) == slot
    poison(backend)
    generator = torch.Generator().manual_seed(0)
    params = AttentionParams(scale=0.3, window=window, softcap=softcap)
    for batch in batches(packed):
        backend.prepare({span.slot: span.end for span in batch.spans})
        for layer in range(LAYERS):
            key, value = (torch.randn(batch.num_tokens, HEADS, DIM, generator=generator) for _ in range(2))
            backend.write(layer, batch, key, value)
            # As models give it: the heads first in memory.
            query = torch.randn(HEADS * GROUP, batch.num_tokens, DIM, generator=generator).transpose(0, 1)
            got = kernel(query, backend, layer, batch, params)
            want = reference(query, backend, layer, batch, params)
            assert got.shape == want.shape
            torch.testing.assert_close(got, want)
    backend.close()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("kv_order", ["NHD", "HND"])
@pytest.mark.parametrize("layout", ["layer", "sliced", "fused"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_layout(name: str, layout: str, kv_order: str) -> None:
    """With rows that do not divide a page: three heads of 8 floats."""
    backend = make_backend("virtual", kv_heads=3, layout=layout, kv_order=kv_order)
    slots = [backend.allocate(LENGTH) for _ in range(SLOTS)]
    batch = PackedBatch.pack([Span(slot, 0, 200 + slot) for slot in slots])
    backend.prepare({span.slot: span.end for span in batch.spans})
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        key, value, query = (torch.randn(batch.num_tokens, 3, DIM, generator=generator) for _ in range(3))
        backend.write(layer, batch, key, value)
        got = attention._ADAPTERS[name]()(query, backend, layer, batch, AttentionParams())
        want = attention.get("torch_sdpa")(query, backend, layer, batch, AttentionParams())
        torch.testing.assert_close(got, want)
    backend.close()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("name", "package", "calls"),
    [
        (
            "flash_attn_2",
            "flash_attn",
            [((2, 1), SLOTS, "cache_batch_idx"), ((1, 80), 1, None), ((1, 3), 1, None), ((1, 90), 1, None)],
        ),
        (
            "flash_attn_3",
            "flash_attn_interface",
            [
                ((1, HEADS * GROUP), None, "page_table"),
                ((83, HEADS * GROUP), None, "page_table"),
                ((1, 513), 1, None),
                ((1, 90), 1, None),
            ],
        ),
    ],
)
def test_a_chunk_is_a_slice_of_its_slot(
    name: str, package: str, calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single tokens share a call, and neighbours of up to 512 rows too by flash-attn 3. A chunk with an index, or with
    a table, would have a slower kernel.
    """
    made = []
    fake = sys.modules[package].flash_attn_with_kvcache

    def recorded(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        where = [name for name in ("cache_batch_idx", "page_table") if options.get(name) is not None]
        slots = None if "page_table" in where else key.shape[0]
        made.append((tuple(q.shape[:2]), slots, where[0] if where else None))
        output: torch.Tensor = fake(q, key, value, **options)
        return output

    monkeypatch.setattr(sys.modules[package], "flash_attn_with_kvcache", recorded)
    backend = make_backend("virtual")
    slots = [backend.allocate(LENGTH) for _ in range(SLOTS)]
    lengths = (1, 80, 3, 513, 90) if name == "flash_attn_3" else (1, 80, 1, 3, 90)
    batch = PackedBatch.pack([Span(slot, 0, length) for slot, length in zip(slots, lengths, strict=True)])
    backend.prepare({span.slot: span.end for span in batch.spans})
    query = torch.randn(batch.num_tokens, HEADS * GROUP, DIM)
    backend.write(0, batch, *(torch.randn(batch.num_tokens, HEADS, DIM) for _ in range(2)))
    got = attention._ADAPTERS[name]()(query, backend, 0, batch, AttentionParams())
    assert made == calls
    torch.testing.assert_close(got, attention.get("torch_sdpa")(query, backend, 0, batch, AttentionParams()))
    backend.close()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(("lengths", "calls"), [([128] * SLOTS, 1), ([512, 128, 65], 1), ([128], 1), ([513, 514], 2)])
def test_flash_attn_3_computes_a_wave_of_prompts_in_one_call(
    lengths: list[int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    module = sys.modules["flash_attn_interface"]
    fake = module.flash_attn_with_kvcache

    def recorded(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        made.append(options)
        output: torch.Tensor = fake(*tensors, **options)
        return output

    monkeypatch.setattr(module, "flash_attn_with_kvcache", recorded)
    backend = make_backend("virtual")
    slots = [backend.allocate(LENGTH) for _ in lengths]
    batch = PackedBatch.pack([Span(slot, 0, length) for slot, length in zip(slots, lengths, strict=True)])
    backend.prepare({span.slot: span.end for span in batch.spans})
    for layer in range(LAYERS):
        key, value, query = (torch.randn(batch.num_tokens, HEADS, DIM) for _ in range(3))
        backend.write(layer, batch, key, value)
        got = attention._ADAPTERS["flash_attn_3"]()(query, backend, layer, batch, AttentionParams())
        want = attention.get("torch_sdpa")(query, backend, layer, batch, AttentionParams())
        torch.testing.assert_close(got, want)
    assert len(made) == calls * LAYERS
    backend.close()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", ["flash_attn_3", "flashinfer"])
def test_blocks_of_any_size(name: str) -> None:
    backend = make_backend("paged", block_size=7)
    slots = [backend.allocate(LENGTH) for _ in range(SLOTS)]
    for start, end in ((0, 30), (30, 31)):
        batch = PackedBatch.pack(
            [Span(slot, start, end + slot * (start == 0)) for slot in slots[: 5 - 4 * (start > 0)]]
        )
        backend.prepare({span.slot: span.end for span in batch.spans})
        key, value, query = (torch.randn(batch.num_tokens, HEADS, DIM) for _ in range(3))
        backend.write(0, batch, key, value)
        got = attention._ADAPTERS[name]()(query, backend, 0, batch, AttentionParams())
        torch.testing.assert_close(got, attention.get("torch_sdpa")(query, backend, 0, batch, AttentionParams()))


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", KERNELS)
def test_batches_may_take_turns(name: str, whole_kv: str) -> None:
    """What a kernel keeps of a batch is not taken for another's."""
    kernel_fakes.need_operator_for(name, whole_kv)
    backend = make_backend(whole_kv, block_size=256)
    slots = [backend.allocate(LENGTH) for _ in range(2)]
    backend.prepare(dict(zip(slots, (9, 20), strict=True)))
    batches = [PackedBatch.pack([Span(slots[0], 8, 9)]), PackedBatch.pack([Span(slots[1], 0, 20)])]
    for slot, length in zip(slots, (9, 20), strict=True):
        batch = PackedBatch.pack([Span(slot, 0, length)])
        backend.write(0, batch, *(torch.randn(length, HEADS, DIM) for _ in range(2)))
    kernel, reference = attention._ADAPTERS[name](), attention.get("torch_sdpa")
    for batch in [*batches, *batches]:
        query = torch.randn(batch.num_tokens, HEADS * GROUP, DIM)
        got, want = (adapter(query, backend, 0, batch, AttentionParams()) for adapter in (kernel, reference))
        torch.testing.assert_close(got, want)
    backend.close()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", KERNELS)
def test_layers_may_differ_in_one_batch(name: str, whole_kv: str) -> None:
    """In KV heads, or in the blocks of their tokens: what a kernel keeps of one layer is not taken for another's."""
    kernel_fakes.need_operator_for(name, whole_kv)
    kernel, reference = attention._ADAPTERS[name](), attention.get("torch_sdpa")
    batch = PackedBatch.pack([Span(0, 8, 9), Span(1, 0, 20)])
    lengths = {0: 9, 1: 20}
    backends = []
    for kv_heads, order in ((HEADS, (0, 1)), (1, (0, 1)), (HEADS, (1, 0))):
        backend = make_backend(whole_kv, block_size=256, kv_heads=kv_heads)
        assert [backend.allocate(LENGTH) for _ in lengths] == [*lengths]
        for slot in order:  # in which blocks are taken
            backend.prepare({slot: lengths[slot]})
            stored = PackedBatch.pack([Span(slot, 0, lengths[slot])])
            backend.write(0, stored, *(torch.randn(lengths[slot], kv_heads, DIM) for _ in range(2)))
        backends.append(backend)
    for backend in [*backends, *backends]:
        query = torch.randn(batch.num_tokens, HEADS * GROUP, DIM)
        got, want = (adapter(query, backend, 0, batch, AttentionParams()) for adapter in (kernel, reference))
        torch.testing.assert_close(got, want)
    for backend in backends:
        backend.close()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
@pytest.mark.parametrize("name", KERNELS)
def test_serves_a_model(name: str, family: str, whole_kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One argument swaps the kernel; greedy tokens are those of SDPA."""
    kernel_fakes.need_operator_for(name, whole_kv)
    monkeypatch.setattr(attention._ADAPTERS[name], "refusal", lambda self, case: None)
    prompts: list[object] = [[5, 9, 3], list(range(2, 60)), [7] * 20]
    params = SamplingParams(temperature=0, max_tokens=12)

    def tokens(kernel: str) -> list[list[int]]:
        options = {
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "block_size": 256,
            "memory_budget": "64MiB",
        }
        with LLM(make_model(family), **chosen(whole_kv, attention=kernel, skip_tokenizer_init=True, **options)) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        return [output.outputs[0].token_ids for output in outputs]

    assert tokens(name) == tokens("torch_sdpa")


class TestChoice:
    @pytest.fixture(autouse=True)
    def a_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        for name in modules:
            monkeypatch.setitem(sys.modules, name, FAKES[name]())

    def test_names(self) -> None:
        assert attention.get("auto").name == "native"
        assert attention.get("auto", Case(head_dim=20)).name == "torch_sdpa"
        assert [kernel.name for kernel in attention.adapters()] == list(attention.names())
        assert {*KERNELS, "native", "torch_sdpa"} <= {*attention.names()}
        with pytest.raises(
            ConfigError,
            match="unknown attention kernel 'flash_attention_9'; choose one of auto, flash_attn_3",
        ):
            attention.get("flash_attention_9")

    @pytest.mark.parametrize(
        ("case", "why"),
        [
            (Case(), "it runs on CUDA, not on cpu"),
            (Case(CUDA), "not in float32"),
            (Case(CUDA, torch.bfloat16, 192, 128), "keys and values of one size, not 192 and 128"),
            (Case(CUDA, torch.bfloat16, 264), "no kernel for heads of 264"),
            (Case(CUDA, torch.bfloat16, 60), "no kernel for heads of 60"),
            (
                Case(CUDA, torch.bfloat16, 128, block_size=16),
                "multiple of 256 tokens, not 16" if "block_table" in kernel_fakes.OPERATOR else "has no block_table",
            ),
            (Case(CUDA, torch.bfloat16, 128, softcap=True), "no softcap"),
            (Case(CUDA, torch.bfloat16, 128, sinks=True), "no sinks"),
        ],
    )
    def test_a_wrong_choice_says_why_and_what_is_possible(self, case: Case, why: str) -> None:
        usable = ["torch_sdpa"] if case.device.type == "cuda" else ["native", "torch_sdpa"]
        assert attention.get("auto", case).name == usable[0]
        with pytest.raises(
            ConfigError, match=f"'torch_flash' cannot be used here: .*{why}.*; possible: auto, {', '.join(usable)}"
        ):
            attention.get("torch_flash", case)

    def test_the_default_on_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """flash-attn 3 if it is installed on a Hopper, otherwise what torch brings."""
        case = Case(CUDA, torch.bfloat16, 128)
        assert attention.get("auto", case).name == "torch_flash"
        self.install(monkeypatch, *FAKES)
        assert attention.get("auto", case).name == "flash_attn_3"
        assert [attention.get(name, case).name for name in KERNELS] == KERNELS

    def test_the_next_one_where_it_lacks_something(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gemma = Case(CUDA, torch.bfloat16, 256, softcap=True)
        with pytest.raises(ConfigError, match="flash-attn is not installed"):
            attention.get("flash_attn_2", gemma)
        self.install(monkeypatch, "flash_attn", "flashinfer")
        assert attention.get("auto", gemma).name == "flash_attn_2"
        small_blocks = Case(CUDA, torch.bfloat16, 128, block_size=16)
        assert attention.get("auto", small_blocks).name == "flashinfer"

    def test_compute_capability(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, *FAKES)
        case = Case(CUDA, torch.bfloat16, 128)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        assert attention.get("auto", case).name == "torch_flash"
        assert attention.get("flash_attn_2", case).name == "flash_attn_2"
        with pytest.raises(ConfigError, match="it is for Hopper"):
            attention.get("flash_attn_3", case)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        assert attention.get("auto", case).name == "torch_sdpa"

    def test_windows_over_wide_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """flash-attn 3 gets them wrong."""
        self.install(monkeypatch, *FAKES)
        gemma = Case(CUDA, torch.bfloat16, 256, window=True)
        assert attention.get("auto", gemma).name == "torch_flash"
        with pytest.raises(ConfigError, match="windows over heads of 256 come out wrong"):
            attention.get("flash_attn_3", gemma)
        assert attention.get("flash_attn_3", replace(gemma, window=False)).name == "flash_attn_3"
        assert attention.get("auto", replace(gemma, head_dim=128)).name == "flash_attn_3"

    def test_an_operator_without_block_tables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        schema = torch._C.parse_schema("x::f(Tensor query, Tensor? seqused_k=None) -> Tensor")
        monkeypatch.setattr(torch.ops.aten._flash_attention_forward.default, "_schema", schema)
        assert attention.get("torch_flash", Case(CUDA, torch.float16)).name == "torch_flash"
        with pytest.raises(ConfigError, match="has no block_table"):
            attention.get("torch_flash", Case(CUDA, torch.float16, block_size=256))

    def test_whole_layers_where_there_are_none(self) -> None:
        case = Case(CUDA, torch.bfloat16, 128, whole_layers=False)
        assert attention.get("auto", case).name == "torch_sdpa"
        with pytest.raises(ConfigError, match=r"it reads whole layers.*; possible: auto, torch_sdpa"):
            attention.get("torch_flash", case)

    def test_what_an_adapter_does_not_declare(self) -> None:
        class Undeclared(attention.TorchSDPA):
            reads = "slots"  # type: ignore[assignment]

        with pytest.raises(ConfigError, match="reads='slots'; give 'request' or 'layer'"):
            attention.get(Undeclared())
        with pytest.raises(ConfigError, match=r"is the class TorchSDPA; give an object of it, TorchSDPA\(\)"):
            attention.get(attention.TorchSDPA)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="SimpleNamespace does not declare guard_rows, reads, refusal"):
            attention.get(SimpleNamespace(name="own", capturable=False))  # type: ignore[arg-type]

    def test_descriptions_say_what_is_not_possible(self) -> None:
        lines = attention.describe(Case(CUDA, torch.bfloat16, 128))
        assert [line.split(":")[0] for line in lines] == list(attention.names())
        assert "Not here: flash-attn 3 is not installed" in lines[0]
        assert "Not here" not in lines[1]
        assert "Not here: flash-attn is not installed" in lines[2]


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_kernel_lacks_is_not_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was chosen without knowing the model."""
    kernel, backend, query = attention._ADAPTERS[name](), make_backend("virtual"), torch.zeros(1, HEADS, DIM)
    batch = PackedBatch.pack([Span(0, 0, 1)])
    with pytest.raises(ConfigError, match="has no sinks, which this layer asks for"):
        kernel(query, backend, 0, batch, AttentionParams(sinks=torch.zeros(HEADS)))
    if name == "torch_flash":
        with pytest.raises(ConfigError, match="has no softcap"):
            kernel(query, backend, 0, batch, AttentionParams(softcap=3.0))
    if name == "flash_attn_3":
        monkeypatch.setitem(sys.modules, "flash_attn_interface", kernel_fakes.flash_attn_3())
        backend.prepare({backend.allocate(LENGTH): 20})
        batch = PackedBatch.pack([Span(0, 19, 20)])
        with pytest.raises(ConfigError, match="has no window, which this layer asks for"):
            kernel(torch.zeros(1, HEADS, 256), backend, 0, batch, AttentionParams(window=9))
    backend.close()


def test_slots_that_are_too_many_rows() -> None:
    slots = Contiguous(*(torch.empty(1, 8, 1, 8).expand(2, 8, 1, 8).as_strided((2**20, 8, 1, 8), (0, 8, 8, 1)),) * 2)
    object.__setattr__(slots, "slot_rows", 2**12)
    with pytest.raises(ConfigError, match="over 2\\^31 rows"):
        _ = slots.rows


@pytest.mark.parametrize(
    ("query", "span", "message"),
    [
        (
            torch.ones(1, 6, DIM).bfloat16(),
            Span(0, 9, 10),
            "torch.bfloat16 do not fit keys of 2 heads of 8 torch.f",
        ),
        (torch.ones(1, 5, DIM), Span(0, 9, 10), "do not fit keys of 2 heads"),
        (torch.ones(1, 0, DIM), Span(0, 9, 10), "do not fit keys of 2 heads"),
        (torch.ones(1, 6, 2 * DIM), Span(0, 9, 10), "do not fit keys of 2 heads"),
        (torch.ones(1, 6, DIM), Span(0, 0, 10), "1 rows of queries, but 1 requests have rows 0 to 10"),
        (torch.ones(1, 6, DIM), Span(SLOTS, 9, 10), f"slots from {SLOTS} to {SLOTS}; there are {SLOTS}"),
        (torch.ones(1, 6, DIM), Span(0, LENGTH, LENGTH + 1), f"there is room for {LENGTH}"),
    ],
)
def test_the_kernels_for_cpus_read_no_memory_that_is_not_there(query: torch.Tensor, span: Span, message: str) -> None:
    class Stored(SimpleNamespace):
        def stored(self, layer: int) -> Contiguous:
            return Contiguous(*torch.ones(2, SLOTS, LENGTH, HEADS, DIM))

    with pytest.raises(ConfigError, match=message):
        attention.get("native")(query, Stored(), 0, PackedBatch((span,)), AttentionParams())  # type: ignore[arg-type]


def test_batches_are_on_their_device_whatever_is_torchs_default() -> None:
    column = torch.tensor([3], dtype=torch.int32)
    with torch.device("meta"):
        for spans in ((Span(3, 3, 4),), attention.SpanColumns(column, column, column + 1)):
            batch = PackedBatch(spans)
            assert batch.together.lengths.tolist() == [4]
            assert batch.slots.tolist() == [3]


def test_adapters_are_short_and_say_their_limits() -> None:
    for name in KERNELS:
        adapter = attention._ADAPTERS[name]
        text = Path(sys.modules[adapter.__module__].__file__ or "").read_text()
        code = re.sub(r'^""".*?"""\n', "", text, flags=re.DOTALL)
        assert len(code.splitlines()) < 65, name
        assert "guard rows" in text
