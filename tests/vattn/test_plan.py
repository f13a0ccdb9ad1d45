"""Plans are what real caches do: pages, addresses, calls and the number of requests that fit."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import vattn
from vattn import KVCache, KVConfig, TensorGroup
from vattn.engine.kv.make import make_backend
from vattn.engine.kv.spec import KVSpec
from vattn.errors import ConfigError, OutOfPages
from vattn.layout import LAYOUTS, LayoutName
from vattn.model_shapes import find_shape
from vattn.packed import KVShape
from vattn.plan import Option, plan
from vattn.units import format_bytes

MIB = 2**20
PLAIN = [TensorGroup(layers=range(3), num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)]
ODD = [TensorGroup(layers=range(3), num_kv_heads=1, head_dim=72, v_head_dim=0, dtype=torch.bfloat16)]
WINDOWS = [
    TensorGroup(layers=[0, 2], num_kv_heads=2, head_dim=16, dtype=torch.bfloat16),
    TensorGroup(layers=[1], num_kv_heads=2, head_dim=16, dtype=torch.bfloat16, sliding_window=100),
]
LENGTHS = [1, 31, 32, 33, 500, 777, 1000]
LONGEST = 1024


def _option(groups: list[TensorGroup], layout: LayoutName, page_size: int, **changes: object) -> Option:
    options: dict[str, object] = {"memory": 8 * MIB, "max_context_len": LONGEST, "max_batch_size": 64} | changes
    made = plan(groups, device="cpu", lengths=LENGTHS, page_sizes=[page_size], **options)  # type: ignore[arg-type]
    (found,) = [option for option in made.options if (option.layout, option.page_size) == (layout, page_size)]
    return found


def _cache(groups: list[TensorGroup], layout: LayoutName, page_size: int, **changes: object) -> KVCache:
    config = KVConfig(
        groups=groups,
        max_batch_size=64,
        max_context_len=LONGEST,
        memory_budget=8 * MIB,
        page_size=page_size,
        layout=layout,
        overlap=False,
        eager_pages=0,
    )
    return KVCache(replace(config, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [PLAIN, ODD, WINDOWS], ids=["plain", "latents", "windows"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [4096, 16384])
def test_a_cache_holds_what_was_planned(groups: list[TensorGroup], layout: LayoutName, page_size: int) -> None:
    planned = _option(groups, layout, page_size)
    held, calls = 0, 0
    for length in LENGTHS:
        with _cache(groups, layout, page_size) as cache:
            assert cache.stats().reserved_bytes == planned.address_bytes
            slot = cache.alloc_reqid()
            for tokens in range(1, length + 1):  # token by token, as windows give pages back
                cache.step({slot: tokens})
            stats = cache.stats()
            held += stats.needed_bytes
            # A window's pages move on with it: its calls are an upper bound.
            calls += stats.calls["cuMemMap"].count
            seen = sum(min(length, group.sliding_window or length) * group.token_bytes for group in groups)
            assert 0 <= stats.needed_bytes - seen <= planned.worst_waste
    assert held == pytest.approx(planned.held_bytes * len(LENGTHS))
    seen = sum(min(n, group.sliding_window or n) * group.token_bytes for n in LENGTHS for group in groups)
    assert held - seen == pytest.approx(planned.mean_waste * len(LENGTHS))
    if groups is not WINDOWS:
        assert calls == pytest.approx(planned.map_calls_per_token * sum(LENGTHS))


@pytest.mark.parametrize("groups", [PLAIN, ODD], ids=["plain", "latents"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_many_requests_fit_as_planned(groups: list[TensorGroup], layout: LayoutName) -> None:
    planned = _option(groups, layout, 4096)
    with _cache(groups, layout, 4096) as cache:
        slots = [cache.alloc_reqid() for _ in range(planned.longest_requests)]
        cache.step(dict.fromkeys(slots, LONGEST))
        with pytest.raises(OutOfPages):
            cache.step({cache.alloc_reqid(): LONGEST})
        assert planned.mappings is not None
        assert cache.stats().owned_pages <= planned.mappings
        capacity = cache.capacity()
        assert capacity.tokens // LONGEST == planned.longest_requests
        assert planned.block_tokens == capacity.page_tokens


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_paged_holds_what_was_planned(block_size: int) -> None:
    made = plan(PLAIN, memory=8 * MIB, max_context_len=LONGEST, lengths=LENGTHS, device="cpu", block_sizes=[block_size])
    planned = made.options[0]
    shape = KVShape.uniform(3, 2, 16, 16)
    spec = KVSpec(
        shape,
        max_num_seqs=64,
        max_model_len=LONGEST,
        memory_budget=8 * MIB,
        dtype=torch.bfloat16,
        block_size=block_size,
    )
    with closing(make_backend("paged", spec)) as paged:
        blocks = [paged.needed(length) for length in LENGTHS]
        assert sum(blocks) * planned.page_size == pytest.approx(planned.held_bytes * len(LENGTHS))
        assert paged.total() // paged.needed(LONGEST) == planned.longest_requests
        table = paged.block_table  # type: ignore[attr-defined]
        assert table.numel() * 4 == planned.table_bytes
    waste = sum(-n % block_size for n in LENGTHS) * made.token_bytes
    assert planned.mean_waste * len(LENGTHS) == pytest.approx(waste)
    assert planned.worst_waste == (block_size - 1) * made.token_bytes


@pytest.mark.parametrize("groups", [PLAIN, ODD, WINDOWS], ids=["plain", "latents", "windows"])
@pytest.mark.parametrize("budget", ["256KiB", "4MiB"])
def test_the_recommended_cache_is_the_automatic_one(groups: list[TensorGroup], budget: str) -> None:
    memory = vattn.units.parse_bytes(budget, "budget")
    made = plan(groups, memory=memory, max_context_len=LONGEST, max_batch_size=8, device="cpu")
    config = KVConfig(groups=groups, max_batch_size=8, max_context_len=LONGEST, memory_budget=budget)
    with KVCache(config) as cache:
        chosen = next(o for o in made.options if (o.layout, o.page_size) == (cache.layout.name, cache.layout.page_size))
    assert made.recommended == chosen


def test_table_8_of_the_paper() -> None:
    """Block sizes and the waste of a request, Llama-3-8B."""
    made = plan(find_shape("Llama-3-8B").groups, memory=40 << 30, max_context_len=32_768)
    found = {(option.layout, option.page_size): option for option in made.options}
    token = 128 << 10
    for layout, page_size, tokens, waste in (
        ("layer", 2 * MIB, 1024, 128 * MIB),
        ("layer", 64 << 10, 32, 4 * MIB),
        ("sliced", 2 * MIB, 32, 4 * MIB),
    ):
        option = found[layout, page_size]
        assert (option.block_tokens, option.worst_waste) == (tokens, waste - token)
        assert option.offered is (page_size == 2 * MIB)


def test_all_lengths_are_as_likely_by_default() -> None:
    made = plan(find_shape("Llama-3-8B").groups, memory=40 << 30, max_context_len=131_072)
    assert made.mean_tokens == pytest.approx(65_536, rel=0.01)
    for option in made.options:
        assert option.mean_waste == pytest.approx(option.worst_waste / 2, rel=0.02, abs=1)


def test_paged_is_recommended_where_pages_hold_fewer_requests() -> None:
    load = {"memory": 8 * MIB, "max_context_len": LONGEST, "lengths": LENGTHS, "device": "cpu"}
    scarce = plan(PLAIN, max_batch_size=64, **load)  # type: ignore[arg-type]
    assert scarce.recommended == next(option for option in scarce.options if option.block_tokens == 16)
    assert "The price is a block table" in scarce.reason
    enough = plan(PLAIN, max_batch_size=8, **load)  # type: ignore[arg-type]
    assert enough.recommended.kind == "virtual", "as many as may run fit either way"
    none = plan(PLAIN, memory=MIB // 8, max_context_len=2048)
    assert none.reason.startswith("No request of 2,048 tokens fits")


def test_what_a_request_takes_that_does_not_fit_is_what_its_queries_see() -> None:
    half = [
        TensorGroup(layers=layers, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, sliding_window=window)
        for layers, window in ((range(8), None), (range(8, 16), 64))
    ]
    size: dict[str, Any] = {"max_context_len": 16_384, "device": "cpu"}
    token = 2 * 2 * 64 * 2 * 8  # of half of the layers
    assert plan(half, memory=2 * MIB, **size).reason.startswith(
        f"No request of 16,384 tokens fits: it takes {format_bytes(token * (16_384 + 64))} and more"
    )
    assert plan(half, memory=token * 20_000, **size).recommended.longest_requests == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, "lengths are empty"),
        ({"lengths": 5}, "lengths=5 must be a list of whole numbers"),
        ({"lengths": [[5]]}, r"lengths=\[5\] must be a whole number"),
        ({"page_sizes": 4096}, "page_sizes=4096 must be a list of whole numbers"),
        ({"block_sizes": None}, "block_sizes=None must be a list of whole numbers"),
        ({"lengths": [1025]}, "lengths=1025 must be a whole number from 1 to 1024"),
        ({"block_sizes": [0]}, "block_sizes=0"),
        ({"memory": 0}, "memory=0"),
        ({"page_sizes": [3000], "device": "cpu"}, "page_size=3000"),
        ({"page_sizes": ["64KiB"]}, "page_sizes='64KiB' must be a whole number"),
        ({"page_sizes": ["64KiB"], "device": "cpu"}, "page_sizes='64KiB' must be a whole number"),
        ({"page_sizes": [100_000]}, "page_sizes=100000 must be a multiple of 4096"),
        ({"device": "tpu"}, "no memory driver"),
    ],
)
def test_refuses_what_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(PLAIN, **{"memory": MIB, "max_context_len": LONGEST, **changes})  # type: ignore[arg-type]


def test_numbers_of_numpy_and_torch_are_whole_numbers() -> None:
    longest = 1009  # no other test has it, so that no layout is remembered
    given = {"memory": 8 * MIB, "lengths": [3, 100, 3], "block_sizes": [16], "page_sizes": [16384]}
    options = {"max_context_len": longest, "device": "cpu"}
    narrow = {name: np.array(value, np.int32)[()] for name, value in given.items()}
    found = plan(PLAIN, **narrow, **options)  # type: ignore[arg-type]
    with closing(_cache(PLAIN, "layer", 16384, max_context_len=longest)) as cache:
        assert type(cache.layout.page_size) is int
    tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in given.items()}
    for other in (plan(PLAIN, **each, **options) for each in (given, tensors)):  # type: ignore[arg-type]
        assert json.dumps(other.to_dict()) == json.dumps(found.to_dict())


def test_the_waste_of_rows_that_straddle_pages() -> None:
    """Rows of 144 bytes end on all multiples of 16 in a page."""
    option = _option(ODD, "layer", 4096)
    waste = [-(n * 144) % 4096 for n in range(1, 4097)]
    assert option.worst_waste == 3 * max(waste)
