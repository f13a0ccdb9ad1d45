"""BlockWindows: blocks are written at home and read in windows, and only what differs is mapped."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import vattn
from tests.support import scripts
from tests.support.faults import FaultyTable
from tests.support.interruption import entries, interrupted
from tests.support.target import DEVICE, host_only, memory_calls
from vattn import BlockWindows

PAGE = 4096
OPTIONS: dict[str, Any] = {
    "num_layers": 2,
    "num_blocks": 32,
    "block_size": 16,
    "row": (2, 1, 32),
    "dtype": torch.float32,
    "num_windows": 4,
    "max_context_len": 128,
    "device": DEVICE,
    "page_size": PAGE,
}
LAYOUTS = ["layered", "fused"]


def make(**changes: Any) -> BlockWindows:
    return BlockWindows(**OPTIONS | changes)


@pytest.fixture(params=LAYOUTS)
def windows(request: pytest.FixtureRequest) -> Iterator[BlockWindows]:
    with make(layout=request.param) as made:
        yield made
        made.check()


def write(windows: BlockWindows, blocks: Sequence[int], salt: float = 0) -> None:
    """Backs blocks and writes their numbers, and the layer, to every token."""
    windows.back(blocks)
    for layer in range(OPTIONS["num_layers"]):
        for block in blocks:
            windows.home(layer)[block] = block + 100 * layer + salt


def seen(windows: BlockWindows, window: int, count: int, layer: int = 0) -> list[float]:
    """What a window shows of its first blocks, whose tokens must all be equal."""
    tokens = windows.window(layer)[window, : count * OPTIONS["block_size"]].reshape(count, -1)
    assert (tokens == tokens[:, :1]).all()
    return [float(value) for value in tokens[:, 0]]


def test_a_window_shows_the_blocks_of_its_row_in_order(windows: BlockWindows) -> None:
    write(windows, range(8))
    first, second = windows.show([[5, 2, 7], [2, 0]])
    assert seen(windows, first, 3) == [5, 2, 7]
    assert seen(windows, second, 2, layer=1) == [102, 100]
    assert windows.window(0).shape == (4, 128, 2, 1, 32)
    assert windows.home(1).shape == (32, 16, 2, 1, 32)


def test_what_is_written_at_home_is_seen_at_once(windows: BlockWindows) -> None:
    write(windows, [3])
    (window,) = windows.show([[3, 3]])
    windows.home(0)[3, 7] = -1
    assert (windows.window(0)[window, [7, 23]] == -1).all()


def test_only_what_differs_is_mapped(windows: BlockWindows) -> None:
    write(windows, range(20))
    tensors = 1 if "fused" in repr(windows) else 2

    def calls() -> dict[str, int]:
        return {name: calls.count for name, calls in memory_calls(windows.stats()).items()}

    rows = [[0, 1, 2], [3, 4], [5, 6, 7]]
    found = windows.show(rows)
    before = calls()
    assert windows.show(rows) == found
    assert windows.show(rows[:2]) == found[:2]
    assert windows.show([rows[2], rows[0]]) == [found[2], found[0]]
    assert windows.show([row[:2] for row in rows]) == found, "a shorter row needs no change"
    assert calls() == before
    assert windows.show([[0, 1, 2, 9], [3, 4], [5, 6, 7]]) == found
    grown = {name: count - before[name] for name, count in calls().items() if count != before[name]}
    assert grown == {"cuMemMap": 2, "cuMemSetAccess": tensors}, "a block is two pages, in one tensor or in two"
    assert windows.stats().attached_blocks == 9
    assert windows.stats().detached_blocks == 0
    assert seen(windows, found[0], 4) == [0, 1, 2, 9]


def test_a_row_finds_what_an_idle_window_still_shows(windows: BlockWindows) -> None:
    write(windows, range(20))
    a, b, c = windows.show([[0, 1, 2, 3], [0, 1, 8], [10, 11]])
    assert windows.show([[10, 11]]) == [c]
    assert windows.show([[10, 11], [0, 1, 8, 9]]) == [c, b]
    assert windows.show([[0, 1, 2, 4], [0, 1, 8, 9]]) == [a, b], "the first blocks say which window it was"
    assert seen(windows, a, 4) == [0, 1, 2, 4]
    assert windows.stats().detached_blocks == 1


def test_a_block_that_is_used_again_while_an_idle_window_shows_it(windows: BlockWindows) -> None:
    write(windows, [0, 1, 2])
    windows.show([[0, 1, 2]])
    (other,) = windows.show([[2]])
    write(windows, [1], salt=0.5)
    (window,) = windows.show([[0, 1]])
    assert window != other
    assert seen(windows, window, 2) == [0, 1.5]
    # Given back and backed again, it is other memory, which the idle window must not show.
    windows.show([[2]])
    windows.trim([0, 2])
    windows.check()
    write(windows, [1], salt=0.25)
    (window,) = windows.show([[0, 1]])
    assert seen(windows, window, 2) == [0, 1.25]


def test_trim_gives_memory_back(windows: BlockWindows) -> None:
    write(windows, range(12))
    a, b = windows.show([[0, 1, 2], [3, 4]])
    block = windows.stats().block_bytes
    assert windows.backed() == set(range(12))
    assert windows.trim([0, 1, 3, 4]) == 8 * block
    assert windows.backed() == {0, 1, 3, 4}
    windows.check()
    stats = windows.stats()
    assert (stats.backed_blocks, stats.peak_backed_blocks, stats.mapped_bytes) == (4, 12, 4 * block)
    assert seen(windows, a, 2) == [0, 1]
    assert windows.show([[0, 1], [3, 4]]) == [a, b]
    assert windows.trim([]) == 4 * block
    assert windows.stats().shown_blocks == 0
    assert windows.trim([]) == 0


def test_a_table_and_lists_are_the_same(windows: BlockWindows) -> None:
    write(windows, range(10))
    table = torch.tensor([[1, 2, 3, 77], [4, 5, -1, -1]], dtype=torch.int32)
    a, b = windows.show(table, [3, 2])
    assert seen(windows, a, 3) == [1, 2, 3]
    assert windows.show([[1, 2, 3], [4, 5]]) == [a, b]
    assert windows.show(table[:, :3], torch.tensor([3, 2])) == [a, b]
    assert windows.show(table.new_zeros((0, 0)), []) == []
    assert windows.show([[np.int64(1), 2], []])[0] == a


def test_an_engine_can_say_which_window_a_row_has(windows: BlockWindows) -> None:
    write(windows, range(10))
    assert windows.show([[1, 2], [3]], windows=[3, 0]) == [3, 0]
    assert seen(windows, 3, 2) == [1, 2]
    assert windows.show([[3, 4], [1, 2]], windows=[3, 0]) == [3, 0]
    assert (seen(windows, 3, 2), seen(windows, 0, 2)) == ([3, 4], [1, 2])


def test_bad_rows_change_nothing(windows: BlockWindows) -> None:
    write(windows, range(6))
    good = windows.show([[0, 1], [2, 3]])
    table = torch.zeros((2, 4), dtype=torch.int32)
    for error, match, call in (
        (vattn.InvalidBlock, r"block 32 is not in \[0, 32\)", lambda: windows.show([[0, 1, 32]])),
        (vattn.InvalidBlock, r"block -1 is not", lambda: windows.show([[-1]])),
        (vattn.InvalidBlock, r"back\(\[9\]\) first", lambda: windows.show([[0, 1, 5], [2, 9]])),
        (vattn.InvalidBlock, "not a whole number", lambda: windows.show([[0.5]])),  # type: ignore[list-item]
        (vattn.InvalidBlock, r"block 77 is not", lambda: windows.show(table + 77, [1, 1])),
        (vattn.NoFreeSlot, "5 rows, but 4 windows", lambda: windows.show([[0]] * 5)),
        (vattn.InvalidLength, "a row of 9 blocks", lambda: windows.show([[0] * 9])),
        (vattn.InvalidLength, "the table has 4", lambda: windows.show(table, [5, 1])),
        (vattn.InvalidLength, "a row of -1 blocks", lambda: windows.show(table, [-1, 1])),
        (vattn.InvalidLength, "one for each", lambda: windows.show(table, [1])),
        (vattn.InvalidLength, "needs counts", lambda: windows.show(table)),
        (vattn.InvalidLength, "have lengths", lambda: windows.show([[0]], [1])),
        (vattn.InvalidLength, "is int32", lambda: windows.show(table.long(), [1, 1])),
        (vattn.InvalidLength, "is int32", lambda: windows.show(table.to_sparse(), [1, 1])),
        (vattn.InvalidLength, "is int32", lambda: windows.show(table.to("meta"), [1, 1])),
        (vattn.InvalidLength, "a row of 4294967297", lambda: windows.show(table, [2**32 + 1, 1])),
        (vattn.InvalidLength, "a row of 4294967297", lambda: windows.show(table, torch.tensor([2**32 + 1, 1]))),
        (vattn.InvalidLength, "1.9 is not a whole", lambda: windows.show(table, [1.9, 1])),  # type: ignore[list-item]
        (vattn.InvalidLength, "True is a bool", lambda: windows.show(table, [True, 1])),
        (vattn.InvalidLength, "whole numbers", lambda: windows.show(table, [2**64, 1])),
        (vattn.InvalidLength, "float32 is no type", lambda: windows.show(table, torch.tensor([1.0, 1.0]))),
        (vattn.InvalidLength, "complex64 is no type", lambda: windows.show(table, torch.tensor([1j, 1j]))),
        (vattn.InvalidLength, "bool is no type", lambda: windows.show(table, torch.tensor([True, True]))),
        (vattn.InvalidLength, "counts=5", lambda: windows.show(table, 5)),  # type: ignore[arg-type]
        (vattn.InvalidBlock, "rows=5", lambda: windows.show(5)),  # type: ignore[arg-type]
        (vattn.InvalidBlock, "set is no sequence", lambda: windows.show([{0, 1}])),  # type: ignore[list-item]
        (vattn.InvalidBlock, "dict is no sequence", lambda: windows.show({0: [1]})),  # type: ignore[arg-type]
        (vattn.InvalidBlock, "True is a bool", lambda: windows.show([[True]])),
        (vattn.InvalidBlock, "blocks are numbers", lambda: windows.back(torch.tensor([1.0]))),  # type: ignore[arg-type]
        (vattn.InvalidSlot, "windows=5", lambda: windows.show([[0]], windows=5)),  # type: ignore[arg-type]
        (vattn.InvalidSlot, "set is no sequence", lambda: windows.show([[0]], windows={1})),  # type: ignore[arg-type]
        (vattn.InvalidSlot, "True is a bool", lambda: windows.show([[0]], windows=[True])),
        (vattn.InvalidSlot, "the same window", lambda: windows.show([[0], [1]], windows=[1, 1])),
        (vattn.InvalidSlot, r"window 4 is not in \[0, 4\)", lambda: windows.show([[0]], windows=[4])),
        (vattn.InvalidSlot, "1 windows for 2 rows", lambda: windows.show([[0], [1]], windows=[0])),
        (vattn.InvalidBlock, r"block 40", lambda: windows.back([7, 40])),
        (vattn.InvalidBlock, r"block 40", lambda: windows.trim([40])),
        (IndexError, "layer 2 is not one of the 2 layers", lambda: windows.home(2)),
        (IndexError, "layer 'k'", lambda: windows.window("k")),  # type: ignore[arg-type]
    ):
        before = windows.stats()
        with pytest.raises(error, match=match):
            call()
        assert (windows.stats().backed_blocks, windows.stats().shown_blocks) == (6, before.shown_blocks)
        windows.check()
    assert windows.show([[0, 1], [2, 3]]) == good
    assert windows.stats().detached_blocks == 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_size": 0}, "block_size=0 must be a whole number from 1 to"),
        ({"num_windows": 1.5}, "num_windows=1.5 must be a whole number"),
        ({"num_windows": 2**31}, "num_windows=2147483648 must be a whole number from 1 to 65536"),
        ({"num_blocks": 2**64}, "num_blocks=18446744073709551616 must be a whole number"),
        ({"num_layers": True}, "num_layers=True must be a whole number"),
        ({"num_windows": 65536, "max_context_len": 2**32}, "of addresses; a process has"),
        ({"row": ()}, "stores nothing"),
        ({"row": 5}, "row=5: 'int' object is not iterable"),
        ({"row": [1] * 17}, "more than 16 dimensions"),
        ({"row": (2, 0.5)}, "row=0.5 must be a whole number"),
        ({"dtype": "float32"}, "no torch.dtype"),
        ({"dtype": float}, "no torch.dtype"),
        ({"dtype": torch.quint8}, "no torch.dtype of plain numbers"),
        ({"layout": "sliced"}, "'layered', 'fused', 'auto'"),
        ({"layout": ["fused"]}, "layout=.* is not one of"),
        ({"guard": "strikt"}, "guard='strikt' is not one of 'zero', 'strict'"),
        ({"memory_budget": 0}, "memory_budget=0 must be more than 0 bytes"),
        ({"page_size": "x"}, "page_size='x' must be a whole number"),
        ({"pool": 5}, "pool=5 is no vattn.PagePool"),
        ({"block_size": 10, "layout": "layered"}, r"multiple of 16, or layout='fused'"),
        ({"block_size": 10, "layout": "fused"}, r"multiple of 8$"),
        ({"page_size": 1000}, "page_size=1000 is not possible"),
    ],
)
def test_what_is_not_possible_says_what_is(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(vattn.ConfigError, match=match):
        make(**changes)


def test_a_pool_says_what_is_possible() -> None:
    for changes, match in (
        ({"guard": "strikt"}, "guard='strikt' is not one of 'zero', 'strict'"),
        ({"guard": None}, "guard=None is not one of"),
        ({"page_size": "x"}, "page_size='x' must be a whole number"),
        ({"page_size": 4096.0}, "page_size=4096.0 must be a whole number"),
        ({"zero_on_free": "no"}, "zero_on_free='no' is not one of True, False"),
    ):
        with pytest.raises(vattn.ConfigError, match=match):
            vattn.PagePool("1MiB", device=DEVICE, **changes)  # type: ignore[arg-type]


@host_only
def test_automatic_choices() -> None:
    with make(page_size="auto", block_size=64) as windows:
        assert windows.stats().page_size == 16384
    with make(page_size="auto", block_size=8) as windows:
        assert "fused" in repr(windows)
    many = {"num_blocks": 40_000, "num_layers": 1, "num_windows": 64, "max_context_len": 65536}
    with pytest.raises(vattn.ConfigError, match=r"80000 mappings.*larger or fewer blocks.*vm.max_map_count=160000"):
        make(**many, memory_budget="1MiB")


def test_the_budget_is_a_limit(windows: BlockWindows) -> None:
    layout = "fused" if "fused" in repr(windows) else "layered"
    with make(layout=layout, memory_budget=3 * 2 * PAGE) as small:
        assert small.back([1, 2]) == 2
        assert small.back([1, 2, 3]) == 1
        with pytest.raises(vattn.OutOfPages, match=r"2 blocks need 4 pages.*4 more than the budget of 6") as error:
            small.back([3, 4, 5])
        assert (error.value.missing_pages, error.value.missing_bytes) == (4, 4 * PAGE)
        assert small.stats().backed_blocks == 3
        small.trim([1])
        assert small.back([4, 5]) == 2
        small.check()


def test_a_pool_is_shared_with_a_cache() -> None:
    pool = vattn.PagePool(24 * PAGE, device=DEVICE, page_size=PAGE)
    config = vattn.KVConfig(
        num_layers=1, num_kv_heads=1, head_dim=32, dtype="float32", max_batch_size=2, max_context_len=640, device=DEVICE
    )
    plain = {name: value for name, value in OPTIONS.items() if name != "page_size"}
    with vattn.KVCache(config, pool=pool) as cache, BlockWindows(**plain, pool=pool) as windows:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 300})
        cache.free_reqid(reqid)
        cache.step({})  # its kernels are launched, so its parked pages can be had
        write(windows, range(12))
        (window,) = windows.show([[4, 5]])
        assert seen(windows, window, 2) == [4, 5]
        with pytest.raises(vattn.OutOfPages):
            windows.back([20])
        with pytest.raises(vattn.OutOfPages):
            cache.step({(reqid := cache.alloc_reqid()): 300})
        windows.trim([4, 5])
        cache.step({reqid: 300})
        assert cache.stats().other_pages == 4
        windows.check()
        cache.check()
        with pytest.raises(vattn.ConfigError, match="a pool has its own"):
            make(pool=pool, memory_budget="1MiB")
    pool.close()


def test_a_closed_one_says_so() -> None:
    windows = make()
    windows.back([0])
    windows.close()
    windows.close()
    assert "closed" in repr(windows)
    for call in (lambda: windows.back([0]), lambda: windows.show([[0]]), lambda: windows.home(0), windows.stats):
        with pytest.raises(vattn.CacheClosed):
            call()


def test_one_that_is_dropped_gives_its_memory_back() -> None:
    windows = make()
    write(windows, [0, 1])
    windows.show([[1, 0]])
    del windows
    gc.collect()  # the fixture of all these tests sees what is left


@host_only
@pytest.mark.parametrize("access", ["shown[0] = 1", "print(shown[40].sum())"])
def test_windows_are_read_only_and_end_where_their_blocks_end(access: str) -> None:
    done = scripts.run(f"""
import torch, vattn
windows = vattn.BlockWindows(num_layers=1, num_blocks=4, block_size=16, row=(64,), dtype=torch.float32, num_windows=1,
                             max_context_len=64, page_size=4096, guard="strict")
windows.back([0, 1])
shown = windows.window(0)[windows.show([[0, 1]])[0]]
assert not shown[:32].any()
print("so far", flush=True)
{access}
""")
    assert (done.returncode, done.stdout) == (-11, "so far\n")


class Scene:
    def __init__(self, layout: str, table: dict[str, int] | None = None) -> None:
        self.pool = vattn.PagePool(64 * PAGE, device=DEVICE, page_size=PAGE, table=table)
        plain = {name: value for name, value in OPTIONS.items() if name != "page_size"}
        self.windows = BlockWindows(**plain, pool=self.pool, layout=layout)  # type: ignore[arg-type]
        write(self.windows, range(10))
        self.rows = [[0, 1, 2], [3, 4], [5, 6]]
        self.windows.show(self.rows)

    def close(self) -> None:
        self.windows.close()
        self.pool.close()


CALLS: dict[str, Any] = {
    "back": lambda s: s.windows.back([3, 15, 16]),
    "grow": lambda s: s.windows.show([[0, 1, 2, 7], [3, 4, 8], [5, 6]]),
    "replace": lambda s: s.windows.show([[5, 6], [0, 9], [3, 4], [7]]),
    "trim": lambda s: s.windows.trim([0, 1, 3, 5, 6]),
}


def consistent(scene: Scene) -> None:
    """Whatever was interrupted or failed: the books are right, and every block is shown where it is asked for."""
    scene.windows.check()
    write(scene.windows, range(10))
    rows = [[6, 1, 0], [3, 4, 9], [2]]
    for window, row in zip(scene.windows.show(rows), rows, strict=True):
        assert seen(scene.windows, window, len(row)) == row
    scene.windows.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_every_driver_call_fails_once(name: str, layout: str) -> None:
    nth = 0
    while True:
        nth += 1
        table = FaultyTable()
        scene = Scene(layout, table.addresses)
        before = scene.windows.stats()
        table.fail(nth)
        try:
            CALLS[name](scene)
        except vattn.DriverError:
            after = scene.windows.stats()
            if name != "trim":  # which may have unmapped, and failed to give back
                assert (after.backed_blocks, after.shown_blocks) == (before.backed_blocks, before.shown_blocks)
        failed = table.failed
        table.heal()
        with table.transparent():
            consistent(scene)
        scene.close()
        if failed is None:
            break
    assert nth > 2


@host_only
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_anywhere_has_happened_or_not(name: str) -> None:
    scene = Scene("layered")
    total = entries(lambda: CALLS[name](scene))
    scene.close()
    for entry in range(total):
        scene = Scene("layered")
        interrupted(lambda scene=scene: CALLS[name](scene), entry)  # type: ignore[misc]
        consistent(scene)
        scene.close()


@host_only
@pytest.mark.parametrize("name", ["check", "stats", "close"])
def test_what_only_looks_and_what_closes_may_be_interrupted_anywhere(name: str) -> None:
    scene = Scene("layered")
    total = entries(lambda: getattr(scene.windows, name)())
    scene.close()
    assert total > 2
    for entry in range(total):
        scene = Scene("layered")
        interrupted(getattr(scene.windows, name), entry)
        if name != "close":
            consistent(scene)
        scene.close()


def test_check_changes_nothing(windows: BlockWindows) -> None:
    """What is wrong is wrong the second time too."""
    write(windows, range(4))
    windows.show([[0, 1], [2, 3]])
    books = windows._shown
    books._first[3] = {0: None}
    for _ in range(2):
        with pytest.raises(AssertionError, match="filed under another block"):
            windows.check()
    books.refresh()
    books.backed_blocks += 1
    for _ in range(2):
        with pytest.raises(AssertionError, match="backed blocks are miscounted"):
            windows.check()
    books.refresh()


@host_only
def test_idle_windows_give_way_when_the_table_of_mappings_is_full() -> None:
    table = FaultyTable()
    scene = Scene("layered", table.addresses)
    scene.windows.show([[9]])
    table.fail(1, code=2, name="cuMemMap")
    (window,) = scene.windows.show([[9, 8]])
    assert table.failed == "cuMemMap"
    assert seen(scene.windows, window, 2) == [9, 8]
    assert scene.windows.stats().shown_blocks == 2
    table.fail_always("cuMemMap", code=2)
    with pytest.raises(vattn.MappingLimit):
        scene.windows.show([[9, 8, 7]])
    table.heal()
    consistent(scene)
    scene.close()


@host_only
def test_idle_windows_give_way_before_what_caches_on_the_pool_keep() -> None:
    table = FaultyTable()
    scene = Scene("layered", table.addresses)
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "dtype": "float32", "max_context_len": 64}
    cache = vattn.KVCache(vattn.KVConfig(**shape, max_batch_size=2, overlap=False), pool=scene.pool)  # type: ignore[arg-type]
    cache.step({cache.alloc_reqid(): 64})
    cache.free_reqid(0)
    cache.step({})
    parked = cache.stats().parked_pages
    assert parked
    scene.windows.show([[9, 8]])
    table.fail(1, code=2, name="cuMemMap")
    scene.windows.show([[7, 6]])
    assert table.failed == "cuMemMap"
    assert cache.stats().parked_pages == parked
    cache.close()
    scene.close()


@host_only
def test_blocks_get_the_mappings_of_idle_windows() -> None:
    table = FaultyTable()
    scene = Scene("layered", table.addresses)
    window = scene.windows.show([[9, 8]])[0]
    new = next(block for block in range(OPTIONS["num_blocks"]) if block not in scene.windows.backed())
    table.fail_always("cuMemMap", code=2)
    with pytest.raises(vattn.MappingLimit):
        scene.windows.back([new])
    table.heal()
    assert scene.windows.shown(window) == [9, 8]
    scene.windows.show([])
    table.fail(1, code=2, name="cuMemMap")
    assert scene.windows.back([new]) == 1
    assert scene.windows.shown(window) == []
    consistent(scene)
    scene.close()


@host_only
def test_idle_windows_that_come_into_use_do_not_give_way() -> None:
    """Neither one that already shows its whole row, nor one that shows the start of it."""
    table = FaultyTable()
    scene = Scene("layered", table.addresses)
    scene.windows.show([[9, 8], [7]], windows=[0, 1])
    for window in (2, 3):
        scene.windows.show([[6]], windows=[window])
    table.fail(1, code=2, name="cuMemMap")
    scene.windows.show([[9, 8], [7, 6]], windows=[0, 1])
    assert table.failed == "cuMemMap"
    assert [scene.windows.shown(window) for window in range(4)] == [[9, 8], [7, 6], [], [6]]
    consistent(scene)
    scene.close()


def test_what_is_backed_and_shown_can_be_asked(windows: BlockWindows) -> None:
    write(windows, [7, 2])
    windows.show([[7, 2], [2]], windows=[3, 1])
    assert windows.backed() == {2, 7}
    assert [windows.shown(window) for window in range(4)] == [[], [2], [], [7, 2]]
    for window in (-1, 4, "0"):
        with pytest.raises(vattn.InvalidSlot):
            windows.shown(window)  # type: ignore[arg-type]
