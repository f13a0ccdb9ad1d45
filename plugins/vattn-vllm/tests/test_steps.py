"""Which blocks of a row are shown, and in which windows: against vLLM's block tables, drawn at random."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vattn_vllm.memory import KVMemory
from vattn_vllm.options import Options
from vattn_vllm.steps import NULL_BLOCK, Group, ShownRows, Step
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vattn import BlockWindows, InvalidBlock

BLOCK, BLOCKS, LONGEST = 4, 60, 100


def table(row: list[int]) -> torch.Tensor:
    """A block table of one row, with numbers of no meaning at its end."""
    return torch.tensor([row + [7] * (LONGEST // BLOCK - len(row))], dtype=torch.int32)


def test_every_block_of_a_group_without_a_window() -> None:
    group = Group(BLOCK, None)
    has = torch.ones(BLOCKS, dtype=torch.bool)
    rows = group.rows(table([5, 9, 3]), torch.tensor([8]), torch.tensor([9]), has)
    assert rows.blocks[0, : int(rows.counts[0])].tolist() == [5, 9, 3]
    assert rows.offsets is None
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


@pytest.mark.parametrize("window", [None, 2 * BLOCK])
def test_rows_of_a_run_that_warms_up_show_the_null_block(window: int | None) -> None:
    has = torch.zeros(BLOCKS, dtype=torch.bool)
    group, rows = Group(BLOCK, window), torch.zeros(2, 5, dtype=torch.int32)
    assert group.rows(rows, torch.tensor([0, 0]), torch.tensor([1, 1]), has).null
    rows[:, :2] = torch.tensor([[3, 0], [4, 5]])
    assert not group.rows(rows, torch.tensor([0, 4]), torch.tensor([1, 5]), has).null, "what is behind a row's end"


def block_windows() -> BlockWindows:
    return BlockWindows(
        num_layers=1,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        row=(2, 128),
        dtype=torch.float32,
        num_windows=4,
        max_context_len=LONGEST,
    )


def test_one_call_shows_the_rows_of_all_groups() -> None:
    windows = block_windows()
    has = torch.zeros(BLOCKS, dtype=torch.bool)

    def back(blocks: list[int]) -> None:
        windows.back(blocks)
        has[blocks] = True

    back(list(range(5, 12)))
    tables = [[[5, 6, 7], [8, 0, 0]], [[40, 9, 10], [11, 0, 0]]]
    step = Step(ShownRows(windows), back)
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


def test_rows_that_are_shown_are_not_shown_again() -> None:
    windows = block_windows()
    windows.back(range(1, 9))
    shown = ShownRows(windows)
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)

    def show(*counts: int) -> list[list[int]]:
        found = shown.show(table, torch.tensor(counts, dtype=torch.int32)).tolist()
        return [windows.shown(window) for window in found]

    assert show(2, 1) == show(2, 1) == [[1, 2], [4]]
    assert windows.stats().shows == 1
    assert show(2, 2) == [[1, 2], [4, 5]]
    assert windows.stats().shows == 2
    table[0, 1] = 7  # as vLLM changes it, in place
    assert show(2, 2) == [[1, 7], [4, 5]]
    windows.trim({1, 4, 5})
    windows.back([7])
    shown.forget()
    assert show(2, 2) == [[1, 7], [4, 5]]
    table = table[:1]
    assert show(2) == [[1, 7]]
    assert windows.stats().shows == 5
    windows.check()
    windows.close()


def test_rows_that_could_not_be_shown_are_shown_again() -> None:
    windows = block_windows()
    windows.back([1])
    shown = ShownRows(windows)
    table, counts = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    shown.show(table, counts)
    for _ in range(2):
        with pytest.raises(InvalidBlock):
            shown.show(table, counts + 1)
    shown.show(table, counts)
    assert windows.stats().shows == 2
    windows.close()


def test_memory_that_a_row_gives_to_the_null_block_is_noticed() -> None:
    """In a step for which the scheduler said nothing, too."""
    spec = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=32)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=96),
        scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=16),
    )
    cache: Any = SimpleNamespace(
        num_blocks=8,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])],
        kv_cache_tensors=[SimpleNamespace(layers=["layer"])],
    )
    memory = KVMemory(config, cache, torch.device("cpu"), Options())

    def step(back: list[int], give_back: list[int]) -> bool:
        memory.begin_step(back, give_back)
        return memory.changed()

    assert step([1, 2, 3, 4], [])
    assert not step([], [])
    assert step([], [1])  # which is behind the window of a request that this step is without
    assert not step([], [])
    shown, _ = memory.rows(0, torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), torch.tensor([49]), torch.tensor([50]))
    assert shown.windows(0) is not None
    assert memory.windows.backed() == {NULL_BLOCK, 2, 3, 4}
    assert memory.changed()
    assert not memory.changed()
    memory.check()
    memory.windows.close()
