"""Models on a GPU: `VirtualCache` under `generate()`, and the engine, token for token against other caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import vattn
from bench.harness.models import CACHE
from tests.support.tiny_models import VOCAB, expected, make_model, make_prompts, random_model
from vattn.engine import LLM, SamplingParams

DEVICE = "cuda"
FAMILIES = ["llama", "mistral-window", "gemma2", "gpt-oss", "mixtral", "deepseek-v2"]
PROMPT, NEW = make_prompts([40])[0], 60


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    made = type(model)(model.config)
    made.load_state_dict(model.state_dict())
    made.train(False)
    return made.to(DEVICE)


def wide() -> PreTrainedModel:
    """A token takes 4 KiB per side and layer, so that a page of 2 MiB has at most 512 of them."""
    made = random_model(
        "LlamaConfig",
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made.to(DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_tokens_of_the_cpu(family: str) -> None:
    model = copy_of(make_model(family))
    ids = torch.tensor([PROMPT], device=DEVICE)
    with vattn.VirtualCache(model, max_context_len=256, memory_budget="512MiB") as cache:
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, do_sample=False, max_new_tokens=NEW
        )
        assert found[0, len(PROMPT) :].tolist() == expected(family, PROMPT, NEW)


@pytest.mark.parametrize("options", [{}, {"layout": "layer"}, {"layout": "fused", "page_size": 2**22}])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_padded_batch_grows_over_pages(options: dict[str, Any], beams: int) -> None:
    """Rows begin at different tokens, and are reordered by beams; against `DynamicCache` on the same device."""
    model = wide()
    prompts = make_prompts([480, 77, 300])
    ids = torch.tensor([[0] * (480 - len(prompt)) + prompt for prompt in prompts], device=DEVICE)
    asked = {
        "attention_mask": (ids != 0).long(),
        "do_sample": False,
        "max_new_tokens": 60,
        "num_beams": beams,
    }
    want = model.generate(ids, **{CACHE: DynamicCache(config=model.config)}, **asked)
    with vattn.VirtualCache(model, max_context_len=2048, memory_budget="1GiB", **options) as cache:
        found = model.generate(ids, **{CACHE: cache}, **asked)
    assert found.tolist() == want.tolist()


def test_eight_bits_are_close() -> None:
    model = wide()
    ids = torch.tensor(make_prompts([700]), device=DEVICE)
    with torch.inference_mode(), vattn.VirtualCache(model, memory_budget="1GiB", kv_cache_dtype="int8") as cache:
        want = model(ids, **{CACHE: DynamicCache(config=model.config)}).logits
        model(ids[:, :600], **{CACHE: cache})
        found = model(ids[:, 600:], **{CACHE: cache}).logits
    error = (found - want[:, 600:]).abs().mean() / want[:, 600:].abs().mean()
    assert float(error) < 0.1


def make_llm(model: PreTrainedModel, **options: Any) -> LLM:
    return LLM(model, **{"max_model_len": 2048, "max_num_seqs": 4, "skip_tokenizer_init": True, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_gives_the_tokens_of_the_cpu(family: str) -> None:
    prompts = make_prompts([40, 3, 90])
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with make_llm(copy_of(make_model(family)), max_model_len=256, memory_budget="512MiB") as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        llm.check()
    assert [output.outputs[0].token_ids for output in outputs] == [expected(family, p, NEW) for p in prompts]


@pytest.mark.parametrize("kv", ["virtual", "paged", "static", "dynamic"])
def test_prefixes_are_found(kv: str) -> None:
    """Prompts of several pages that begin alike; where a backend shares, in memory for two that do not."""
    start, *ends = make_prompts([1100, 30, 41, 52])
    prompts = [start + end for end in ends]
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    model = wide()
    ids = torch.tensor([prompts[0]], device=DEVICE)
    want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    budget = "64MiB" if kv in ("virtual", "paged") else "512MiB"
    with make_llm(model, kv=kv, memory_budget=budget, max_num_batched_tokens=512) as llm:
        first, *others = llm.generate(prompts, sampling, use_tqdm=False)
        (again,) = llm.generate(prompts[:1], sampling, use_tqdm=False)
        llm.check()
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == want[0, len(prompts[0]) :].tolist()
    assert [len(output.outputs[0].token_ids) for output in others] == [40, 40]
    if kv in ("virtual", "paged"):
        assert (again.num_cached_tokens or 0) >= 512


def test_an_engine_in_eight_bits() -> None:
    prompts = make_prompts([700, 20])
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with make_llm(wide(), memory_budget="256MiB", kv_cache_dtype="int8") as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        llm.check()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40, 40]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
