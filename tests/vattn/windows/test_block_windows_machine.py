"""Random block tables, against a reference that gathers the blocks; the driver fails now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import vattn
from tests.support.faults import FaultyTable
from tests.support.machines import PAGE, examples
from tests.support.target import DEVICE

T = TypeVar("T")
BLOCKS, WINDOWS, MOST = 24, 5, 6
NUMBERS = st.integers(0, BLOCKS - 1)


class BlockTables(RuleBasedStateMachine):
    """An engine's block table: rows grow, shrink, leave, come and change places; blocks are used again.

    Every block holds a number that is new whenever the block is backed or written.
    """

    @initialize(layout=st.sampled_from(["layered", "fused"]), pages=st.integers(12, 2 * BLOCKS))
    def make(self, layout: str, pages: int) -> None:
        self.table = FaultyTable()
        self.pool = vattn.PagePool(pages * PAGE, device=DEVICE, page_size=PAGE, table=self.table.addresses)
        self.windows = vattn.BlockWindows(
            num_layers=2,
            num_blocks=BLOCKS,
            block_size=8,
            row=(2, 1, 32),
            dtype=torch.float64,
            num_windows=WINDOWS,
            max_context_len=8 * MOST,
            layout=layout,  # type: ignore[arg-type]
            device=DEVICE,
            pool=self.pool,
        )
        self.rows: list[list[int]] = []
        self.holds: dict[int, float] = {}  # what each backed block holds
        self.written = 0

    def back(self, blocks: list[int]) -> bool:
        """Whether they are backed, and written."""
        try:
            self.again(lambda: self.windows.back(blocks))
        except vattn.OutOfPages:
            assert self.windows.stats().backed_blocks == len(self.holds), "a refused call took memory"
            return False
        for block in blocks:
            self.write(block)
        return True

    def again(self, call: Callable[[], T]) -> T:
        """Makes a call, and once more if the driver fails: it then changed nothing that would keep it from that."""
        try:
            return call()
        except vattn.DriverError:
            with self.table.transparent():
                self.windows.check()
            return call()

    def write(self, block: int) -> None:
        self.written += 1
        self.holds[block] = float(self.written)
        for layer in range(2):
            self.windows.home(layer)[block] = self.written + layer / 2

    def show(self) -> None:
        table = torch.full((len(self.rows), MOST), -7, dtype=torch.int32)
        for row, blocks in enumerate(self.rows):
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        counts = [len(blocks) for blocks in self.rows]
        found = self.again(lambda: self.windows.show(table, counts))
        assert len(set(found)) == len(found)
        for window, blocks in zip(found, self.rows, strict=True):
            for layer in range(2):
                shown = self.windows.window(layer)[window, : 8 * len(blocks)].reshape(len(blocks), 8 * 64)
                wanted = [self.holds[block] + layer / 2 for block in blocks]
                assert (shown == torch.tensor(wanted, dtype=torch.float64)[:, None]).all()
        with self.table.transparent():
            self.windows.check()

    @rule(blocks=st.lists(NUMBERS, min_size=1, max_size=MOST, unique=True), at=st.integers(0, WINDOWS))
    def comes(self, blocks: list[int], at: int) -> None:
        if len(self.rows) < WINDOWS and self.back(
            [block for block in blocks if block not in self.holds] or [blocks[0]]
        ):
            self.rows.insert(at, blocks)
        self.show()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), block=NUMBERS)
    def grows(self, data: st.DataObject, block: int) -> None:
        row = data.draw(st.sampled_from(self.rows))
        if len(row) < MOST and (block in self.holds or self.back([block])):
            row.append(block)
        self.show()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(0, MOST))
    def shrinks(self, data: st.DataObject, count: int) -> None:
        del data.draw(st.sampled_from(self.rows))[count:]
        self.show()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), block=NUMBERS)
    def changes_a_block(self, data: st.DataObject, block: int) -> None:
        row = data.draw(st.sampled_from(self.rows))
        if row and block in self.holds:
            row[data.draw(st.integers(0, len(row) - 1))] = block
        self.show()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.show()

    @rule(data=st.data())
    def changes_places(self, data: st.DataObject) -> None:
        self.rows = [list(row) for row in data.draw(st.permutations(self.rows))]
        self.show()

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def is_written_again(self, data: st.DataObject) -> None:
        self.write(data.draw(st.sampled_from(sorted(self.holds))))
        self.show()

    @rule(more=st.sets(NUMBERS))
    def trims(self, more: set[int]) -> None:
        keep = {block for row in self.rows for block in row} | more
        self.again(lambda: self.windows.trim(keep))
        self.holds = {block: value for block, value in self.holds.items() if block in keep}
        assert self.windows.stats().backed_blocks == len(self.holds)
        self.show()

    @rule(nth=st.integers(1, 12))
    def the_driver_will_fail(self, nth: int) -> None:
        self.table.fail(nth)

    def teardown(self) -> None:
        if hasattr(self, "windows"):
            self.table.heal()
            self.windows.close()
            self.pool.close()


TestBlockTables = BlockTables.TestCase
TestBlockTables.settings = examples(steps=40)
