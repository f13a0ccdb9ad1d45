"""The paged backend over windows: what it has beyond the contract of all backends, which test_backends.py checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vattn.attention import AttentionParams, Contiguous, PackedBatch, Span
from vattn.attention.torch_sdpa import TorchSDPA
from vattn.engine.kv.make import find_backend, make_backend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.paged_windows import PagedWindowsKV
from vattn.engine.kv.spec import KVSpec
from vattn.errors import ConfigError, MappingLimit, OutOfPages
from vattn.packed import KVShape

LAYERS, HEADS, DIM, BLOCK, SLOTS, LENGTH = 2, 2, 16, 16, 3, 160
SHAPE = KVShape.uniform(LAYERS, HEADS, DIM, DIM)
BLOCK_BYTES = BLOCK * LAYERS * HEADS * 2 * DIM * 4  # a page in each of two layers
PROMPT = list(range(70))


def make(blocks: int = 24, **changes: Any) -> PagedWindowsKV:
    options = {"windows": True, **changes.pop("kv_options", {})}
    sizes = {"max_num_seqs": SLOTS, "max_model_len": LENGTH, "block_size": BLOCK, "memory_budget": blocks * BLOCK_BYTES}
    backend = make_backend("paged", KVSpec(SHAPE, **{**sizes, **changes}, kv_options=options))
    assert isinstance(backend, PagedWindowsKV)
    return backend


def fill(backend: PagedWindowsKV | PagedKV, slot: int, start: int, end: int, seed: int = 0) -> PackedBatch:
    """Stores random rows, the same for the same token and seed."""
    backend.prepare({slot: end})
    batch = PackedBatch.pack([Span(slot, start, end)])
    for layer in range(LAYERS):
        generator = torch.Generator().manual_seed(seed + layer)
        rows = torch.randn(LENGTH, 2, HEADS, DIM, generator=generator)[start:end]
        backend.write(layer, batch, rows[:, 0], rows[:, 1])
    return batch


def same(backend: PagedWindowsKV, slot: int, length: int, seed: int = 0) -> bool:
    """Whether the slot holds what `fill` stores."""
    for layer in range(LAYERS):
        rows = torch.randn(LENGTH, 2, HEADS, DIM, generator=torch.Generator().manual_seed(seed + layer))[:length]
        for side, got in enumerate(backend.read(layer, slot, length)):
            if not torch.equal(got[0].transpose(0, 1), rows[:, side]):
                return False
    return True


def test_the_option_chooses_the_storage_and_nothing_else() -> None:
    plain = make_backend("paged", KVSpec(SHAPE, max_num_seqs=1, max_model_len=64, kv_options={"windows": False}))
    assert isinstance(plain, PagedKV)
    windows = make()
    assert windows.name == plain.name == "paged"
    assert windows.total() == 24, "a budget is the same number of blocks"
    assert make(kv_options={"num_blocks": 5}).total() == 5
    for value in (1, "yes", None):
        with pytest.raises(ConfigError, match=r"the option windows of kv='paged' is .*; give True or False"):
            find_backend("paged", "auto", {"windows": value})
    with pytest.raises(ConfigError, match=r"memory_budget is .*; give more memory or fewer blocks"):
        make(kv_options={"num_blocks": 25})


def test_a_block_that_is_not_whole_pages_is_refused_with_one_that_is() -> None:
    with pytest.raises(
        ConfigError, match=r"not a whole number of pages of 4\.0 KiB; use a block_size that is a multiple of 8"
    ):
        make(block_size=4)
    assert "fused" in repr(make(block_size=8).windows)
    assert "layered" in repr(make().windows)


def test_kernels_that_read_past_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="the kernel reads 3 rows past a length"):
        make(guard_rows=3)


@pytest.mark.parametrize("block_size", [8, 16], ids=["fused", "layered"])
def test_contiguous_kernels_see_the_blocks_of_a_request_in_order(block_size: int) -> None:
    """Slots that grew in turns, so that their blocks lie scattered; slot i is window i."""
    backend = make(block_size=block_size)
    slots = [backend.allocate(1) for _ in range(SLOTS)]
    for start in range(0, 96, 8):
        for slot in slots:
            fill(backend, slot, start, start + 8, seed=10 * slot)
    assert any(blocks != sorted(range(blocks[0], blocks[0] + len(blocks))) for blocks in backend.block_lists().values())
    stored = backend.stored(1)
    assert isinstance(stored, Contiguous)
    for slot in slots:
        assert same(backend, slot, 96, seed=10 * slot)
        for got, read in zip((stored.key, stored.value), backend.read(1, slot, 96), strict=True):
            assert torch.equal(got[slot, :96], read[0].transpose(0, 1))
    batch = PackedBatch.pack([Span(slot, 95, 96) for slot in slots])
    query = torch.randn(SLOTS, 2 * HEADS, DIM)
    got = TorchSDPA()(query, backend, 0, batch, AttentionParams())
    plain = PagedKV(KVSpec(SHAPE, max_num_seqs=SLOTS, max_model_len=LENGTH), num_blocks=24)
    for slot in slots:
        fill(plain, plain.allocate(1), 0, 96, seed=10 * slot)
    torch.testing.assert_close(got, TorchSDPA()(query, plain, 0, batch, AttentionParams()))
    backend.check()
    backend.close()


def test_memory_follows_use_and_trim_gives_it_back() -> None:
    backend = make()
    assert backend.stats().physical_bytes == 0
    assert backend.stats().reserved_bytes >= 24 * BLOCK_BYTES
    cached, _ = backend.admit(PROMPT)
    running = backend.allocate(1)
    fill(backend, cached, 0, 70)
    fill(backend, running, 0, 40, seed=5)
    backend.commit(cached, PROMPT)
    stats = backend.stats()
    assert stats.physical_bytes == stats.used_bytes == 8 * BLOCK_BYTES
    assert stats.map_calls >= 2 * 8 * LAYERS, "each block at home and in a window"
    backend.free(cached)
    assert backend.stats().physical_bytes == 8 * BLOCK_BYTES, "kept until it is trimmed"
    assert backend.trim() == BLOCK_BYTES, "four blocks are cached, three are used, one was not whole"
    backend.check()
    slot, found = backend.admit(PROMPT)
    assert found == 64
    assert same(backend, slot, 64)
    fill(backend, slot, 64, 70)
    assert same(backend, slot, 70)
    assert same(backend, running, 40, seed=5)
    backend.check()
    backend.free(slot)
    backend.free(running)
    assert backend.evict_prefixes() == 4
    assert backend.trim() == 8 * BLOCK_BYTES
    stats = backend.stats()
    assert (stats.physical_bytes, stats.peak_physical_bytes) == (0, 8 * BLOCK_BYTES)
    backend.check()
    backend.close()
    backend.close()


def fails(*_: object, **__: object) -> None:
    raise OutOfPages("the machine has no memory", missing_pages=1, missing_bytes=4096)


def full(*_: object, **__: object) -> None:
    raise MappingLimit("the table of mappings is full", missing_pages=1, missing_bytes=4096)


@pytest.mark.parametrize(("call", "error"), [("back", fails), ("show", full)])
def test_what_the_machine_refuses_changes_no_request(
    call: str, error: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    first, second = backend.allocate(1), backend.allocate(1)
    fill(backend, first, 0, 40)
    fill(backend, second, 0, 10, seed=5)
    lists, available = backend.block_lists(), backend.available()
    with monkeypatch.context() as patch:
        patch.setattr(backend.windows, call, error)
        with pytest.raises((OutOfPages, MappingLimit)):
            backend.prepare({first: 100, second: 30})
    assert backend.block_lists() == lists
    assert backend.available() == available
    backend.check()
    fill(backend, second, 10, 30, seed=5)
    assert same(backend, first, 40)
    assert same(backend, second, 30, seed=5)
    backend.check()
    backend.close()


def test_a_fork_whose_copy_has_no_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    slot = backend.allocate(1)
    fill(backend, slot, 0, 40)
    available = backend.available()
    with monkeypatch.context() as patch:
        patch.setattr(backend.windows, "back", fails)
        with pytest.raises(OutOfPages):
            backend.fork(slot)
    assert (backend.available(), list(backend.block_lists())) == (available, [slot])
    backend.check()
    child = backend.fork(slot)
    assert same(backend, child, 40)
    fill(backend, slot, 39, 40, seed=7)
    assert same(backend, child, 40), "the last block was not copied"
    backend.check()
    backend.close()


def test_a_slot_that_is_used_again_has_the_memory_of_its_own_blocks() -> None:
    """A slot that was admitted and freed before its window was shown leaves nothing to its successor."""
    backend = make()
    first, _ = backend.admit(PROMPT)
    fill(backend, first, 0, 70)
    backend.commit(first, PROMPT)
    second, _ = backend.admit(PROMPT)
    backend.free(second)
    backend.free(first)
    backend.evict_prefixes()
    backend.trim()
    slots = [backend.allocate(1) for _ in range(2)]
    for slot in slots:
        fill(backend, slot, 0, 150, seed=slot)
    backend.check()
    assert all(same(backend, slot, 150, seed=slot) for slot in slots)
    backend.close()


def test_check_sees_windows_that_are_wrong() -> None:
    def trimmed(backend: PagedWindowsKV, slot: int) -> None:
        backend.windows.trim([])

    def other_blocks(backend: PagedWindowsKV, slot: int) -> None:
        backend.windows.show([backend.block_lists()[slot][::-1]], windows=[slot])

    def other_table(backend: PagedWindowsKV, slot: int) -> None:
        backend.block_table[slot] += 1

    for spoil in (trimmed, other_blocks, other_table):
        backend = make()
        slot = backend.allocate(1)
        fill(backend, slot, 0, 40)
        backend.check()
        spoil(backend, slot)
        with pytest.raises(AssertionError):
            backend.check()
        backend.close()
