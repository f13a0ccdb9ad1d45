"""Latents in the cache (MLA): what is stored, both ways to attend over it, and which modules it is for."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from tests.support.backends import chosen
from tests.support.tiny_models import expected, make_model, make_prompts
from vattn import packed
from vattn.attention import AttentionParams, PackedBatch, Span, TorchSDPA
from vattn.engine import LLM, SamplingParams
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.static import StaticKV
from vattn.packed import KVShape, LatentAttention, find_latents, kv_shape
from vattn.packed.latents import handing_on

pytestmark = pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, "expand_kv"),
    reason="this transformers expands latents inside forward, so keys and values are stored",
)

FAMILIES = ("deepseek-v2", "deepseek-v3")
RANK, ROPE, NOPE, V_HEAD_DIM, HEADS, LAYERS = 16, 8, 8, 12, 4, 3  # of the tiny models


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    """A model of its own, as a packed step needs it."""
    model: Any = copy.deepcopy(make_model(request.param))
    packed.register()
    model.set_attn_implementation("vattn")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_per_token(family: str, kv: str) -> None:
    """One row of latent and rotary part for all heads; every head's key and value with enforce_eager."""
    tokens = {}
    for eager in (False, True):
        with LLM(make_model(family), **chosen(kv, block_size=128, enforce_eager=eager, max_num_seqs=2)) as llm:
            per_head = HEADS * (NOPE + ROPE + V_HEAD_DIM)
            assert llm.token_bytes == 4 * LAYERS * (per_head if eager else RANK + ROPE)
            prompts = make_prompts([30, 3])
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
            tokens[eager] = [output.outputs[0].token_ids for output in outputs]
    assert tokens[False] == tokens[True] == [expected(family, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(("start", "end"), [(0, 1), (40, 41), (0, 40), (23, 40)])
def test_absorbed_and_expanded_agree(model: Any, start: int, end: int) -> None:
    kernel = TorchSDPA()
    latent = find_latents(model, kv_shape(model))[1]
    kv = StaticKV(KVSpec(KVShape.uniform(LAYERS, 1, RANK + ROPE, 0), max_num_seqs=1, max_model_len=end), num_slots=1)
    generator = torch.Generator().manual_seed(5)
    kv.prepare({kv.allocate(end): end})
    rows = torch.randn(end, 1, RANK + ROPE, generator=generator)
    kv.write(1, PackedBatch((Span(0, 0, end),)), rows, rows[..., :0])
    query = torch.randn(end - start, HEADS, NOPE + ROPE, generator=generator)
    batch, params = PackedBatch((Span(0, start, end),)), AttentionParams()
    params = AttentionParams(scale=query.shape[-1] ** -0.5)
    with torch.inference_mode():
        ways = [latent.attend_as(kernel, query, kv, batch, params, expanded=expanded) for expanded in (False, True)]
        torch.testing.assert_close(ways[0], ways[1])
        torch.testing.assert_close(latent.attend(kernel, query, kv, batch, AttentionParams()), ways[0])


def test_each_chunk_goes_the_cheaper_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes and chunks below `expand_from` are absorbed, longer ones expanded, in one step and in the right rows."""
    ways: list[list[tuple[int, bool]]] = []
    attend_as = LatentAttention.attend_as

    def note(
        self: LatentAttention, attention: Any, query: Tensor, kv: Any, batch: PackedBatch, *a: Any, **k: Any
    ) -> Any:
        if self.layer == 0:
            ways.append([(len(span), k["expanded"]) for span in batch.spans])
        return attend_as(self, attention, query, kv, batch, *a, **k)

    monkeypatch.setattr(LatentAttention, "attend_as", note)
    prompts = make_prompts([1, 20, 10, 25, 8])
    with LLM(make_model("deepseek-v3"), max_num_seqs=5, max_num_batched_tokens=512) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    # The threshold is 16 * (8 + 12) / (2 * (16 + 8) - (8 + 8 + 12)) = 16.
    assert ways[:4] == [[(1, False)], [(20, True)], [(10, False)], [(25, True)]]
    assert ways[4] == [(8, False)]
    assert not any(expanded for way in ways[5:] for _, expanded in way)
    assert [o.outputs[0].token_ids for o in outputs] == [expected("deepseek-v3", prompt, 5) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_of_latents_is_found(family: str) -> None:
    start = make_prompts([140])[0]  # blocks are of 128 tokens: what 4 KiB and a row of 96 bytes have in common
    prompts = [start + tail for tail in make_prompts([3, 9, 20], seed=7)]
    options = {"page_size": 4096, "layout": "layer"}
    with LLM(make_model(family), max_num_seqs=2, max_num_batched_tokens=40, kv_options=options) as llm:
        outputs = [
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)[0] for prompt in prompts
        ]
        llm.check()
    # A request's slot keeps what follows its last block, and all prompts go on there with the same twelve tokens.
    assert [output.num_cached_tokens for output in outputs] == [0, 140, 140]
    assert [o.outputs[0].token_ids for o in outputs] == [expected(family, prompt, 6) for prompt in prompts]


def test_others_may_use_the_model_in_between() -> None:
    """Another engine with another kind of cache, transformers' own generate, and the model as it was afterwards."""
    model = make_model("deepseek-v2")
    prompt = make_prompts([25])[0]
    want = expected("deepseek-v2", prompt, 6)
    params = SamplingParams(temperature=0, max_tokens=6)
    ids = torch.tensor([prompt])
    with LLM(model) as latents, LLM(model, enforce_eager=True) as keys:
        for llm in (latents, keys):
            llm.add_request("0", prompt, params)
        got: dict[LLM, list[int]] = {}
        while latents.has_unfinished() or keys.has_unfinished():
            for llm in (latents, keys):
                for output in llm.step():
                    got[llm] = output.outputs[0].token_ids
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
            assert alone[0, len(prompt) :].tolist() == want
    assert got == {latents: want, keys: want}
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_others_may_use_the_model_meanwhile(model: Any) -> None:
    """In other threads: only the one that runs a step hands latents on."""
    latents = find_latents(model, kv_shape(model))
    attention = model.model.layers[0].self_attn
    latent = torch.randn(1, 1, 3, attention.kv_lora_rank)
    rope = torch.randn(1, 1, 3, attention.qk_rope_head_dim)
    with torch.inference_mode():
        expected = attention.expand_kv(latent, rope)

    def step() -> None:
        with handing_on(latents.values()):
            assert attention.expand_kv(latent, rope)[1].shape[-1] == 0

    with torch.inference_mode(), handing_on(latents.values()):
        assert attention.expand_kv(latent, rope)[1].shape[-1] == 0
        with ThreadPoolExecutor(1) as threads:
            got = threads.submit(attention.expand_kv, latent, rope).result()
            threads.submit(step).result()
        assert all(map(torch.equal, got, expected))
        assert attention.expand_kv(latent, rope)[1].shape[-1] == 0
    assert "expand_kv" not in vars(attention)


def test_modules_that_expand_otherwise_are_left_alone(model: Any) -> None:
    shape = kv_shape(model)
    assert sorted(find_latents(model, shape)) == list(range(LAYERS))
    attention = [layer.self_attn for layer in model.model.layers]

    class Twice(type(attention[0])):  # type: ignore[misc]
        def expand_kv(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
            key, value = super().expand_kv(latent, rope)
            return key, 2 * value

    class Adapted(nn.Linear):
        pass

    attention[0].__class__ = Twice
    attention[1].kv_b_proj.__class__ = Adapted
    assert sorted(find_latents(model, shape)) == [2]


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward", "forward of attention", "expand_kv"])
def test_modules_that_somebody_changed_before(model: Any, how: str) -> None:
    """What steps would no longer call, or would replace."""
    shape = kv_shape(model)
    attention = model.model.layers[1].self_attn
    changed = attention.kv_b_proj if how in ("hook", "pre-hook", "forward") else attention
    if how == "hook":
        changed.register_forward_hook(lambda *_: None)
    elif how == "pre-hook":
        changed.register_forward_pre_hook(lambda *_: None)
    elif how == "expand_kv":
        changed.expand_kv = changed.expand_kv
    else:
        changed.forward = changed.forward
    assert sorted(find_latents(model, shape)) == [0, 2]
    with LLM(model, max_num_seqs=2) as llm:
        [output] = llm.generate(make_prompts([20]), SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        assert output.error is None
        assert sorted(llm.core.loaded.latents) == [0, 2]


class _Quantised(Tensor):
    """A weight as torchao has them: a layer of the usual type computes with it, and few other functions take it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Quantised:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            rows, weight, bias = args
            return func(rows, weight.inner, bias)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"{func} of a quantised weight")


def test_quantised_projections_are_left_alone(model: Any, request: pytest.FixtureRequest) -> None:
    family = request.node.callspec.params["model"]
    prompt = make_prompts([20])[0]
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        projection.weight = nn.Parameter(_Quantised(projection.weight.detach()), requires_grad=False)
    with LLM(model, max_num_seqs=2) as llm:
        assert not llm.core.loaded.latents
        [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert output.outputs[0].token_ids == expected(family, prompt, 6)


def test_packed_projections_are_as_they_were(model: Any) -> None:
    """For another engine over the model."""
    with LLM(model.bfloat16(), max_num_seqs=2), LLM(model, max_num_seqs=2) as second:
        assert sorted(second.core.loaded.latents) == list(range(LAYERS))
