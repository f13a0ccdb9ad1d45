"""What the cases of the classic story compute: places of ranges, tables of blocks."""

from __future__ import annotations

import pytest

from bench.cases import external, table
from bench.cases.external import _place, _serve

GIB = 2**30


def test_a_sequence_lies_in_blocks_and_in_rows() -> None:
    """A prompt of 24 tokens and 61 generated: the rows of the classic demo, and a block table with gaps."""
    rows = table.run(quick=False).figures
    assert [row["tokens"] for row in rows] == [16, 24, 32, 48, 64, 80, 85]
    assert [row["blocks"] for row in rows] == [1, 2, 2, 3, 4, 5, 6]
    assert [row["last block"] for row in rows] == ["16/16", "8/16", "16/16", "16/16", "16/16", "16/16", "5/16"]
    last = [int(block) for block in str(rows[-1]["block table"]).split()]
    assert len(set(last)) == 6
    for row in rows:
        assert int(row["needed rows"]) >= int(row["tokens"])
        assert int(row["backed rows"]) >= int(row["needed rows"])


def test_ranges_go_into_the_first_hole_that_is_large_enough() -> None:
    running = [(1.0, 0, 4 * GIB, 1), (1.0, 10 * GIB, 20 * GIB, 1)]
    assert _place(running, 6 * GIB, contiguous=True) == 4 * GIB
    assert _place(running, 7 * GIB, contiguous=True) == 30 * GIB
    assert _place(running, 11 * GIB, contiguous=True) is None, "16 GiB are free, in two holes"
    assert _place(running, 11 * GIB, contiguous=False) is not None
    assert _place(running, 17 * GIB, contiguous=False) is None


def test_waste_within_and_between_requests() -> None:
    """Requests of half the budget and one byte: one at a time, the other half is lost."""
    requests, internal, free = _serve([1] * 20, lambda tokens: 20 * GIB + 1, GIB, contiguous=True)
    assert (requests, internal, free) == (1, 19 * GIB + 1, 20 * GIB - 1)


def test_pages_and_blocks_lose_no_more_than_the_next_request_needs() -> None:
    rows = {row["cache"]: row for row in external.run(quick=True).figures}
    assert rows["exact"]["internal %"] == 0
    assert rows["exact"]["external %"] > 3 * rows["virtual, sliced"]["external %"]  # type: ignore[operator]
    assert rows["virtual, sliced"]["requests at a time"] == pytest.approx(rows["paged"]["requests at a time"], rel=0.02)
