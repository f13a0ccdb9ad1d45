"""BlockWindows: the blocks of a block table, shown to kernels as contiguous memory.

Every block has a place of its own, where it is written, and is mapped again, read-only, in a *window*: contiguous
address space in which the blocks of one row of a block table lie in the order of their tokens. An engine keeps its
scheduler, its block pool and its block table; kernels get plain tensors.

Decisions are left to `vattn.windows`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vattn import _native, drivers
from vattn.errors import ConfigError, InvalidBlock, InvalidLength, InvalidSlot, MappingLimit, NoFreeSlot, OutOfPages
from vattn.groups import MOST_LAYERS, MOST_SLOTS, MOST_TOKENS, check_choice, check_int
from vattn.integers import as_int, shown
from vattn.pool.calls import atomic, reading
from vattn.pool.core import Tenant
from vattn.pool.fences import refusal
from vattn.pool.journal import Change, Plan
from vattn.pool.member import PoolMember
from vattn.pool.pool import PagePool
from vattn.stats import BlockStats, CallStats
from vattn.units import format_bytes, parse_bytes
from vattn.windows.shape import MOST_BLOCKS, BlockLayout, checked_dtype, checked_row, listed, resolve
from vattn.windows.shown import Blocks, ShownBlocks

BlockTable = Sequence[Sequence[int]] | Tensor


class BlockWindows(PoolMember):
    """Blocks that are backed by physical memory on demand, and windows that show them contiguously.

    `back` maps memory under blocks before they are written, `show` makes windows for a batch, and `trim` gives back the
    memory of blocks that are no longer needed. Every call is atomic, and serialised with those of all caches on the
    same pool. An object is also a context manager, which closes it.

    Args:
        num_layers: layers, which all store the same.
        num_blocks: blocks, numbered from 0.
        block_size: tokens per block.
        row: the shape of what a token stores in a layer, such as `(2, num_kv_heads, head_dim)` for a key and a value.
        dtype: type of the elements.
        num_windows: rows of a batch at most; more of them keep what rows have left for rows to come.
        max_context_len: tokens of a row at most.
        layout: "layered": a tensor of its own for each layer. "fused": the layers of a token are neighbours, so that a
            block takes one mapping instead of one per layer, and few tokens fill a page. "auto": "layered" if a block
            is whole pages in it, else "fused".
        page_size: bytes of a page; "auto": the largest that divides a block.
        memory_budget: the most physical memory, in bytes or as text ("4GiB"); None: of all blocks.
        device: the device of the memory.
        guard: what a read past the blocks of a window sees on the host: "zero" or "strict" (a fault).
        pool: the physical pages to draw on, shared with caches and other windows; it has the budget, the page size and
            the guard.

    Raises:
        ConfigError: a value that is not possible, a block that is not whole pages (the message says which is), or more
            mappings than the kernel allows.
        DriverError: the address space cannot be reserved.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        row: Sequence[int],
        dtype: torch.dtype,
        num_windows: int,
        max_context_len: int,
        layout: BlockLayout | Literal["auto"] = "auto",
        page_size: int | Literal["auto"] = "auto",
        memory_budget: int | str | None = None,
        device: str | torch.device = "cpu",
        guard: drivers.Guard = "zero",
        pool: PagePool | None = None,
    ) -> None:
        self._check_pool(pool, device)
        check_choice("guard", guard, ("zero", "strict"))
        if not (isinstance(page_size, str) and page_size == "auto"):
            page_size = check_int("page_size", page_size, at_least=1, at_most=2**40)
        if pool is not None:
            if memory_budget is not None or page_size not in ("auto", pool.page_size) or guard != "zero":
                raise ConfigError(
                    "a pool has its own budget, page size and guard; leave memory_budget, page_size, guard"
                )
            page_size = pool.page_size
        most_tokens = check_int("max_context_len", max_context_len, at_least=1, at_most=MOST_TOKENS)
        block_size = check_int("block_size", block_size, at_least=1, at_most=MOST_TOKENS)
        self._shape = resolve(
            layout,
            page_size,
            drivers.find(device),
            num_layers=check_int("num_layers", num_layers, at_least=1, at_most=MOST_LAYERS),
            num_blocks=check_int("num_blocks", num_blocks, at_least=1, at_most=MOST_BLOCKS),
            block_size=block_size,
            row=checked_row(row),
            dtype=checked_dtype(dtype),
            num_windows=check_int("num_windows", num_windows, at_least=1, at_most=MOST_SLOTS),
            window_blocks=-(-most_tokens // block_size),
        )
        shape = self._shape

        def own_pool() -> PagePool:
            return PagePool(
                shape.num_blocks * shape.tensors * shape.block_bytes
                if memory_budget is None
                else parse_bytes(memory_budget, "memory_budget"),
                device=device,
                page_size=shape.page_size,
                guard=guard,
            )

        with self._joining(pool, own_pool) as core:
            driver = core.driver
            homes, windows = (
                _native.AddressSpace(
                    driver.native,
                    core.native,
                    tensors=shape.tensors,
                    slots=slots,
                    runs=1,
                    run_pages=blocks * shape.block_pages,
                    # CUDA's memory holds anything, and kernels multiply rows past a length by zero: not by NaN.
                    zeroed=zeroed,
                )
                for slots, blocks, zeroed in (
                    (shape.num_blocks, 1, driver.device.torch_device.type == "cuda"),
                    (shape.num_windows, shape.window_blocks, False),
                )
            )
            self._shown = ShownBlocks(
                driver, homes, windows, block_pages=shape.block_pages, most_blocks=shape.window_blocks
            )
            self._peak = self._shows = 0

    # The interface

    @atomic
    def back(self, blocks: Iterable[int]) -> int:
        """Backs blocks; those that are backed already stay as they are. To be called before they are written.

        A block that was not backed before holds whatever its pages held: zeros if they are new memory.

        Returns:
            The number of blocks that were newly backed.

        Raises:
            InvalidBlock: a number that is no block. Nothing changed.
            OutOfPages: the budget does not have the pages, or the machine not the memory. Nothing changed.
            StreamCapturing: memory would be mapped while the current stream captures a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        table = self._shown
        new = [block for block in dict.fromkeys(self._checked_blocks(blocks)) if not table.backed(block)]
        if not new:
            return 0
        if table.capturing(table.handle(None)):
            raise refusal(f"back has to map memory for {len(new)} blocks")

        def plan(change: Change) -> None:
            core, need = self._core, len(new) * table.pages
            if missing := core.make_room(change, need):
                why = f"{core.shortage}; " if core.shortage else ""
                raise OutOfPages(
                    f"{len(new)} blocks need {need} pages of {format_bytes(core.page_size)}, {missing} more than the "
                    f"budget of {core.most_pages} has left; {why}trim what is not needed, or give more memory",
                    missing_pages=missing,
                    missing_bytes=missing * core.page_size,
                    may_pass=core.may_get_more and need <= core.most_pages - core.taken_pages,
                )
            table.back(change, new)

        self._execute(plan)
        self._core.stock()
        self._peak = max(self._peak, table.backed_blocks)
        return len(new)

    @atomic
    def show(
        self,
        rows: BlockTable,
        counts: Sequence[int] | Tensor | None = None,
        *,
        windows: Sequence[int] | None = None,
        stream: drivers.Stream | None = None,
    ) -> list[int]:
        """Shows each row of a block table in a window. To be called before the kernels of a batch are launched, and
        after those of the batch before.

        Rows are compared with what windows show, and only what differs is mapped or unmapped: nothing for a row that
        has not changed, one block for a row that grew by one.

        Args:
            rows: the blocks of each row, in the order of their tokens; or a table, `[rows, blocks]` int32 on the CPU.
            counts: how many blocks at the start of each row of a table count.
            windows: the window of each row, each a different one, for engines that know which request a row is. By
                default they are chosen: a row may have another window than in the batch before.
            stream: on CUDA, the stream on which the kernels are launched; by default torch's current one.

        Returns:
            The window of each row. Until the next call it shows the row's blocks, and perhaps others after them.

        Raises:
            NoFreeSlot: more rows than windows.
            InvalidBlock: a number that is no block, or of a block that is not backed; rows that are no sequences.
            InvalidLength: a row of more blocks than a window has; counts that are not whole numbers, or do not fit; a
                table of another type.
            InvalidSlot: a number that is no window, or twice the same.
            MappingLimit: the kernel's table of mappings is full.
            StreamCapturing: windows would change while a stream captures a CUDA graph, or the stream of the last batch
                captures one and `stream` is another.
            DriverError: a driver call failed. Windows of rows show what they did, in this case and all others.
        """
        table = self._shown
        blocks, wanted = self._checked_rows(rows, counts)
        found = table.match(blocks, wanted) if windows is None else self._checked_windows(windows, len(wanted))
        common = table.common(blocks, wanted, range(len(found)), found)
        has = wanted.tolist()
        changed = [row for row, keep in enumerate(common) if keep < has[row]]
        handle = table.handle(stream)
        if (changed or found != table.rows) and table.capturing(handle):
            raise refusal("show has to change windows")
        if table.leaves_capture(handle):
            raise refusal("show was called for another stream")
        if changed:
            self._remap(
                [(found[row], common[row], blocks[row, common[row] : has[row]].tolist()) for row in changed], found
            )
        table.use(self._core.change(), found, handle)
        self._shows += 1
        return found

    def _remap(self, changes: Sequence[tuple[int, int, list[int]]], rows: Collection[int]) -> None:
        """Shows, in each window, blocks after the first that it keeps; `rows` are all windows of the batch."""
        table = self._shown
        for _, _, blocks in changes:
            self._check_backed(self._checked_blocks(blocks))
        cut = {window: lost for window, keep, _ in changes if (lost := table.shown_in(window) - keep)}

        def plan(change: Change) -> None:
            table.guard(change, cut)
            for window, keep, blocks in changes:
                table.show(change, window, keep, blocks)

        self._execute(plan, rows)

    def _execute(self, plan: Plan, rows: Collection[int] = ()) -> None:
        """Executes a plan. If the kernel has no mappings for it, windows that no row has are emptied, since they serve
        only rows to come. If that is not enough, or memory is lacking, what no request on the pool uses is reclaimed.
        """
        table = self._shown
        try:
            self._core.execute(plan)
        except MappingLimit:
            if idle := [window for window in table.idle_showing() if window not in rows]:
                self._core.execute(lambda change: table.clear(change, idle))
        except OutOfPages as error:
            if error.__cause__ is None:
                raise
        else:
            return
        self._core.execute_reclaiming(plan)

    @atomic
    def trim(self, keep: Iterable[int]) -> int:
        """Gives back the memory of all blocks but these, and unmaps them in windows too.

        On CUDA, the kernels that use the other blocks must have been launched; their memory goes when they have ended.

        Returns:
            Bytes of physical memory given back to the machine.

        Raises:
            InvalidBlock: a number that is no block. Nothing changed.
            StreamCapturing: a stream captures a CUDA graph. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        table, kept = self._shown, set(self._checked_blocks(keep))
        handle = table.handle(None)
        if table.capturing(handle):
            raise refusal("trim was called")
        gone = [block for block in table.homes.occupied() if block not in kept]
        if gone:
            self._core.execute(lambda change: table.drop(change, gone, handle))
        return self._core.release_free()

    @reading
    def backed(self) -> set[int]:
        """The blocks that have memory."""
        return set(self._shown.homes.occupied())

    def home(self, layer: int) -> Tensor:
        """The blocks of a layer, `[num_blocks, block_size, *row]`, where they are written. In the fused layout other
        layers lie between two tokens of one.

        Only blocks that `back` was called for may be written; reads elsewhere see zeros, or fault (see `guard`).

        Raises:
            IndexError: there is no such layer.
            ForkedProcess: this is a child of the process that made the windows.
        """
        self._check_usable()
        return self._view(self._shown.homes, layer, self._shape.num_blocks, self._shape.block_size)

    def window(self, layer: int) -> Tensor:
        """The windows of a layer, `[num_windows, tokens, *row]`: as many tokens as the whole blocks have that
        `max_context_len` needs. They are read-only: a write faults.

        Raises:
            IndexError: there is no such layer.
            ForkedProcess: this is a child of the process that made the windows.
        """
        self._check_usable()
        shape = self._shape
        return self._view(self._shown.windows, layer, shape.num_windows, shape.window_blocks * shape.block_size)

    @reading
    def shown(self, window: int) -> list[int]:
        """The blocks that a window shows, in their order: those of its row, and perhaps others after them.

        Raises:
            InvalidSlot: there is no such window.
        """
        (number,) = self._checked_windows([window], 1)
        return self._shown.blocks_of(number)

    @reading
    def stats(self) -> BlockStats:
        """A snapshot of blocks, bytes and calls."""
        native, table, shape = self._core.driver.native, self._shown, self._shape
        return BlockStats(
            page_size=shape.page_size,
            num_blocks=shape.num_blocks,
            backed_blocks=table.backed_blocks,
            peak_backed_blocks=max(self._peak, table.backed_blocks),
            block_bytes=shape.tensors * shape.block_bytes,
            shown_blocks=table.shown_blocks(),
            attached_blocks=table.attached,
            detached_blocks=table.detached,
            shows=self._shows,
            reserved_bytes=shape.tensors * (table.homes.tensor_bytes + table.windows.tensor_bytes),
            kernel_mappings=_native.host_usage().kernel_mappings,
            calls={name: CallStats(count, seconds) for name, (count, seconds) in native.call_stats().items()},
        )

    def check(self) -> None:
        """Asserts that every block is mapped exactly where the books say, and in windows with the access that they
        have. Waits for the worker.

        Raises:
            AssertionError: an invariant is violated; the message names it.
        """
        with self._checking():
            self._shown.check(self._core.native)
            if self._owns_pool:
                taken = self._shown.backed_blocks * self._shown.pages
                assert taken == self._core.taken_pages, "a page was lost"

    @property
    def _tenant(self) -> Tenant:
        return self._shown

    def _give_back(self) -> Plan:
        return self._shown.give_back()

    def _forget(self) -> None:
        self.__dict__.pop("_shown", None)  # it may have been interrupted

    def __repr__(self) -> str:
        shape = self._shape
        state = "closed" if self._closed else f"{self._shown.backed_blocks} of {shape.num_blocks} blocks backed"
        return (
            f"BlockWindows({state}; {shape.layout}, {shape.block_size} tokens per block, {shape.block_pages} pages of "
            f"{format_bytes(shape.page_size)} per tensor, {shape.num_windows} windows)"
        )

    def _view(self, space: _native.AddressSpace, layer: int, count: int, tokens: int) -> Tensor:
        shape = self._shape
        try:
            index = as_int(layer)
        except TypeError:
            index = -1
        if not 0 <= index < shape.num_layers:
            raise IndexError(
                f"layer {shown(layer)} is not one of the {shape.num_layers} layers, 0 to {shape.num_layers - 1}"
            )
        fused = shape.layout == "fused"
        # A tensor created in inference mode could not be written outside it.
        with torch.inference_mode(False):
            raw = space.tensor(0 if fused else index, *self._core.driver.dlpack_device).view(shape.dtype)
            rows = raw.view(count, tokens, *((shape.num_layers,) if fused else ()), *shape.row)
            return rows[:, :, index] if fused else rows

    # Arguments

    def _checked_blocks(self, blocks: Iterable[int]) -> list[int]:
        """Validates block numbers; a list of `int`."""
        try:
            numbers = blocks.tolist() if isinstance(blocks, Tensor) else list(blocks)
            if not {int}.issuperset(map(type, numbers)):
                numbers = [as_int(number) for number in numbers]
        except Exception as error:  # iterating over a caller's object may raise anything
            raise InvalidBlock(f"blocks are numbers from 0 to {self._shape.num_blocks - 1}: {error}") from error
        if numbers and not (min(numbers) >= 0 and max(numbers) < self._shape.num_blocks):
            wrong = next(number for number in numbers if not 0 <= number < self._shape.num_blocks)
            raise InvalidBlock(f"block {shown(wrong)} is not in [0, {self._shape.num_blocks})")
        return numbers

    def _check_backed(self, blocks: Collection[int]) -> None:
        for block in blocks:
            if not self._shown.backed(block):
                raise InvalidBlock(
                    f"block {block} is not backed, so it holds nothing to show; call back([{block}]) first"
                )

    def _checked_rows(self, rows: BlockTable, counts: Sequence[int] | Tensor | None) -> tuple[Blocks, Blocks]:
        """Validates the shape of a block table; int32 `[rows, blocks]` and `[rows]`, contiguous, on the CPU."""
        if not isinstance(rows, Tensor):
            if counts is not None:
                raise InvalidLength("counts are for a table; rows that are sequences have lengths")
            plain = (
                row if type(row) is list or isinstance(row, Tensor) else listed(row, "a row", InvalidBlock)
                for row in listed(rows, "rows", InvalidBlock)
            )
            lists = [self._checked_blocks(row) for row in plain]
            counts = [len(row) for row in lists]
            rows = torch.zeros((len(lists), max(counts, default=0)), dtype=torch.int32, device="cpu")
            for row, numbers in enumerate(lists):
                rows[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        elif counts is None:
            raise InvalidLength("a table needs counts: how many blocks of each row count")
        dense = rows.layout == torch.strided and rows.device.type == "cpu"
        if not dense or rows.ndim != 2 or rows.dtype != torch.int32:
            raise InvalidLength(
                f"a table is int32 [rows, blocks] on the CPU, not {rows.dtype} {list(rows.shape)} on {rows.device}"
            )
        wanted = _whole(counts)
        if wanted.ndim != 1 or len(wanted) != len(rows):
            raise InvalidLength(f"{list(wanted.shape)} counts for {len(rows)} rows; give one for each")
        if len(rows) > self._shape.num_windows:
            raise NoFreeSlot(
                f"{len(rows)} rows, but {self._shape.num_windows} windows; make more, or show fewer rows at a time"
            )
        if len(wanted):
            least, most = (int(each) for each in wanted.aminmax())
            limit = min(rows.shape[1], self._shape.window_blocks)
            if least < 0 or most > limit:
                raise InvalidLength(
                    f"a row of {most if most > limit else least} blocks is not possible: from 0 to {limit}, as the "
                    f"table has {rows.shape[1]} and a window {self._shape.window_blocks}"
                )
        return rows.resolve_neg().contiguous().numpy(), wanted.to(torch.int32).numpy()

    def _checked_windows(self, windows: Sequence[int], count: int) -> list[int]:
        try:
            numbers = [as_int(window) for window in listed(windows, "windows", InvalidSlot)]
        except TypeError as error:
            raise InvalidSlot(f"windows: {error}") from None
        if len(numbers) != count:
            raise InvalidSlot(f"{len(numbers)} windows for {count} rows; give one for each")
        if len(set(numbers)) < count:
            raise InvalidSlot("two rows have the same window; give a different one to each")
        for window in numbers:
            if not 0 <= window < self._shape.num_windows:
                raise InvalidSlot(f"window {shown(window)} is not in [0, {self._shape.num_windows})")
        return numbers


def _whole(counts: Sequence[int] | Tensor) -> Tensor:
    """Counts as int64 on the CPU; raises InvalidLength if they are not whole numbers."""
    try:
        if not isinstance(counts, Tensor):
            numbers = listed(counts, "counts", InvalidLength)
            if not {int}.issuperset(map(type, numbers)):
                numbers = [as_int(number) for number in numbers]
            return torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if counts.dtype == torch.bool or counts.is_floating_point() or counts.is_complex():
            raise TypeError(f"{counts.dtype} is no type of whole numbers")
        return counts.to("cpu", torch.int64).contiguous().resolve_neg()
    except InvalidLength:
        raise
    except Exception as error:
        raise InvalidLength(f"counts={shown(counts)} must be whole numbers: {error}") from error
