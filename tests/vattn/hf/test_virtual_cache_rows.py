"""What a VirtualCache holds after any series of updates, crops and moves of rows, against tensors that are copied."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, MistralConfig

import vattn
from tests.support import scripts
from tests.support.effort import effort
from tests.support.interruption import entries, interrupted
from vattn.hf.batch_rows import BatchRows

pytestmark = pytest.mark.slow(1)

HEADS = 2
LIMIT = 200
# 16 tokens of 64 float32 per page: most moves of rows cross blocks. Strict: whatever is read must be mapped.
OPTIONS: dict[str, Any] = {"max_context_len": LIMIT, "memory_budget": "64MiB", "page_size": 4096, "guard": "strict"}


def new_rows(batch: int, count: int, dim: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch, HEADS, count, dim, generator=generator)


class Naive:
    """K and V per layer as plain tensors `[batch, heads, tokens, dim]`."""

    def __init__(self, dims: list[tuple[int, int]], windows: list[int | None]) -> None:
        self.dims, self.windows = dims, windows
        self.held: list[list[Tensor]] = []

    @property
    def length(self) -> int:
        return self.held[0][0].shape[2] if self.held else 0

    @property
    def batch(self) -> int:
        return self.held[0][0].shape[0]

    def update(self, new: list[list[Tensor]]) -> None:
        self.held = (
            [
                [torch.cat(pair, dim=2) for pair in zip(*layer, strict=True)]
                for layer in zip(self.held, new, strict=True)
            ]
            if self.held
            else new
        )

    def each(self, change: Any) -> None:
        self.held = [[change(tensor) for tensor in layer] for layer in self.held]


def shown(cache: vattn.VirtualCache, layer: int) -> tuple[Tensor, Tensor]:
    """What a layer's next query sees, without an end to what rows share, as `keys` and `values` would."""
    length = cache.get_seq_length()
    view = cache._storage.views[layer]
    assert view is not None
    return view.read(cache.layers[layer]._first_seen(length), length)


def compare(cache: vattn.VirtualCache, naive: Naive, *, taken: bool = True) -> None:
    for index, (layer, held, window) in enumerate(zip(cache.layers, naive.held, naive.windows, strict=True)):
        assert layer.get_seq_length() == naive.length
        first = 0 if window is None else max(0, naive.length - window + 1)
        for got, want in zip((layer.keys, layer.values) if taken else shown(cache, index), held, strict=True):
            assert torch.equal(got, want[:, :, first:])
    cache.check()


@pytest.mark.parametrize("reserved", [None, 12])
@pytest.mark.parametrize("layers", ["alike", "windows", "different"])
@pytest.mark.parametrize("seed", range(effort(1, 4)))
def test_random_operations(seed: int, layers: str, reserved: int | None) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    windows: list[int | None] = [None] * 3 if layers != "windows" else [20, None, 20]
    dims = [(64, 64)] * 3 if layers != "different" else [(64, 64), (64, 32), (32, 32)]
    config = LlamaConfig(num_hidden_layers=3)
    if layers == "windows":
        config = MistralConfig(
            num_hidden_layers=3,
            sliding_window=20,
            layer_types=["sliding_attention" if window else "full_attention" for window in windows],
        )
    cache = vattn.VirtualCache(config, max_batch_size=reserved, **OPTIONS)
    naive = Naive(dims, windows)
    forked = 0
    last, moved = 0, False  # tokens of the last forward pass that are left; rows changed since
    for _ in range(80):
        action = rng.choice(
            ["update"] * 6 + ["reorder"] * 4 + ["repeat"] * 2 + ["crop", "select", "reset", "copy", "trim", "write"]
        )
        if action == "update" or not naive.length:
            batch = naive.batch if naive.length else rng.randint(1, 5)
            count = rng.choice([1, 1, 2, 17, 40])
            if naive.length + count > LIMIT:
                continue
            new = [[new_rows(batch, count, dim, generator) for dim in pair] for pair in dims]
            seen = [cache.update(key, value, index) for index, (key, value) in enumerate(new)]
            naive.update(new)
            last, moved = count, False
            for got, held, window in zip(seen, naive.held, windows, strict=True):
                first = 0 if window is None else max(0, naive.length - count - window + 1)
                assert all(torch.equal(a, b[:, :, first:]) for a, b in zip(got, held, strict=True))
        elif action == "crop":
            gone = rng.randint(0, min(30, naive.length))
            kept = naive.length - gone
            try:
                cache.crop(-gone if rng.random() < 0.5 or not kept else kept)
            except vattn.InvalidLength:
                assert layers == "windows", "only windows are given back"
                assert gone > last or moved, "the last forward pass cannot be cropped"
                compare(cache, naive, taken=False)
                continue
            last -= gone
            naive.each(lambda tensor, kept=kept: tensor[:, :, :kept])
            if not kept:
                naive.held = []
        elif action == "reorder":
            rows = torch.tensor([rng.randrange(naive.batch) for _ in range(naive.batch)])
            cache.reorder_cache(rows)
            naive.each(lambda tensor, rows=rows: tensor[rows])
            forked = max(forked, cache.stats().shared_pages)
            moved = True
        elif action == "select":
            kept_rows = torch.tensor(sorted(rng.sample(range(naive.batch), rng.randint(1, naive.batch))))
            mask = torch.zeros(naive.batch, dtype=torch.bool).index_fill_(0, kept_rows, True)
            cache.batch_select_indices(mask if rng.random() < 0.5 else kept_rows)
            naive.each(lambda tensor, rows=kept_rows: tensor[rows])
        elif action == "repeat" and naive.batch <= 4:
            cache.batch_repeat_interleave(3)
            moved = True
            naive.each(lambda tensor: tensor.repeat_interleave(3, dim=0))
        elif action == "reset":
            cache.reset()
            naive.held = []
        elif action == "copy":
            other = copy.deepcopy(cache)
            moved = True
            cache.close()
            cache = other
        elif action == "trim":
            cache.trim()
        elif action == "write":
            index, side, row = rng.randrange(3), rng.randrange(2), rng.randrange(naive.batch)
            tensor = (cache.layers[index].keys, cache.layers[index].values)[side]
            naive.held[index][side][row, :, -tensor.shape[2] :].neg_()
            tensor[row].neg_()
            del tensor
        if naive.length:
            compare(cache, naive, taken=rng.random() < 0.2)
        else:
            assert cache.get_seq_length() == 0
    assert forked, "no row was ever a fork of another"
    cache.close()


def filled(batch: int, tokens: int, **options: Any) -> tuple[vattn.VirtualCache, Tensor]:
    cache = vattn.VirtualCache(LlamaConfig(num_hidden_layers=1), **OPTIONS | options)
    keys = torch.randn(batch, HEADS, tokens, 64)
    cache.update(keys, keys, 0)
    return cache, keys


def test_beams_share_the_pages_of_what_they_have_in_common() -> None:
    cache, keys = filled(4, 100)
    alone = cache.stats()
    cache.reorder_cache(torch.tensor([2, 2, 2, 2]))
    shared = cache.stats()
    assert shared.shared_pages == 6 * 2 * HEADS  # whole blocks of 16 tokens, K and V
    assert shared.owned_pages < alone.owned_pages / 2
    cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    assert cache.stats().shared_pages == shared.shared_pages
    assert torch.equal(cache.layers[0].keys[:, :, :100], keys[[2, 2, 2, 2]])
    cache.close()


@pytest.mark.parametrize("order", [[1, 0], [1, 2, 0], [1, 0, 3, 2], [3, 0, 0, 1]])
@pytest.mark.parametrize("tokens", [5, 100])
def test_rows_that_change_places(order: list[int], tokens: int) -> None:
    cache, keys = filled(len(order), tokens)
    for _ in range(2):
        cache.reorder_cache(torch.tensor(order))
        keys = keys[order]
        assert torch.equal(cache.layers[0].keys, keys)
        cache.check()
    cache.close()


def test_short_differences_are_copied_not_mapped() -> None:
    cache, keys = filled(3, 100)
    cache.reorder_cache(torch.tensor([0, 0, 0]))
    for _ in range(5):
        cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    cache.check()  # waits for what is mapped ahead
    before = cache.stats().calls["cuMemMap"].count
    cache.reorder_cache(torch.tensor([1, 2, 0]))
    assert cache.stats().calls["cuMemMap"].count == before
    want = torch.cat([keys[[0, 0, 0]], keys[[1, 2, 0]][:, :, :1].expand(-1, -1, 5, -1)], dim=2)
    assert torch.equal(cache.layers[0].keys, want)
    cache.close()


def test_a_move_that_runs_out_of_pages_leaves_an_empty_cache() -> None:
    """30 tokens in two rows are 16 pages, and a circle needs 2 x HEADS more for a copy of the last block."""
    cache, keys = filled(2, 30, memory_budget=16 * 4096)
    with pytest.raises(vattn.OutOfPages):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.get_seq_length() == 0
    cache.check()
    cache.update(keys, keys, 0)
    assert torch.equal(cache.layers[0].keys, keys)
    cache.close()


# What is written to keys and values

MOVES: dict[str, tuple[str, list[int]]] = {
    "repeated": ("batch_repeat_interleave(2)", [0, 0, 1, 1]),
    "replaced": ("reorder_cache(torch.tensor([0, 0]))", [0, 0]),
    "swapped": ("reorder_cache(torch.tensor([1, 0]))", [1, 0]),
    "selected": ("batch_select_indices(torch.tensor([1, 1, 0]))", [1, 1, 0]),
}
WRITES: dict[str, tuple[str, str]] = {
    "assigned": ("layer.keys = new", "keys = new"),
    "one row": ("layer.keys[0] = 7", "keys[0] = 7"),
    "in place": ("layer.keys.mul_(2)", "keys.mul_(2)"),
    "augmented": ("layer.keys *= 2", "keys *= 2"),
    "later": ("mine = layer.keys; cache.crop(-1); cache.update(last, last, 0); mine.mul_(2)", ""),
}
SCRIPT = """
import torch, vattn
from transformers import LlamaConfig

torch.manual_seed(0)
cache = vattn.VirtualCache(
    LlamaConfig(num_hidden_layers=1), max_context_len=200, max_batch_size=4, memory_budget="8MiB", page_size=4096
)
keys = torch.randn(2, 2, 100, 64)
cache.update(keys, -keys, 0)
cache.{move}
keys = keys[{rows}]
assert cache.stats().shared_pages or {swapped}
new, last = torch.randn_like(keys), keys[:, :, -1:]
layer = cache.layers[0]
{write}
{same}
assert torch.equal(layer.keys, keys)
cache.check()
cache.reorder_cache(torch.arange(len(keys)).flip(0))
keys = keys.flip(0)
assert torch.equal(layer.keys, keys)
cache.close()
"""


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("move", MOVES)
def test_rows_that_share_pages_are_written_alone(move: str, write: str) -> None:
    how, rows = MOVES[move]
    code, same = WRITES[write]
    script = SCRIPT.format(move=how, rows=rows, write=code, same=same, swapped=move == "swapped")
    done = scripts.run(script)
    assert done.returncode == 0, done.stderr or done.returncode


@pytest.mark.parametrize("tokens", [5, 100])
@pytest.mark.parametrize("assigned", [True, False])
def test_what_was_written_is_not_taken_for_what_rows_shared(tokens: int, assigned: bool) -> None:
    """Rows that were equal are not, once one was written: a row that replaces another is copied."""
    cache, _ = filled(2, tokens)
    cache.reorder_cache(torch.tensor([0, 0]))
    layer = cache.layers[0]
    if assigned:
        layer.keys = torch.cat([layer.keys[:1], -layer.keys[1:]])
    else:
        layer.keys[1].neg_()
    keys = layer.keys.clone()
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.keys, keys[[1, 1]])
    cache.close()


def test_a_swap_can_be_read_without_a_page_left() -> None:
    """Rows that changed places share nothing, but are mapped read-only."""
    cache, keys = filled(2, 100, memory_budget="8MiB", max_batch_size=2)
    pages = cache.stats().owned_pages
    cache.close()
    cache, keys = filled(2, 100, memory_budget=(pages + 2 * 2 * HEADS) * 4096, overlap=False, max_batch_size=2)
    cache.reorder_cache(torch.tensor([1, 0]))
    blocker = vattn.VirtualCache(LlamaConfig(num_hidden_layers=1), max_context_len=200, pool=cache._storage._pool)
    blocker.update(keys[:1, :, :16], keys[:1, :, :16], 0)
    assert cache.stats().free_pages == 0
    cache.layers[0].keys.add_(1)
    assert torch.equal(cache.layers[0].keys, keys[[1, 0]] + 1)
    assert torch.equal(cache.layers[0].values, keys[[1, 0]])
    blocker.close()
    cache.close()


def test_keys_that_the_budget_does_not_hold_apart() -> None:
    cache, keys = filled(1, 100, memory_budget=60 * 4096, max_batch_size=4)
    cache.batch_repeat_interleave(4)
    before = cache.stats()
    keys = keys.repeat_interleave(4, dim=0)
    for attempt in (lambda: cache.layers[0].keys, lambda: setattr(cache.layers[0], "values", keys)):
        with pytest.raises(vattn.OutOfPages) as caught:
            attempt()
        assert "pages of their own" in caught.value.__notes__[0]
        assert all(torch.equal(side, keys) for side in shown(cache, 0))
        cache.check()
    assert cache.stats().shared_pages <= before.shared_pages
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert torch.equal(cache.layers[0].keys, keys[:2])
    cache.close()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_what_only_reads_leaves_rows_shared(kv_cache_dtype: str) -> None:
    cache, keys = filled(2, 1500, kv_cache_dtype=kv_cache_dtype, max_batch_size=4, max_context_len=2000)
    cache.batch_repeat_interleave(2)
    shared = cache.stats().shared_pages
    assert shared
    last = keys[[0, 0, 1, 1]][:, :, :1]
    for _ in range(3):
        cache.update(last, last, 0)
    for copied in (copy.deepcopy(cache), copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        copied.close()
    if kv_cache_dtype == "int8":  # a copy
        assert cache.layers[0].keys.shape[2] == 1503
    assert cache.stats().shared_pages == shared
    cache.close()


def test_codes_of_rows_that_share_pages_are_assigned_alone() -> None:
    cache, _ = filled(1, 1500, kv_cache_dtype="int8", max_batch_size=2, max_context_len=2000)
    cache.batch_repeat_interleave(2)
    assert cache.stats().shared_pages
    want = cache.layers[0].keys
    want[1].neg_()
    cache.layers[0].keys = want
    torch.testing.assert_close(cache.layers[0].keys, want)
    cache.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(cache.layers[0].keys, want.flip(0))
    cache.close()


# What is refused


def mixed(**options: Any) -> vattn.VirtualCache:
    """A full layer, then one with a window of 20."""
    kinds = ["full_attention", "sliding_attention"]
    config = MistralConfig(num_hidden_layers=2, sliding_window=20, layer_types=kinds)
    return vattn.VirtualCache(config, **OPTIONS | options)


def windowed(*tokens: int, **options: Any) -> vattn.VirtualCache:
    """Three layers with a window of 20, after forward passes of so many tokens."""
    config = MistralConfig(num_hidden_layers=3, num_attention_heads=HEADS, sliding_window=20)
    cache = vattn.VirtualCache(config, layout="layer", **OPTIONS | options)
    with torch.no_grad():
        for count in tokens:
            for layer in range(3):
                cache.update(*[torch.ones(1, HEADS, count, 64)] * 2, layer)
    return cache


@pytest.mark.parametrize("rows", [1, 4])
def test_copies_of_windows_take_memory_for_what_is_copied(rows: int) -> None:
    """And not for all tokens before it, until the next step gives it back."""
    with windowed(170, 1, max_batch_size=rows, overlap=False) as cache:
        pages = cache.stats().owned_pages
        with pickle.loads(pickle.dumps(cache)) as copied:
            assert copied.stats().peak_mapped_pages == pages
            assert all(layer.keys.eq(1).all() for layer in copied.layers)
            copied.check()
        keys = cache.layers[0].keys if rows == 1 else None  # moves to another memory, or not
        for count in (rows, 1, rows):
            cache.batch_select_indices(torch.zeros(count, dtype=torch.long))
            cache.trim()
            assert cache.stats().owned_pages == count * pages
            assert all(layer.keys.eq(1).all() for layer in cache.layers)
        del keys
        cache.check()


def test_a_layer_with_a_window_is_not_cropped_to_what_was_given_back() -> None:
    """Nor are others that are longer, if that gives back what it shows."""
    with windowed(40, 40, 110) as cache:
        with pytest.raises(vattn.InvalidLength, match="layer 0 cannot hold 60 tokens while another holds 190"):
            cache.layers[0].crop(60)
        cache.layers[0].crop(90)
        cache.layers[1].crop(180)
        with pytest.raises(vattn.InvalidLength, match="layer 0 cannot hold 90 tokens while another holds 180"):
            cache.layers[2].crop(180)
        assert [layer.get_seq_length() for layer in cache.layers] == [90, 180, 190]
        assert all(layer.keys.eq(1).all() for layer in cache.layers)
        cache.crop(90)
        assert all(layer.keys.eq(1).all() for layer in cache.layers)
        cache.check()


def test_a_reset_layer_does_not_keep_others_from_moving() -> None:
    """What is behind the window is given back, whichever layers are empty."""
    with windowed(40, 40, 110) as cache:
        cache.layers[0].reset()
        keys = cache.layers[1].keys
        cache.layers[1].reset()
        assert all(each.eq(1).all() for each in (keys, cache.layers[2].keys))


def test_a_crop_that_is_refused_leaves_beams_as_they_were() -> None:
    """The full layer goes back into what its rows share, and forth again."""
    with mixed() as cache:
        keys = torch.randn(2, HEADS, 190, 64)
        for first, end in ((0, 80), (80, 120), (120, 180), (180, 190)):
            for layer in range(2):
                cache.update(keys[:, :, first:end], keys[:, :, first:end], layer)
            if end == 120:
                cache.reorder_cache(torch.tensor([0, 0]))
        keys[1, :, :120] = keys[0, :, :120]
        with pytest.raises(vattn.InvalidLength, match="memory was given back"):
            cache.crop(-90)
        assert torch.equal(shown(cache, 0)[0], keys)
        assert torch.equal(shown(cache, 1)[0], keys[:, :, -19:])
        cache.update(keys[:, :, :1], keys[:, :, :1], 0)
        assert torch.equal(shown(cache, 0)[0], torch.cat([keys, keys[:, :, :1]], dim=2))
        cache.check()


def test_tokens_that_a_refused_update_gave_back_are_not_copied() -> None:
    """The first layer's cache grows, and gives back what is behind its window, before the second one's is refused."""
    config = MistralConfig(num_hidden_layers=2, sliding_window=20)
    keys = [torch.randn(1, HEADS, 100, dim) for dim in (64, 16)]
    refused = 0
    for pages in range(16, 80):
        pool = vattn.PagePool(pages * 4096, page_size=4096, guard="strict")
        options: dict[str, Any] = {"max_context_len": LIMIT, "max_batch_size": 2, "deferred_reclamation": False}
        with vattn.VirtualCache(config, pool=pool, **options) as cache:
            try:
                for layer, each in enumerate(keys):
                    cache.update(each, each, layer)
            except vattn.OutOfPages:
                continue
            with contextlib.suppress(vattn.OutOfPages):
                cache.update(*[torch.ones(1, HEADS, 99, 64)] * 2, 0)
                continue
            refused += 1
            assert cache.get_seq_length() == 100
            saved = pickle.dumps(cache)
        with pickle.loads(saved) as other:
            for layer, each in enumerate(keys):
                assert torch.equal(other.layers[layer].keys, each[:, :, -19:])
    assert refused


def test_a_copy_after_a_refused_update_goes_back_as_far_as_before() -> None:
    """The full layer's cache grows before the other one is refused, and is taken back."""
    keys = torch.randn(1, HEADS, 62, 64)
    refused = 0
    for pages in range(16, 200, 2):
        pool = vattn.PagePool(pages * 4096, page_size=4096, guard="strict")
        with mixed(max_batch_size=1, pool=pool, deferred_reclamation=False) as cache:
            try:
                for first, end in ((0, 60), (60, 62)):
                    for layer in range(2):
                        cache.update(*[keys[:, :, first:end]] * 2, layer)
            except vattn.OutOfPages:
                continue
            with contextlib.suppress(vattn.OutOfPages):
                cache.update(*[torch.ones(1, HEADS, 60, 64)] * 2, 0)
                continue
            refused += 1
            with pickle.loads(pickle.dumps(cache)) as other:
                for each in (cache, other):
                    each.crop(-2)
                    assert torch.equal(shown(each, 0)[0], keys[:, :, :60])
                    assert torch.equal(shown(each, 1)[0], keys[:, :, 41:60])
    assert refused


def _refused(cache: vattn.VirtualCache) -> None:
    with contextlib.suppress(vattn.InvalidLength):
        cache.crop(-90)


CALLS: dict[str, Callable[[vattn.VirtualCache], object]] = {
    "crop": lambda cache: cache.crop(-5),
    "refused crop": _refused,
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reset": lambda cache: cache.reset(),
    "keys": lambda cache: cache.layers[0].keys,
    "assignment": lambda cache: setattr(cache.layers[1], "keys", torch.zeros(2, HEADS, 19, 64)),
    "trim": lambda cache: cache.trim(),
    "update": lambda cache: [cache.update(*[torch.zeros(2, HEADS, 3, 64)] * 2, layer) for layer in range(2)],
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_interrupted_has_happened_or_not_or_leaves_no_token(call: str, kept: bool) -> None:
    """Of rows that share pages, and of windows from which tokens have left."""

    def scene() -> tuple[vattn.VirtualCache, Any]:
        cache = mixed(max_batch_size=4 if call != "repeat" else None)
        keys = torch.randn(2, HEADS, 190, 64, generator=torch.Generator().manual_seed(1))
        for first, end in ((0, 80), (80, 120), (120, 180), (180, 190)):
            for layer in range(2):
                cache.update(keys[:, :, first:end], keys[:, :, first:end], layer)
            if end == 120 and not kept:
                cache.reorder_cache(torch.tensor([0, 0]))
        return cache, cache.layers[0].values if kept else None

    def state(cache: vattn.VirtualCache) -> list[Tensor]:
        assert len({layer.get_seq_length() for layer in cache.layers}) == 1
        return (
            [tensor.clone() for layer in range(2) for tensor in shown(cache, layer)] if cache.get_seq_length() else []
        )

    cache, taken = scene()
    before = state(cache)
    CALLS[call](cache)
    after = state(cache)
    cache.close()
    wanted = [before, after, *([[]] if call in ("reorder", "repeat") else [])]
    cache, taken = scene()
    total = entries(lambda: CALLS[call](cache))
    cache.close()
    for entry in range(0, total, max(1, total // effort(8, 40))):
        cache, taken = scene()
        interrupted(lambda: CALLS[call](cache), entry)  # noqa: B023
        lengths = {layer.get_seq_length() for layer in cache.layers}
        if len(lengths) > 1:
            assert call == "update"
            cache.crop(min(lengths))
        found = state(cache)
        assert any(len(found) == len(each) and all(map(torch.equal, found, each)) for each in wanted), entry
        cache.check()
        if taken is not None:
            assert torch.equal(taken, before[1])
        rows = cache._storage.count
        for layer in range(2):
            cache.update(*[torch.ones(rows, HEADS, 2, 64)] * 2, layer)
        assert all(bool((shown(cache, layer)[0][:, :, -2:] == 1).all()) for layer in range(2))
        cache.check()
        del taken
        cache.close()


def test_rows_move_whole_after_a_crop_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows only, an interrupt may leave the memory shorter than what the layers hold."""
    config = MistralConfig(num_hidden_layers=1, num_attention_heads=HEADS, sliding_window=40)
    with vattn.VirtualCache(config, max_batch_size=4, **OPTIONS) as cache:
        keys = torch.randn(2, HEADS, 100, 64)
        for part in (keys[:, :, :60], keys[:, :, 60:]):
            cache.update(part, part, 0)
        true = BatchRows.go_back

        def interrupted_after(rows: BatchRows, length: int) -> None:
            true(rows, length)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(BatchRows, "go_back", interrupted_after)
            cache.crop(-30)
        assert cache.get_seq_length() == 100
        cache.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(cache.layers[0].keys, keys.flip(0)[:, :, -39:])
        cache.check()


@pytest.mark.parametrize("last", range(1, 4))
@pytest.mark.parametrize("call", ["copy", "repeat", "move"])
def test_after_an_interrupted_crop_windows_are_whole(monkeypatch: pytest.MonkeyPatch, call: str, last: int) -> None:
    """The interrupt comes when some of the caches have gone back, and before the rows have noted it."""
    with mixed(max_batch_size=4) as cache:
        keys = torch.randn(2, HEADS, 100, 64)
        for part in (keys[:, :, :60], keys[:, :, 60:]):
            for layer in range(2):
                cache.update(part, part, layer)
        cache.crop(-2)
        true, calls = vattn.KVCache.step, itertools.count(1)

        def interrupted_after(self: vattn.KVCache, lengths: Mapping[int, int]) -> None:
            true(self, lengths)
            if next(calls) == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(vattn.KVCache, "step", interrupted_after)
            cache.crop(-2)
        length = cache.get_seq_length()
        assert length in (96, 98)
        keys = keys[:, :, :length]
        taken = cache.layers[0].keys if call == "move" else None
        with copy.copy(cache) if call == "copy" else contextlib.nullcontext(cache) as other:
            if call != "copy":
                other.batch_repeat_interleave(2)
                keys = keys.repeat_interleave(2, dim=0)
            assert torch.equal(shown(other, 0)[0], keys)
            assert torch.equal(shown(other, 1)[0], keys[:, :, -19:])
            other.check()
        del taken


@pytest.mark.parametrize("call", ["copy", "reorder"])
def test_a_crop_that_is_taken_back_moves_where_windows_begin(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Going back and forth again, windows give back what was before them at the lower length."""
    with mixed(max_batch_size=4) as cache:
        keys = torch.randn(2, HEADS, 190, 64)
        for part in (keys[:, :, :20], keys[:, :, 20:]):
            for layer in range(2):
                cache.update(part, part, layer)
        true, calls = BatchRows._windows, itertools.count(1)

        def interrupted_behind(self: BatchRows) -> Iterator[tuple[vattn.KVCache, int]]:
            yield from true(self)
            if next(calls) == 2:  # they have been asked, and have gone back
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(BatchRows, "_windows", interrupted_behind)
            cache.crop(-10)
        assert cache.get_seq_length() == 190
        assert cache._storage.first_kept(1) == 180 - 19  # to read before it would be a fault
        with copy.copy(cache) if call == "copy" else contextlib.nullcontext(cache) as other:
            if call != "copy":
                other.reorder_cache(torch.tensor([1, 0]))
                keys = keys.flip(0)
            assert torch.equal(shown(other, 0)[0], keys)
            assert torch.equal(shown(other, 1)[0], keys[:, :, -19:])
            other.check()


def test_an_update_follows_an_interrupted_crop_of_a_recorded_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that have gone back cannot go back to where the recording began."""
    config = MistralConfig(num_hidden_layers=1, num_attention_heads=HEADS, sliding_window=2)
    with vattn.VirtualCache(config, max_batch_size=2, **OPTIONS) as cache:
        keys = torch.randn(2, HEADS, 100, 64)
        cache.update(keys[:, :, :20], keys[:, :, :20], 0)
        cache.activate_past_recording()
        cache.crop(18)
        cache.update(keys[:, :, 18:90], keys[:, :, 18:90], 0)
        true = BatchRows.go_back

        def interrupted_after(rows: BatchRows, length: int) -> None:
            true(rows, length)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(BatchRows, "go_back", interrupted_after)
            cache.crop(72)
        assert cache.get_seq_length() == 90
        cache.update(keys[:, :, 90:], keys[:, :, 90:], 0)
        assert torch.equal(shown(cache, 0)[0], keys[:, :, -1:])
        cache.check()


@contextlib.contextmanager
def interrupting(owner: type, method: str, last: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Within it, an interrupt comes when a method has been called so many times."""
    true, calls = getattr(owner, method), itertools.count(1)

    def interrupted_after(*arguments: Any, **keywords: Any) -> Any:
        result = true(*arguments, **keywords)
        if next(calls) == last:
            raise error
        return result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        patch.setattr(owner, method, interrupted_after)
        yield


def test_rows_are_told_apart_after_an_interrupted_crop() -> None:
    """They were alike in the tokens that are gone."""
    config = MistralConfig(num_hidden_layers=1, num_attention_heads=HEADS, sliding_window=40)
    with vattn.VirtualCache(config, max_batch_size=2, **OPTIONS) as cache:
        cache.update(*[torch.randn(1, HEADS, 20, 64)] * 2, 0)
        cache.batch_repeat_interleave(2)
        with interrupting(vattn.KVCache, "step", 1):
            cache.crop(-20)
        keys = torch.randn(2, HEADS, 20, 64)
        cache.update(keys, keys, 0)
        cache.reorder_cache(torch.tensor([0, 0]))
        assert torch.equal(cache.layers[0].keys, keys[[0, 0]])


def test_rows_go_back_after_an_interrupted_reset() -> None:
    """They do not share windows any more."""
    with mixed(max_batch_size=2) as cache:
        for tokens in (60, 40):
            for layer in range(2):
                cache.update(*[torch.randn(2, HEADS, tokens, 64)] * 2, layer)
        cache.reorder_cache(torch.tensor([0, 0]))
        with interrupting(vattn.KVCache, "step", 2):
            cache.reset()
        keys = torch.randn(2, HEADS, 33, 64)
        for layer in range(2):
            cache.update(keys, keys, layer)
        cache.crop(-2)
        for layer, first in enumerate((0, 12)):
            assert torch.equal(cache.layers[layer].keys, keys[:, :, first:31])


@pytest.mark.parametrize("last", range(1, 5))
def test_a_recorded_past_survives_an_interrupted_update(last: int) -> None:
    """Each of two caches goes back to where the recording began, and forth again."""
    config = MistralConfig(num_hidden_layers=2, num_attention_heads=HEADS, sliding_window=20)
    keys = [torch.randn(2, HEADS, 120, dim, generator=torch.Generator().manual_seed(dim)) for dim in (64, 16)]
    with vattn.VirtualCache(config, max_batch_size=2, **OPTIONS) as cache:

        def update(first: int, end: int) -> None:
            for layer, each in enumerate(keys):
                cache.update(*[each[:, :, first:end]] * 2, layer)

        cache.activate_past_recording()
        for first, end in itertools.pairwise((0, 5, 40, 110)):
            update(first, end)
        assert len(cache._storage.open_caches()) == 2
        with interrupting(vattn.KVCache, "step", last):
            update(110, 115)
        cache.check()
        update(110, 115)
        for end in (115, 50):
            cache.crop(end)
            for layer, each in enumerate(keys):
                assert torch.equal(shown(cache, layer)[0], each[:, :, end - 19 : end])


@pytest.mark.parametrize("last", [1, 2])
def test_a_copy_after_an_interrupted_update_has_what_windows_kept(last: int) -> None:
    """Those of some caches have moved on."""
    config = MistralConfig(num_hidden_layers=2, num_attention_heads=HEADS, sliding_window=9)
    keys = [torch.randn(2, HEADS, 136, dim, generator=torch.Generator().manual_seed(dim)) for dim in (64, 16)]
    with vattn.VirtualCache(config, max_batch_size=2, **OPTIONS) as cache:
        for first, end in itertools.pairwise((0, 70, 103)):
            for layer, each in enumerate(keys):
                cache.update(*[each[:, :, first:end]] * 2, layer)
        with interrupting(vattn.KVCache, "step", last):
            cache.update(*[keys[0][:, :, 103:]] * 2, 0)
        with copy.copy(cache) as other:
            for layer, each in enumerate(keys):
                assert torch.equal(other.layers[layer].keys, each[:, :, 95:103])


@pytest.mark.parametrize("between", ["trim", "refused update"])
def test_memory_follows_an_interrupted_update(between: str) -> None:
    """What the interrupted one has prepared is gone when an update of the same length comes."""
    with mixed(max_batch_size=2) as cache:
        keys = torch.randn(2, HEADS, 101, 64)
        for layer in range(2):
            cache.update(*[keys[:, :, :100]] * 2, layer)
        with interrupting(type(cache._storage), "advance", 1):
            cache.update(*[keys[:, :, 100:]] * 2, 0)
        if between == "trim":
            cache.trim()
        else:
            with interrupting(BatchRows, "step", 1):
                cache.update(*[torch.randn(2, HEADS, 5, 64)] * 2, 0)
        for layer in range(2):
            cache.update(*[keys[:, :, 100:]] * 2, layer)
        assert cache._storage._rows is not None
        assert cache._storage._rows.length == 101
        cache.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(cache.layers[0].keys, keys.flip(0))


def test_an_interrupted_assignment_of_codes_leaves_codes_and_scales_of_one_tensor() -> None:
    with mixed(max_batch_size=2, kv_cache_dtype="int8") as cache:
        keys, others = torch.randn(2, HEADS, 30, 64), 100 * torch.randn(2, HEADS, 30, 64)
        for layer in range(2):
            cache.update(keys, keys, layer)
        with interrupting(torch.Tensor, "copy_", 1):
            cache.layers[0].keys = others
        found = cache.layers[0].keys
        assert any(torch.allclose(found, each, rtol=0, atol=float(each.abs().max()) / 100) for each in (keys, others))


def test_a_copy_after_several_crops_has_what_windows_kept() -> None:
    """With windows only: each crop moves where queries start, and with that what is given back."""
    config = MistralConfig(num_hidden_layers=1, num_attention_heads=HEADS, sliding_window=40)
    with vattn.VirtualCache(config, max_batch_size=2, **OPTIONS) as cache:
        keys = torch.randn(2, HEADS, 150, 64)
        for part in (keys[:, :, :10], keys[:, :, 10:]):
            cache.update(part, part, 0)
        for length in (149, 148, 147):
            cache.crop(-1)
            cache.check()
            with copy.copy(cache) as other:
                assert torch.equal(other.layers[0].keys, keys[:, :, length - 39 : length])
        new = torch.randn(2, HEADS, 3, 64)
        cache.update(new, new, 0)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(cache.layers[0].keys, torch.cat((keys[:, :, :147], new), dim=2).flip(0)[:, :, -39:])


def test_rows_that_are_repeated_go_back_as_far_as_before() -> None:
    with mixed(max_batch_size=4) as cache:
        keys = torch.randn(2, HEADS, 100, 64)
        for part in (keys[:, :, :60], keys[:, :, 60:]):
            for layer in range(2):
                cache.update(part, part, layer)
        cache.batch_repeat_interleave(2)
        cache.crop(-40)
        keys = keys[:, :, :60].repeat_interleave(2, dim=0)
        assert torch.equal(cache.layers[0].keys, keys)
        assert torch.equal(cache.layers[1].keys, keys[:, :, -19:])
        cache.check()


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")  # torch's, of a DynamicCache too
@pytest.mark.parametrize(
    "indices",
    [
        *(torch.tensor([2, 0], dtype=dtype) for dtype in (torch.int64, torch.int32)),
        *(torch.tensor([1, 0, 1], dtype=dtype) for dtype in (torch.bool, torch.uint8)),
        *(np.array([1, 0, 1], dtype=dtype) for dtype in (np.int64, np.int16, np.bool_, np.uint8)),
        [0, -1],
        (2, 2, 1, 0),
        range(1, 3),
        [True, False, True],
        [torch.tensor(0), torch.tensor(2)],
        slice(1),
        slice(None, None, 2),
    ],
    ids=str,
)
def test_rows_are_selected_as_in_a_dynamic_cache(indices: Any) -> None:
    cache, keys = filled(3, 10)
    dynamic = DynamicCache()
    dynamic.update(keys, keys, 0)
    for each in (cache, dynamic):
        each.batch_select_indices(indices)
    assert torch.equal(cache.layers[0].keys, dynamic.layers[0].keys)
    cache.close()


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (lambda cache: cache.crop(-1.5), vattn.InvalidLength, "whole number"),
        (lambda cache: cache.crop(None), vattn.InvalidLength, "whole number"),
        (lambda cache: cache.layers[0].crop("1"), vattn.InvalidLength, "whole number"),
        (lambda cache: cache.batch_repeat_interleave(1.5), vattn.ConfigError, "whole number"),
        (lambda cache: cache.batch_repeat_interleave(-1), vattn.ConfigError, "no rows are left"),
        (lambda cache: cache.reorder_cache(torch.tensor([0.0, 1.0])), vattn.ConfigError, "no row numbers"),
        (lambda cache: cache.reorder_cache(torch.tensor([[0, 1]])), vattn.ConfigError, "no row numbers"),
        (lambda cache: cache.reorder_cache(torch.tensor([True, True])), vattn.ConfigError, "no row numbers"),
        (
            lambda cache: cache.reorder_cache(torch.tensor([1, 0], dtype=torch.uint8)),
            vattn.ConfigError,
            "no row numbers",
        ),
        (lambda cache: cache.reorder_cache("01"), vattn.ConfigError, "no row numbers"),
        (lambda cache: cache.reorder_cache(torch.tensor([2])), vattn.ConfigError, "do not exist"),
        (lambda cache: cache.batch_select_indices(torch.tensor([True])), vattn.ConfigError, "of 2 rows: The shape"),
        (lambda cache: cache.batch_select_indices(torch.tensor([2])), vattn.ConfigError, "of 2 rows: index 2 is out"),
        (lambda cache: cache.batch_select_indices(torch.tensor([[0, 1]])), vattn.ConfigError, "one dimension"),
        (lambda cache: cache.batch_select_indices(1), vattn.ConfigError, "one dimension"),
        (lambda cache: cache.batch_select_indices(None), vattn.ConfigError, "one dimension"),
        (lambda cache: cache.batch_select_indices(torch.tensor([0.0])), vattn.ConfigError, "no indices"),
        (lambda cache: cache.batch_select_indices("01"), vattn.ConfigError, "no indices"),
    ],
)
def test_calls_with_other_than_numbers(call: Callable[[Any], object], error: type[Exception], why: str) -> None:
    cache, keys = filled(2, 10)
    with pytest.raises(error, match=why):
        call(cache)
    assert torch.equal(cache.layers[0].keys, keys)
    cache.close()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        (torch.zeros(2, HEADS, 3, 64), torch.zeros(2, HEADS, 1, 64)),
        (torch.zeros(2, HEADS, 3, 64), torch.zeros(1, HEADS, 3, 64)),
        (torch.zeros(2, HEADS, 3, 64), torch.zeros(2, 1, 3, 64)),
        (torch.zeros(2, HEADS, 64), torch.zeros(2, HEADS, 64)),
        (torch.zeros(2, HEADS, 3, 64), torch.zeros(2, HEADS, 3, 64, dtype=torch.int64)),
    ],
    ids=["tokens", "rows", "heads", "dimensions", "type"],
)
def test_keys_and_values_that_do_not_belong_together(key: Tensor, value: Tensor, first: bool) -> None:
    """Nothing is broadcast."""
    cache, keys = filled(2, 10)
    if first:
        cache.close()
        cache = vattn.VirtualCache(LlamaConfig(num_hidden_layers=1), **OPTIONS)
    with pytest.raises(vattn.ConfigError, match=r"alike but for the head sizes"):
        cache.update(key, value, 0)
    if not first:
        with pytest.raises(vattn.ConfigError, match="holds 2 KV heads"):
            cache.update(keys, keys.double(), 0)
        assert torch.equal(cache.layers[0].keys, keys)
    cache.close()
