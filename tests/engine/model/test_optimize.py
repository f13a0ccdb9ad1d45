"""Optimized models compute the same, up to bfloat16's rounding, and are given back as they were."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import GraniteConfig, GraniteForCausalLM, LlamaForCausalLM, PreTrainedModel, Qwen2Model
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.support.tiny_models import FAMILIES, make_model, random_model
from vattn import cpu, packed
from vattn.attention import AttentionParams
from vattn.attention.interface import running
from vattn.attention.torch_sdpa import plain_attention
from vattn.engine import LLM, SamplingParams
from vattn.engine.model import linears
from vattn.engine.model import optimize as optimizing
from vattn.engine.model.decoder_layer import RotaryTable
from vattn.engine.model.optimize import optimize, supported

pytestmark = pytest.mark.skipif(
    cpu.unusable() is not None or not (cpu.has_linear() or optimizing._has_mkldnn()),
    reason="neither vattn nor torch multiplies in bfloat16 on this CPU",
)

needs_mkldnn = pytest.mark.skipif(not optimizing._has_mkldnn(), reason="torch does not multiply in bfloat16 here")

# Families whose decoder layers are of the usual kind, and computed by `vattn.engine.model.decoder_layer`.
_USUAL = {"llama", "llama-mha", "qwen2", "qwen2-window", "qwen3", "mistral", "mistral-window"}
# Routers turn rounding into other experts.
_ROUTED = {"mixtral", "gpt-oss", "qwen2-moe-window", "phimoe-window", "deepseek-v2", "deepseek-v3"}


class _OneRequest:
    """A packed step of one request's whole prompt, attention spelled out."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        count = len(query)
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        if params.window is not None:
            seen = seen.triu(1 - params.window)
        mask = torch.zeros(count, count, dtype=query.dtype).masked_fill(~seen, float("-inf"))
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return plain_attention(*heads_first, mask, params)[0].transpose(0, 1).contiguous()


def _packed(family: str) -> PreTrainedModel:
    """A copy in bfloat16, ready for packed steps."""
    packed.register()
    model = copy.deepcopy(make_model(family)).bfloat16()
    model.set_attn_implementation(packed.NAME)
    return model


def _packed_logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(2, 60, (23,), generator=torch.Generator().manual_seed(4))
    positions = torch.arange(23)
    return packed.run_packed(model, _OneRequest(), ids, positions, positions).float()


class _Recording(_OneRequest):
    """Notes what each layer stores."""

    def __init__(self) -> None:
        self.stored: list[torch.Tensor] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        self.stored.append(torch.cat((key, value), dim=1))
        return super().attend(layer, query, key, value, params)


def _fused_layers(model: PreTrainedModel) -> list[int]:
    layers = model.get_submodule("model").get_submodule("layers")
    return [number for number, layer in enumerate(layers.children()) if "forward" in vars(layer)]


def _logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(2, 60, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_outside_of_packed_steps(family: str) -> None:
    """Bit by bit: there the modules' own forwards compute."""
    model = copy.deepcopy(make_model(family)).bfloat16()
    assert supported(model)
    plain = _logits(model)
    optimized = optimize(model)
    assert any("forward" in vars(module) for module in model.modules())
    assert torch.equal(_logits(model), plain)
    optimized.restore()
    assert torch.equal(_logits(model), plain), "not as before"


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_and_mlps_alone_are_the_same_up_to_rounding(family: str) -> None:
    """No further from float32 than bfloat16 as transformers computes it, or little further."""
    exact = _packed_logits(_packed(family).float())
    model = _packed(family)
    plain = _packed_logits(model)
    model.set_attn_implementation("eager")  # so that decoder layers are left alone
    optimized = optimize(model)
    model.set_attn_implementation(packed.NAME)
    changed = [module for module in model.modules() if "forward" in vars(module)]
    assert changed
    assert all(isinstance(module, nn.Linear) or hasattr(module, "gate_proj") for module in changed)
    fast = _packed_logits(model)
    optimized.restore()
    assert torch.equal(_packed_logits(model), plain), "not as before"
    if family not in _ROUTED:
        assert (fast - exact).norm() <= 1.25 * (plain - exact).norm() + 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_in_packed_steps(family: str) -> None:
    """The decoder layers too: windows, norms of heads, biases, and layers that are left alone."""
    model = _packed(family)
    plain = _packed_logits(model)
    exact = _packed_logits(_packed(family).float())
    optimized = optimize(model)
    if family != "opt":
        assert _fused_layers(model) == (list(range(model.config.num_hidden_layers)) if family in _USUAL else [])
        assert ("forward" in vars(model.get_decoder())) == (family in _USUAL)
        assert ("forward" in vars(model)) == (family in _USUAL)
    fast = _packed_logits(model)
    optimized.restore()
    assert torch.equal(_packed_logits(model), plain), "not as before"
    if family not in _ROUTED:
        assert (fast - exact).norm() <= 1.25 * (plain - exact).norm() + 1e-6


@pytest.mark.parametrize("factor", [1.05, 12.0])
def test_a_factor_of_embeddings_that_norms_hide(factor: float) -> None:
    """Also where the embeddings of the first tokens are zero."""
    config = GraniteConfig(
        **make_model("llama").config.to_dict() | {"model_type": "granite", "embedding_multiplier": factor}
    )
    config._attn_implementation = packed.NAME
    packed.register()
    torch.manual_seed(0)
    model = GraniteForCausalLM(config).bfloat16().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:5] = 0
    plain = _packed_logits(model)
    optimize(model)
    assert "forward" not in vars(model.model)
    assert "forward" not in vars(model)
    torch.testing.assert_close(_packed_logits(model), plain, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_computes_with_its_own_weights(family: str) -> None:
    model = _packed(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    other = _packed_logits(model)
    model = _packed(family)
    plain = _packed_logits(model)
    optimized = optimize(model)
    fast = _packed_logits(model)
    copied = copy.deepcopy(model)
    assert torch.equal(_packed_logits(copied), plain)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(0.01)
    assert torch.equal(_packed_logits(copied), other)
    assert torch.equal(_packed_logits(model), fast)
    optimized.restore()
    assert torch.equal(_packed_logits(copy.deepcopy(model)), plain)
    assert not any("__deepcopy__" in vars(module) for module in model.modules())


def test_linear_layers_of_an_mlp_that_are_called_by_themselves() -> None:
    model = _packed("llama")
    mlp = model.model.layers[0].mlp
    rows = torch.randn(3, model.config.hidden_size).bfloat16()
    with torch.inference_mode():
        expected = mlp.gate_proj(rows)
        optimize(model)
        assert "forward" in vars(mlp)
        with running(_OneRequest()):
            assert torch.equal(mlp.gate_proj(rows), expected)


@needs_mkldnn
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decoder_layers_where_torch_multiplies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs with AMX: each product is a call of its own, and the results are the same up to rounding."""
    model = _packed(family)
    exact = _packed_logits(_packed(family).float())
    plain = _packed_logits(model)
    monkeypatch.setattr(cpu, "has_linear", lambda: False)
    optimize(model)
    assert _fused_layers(model) == list(range(model.config.num_hidden_layers))
    assert (_packed_logits(model) - exact).norm() <= 1.25 * (plain - exact).norm() + 1e-6


@pytest.mark.skipif(not cpu.has_linear(), reason="these kernels have no linear layers")
def test_an_odd_number_of_inputs_where_onednn_cannot_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs with AVX2 alone: the layer is torch's, and so is what it belongs to."""

    def refuse(*_: object) -> None:
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    model = _packed("llama")
    model.model.layers[0].mlp.down_proj = nn.Linear(47, 32, bias=False, dtype=torch.bfloat16)
    for name in ("gate_proj", "up_proj"):
        setattr(model.model.layers[0].mlp, name, nn.Linear(32, 47, bias=False, dtype=torch.bfloat16))
    plain = _packed_logits(model)
    monkeypatch.setattr(optimizing, "_has_mkldnn", lambda: False)
    monkeypatch.setattr(linears, "_pack_for_mkldnn", refuse)
    optimize(model)
    assert _fused_layers(model) == [1]
    assert "forward" in vars(model.model.layers[0].mlp.up_proj)
    assert "forward" not in vars(model.model.layers[0].mlp.down_proj)
    assert (_packed_logits(model) - plain).norm() <= 0.05 * plain.norm()


@pytest.mark.parametrize("family", sorted(_USUAL))
def test_rotary_factors_are_those_of_the_position(family: str) -> None:
    """As the model's own embedding computes them, beyond what was asked for first, too."""
    rotary = _packed(family).model.rotary_emb
    table = RotaryTable(rotary)
    hidden = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    for positions in ([], [0], [3, 3, 1], [1023, 1024], [7000, 2], [5]):
        asked = torch.tensor([positions], dtype=torch.int64)
        for factors, expected in zip(table(hidden, asked), rotary(hidden, asked), strict=True):
            assert factors.dtype == torch.bfloat16
            torch.testing.assert_close(factors, expected)


def test_rotary_factors_in_two_threads() -> None:
    """Of engines that share a model: each gets its own, and the longer table stays."""
    rotary = _packed("llama").model.rotary_emb
    hidden = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    near, far = torch.tensor([[5]]), torch.tensor([[7000]])
    got: list[tuple[torch.Tensor, torch.Tensor]] = []
    lengths: list[int] = []

    def embedding(hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths.append(positions.shape[1])
        factors: tuple[torch.Tensor, torch.Tensor] = rotary(hidden, positions)
        if len(lengths) == 1:  # while the first call computes its short table
            thread = threading.Thread(target=lambda: got.append(table(hidden, far)))
            thread.start()
            thread.join()
        return factors

    table = RotaryTable(embedding)
    got.append(table(hidden, near))
    got.append(table(hidden, far))
    assert lengths == [1024, 8192]
    for factors, asked in zip(got, (far, near, far), strict=True):
        for mine, expected in zip(factors, rotary(hidden, asked), strict=True):
            torch.testing.assert_close(mine, expected)


def test_rotary_factors_that_other_positions_change() -> None:
    """Dynamic scaling has other factors for all positions once one is past the original length: no table."""
    config = copy.deepcopy(make_model("llama").config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config._attn_implementation = packed.NAME
    packed.register()
    model = type(make_model("llama"))(config).bfloat16().eval()
    optimize(model)
    assert "forward" in vars(model.model)
    calls: list[torch.Tensor] = []
    model.model.rotary_emb.register_forward_hook(lambda module, args, output: calls.append(args[1]))
    _packed_logits(model)
    assert [len(positions[0]) for positions in calls] == [23]


@pytest.mark.parametrize("wanted", [[22], [20, 3, 21], [], [*range(23)]])
@pytest.mark.parametrize("family", sorted(_USUAL))
def test_the_last_layer_goes_on_with_the_wanted_rows(family: str, wanted: list[int]) -> None:
    """It stores the keys and values of all, and no other row's hidden states are taken for an output."""
    model = _packed(family)
    optimize(model)
    ids = torch.randint(2, 60, (23,), generator=torch.Generator().manual_seed(4))
    positions = torch.arange(23)
    all_rows, some_rows = _Recording(), _Recording()
    expected = packed.run_packed(model, all_rows, ids, positions, positions)[wanted]
    seen: list[torch.Tensor] = []
    alone = packed.run_packed(model, _Recording(), ids, positions, torch.tensor(wanted, dtype=torch.int64))
    model.get_decoder().register_forward_hook(lambda module, args, output: seen.append(output[0][0]))
    logits = packed.run_packed(model, some_rows, ids, positions, torch.tensor(wanted, dtype=torch.int64))
    assert all(map(torch.equal, some_rows.stored, all_rows.stored))
    assert len(some_rows.stored) == model.config.num_hidden_layers
    assert seen[0].isnan().all(dim=1).tolist() == [row not in wanted for row in range(23)]
    assert torch.equal(alone, logits)  # without the decoder's output between
    torch.testing.assert_close(logits, expected, atol=0.02, rtol=0.02)
    if cpu.has_linear():
        assert torch.equal(logits, expected)


class _HalfResidual(nn.Module):
    """The module that it wraps, at half its output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._modules = module._modules
        self._whole = [module]

    def forward(self, hidden_states: torch.Tensor, **keywords: object) -> torch.Tensor:
        output: torch.Tensor = type(self._whole[0]).forward(self._whole[0], hidden_states, **keywords)
        return hidden_states + (output - hidden_states) / 2


class _OtherNorm(nn.Module):
    """Weight and epsilon as an RMS norm has them, and another formula."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(rows, self.weight.shape, 1 + self.weight, self.eps)


def test_layers_that_only_look_usual() -> None:
    model = _packed("qwen2")
    layers = model.model.layers
    layers[0] = _HalfResidual(layers[0])
    layers[1].post_attention_layernorm = _OtherNorm(layers[1].post_attention_layernorm)
    plain = _packed_logits(model)
    optimize(model)
    assert _fused_layers(model) == [2]
    fast = _packed_logits(model)
    assert (fast - plain).norm() <= 0.05 * plain.norm()


class _ScaledEmbeddings(Qwen2Model):
    """The modules of the usual decoder, and other rows for the first layer."""

    def forward(self, input_ids: torch.Tensor, **keywords: Any) -> Any:
        keywords["inputs_embeds"] = 2 * self.embed_tokens(input_ids)
        return super().forward(**keywords)


def test_a_decoder_that_only_looks_usual() -> None:
    model = _packed("qwen2")
    model.model.__class__ = _ScaledEmbeddings
    plain = _packed_logits(model)
    optimize(model)
    assert "forward" not in vars(model.model)
    fast = _packed_logits(model)
    assert (fast - plain).norm() <= 0.05 * plain.norm()


class _CallsByKeyword(Qwen2Model):
    """The modules of the usual decoder, whose layers are called by keyword."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        embeddings = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden_states=hidden, position_embeddings=embeddings, attention_mask=None)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def test_layers_that_are_called_by_keyword() -> None:
    """They are left alone."""
    model = _packed("qwen2")
    model.model.__class__ = _CallsByKeyword
    plain = _packed_logits(model)
    optimize(model)
    assert _fused_layers(model) == []
    assert (_packed_logits(model) - plain).norm() <= 0.05 * plain.norm()


class _KnownEmbeddings(Qwen2Model):
    """The modules of the usual decoder, which refuses other rows than those of its tokens."""

    def forward(self, input_ids: torch.Tensor, **keywords: Any) -> Any:
        if not torch.equal(self.embed_tokens(input_ids), self.embed_tokens.weight[input_ids]):
            raise ValueError("unknown rows")
        return super().forward(input_ids, **keywords)


class _RotaryOfLayers(nn.Module):
    """A rotary embedding of several types of layers, as Mellum's: of one here, which is not told."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary, self.rope_type = rotary, {"full_attention": "default"}

    def forward(self, rows: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(rows, position_ids)


@pytest.mark.parametrize("part", ["embeddings", "rotary"])
def test_a_decoder_that_cannot_be_tried(part: str) -> None:
    """Its layers are faster, and itself is left alone."""
    model = _packed("qwen2")
    if part == "embeddings":
        model.model.__class__ = _KnownEmbeddings
    else:
        model.model.rotary_emb = _RotaryOfLayers(model.model.rotary_emb)
    plain = _packed_logits(model)
    optimize(model)
    assert _fused_layers(model) == list(range(model.config.num_hidden_layers))
    assert "forward" not in vars(model.model)
    fast = _packed_logits(model)
    assert (fast - plain).norm() <= 0.05 * plain.norm()


class _Capped(LlamaForCausalLM):
    """The modules of the usual model, and other logits: nearly the same ones where they are small."""

    def forward(self, *args: Any, **keywords: Any) -> Any:
        output = super().forward(*args, **keywords)
        output.logits = 1000 * (output.logits / 1000).tanh()
        return output


def test_a_model_that_only_looks_usual() -> None:
    model = _packed("llama")
    model.__class__ = _Capped
    optimized = optimize(model)
    assert "forward" in vars(model.model)
    assert "forward" not in vars(model)
    optimized.restore()
    model.__class__ = LlamaForCausalLM
    optimize(model)
    assert "forward" in vars(model)


def test_a_head_that_torch_rounds_otherwise() -> None:
    """As it does outside of packed steps: products of so many inputs are summed in another order."""
    sizes = {"hidden_size": 2050, "intermediate_size": 64, "num_attention_heads": 1, "head_dim": 64}
    model = random_model("LlamaConfig", vocab_size=4096, num_hidden_layers=1, **sizes).bfloat16()
    packed.register()
    model.set_attn_implementation(packed.NAME)
    with torch.no_grad():
        model.lm_head.weight.normal_()
    optimize(model)
    assert "forward" in vars(model)


def test_rows_in_another_order() -> None:
    """All of them, and one twice: as the model's own forward picks them."""
    model = _packed("llama")
    optimize(model)
    rows = torch.tensor([3, 0, 4, 1, 2, 2])
    ids, positions = torch.arange(7, 12), torch.arange(5)
    in_order = packed.run_packed(model, _OneRequest(), ids, positions, positions)
    assert torch.equal(packed.run_packed(model, _OneRequest(), ids, positions, rows), in_order[rows])


def test_a_decoder_called_outside_of_steps() -> None:
    """With embeddings in place of tokens, and for the hidden states of all layers, as transformers computes them."""
    model = _packed("llama")
    tokens = torch.tensor([[3, 4, 5]])
    other = copy.deepcopy(model)
    optimize(model)
    assert "forward" in vars(model.model)
    with torch.inference_mode():
        plain, fast = (
            each.model(inputs_embeds=each.model.embed_tokens(tokens), output_hidden_states=True)
            for each in (other, model)
        )
    assert len(fast.hidden_states) == len(plain.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(fast.last_hidden_state, plain.last_hidden_state)


def test_what_is_changed() -> None:
    model = copy.deepcopy(make_model("llama")).bfloat16()
    optimized = optimize(model)
    changed = {name for name, module in model.named_modules() if "forward" in vars(module)}
    layer = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp"}
    assert {f"model.layers.0.{name}" for name in layer} | {"lm_head"} <= changed
    optimized.restore()
    assert not any("forward" in vars(module) for module in model.modules())


class _LooksGated(nn.Module):
    """The children of a gated MLP, and another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(rows)) * 1.5 * self.up_proj(rows))


def test_a_module_that_only_looks_like_a_gated_mlp() -> None:
    model = _packed("llama")
    model.model.layers[0].mlp = _LooksGated().bfloat16()
    plain = _packed_logits(model)
    optimize(model)
    torch.testing.assert_close(_packed_logits(model), plain, rtol=0.1, atol=0.1)
    assert "forward" not in vars(model.model.layers[0].mlp)
    assert "forward" in vars(model.model.layers[0].mlp.gate_proj)


class _Clamped(_LooksGated):
    """A gated MLP but for large values."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.silu(self.gate_proj(rows)).clamp(max=7)
        return self.down_proj(gate * self.up_proj(rows))


def test_an_mlp_that_clamps_large_values() -> None:
    model = copy.deepcopy(make_model("llama")).bfloat16()
    model.model.layers[0].mlp = _Clamped().bfloat16()
    optimize(model)
    assert "forward" not in vars(model.model.layers[0].mlp)
    assert "forward" in vars(model.model.layers[1].mlp)


class _LateScale(LlamaDecoderLayer):
    """The usual layer, until a position from which on it scales queries and keys."""

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> Any:
        late = keywords["position_ids"] > 100
        cos, sin = (factors * (1 + 0.1 * late[..., None]) for factors in keywords.pop("position_embeddings"))
        return super().forward(hidden_states, position_embeddings=(cos.bfloat16(), sin.bfloat16()), **keywords)


def test_a_layer_that_scales_queries_from_a_position_on() -> None:
    model = _packed("llama")
    model.model.layers[1].__class__ = _LateScale
    optimize(model)
    assert _fused_layers(model) == [0, *range(2, model.config.num_hidden_layers)]


def test_a_norm_that_subtracts_a_mean() -> None:
    """In a model so wide that random rows have hardly any."""
    wide = {"hidden_size": 8192, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = random_model("LlamaConfig", vocab_size=64, head_dim=8, num_hidden_layers=2, **wide).bfloat16()
    packed.register()
    model.set_attn_implementation(packed.NAME)
    model.model.layers[0].input_layernorm = nn.LayerNorm(8192, eps=1e-6, bias=False, dtype=torch.bfloat16)
    optimize(model)
    assert _fused_layers(model) == [1]


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward", "hook of all modules"])
@pytest.mark.parametrize(
    "name",
    [
        *("lm_head", "model", "model.norm", "layers.1", "mlp", "mlp.act_fn", "self_attn", "q_proj", "down_proj"),
        "input_layernorm",
    ],
)
def test_modules_that_somebody_changed_before(name: str, how: str) -> None:
    """What hooks and other forwards do is still done, and they are still there afterwards."""
    model = _packed("llama")
    module = dict(model.named_modules()).get(name) or next(
        module for path, module in model.named_modules() if path.endswith(name) and "1" in path
    )
    calls: list[nn.Module] = []

    def seen(called: nn.Module, *_: Any) -> None:
        if called is module:
            calls.append(called)

    own = module.forward

    def forward(*args: Any, **keywords: Any) -> Any:
        calls.append(module)
        return own(*args, **keywords)

    if how == "forward":
        module.forward = forward
        removed = None
    elif how == "hook of all modules":
        removed = register_module_forward_hook(seen)
    else:
        removed = module.register_forward_hook(seen) if how == "hook" else module.register_forward_pre_hook(seen)
    try:
        plain = _packed_logits(model)
        calls.clear()
        optimized = optimize(model)
        calls.clear()
        assert (_packed_logits(model) - plain).norm() <= 0.05 * plain.norm()
        assert len(calls) == 1
        optimized.restore()
        assert torch.equal(_packed_logits(model), plain)
        assert [name for name, each in model.named_modules() if "forward" in vars(each)] == (
            [next(path for path, each in model.named_modules() if each is module)] if how == "forward" else []
        )
    finally:
        if removed is not None:
            removed.remove()


def test_a_forward_set_afterwards_is_left() -> None:
    model = _packed("llama")
    optimized = optimize(model)
    model.lm_head.forward = forward = lambda rows: rows
    optimized.restore()
    assert vars(model.lm_head)["forward"] is forward


@pytest.mark.parametrize("multiplies", ["vattn", pytest.param("torch", marks=needs_mkldnn)])
def test_weights_are_packed_again(multiplies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same memory, of parameters that were changed, and of others in their places."""
    if multiplies == "torch":
        monkeypatch.setattr(cpu, "has_linear", lambda: False)
    model, other = _packed("qwen3"), _packed("qwen3")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + torch.rand(parameter.shape, generator=generator).bfloat16())
    optimize(other)
    expected = _packed_logits(other)
    for assign in (False, True):
        optimized = optimize(model)
        before = _packed_logits(model)
        assert not torch.equal(before, expected)
        first = {name: parameter.clone() for name, parameter in model.named_parameters()}
        model.load_state_dict(other.state_dict(), assign=assign)
        optimized.pack()
        assert torch.equal(_packed_logits(model), expected)
        model.load_state_dict(first, assign=True)
        optimized.restore()


@pytest.mark.parametrize("family", ["llama", "opt", "deepseek-v3"])
def test_whatever_torch_makes_tensors_of_by_default(family: str) -> None:
    """On another device, and in a type in which 999, the last position, would be 1000."""
    config = copy.deepcopy(make_model(family).config)
    config.max_position_embeddings = 1000
    torch.manual_seed(0)
    model = type(make_model(family))(config).bfloat16().eval()

    def tokens() -> list[int]:
        with LLM(model, max_num_seqs=2) as llm:
            (output,) = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
            assert ("forward" in vars(model.get_decoder())) == (family == "llama")
        return list(output.outputs[0].token_ids)

    expected = tokens()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tokens() == expected
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_a_model_of_few_tokens() -> None:
    small = {"vocab_size": 3, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    packed.register()
    model = random_model("LlamaConfig", num_attention_heads=4, **small).bfloat16()
    model.set_attn_implementation(packed.NAME)
    optimize(model)
    assert _fused_layers(model) == [0, 1]


def test_a_model_that_is_no_longer_in_bfloat16() -> None:
    model = _packed("llama")
    optimize(model)
    model.float()
    with pytest.raises(ValueError, match="float32; the layer was packed for heads of 8 in bfloat16"):
        _packed_logits(model)


@pytest.mark.parametrize("multiplies", ["vattn", pytest.param("torch", marks=needs_mkldnn)])
def test_rows_that_lie_otherwise_in_memory(multiplies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if multiplies == "torch":
        monkeypatch.setattr(cpu, "has_linear", lambda: False)
    layer = nn.Linear(64, 16, dtype=torch.bfloat16)
    product = linears.Packed([layer])
    wide = torch.randn(5, 65).bfloat16()
    lying = [
        torch.randn(64, 5).bfloat16().T,
        torch.randn(64, 2, 5).bfloat16().permute(1, 2, 0),
        wide[:, :64],
        wide[:, 1:],
        wide[:1, 1:].expand(5, 64),
        wide[:0, 1:],
        wide[0, 1:],
    ]
    with torch.inference_mode():
        for rows in lying:
            expected = layer(rows)
            torch.testing.assert_close(product(rows), expected, rtol=0.02, atol=0.02)
            other = torch.randn(expected.shape[::-1]).bfloat16().permute(*reversed(range(expected.ndim)))
            torch.testing.assert_close(product.plus(rows, other), expected + other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("multiplies", ["vattn", pytest.param("torch", marks=needs_mkldnn)])
def test_rows_of_another_type(multiplies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused as by torch, and not read as if they were in bfloat16."""
    if multiplies == "torch":
        monkeypatch.setattr(cpu, "has_linear", lambda: False)
    layer = nn.Linear(64, 16, dtype=torch.bfloat16)
    product = linears.Packed([layer])
    rows = torch.randn(5, 64)
    with torch.inference_mode():
        for other in (rows, rows.half(), rows.int()):
            with pytest.raises(RuntimeError):
                layer(other)
            with pytest.raises(RuntimeError):
                product(other)
            with pytest.raises(RuntimeError):
                product.plus(rows.bfloat16(), other[:, :16])


def test_projections_of_different_rows() -> None:
    """The three projections are one product; each is right alone, too, in any order."""
    model = copy.deepcopy(make_model("qwen2")).bfloat16()
    attention = model.model.layers[0].self_attn
    rows = [torch.randn(5, 32).bfloat16() for _ in range(3)]
    names = ("q_proj", "k_proj", "v_proj")
    with torch.inference_mode():
        want = {(name, i): getattr(attention, name)(x) for name in names for i, x in enumerate(rows)}
        optimize(model)
        with running(_OneRequest()):
            for name, i in [("v_proj", 0), ("q_proj", 0), ("q_proj", 1), ("q_proj", 1), ("k_proj", 2), ("v_proj", 1)]:
                torch.testing.assert_close(getattr(attention, name)(rows[i]), want[name, i], rtol=0.02, atol=0.02)


def test_projections_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of engines that share a model: each gets the other parts of its own product."""
    layers = [nn.Linear(32, 16, dtype=torch.bfloat16) for _ in range(2)]
    together = linears.PackedTogether(layers)
    first, second = (together.part(number) for number in range(2))
    rows, others = (torch.randn(3, 32).bfloat16() for _ in range(2))
    product, got = together.product, []

    def other_thread() -> None:
        with torch.inference_mode():
            got.append(first(others))

    def interrupted(tensor: torch.Tensor) -> torch.Tensor:
        together.product = product
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        return product(tensor)

    monkeypatch.setattr(together, "product", interrupted)
    with torch.inference_mode():
        got += [first(rows), second(rows)]
        for result, (layer, given) in zip(
            got, ((layers[0], others), (layers[0], rows), (layers[1], rows)), strict=True
        ):
            torch.testing.assert_close(result, layer(given), rtol=0.02, atol=0.02)


def test_weights_given_back() -> None:
    """Without the original weights the model still runs; what other modules use stays."""
    model = _packed("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    plain = _packed_logits(model)
    optimize(model, keep_weights=False)
    assert model.model.layers[0].mlp.up_proj.weight.numel() == 0
    torch.testing.assert_close(_packed_logits(model), plain, rtol=0.1, atol=0.1)


class _ReadsWeights(nn.Module):
    """Experts of which a long prompt has another one than a short, and linear layers that are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 2)
        self.experts = nn.ModuleList(_LooksGated() for _ in range(2))
        for expert in self.experts:
            expert.scale = nn.Linear(2, 32, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = nn.functional.linear(rows.float(), self.router.weight.float(), self.router.bias.float())
        expert = self.experts[int(rows.shape[1] > 10)]
        return expert(rows) * expert.scale.weight[:, 0] * scores.softmax(-1).amax(-1, keepdim=True).to(rows)


def test_weights_that_the_model_reads_by_itself() -> None:
    """They stay, of experts that were idle meanwhile, too; those of layers that are called do not."""
    model = _packed("llama")
    for layer in model.model.layers:
        layer.mlp = _ReadsWeights().bfloat16()
    plain = _packed_logits(model)
    optimize(model, keep_weights=False)
    kept = {name for name, parameter in model.model.layers[0].named_parameters() if parameter.numel()}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert kept == norms | {"mlp.router.weight", "mlp.router.bias"} | {f"mlp.experts.{i}.scale.weight" for i in (0, 1)}
    torch.testing.assert_close(_packed_logits(model), plain, rtol=0.1, atol=0.1)


def test_the_engine_gives_the_model_back() -> None:
    model = copy.deepcopy(make_model("llama")).bfloat16()
    plain = _logits(model)
    params = SamplingParams(temperature=0, max_tokens=4)
    for eager in (False, True):
        with LLM(model, enforce_eager=eager, max_num_seqs=2) as llm:
            llm.generate([[3, 4, 5]], params, use_tqdm=False)
            assert eager != any("forward" in vars(module) for module in model.modules())
    assert torch.equal(_logits(model), plain)


def test_float32_is_left_alone() -> None:
    assert not supported(make_model("llama"))


class _Quantised(nn.Linear):
    """A layer that computes otherwise than its weight says, as quantised ones do."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * 2


class _QuantisedWeight(torch.Tensor):
    """A weight that only looks like one: what torchao puts into plain linear layers."""


def test_quantised_layers_are_left_alone() -> None:
    model = _packed("llama")
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if number == 0:
            attention.q_proj.__class__ = _Quantised
            layer.mlp.down_proj.__class__ = _Quantised
        elif number == 1:
            weight = attention.k_proj.weight.data.as_subclass(_QuantisedWeight)
            attention.k_proj.weight = nn.Parameter(weight, requires_grad=False)
            assert type(attention.k_proj) is nn.Linear
    before = _packed_logits(model)
    optimize(model, keep_weights=False)
    changed = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert (
        not {
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.mlp",
            "model.layers.0.mlp.down_proj",
            "model.layers.1.self_attn.k_proj",
        }
        & changed
    )
    assert {"model.layers.0.self_attn.k_proj", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp"} <= changed
    assert (_packed_logits(model) - before).norm() <= 0.03 * before.norm()


@pytest.mark.parametrize("count", [1, 32, 33, 100])
def test_an_mlp_of_many_rows_is_computed_in_parts(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at most 32 rows here: as the modules compute it, and where linear layers are vattn's, with the same bits."""
    torch.manual_seed(0)
    gate, up = (nn.Linear(64, 128, bias=False, dtype=torch.bfloat16) for _ in range(2))
    down = nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)
    rows, other = torch.randn(2, count, 64, dtype=torch.bfloat16).unbind()
    whole = linears.PackedMLP(gate, up, down)
    monkeypatch.setattr(linears, "_MOST_GATED_BYTES", 32 * 256 * 2)
    parts = linears.PackedMLP(gate, up, down)
    with torch.inference_mode():
        output = parts.plus(rows, other)
        expected = down(nn.functional.silu(gate(rows)) * up(rows)) + other
        torch.testing.assert_close(output, expected, atol=0.03, rtol=0.03)
        if cpu.has_linear():
            assert torch.equal(output, whole.plus(rows, other))
