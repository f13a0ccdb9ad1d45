"""The same model, faster on a CPU: weights laid out once, fewer products, and less between them.

Six changes, each to the `forward` of single modules, which keep their names and types:

    linear          the weight in the layout of its product, instead of being reordered at every call
    q, k, v         one product for the three projections of an attention module
    gated MLP       one product for both branches, and one pass for activation and gate
    decoder layer   in packed steps, what `vattn.engine.model.decoder_layer` makes of it
    decoder         in packed steps, its layers and the norm after them, without what is for other callers; the last
                    layer stores the keys and values of all rows, and attends for those whose logits are asked for
    model           in packed steps, its decoder and its head, likewise

docs/measurements.md says what each of them is worth.

For bfloat16 only. Float32 would win little, and its tokens are to be those of transformers, bit by bit; here they
differ by rounding, since sums of several tensors are rounded once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from vattn import cpu
from vattn.attention import AttentionParams
from vattn.packed import NAME, PackedStep, current_step, run_packed, wanted_rows

from .decoder_layer import DecoderLayer, InSteps, Recorder, RotaryTable, norm_weight, projection, residual
from .linears import Packed, PackedMLP, PackedTogether
from .native_layers import run_layers

_mkldnn = torch.ops.mkldnn
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MLP = ("gate_proj", "up_proj", "down_proj")
_QKV = ("q_proj", "k_proj", "v_proj")
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_MOVING_ROTARY = {"dynamic", "longrope"}  # whose factors depend on other positions of the call
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def supported(model: PreTrainedModel) -> bool:
    """Whether `optimize` can speed this model up on this machine."""
    return (
        model.device.type == "cpu"
        and model.dtype == torch.bfloat16
        and cpu.unusable() is None
        and (cpu.has_linear() or _has_mkldnn())
    )


def _has_mkldnn() -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and _mkldnn._is_mkldnn_bf16_supported())


def keep_freed_memory() -> None:
    """Make the C library keep up to 512 MiB of freed large blocks, for the next layer's activations.

    By default glibc returns blocks over 128 KiB to the kernel at once, and every layer pays for zeroed pages again:
    400,000 page faults, a second of eight, in the short set of `bench throughput`. The setting is for the whole
    process; C libraries without `mallopt` do not need it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 512 << 20)


def optimize(model: PreTrainedModel, *, keep_weights: bool = True) -> Callable[[], None]:
    """Change how the linear layers of `model` compute.

    Args:
        model: in eval mode, and `supported`.
        keep_weights: keep the original weights beside the packed ones. False frees them; the model is then good only
            for inference with the packed ones.

    Returns:
        A function that undoes the change; with `keep_weights=False` it must not be called.
    """
    faster: dict[nn.Module, Callable[..., Any]] = {}
    packed: dict[nn.Module, Packed | PackedMLP | PackedTogether] = {}
    with torch.inference_mode():
        for module in model.modules():
            mlp = _gated_mlp(module)
            if mlp is not None:
                faster[module] = packed[module] = mlp
                faster |= dict.fromkeys(_linears(module, _MLP), mlp)
            shared = _shared_product(module)
            if shared is not None:
                packed[module] = shared
                faster |= {part: shared.part(i) for i, part in enumerate(_linears(module, _QKV))}
            if _is_plain(module) and module not in faster:
                faster[module] = packed[module] = Packed(module.weight, module.bias)
        faster |= _decoder_layers(model, packed)

    def restore() -> None:
        for module in faster:
            module.__dict__.pop("forward", None)

    try:
        for module, forward in faster.items():
            module.forward = forward
        decoder = cast(Any, model).get_decoder()
        makers: dict[nn.Module, Callable[..., Callable[..., Any] | None]] = {decoder: _decoder, model: _model}
        for module, make in makers.items():
            in_steps = make(module, faster)
            if in_steps is None:
                break
            expected = _example(model)
            faster[module] = in_steps  # first, for `restore`
            module.forward = in_steps
            if not _computes(model, expected):
                del module.forward
                del faster[module]
                break
    except BaseException:
        restore()
        raise
    if not keep_weights:
        others = {id(p) for m in model.modules() if m not in faster for p in m.parameters(recurse=False)}
        for module in faster:
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in others:
                    parameter.data = parameter.data.new_empty(0)
    return restore


def _gated_mlp(module: nn.Module) -> PackedMLP | None:
    """A faster `module`, where it is a gated MLP with SiLU.

    Its attributes show that it may be one; whether its forward computes just that, its results are compared.
    """
    linears = _linears(module, _MLP)
    if not linears or any(linear.bias is not None for linear in linears):
        return None
    mlp = PackedMLP(*linears)
    rows = torch.randn(4, linears[0].in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        expected = module(rows)
        same = _same(mlp(rows), expected)
    except (TypeError, ValueError, RuntimeError):  # it takes other arguments
        return None
    return mlp if same else None


def _shared_product(module: nn.Module) -> PackedTogether | None:
    linears = _linears(module, _QKV)
    alike = len({(linear.in_features, linear.bias is None) for linear in linears}) == 1
    return PackedTogether(linears) if alike else None


def _decoder_layers(
    model: PreTrainedModel, packed: Mapping[nn.Module, Packed | PackedMLP | PackedTogether]
) -> dict[nn.Module, Callable[..., Tensor]]:
    """Faster forwards of the model's decoder layers, where they are of the usual kind.

    As with the MLP, names select candidates and results decide; the test rows are so small that what the layer adds to
    them is most of its output.
    """
    if model.config._attn_implementation != NAME:
        return {}
    forwards: dict[nn.Module, Callable[..., Tensor]] = {}
    recorder = Recorder()

    def compare(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], _: Any) -> None:
        hidden, *others = args
        rows = 0.05 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
        expected = module.forward(rows, *others, **keywords)
        recorded, params, layer = recorder.tensors, recorder.params, recorder.layer
        try:
            queries, keys, values = recorded
            num_heads = queries.shape[1], keys.shape[1], values.shape[1]
            decoder_layer = _decoder_layer(module, packed, layer, params, num_heads)
            output = decoder_layer(recorder, rows, keywords["position_embeddings"])
        except (KeyError, TypeError, ValueError, RuntimeError):  # of another build
            return
        if all(map(_same, (output, *recorder.tensors), (expected, *recorded))):
            forwards[module] = InSteps(decoder_layer, module.forward)

    candidates = [module for module in model.modules() if module._modules.keys() == _LAYER]
    hooks = [module.register_forward_hook(compare, with_kwargs=True) for module in candidates]
    try:
        _example(model, recorder)
    finally:
        for hook in hooks:
            hook.remove()
    return forwards


def _decoder(decoder: Any, faster: Mapping[nn.Module, Any]) -> _Decoder | None:
    """A faster forward of a model's decoder, where all its layers have one.

    Embeddings may be scaled, or layers called in another way: again results have to decide.
    """
    if decoder._modules.keys() != _DECODER or not all(layer in faster for layer in decoder.layers):
        return None
    try:
        norm = norm_weight(decoder.norm)
    except ValueError:
        return None
    rotary = decoder.rotary_emb
    if getattr(rotary, "rope_type", None) not in _MOVING_ROTARY:
        rotary = RotaryTable(rotary)
    return _Decoder(decoder, rotary, norm, decoder.forward)


@dataclass(frozen=True)
class _Decoder:
    """The forward of a decoder, whose rotary factors and last norm are given."""

    module: Any
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    norm: cpu.NormWeight
    plain: Callable[..., Any]

    def __call__(
        self,
        input_ids: Tensor | None = None,
        *args: Any,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **keywords: Any,
    ) -> Any:
        others = any(value is not None for value in (*args, *keywords.values()))
        step = current_step()
        if step is None or input_ids is None or position_ids is None or others:
            return self.plain(input_ids, *args, position_ids=position_ids, use_cache=use_cache, **keywords)
        wanted = wanted_rows()
        output = self.rows(step, input_ids, position_ids, wanted)
        if wanted is not None and len(output) < input_ids.shape[1]:
            # The model's head picks the wanted rows from all. Whatever reads the others is to see that it is wrong.
            every = output.new_full((input_ids.shape[1], output.shape[1]), math.nan)
            output = every.index_copy_(0, wanted, output)
        return BaseModelOutputWithPast(last_hidden_state=output[None])

    def rows(self, step: PackedStep, input_ids: Tensor, position_ids: Tensor, wanted: Tensor | None) -> Tensor:
        """Hidden states of the wanted rows, `[S, hidden_size]`; of all, in order, where these are as many or more."""
        hidden = self.module.embed_tokens(input_ids)
        embeddings = self.rotary(hidden, position_ids)
        layers = self.module.layers
        if wanted is not None and len(wanted) < hidden.shape[1]:
            *others, last = layers
            hidden = last(run_layers(others, step, hidden, embeddings), position_embeddings=embeddings, wanted=wanted)
        else:
            hidden = run_layers(layers, step, hidden, embeddings)
        return cpu.norm(hidden[0], self.norm)


def _model(model: Any, faster: Mapping[nn.Module, Any]) -> Callable[..., Any] | None:
    """A faster forward of a model whose logits are what its head makes of its decoder's rows, bit by bit."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    in_steps, plain = faster.get(decoder), model.forward
    if not isinstance(in_steps, _Decoder) or head not in faster:
        return None
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.append((output.last_hidden_state if module is decoder else output).clone())

    hooks = [module.register_forward_hook(note) for module in (decoder, head)]
    try:
        logits = _example(model)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != 2 or not torch.equal(head(seen[0])[0], logits) or not torch.equal(seen[1][0], logits):
        return None

    def forward(
        input_ids: Tensor | None = None,
        *args: Any,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **keywords: Any,
    ) -> Any:
        step, wanted = current_step(), wanted_rows()
        others = any(value is not None for value in (*args, *keywords.values()))
        hooked = decoder._forward_hooks or decoder._forward_pre_hooks
        asked = wanted is not None and logits_to_keep is wanted
        if step is None or wanted is None or input_ids is None or position_ids is None or others or hooked or not asked:
            return plain(
                input_ids,
                *args,
                position_ids=position_ids,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                **keywords,
            )
        rows = in_steps.rows(step, input_ids, position_ids, wanted)
        if len(wanted) >= input_ids.shape[1]:
            rows = rows[wanted]
        return CausalLMOutputWithPast(logits=head(rows)[None])

    return forward


def _computes(model: PreTrainedModel, expected: Tensor) -> bool:
    try:
        return _same(_example(model), expected)
    except (TypeError, ValueError, RuntimeError):  # the decoder is called in another way
        return False


def _example(model: PreTrainedModel, recorder: Recorder | None = None) -> Tensor:
    """Logits of a packed step of five tokens."""
    tokens = torch.arange(5)
    return run_packed(model, recorder or Recorder(), tokens, 3 * tokens, tokens)


def _decoder_layer(
    module: nn.Module,
    packed: Mapping[nn.Module, Packed | PackedMLP | PackedTogether],
    layer: int,
    params: AttentionParams,
    num_heads: tuple[int, int, int],
) -> DecoderLayer:
    """A faster `module`, if it is what its names say; raises a KeyError or ValueError if it cannot be."""
    attention = module.get_submodule("self_attn")
    norms = attention._modules.keys() - {*_QKV, "o_proj"}
    if norms not in (set(), {"q_norm", "k_norm"}):
        raise ValueError(f"attention has {', '.join(sorted(norms))}")
    qkv, output, mlp = packed[attention], packed[attention.get_submodule("o_proj")], packed[module.get_submodule("mlp")]
    assert isinstance(qkv, PackedTogether)
    assert isinstance(output, Packed)
    assert isinstance(mlp, PackedMLP)
    before, after = (norm_weight(module.get_submodule(f"{name}_layernorm")) for name in ("input", "post_attention"))
    head_dim, rest = divmod(qkv.product.out, sum(num_heads))
    attended = attention.get_submodule("o_proj").in_features
    if rest or attended != num_heads[0] * head_dim:
        raise ValueError(f"{qkv.product.out} elements are no heads of one size: {num_heads}")
    project = projection(before, qkv.product, _head_norms(attention) if norms else None, num_heads, head_dim)
    return DecoderLayer(layer, params, num_heads, head_dim, project, residual(output, after, mlp))


def _head_norms(attention: nn.Module) -> tuple[cpu.NormWeight, cpu.NormWeight]:
    query, key = (norm_weight(attention.get_submodule(name)) for name in ("q_norm", "k_norm"))
    head_dim = getattr(attention, "head_dim", None)
    if query.epsilon != key.epsilon or {*query.weight.shape, *key.weight.shape} != {head_dim}:
        raise ValueError("these are no norms of heads, or they differ")
    return query, key


def _same(result: Tensor, expected: Tensor) -> bool:
    """Equal up to the rounding of bfloat16 in a few operations."""
    difference = (result - expected).float().norm()
    return result.shape == expected.shape and bool(difference <= 0.02 * expected.float().norm())


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The children of these names, where all are plain linear layers; or none."""
    children = [module._modules.get(name) for name in names]
    linears = [child for child in children if _is_plain(child)]
    return linears if len(linears) == len(names) else []


def _is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer in bfloat16, and no adapter or quantised one: those differ in a type."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor and module.weight.dtype == torch.bfloat16
