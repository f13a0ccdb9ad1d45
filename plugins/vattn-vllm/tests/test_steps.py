"""Which blocks of a row are shown, and in which windows: against vLLM's block tables, drawn at random."""

from __future__ import annotations

import random

import pytest
import torch
from vattn_vllm.steps import NULL_BLOCK, Group, Step

from vattn import BlockWindows

BLOCK, BLOCKS, LONGEST = 4, 60, 100


def table(row: list[int]) -> torch.Tensor:
    """A block table of one row, with numbers of no meaning at its end."""
    return torch.tensor([row + [7] * (LONGEST // BLOCK - len(row))], dtype=torch.int32)


def test_every_block_of_a_group_without_a_window() -> None:
    group = Group(BLOCK, None)
    has = torch.ones(BLOCKS, dtype=torch.bool)
    rows = group.rows(table([5, 9, 3]), torch.tensor([8]), torch.tensor([9]), has)
    assert rows.blocks[0, : int(rows.counts[0])].tolist() == [5, 9, 3]
    assert rows.offsets.tolist() == [0]
    assert not rows.null
    assert group.tokens(LONGEST, 16) == LONGEST


@pytest.mark.parametrize("window", [1, 3, 4, 5, 16, 17, 200])
@pytest.mark.parametrize("seed", range(4))
def test_what_queries_see_is_shown(window: int, seed: int) -> None:
    rng = random.Random(seed)
    group = Group(BLOCK, window)
    has = torch.zeros(BLOCKS, dtype=torch.bool)
    row: list[int] = []
    free = list(range(1, BLOCKS))
    start = 0
    while start < LONGEST:
        end = min(LONGEST, start + rng.choice([1, 1, 1, 2, 9]))
        first = max(0, start - window + 1) // BLOCK  # before it, vLLM has freed the blocks
        for block in row[:first]:
            if block not in free:
                free.append(block)
                has[block] = False
        while len(row) * BLOCK < end:
            row.append(free.pop(0))
            has[row[-1]] = True
        rows = group.rows(table(row), torch.tensor([start]), torch.tensor([end]), has)
        shown, offset = rows.blocks[0, : int(rows.counts[0])].tolist(), int(rows.offsets[0])
        assert offset % BLOCK == 0
        skipped = offset // BLOCK
        assert skipped <= first
        assert shown[first - skipped :] == row[first : -(-end // BLOCK)], "a query sees another block"
        assert all(has[block] or (block == NULL_BLOCK and rows.null) for block in shown)
        assert len(shown) * BLOCK <= group.tokens(LONGEST, 9) + BLOCK - 1
        start = end


def test_a_block_is_mapped_about_twice() -> None:
    """Once when it is new, and once when the first block moves on; not each time that one is passed."""
    group = Group(BLOCK, 8 * BLOCK)
    has = torch.ones(LONGEST, dtype=torch.bool)
    row, before, mapped = list(range(1, LONGEST)), torch.empty(0, dtype=torch.int32), 0
    blocks = torch.tensor([row], dtype=torch.int32)
    for start in range(BLOCK * len(row)):
        rows = group.rows(blocks, torch.tensor([start]), torch.tensor([start + 1]), has)
        shown = rows.blocks[0, : int(rows.counts[0])]
        common = min(len(shown), len(before))
        alike = int((shown[:common] == before[:common]).cumprod(0).sum())
        mapped += len(shown) - alike
        before = shown
    assert mapped <= 2.2 * len(row)


def test_a_block_that_was_replaced_stays_so() -> None:
    """When its number gets memory again, for another request, the blocks after it are not mapped again."""
    group = Group(BLOCK, 3 * BLOCK)
    has = torch.ones(BLOCKS, dtype=torch.bool)
    has[NULL_BLOCK] = False
    row = [11, 12, 13, 14, 15]
    seen = []
    for lost in (False, True, False):
        has[11] = not lost
        rows = group.rows(table(row), torch.tensor([17]), torch.tensor([18]), has)
        assert rows.offsets.tolist() == [0]
        seen.append(rows.blocks[0, :5].tolist())
    assert seen == [row, [NULL_BLOCK, *row[1:]], [NULL_BLOCK, *row[1:]]]


def test_one_call_shows_the_rows_of_all_groups() -> None:
    windows = BlockWindows(
        num_layers=1,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        row=(2, 128),
        dtype=torch.float32,
        num_windows=4,
        max_context_len=LONGEST,
    )
    has = torch.zeros(BLOCKS, dtype=torch.bool)

    def back(blocks: list[int]) -> None:
        windows.back(blocks)
        has[blocks] = True

    back(list(range(5, 12)))
    tables = [[[5, 6, 7], [8, 0, 0]], [[40, 9, 10], [11, 0, 0]]]
    step = Step(windows, back)
    for number, group in enumerate((Group(BLOCK, None), Group(BLOCK, 2 * BLOCK))):
        blocks = torch.tensor(tables[number], dtype=torch.int32)
        step.add(number, group.rows(blocks, torch.tensor([11, 0]), torch.tensor([12, 2]), has))
    assert not step.shown
    found = [step.windows(number).tolist() for number in range(2)]
    assert step.shown
    assert windows.stats().shows == 1
    assert [windows.shown(window) for window in found[0]] == [[5, 6, 7], [8]]
    # Block 40 has no memory, but no query sees it; the null block got some.
    assert [windows.shown(window) for window in found[1]] == [[NULL_BLOCK, 9, 10], [11]]
    windows.check()
    windows.close()
