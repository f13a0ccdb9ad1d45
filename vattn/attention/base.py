"""The interface of an attention kernel in a packed step.

A step packs the new tokens of several requests into one row of tokens. Their keys and values are stored before the
kernel is called; the kernel gets the queries, the batch, and a cache to read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from vattn.attention.batch import Group, PackedBatch, Span
from vattn.attention.stored import Blocks, Contiguous
from vattn.errors import ConfigError
from vattn.integers import as_int, as_real, shown


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends.

    Attributes:
        scale: factor on the scores before the softmax; None for `head_dim ** -0.5`.
        window: a query sees this many keys, itself included; None for all.
        softcap: scores become `softcap * tanh(score / softcap)`; positive, or None for none.
        sinks: `[num_query_heads]` logits that take part in each softmax and add nothing to its sum; None for none.

    Raises:
        ConfigError: `softcap` is no positive number of float32's range, or `window` no whole number from 1 on.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        check_softcap(self.softcap)
        check_window(self.window)

    def first_key(self, span: Span) -> int:
        """The first key that any query of `span` can see."""
        return 0 if self.window is None else max(0, span.start - self.window + 1)

    def expect(self, kernel: str, *, softcap: bool = True, sinks: bool = False, window: bool = True) -> None:
        """Refuses parameters that a kernel does not support and would silently ignore.

        Raises:
            ConfigError: the layer asks for one of them.
        """
        offered = {"softcap": (softcap, self.softcap), "sinks": (sinks, self.sinks), "window": (window, self.window)}
        for what, (has, asked) in offered.items():
            if asked is not None and not has:
                raise ConfigError(f"the attention kernel {kernel!r} has no {what}, which this layer asks for")

    def window_size(self, group: Group) -> tuple[int, int]:
        """The window as flash kernels take it: keys to the left and to the right of the query's own, -1 for all.

        A window that hides no key is left out, because flash kernels do not split the keys of a single query if there
        is a window.
        """
        return (-1, -1) if self.window is None or self.window >= group.max_length else (self.window - 1, 0)


def check_softcap(softcap: object) -> float | None:
    """Refuses a bound on scores that kernels would take for none, or turn into NaN; returns any other.

    Raises:
        ConfigError: it is no positive number of float32's range.
    """
    if softcap is None:
        return None
    limits, bound = torch.finfo(torch.float32), as_real(softcap)
    if bound is None or not limits.tiny <= bound <= limits.max:
        raise ConfigError(
            f"softcap={shown(softcap)}; give a finite number above 0 of float32's range, or None for scores without "
            "bound"
        )
    return bound


def check_window(window: object) -> int | None:
    """Refuses a window that hides every key, of which each kernel would make something else; returns any other.

    Raises:
        ConfigError: it is no whole number from 1 on.
    """
    if window is None:
        return None
    try:
        width = as_int(window)
    except TypeError as error:
        raise ConfigError(f"window: {error}; give a whole number from 1 on, or None") from None
    if width < 1:
        raise ConfigError(f"window={shown(width)} hides every key; give 1 or more, or None")
    return width


# The unit in which a kernel must read the cache: one request (`KVSource.read`) or a whole layer (`whole_layer`).
Reads = Literal["request", "layer"]


class KVSource(Protocol):
    """A cache that kernels read, one request or a whole layer at a time."""

    def stored(self, layer: int) -> Contiguous | Blocks | None:
        """A whole layer: contiguous slots, or a block pool with block tables. The tensors keep their addresses.

        None if the cache has no such tensors; keys and values may be codes of 8 bits, with scales. Kernels that can
        handle neither call `whole_layer` instead.
        """
        ...

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys `[1, num_kv_heads, length - start, head_dim]` and values of tokens `[start, length)` of a slot.

        The last dimension is contiguous; other strides are arbitrary. Valid until the next call, since a backend may
        reuse its buffer.
        """
        ...


def whole_layer(kv: KVSource, layer: int) -> Contiguous | Blocks:
    """`kv.stored(layer)` for kernels that take nothing but whole layers in the type of the queries.

    Raises:
        ConfigError: the cache has no such tensors (`Case.whole_layers`).
    """
    stored = kv.stored(layer)
    if stored is None or (isinstance(stored, Contiguous) and stored.scales is not None):
        why = "it stores no layer as a whole" if stored is None else "it stores codes of 8 bits"
        raise ConfigError(f"this cache is for kernels that read it request by request, such as torch_sdpa: {why}")
    return stored


@dataclass(frozen=True)
class Case:
    """Requirements on a kernel. torch_sdpa meets the defaults on every device.

    Attributes:
        dtype: element type of queries, keys and values.
        head_dim, v_head_dim: head size of queries and keys, and of values if it differs.
        block_size: tokens per block of a paged cache; None for contiguous slots.
        softcap, sinks, window: whether any layer has them.
        whole_layers: whether the cache has tensors of whole layers. A cache without them gives keys and values one
            request at a time, because it keeps a tensor per request, for example, or dequantises them.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int | None = None
    softcap: bool = False
    sinks: bool = False
    window: bool = False
    whole_layers: bool = True


class Attention(Protocol):
    """A kernel behind a common interface.

    A kernel never writes to the cache: new keys and values are stored before it is launched. On CUDA, memory that is
    mapped twice (a shared prefix) must not be written and read in one launch.

    Attributes:
        name: the name for `vattn.attention.get`.
        guard_rows: rows past a request's length that the kernel may read; the cache keeps them mapped, and zero until
            a request writes them.
        reads: "request" for a kernel that works with every cache, since it can call `KVSource.read`; "layer" for one
            that calls `whole_layer`, which needs `Case.whole_layers`.
        capturable: a step of single tokens can be captured in a CUDA graph: the kernel reads whole layers, and its
            launches depend only on the number of spans and on `Group.max_length`.
    """

    name: str
    guard_rows: int
    reads: Reads
    capturable: bool

    def refusal(self, case: Case) -> str | None:
        """The reason why the kernel cannot be used here for `case`, as the end of a sentence; None if it can."""
        ...

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        """Causal attention of the packed queries.

        Args:
            query: `[num_tokens, num_query_heads, head_dim]`, rows in the order of `batch`.
            kv: the cache, which holds keys and values of tokens `[0, span.end)` of every span.
            layer: index of the layer to read.

        Returns:
            `[num_tokens, num_query_heads, v_head_dim]`, contiguous.
        """
        ...


def flash_refusal(
    case: Case, *, head_dims: Sequence[int] = range(8, 257, 8), block_multiple: int = 1, softcap: bool = True
) -> str | None:
    """The limits shared by all flash kernels: no float32, no sinks, one head size for keys and values.

    Args:
        head_dims: supported head sizes.
        block_multiple: the block size of a paged cache must be a multiple of this many tokens.
        softcap: whether the kernel supports softcap.
    """
    if case.device.type != "cuda":
        return f"it runs on CUDA, not on {case.device.type}"
    if torch.cuda.get_device_capability(case.device)[0] < 8:
        return "it needs a GPU of compute capability 8 or more"
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {str(case.dtype).removeprefix('torch.')}"
    if case.v_head_dim not in (None, case.head_dim):
        return f"it needs keys and values of one size, not {case.head_dim} and {case.v_head_dim}"
    if case.head_dim not in head_dims:
        return f"it has no kernel for heads of {case.head_dim}"
    if case.block_size is not None and case.block_size % block_multiple:
        return f"it needs blocks of a multiple of {block_multiple} tokens, not {case.block_size} (block_size=...)"
    if case.softcap and not softcap:
        return "it has no softcap"
    if case.sinks:
        return "it has no sinks"
    return None
