"""Models that were given as objects: changed while engines use them, and shared by several."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from tests.support.tiny_models import VOCAB, make_model, random_model
from vattn.engine import LLM, SamplingParams
from vattn.engine.model.optimize import supported
from vattn.errors import ConfigError

_PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
_PROMPTS = [[3, 4, 5], [7] * 40]

Report = list[tuple[list[int], float]]


def _model(family: str) -> PreTrainedModel:
    return copy.deepcopy(make_model(family)).bfloat16()


def _smaller(model: PreTrainedModel) -> PreTrainedModel:
    """The model, with other weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.75)
    return model


def _generate(llm: LLM) -> Report:
    outputs = (each.outputs[0] for each in llm.generate(_PROMPTS, _PARAMS, use_tqdm=False))
    return [(list(output.token_ids), output.cumulative_logprob or 0.0) for output in outputs]


@pytest.mark.parametrize("family", ["qwen2", "phi3", "deepseek-v3"])
def test_weights_that_change_count_after_a_reset(family: str) -> None:
    """As for an engine that is made over them. The latents of deepseek are made of weights, too."""
    model, other = _model(family), _smaller(_model(family))
    with LLM(copy.deepcopy(other)) as llm:
        expected = _generate(llm)
    with LLM(model) as llm:
        assert _generate(llm) != expected
        model.load_state_dict(other.state_dict())
        latents = llm.core.loaded.latents.values()
        places = [tensor.data_ptr() for latent in latents for tensor in (latent._to_keys, latent._to_values)]
        llm.reset_prefix_cache()
        assert _generate(llm) == expected
        # Captured graphs have the addresses.
        assert places == [tensor.data_ptr() for latent in latents for tensor in (latent._to_keys, latent._to_values)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "phi3", "deepseek-v3"])
def test_an_engine_that_is_made_over_changed_weights_has_them(family: str, eager: bool) -> None:
    """Beside one that packed the weights of before, as where a cell with `llm = LLM(model)` is run again."""
    model, other = _model(family), _smaller(_model(family))
    with LLM(copy.deepcopy(other)) as beside, LLM(beside.core.loaded.model, enforce_eager=eager) as llm:
        expected = _generate(llm)
    with LLM(model) as before:
        assert _generate(before) != expected
        model.load_state_dict(other.state_dict())
        with LLM(model, enforce_eager=eager) as llm:
            assert _generate(llm) == expected


def test_an_engine_that_is_made_over_weights_of_another_shape() -> None:
    model = _model("qwen2")
    with LLM(model) as llm:
        expected = _generate(llm)
        model.get_output_embeddings().float()
        with pytest.raises(ConfigError, match="in float32 and none; close every LLM over this model and make another"):
            LLM(model)
        model.get_output_embeddings().bfloat16()
        assert _generate(llm) == expected


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3"])
def test_weights_that_are_swapped_back(family: str) -> None:
    """Tensors of the caller are read, and never written."""
    model, other = _model(family), _model(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05)
    first, second = dict(model.state_dict()), dict(other.state_dict())
    kept = copy.deepcopy(first)
    with LLM(model) as llm:
        expected = _generate(llm)
        for state in (second, first):
            model.load_state_dict(state, assign=True)
            llm.reset_prefix_cache()
        assert _generate(llm) == expected
    assert all(torch.equal(first[name], kept[name]) for name in kept)


class _AttentionWithSinks(Qwen2Attention):
    def forward(self, *args: Any, **keywords: Any) -> Any:
        return super().forward(*args, **keywords, s_aux=self.sinks)


def _model_with_sinks(family: str) -> PreTrainedModel:
    if family == "granite_swa":
        if not hasattr(transformers, "GraniteSWAConfig"):
            pytest.skip("this release of transformers has no granite_swa")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": VOCAB}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6}
        tokens = {"bos_token_id": 1, "eos_token_id": None}
        return random_model("GraniteSWAConfig", **sizes, **heads, **tokens).bfloat16()
    model = _model(family)
    for layer in model.model.layers:
        layer.self_attn.__class__ = _AttentionWithSinks
        layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    return model


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "granite_swa"])
def test_sinks_that_change_count_after_a_reset(family: str, assign: bool) -> None:
    """All layers of qwen2 are one native call; those of granite_swa are not."""
    model, other = _model_with_sinks(family), _model_with_sinks(family)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.sinks.add_(2)
    with LLM(copy.deepcopy(other)) as llm:
        expected = _generate(llm)
    with LLM(model) as llm:
        assert all(("forward" in vars(layer)) == supported(model) for layer in model.model.layers)
        assert _generate(llm) != expected
        model.load_state_dict(other.state_dict(), assign=assign)
        llm.reset_prefix_cache()
        assert _generate(llm) == expected


def test_sinks_of_another_shape() -> None:
    model = _model_with_sinks("qwen2")
    attention = model.model.layers[0].self_attn
    with LLM(model) as llm:
        attention.sinks = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        with pytest.raises(ConfigError, match=r"an attention's sinks are now \[3\] and were \[4\]; close every"):
            llm.reset_prefix_cache()


@pytest.mark.parametrize("offloaded", ["model.layers.1", ""])
def test_a_model_over_several_devices_is_refused(offloaded: str) -> None:
    """As one that accelerate divided, whose offloaded weights are on "meta"."""
    model = _model("qwen2")
    model.get_submodule(offloaded).to("meta")
    where = "on cpu and meta" if offloaded else "on meta"
    with pytest.raises(ConfigError, match=f"the loaded model is {where}, .* one device: load all of it onto one"):
        LLM(model)
    assert model.config._attn_implementation != "vattn"


@pytest.mark.parametrize(("family", "changed"), [("qwen2", "proj"), ("deepseek-v3", "kv_b_proj")])
def test_weights_that_become_others(family: str, changed: str) -> None:
    """Nothing is packed then, latents' projections neither: the engine goes on with what it had."""
    model = _model(family)
    with LLM(model) as llm:
        expected = _generate(llm)
        head = model.get_output_embeddings()
        weight = head.weight
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(0.75 if changed in name else 1)
        head.weight = torch.nn.Parameter(weight.float())
        with pytest.raises(ConfigError, match=r"are now \[\d+, 32\] in float32 and none; close every LLM over thi"):
            llm.reset_prefix_cache()
        head.weight = weight
        assert _generate(llm) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_projection_of_latents_of_another_shape(dtype: torch.dtype) -> None:
    """Of a layer in the middle; also where nothing else is packed."""
    model = _model("deepseek-v3").to(dtype)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    with LLM(model) as llm:
        expected = [latent._to_keys.clone() for latent in llm.core.loaded.latents.values()]
        with torch.no_grad():
            first.kv_b_proj.weight.mul_(0.75)
        rows, rank = second.kv_b_proj.weight.shape
        second.kv_b_proj = torch.nn.Linear(rank, rows + 1, bias=False, dtype=dtype)
        now, before = (rf"\[{count}, {rank}\] in {str(dtype).removeprefix('torch.')}" for count in (rows + 1, rows))
        with pytest.raises(ConfigError, match=f"kv_b_proj is now {now} and was {before}; close every LLM over this"):
            llm.reset_prefix_cache()
        assert all(map(torch.equal, expected, (latent._to_keys for latent in llm.core.loaded.latents.values())))


def test_a_bias_that_comes() -> None:
    model = _model("llama")
    projection = model.model.layers[0].self_attn.o_proj
    with LLM(model) as llm:
        projection.bias = torch.nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
        with pytest.raises(
            ConfigError, match=r"in bfloat16 and none, are now \[32, 32\] in bfloat16 and \[32\] in bfl"
        ):
            llm.reset_prefix_cache()


def test_weights_that_are_views() -> None:
    """Of a transposed tensor, say."""
    model = _model("llama")
    with LLM(copy.deepcopy(model)) as llm:
        expected = _generate(llm)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.detach().T.contiguous().T)
    with LLM(model) as llm:
        assert _generate(llm) == expected


@pytest.mark.parametrize("family", ["llama", "phi3", "opt"])
def test_gradients_beside_an_engine(family: str) -> None:
    model = _model(family)
    ids = torch.tensor([_PROMPTS[0]])

    def gradients() -> list[torch.Tensor | None]:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with LLM(model) as llm:
        _generate(llm)
        got = gradients()
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "phi3", "opt"])
def test_forwards_of_the_caller_have_the_weights_of_now(family: str) -> None:
    """Of the model and its parts, without gradients, and without a reset; those of the engine have them after one."""
    model, other = _model(family), _smaller(_model(family))
    ids = torch.tensor([_PROMPTS[0]])
    with LLM(copy.deepcopy(other)) as llm:
        expected = _generate(llm)
    with LLM(model) as llm:
        before = _generate(llm)
        model.load_state_dict(other.state_dict())
        for without_gradients in (torch.no_grad(), torch.inference_mode()):
            with without_gradients:
                logits = model(input_ids=ids, use_cache=False).logits
                assert torch.equal(logits, other(input_ids=ids, use_cache=False).logits)
        llm.reset_prefix_cache()
        assert _generate(llm) == expected != before


@pytest.mark.parametrize("first_to_close", [0, 1])
@pytest.mark.parametrize("eager", [(False, False), (True, False), (False, True)])
def test_two_engines_over_a_model(eager: tuple[bool, bool], first_to_close: int) -> None:
    """Whichever is closed first, the other goes on; the last one gives the model back as it was."""
    model = _model("qwen2")
    before = model.config._attn_implementation
    engines = [LLM(model, enforce_eager=each, max_num_seqs=4) for each in eager]
    expected = [_generate(llm) for llm in engines]
    engines[first_to_close].close()
    assert _generate(engines[1 - first_to_close]) == expected[1 - first_to_close]
    engines[1 - first_to_close].close()
    assert model.config._attn_implementation == before
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_engine_that_is_dropped_leaves_the_model_to_the_other() -> None:
    model = _model("qwen2")
    with LLM(model, max_num_seqs=4) as llm:
        expected = _generate(llm)
        dropped = LLM(model, max_num_seqs=4)
        del dropped
        gc.collect()
        assert _generate(llm) == expected
    assert not any("forward" in vars(module) for module in model.modules())


def test_modes_of_the_modules_come_back() -> None:
    """Those of before the engines; a `train()` of the caller in between stays."""
    model = _model("llama").train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    with LLM(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    model.eval()
    with LLM(model):
        model.train()
        with LLM(model):
            assert not model.training
    assert all(module.training for module in model.modules())


def test_a_step_in_training_mode_is_refused() -> None:
    """It would have dropout, in what is cached, too."""
    model = _model("opt")
    with LLM(model) as llm:
        expected = _generate(llm)
        model.train()
        llm.reset_prefix_cache()
        for output in llm.generate(_PROMPTS, _PARAMS, use_tqdm=False):
            assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
            with pytest.raises(ConfigError, match=r"in training mode, .* call model\.eval\(\) first"):
                raise output.error or AssertionError
        model.eval()
        assert _generate(llm) == expected
