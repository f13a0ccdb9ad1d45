"""Decoder layers in one native call, with their attention: for vattn's kernels over memory that does not move.

Between two calls of its own, a small layer spends as long in Python as in them; and where other threads of a server
want the interpreter, each return to it may have to wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vattn import cpu
from vattn.attention import Attention, Blocks, Contiguous, PackedBatch
from vattn.attention.native import Native
from vattn.packed import PackedStep
from vattn.packed.calls import only_forward

from ..kv.base import KVBackend
from .decoder_layer import DecoderLayer, InSteps


@runtime_checkable
class CacheStep(PackedStep, Protocol):
    """A step over a backend.

    Attributes:
        batch: its tokens.
        caches: the backend's layers.
        watched: a layer whose keys and values it looks at; None for none.
    """

    batch: PackedBatch
    caches: CacheLayers
    watched: int | None


# Rows times layers of one call, during which nothing can interrupt the thread.
_MOST_ROWS = 1024

Parts = tuple[cpu.Projection, cpu.Layer, cpu.Residual]


class CacheLayers:
    """A backend's layers as native calls take them.

    Args:
        kv: the backend.
        attention: the kernel.
        besides: layers that store, or attend to, something else than keys and values of heads.
    """

    def __init__(self, kv: KVBackend, attention: Attention, besides: Collection[int] = ()) -> None:
        self._kv = kv
        self._attention = attention
        self._besides = besides
        self._made: dict[InSteps, Parts | None] = {}
        # One of each shape: what a batch is checked against.
        self._stored: dict[tuple[int, ...], Contiguous | Blocks] = {}

    def parts(self, forwards: Sequence[InSteps], batch: PackedBatch) -> list[Parts] | None:
        """The layers' parts, which the batch fits; None if one of them is computed in another way."""
        if not isinstance(self._attention, Native) or len({each.layer.head_dim for each in forwards}) != 1:
            return None
        found = []
        for each in forwards:
            if each not in self._made:
                self._made[each] = self._make(each.layer)
            if (made := self._made[each]) is None:
                return None
            found.append(made)
        for stored in self._stored.values():
            self._attention.check(batch.num_tokens, stored, batch)
        return found

    def places(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        """Where the batch's keys and values are stored, in every layer."""
        return self._kv.places(batch)

    def _make(self, layer: DecoderLayer) -> Parts | None:
        homes = self._kv.homes(layer.layer)
        stored = self._kv.stored(layer.layer)
        if homes is None or stored is None or layer.layer in self._besides:
            return None
        if not isinstance(layer.project, cpu.Projection) or not isinstance(layer.add, cpu.Residual):
            return None
        queries, *others = layer.num_heads
        for rows, heads in zip((stored.key, stored.value), others, strict=True):
            if rows.dtype != torch.bfloat16 or rows.shape[2:] != (heads, layer.head_dim):
                return None
        table = stored.table if isinstance(stored, Blocks) else None
        self._stored[*stored.key.shape[:2], id(table)] = stored
        cache = cpu.Layer(
            queries,
            stored.key,
            stored.value,
            *homes,
            block_table=table,
            scale=layer.params.scale,
            softcap=layer.params.softcap,
            window=layer.params.window,
            sinks=layer.params.sinks,
        )
        return layer.project, cache, layer.add


def run_layers(
    modules: Sequence[nn.Module], step: PackedStep, hidden: Tensor, embeddings: tuple[Tensor, Tensor]
) -> Tensor:
    """Hidden states `[1, T, hidden_size]` after decoder layers, of those before.

    In one call, or several for many rows, up to the first layer that has no forward of `InSteps`, or hooks, or is
    watched, if the step's cache allows it.
    """
    if isinstance(step, CacheStep):
        forwards = list(itertools.takewhile(lambda each: each.layer.layer != step.watched, _forwards(modules)))
        parts = step.caches.parts(forwards, step.batch)
        if parts is not None:
            group, places = step.batch.together, step.caches.places(step.batch)
            rows, cos, sin = forwards[0].layer.rows_and_factors(hidden, embeddings)
            rows = rows.clone()
            count = max(1, _MOST_ROWS // len(rows))
            for first in range(0, len(parts), count):
                cpu.run_layers(
                    parts[first : first + count],
                    places,
                    rows,
                    cos,
                    sin,
                    slots=group.slots,
                    lengths=group.lengths,
                    starts=group.starts,
                )
            hidden, modules = rows[None], modules[len(forwards) :]
    for module in modules:
        hidden = module(hidden, position_embeddings=embeddings)
    return hidden


def _forwards(modules: Iterable[nn.Module]) -> Iterator[InSteps]:
    """Those of the first modules of which a call is a call of it and nothing else."""
    for module in modules:
        forward = vars(module).get("forward")
        if not isinstance(forward, InSteps) or not only_forward(module):
            return
        yield forward
