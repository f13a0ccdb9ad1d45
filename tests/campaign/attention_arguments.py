"""Odd arguments of `decode`: it refuses them before it writes anything, or gives what its docstring promises."""

from __future__ import annotations

import math
import numbers
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.campaign.fuzz import argument, evaluated
from vattn.attention import decode
from vattn.errors import ConfigError

MOST = 2**31 - 1
EITHER = "refused or accepted"
INTS = ("lengths", "slots", "starts", "block_table")


class Unwilling:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise ValueError("no")

    __index__ = __float__ = __len__ = __iter__ = __bool__ = __abs__ = __repr__  # type: ignore[assignment]


class UnwillingNumber(Fraction):
    """A number that raises when it is compared or converted."""

    def __abs__(self) -> Any:
        raise ValueError("no")

    __le__ = __ge__ = __float__ = __repr__ = __abs__  # type: ignore[assignment]


class Wrapper(Tensor):
    """A subclass that has no memory, but a tensor that has."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.inner if isinstance(each, Wrapper) else each for each in args), **(kwargs or {}))


class Loud(Tensor):
    """A subclass with memory, which is not to be asked for anything else."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was asked")


def _emptied(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


# What is no tensor in plain memory, or one of another type or shape.
ODD_TENSORS: dict[str, Callable[[Tensor], object]] = {
    "text": lambda tensor: "query",
    "number": lambda tensor: 1.5,
    "bool": lambda tensor: True,
    "dict": lambda tensor: {"a": tensor},
    "list": lambda tensor: tensor.tolist(),
    "array": lambda tensor: tensor.numpy(),
    "none": lambda tensor: None,
    "unwilling": lambda tensor: Unwilling(),
    "class": lambda tensor: Tensor,
    "0-d": lambda tensor: tensor.flatten()[0],
    "another dimension": lambda tensor: tensor[None],
    "a dimension less": lambda tensor: tensor[0],
    "a longer row": lambda tensor: torch.cat([tensor, tensor], dim=-1),
    "a row less": lambda tensor: tensor[..., :-1],
    "every other": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
    "float64": lambda tensor: tensor.double(),
    "int64": lambda tensor: tensor.long(),
    "int16": lambda tensor: tensor.short(),
    "int8": lambda tensor: tensor.to(torch.int8),
    "bools": lambda tensor: tensor.bool(),
    "complex64": lambda tensor: tensor.to(torch.complex64),
    "conjugated": lambda tensor: tensor.to(torch.complex64).conj(),
    "imaginary": lambda tensor: tensor.to(torch.complex64).conj().imag,
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "nested": lambda tensor: torch.nested.as_nested_tensor(list(tensor.float())),
    "negated": lambda tensor: torch._neg_view(tensor),
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "quantised": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    "wrapper": Wrapper,
    "emptied": _emptied,
}
OPTIONAL = ("out", "sinks", "starts", "slots", "block_table")
ODD_NUMBERS = (
    "Fraction(1, 3)",
    "Fraction(10**400)",
    "Fraction(1, 10**400)",
    "np.float16('inf')",
    "np.float64(1e39)",
    "np.longdouble(2)",
    "1e39",
    "-1e39",
    "1e-39",
    "1e-320",
    "3.4028235e38",
    "0.0",
    "-0.0",
    "0",
    "-10**400",
    "2**64",
    "Unwilling()",
    "UnwillingNumber(1)",
    "torch.tensor(2.0, requires_grad=True)",
    "torch.tensor(3, device='meta')",
    "decimal.Decimal(2)",
)


def _evaluated(code: str) -> Any:
    import decimal

    try:
        return eval(
            code,
            {
                "Fraction": Fraction,
                "np": np,
                "torch": torch,
                "decimal": decimal,
                "Unwilling": Unwilling,
                "UnwillingNumber": UnwillingNumber,
            },
        )
    except NameError:
        return evaluated(code)


def _given(rng: random.Random) -> dict[str, Any]:
    """Arguments that are fine, in plain memory."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    slots, tokens, kv_heads, group = (
        rng.randint(2, 3),
        rng.choice((2, 9, 32, 140)),
        rng.randint(1, 2),
        rng.randint(1, 3),
    )
    dim, v_dim = rng.choice((8, 16, 40)), rng.choice((8, 24))
    count = rng.randint(2, 3)
    lengths = [rng.randint(1, tokens) for _ in range(count)]
    new = [rng.randint(1, min(3, length)) if rng.random() < 0.3 else 1 for length in lengths]
    starts = [sum(new[:i]) for i in range(count + 1)]

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rows, heads = starts[-1], kv_heads * group
    given: dict[str, Any] = {
        "query": randn(rows, heads, dim),
        "key": randn(slots, tokens, kv_heads, dim),
        "value": randn(slots, tokens, kv_heads, v_dim),
        "lengths": ints(lengths),
        "slots": ints([rng.randrange(slots) for _ in lengths]),
        "starts": ints(starts),
        "out": torch.full((rows, heads, v_dim), 7.0),
    }
    if rng.random() < 0.3:
        given["block_table"] = ints([[rng.randrange(slots)] for _ in range(slots)])
    if rng.random() < 0.3:
        given["sinks"] = randn(heads)
    if rng.random() < 0.3:
        for name in ("key", "value"):
            given[name] = (given[name] * 40).clamp(-127, 127).to(torch.int8)
        given["scales"] = tuple(randn(slots, tokens, kv_heads, 1).abs() / 50 for _ in range(2))
    return given


def _want(given: dict[str, Any], numbers_: dict[str, Any]) -> Tensor:
    """Attention in float64, row by row."""
    key, value = given["key"].double(), given["value"].double()
    if "scales" in given:
        key, value = (side * scale.double() for side, scale in zip((key, value), given["scales"], strict=True))
    group = given["query"].shape[1] // key.shape[2]
    starts = given["starts"].tolist()
    scale, softcap, window = (numbers_.get(name) for name in ("scale", "softcap", "window"))
    rows = []
    for i, (slot, length) in enumerate(zip(given["slots"].tolist(), given["lengths"].tolist(), strict=True)):
        if "block_table" in given:
            slot = int(given["block_table"][slot, 0])
        for row in range(starts[i], starts[i + 1]):
            end = length - (starts[i + 1] - row) + 1
            begin = 0 if window is None else max(0, end - window)
            keys, values = (side[slot, begin:end].repeat_interleave(group, 1) for side in (key, value))
            scores = torch.einsum("hd,nhd->hn", given["query"][row].double(), keys)
            scores = scores * (key.shape[3] ** -0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if "sinks" in given:
                scores = torch.cat([scores, given["sinks"].double()[:, None]], -1)
            rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : end - begin], values))
    return torch.stack(rows)


def odd_call(seed: int, number: int) -> tuple[str, str | None]:
    """Makes a call with something odd; what that is, and what is wrong with the answer."""
    rng = random.Random(f"odd/{seed}/{number}")
    given = _given(rng)
    plain = dict(given)
    draw = rng.choice((_tensor, _tensor, _number, _number, _contents, _contents, _out, _pair, _longest))
    what, change, meaning = draw(rng, given)
    asked = given | change
    out = given["out"].clone()
    before = asked["query"].clone() if asked["out"] is asked["query"] else None
    try:
        got = decode(**asked)
    except ConfigError as error:
        if meaning is EITHER:
            return what, None
        if meaning is not None:
            return what, f"{what} is refused, and is fine: {error}"
        if not str(error):
            return what, f"{what} is refused without a word"
        if "out" not in change and not torch.equal(given["out"], out):
            return what, f"{what} is refused when out is written"
        return what, None
    except Exception as error:
        return what, f"{what} gives {type(error).__name__} instead of ConfigError: {error}"
    if meaning is None:
        return what, f"{what} is accepted: {change!r:.200}"
    if meaning is EITHER:
        return what, None
    if callable(meaning):
        return what, meaning(got)
    if isinstance(asked.get("out"), Tensor) and got is not asked["out"]:
        return what, f"{what}: another tensor than out is returned"
    if before is not None:
        plain["query"] = before
    want = _want(plain, meaning)
    largest = plain["query"].double().norm(dim=-1).max() * plain["key"].double().norm(dim=-1).max()
    if "scales" in plain:
        largest = largest * plain["scales"][0].double().max()
    scale = meaning.get("scale")
    factor = plain["query"].shape[2] ** -0.5 if scale is None else abs(scale)
    if factor * float(largest) > 1e4:  # scores have no digits behind the point
        return what, None if got.shape == want.shape and got.isfinite().all() else f"{what}: the result is not finite"
    allowed = 1e-5 + (2e-3 if "scales" in plain else 1e-5) * (1 + factor * float(largest))
    error = (got.double() - want).abs().max() / (1 + want.abs().max())
    return what, None if error <= allowed else f"{what}: the result is off by {float(error)}, {change!r:.200}"


Odd = tuple[str, dict[str, Any], Any]


def _tensor(rng: random.Random, given: dict[str, Any]) -> Odd:
    name = rng.choice([each for each in given if each != "scales"])
    if rng.random() < 0.08:
        wrap = rng.choice((torch.nn.Parameter, lambda tensor: tensor.as_subclass(Loud)))
        if name in ("query", "key", "value") and given[name].is_floating_point():
            return "a subclass with memory", {name: wrap(given[name])}, {}
    kind = rng.choice(list(ODD_TENSORS))
    fine: dict[str, Any] | None = None
    value = ODD_TENSORS[kind](given[name])
    if name in OPTIONAL and kind == "none":
        if name in ("out",):
            fine = {}
        else:
            return f"{name} is none", {name: None}, EITHER  # another call, or one that does not fit
    if isinstance(value, Tensor) and name == "block_table" and kind == "a longer row":
        fine = {}
    if isinstance(value, Tensor) and isinstance(given[name], Tensor) and _alike(value, given[name]):
        fine = {}
    if kind == "int8" and given[name].dtype == torch.int8:
        fine = {}
    if name == "sinks" and kind == "every other" and given[name].numel() == 1:
        fine = {}
    return f"{name} is {kind}", {name: value}, fine


def _alike(value: Tensor, tensor: Tensor) -> bool:
    """Whether it is as plain as the other, and may lie elsewhere."""
    if value.layout != torch.strided or value.is_nested or value.shape != tensor.shape or value.dtype != tensor.dtype:
        return False
    if type(value) is not Tensor or value.device.type != "cpu" or value.is_neg() or value._is_zerotensor():
        return False
    return (value.stride(-1) == 1 or value.shape[-1] == 1) and value.untyped_storage().nbytes() > 0


def _number(rng: random.Random, given: dict[str, Any]) -> Odd:
    name = rng.choice(("window", "scale", "softcap"))
    code, whole = (rng.choice(ODD_NUMBERS), None) if rng.random() < 0.5 else argument(rng, rng.randint(1, 40))
    value = _evaluated(code)
    if value is None:
        return f"{name}={code}", {name: value}, {}
    if name == "window":
        if isinstance(value, (bool, np.bool_)) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            return f"{name}={code}", {name: value}, None
        try:
            whole = value.__index__()
        except Exception:
            whole = None
        return f"{name} of {type(value).__name__}", {name: value}, {name: whole} if (whole or 0) > 0 else None
    most = float(torch.finfo(torch.float32).max)
    fine = None
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, UnwillingNumber)):
        try:
            real = float(value)
        except OverflowError:
            real = math.inf
        if abs(real) <= most and (name == "scale" or real >= torch.finfo(torch.float32).tiny):
            fine = {name: real}
    return f"{name} of {type(value).__name__}", {name: value}, fine


def _contents(rng: random.Random, given: dict[str, Any]) -> Odd:
    """A number that is out of range, somewhere where it is read."""
    name = rng.choice([each for each in INTS if each in given])
    changed = given[name].clone()
    flat = changed.view(-1)
    tokens, slots = given["key"].shape[1], len(given["key"])
    place = rng.randrange(len(flat))
    if name == "block_table":
        place = int(given["slots"][rng.randrange(len(given["slots"]))])
    odd = {
        "lengths": (0, -1, tokens + 1, MOST, -MOST - 1, int(given["starts"].diff().max()) - 1),
        "slots": (-1, slots, MOST, -MOST - 1),
        "starts": (-1, MOST, -MOST - 1, int(given["starts"][-1]) + 1),
        "block_table": (-1, slots, MOST, -MOST - 1),
    }[name]
    value = rng.choice(odd)
    if name == "lengths":
        place = rng.randrange(len(flat))
        new = int(given["starts"][place + 1] - given["starts"][place])
        if new <= value <= tokens:
            value = 0
    flat[place] = value
    if name == "starts" and rng.random() < 0.5 and len(flat) > 2:  # differences that wrap
        changed[1:] = torch.tensor([MOST, -MOST - 1, 0])[: len(flat) - 1]
        changed[-1] = given["starts"][-1]
    return f"{name} out of range", {name: changed}, None


def _out(rng: random.Random, given: dict[str, Any]) -> Odd:
    out, query = given["out"], given["query"]
    shape, count = out.shape, out.numel()
    room = torch.zeros(4096 + max(2 * (count + query.numel()), given["key"].numel(), given["value"].numel()) + count)
    kind = rng.choice(("query", "near", "over", "gradients", "expanded", "strided", "inference", "another", "beside"))
    if kind == "query" and query.shape == shape:
        return "out is query", {"out": query}, {}
    if kind == "near":
        begin, length = rng.randrange(1, 64), query.numel()
        moved = room[begin : begin + length].view(query.shape).copy_(query)
        low = max(0, min(begin + rng.choice((-1, 1)) * rng.randrange(1, 40), begin + length - 1))
        beside = low + count <= begin
        if query.shape == shape and low == begin:
            low += 1
        return "out near query", {"query": moved, "out": room[low : low + count].view(shape)}, {} if beside else None
    if kind == "over":
        name = rng.choice([each for each in ("key", "value", "sinks", "lengths", "slots", "starts") if each in given])
        tensor = given[name]
        begin, elements = rng.randrange(1024), -(-tensor.numel() * tensor.element_size() // 4)
        place = room[begin : begin + elements].view(tensor.dtype)[: tensor.numel()].view(tensor.shape).copy_(tensor)
        low = max(0, begin + rng.randrange(elements) - rng.randrange(count))
        overlaps = low < begin + elements and begin < low + count
        last = place.numel() * place.element_size()
        overlaps = overlaps and low * 4 < begin * 4 + last
        return f"out over {name}", {name: place, "out": room[low : low + count].view(shape)}, None if overlaps else {}
    if kind == "gradients":
        return "out with gradients", {"out": out.clone().requires_grad_()}, None
    if kind == "expanded":
        return "out expanded", {"out": out[:1].expand(shape)}, None if shape[0] > 1 else {}
    if kind == "strided":
        return "out strided", {"out": torch.zeros(*shape[:2], shape[2] + 8)[..., : shape[2]]}, None
    if kind == "inference":
        with torch.inference_mode():
            made = torch.zeros(shape)
        return "out of inference mode", {"out": made}, {}
    if kind == "another":
        return "out of another shape", {"out": torch.zeros(shape[0] + 1, *shape[1:])}, None
    low = query.numel()
    moved = room[:low].view(query.shape).copy_(query)
    return "out beside query", {"query": moved, "out": room[low : low + count].view(shape)}, {}


def _pair(rng: random.Random, given: dict[str, Any]) -> Odd:
    """Scales that are none, or not those of the codes."""
    if "scales" not in given:
        fine = tuple(torch.ones(*given["key"].shape[:3], 1) for _ in range(2))
        return "scales without codes", {"scales": fine}, None
    scales = given["scales"]
    kind = rng.choice(("one", "three", "mixed", "tensor", "text", "dict", "iterator", "list", "float16", "none", "odd"))
    if kind == "odd":
        name = rng.choice([each for each in ODD_TENSORS if each not in ("every other", "int8")])
        changed = list(scales)
        changed[rng.randrange(2)] = ODD_TENSORS[name](scales[0])
        return f"scales are {name}", {"scales": tuple(changed)}, None
    odd: Any = {
        "one": scales[:1],
        "three": (*scales, scales[0]),
        "mixed": (scales[0], scales[1].bfloat16()),
        "tensor": torch.stack(scales),
        "text": "ab",
        "dict": dict(enumerate(scales)),
        "iterator": iter(scales),
        "list": list(scales),
        "float16": tuple(each.half() for each in scales),
        "none": None,
    }[kind]
    return f"scales: {kind}", {"scales": odd}, {} if kind == "list" else None


def _longest(rng: random.Random, given: dict[str, Any]) -> Odd:
    """Lengths up to the largest number of 32 bits, over a token that is repeated; or one more than that."""
    heads, v_dim = given["out"].shape[1:]
    kv_heads, dim = given["key"].shape[2:]
    tokens = rng.choice((MOST, MOST, 2**31 - 129, 2**31))
    key, value = torch.randn(1, 1, kv_heads, dim), torch.randn(1, 1, kv_heads, v_dim)
    count = len(given["lengths"])
    length = rng.choice((MOST, MOST - 1, MOST - 127, MOST - 128, 2**30))
    change: dict[str, Any] = {
        "key": key.expand(1, tokens, kv_heads, dim),
        "value": value.expand(1, tokens, kv_heads, v_dim),
        "lengths": torch.full((count,), length, dtype=torch.int32),
        "slots": torch.zeros(count, dtype=torch.int32),
        "window": rng.choice((1, 2, 128, 129, 700)),
        "sinks": None,
        "scales": None,
        "out": None,
    }
    if "block_table" in given:
        change["block_table"] = torch.zeros(1, 1, dtype=torch.int32)
    if rng.random() < 0.3:  # differences of 32 bits that wrap to numbers that fit
        rows = len(given["query"])
        change["starts"] = torch.tensor([0, 1, -MOST - 1, -1, rows], dtype=torch.int32)
        change["lengths"] = torch.tensor([1, MOST, MOST, rows + 1], dtype=torch.int32)
        change["slots"] = torch.zeros(4, dtype=torch.int32)
        return "starts that wrap", change, None
    if length > tokens or tokens > MOST:
        return "a length beyond 32 bits", change, None

    def right(got: Tensor) -> str | None:
        want = value[0, 0].repeat_interleave(heads // kv_heads, 0)
        return None if torch.allclose(got, want.expand_as(got), atol=1e-5) else "the longest length: a wrong result"

    return "the longest length", change, right
