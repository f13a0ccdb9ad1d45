"""`kv_cache_dtype="int8"`: how far its logits are from those of the model's type, and all that a cache does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from demo.prompts import prompts as demo_prompts
from tests.support.effort import covering
from tests.support.paths import ROOT
from tests.support.tiny_models import make_model, make_prompts
from vattn import KVConfig, TensorGroup
from vattn.attention import AttentionParams, Case, KVSource, PackedBatch, Reads, Span, whole_layer
from vattn.engine import LLM, SamplingParams
from vattn.engine.kv.int8 import QuantisedKV
from vattn.engine.scheduling.swap import PreemptionMode
from vattn.errors import ConfigError

pytestmark = pytest.mark.slow(1)

MODEL = str(ROOT / "demo" / "model")
FAMILIES = ("llama", "gemma2", "gpt-oss", "mistral-window", "deepseek-v2")
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def generate(prompts: list[list[int]], family: str, params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    with LLM(make_model(family), **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.check()
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def agreeing(ones: list[list[int]], others: list[list[int]]) -> float:
    """The share of tokens that are equal, position by position."""
    pairs = [pair for one, other in zip(ones, others, strict=True) for pair in zip(one, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def test_close_to_float_on_a_trained_model() -> None:
    """Every token of the demo's prompts and answers is predicted from a cache in 8 bits, and from one in float."""
    with LLM(MODEL, dtype="float32") as llm:
        outputs = llm.generate(demo_prompts()[:12], SamplingParams(temperature=0, max_tokens=150), use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        texts = [output.prompt_token_ids + answer for output, answer in zip(outputs, answers, strict=True)]
        token_bytes = llm.token_bytes
    logits: dict[str, Tensor] = {}
    for kv_cache_dtype in ("auto", "int8"):
        # Chunks of 16 tokens, so that most of what a query sees was read from the cache.
        with LLM(
            MODEL, dtype="float32", kv_cache_dtype=kv_cache_dtype, max_num_seqs=1, max_num_batched_tokens=16
        ) as llm:  # type: ignore[arg-type]
            seen = []
            run = llm.core.runner.run

            def note(entries: Any, run: Any = run, seen: list[Tensor] = seen) -> Any:
                forward = run(entries)
                seen.append(forward.prompt_logits)
                return forward

            llm.core.runner.run = note  # type: ignore[method-assign]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
            assert (llm.token_bytes < 0.35 * token_bytes) == (kv_cache_dtype == "int8")
        logits[kv_cache_dtype] = torch.cat(seen)
    difference = (logits["int8"] - logits["auto"]).abs()
    same = (logits["int8"].argmax(-1) == logits["auto"].argmax(-1)).float().mean().item()
    assert len(difference) > 1000
    assert 0 < difference.mean() < 0.01 * logits["auto"].std()
    assert same > 0.99
    with LLM(MODEL, dtype="float32", kv_cache_dtype="int8") as llm:
        outputs = llm.generate(demo_prompts()[:12], SamplingParams(temperature=0, max_tokens=150), use_tqdm=False)
        ours = [list(output.outputs[0].token_ids) for output in outputs]
    assert sum(one == other for one, other in zip(ours, answers, strict=True)) >= 11


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_shares_the_batch(family: str) -> None:
    """The tokens are those of each prompt alone, up to a code that falls on the other side."""
    prompts = make_prompts([1, 23, 5, 40, 12])
    alone = [generate([prompt], family, kv_cache_dtype="int8")[0] for prompt in prompts]
    packed = generate(prompts, family, kv_cache_dtype="int8", max_num_seqs=3, max_num_batched_tokens=11)
    assert agreeing(packed, alone) > 0.9


@pytest.mark.parametrize(("family", "mode"), covering(list(FAMILIES), ["recompute", "swap"]))
def test_preemption_and_windows(family: str, mode: PreemptionMode) -> None:
    """Requests that lose their cache, and windows that move over pages of few tokens."""
    prompts = make_prompts([90, 70, 110])
    params = SamplingParams(temperature=0, max_tokens=50)
    options: dict[str, Any] = {
        "kv_cache_dtype": "int8",
        "max_num_batched_tokens": 32,
        "max_num_seqs": 3,
        "kv_options": {"page_size": 4096, "eager_pages": 0},
    }
    calm = generate(prompts, family, params, **options)
    with LLM(make_model(family), preemption_mode=mode, **options) as llm:
        steps = 0

        def preempt(_: object) -> None:
            nonlocal steps
            steps += 1
            if steps % 20 == 0 and llm.core.scheduler.running:
                llm.core.scheduler.preempt_last()

        llm.on_step = preempt
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.check()
        swap = llm.core.scheduler.swap
        assert swap is not None
        assert (swap.num_loaded > 0) == (mode == "swap")
    assert sum(output.metrics.num_preemptions for output in outputs) > 1
    assert agreeing([list(output.outputs[0].token_ids) for output in outputs], calm) > 0.9


def test_prefixes_are_found() -> None:
    start = make_prompts([150])[0]
    prompts = [start + tail for tail in make_prompts([3, 9, 20], seed=7)]
    pages = {"page_size": 4096, "layout": "fused", "kv_order": "NHD"}  # blocks of 128 tokens
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "max_num_seqs": 1, "kv_options": pages}
    params = SamplingParams(temperature=0, max_tokens=10)
    with LLM(make_model("llama"), **options) as llm:
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        assert all(output.num_cached_tokens for output in outputs[1:])
    cold = generate(prompts, "llama", params, enable_prefix_caching=False, **options)
    assert agreeing([list(output.outputs[0].token_ids) for output in outputs], cold) > 0.9


def make(dtype: str = "bfloat16") -> QuantisedKV:
    groups = [TensorGroup(layers=range(2), num_kv_heads=2, head_dim=16)]
    size: dict[str, Any] = {"max_batch_size": 3, "max_context_len": 512, "memory_budget": "4MiB"}
    return QuantisedKV(KVConfig(groups=groups, dtype=dtype, **size))


def test_copies_are_exact() -> None:
    """Copied out and back, and forked: the same codes and scales, so exactly the same values."""
    kv = make()
    generator = torch.Generator().manual_seed(3)
    slot = kv.allocate(300)
    kv.prepare({slot: 300})
    written = PackedBatch((Span(slot, 0, 300),))
    for layer in range(2):
        rows = (torch.randn(300, 2, 16, generator=generator).bfloat16() for _ in range(2))
        kv.write(layer, written, *rows)
    want = [[side.clone() for side in kv.read(layer, slot, 300)] for layer in range(2)]
    copies = [kv.copy_out(layer, slot, 300, 40) for layer in range(2)]
    assert [(tuple(rows.shape), rows.dtype) for rows in copies[0]] == [
        ((260, 2, 16), torch.int8),
        ((260, 2, 16), torch.int8),
        ((260, 2, 1), torch.bfloat16),
        ((260, 2, 1), torch.bfloat16),
    ]
    other, third = kv.allocate(300), kv.fork(slot)
    kv.prepare({other: 300})
    for layer in range(2):
        kv.copy_in(layer, PackedBatch((Span(other, 40, 300),)), copies[layer])
        for side in (0, 1):
            assert torch.equal(kv.read(layer, other, 300, 40)[side], want[layer][side][:, :, 40:])
            assert torch.equal(kv.read(layer, third, 300)[side], want[layer][side])
    kv.check()
    kv.close()


def test_it_counts_what_it_dequantises_into_until_that_is_trimmed() -> None:
    kv = make()
    slot = kv.allocate(300)
    kv.prepare({slot: 300}, look_ahead=False)  # nothing more is mapped in the background between the counts
    kv.check()
    before = kv.stats()
    for length in (40, 100, 60):
        kv.read(0, slot, length)
    read = 2 * 125 * 2 * 16 * 2  # K and V, with a quarter more rows than the longest
    held = kv.stats()
    assert held.physical_bytes - before.physical_bytes == read
    assert held.reserved_bytes - before.reserved_bytes == read
    assert held.peak_physical_bytes - before.peak_physical_bytes == read
    kv.free(slot)
    assert kv.trim() == held.physical_bytes
    assert kv.stats().physical_bytes == 0
    assert kv.stats().peak_physical_bytes == kv.cache.stats().peak_mapped_bytes + read
    kv.close()


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="only floating point"):
        make("int8")
    kv = make()
    with pytest.raises(ConfigError, match="torch_sdpa"):
        whole_layer(kv, 0)
    kv.close()
    model = make_model("llama")
    with pytest.raises(ConfigError, match="kv='virtual'"):
        LLM(model, kv="paged", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="auto, int8"):
        LLM(model, kv_cache_dtype="fp8")  # type: ignore[arg-type]


class OwnKernel:
    """A kernel that no class of the library knows: a softmax over the scores of one query at a time."""

    name = "own"
    guard_rows = 0
    reads: Reads = "request"
    capturable = False

    def refusal(self, case: Case) -> str | None:
        return None

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        outputs: list[Tensor] = []
        for span in batch.spans:
            key, value = (side[0].float() for side in kv.read(layer, span.slot, span.end))
            for position in range(span.start, span.end):
                first = 0 if params.window is None else max(0, position - params.window + 1)
                heads = query[len(outputs)].float().unflatten(0, (len(key), -1))
                scores = heads @ key[:, first : position + 1].mT * (params.scale or query.shape[-1] ** -0.5)
                outputs.append((scores.softmax(-1) @ value[:, first : position + 1]).flatten(0, 1).to(query.dtype))
        return torch.stack(outputs)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "deepseek-v2"])
def test_a_kernel_of_a_user_reads_it(family: str) -> None:
    prompts = make_prompts([40, 3, 17])
    own = generate(prompts, family, kv_cache_dtype="int8", attention=OwnKernel())
    assert agreeing(own, generate(prompts, family, kv_cache_dtype="int8", attention="torch_sdpa")) > 0.9


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"kv": "dynamic"}])
def test_a_kernel_that_reads_whole_layers_does_not(options: dict[str, Any]) -> None:
    kernel = OwnKernel()
    kernel.reads = "layer"
    with pytest.raises(
        ConfigError,
        match="it reads whole layers, and this cache can be read request by request only; possible: auto, native",
    ):
        LLM(make_model("llama"), attention=kernel, **options)
