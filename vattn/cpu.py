"""vattn's own kernels for CPUs: which ones there are, and the calls, which check nothing.

The kernels are compiled for several instruction sets (`csrc/kernels/`): those of the machine that builds, or all of
them (`VATTN_KERNELS=all` when building). The fastest that the CPU has run, or those that the environment variable
`VATTN_CPU_KERNELS` names. Products of pairs of bfloat16 are not faster than products of floats on every CPU that has
both: the first call measures it, in a tenth of a millisecond. It also measures, in one more, whether 8-bit keys of some
query rows are faster as they lie or in panels; `VATTN_CPU_KEYS` takes all keys one way.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.errors import ConfigError

VARIABLE = "VATTN_CPU_KERNELS"
KEYS_VARIABLE = "VATTN_CPU_KEYS"
_KEYS = {"": 0, "in_place": 1, "panels": 2}

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_NOWHERE = (0, 0, 0, 0)
# Lengths and windows are counted in 32 bits.
_MOST = 2**31 - 1
_HUGE_PAGE = 2**21  # bytes; with other pages than of 4 KiB, huge ones are larger, and advice for less does nothing


@dataclass(frozen=True)
class Kernels:
    """The kernels of an instruction set.

    Attributes:
        name: for `VATTN_CPU_KERNELS`.
        needs: what a CPU must have.
        supported: whether this one has it.
        worthwhile: whether, by measurement, they are faster on this CPU than the ones after them.
        linear: whether their linear layers are faster on such CPUs than torch's.
        lanes: floats in a vector, and rows of a weight in a panel of `Weight`.
        panels: whether, by measurement, 8-bit keys of more than a few query rows are faster in panels: keys with gaps
            between them, and gapless ones. Empty where there is no choice.
    """

    name: str
    needs: str
    supported: bool
    worthwhile: bool
    linear: bool
    lanes: int
    panels: list[bool]


@cache
def _module() -> tuple[Any, str | None]:
    """The native module, or the reason why it cannot be loaded."""
    try:
        from vattn import _kernels  # type: ignore[attr-defined]  # it has no stub
    except ImportError as error:  # no OpenMP runtime: torch has loaded none
        return None, str(error)
    return _kernels, None


@cache  # a measurement is part of it
def kernels() -> list[Kernels]:
    """All kernels of this build, the fastest first; none if the module cannot be loaded."""
    module, _ = _module()
    return [Kernels(*each) for each in module.kernels()] if module else []


def unusable() -> str | None:
    """Why no kernel can be used here; None if one can."""
    _, why = _module()
    return None if why is None else f"the native module cannot be loaded: {why}"


@cache
def refusal(dtype: torch.dtype, *head_dims: int) -> str | None:
    """Why queries of this type and heads of these sizes cannot be computed here, as the end of a sentence; or None.

    Raises:
        ConfigError: as for `chosen`.
    """
    if dtype not in FLOATS:
        return f"it computes in float32, bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    for dim in head_dims:
        if not dim or dim % 8:
            return f"it needs head sizes that are multiples of 8, not {dim}"
    why = unusable()
    if why is None:
        chosen()
    return why


@cache
def chosen() -> Kernels:
    """The kernels that run here.

    Raises:
        ConfigError: `VATTN_CPU_KERNELS` names others than this build has and this CPU can run, or there are none; or
            `VATTN_CPU_KEYS` is no way to take keys.
    """
    return kernels()[_index()]


@cache
def _index() -> int:
    found = kernels()
    if not found:
        raise ConfigError(f"there are no attention kernels for this CPU: {unusable()}")
    usable = [each.name for each in found if each.supported]
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in usable:
        raise ConfigError(
            f"{VARIABLE}={asked!r}; of what this build has, this CPU can run {', '.join(usable)} (build with "
            "VATTN_KERNELS=all for the kernels of all instruction sets)"
        )
    keys = os.environ.get(KEYS_VARIABLE, "")
    if keys not in _KEYS:
        raise ConfigError(f"{KEYS_VARIABLE}={keys!r}; give in_place or panels, or unset it for what is faster")
    _module()[0].take_keys(_KEYS[keys])
    return [each.name for each in found].index(asked or next(each.name for each in found if each.worthwhile))


def describe() -> str:
    """Which kernels run here, and why, on one line."""
    try:
        running = chosen()
    except ConfigError as error:
        return f"none: {error}"
    others = [each.name for each in kernels() if each.supported and each != running]
    slower = [each.name for each in kernels() if each.supported and not each.worthwhile]
    reason = f"{VARIABLE} asks for them" if os.environ.get(VARIABLE) else f"this CPU has {running.needs}"
    if slower and not os.environ.get(VARIABLE):
        reason += f", and multiplies floats faster than the pairs of {' and '.join(slower)}"
    if keys := os.environ.get(KEYS_VARIABLE):
        reason += f"; {KEYS_VARIABLE} asks for keys {'in panels' if keys == 'panels' else 'as they lie'}"
    elif running.panels:
        gaps, gapless = ("in panels" if faster else "as they lie" for faster in running.panels)
        but = "" if gaps == gapless else f", with gaps {gaps}"
        reason += f"; 8-bit keys of several rows are faster {gapless}{but}"
    return f"{running.name}: {reason}" + (f"; {VARIABLE} can name {' or '.join(others)} instead" if others else "")


def check_requests(
    key: Tensor,
    num_rows: int,
    *,
    lengths: Tensor,
    slots: Tensor | None,
    starts: Tensor | None,
    block_table: Tensor | None,
) -> tuple[str, int, int] | None:
    """Which of the numbers of a call of `attend` do not fit its tensors, whose shapes and types do.

    Args:
        num_rows: of queries.

    Returns:
        `"starts"`, `"lengths"`, `"slots"` or `"blocks"`, and their range: of starts the first and the last; None if all
        fit.
    """
    num_slots, tokens = key.shape[:2]
    table, stride, size, num_blocks = 0, 0, 0, 0
    if block_table is not None:
        num_blocks, size = num_slots, tokens
        num_slots, width = block_table.shape
        tokens *= width
        table, stride = block_table.data_ptr(), block_table.stride(0)
    which, least, most = _module()[0].check(
        lengths.shape[0],
        0 if slots is None else slots.data_ptr(),
        lengths.data_ptr(),
        0 if starts is None else starts.data_ptr(),
        table,
        stride,
        size,
        num_rows,
        num_slots,
        tokens,
        num_blocks,
    )
    return (("starts", "lengths", "slots", "blocks")[which - 1], least, most) if which else None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    slots: Tensor | None,
    lengths: Tensor,
    starts: Tensor | None = None,
    block_table: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`vattn.attention.attend` without its checks: a wrong argument reads memory that is not there."""
    num_tokens, num_heads, head_dim = query.shape
    if out is None:
        out = query.new_empty(num_tokens, num_heads, value.shape[-1])
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    size = query.element_size()
    key_scale, value_scale = (_NOWHERE, _NOWHERE) if scales is None else map(_place, scales)
    _module()[0].attend(
        _index(),
        _TYPES[query.dtype],
        _TYPES[key.dtype],
        0 if scales is None else _TYPES[scales[0].dtype],
        num_heads,
        key.shape[2],
        head_dim,
        value.shape[3],
        query.data_ptr(),
        query.stride(0) * size,
        query.stride(1) * size,
        out.data_ptr(),
        _place(key),
        _place(value),
        key_scale,
        value_scale,
        len(lengths),
        0 if slots is None else slots.data_ptr(),
        lengths.data_ptr(),
        0 if starts is None else starts.data_ptr(),
        *_table(block_table, key),
        head_dim**-0.5 if scale is None else scale,
        softcap or 0.0,
        0 if window is None else min(window, _MOST),
        0 if sinks is None else sinks.data_ptr(),
        torch.get_num_threads(),
    )
    return out


class Layer:
    """A layer whose memory does not move, so that a step is one native call: it stores new keys and values, and
    attends. Nothing is checked: a wrong argument reads or writes memory that is not there.

    Args:
        key, value: as `vattn.attention.attend` takes them, in the type of queries.
        key_home, value_home: where new rows are stored, `[rows, num_kv_heads, dim]` or `[slots, tokens, num_kv_heads,
            dim]`: in the memory of `key` and `value`, which may have other addresses there.
        block_table, scale, softcap, window, sinks: as in `attend`. Contiguous sinks in float32 are not copied.
    """

    def __init__(
        self,
        num_heads: int,
        key: Tensor,
        value: Tensor,
        key_home: Tensor,
        value_home: Tensor,
        *,
        block_table: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        self._kept = key, value, key_home, value_home, block_table, sinks
        self._dtype = key.dtype
        self._size = key.element_size()
        self._native = _module()[0].Layer(
            _index(),
            _TYPES[key.dtype],
            num_heads,
            key.shape[2],
            key.shape[3],
            value.shape[3],
            *map(_place, (key, value)),
            *map(_home, (key_home, value_home)),
            *_table(block_table, key),
            key.shape[3] ** -0.5 if scale is None else scale,
            softcap or 0.0,
            0 if window is None else min(window, _MOST),
            0 if sinks is None else sinks.data_ptr(),
        )

    def takes(self, *rows: Tensor) -> bool:
        """Whether `step` takes these queries, keys and values: they have the type of the memory, and their heads are
        contiguous.
        """
        return all(each.dtype == self._dtype and each.stride(2) == 1 and not each.is_neg() for each in rows)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        homes: Tensor,
        out: Tensor,
        *,
        slots: Tensor,
        lengths: Tensor,
        starts: Tensor,
    ) -> None:
        """Stores new keys and values, and attends to what `key` and `value` of the layer then show.

        Args:
            query: `[n, num_heads, head_dim]`, or more rows, which are ignored.
            key, value: `[n, num_kv_heads, dim]`, likewise.
            homes: the row where each of them is stored, `[n]` int64, contiguous.
            out: `n` contiguous rows of `num_heads * v_head_dim`, or more.
            slots, lengths, starts: as in `attend`.
        """
        size = self._size
        key_token, key_head, _ = key.stride()
        value_token, value_head, _ = value.stride()
        query_token, query_head, _ = query.stride()
        self._native.step(
            len(homes),
            key.data_ptr(),
            key_token * size,
            key_head * size,
            value.data_ptr(),
            value_token * size,
            value_head * size,
            homes.data_ptr(),
            query.data_ptr(),
            query_token * size,
            query_head * size,
            len(lengths),
            slots.data_ptr(),
            lengths.data_ptr(),
            starts.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )


def store(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor | None = None
) -> bool:
    """Copies new keys and values, `[n, heads, dim]`, to `keys` and `values`.

    Args:
        keys, values: `[slots, tokens, heads, dim]`, or `[slots, heads, dim]` without positions.
        slots, positions: where each of them is stored, `[n]` int64, contiguous; not checked. One whose slot is below 0
            is not.

    Returns:
        Whether it did: not on other devices, of other types or shapes, for rows that are not contiguous, or without
        the native module.
    """
    for new, stored in ((key, keys), (value, values)):
        alike = new.dtype == stored.dtype and new.shape[1:] == stored.shape[-2:] and new.device == stored.device
        if not alike or new.device.type != "cpu" or new.stride(-1) != 1 or stored.stride(-1) != 1 or new.is_neg():
            return False
    module, _ = _module()
    if module is None:
        return False
    n, heads, _ = key.shape
    module.store(
        n,
        heads,
        _new_rows(key, keys),
        _new_rows(value, values),
        slots.data_ptr(),
        0 if positions is None else positions.data_ptr(),
        torch.get_num_threads(),
    )
    return True


def _new_rows(new: Tensor, stored: Tensor) -> tuple[int, int, int, int, tuple[int, int, int, int]]:
    """Bytes of a row of a head, address, strides in bytes of a token and a head, and where they are stored."""
    size = new.element_size()
    token, head, _ = new.stride()
    return new.shape[2] * size, new.data_ptr(), token * size, head * size, _home(stored)


def _home(rows: Tensor) -> tuple[int, int, int, int]:
    """`_place` of `[slots, tokens, heads, dim]` or `[slots, heads, dim]`."""
    return _place(rows if rows.ndim == 4 else rows.unsqueeze(1))


def _table(block_table: Tensor | None, key: Tensor) -> tuple[int, int, int]:
    """Address and stride of a block table, and tokens of a block; zeros without one."""
    return (0, 0, 0) if block_table is None else (block_table.data_ptr(), block_table.stride(0), key.shape[1])


def _place(rows: Tensor) -> tuple[int, int, int, int]:
    """Address, and strides in bytes of a slot, a token and a head of `[slots, tokens, heads, dim]`."""
    size = rows.element_size()
    slot, token, head, _ = rows.stride()
    return rows.data_ptr(), slot * size, token * size, head * size


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy, which stays as it is when the tensor is changed, or becomes another's."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class NormWeight:
    """Of a root mean square norm: `[width]`, contiguous, and its epsilon."""

    weight: Tensor
    epsilon: float

    @property
    def place(self) -> tuple[int, float]:
        return self.weight.data_ptr(), self.epsilon


def norm(rows: Tensor, weight: NormWeight) -> Tensor:
    """Root mean square norm of `rows` `[n, width]`, whose last stride is 1."""
    n, width = rows.shape
    out = rows.new_empty(n, width)
    _module()[0].norm(
        _index(),
        _TYPES[rows.dtype],
        n,
        width,
        rows.stride(0),
        rows.data_ptr(),
        *weight.place,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def rotate(
    heads: Tensor,
    num_queries: int,
    num_keys: int,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[NormWeight, NormWeight] | None = None,
) -> None:
    """Rotary embedding, in place, of the first `num_queries + num_keys` heads of `heads` `[n, heads, head_dim]`.

    Args:
        cos, sin: `[n, head_dim]`, contiguous. The halves of a head are rotated against each other.
        norms: of each query and of each key, which come first; with one epsilon.
    """
    n, _, head_dim = heads.shape
    _module()[0].rotate(
        _index(),
        _TYPES[heads.dtype],
        n,
        heads.stride(0),
        num_queries,
        num_keys,
        head_dim,
        heads.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        *_places(norms),
        torch.get_num_threads(),
    )


def _places(head_norms: tuple[NormWeight, NormWeight] | None) -> tuple[int, int, float]:
    """Addresses of the weights of queries and of keys, and their epsilon."""
    if head_norms is None:
        return 0, 0, 0.0
    query, key = head_norms
    return query.weight.data_ptr(), key.weight.data_ptr(), query.epsilon


def gate(rows: Tensor) -> Tensor:
    """`silu(first half) * second half` of `rows` `[n, 2 * width]`, contiguous."""
    n, width = rows.shape[0], rows.shape[1] // 2
    out = rows.new_empty(n, width)
    _module()[0].gate(_index(), _TYPES[rows.dtype], n, width, rows.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


def has_linear() -> bool:
    """Whether the kernels that run here have linear layers, which they do where torch's of bfloat16 are slower."""
    return unusable() is None and chosen().linear


@dataclass(frozen=True)
class Weight:
    """A linear layer's weight and bias, in bfloat16, as `linear` reads them; `pack_weight` makes it.

    Attributes:
        out, width: numbers of outputs and of inputs, which is even.
        gated: whether there are two weights, gate and up, and an output is `silu(gate) * up`.
        panels: int32 `[ceil(out / lanes), width / 2, lanes]`, of gate and up in turn.
        bias: `[out]`, of gate and up `[2 * out]`, contiguous, or None.
    """

    out: int
    width: int
    gated: bool
    panels: Tensor
    bias: Tensor | None

    @cached_property
    def place(self) -> tuple[int, int, bool, int, int]:
        """Inputs, outputs, whether it is gated, and addresses."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return self.width, self.out, self.gated, self.panels.data_ptr(), bias


def pack_weight(weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Weight:
    """Copies of a weight `[out, width]` of even width, and of its bias `[out]`; of gate, then up, `[2 * out, *]`."""
    lanes = chosen().lanes
    parts = weight.detach().contiguous().chunk(2 if gated else 1)
    out, width = parts[0].shape
    padded = [torch.nn.functional.pad(part, (0, 0, 0, -out % lanes)) for part in parts]
    apart = [part.view(torch.int32).view(-1, lanes, width // 2).mT for part in padded]
    panels = _in_huge_pages((len(apart[0]), len(apart), width // 2, lanes), torch.int32)
    torch.stack(apart, dim=1, out=panels)
    return Weight(out, width, gated, panels.flatten(0, 1), None if bias is None else copied(bias))


def _in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor, in huge pages as far as it fills them and Linux offers them.

    In pages of 4 KiB, products of up to 32 rows take 1.02 to 1.06 times as long (Zen 5, in a virtual machine).
    """
    bytes_ = math.prod(shape) * dtype.itemsize
    whole = bytes_ // _HUGE_PAGE * _HUGE_PAGE
    if not whole:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, bytes_ + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    start = -room.data_ptr() % _HUGE_PAGE
    with suppress(OSError):  # of a Linux that has none
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return room[start : start + bytes_].view(dtype).view(shape)


def linear(rows: Tensor, weight: Weight, other: Tensor | None = None) -> Tensor:
    """`rows` `[n, width]`, whose last stride is 1, times a weight, plus its bias, gated if it is, plus `other`
    `[n, out]`, contiguous.
    """
    n = rows.shape[0]
    if rows.stride(0) % 2:  # kernels that read rows in place read pairs
        rows = rows.contiguous()
    output = rows.new_empty(n, weight.out)
    _module()[0].linear(
        _index(),
        n,
        rows.data_ptr(),
        rows.stride(0) * rows.element_size(),
        weight.place,
        0 if other is None else other.data_ptr(),
        output.data_ptr(),
        torch.get_num_threads(),
    )
    return output


class Projection:
    """Queries, keys and values of a decoder layer in one call: `norm`, `linear` and `rotate`. Nothing is checked.

    Args:
        weight: of queries, keys and values together.
        num_queries, num_keys, head_dim: of heads; the others are of values.
        head_norms: of each query and of each key, as in `rotate`.

    Attributes:
        weight: as given.
    """

    def __init__(
        self,
        norm: NormWeight,
        weight: Weight,
        num_queries: int,
        num_keys: int,
        head_dim: int,
        head_norms: tuple[NormWeight, NormWeight] | None = None,
    ) -> None:
        self.weight = weight
        self._kept = norm, head_norms
        self._shape = weight.out // head_dim, head_dim
        self._native = _module()[0].Projection(
            norm.place, weight.place, num_queries, num_keys, head_dim, *_places(head_norms)
        )

    def __call__(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads `[n, heads, head_dim]` of `rows` `[n, width]`; all contiguous, in bfloat16; factors as in `rotate`."""
        n = rows.shape[0]
        heads = rows.new_empty(n, *self._shape)
        self._native.compute(
            _index(), n, rows.data_ptr(), cos.data_ptr(), sin.data_ptr(), heads.data_ptr(), torch.get_num_threads()
        )
        return heads


class Residual:
    """A decoder layer after its attention in one call: `h = rows + output(attended)`, then
    `h + down(gate_up(norm(h)))`. Nothing is checked.

    Attributes:
        weights: `output`, `gate_up`, which is gated, and `down`.
    """

    def __init__(self, output: Weight, norm: NormWeight, gate_up: Weight, down: Weight) -> None:
        self.weights = output, gate_up, down
        self._kept = norm
        self._native = _module()[0].Residual(output.place, norm.place, gate_up.place, down.place)

    def __call__(self, attended: Tensor, rows: Tensor) -> Tensor:
        """`[n, width]`, as `rows`, of `attended` `[n, *]`; all contiguous, in bfloat16."""
        result = torch.empty_like(rows)
        self._native.compute(
            _index(), len(rows), rows.data_ptr(), attended.data_ptr(), result.data_ptr(), torch.get_num_threads()
        )
        return result


class LayerSeconds(NamedTuple):
    """Where the time of `run_layers` went."""

    projection: float
    store: float
    attention: float
    residual: float


def run_layers(
    layers: Sequence[tuple[Projection, Layer, Residual]],
    places: tuple[Tensor, Tensor | None],
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    slots: Tensor,
    lengths: Tensor,
    starts: Tensor,
) -> LayerSeconds:
    """Decoder layers one after the other, in one call. Nothing is checked.

    Args:
        layers: each as many heads of one size in its parts.
        places: where each layer stores the new keys and values: slots and positions, as in `store`.
        rows: `[n, width]`, contiguous, in bfloat16; changed to those after the last layer.
        cos, sin: as in `rotate`.
        slots, lengths, starts: as in `attend`.
    """
    homes, positions = places
    seconds = _module()[0].run_layers(
        _index(),
        [tuple(part._native for part in parts) for parts in layers],
        homes.data_ptr(),
        0 if positions is None else positions.data_ptr(),
        len(rows),
        rows.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        len(lengths),
        slots.data_ptr(),
        lengths.data_ptr(),
        starts.data_ptr(),
        torch.get_num_threads(),
    )
    return LayerSeconds(*seconds)


def largest(rows: Tensor) -> tuple[Tensor, bool]:
    """Where the largest element of each row is, `[n]` int64, and whether all of these are finite.

    It is the first of equal ones; NaN is larger than all numbers.

    Args:
        rows: `[n, width]`, floats, whose last stride is 1; at least one in each row.
    """
    n, width = rows.shape
    indices = torch.empty(n, dtype=torch.int64, device="cpu")
    finite: bool = _module()[0].largest(
        _TYPES[rows.dtype], n, width, rows.stride(0), rows.data_ptr(), indices.data_ptr(), torch.get_num_threads()
    )
    return indices, finite


def products(stored: torch.dtype, count: int) -> None:
    """Computes `count` multiply-adds, by the product of attention over keys and values of this type, on all threads.

    It takes as long as the products of attention at the least: its operands stay in registers.
    """
    _module()[0].products(_index(), _TYPES[stored], count, torch.get_num_threads())


def read(memory: Tensor) -> None:
    """Reads all of a contiguous tensor by plain loads of vectors, on all threads, and does nothing else."""
    _module()[0].read(_index(), memory.data_ptr(), memory.nbytes, torch.get_num_threads())
