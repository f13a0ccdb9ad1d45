"""What can be asked for, and that everything else is refused with a reason."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import sys
from typing import Any

import pytest
import torch

import vattn
from vattn import drivers
from vattn.config import resolve
from vattn.units import format_bytes, parse_bytes

BASE: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "dtype": "float32",
    "max_batch_size": 4,
    "max_context_len": 1000,
    "memory_budget": "4MiB",
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_kv_heads": True}, "num_kv_heads=True"),
        ({"head_dim": 1.5}, "head_dim=1.5"),
        ({"max_context_len": -1}, "max_context_len=-1"),
        ({"dtype": "complex64"}, "complex64"),
        ({"dtype": torch.int64}, "torch.int64"),
        ({"memory_budget": "auto", "memory_utilization": 0}, "0 < memory_utilization <= 1"),
        ({"memory_budget": "auto", "memory_utilization": 1.1}, "memory_utilization=1.1"),
        ({"memory_utilization": 0.5}, "'4MiB'; give one"),
        ({"page_size": 5000}, "powers of two"),
        ({"page_size": 2048}, "4096"),
        ({"page_size": 2**22}, "2097152"),
        ({"layout": "blocked"}, "'sliced'"),
        ({"kv_order": "HDN"}, "'HND'"),
        ({"guard": "none"}, "'strict'"),
        ({"watermark": 1.0}, "watermark"),
        ({"eager_pages": -1}, "eager_pages"),
        ({"overlap": "yes"}, "overlap"),
        ({"memory_budget": "4 apples"}, "'4GiB'"),
        ({"memory_budget": 0}, "more than 0"),
        ({"memory_budget": 4096 * 7, "page_size": 4096, "layout": "layer"}, "below one token block"),
        (
            {"memory_budget": 4096 * 8, "page_size": 4096, "layout": "layer", "guard_rows": 64},
            "needs 16 pages (64.0 KiB) for a slot's first token and 64 guard rows",
        ),
        ({"max_batch_size": 2**16, "max_context_len": 2**32}, "lower max_batch_size or max_context_len"),
        ({"block_tokens": 32, "layout": "layer", "page_size": 4096}, "at most two of the three"),
        ({"block_tokens": 1}, "finest here is"),
        ({"device": "mps"}, "'cpu', 'cuda'"),
        ({"block_size": 16}, "unknown option block_size"),
    ],
)
def test_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(vattn.ConfigError, match=re.escape(says)):
        vattn.KVCache(vattn.KVConfig.from_options(**(BASE | change)))


def test_missing_options_are_named() -> None:
    with pytest.raises(vattn.ConfigError, match="num_kv_heads, head_dim"):
        vattn.KVConfig.from_options(
            **{k: v for k, v in BASE.items() if k not in ("num_kv_heads", "head_dim")},
        )


GROUP = vattn.TensorGroup(layers=[0], num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 2}, "num_layers and groups contradict"),
        ({"sliding_window": 8}, "sliding_window and groups contradict"),
        ({"groups": []}, "one or more vattn.TensorGroup"),
        ({"groups": 3}, "groups=3 must be a list of one or more vattn.TensorGroup"),
        ({"groups": torch.tensor(3)}, "groups=tensor(3) must be a list of one or more vattn.TensorGroup"),
        ({"groups": [{"layers": [0]}]}, "one or more vattn.TensorGroup"),
        ({"groups": [GROUP, GROUP]}, "layers [0] are in several groups"),
        ({"dtype": None}, "dtype must be given, to the cache or to each of its groups"),
    ],
)
def test_groups_that_contradict_are_refused(change: dict[str, Any], says: str) -> None:
    options = {"groups": [GROUP], "dtype": "float32", "max_batch_size": 1, "max_context_len": 10}
    with pytest.raises(vattn.ConfigError, match=re.escape(says)):
        vattn.KVConfig.from_options(**(options | change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 3}, "layers=3 must be layer indices"),
        ({"layers": []}, "without layers"),
        ({"layers": [-1]}, "layers=-1"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"head_dim": 2.0}, "head_dim=2.0"),
        ({"v_head_dim": -1}, "v_head_dim=-1"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"sliding_window": 0}, "sliding_window=0"),
    ],
)
def test_a_group_that_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    options: dict[str, Any] = {"layers": [0], "num_kv_heads": 2, "head_dim": 16}
    with pytest.raises(vattn.ConfigError, match=re.escape(says)):
        vattn.TensorGroup(**(options | change))


def test_a_group_that_takes_the_type_of_the_cache_has_no_bytes_of_its_own() -> None:
    assert dataclasses.replace(GROUP, dtype="float32").token_bytes == 2 * (16 + 16) * 4
    with pytest.raises(vattn.ConfigError, match="has no dtype of its own"):
        _ = GROUP.token_bytes


def test_a_config_with_groups_can_be_replaced() -> None:
    config = vattn.KVConfig(groups=[GROUP], dtype="float32", max_batch_size=1, max_context_len=10)
    wider = dataclasses.replace(config, max_batch_size=2)
    assert wider.tensor_groups == config.tensor_groups
    assert [group.torch_dtype for group in wider.tensor_groups] == [torch.float32]


def test_config_is_frozen() -> None:
    config = vattn.KVConfig(**BASE)
    with pytest.raises(AttributeError):
        config.num_layers = 3  # type: ignore[misc]


def test_a_budget_of_exactly_one_token_block_works() -> None:
    with vattn.KVCache(vattn.KVConfig(**BASE | {"memory_budget": 8 * 4096, "page_size": 4096, "layout": "layer"})) as c:
        reqid = c.alloc_reqid()
        c.step({reqid: 64})
        c.check()
        with pytest.raises(vattn.OutOfPages):
            c.step({reqid: 65})


@pytest.mark.parametrize(
    ("block_tokens", "page_size", "layout"),
    [(512, "auto", "layer"), (100, 8192, "sliced"), (16, 4096, "fused"), (64, "auto", "sliced")],
)
def test_block_tokens_chooses_what_is_open(block_tokens: int, page_size: Any, layout: Any) -> None:
    config = vattn.KVConfig(
        **BASE | {"block_tokens": block_tokens, "page_size": page_size, "layout": layout}
        if page_size == "auto"
        else BASE | {"block_tokens": block_tokens, "page_size": page_size}
    )
    made, _ = resolve(config)
    assert made.page_tokens <= block_tokens < 2 * made.page_tokens * (1 if page_size == "auto" else 2)
    assert made.name == layout


def test_auto_layout_gives_every_slot_a_block_and_keeps_clear_of_the_mapping_limit() -> None:
    config = vattn.KVConfig(**BASE | {"max_batch_size": 64, "num_layers": 32, "memory_budget": "8MiB"})
    made, pages = resolve(config)
    assert made.name != "layer"
    assert pages >= made.pages(1) * 64
    large, pages = resolve(vattn.KVConfig(**BASE | {"max_context_len": 2**20, "memory_budget": "64GiB"}))
    assert pages <= drivers.find("cpu").mapping_limit() // 2
    assert large.name == "layer"


LLAMA: dict[str, Any] = {
    "num_layers": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "max_context_len": 8192,
    "kv_order": "NHD",
}


def test_auto_takes_the_smallest_pages_that_are_cheap_to_map() -> None:
    small = BASE | {"num_layers": 5, "head_dim": 32, "max_batch_size": 8, "max_context_len": 2048}
    for budget in ("4MiB", "1GiB"):
        made, _ = resolve(vattn.KVConfig(**small | {"memory_budget": budget}))
        assert (made.name, made.page_size, made.page_tokens) == ("layer", 4096, 32)
    wide = {"num_kv_heads": 8, "head_dim": 256, "kv_order": "NHD", "memory_budget": "512MiB"}  # 4 KiB hold no token
    made, _ = resolve(vattn.KVConfig(**small | wide))
    assert made.page_tokens == 16
    deep = LLAMA | {"max_batch_size": 1, "memory_budget": "128MiB", "kv_order": "HND"}  # 4 KiB hold 16, 32 for each
    made, _ = resolve(vattn.KVConfig(**deep))
    assert made.bytes_per_token == 8 * made.page_size


@pytest.mark.parametrize(
    ("slots", "budget", "layout"), [(8, "2GiB", "layer"), (16, "2GiB", "sliced"), (256, "1GiB", "fused")]
)
def test_auto_leaves_at_most_a_quarter_of_the_budget_in_last_blocks(
    slots: int, budget: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pages of one size, as on CUDA. A request leaves half a page unused per lane: 64 MiB, 2 MiB or 1 MiB."""
    monkeypatch.setattr(drivers.find("cpu"), "page_sizes", (2**21,))
    made, _ = resolve(vattn.KVConfig(**LLAMA, max_batch_size=slots, memory_budget=budget))
    assert made.name == layout
    made, _ = resolve(vattn.KVConfig(**LLAMA, max_batch_size=slots, memory_budget=budget, layout="layer"))
    assert made.name == "layer"  # what is asked for is not overruled


def test_where_no_choice_is_good_auto_wastes_least() -> None:
    made, pages = resolve(vattn.KVConfig(**LLAMA, max_batch_size=64, memory_budget="64MiB"))
    assert (made.name, made.page_size) == ("sliced", 4096)
    assert pages == 2**14


def test_a_budget_that_no_page_size_maps_in_half_of_the_table_takes_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drivers.find("cpu"), "mapping_limit", lambda: 1024)
    made, pages = resolve(vattn.KVConfig(**LLAMA, max_batch_size=64, memory_budget="4GiB"))
    assert (made.page_size, pages) == (2**21, 2**11)
    assert made.name != "layer"  # 64 MiB of the 64 MiB for a request


def test_the_choice_is_explained() -> None:
    with vattn.KVCache(vattn.KVConfig(**BASE)) as cache:
        fits = cache.capacity()
        assert (fits.layout, fits.page_size, fits.page_tokens) == ("layer", 4096, 64)
        assert fits.usual_waste == 8 * (4096 - 64) // 2
        assert "layout layer, pages of 4.0 KiB for 64 tokens, of which a request leaves 15.8 KiB unused" in str(fits)


def test_budget_is_never_more_than_all_slots_need() -> None:
    made, pages = resolve(vattn.KVConfig(**BASE | {"memory_budget": "1TiB"}))
    assert pages * made.page_size == made.reserved_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 2**32), ("1.5 MiB", 3 * 2**19), ("512", 512), ("2k", 2048), ("3MB", 3_000_000), (77, 77)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text, "x") == size


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (1, 2048, 3 * 2**20, 2**41)] == ["1 B", "2.0 KiB", "3.0 MiB", "2.0 TiB"]


def test_an_automatic_budget_is_a_share_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers.find("cpu"), "available_memory", lambda: 2**24)
    for share, expected in (("auto", 2**23), (0.25, 2**22), (1, 2**24)):
        config = vattn.KVConfig(
            **BASE | {"memory_budget": "auto", "memory_utilization": share, "max_context_len": 2**20, "page_size": 4096}
        )
        with vattn.KVCache(config) as cache:
            assert cache.capacity().budget_bytes == expected
    pool = vattn.PagePool("1MiB", page_size=4096)
    with vattn.KVCache(vattn.KVConfig(**BASE | {"memory_budget": "auto"}), pool=pool) as cache:
        assert cache.total_pages == 256  # a pool's caches share what it has
    pool.close()


@pytest.mark.parametrize("layout", ["layer", "sliced", "fused"])
@pytest.mark.parametrize("budget", ["64KiB", "100KiB", "1MiB", "64MiB"])
@pytest.mark.parametrize("guard_rows", [0, 100])
def test_the_capacity_is_what_a_step_can_back_and_no_more(
    layout: str, budget: str, guard_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"layout": layout, "memory_budget": budget, "guard_rows": guard_rows, "page_size": 4096}
    with (
        caplog.at_level("INFO", "vattn"),
        vattn.KVCache(vattn.KVConfig(**BASE | options, eager_pages=0, overlap=False)) as cache,
    ):
        fits = cache.capacity()
        assert caplog.messages == [f"cache on cpu: {fits}"]
        slots = [cache.alloc_reqid() for _ in range(4)]

        def attempt(lengths: list[int]) -> bool:
            try:
                cache.step(dict(zip(slots, lengths, strict=False)))
            except vattn.OutOfPages:
                return False
            cache.step(dict.fromkeys(slots, 0))
            return True

        assert attempt([fits.longest_context])
        assert fits.longest_context == 1000 or not attempt([fits.longest_context + 1])
        assert attempt([1] * fits.requests)
        assert fits.requests == 4 or not attempt([1] * (fits.requests + 1))
        full, rest = divmod(fits.tokens, 1000)
        assert attempt([1000] * full + [rest] * (rest > 0))
        assert fits.tokens == 4000 or not attempt([1000] * full + [rest + 1])
        assert f"{fits.tokens:,} tokens" in str(fits)


def test_cuda_without_its_driver_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers.cuda, "torch_lacks", lambda: None)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("NVIDIA's driver is there")
    pytest.importorskip("cuda.bindings")
    with pytest.raises(
        vattn.ConfigError, match=r"device='cuda' .*\(libcuda\.so\.1\) is not there.*: install it, or start"
    ):
        vattn.KVCache(vattn.KVConfig(**BASE, device="cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(vattn.ConfigError, match=r"cuda-python is not installed.*pip install 'vattn\[cuda\]'"):
        vattn.PagePool("1GiB", device="cuda:1")
