"""`decode`: vattn's kernels for CPUs over plain tensors, for anybody."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn import cpu
from vattn.attention.base import check_softcap
from vattn.errors import ConfigError


def decode(
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
            float32; a row is its codes times its scale, which is not negative.
        scale: factor on the scores; `head_dim ** -0.5` by default.
        softcap: scores become `softcap * tanh(score / softcap)`; positive.
        window: a query sees this many keys, itself included.
        sinks: `[num_query_heads]` logits that take part in each softmax and add nothing to its sum.
        out: written and returned; by default a new tensor.

    Returns:
        `[num_tokens, num_query_heads, v_head_dim]` in the type of `query`.

    Raises:
        ConfigError: shapes, types or devices do not fit, a head size is no multiple of 8, `window` or `softcap` is not
            positive, or a length, slot or block is outside of the tensors. Nothing has been written then.
    """
    slots = torch.arange(len(lengths), dtype=torch.int32) if slots is None else slots
    _check(query, key, value, lengths, slots, starts, block_table, scales, softcap, window, sinks, out)
    return cpu.attend(
        query,
        key,
        value,
        slots=slots,
        lengths=lengths,
        starts=starts,
        block_table=block_table,
        scales=scales,
        scale=scale,
        softcap=softcap,
        window=window,
        sinks=sinks,
        out=out,
    )


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    slots: Tensor,
    starts: Tensor | None,
    block_table: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> None:
    """Refuses what `attend` would compute wrongly, or not survive."""
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
    if query.dtype not in cpu.FLOATS:
        raise ConfigError(f"query is {query.dtype}; give float32, bfloat16 or float16")
    if window is not None and window < 1:
        raise ConfigError(f"window={window} hides every key; give 1 or more, or None")
    check_softcap(softcap)

    count, stored = len(lengths), query.dtype if scales is None else torch.int8
    asked: list[tuple[str, Tensor | None, tuple[torch.dtype, ...], list[int]]] = [
        ("query", query, cpu.FLOATS, [*query.shape]),
        ("key", key, (stored,), [*key.shape]),
        ("value", value, (stored,), [*value.shape]),
        ("lengths", lengths, (torch.int32,), [count]),
        ("slots", slots, (torch.int32,), [count]),
        ("starts", starts, (torch.int32,), [count + 1]),
        ("sinks", sinks, cpu.FLOATS, [heads]),
        ("out", out, (query.dtype,), [len(query), heads, value.shape[3]]),
    ]
    if block_table is not None:
        if block_table.ndim != 2:
            raise ConfigError(f"block_table has shape {_shape(block_table)}; give [slots, blocks]")
        asked.append(("block_table", block_table, (torch.int32,), _shape(block_table)))
    if scales is not None:
        types = (scales[0].dtype,) if scales[0].dtype in (torch.float32, torch.bfloat16) else (torch.bfloat16,)
        asked += [(f"scales[{i}]", each, types, [*key.shape[:3], 1]) for i, each in enumerate(scales)]
    for name, tensor, dtypes, shape in asked:
        if tensor is None:
            continue
        if tensor.device.type != "cpu":
            raise ConfigError(f"{name} is on {tensor.device}; these kernels run on CPUs")
        if tensor.dtype not in dtypes or _shape(tensor) != shape:
            possible = " or ".join(map(str, dtypes))
            raise ConfigError(f"{name} is {_shape(tensor)} {tensor.dtype}; it must be {shape} {possible}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ConfigError(f"the elements of a row of {name} are not neighbours (stride {tensor.stride(-1)})")
    if out is not None and not out.is_contiguous():
        raise ConfigError("out is not contiguous")
    _check_requests(query, key, lengths, slots, starts, block_table)


def _check_requests(
    query: Tensor, key: Tensor, lengths: Tensor, slots: Tensor, starts: Tensor | None, block_table: Tensor | None
) -> None:
    """Refuses rows, lengths, slots and blocks that are not there."""
    count = len(lengths)
    new = torch.ones_like(lengths) if starts is None else starts.diff()
    begin, end = (0, count) if starts is None else (int(starts[0]), int(starts[-1]))
    if begin != 0 or end != len(query) or bool((new < 1).any()):
        raise ConfigError(
            f"{len(query)} rows of queries, but {count} requests have rows {begin} to {end}; each request has one or "
            "more, and they follow each other"
        )
    if not count:
        return
    num_slots, room = key.shape[:2]
    if block_table is not None:
        num_slots, room = len(block_table), block_table.shape[1] * key.shape[1]
    if bool((lengths < new).any()) or int(lengths.max()) > room:
        raise ConfigError(
            f"lengths from {int(lengths.min())} to {int(lengths.max())}; a length counts the new tokens, and there is "
            f"room for {room}"
        )
    if int(slots.min()) < 0 or int(slots.max()) >= num_slots:
        raise ConfigError(f"slots from {int(slots.min())} to {int(slots.max())}; there are {num_slots}")
    if block_table is not None:
        used = torch.arange(block_table.shape[1]) < -(-lengths[:, None] // key.shape[1])
        blocks = block_table[slots][used]
        if int(blocks.min()) < 0 or int(blocks.max()) >= len(key):
            raise ConfigError(
                f"block_table names blocks from {int(blocks.min())} to {int(blocks.max())}; there are {len(key)}"
            )


def _shape(tensor: Tensor) -> list[int]:
    return [*tensor.shape]
