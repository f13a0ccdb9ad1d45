"""The engine's own backends, over pages and blocks that have no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from vattn.attention import Blocks
from vattn.config import KVConfig
from vattn.engine.kv.base import KVBackend, KVStats, StoredAs
from vattn.engine.kv.blocks import BlockKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV
from vattn.groups import parse_dtype
from vattn.layout import LayoutName
from vattn.model_shapes import ModelShape
from vattn.packed import KVShape, LayerShape

from .provider import Clock, SimulatedPool

PAGE_SIZE = 2**21
BLOCK_TOKENS = 16


class Store(Protocol):
    """A backend, and what its memory has cost."""

    kv: KVBackend

    @property
    def spent(self) -> float:
        """Seconds of driver calls so far, whoever waited for them."""
        ...

    def close(self) -> None: ...


class VirtualStore:
    """vattn's cache, as it is.

    Args:
        shape: of one GPU.
        layout, page_size: of the cache.
        budget: bytes for keys and values.
        overlap: map for the next step while this one computes.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: LayoutName,
        *,
        budget: int,
        slots: int,
        max_context_len: int,
        chunk_tokens: int,
        clocks: Sequence[Clock],
        page_size: int = PAGE_SIZE,
        overlap: bool = True,
    ) -> None:
        self._pool = SimulatedPool(budget, page_size, clocks=clocks)
        config = KVConfig(
            groups=shape.groups,
            max_batch_size=slots,
            max_context_len=max_context_len,
            page_size=page_size,
            layout=layout,
            kv_order="NHD",
            overlap=overlap,
        )
        self.kv: KVBackend = VirtualKV(config, chunk_tokens=chunk_tokens, pool=self._pool)

    @property
    def spent(self) -> float:
        return self._pool.spent

    def close(self) -> None:
        self.kv.close()
        self._pool.close()


class _Blocks(BlockKV):
    """The paged backend's blocks, tables and prefix cache; nothing is stored."""

    stored_as: ClassVar[StoredAs] = None

    def stored(self, layer: int) -> Blocks:
        raise NotImplementedError("there are no bytes")

    def stats(self) -> KVStats:
        pool = self.num_blocks * self._block_bytes
        used, live = self._held_bytes()
        return KVStats(pool, pool, pool, used, live)

    def _copy_block(self, origin: int, target: int) -> None:
        pass


class PagedStore:
    """The paged backend without its pool of bytes; all blocks are there from the start, so no driver call is made."""

    spent = 0.0

    def __init__(
        self,
        shape: ModelShape,
        *,
        budget: int,
        slots: int,
        max_context_len: int,
        chunk_tokens: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        (group,) = shape.groups
        layer = LayerShape(group.num_kv_heads, *group.head_dims)
        spec = KVSpec(
            KVShape((layer,) * len(group.indices)),
            max_num_seqs=slots,
            max_model_len=max_context_len,
            dtype=parse_dtype(group.dtype or "bfloat16"),
            memory_budget=budget,
            block_size=block_tokens,
            chunk_tokens=chunk_tokens,
        )
        self.kv: KVBackend = _Blocks.from_spec(spec)

    def close(self) -> None:
        self.kv.close()
