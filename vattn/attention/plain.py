"""`attend`: vattn's kernels for CPUs over plain tensors, for anybody."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn import cpu
from vattn.attention.base import check_softcap, check_window
from vattn.errors import ConfigError
from vattn.integers import as_real, shown


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    slots: Tensor | None = None,
    starts: Tensor | None = None,
    block_table: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of each request's new tokens over its keys and values, which are read in place, on a CPU.

    One call serves the whole batch: long requests are divided among torch's threads, short ones run side by side.
    Nothing is read past a request's length. No gradients flow: the result is a constant to autograd.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`: one row per request, or as `starts` says. The newest token
            comes last and sees all keys of its request, the one before sees all but the last, and so on.
        key, value: `[slots, tokens, num_kv_heads, head_dim]` and `[..., v_head_dim]`, new tokens included, in the type
            of `query`: float32, bfloat16 or float16. Any strides, but the last is 1. With `block_table` these are
            `[num_blocks, block_size, ...]`.
        lengths: `[n]` int32, the tokens of each request, new ones included.
        slots: `[n]` int32, the slot of each request; by default request i is in slot i.
        starts: `[n + 1]` int32, the first row of each request's queries, then the number of rows; by default each has
            one.
        block_table: `[slots, blocks]` int32, where keys and values are in blocks.
        scales: of keys and of values that are int8 codes, `[slots, tokens, num_kv_heads, 1]` each, in bfloat16 or
            float32; a row is its codes times its scale. A scale below 0 makes the results NaN that it takes part in.
        scale: factor on the scores, finite; `head_dim ** -0.5` by default.
        softcap: scores become `softcap * tanh(score / softcap)`; positive.
        window: a query sees this many keys, itself included; a whole number from 1 on.
        sinks: `[num_query_heads]` logits that take part in each softmax and add nothing to its sum.
        out: `[num_tokens, num_query_heads, v_head_dim]`, contiguous; written and returned. By default a new tensor. It
            may be `query` itself, and shares no memory with anything else.

    Returns:
        `[num_tokens, num_query_heads, v_head_dim]` in the type of `query`.

    Raises:
        ConfigError: an argument is no tensor or number, or a tensor without plain memory on the CPU (sparse, nested,
            meta, a view that torch negates when it is read, one of `torch.func`, ...); shapes, types or devices do not
            fit; a head size is no multiple of 8, or above 131072 with codes; a number is out of range; or a length,
            slot or block is outside of the tensors. Nothing has been written then.
    """
    with torch._C.DisableTorchFunctionSubclass():  # what is asked of a subclass is asked of the memory that it has
        pair = _pair(scales)
        read = {"query": query, "key": key, "value": value, "lengths": lengths, "slots": slots, "starts": starts}
        read |= {"block_table": block_table, "sinks": sinks}
        read |= {} if pair is None else {"scales[0]": pair[0], "scales[1]": pair[1]}
        optional = ("slots", "starts", "block_table", "sinks", "out")
        for name, tensor in (*read.items(), ("out", out)):
            if tensor is not None or name not in optional:
                _check_memory(name, tensor)
        _check_shapes(query, key, value, lengths, slots, starts, block_table, pair, sinks, out)
        check_requests(query.shape[0], key, lengths, slots, starts, block_table)
        if out is not None:
            _check_out(out, query, read)
        attended = cpu.attend(
            query,
            key,
            value,
            slots=slots,
            lengths=lengths,
            starts=starts,
            block_table=block_table,
            scales=pair,
            scale=_checked_scale(scale),
            softcap=check_softcap(softcap),
            window=check_window(window),
            sinks=sinks,
            out=out,
        )
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)  # a backward pass that needs what was there is refused
        return attended


# The kernels count in 32 bits, and sum up products of two numbers of 8 bits in as many.
_MOST = 2**31 - 1
_MOST_CODES = 2**17


def _check_memory(name: str, tensor: object) -> None:
    """Refuses what is no tensor, or one whose elements are not in memory as its shape and strides say."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is {shown(tensor)}; give a tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise ConfigError(f"{name} is a {'nested' if tensor.is_nested else tensor.layout} tensor; give a dense one")
    if tensor.device.type != "cpu":
        raise ConfigError(f"{name} is on {tensor.device}; these kernels run on CPUs")
    if tensor.is_neg() or tensor.is_conj():
        raise ConfigError(f"{name} is a view that torch negates when it is read; give {name}.resolve_neg()")
    last = tensor.storage_offset()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > _MOST:
            raise ConfigError(f"{name} is {_shape(tensor)}; these kernels count up to {_MOST}")
        last += (size - 1) * stride
    if not tensor.numel():
        return
    try:
        there = tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= (last + 1) * tensor.element_size()
    except (RuntimeError, NotImplementedError):  # a tensor of torch.func, say
        there = False
    if not there:
        raise ConfigError(
            f"{name} ({type(tensor).__name__}) has no memory that holds its elements; give a plain tensor"
        )


def _pair(scales: object) -> tuple[Tensor, Tensor] | None:
    if scales is None:
        return None
    if not isinstance(scales, (tuple, list)) or len(scales) != 2:
        raise ConfigError(f"scales={shown(scales)}; give those of the keys and those of the values")
    return scales[0], scales[1]


def _checked_scale(scale: object) -> float | None:
    if scale is None:
        return None
    factor = as_real(scale)
    if factor is None or not abs(factor) <= torch.finfo(torch.float32).max:
        raise ConfigError(
            f"scale={shown(scale)}; give a finite number of float32's range, or None for head_dim ** -0.5"
        )
    return factor


def _check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    slots: Tensor | None,
    starts: Tensor | None,
    block_table: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> None:
    """Refuses shapes, element types and strides that `attend` would misread."""
    if query.ndim != 3 or key.ndim != 4 or value.ndim != 4:
        raise ConfigError(
            f"query {_shape(query)}, key {_shape(key)}, value {_shape(value)}: give [num_tokens, num_query_heads, "
            "head_dim], and [slots, tokens, num_kv_heads, head_dim] twice"
        )
    if key.shape[:3] != value.shape[:3] or query.shape[2] != key.shape[3]:
        raise ConfigError(
            f"query {_shape(query)}, key {_shape(key)} and value {_shape(value)} do not fit: keys and values differ in "
            "the head size only, and queries have that of the keys"
        )
    heads, kv_heads = query.shape[1], key.shape[2]
    if not kv_heads or not heads or heads % kv_heads:
        raise ConfigError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    for dim in (key.shape[3], value.shape[3]):
        if not dim or dim % 8:
            raise ConfigError(f"heads of {dim} elements; the size must be a multiple of 8")
        if heads * max(dim, 128) > _MOST:
            raise ConfigError(f"{heads} heads of {dim} elements; these kernels count up to {_MOST}")
    if scales is not None and key.shape[3] > _MOST_CODES:
        raise ConfigError(f"heads of {key.shape[3]} codes; these kernels sum up {_MOST_CODES} at most")
    if query.dtype not in cpu.FLOATS:
        raise ConfigError(f"query is {query.dtype}; give float32, bfloat16 or float16")
    if lengths.ndim != 1:
        raise ConfigError(f"lengths has shape {_shape(lengths)}; give [n], a length for each request")
    if block_table is not None and (block_table.ndim != 2 or not key.shape[1]):
        raise ConfigError(
            f"block_table has shape {_shape(block_table)}, and blocks have {key.shape[1]} tokens; give [slots, "
            "blocks], and blocks of 1 token or more"
        )

    count, stored = len(lengths), query.dtype if scales is None else torch.int8
    asked: list[tuple[str, Tensor | None, tuple[torch.dtype, ...], list[int]]] = [
        ("query", query, cpu.FLOATS, _shape(query)),
        ("key", key, (stored,), _shape(key)),
        ("value", value, (stored,), _shape(value)),
        ("lengths", lengths, (torch.int32,), [count]),
        ("slots", slots, (torch.int32,), [count]),
        ("starts", starts, (torch.int32,), [count + 1]),
        ("sinks", sinks, cpu.FLOATS, [heads]),
        ("out", out, (query.dtype,), [len(query), heads, value.shape[3]]),
    ]
    if block_table is not None:
        asked.append(("block_table", block_table, (torch.int32,), _shape(block_table)))
    if scales is not None:
        types = (scales[0].dtype,) if scales[0].dtype in (torch.float32, torch.bfloat16) else (torch.bfloat16,)
        asked += [(f"scales[{i}]", each, types, [*key.shape[:3], 1]) for i, each in enumerate(scales)]
    for name, tensor, dtypes, shape in asked:
        if tensor is None:
            continue
        if tensor.dtype not in dtypes or _shape(tensor) != shape:
            possible = " or ".join(map(str, dtypes))
            raise ConfigError(f"{name} is {_shape(tensor)} {tensor.dtype}; it must be {shape} {possible}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ConfigError(f"the elements of a row of {name} are not neighbours (stride {tensor.stride(-1)})")


def check_requests(
    num_rows: int, key: Tensor, lengths: Tensor, slots: Tensor | None, starts: Tensor | None, block_table: Tensor | None
) -> None:
    """Refuses rows of queries, lengths, slots and blocks that are not there."""
    wrong = cpu.check_requests(key, num_rows, lengths=lengths, slots=slots, starts=starts, block_table=block_table)
    if wrong is None:
        return
    what, least, most = wrong
    if what == "starts":
        raise ConfigError(
            f"{num_rows} rows of queries, but {len(lengths)} requests have rows {least} to {most}; each request has "
            "one or more, and they follow each other"
        )
    num_slots, room = key.shape[:2] if block_table is None else block_table.shape
    if what == "lengths":
        room *= 1 if block_table is None else key.shape[1]
        raise ConfigError(
            f"lengths from {least} to {most}; a length counts the new tokens, and there is room for {room}"
        )
    if what == "slots":
        raise ConfigError(f"slots from {least} to {most}; there are {num_slots}")
    raise ConfigError(f"block_table names blocks from {least} to {most}; there are {len(key)}")


def _check_out(out: Tensor, query: Tensor, read: dict[str, Tensor | None]) -> None:
    """Refuses what cannot be written, or would change what is read."""
    if not out.is_contiguous():
        raise ConfigError("out is not contiguous")
    if out.requires_grad:
        raise ConfigError("out requires gradients, and none flow; give out.detach()")
    begin, end = _extent(out)
    for name, tensor in read.items():
        if tensor is None or (tensor is query and _extent(query) == (begin, end) and query.is_contiguous()):
            continue
        first, last = _extent(tensor)
        if begin < last and first < end:
            raise ConfigError(f"out shares memory with {name}; give memory of its own")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies."""
    if not tensor.numel():
        return 0, 0
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _shape(tensor: Tensor) -> list[int]:
    return [*tensor.shape]
