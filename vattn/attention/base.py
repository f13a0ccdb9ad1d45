"""What an attention kernel is asked to do in one packed step, and what it may assume.

A step packs the new tokens of several requests into one row of tokens. Their keys and values are stored before a
kernel is called, so a kernel sees queries, a batch, and a cache to read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from vattn.attention.batch import Group, PackedBatch, Span
from vattn.attention.storage import Blocks, Contiguous
from vattn.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends.

    Attributes:
        scale: factor on the scores before the softmax; None for `head_dim ** -0.5`.
        window: a query sees this many keys, itself included; None for all.
        softcap: scores become `softcap * tanh(score / softcap)`; None for none.
        sinks: `[num_query_heads]` logits that take part in each softmax and add nothing to its sum; None for none.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def first_key(self, span: Span) -> int:
        """The first key that any query of `span` can see."""
        return 0 if self.window is None else max(0, span.start - self.window + 1)

    def expect(self, kernel: str, *, softcap: bool = True, sinks: bool = False) -> None:
        """For a kernel that has no argument for one of these, and would leave it out in silence.

        Raises:
            ConfigError: the layer has what the kernel lacks.
        """
        for what, has, asked in (("softcap", softcap, self.softcap), ("sinks", sinks, self.sinks)):
            if asked is not None and not has:
                raise ConfigError(f"the attention kernel {kernel!r} has no {what}, which this layer asks for")

    def window_size(self, group: Group) -> tuple[int, int]:
        """The window as flash kernels take it: keys left and right of a query's own, -1 for all.

        A window that hides nothing is none: with one, the kernels do not split the keys of a single query.
        """
        return (-1, -1) if self.window is None or self.window >= group.max_length else (self.window - 1, 0)


# What a kernel asks a cache for: the keys and values of one request (`KVSource.read`), or a whole layer
# (`KVSource.stored`).
Reads = Literal["request", "layer"]


class KVSource(Protocol):
    """A cache that kernels read from: request by request, or a whole layer at a time."""

    def stored(self, layer: int) -> Contiguous | Blocks:
        """The whole of a layer: contiguous slots, or a pool with block tables. The tensors never move.

        Raises:
            ConfigError: the cache has no such tensors (`Case.whole_layers`).
        """
        ...

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys `[1, num_kv_heads, length - start, head_dim]` and values of tokens `[start, length)` of a slot.

        Last dimension contiguous, other strides any. Valid until the next call: a backend may reuse its buffer.
        """
        ...


@dataclass(frozen=True)
class Case:
    """What a kernel is wanted for; the defaults ask for nothing that any kernel lacks.

    Attributes:
        dtype: of queries, keys and values.
        head_dim, v_head_dim: of queries and keys, and of values where it differs.
        block_size: tokens per block, over a backend that stores blocks; None over contiguous slots.
        softcap, sinks: whether any layer has them.
        whole_layers: whether the cache has tensors of a whole layer. Otherwise it gives keys and values of one request
            at a time: it has a tensor per request, say, or dequantises what is read.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int | None = None
    softcap: bool = False
    sinks: bool = False
    whole_layers: bool = True


class Attention(Protocol):
    """One unmodified kernel behind a common call.

    It reads only: new keys and values are stored before it is launched. On CUDA, memory that is mapped twice (a shared
    prefix) must not be written and read in one launch.

    Attributes:
        name: what `vattn.attention.get` knows it by.
        guard_rows: rows past a length that the kernel may read, and which must therefore be mapped and finite.
        reads: "request" for a kernel that reads request by request, which every cache allows; "layer" for one that
            takes a whole layer, which a cache without such tensors refuses.
        capturable: steps of single tokens can be captured in a CUDA graph: the kernel reads whole layers, and what is
            launched depends on the number of spans and on `Group.max_length` only.
    """

    name: str
    guard_rows: int
    reads: Reads
    capturable: bool

    def refusal(self, case: Case) -> str | None:
        """Why the kernel cannot be used here for `case`, as the end of a sentence; None if it can."""
        ...

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        """Causal attention of the packed queries.

        Args:
            query: `[num_tokens, num_query_heads, head_dim]`, rows in the order of `batch`.
            kv: holds keys and values of `[0, span.end)` of every span.
            layer: which layer's.

        Returns:
            `[num_tokens, num_query_heads, v_head_dim]`, contiguous.
        """
        ...


def flash_refusal(
    case: Case, *, head_dims: Sequence[int] = range(8, 257, 8), block_multiple: int = 1, softcap: bool = True
) -> str | None:
    """What the flash kernels have in common: none knows float32, sinks, or values of another size than keys.

    Args:
        head_dims: the head sizes that there are kernels for.
        block_multiple: tokens per block of a paged cache must be a multiple of it.
        softcap: whether the kernel has it.
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
