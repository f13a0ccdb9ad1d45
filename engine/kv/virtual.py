"""vattn's backend: every request contiguous in virtual memory, and backed as it grows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, ClassVar, Self

from vattn.broker.borrower import Loan
from vattn.cache import KVCache
from vattn.config import OF_ONE_GROUP, KVConfig, resolve
from vattn.pool.pool import PagePool
from vattn.prefix import Admission, Key

from .base import KVDescription, KVStats, SlotView, mapping_calls, register
from .contiguous import ContiguousKV
from .spec import KVSpec, PoolShare


@register
class VirtualKV(ContiguousKV):
    """A `vattn.KVCache` behind the engine's protocol; its unit of memory is the page.

    Args:
        chunk_tokens: maximum tokens of a request in one step; the memory that layers with a window need depends on it.
        pool: where the pages come from; by default a pool of its own.
        share: the pool to borrow memory of, in pages as the config would have them; None for memory of its own.

    Raises:
        ConfigError: the configuration does not fit.
    """

    name: ClassVar[str] = "virtual"
    forgets_windows: ClassVar[bool] = True

    def __init__(
        self,
        config: KVConfig,
        *,
        chunk_tokens: int | None = None,
        pool: PagePool | None = None,
        share: PoolShare | None = None,
    ) -> None:
        self._borrowed = None if share is None else _connect(config, share)
        try:
            self.cache = KVCache(config, pool=pool if self._borrowed is None else self._borrowed)
        except BaseException:
            if self._borrowed is not None:
                self._borrowed.close()
            raise
        self._chunk_tokens = chunk_tokens
        super().__init__([self.cache.layer(i) for i in self.cache.layers])

    @classmethod
    def from_spec(cls, spec: KVSpec) -> Self:
        given: dict[str, Any] = {
            "groups": spec.shape.groups(spec.max_model_len),
            "dtype": spec.dtype,
            "device": spec.device,
            "max_batch_size": spec.max_num_seqs,
            "max_context_len": spec.max_model_len,
            "memory_budget": spec.memory_budget,
        }
        options = spec.kv_options or {}
        KVConfig.check_options(
            options,
            {*given, *OF_ONE_GROUP},
            "not for kv_options, since the engine takes it from the model and from its own arguments (max_num_seqs, "
            "max_model_len, memory_budget, kv_cache_dtype)",
        )
        config = KVConfig.from_options(**given, **{"guard_rows": spec.guard_rows, **options})
        return cls(config, chunk_tokens=spec.chunk_tokens, share=spec.pool)

    @property
    def token_bytes(self) -> int:
        return self.cache.layout.bytes_per_token

    @property
    def prefix_block_tokens(self) -> int:
        return self.cache.prefix_block_tokens

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        return self.cache.alloc_reqid(num_tokens, start=start)

    def admit(self, token_ids: Sequence[int], salt: bytes = b"") -> Admission:
        return self.cache.admit(token_ids, salt)

    def find(self, token_ids: Sequence[int], salt: bytes = b"", *, rows: bool = False) -> int:
        return self.cache.find_prefix(token_ids, salt, rows=rows)

    def commit(self, slot: int, token_ids: Sequence[int]) -> None:
        self.cache.commit(slot, token_ids)

    def fork(self, slot: int) -> int:
        return self.cache.fork(slot)

    def retract(self, slot: int) -> None:
        self.cache.retract(slot)

    def retract_tokens(self, token_ids: Sequence[int], salt: bytes, since: int) -> None:
        self.cache.retract_tokens(token_ids, salt, since)

    def take_withdrawn(self) -> Set[Key]:
        return super().take_withdrawn() if self._borrowed is None else self.cache.take_withdrawn()

    def retain(self, slots: Collection[int]) -> None:
        for held in self.cache.page_map():
            if held.active and held.reqid not in slots:
                self.cache.free_reqid(held.reqid)

    def evict_prefixes(self) -> int:
        return self.cache.evict_prefixes()

    def stop_sharing(self) -> None:
        self.cache.stop_sharing()

    def trim(self) -> int:
        return self.cache.trim()

    def prepare(
        self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None, *, look_ahead: bool = True
    ) -> None:
        self.cache.step(lengths, next_lengths, look_ahead=look_ahead)

    def look_ahead(self) -> None:
        self.cache.look_ahead()

    def free(self, slot: int, token_ids: Sequence[int] | None = None) -> None:
        self.cache.free_reqid(slot, token_ids=token_ids)

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        return self.cache.pages_needed(num_tokens, slot, self._chunk_tokens)

    def available(self) -> int:
        return self.cache.available_pages()

    def borrow(self, units: int, following: int = 0) -> int:
        return self.cache.borrow_pages(units, following)

    def total(self) -> int:
        return self.cache.total_pages

    def stats(self) -> KVStats:
        stats = self.cache.stats()
        return KVStats(
            reserved_bytes=stats.reserved_bytes,
            physical_bytes=stats.created_bytes,
            peak_physical_bytes=max(stats.peak_mapped_bytes, stats.created_bytes),
            used_bytes=stats.needed_bytes,
            live_bytes=stats.live_bytes,
            **mapping_calls(stats.calls),
            waits=stats.waits,
            wait_seconds=stats.wait_seconds,
        )

    @property
    def loan(self) -> Loan | None:
        return None if self._borrowed is None else self._borrowed.loan

    @property
    def sharing(self) -> bytes | None:
        return None if self._borrowed is None else self._borrowed.sharing

    @property
    def publishing(self) -> bool:
        return self._borrowed is not None and self._borrowed.publishing

    def describe(self) -> KVDescription:
        stats = self.cache.stats()
        return KVDescription(
            slots=[
                SlotView(slot.reqid, slot.mapped, slot.shared, slot.active)
                for slot in self.cache.page_map()
                if slot.active or slot.mapped
            ],
            pages={
                "budget": stats.budget_pages,
                "owned": stats.owned_pages,
                "parked": stats.parked_pages,
                "cached": stats.cached_pages,
                "shared": stats.shared_pages,
                "other": stats.other_pages,
                "free": stats.free_pages,
            },
        )

    def check(self) -> None:
        self.cache.check()

    def close(self) -> None:
        self.cache.close()  # first, since it may refuse
        super().close()
        if self._borrowed is not None:
            self._borrowed.close()


def _connect(config: KVConfig, share: PoolShare) -> PagePool:
    layout, _ = resolve(config)
    return PagePool.connect(
        share.name,
        at_least=share.at_least,
        at_most=share.at_most,
        label=share.label,
        device=config.device,
        page_size=layout.page_size,
        guard=config.guard,
        zero_on_free=config.zero_on_free,
        fingerprint=share.fingerprint,
    )
