"""vattn's own kernels for CPUs, which read contiguous slots, blocks, and codes of 8 bits in place.

The default on CPUs. One call serves all requests of a step; docs/benchmarks.md, `kernels`, compares it with torch's
fused kernel. It reads nothing past a length, so it needs no guard rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn import cpu
from vattn.attention.base import AttentionParams, Case, KVSource, Reads
from vattn.attention.batch import PackedBatch, Span
from vattn.attention.plain import check_requests
from vattn.attention.stored import Blocks, Contiguous
from vattn.errors import ConfigError


class Native:
    """vattn's own kernels for CPUs, one call per layer; head sizes that are multiples of 8.

    Queries, spans and tables are checked against the keys. That values and scales belong to the keys is up to their
    source.
    """

    name = "native"
    guard_rows = 0
    reads: Reads = "request"
    capturable = False

    def refusal(self, case: Case) -> str | None:
        if case.device.type != "cpu":
            return f"it runs on CPUs, not on {case.device.type}"
        v_head_dim = case.head_dim if case.v_head_dim is None else case.v_head_dim
        return cpu.refusal(case.dtype, case.head_dim, v_head_dim)

    def __call__(self, query: Tensor, kv: KVSource, layer: int, batch: PackedBatch, params: AttentionParams) -> Tensor:
        query = (query if query.stride(2) == 1 else query.contiguous()).resolve_neg()
        stored = kv.stored(layer)
        if stored is not None:
            return self._attend(query, stored, batch, params)
        outputs = []
        row = 0
        for span in batch.spans:
            first = params.first_key(span)
            key, value = kv.read(layer, span.slot, span.end, first)
            alone = PackedBatch((Span(0, span.start - first, span.end - first),))
            rows = Contiguous(key.transpose(1, 2), value.transpose(1, 2))
            outputs.append(self._attend(query[row : row + len(span)], rows, alone, params))
            row += len(span)
        return torch.cat(outputs)

    def _attend(
        self, query: Tensor, stored: Contiguous | Blocks, batch: PackedBatch, params: AttentionParams
    ) -> Tensor:
        group, key = batch.together, stored.key
        table = stored.table if isinstance(stored, Blocks) else None
        scales = stored.scales if isinstance(stored, Contiguous) else None
        rows, heads, head_dim = query.shape
        kv_heads, key_dim = key.shape[2:]
        shared = heads > 0 and kv_heads > 0 and heads % kv_heads == 0
        if (scales is None and query.dtype != key.dtype) or head_dim != key_dim or not shared:
            raise ConfigError(
                f"queries {list(query.shape)} {query.dtype} do not fit keys of {kv_heads} heads of {key_dim} "
                f"{key.dtype}: they have the same type and size, and each KV head as many query heads"
            )
        self.check(rows, stored, batch)
        return cpu.attend(
            query,
            key,
            stored.value,
            slots=group.slots,
            lengths=group.lengths,
            starts=group.starts,
            block_table=table,
            scales=scales,
            scale=params.scale,
            softcap=params.softcap,
            window=params.window,
            sinks=params.sinks,
        )

    @staticmethod
    def check(rows: int, stored: Contiguous | Blocks, batch: PackedBatch) -> None:
        """Checks the batch, and a block table, against the memory of a layer and the number of queries; once for all
        layers that store alike.

        Raises:
            ConfigError: spans, slots or blocks that are not there.
        """
        group, key = batch.together, stored.key
        table = stored.table if isinstance(stored, Blocks) else None
        # Layers store alike, but for windows: their caches may differ in tokens per slot.
        batch.once(
            (Native, rows, *key.shape[:2], id(table)),
            lambda: check_requests(rows, key, group.lengths, group.slots, group.starts, table),
        )
