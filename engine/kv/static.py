"""Every slot at its longest, from the start: the reservation that wastes most, and the limit of speed.

Nothing is mapped, gathered or copied while requests run, and every page has been touched before the first. Tokens lie
as in a `vattn.KVCache` with default options, so that kernels read the same strides: what is left between the two
backends is the price of mapping on demand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from vattn.config import default_kv_order
from vattn.engine.kv.base import KVStats, NoPrefixCache
from vattn.engine.kv.contiguous import ContiguousKV
from vattn.engine.kv.slots import Slots, check_sizes


class StaticKV(ContiguousKV, NoPrefixCache):
    """Tensors of `num_slots` times `max_model_len` tokens; the unit of memory is the slot.

    Conservation law: a slot is free, allocated, or prepared; those that are prepared are what `available` lacks.

    Args:
        num_slots: requests at a time. `allocate` hands out no more, whatever memory they would have needed.
        max_model_len: most tokens of a slot.

    Raises:
        ConfigError: a size below 1.
    """

    name = "static"

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_slots: int,
        max_model_len: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        num_layers, num_kv_heads, head_dim, v_head_dim, num_slots, max_model_len = check_sizes(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            num_slots=num_slots,
            max_model_len=max_model_len,
        )
        self._token_bytes = num_layers * num_kv_heads * (head_dim + v_head_dim) * dtype.itemsize
        self._lengths: Slots[int] = Slots(num_slots, max_model_len)
        self._prepared: set[int] = set()
        by_head = default_kv_order(device) == "HND"
        layers = []
        # Explicitly outside inference mode: a tensor made inside could never be written outside it. Zeros, because
        # empty memory would be committed page by page while requests run.
        with torch.inference_mode(False):
            for _ in range(num_layers):
                pair = []
                for dim in (head_dim, v_head_dim):
                    if by_head:
                        shape = (num_slots, num_kv_heads, max_model_len, dim)
                        pair.append(torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2))
                    else:
                        shape = (num_slots, max_model_len, num_kv_heads, dim)
                        pair.append(torch.zeros(shape, dtype=dtype, device=device))
                layers.append((pair[0], pair[1]))
        super().__init__(layers)

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        self._lengths.checked_length(num_tokens)
        return self._lengths.take(0)

    def fork(self, slot: int) -> int:
        slot = self._lengths.checked(slot)
        length = self._lengths[slot]
        child = self._lengths.take(length)
        if length:
            self._prepared.add(child)
            self.copy(slot, child, length)
        return child

    def prepare(self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None) -> None:
        """As the protocol says. Memory cannot run short here: `allocate` has no slot without it."""
        lengths = self._lengths.checked_lengths(lengths)
        self._lengths.update(lengths)
        self._prepared.update(lengths)

    def free(self, slot: int) -> None:
        slot = self._lengths.checked(slot)
        del self._lengths[slot]
        self._prepared.discard(slot)

    def retain(self, slots: Collection[int]) -> None:
        self._lengths.retain(slots)
        self._prepared.intersection_update(slots)

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        if slot is not None:
            slot = self._lengths.checked(slot)
        return int(num_tokens > 0 and slot not in self._prepared)

    def available(self) -> int:
        return self.total() - len(self._prepared)

    def total(self) -> int:
        return self._lengths.limit

    def stats(self) -> KVStats:
        slot = self._lengths.max_model_len * self._token_bytes
        physical = self.total() * slot
        return KVStats(
            reserved_bytes=physical,
            physical_bytes=physical,
            peak_physical_bytes=physical,
            used_bytes=len(self._prepared) * slot,
            live_bytes=sum(self._lengths.values()) * self._token_bytes,
        )

    def check(self) -> None:
        self._lengths.check()
        assert self._prepared <= set(self._lengths) <= set(range(self.total())), "a slot is prepared, but not allocated"
        assert all(0 <= length <= self._lengths.max_model_len for length in self._lengths.values())
        assert all(slot in self._prepared for slot, length in self._lengths.items() if length), (
            "a slot was not prepared"
        )

    def close(self) -> None:
        self._lengths.clear()
        self._prepared.clear()
        super().close()
