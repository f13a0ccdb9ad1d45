"""The paged backend over `vattn.BlockWindows`: the same block table, whose rows kernels see as contiguous memory.

Blocks are written at home and read in the window of their slot, slot i's being window i, so that every kernel for
contiguous keys and values runs on a block table, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from vattn.attention import Contiguous
from vattn.block_windows import BlockWindows
from vattn.errors import ConfigError

from .base import KVStats, StoredAs, mapping_calls, register
from .blocks import BlockKV, PoolBlock
from .contiguous import ContiguousKV
from .spec import KVSpec


@register
class PagedWindowsKV(BlockKV):
    """Blocks that have memory from their first use until `trim`, and a window per slot.

    A token's keys and values are neighbours. Windows follow the block table in `prepare` and before `read`; until then
    a slot that `admit` or `fork` has given blocks is *behind*.

    Where the machine or the driver refuses memory, the call changes no request, but prefixes may have been evicted.

    Raises:
        ConfigError: as for `BlockKV`; a block that is not whole pages; a kernel that reads past lengths.
    """

    switch: ClassVar[str | None] = "windows"
    stored_as: ClassVar[StoredAs] = Contiguous

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        super().__init__(spec, num_blocks)
        if spec.guard_rows:
            raise ConfigError(
                f"the kernel reads {spec.guard_rows} rows past a length, where windows have no memory; use another "
                "kernel, or kv='virtual'"
            )
        heads, dims = self._layer.num_kv_heads, (self._layer.head_dim, self._layer.v_head_dim)
        self.windows = BlockWindows(
            num_layers=spec.shape.num_layers,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            row=(heads * sum(dims),),
            dtype=spec.dtype,
            num_windows=spec.max_num_seqs,
            max_context_len=spec.max_model_len,
            device=spec.device,
        )

        def split(rows: Tensor) -> tuple[Tensor, Tensor]:
            """Keys and values, `[..., heads, dim]`, of `[..., elements]`."""
            key, value = rows[..., : heads * dims[0]], rows[..., heads * dims[0] :]
            return key.view(*rows.shape[:-1], heads, dims[0]), value.view(*rows.shape[:-1], heads, dims[1])

        layers = range(spec.shape.num_layers)
        with torch.inference_mode(False):
            self._homes = [split(self.windows.home(layer).flatten(0, 1)) for layer in layers]
            self._views = ContiguousKV([split(self.windows.window(layer)) for layer in layers])
        # The block table on the host, where windows are compared with it.
        self._streams = self.block_table.device.type != "cpu"
        self._table = self.block_table.cpu() if self._streams else self.block_table
        # Slots whose windows are behind, and how many of their blocks have memory for certain.
        self._behind: dict[int, int] = {}

    def free(self, slot: int, token_ids: Sequence[int] | None = None) -> None:
        slot = self._slots.checked(slot)
        super().free(slot)
        self._behind.pop(slot, None)

    def retain(self, slots: Collection[int]) -> None:
        self._behind.clear()
        super().retain(slots)

    def trim(self) -> int:
        return self.windows.trim(self._held())

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """As the protocol says: two views."""
        if self._behind:
            self._show()
        return self._views.read(layer, slot, length, start)

    def stored(self, layer: int) -> Contiguous:
        """As the protocol says: the windows."""
        return self._views.stored(layer)

    def stats(self) -> KVStats:
        stats = self.windows.stats()
        used, live = self._held_bytes()
        return KVStats(
            reserved_bytes=stats.reserved_bytes,
            physical_bytes=stats.mapped_bytes,
            peak_physical_bytes=stats.peak_mapped_bytes,
            used_bytes=used,
            live_bytes=live,
            **mapping_calls(stats.calls),
        )

    def check(self) -> None:
        super().check()
        self.windows.check()
        for number, slot in self._slots.items():
            blocks = [block.number for block in slot.blocks]
            assert self._table[number, : len(blocks)].tolist() == blocks
            if number not in self._behind:
                assert self.windows.shown(number)[: len(blocks)] == blocks, f"window {number} shows other blocks"
        behind = {block.number for number in self._behind for block in self._slots[number].blocks}
        assert (self._held() - behind).issubset(self.windows.backed()), "a block that is used has no memory"

    def close(self) -> None:
        super().close()
        self._views.close()
        self.windows.close()

    def _grow(self, lengths: Mapping[int, int]) -> None:
        slots = {number: self._slots[number] for number in lengths}
        before = {number: (len(slot.blocks), slot.length) for number, slot in slots.items()}
        super()._grow(lengths)
        try:
            # On a device with streams also where nothing changed: windows know the stream of the batch that reads them.
            if self._behind or self._streams:
                self._show()
        except BaseException:
            for number, (count, length) in before.items():
                slot = slots[number]
                self._release(slot.blocks[count:])
                del slot.blocks[count:]
                slot.length = length
            raise

    def _show(self) -> None:
        """Back the blocks of all slots, and show them in their windows."""
        new = [block.number for number, count in self._behind.items() for block in self._slots[number].blocks[count:]]
        if new:
            self.windows.back(new)
        slots = list(self._slots)
        counts = [len(slot.blocks) for slot in self._slots.values()]
        # Of all slots, so that no window of a request that waits counts as idle.
        self.windows.show(self._table[slots, : max(counts, default=0)], counts, windows=slots)
        self._behind.clear()

    def _copy_block(self, origin: int, target: int) -> None:
        self.windows.back([target])
        for layer in range(len(self._homes)):
            home = self.windows.home(layer)
            home[target] = home[origin]

    def _append(self, number: int, blocks: list[PoolBlock]) -> None:
        have = len(self._slots[number].blocks)
        self._behind.setdefault(number, have)
        super()._append(number, blocks)
        if self._table is not self.block_table:
            numbers = [block.number for block in blocks]
            self._table[number, have : have + len(blocks)] = torch.tensor(numbers, dtype=torch.int32, device="cpu")

    def _held(self) -> set[int]:
        """The blocks that requests use, or that are cached."""
        return set(range(self.num_blocks)) - set(self._free)
