"""What a VirtualCache holds after any series of updates, crops and moves of rows, against tensors that are copied."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig

import vattn

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


def compare(cache: vattn.VirtualCache, naive: Naive) -> None:
    for layer, held, window in zip(cache.layers, naive.held, naive.windows, strict=True):
        assert layer.get_seq_length() == naive.length
        first = 0 if window is None else max(0, naive.length - window + 1)
        for got, want in zip((layer.keys, layer.values), held, strict=True):
            assert torch.equal(got, want[:, :, first:])
    cache.check()


@pytest.mark.parametrize("reserved", [None, 12])
@pytest.mark.parametrize("layers", ["alike", "windows", "different"])
@pytest.mark.parametrize("seed", range(4))
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
    for _ in range(60):
        action = rng.choice(["update"] * 4 + ["reorder"] * 3 + ["crop", "select", "repeat", "reset", "copy", "trim"])
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
                compare(cache, naive)
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
        if naive.length:
            compare(cache, naive)
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
