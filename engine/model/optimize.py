"""The same model, faster on a CPU: weights laid out once, fewer products, and less between them.

Six changes, each to the `forward` of single modules, which keep their names and types. Those of a model that somebody
else has, too, take effect in packed steps only:

    linear          the weight in the layout of its product, instead of being reordered at every call
    q, k, v         one product for the three projections of an attention module
    gated MLP       one product for both branches, and one pass for activation and gate
    decoder layer   in packed steps, what `vattn.engine.model.decoder_layer` makes of it
    decoder         in packed steps, its layers and the norm after them, without what is for other callers; the last
                    layer stores the keys and values of all rows, and attends for those whose logits are asked for
    model           in packed steps, its decoder and its head, likewise

docs/measurements.md says what each of them is worth. Modules that have hooks, or a `forward` of their own, stay as they
are, and so do those around them that would not call them.

For bfloat16 only. Float32 would win little, and its tokens are to be those of transformers, bit by bit; here they
differ by rounding, since sums of several tensors are rounded once.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from vattn import cpu
from vattn.attention import AttentionParams
from vattn.attention.interface import running
from vattn.errors import ConfigError
from vattn.packed import NAME, PackedStep, current_step, max_context, run_packed, wanted_rows
from vattn.packed.calls import only_forward, put, take_back, untouched

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
_EXAMPLE_TOKENS = 5
_FAR = 1 << 17  # a last position for models that do not name one
_MOST_GAIN = 0.01


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


class Optimized(NamedTuple):
    """What can be done with a model that `optimize` has changed.

    Attributes:
        restore: undoes the change.
        pack: packs the weights that the model has now.
    """

    restore: Callable[[], None]
    pack: Callable[[], None]


class _Parts:
    """What faster forwards are made of.

    Attributes:
        products: of linear layers, and of modules that have several.
    """

    def __init__(self) -> None:
        self.products: dict[nn.Module, Packed | PackedMLP | PackedTogether] = {}
        self._norms: dict[nn.Module, cpu.NormWeight] = {}
        self._sinks: dict[nn.Module, tuple[str, Tensor]] = {}  # the parameter's name, and its copy

    def norm(self, module: nn.Module) -> cpu.NormWeight:
        """A ValueError if it is no RMS norm, or computes more."""
        return self._norms.setdefault(module, norm_weight(module))

    def sinks(self, attention: nn.Module, sinks: Tensor) -> Tensor:
        """A copy in float32, as kernels read them; a ValueError if they are no parameter of the module."""
        names = [name for name, parameter in attention.named_parameters(recurse=False) if parameter is sinks]
        if not names:
            raise ValueError(f"the sinks of {type(attention).__name__} are computed")
        return self._sinks.setdefault(attention, (names[0], cpu.copied(sinks).float()))[1]

    @torch.inference_mode()
    def pack(self) -> None:
        """Packs the weights that the modules have now.

        Raises:
            ConfigError: some are no longer of the shape and type that they had; none is packed then.
        """
        products = [each for product in self.products.values() for each in product.products]
        for each in products:
            each.check()
        norms = [(norm.weight, cast(Tensor, module.weight)) for module, norm in self._norms.items()]
        if wrong := [now for before, now in norms if (now.shape, now.dtype) != (before.shape, before.dtype)]:
            raise ConfigError(
                f"a norm's weight is now {list(wrong[0].shape)} in {str(wrong[0].dtype).removeprefix('torch.')}; close "
                "every LLM over this model and make another one"
            )
        sinks = [(before, cast(Tensor, getattr(module, name))) for module, (name, before) in self._sinks.items()]
        for before, now in sinks:
            if now.shape != before.shape:
                raise ConfigError(
                    f"an attention's sinks are now {list(now.shape)} and were {list(before.shape)}; close every LLM "
                    "over this model and make another one"
                )
        for each in products:
            each.pack()
        for before, now in norms + sinks:
            before.copy_(now)


def optimize(model: PreTrainedModel, *, keep_weights: bool = True) -> Optimized:
    """Change how the linear layers of `model` compute.

    Args:
        model: in eval mode, and `supported`.
        keep_weights: keep the original weights beside the packed ones. False frees them, unless the model reads them
            by itself; it is then good only for inference with the packed ones, and what this returns must not be
            called.
    """
    faster: dict[nn.Module, Callable[..., Any]] = {}
    inside: set[nn.Module] = set()  # linear layers whose weights those have, and which they do not call
    parts = _Parts()
    with torch.inference_mode():
        for module in model.modules():
            mlp = _gated_mlp(module)
            if mlp is not None:
                faster[module] = parts.products[module] = mlp
                inside |= set(_linears(module, _MLP))
            shared = _shared_product(module)
            if shared is not None:
                parts.products[module] = shared
                faster |= {part: shared.part(i) for i, part in enumerate(_linears(module, _QKV))}
            if _is_plain(module) and module not in faster and module not in inside:
                faster[module] = parts.products[module] = Packed([module])
        if keep_weights:
            faster = {module: _in_steps(module, forward) for module, forward in faster.items()}
        faster |= _decoder_layers(model, parts)

    def restore() -> None:
        for module, forward in faster.items():
            take_back(module, forward)

    try:
        for module, forward in faster.items():
            put(module, forward)
        decoder = cast(Any, model).get_decoder()
        makers: dict[nn.Module, Callable[..., Callable[..., Any] | None]] = {decoder: _decoder, model: _model}
        for module, make in makers.items():
            try:
                in_steps = make(model, faster, parts) if "forward" not in vars(module) else None
            except (TypeError, ValueError, RuntimeError):  # its parts are called in another way
                break
            if in_steps is None:
                break
            expected = _example(model)
            faster[module] = in_steps  # first, for `restore`
            put(module, in_steps)
            if not _computes(model, expected):
                take_back(module, in_steps)
                del faster[module]
                break
    except BaseException:
        restore()
        raise
    if not keep_weights:
        _free(model, {*faster, *inside})
    return Optimized(restore, parts.pack)


class _Reads(TorchFunctionMode):
    """Notes which objects torch's functions are given, and of which attributes are read.

    Attributes:
        ids: of these objects.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ids.update(map(id, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))


def _free(model: PreTrainedModel, packed: set[nn.Module]) -> None:
    """Frees the parameters of packed linear layers, except those that other modules have, too, or that are read.

    A router may multiply by the weight of its layer in float32, and not call the layer. A short example reads, and has
    most experts idle: what it reads of one layer or expert is kept in all of them.
    """
    with _Reads() as reads:
        _example(model)
    parameters = [
        (re.sub(r"\b\d+\b", "*", f"{path}.{name}"), module, parameter)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    linears = {module for module in packed if isinstance(module, nn.Linear)}
    shared = {id(parameter) for _, module, parameter in parameters if module not in linears}
    read = {name for name, _, parameter in parameters if id(parameter) in reads.ids}
    for name, module, parameter in parameters:
        if module in linears and name not in read and id(parameter) not in shared:
            parameter.data = parameter.data.new_empty(0)


def _in_steps(module: nn.Module, faster: Callable[..., Any]) -> Callable[..., Any]:
    """`faster` in packed steps, and elsewhere the module's own forward: packed weights have no gradients, and may be
    older than those that the caller's own forward passes are to have.
    """

    def forward(*args: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled() or current_step() is None:
            return type(module).forward(module, *args, **keywords)
        return faster(*args, **keywords)

    return forward


def _gated_mlp(module: nn.Module) -> PackedMLP | None:
    """A faster `module`, where it is a gated MLP with SiLU.

    Its attributes show that it may be one; whether its forward computes just that, its results are compared: of large
    rows, too, since some clamp what is large.
    """
    linears = _linears(module, _MLP)
    if not linears or any(linear.bias is not None for linear in linears) or not all(map(untouched, module.modules())):
        return None
    mlp = PackedMLP(*linears)
    rows = _noise(4, linears[0].in_features).bfloat16()
    try:
        same = all(_same(mlp(each), module(each)) for each in (rows, 1024 * rows))
    except (TypeError, ValueError, RuntimeError):  # it takes other arguments
        return None
    return mlp if same else None


def _shared_product(module: nn.Module) -> PackedTogether | None:
    linears = _linears(module, _QKV)
    alike = len({(linear.in_features, linear.bias is None) for linear in linears}) == 1
    return PackedTogether(linears) if alike else None


def _decoder_layers(model: PreTrainedModel, parts: _Parts) -> dict[nn.Module, Callable[..., Tensor]]:
    """Faster forwards of the model's decoder layers, where they are of the usual kind.

    As with the MLP, names select candidates and results decide. The test rows are so small that what the layer adds to
    them is most of its output. They have a mean, which other norms subtract, and positions up to the last one, since
    some models scale queries from a position on.
    """
    if model.config._attn_implementation != NAME:
        return {}
    forwards: dict[nn.Module, Callable[..., Tensor]] = {}
    recorder = Recorder()

    def compare(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], _: Any) -> None:
        if current_step() is not recorder:  # of an engine in another thread
            return
        if not args:  # rows that are given by keyword
            return
        hidden, *others = args
        rows = 0.05 * (1 + _noise(*hidden.shape)).to(hidden)
        expected = module.forward(rows, *others, **keywords)
        recorded, params, layer = recorder.tensors, recorder.params, recorder.layer
        try:
            queries, keys, values = recorded
            num_heads = queries.shape[1], keys.shape[1], values.shape[1]
            decoder_layer = _decoder_layer(module, parts, layer, params, num_heads)
            output = decoder_layer(recorder, rows, keywords["position_embeddings"])
        except (KeyError, TypeError, ValueError, RuntimeError):  # of another build
            return
        if all(map(_same, (output[0], *recorder.tensors), (expected[0], *recorded))):
            forwards[module] = InSteps(decoder_layer, module.forward)

    candidates = [
        module for module in model.modules() if module._modules.keys() == _LAYER and "forward" not in vars(module)
    ]
    hooks = [module.register_forward_hook(compare, with_kwargs=True) for module in candidates]
    last = (max_context(model.config) or _FAR) - 1
    positions = torch.linspace(0, last, _EXAMPLE_TOKENS, dtype=torch.float64, device=model.device).long()
    try:
        _example(model, recorder, positions)
    finally:
        for hook in hooks:
            hook.remove()
    return forwards


def _decoder(model: Any, faster: Mapping[nn.Module, Any], parts: _Parts) -> _Decoder | None:
    """A faster forward of a model's decoder, where all its layers have one.

    Embeddings may be scaled, or layers called in another way: again results have to decide.
    """
    decoder = model.get_decoder()
    if decoder._modules.keys() != _DECODER or not all(layer in faster for layer in decoder.layers):
        return None
    if not _takes_embeddings(model, decoder):
        return None
    try:
        norm = parts.norm(decoder.norm)
    except ValueError:
        return None
    rotary = decoder.rotary_emb
    kind = getattr(rotary, "rope_type", None)
    if not isinstance(kind, str | None):  # one for each type of layers, which is then an argument of calls
        return None
    if kind not in _MOVING_ROTARY and untouched(rotary):
        rotary = RotaryTable(rotary)
    return _Decoder(decoder, rotary, norm, decoder.forward)


def _takes_embeddings(model: PreTrainedModel, decoder: Any) -> bool:
    """Whether the first layer is given the embeddings as they are. Logits would hardly show it: norms hide a factor,
    and embeddings of tokens that were not trained may be zero.
    """
    rows, seen = list[Tensor](), list[Tensor]()

    def replace(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        rows.append(_noise(*output.shape).to(output))
        return rows[-1]

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.extend(args[:1])

    hooks = [
        decoder.embed_tokens.register_forward_hook(replace),
        decoder.layers[0].register_forward_pre_hook(note),
    ]
    try:
        _example(model)
    finally:
        for hook in hooks:
            hook.remove()
    return len(rows) == len(seen) == 1 and torch.equal(rows[0], seen[0])


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


@torch.inference_mode()
def _model(model: Any, faster: Mapping[nn.Module, Any], _: _Parts) -> Callable[..., Any] | None:
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
    if len(seen) != 2 or not torch.equal(seen[1][0], logits):
        return None
    with running(Recorder()):  # elsewhere the head is torch's, which rounds otherwise
        if not torch.equal(head(seen[0])[0], logits):
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
        others = others or logits_to_keep is not wanted or not only_forward(decoder)
        if step is None or wanted is None or input_ids is None or position_ids is None or others:
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


def _example(model: PreTrainedModel, recorder: Recorder | None = None, positions: Tensor | None = None) -> Tensor:
    """Logits of a packed step of a few tokens."""
    rows = torch.arange(_EXAMPLE_TOKENS, device=model.device)
    tokens = rows % cast(Any, model.get_input_embeddings()).num_embeddings
    return run_packed(model, recorder or Recorder(), tokens, 3 * rows if positions is None else positions, rows)


def _noise(*shape: int) -> Tensor:
    """The same normal numbers whenever they are asked for, whatever torch's default device and type are."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _decoder_layer(
    module: nn.Module,
    parts: _Parts,
    layer: int,
    params: AttentionParams,
    num_heads: tuple[int, int, int],
) -> DecoderLayer:
    """A faster `module`, if it is what its names say; raises a KeyError or ValueError if it cannot be."""
    attention, mlp = module.get_submodule("self_attn"), module.get_submodule("mlp")
    if not untouched(attention):
        raise ValueError("attention has hooks, or a forward of its own")
    norms = attention._modules.keys() - {*_QKV, "o_proj"}
    if norms not in (set(), {"q_norm", "k_norm"}):
        raise ValueError(f"attention has {', '.join(sorted(norms))}")
    qkv, output, gated = (parts.products[each] for each in (attention, attention.get_submodule("o_proj"), mlp))
    assert isinstance(qkv, PackedTogether)
    assert isinstance(output, Packed)
    assert isinstance(gated, PackedMLP)
    before, after = (parts.norm(module.get_submodule(f"{name}_layernorm")) for name in ("input", "post_attention"))
    head_dim, rest = divmod(qkv.product.out, sum(num_heads))
    attended = attention.get_submodule("o_proj").in_features
    if rest or attended != num_heads[0] * head_dim:
        raise ValueError(f"{qkv.product.out} elements are no heads of one size: {num_heads}")
    if params.sinks is not None:
        params = replace(params, sinks=parts.sinks(attention, params.sinks))
    project = projection(before, qkv.product, _head_norms(attention, parts) if norms else None, num_heads, head_dim)
    return DecoderLayer(layer, params, num_heads, head_dim, project, residual(output, after, gated))


def _head_norms(attention: nn.Module, parts: _Parts) -> tuple[cpu.NormWeight, cpu.NormWeight]:
    query, key = (parts.norm(attention.get_submodule(name)) for name in ("q_norm", "k_norm"))
    head_dim = getattr(attention, "head_dim", None)
    if query.epsilon != key.epsilon or {*query.weight.shape, *key.weight.shape} != {head_dim}:
        raise ValueError("these are no norms of heads, or they differ")
    return query, key


def _same(result: Tensor, expected: Tensor) -> bool:
    """Equal up to the rounding of bfloat16 in a few operations. It changes single elements, but by its mean no row."""
    if result.shape != expected.shape:
        return False
    ours, theirs = (rows.flatten(1).double() for rows in (result, expected))
    squares = theirs.square().sum(1)
    gains = ((ours - theirs) * theirs).sum(1).abs()
    return bool((ours - theirs).norm() <= 0.02 * theirs.norm() and (gains <= _MOST_GAIN * squares).all())


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The children of these names, where all are plain linear layers; or none."""
    children = [module._modules.get(name) for name in names]
    linears = [child for child in children if _is_plain(child)]
    return linears if len(linears) == len(names) else []


def _is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer in bfloat16, and no adapter or quantised one: those differ in a type, or wrap it.

    One with an odd number of inputs is oneDNN's, and plain only where that multiplies bfloat16.
    """
    return (
        type(module) is nn.Linear
        and type(module.weight.data) is Tensor
        and module.weight.dtype == torch.bfloat16
        and (module.in_features % 2 == 0 or _has_mkldnn())
        and untouched(module)
    )
