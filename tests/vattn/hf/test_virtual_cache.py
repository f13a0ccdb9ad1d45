"""VirtualCache as its users meet it: what it refuses, when it gives memory back, and where else it works."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, MistralConfig, TextIteratorStreamer

import vattn
from bench.harness.models import CACHE
from tests.support import target
from tests.support.effort import covering
from tests.support.faults import FaultyTable
from tests.support.paths import ROOT
from tests.support.tiny_models import make_model, make_prompts
from tests.support.waiting import SECONDS
from vattn import cpu
from vattn.drivers.host import HostDevice
from vattn.hf import storage
from vattn.hf.batch_rows import BatchRows
from vattn.pool import shared
from vattn.pool.fences import sync_refusal

OPTIONS: dict[str, Any] = {"max_context_len": 256, "memory_budget": "64MiB", "page_size": 4096}
IDS = torch.tensor(make_prompts([20]))
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def want(model: transformers.PreTrainedModel) -> Tensor:
    return model.generate(IDS, **GREEDY)


# Memory


@pytest.mark.parametrize(("tokens", "layout"), [(1, "fused"), (2048, "layer")])
def test_rows_leave_unused_at_most_a_little_or_what_the_first_update_stores(
    monkeypatch: pytest.MonkeyPatch, tokens: int, layout: str
) -> None:
    """And not a share of the budget, which is half of the machine."""
    monkeypatch.setattr(storage, "_ALLOWED_WASTE", 2**17)
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=64)
    with vattn.VirtualCache(config, max_context_len=4096, page_size=2**18) as cache:
        rows = torch.zeros(2, 4, tokens, 64)
        for layer in range(4):
            cache.update(rows, rows, layer)
        assert {made.layout.name for made in cache._storage.open_caches()} == {layout}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_layers_whose_shapes_alternate_take_a_cache_per_shape(kv_cache_dtype: str) -> None:
    """And not one per layer, each of which backs all layers after it."""
    kinds = ["sliding_attention", "full_attention", *["full_attention"] * 6]  # the int8 scales of one are a layer, too
    config = MistralConfig(num_hidden_layers=8, sliding_window=20, layer_types=kinds)
    with vattn.VirtualCache(config, kv_cache_dtype=kv_cache_dtype, layout="layer", **OPTIONS) as cache:
        rows = [torch.randn(2, 2, 15, (64, 64, 32)[layer % 3]) for layer in range(8)]
        for _ in range(2):
            for layer in range(8):
                cache.update(rows[layer], -rows[layer], layer)
            assert len(cache._storage.open_caches()) == 3
            for layer, wanted in zip(cache.layers, rows, strict=True):
                torch.testing.assert_close(layer.keys[:, :, :15], wanted, rtol=0, atol=0.05)
                torch.testing.assert_close(layer.values[:, :, :15], -wanted, rtol=0, atol=0.05)
            cache.check()
            cache.reset()


def test_a_few_short_rows_take_little_more_than_their_tokens() -> None:
    """Of the shape of Llama-3.2-1B: a gigabyte for 25 MiB in the layout that is the fastest to read."""
    config = LlamaConfig(num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    with vattn.VirtualCache(config, max_context_len=2**17) as cache:
        rows = torch.zeros(8, 8, 100, 64, dtype=torch.bfloat16)
        for layer in range(16):
            cache.update(rows, rows, layer)
        stats = cache.stats()
        assert stats.live_bytes == 16 * 2 * rows.nbytes
        assert stats.owned_bytes - stats.live_bytes <= 2 * storage._ALLOWED_WASTE


def test_losing_the_last_reference_gives_the_memory_back(model: transformers.PreTrainedModel) -> None:
    gc.collect()
    before = target.usage()
    cache = vattn.VirtualCache(model, **OPTIONS)
    output = model.generate(IDS, **{CACHE: cache}, return_dict_in_generate=True, **GREEDY)
    assert target.usage() != before
    gc.disable()
    try:
        del cache
        assert target.usage() != before, "the output still has it"
        del output
        assert target.usage() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("budget", ["64MiB", "auto"])  # a pool of its own, and a shared one
def test_closing_in_mid_capture_gives_the_memory_back_after_it(
    model: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    options = {**OPTIONS, "memory_budget": budget}
    model.generate(IDS, **{CACHE: vattn.VirtualCache(model, **options)}, **GREEDY)
    before = target.usage()
    cache = vattn.VirtualCache(model, **options)
    model.generate(IDS, **{CACHE: cache}, **GREEDY)

    def refuse(*arguments: object) -> None:
        raise sync_refusal()

    with monkeypatch.context() as patch:
        patch.setattr("vattn.slots.bands.guard_all", refuse)
        cache.close()
        with pytest.raises(vattn.CacheClosed):
            cache.get_seq_length()
        assert target.usage() != before
    with vattn.VirtualCache(model, **options) as other:
        model.generate(IDS, **{CACHE: other}, **GREEDY)
    assert target.usage() == before


def test_leaving_the_with_statement_closes(model: transformers.PreTrainedModel) -> None:
    before = target.usage()
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        model.generate(IDS, **{CACHE: cache}, **GREEDY)
    assert target.usage() == before
    cache.close()  # again, which is nothing
    for call in (
        lambda: model.generate(IDS, **{CACHE: cache}, **GREEDY),
        cache.get_seq_length,
        cache.stats,
        cache.check,
        cache.reset,
        cache.trim,
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_select_indices(torch.tensor([True])),
        lambda: cache.layers[0].keys,
        lambda: copy.deepcopy(cache),
        lambda: cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0),
    ):
        with pytest.raises(vattn.CacheClosed, match="make a new one"):
            call()
    assert "closed" in repr(cache)


def test_memory_is_that_of_the_tokens() -> None:
    """16 tokens per page and head; one block per tensor beyond what the tokens fill."""
    options = {**OPTIONS, "max_context_len": 10**6}
    with vattn.VirtualCache(LlamaConfig(num_hidden_layers=2), **options) as cache:
        with pytest.raises(vattn.VattnError, match="before the first update"):
            cache.stats()
        for tokens in (1, 15, 200, 1000):
            for layer in range(2):
                new = torch.zeros(1, 2, tokens, 64)
                cache.update(new, new, layer)
            stats = cache.stats()
            assert stats.live_tokens == cache.get_seq_length()
            assert stats.live_bytes <= stats.owned_bytes <= stats.live_bytes + 2 * 2 * 2 * 4096 * 2
        assert stats.reserved_bytes > 500 * stats.created_bytes
        cache.reset()
        assert cache.stats().live_bytes == 0
        assert cache.trim() > 0
        assert cache.stats().created_bytes == 0
        cache.check()


@pytest.mark.parametrize("beams", [1, 3])
def test_memory_behind_windows_is_given_back(beams: int) -> None:
    """Every layer has a window of 9 tokens; 230 tokens of each row pass through it."""
    model = make_model("mistral-window")
    ids = torch.tensor(make_prompts([30, 30]))
    options = {"max_new_tokens": 200, "do_sample": False, "num_beams": beams}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    pages = []

    class Watched(vattn.VirtualCache):
        def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            seen = super().update(key, value, layer, *args, **kwargs)
            if key.shape[2] == 1:
                pages.append(self.stats().owned_pages)
            return seen

    with Watched(model, **OPTIONS | {"layout": "fused"}) as cache:
        got = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, **options)
        assert torch.equal(got, expected)
        cache.check()
        (inner,) = cache._storage.open_caches()
        row = inner.layout.most_pages(230)
        assert max(pages) <= (2 * beams + 1) * (row + inner.layout.lanes)  # a column of each is mapped ahead
        assert row + inner.layout.lanes < inner.layout.pages(230)
        before = cache.get_seq_length()
        with pytest.raises(vattn.InvalidLength, match="cannot go back"):
            cache.crop(20)
        assert cache.get_seq_length() == before


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "deepseek-v3"])
def test_eight_bits_hold_nearly_the_same(family: str) -> None:
    """Of every layer what its codes stand for is within half a step, 1/127 of a row's largest; in less than half the
    memory, in rows that are reordered, repeated, cropped and copied.
    """
    model = make_model(family)
    ids = torch.tensor(make_prompts([7, 7]))  # within every window, so that all layers hold all tokens
    options = {**OPTIONS, "layout": "fused"}
    exact, coded = vattn.VirtualCache(model, **options), vattn.VirtualCache(model, kv_cache_dtype="int8", **options)
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: exact}, use_cache=True)
    for layer in range(len(exact.layers)):
        coded.update(exact.layers[layer].keys, exact.layers[layer].values, layer)
    for rows in ([1, 0], [1, 1]):
        for cache in (exact, coded):
            cache.reorder_cache(torch.tensor(rows))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 3]))
    coded = copy.deepcopy(coded)
    for cache in (exact, coded):
        cache.crop(-3)
        cache.check()
    for ours, theirs in zip(coded.layers, exact.layers, strict=True):
        for got, want in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            if want.shape[-1]:
                step = want.abs().amax(dim=-1, keepdim=True) / 127
                assert bool(((got - want).abs() <= 0.51 * step + 1e-6).all())
    assert coded.stats().live_bytes < 0.6 * exact.stats().live_bytes
    coded.close()
    exact.close()


def test_eight_bits_generate(model: transformers.PreTrainedModel, want: Tensor) -> None:
    """Most tokens are those of the exact cache; beams and assisted decoding run to their ends."""
    with vattn.VirtualCache(model, kv_cache_dtype="int8", **OPTIONS) as cache:
        got = model.generate(IDS, **{CACHE: cache}, **GREEDY)
        assert (got == want).float().mean() > 0.9
    for ways in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        with vattn.VirtualCache(model, kv_cache_dtype="int8", **OPTIONS) as cache:
            assert model.generate(IDS, **{CACHE: cache}, **GREEDY | ways).shape == want.shape
            cache.check()


def test_a_pool_is_shared_and_stays_open(model: transformers.PreTrainedModel, want: Tensor) -> None:
    pool = vattn.PagePool("4MiB", page_size=4096)
    options = {"max_context_len": 256, "pool": pool}
    with vattn.VirtualCache(model, **options) as one, vattn.VirtualCache(make_model("gemma3"), **options) as other:
        assert torch.equal(model.generate(IDS, **{CACHE: one}, **GREEDY), want)
        make_model("gemma3").generate(IDS, **{CACHE: other}, **GREEDY)
        assert other.stats().other_pages == one.stats().owned_pages
        one.check()
        other.check()
    assert pool.free_pages == pool.total_pages
    pool.close()


@pytest.mark.parametrize(("family", "pages"), [("llama", 10), ("gemma3", 20)])
def test_out_of_pages_leaves_the_cache_as_before_the_forward_pass(family: str, pages: int) -> None:
    """4 pages a layer hold 128 tokens; of gemma3's two groups of layers the second does not get its share."""
    served = make_model(family)
    ids = torch.tensor(make_prompts([180]))
    options = OPTIONS | {"memory_budget": pages * 4096, "layout": "layer"}
    with vattn.VirtualCache(served, **options) as cache, torch.no_grad():
        served(ids[:, :100], **{CACHE: cache})
        with pytest.raises(vattn.OutOfPages):
            served(ids[:, 100:], **{CACHE: cache})
        assert cache.get_seq_length() == 100
        cache.check()
        logits = served(ids[:, 100:110], **{CACHE: cache}).logits
        torch.testing.assert_close(logits, served(ids[:, :110]).logits[:, -10:])


def test_out_of_pages_in_the_first_forward_pass_leaves_an_empty_cache() -> None:
    """gemma3's sliding layers get their 16 pages, its full layer not the 8 that it needs."""
    served = make_model("gemma3")
    ids = torch.tensor(make_prompts([180]))
    options = OPTIONS | {"memory_budget": 20 * 4096, "layout": "layer"}
    with vattn.VirtualCache(served, **options) as cache, torch.no_grad():
        for _ in range(2):
            with pytest.raises(vattn.OutOfPages):
                served(ids, **{CACHE: cache})
            assert cache.get_seq_length() == 0
            cache.check()


@pytest.mark.parametrize("budget", ["auto", "64MiB"])
def test_memory_that_torch_keeps_unused_is_taken(monkeypatch: pytest.MonkeyPatch, budget: str) -> None:
    """As a DynamicCache takes it. On the host, which has none, a driver pretends."""
    table, emptied = FaultyTable(), []

    def empty_cache(device: HostDevice) -> int:
        emptied.append(device)
        table.heal()
        return 1

    monkeypatch.setattr(shared, "_pools", {})
    monkeypatch.setattr(HostDevice, "table", lambda device: table.addresses)
    monkeypatch.setattr(HostDevice, "empty_cache", empty_cache)
    with vattn.VirtualCache(LlamaConfig(num_hidden_layers=2), max_context_len=2000, memory_budget=budget) as cache:
        _update(cache, 1)
        table.fail_always("cuMemCreate", code=2)
        _update(cache, 1500)
        assert len(emptied) == 1
        table.fail_always("cuMemCreate", code=2)
        monkeypatch.setattr(HostDevice, "empty_cache", lambda device: 0)
        with pytest.raises(vattn.OutOfPages, match="the machine has no memory"):
            cache.batch_repeat_interleave(9)
        table.heal()
    for pool in shared._pools.values():
        pool.close()


def _kept_in_the_way(cache: vattn.VirtualCache) -> None:
    kept = cache.layers[0].keys
    try:
        cache.crop(-1)
    finally:
        del kept


def _update(cache: vattn.VirtualCache, tokens: int) -> None:
    cache.update(*[torch.zeros(1, 2, tokens, 64)] * 2, 0)


# What exceeds a budget of 100 pages, in a pool of the cache's own or of its user, after 200 tokens, which take 52.
FAILURES: dict[str, Callable[[vattn.VirtualCache], object]] = {
    "update": lambda cache: _update(cache, 700),
    "crop": _kept_in_the_way,
    "more rows": lambda cache: cache.batch_repeat_interleave(9),
    "other shapes": lambda cache: (cache.reset(), cache.update(*[torch.zeros(1, 2, 900, 32)] * 2, 1)),
}


@pytest.mark.parametrize("failure", ["first update", "copy", *FAILURES])
@pytest.mark.parametrize("own", [True, False])
def test_a_cache_can_be_closed_where_its_budget_was_exceeded(failure: str, own: bool) -> None:
    """In the except block, whose traceback keeps what the call had; nothing of it is left, and no pool is in use."""
    if failure == "copy" and own:
        pytest.skip("a copy has a budget of its own")
    before = target.usage()
    pool = None if own else vattn.PagePool(100 * 4096, page_size=4096)
    options = {"memory_budget": 100 * 4096, "page_size": 4096} if own else {"pool": pool}
    cache = vattn.VirtualCache(LlamaConfig(num_hidden_layers=2), max_context_len=2000, **options)
    try:
        if failure == "first update":
            _update(cache, 900)
        _update(cache, 200)
        (copy.deepcopy if failure == "copy" else FAILURES[failure])(cache)
    except vattn.OutOfPages:
        cache.close()
        if pool is not None:
            pool.close()
        assert target.usage() == before
    else:
        pytest.fail("the budget was enough")


@pytest.mark.parametrize("point", ["prepare", "add"])
def test_what_is_half_made_is_closed(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the caches of a larger reservation, of which the second one fails, none is left in the traceback."""
    pool = vattn.PagePool("4MiB", page_size=4096)
    model = make_model("gemma3")
    with vattn.VirtualCache(model, max_context_len=256, pool=pool) as cache:
        with torch.no_grad():
            model(IDS, **{CACHE: cache})
        pages = pool.free_pages
        true, left = getattr(BatchRows, point), 1

        def fail(rows: BatchRows, inner: vattn.KVCache) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            true(rows, inner)

        with monkeypatch.context() as patch:
            patch.setattr(BatchRows, point, fail)
            with pytest.raises(KeyboardInterrupt) as caught:
                cache.batch_repeat_interleave(3)
            assert caught.tb is not None  # what the frames of the call hold is still there
            assert pool.free_pages == pages
            cache.check()
        assert cache.get_seq_length() == 20
        cache.batch_repeat_interleave(3)
        cache.check()
    pool.close()


def test_crop_by_a_tensor() -> None:
    """As assisted generation passes it in older releases of transformers."""
    model = make_model("llama")
    with vattn.VirtualCache(model, max_context_len=64) as cache, torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3, 4, 5]]), **{CACHE: cache}, use_cache=True)
        cache.crop(torch.tensor(-2))  # type: ignore[arg-type]
        model(input_ids=torch.tensor([[6]]), **{CACHE: cache}, use_cache=True)
        assert cache.get_seq_length() == 4


def forward(model: transformers.PreTrainedModel, cache: Any, tokens: int, seed: int) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor(make_prompts([tokens], seed=seed)), **{CACHE: cache}).logits
    return logits


@pytest.mark.parametrize(
    ("copied", "family"),
    covering([None, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ["mistral-window", "gemma3"]),
)
def test_recording_lets_a_crop_go_back_as_far_as_a_dynamic_cache(family: str, copied: Any) -> None:
    """Several forward passes beyond the window, then a crop that takes all of them back, again and again."""
    model = make_model(family)
    theirs = DynamicCache(config=model.config)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(vattn.VirtualCache(model, **OPTIONS))
        for cache in (ours, theirs):
            forward(model, cache, 60, 0)
            cache.activate_past_recording()
            assert all(cache.is_recording_past(i) for i, sliding in enumerate(cache.is_sliding) if sliding)
        for turn, (passes, gone) in enumerate([(40, -38), (25, 0), (30, -30), (1, 0), (3, -1), (50, -50)]):
            for step in range(passes):
                got, want = (forward(model, cache, 1, turn * 100 + step) for cache in (ours, theirs))
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            if copied is not None:
                ours = stack.enter_context(copied(ours))
            for cache in (ours, theirs):
                cache.crop(gone)
            assert ours.get_seq_length() == theirs.get_seq_length()
            ours.check()
        got, want = (forward(model, cache, 7, 999) for cache in (ours, theirs))
        torch.testing.assert_close(got, want)
        # A crop ends what was recorded, as it does there.
        assert ours.stats().owned_pages < 60


def test_recording_ends() -> None:
    model = make_model("mistral-window")
    with vattn.VirtualCache(model, **OPTIONS | {"layout": "fused"}) as cache:
        cache.activate_past_recording()
        for step in range(100):
            forward(model, cache, 1, step)
        (inner,) = cache._storage.open_caches()
        recorded = inner.stats().owned_pages
        for layer in cache.layers:
            layer.record_past = False  # as generate() leaves a cache
        forward(model, cache, 1, 100)
        forward(model, cache, 1, 101)
        inner.check()
        assert inner.stats().owned_pages < recorded / 2
        with pytest.raises(vattn.InvalidLength):
            cache.crop(-90)


def test_an_assistant_with_a_window_takes_its_drafts_back() -> None:
    """It drafts token by token, past its window, and goes back behind the drafts that were not taken."""
    model, assistant = make_model("llama"), make_model("mistral-window")
    want = model.generate(IDS, **GREEDY | {"max_new_tokens": 40})
    assistant.generation_config.num_assistant_tokens = 12
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0
    made = []

    class Made(vattn.VirtualCache):
        def __init__(self, config: Any = None, **options: Any) -> None:
            super().__init__(config, **OPTIONS)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.generation.utils.DynamicCache", Made)
        got = model.generate(IDS, assistant_model=assistant, **GREEDY | {"max_new_tokens": 40})
    assert torch.equal(got, want)
    assert len(made) == 2
    for cache in made:
        cache.close()


def test_blt_looks_up_its_prompt() -> None:
    """It wraps its cache in an EncoderDecoderCache, which crops DynamicCaches only."""
    part = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    part |= {"intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 256, "cross_attn_k": 2}
    config = transformers.BltConfig(
        vocab_size=300, max_position_embeddings=256, patch_in_forward=False, patch_size=3, patching_mode="static",
        encoder_hash_byte_group_size=[2, 3], encoder_hash_byte_group_vocab=64, patcher_config=dict(part),
        encoder_config={**part, "hidden_size_global": 64}, decoder_config={**part, "hidden_size_global": 64},
        global_config={**part, "hidden_size": 64},
    )  # fmt: skip
    config.num_hidden_layers = 4  # without it, DynamicCache refuses the config
    torch.manual_seed(0)
    model = transformers.BltForCausalLM(config).eval()
    ids = torch.arange(5, 25)[None]
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 8,
        "pad_token_id": 0,
        "prompt_lookup_num_tokens": 3,
    }
    want = model.generate(ids, **options)
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        assert isinstance(cache, DynamicCache)
        assert torch.equal(model.generate(ids, **{CACHE: cache}, **options), want)
        cache.check()


def test_a_hybrid_whose_layers_are_all_attention() -> None:
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        shared_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["attention", "attention"],
        mamba_n_heads=4,
        mamba_d_head=16,
    )
    torch.manual_seed(0)
    model = transformers.GraniteMoeHybridForCausalLM(config).eval()
    options = {**GREEDY, "pad_token_id": 0}
    ids = IDS % 100
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        assert torch.equal(model.generate(ids, **{CACHE: cache}, **options), model.generate(ids, **options))


# What it refuses


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("MambaConfig", {}, "state besides keys and values"),
        ("JambaConfig", {}, "state besides keys and values"),
        ("Qwen3NextConfig", {}, "state besides keys and values"),
        ("RecurrentGemmaConfig", {}, "state besides keys and values"),
        ("FalconH1Config", {}, "state besides keys and values"),
        ("DeepseekV32Config", {}, "state besides keys and values"),
        ("Llama4TextConfig", {}, "chunked"),
        ("Llama4Config", {}, "chunked"),
        ("T5Config", {}, "encoder-decoder"),
        ("MllamaConfig", {}, "cross-attention"),
        ("MllamaTextConfig", {}, "cross-attention"),
        ("BltConfig", {}, "says nothing of its layers"),
        ("DoryConfig", {}, "copies layers of its cache"),
    ],
)
def test_models_that_it_cannot_serve(name: str, changes: dict[str, Any], why: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip("this release of transformers does not have it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, name)(**changes)
    for options in ({"max_context_len": 100}, {}):
        with pytest.raises(vattn.UnsupportedModel, match=why) as caught:
            vattn.VirtualCache(config, **options)
        assert "DynamicCache" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pagesize": 4096}, "unknown option pagesize; possible are max_batch_size, max_context_len, memory_budget,"),
        ({"groups": []}, "groups: the first update decides"),
        ({"pool": 5}, "pool is 5; give a vattn.PagePool"),
        ({"dtype": torch.float32}, "the first update decides"),
        ({"device": "cpu"}, "the first update decides"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"max_context_len": 0}, "max_context_len=0"),
        ({"memory_budget": "much"}, "memory_budget='much'"),
        ({"kv_order": "DHN"}, "kv_order"),
        ({"page_size": 1000}, "page_size=1000"),
        ({"page_size": 3 * 2**20}, "page_size=3145728"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], why: str) -> None:
    with pytest.raises(vattn.ConfigError, match=why):
        vattn.VirtualCache(LlamaConfig(), **options)


def test_pages_that_only_cuda_has(model: transformers.PreTrainedModel) -> None:
    """A config does not say where its model is; the first update knows."""
    with pytest.raises(vattn.ConfigError, match="page_size=8388608 is not possible: the host"):
        vattn.VirtualCache(model, page_size=2**23)
    with vattn.VirtualCache(LlamaConfig(), max_context_len=100, page_size=2**23) as cache:
        with pytest.raises(vattn.ConfigError, match="page_size=8388608 is not possible: the host"):
            cache.update(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8), 0)
        assert cache.get_seq_length() == 0


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(vattn.ConfigError, match="neither a transformers model nor its config"):
        vattn.VirtualCache("meta-llama/Llama-3")  # type: ignore[arg-type]


def test_a_context_past_the_maximum(model: transformers.PreTrainedModel, want: Tensor) -> None:
    with vattn.VirtualCache(model, **OPTIONS | {"max_context_len": 31}) as cache:
        assert torch.equal(model.generate(IDS, **{CACHE: cache}, **GREEDY), want)
        with pytest.raises(vattn.InvalidLength, match="max_context_len=31"), torch.no_grad():
            model(IDS[:, :1], **{CACHE: cache})
        assert cache.get_seq_length() == 31


def test_the_models_own_limit_is_the_default(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model) as cache:
        assert cache.max_context_len == cache.get_max_length() == 256


def test_more_rows_than_max_batch_size(model: transformers.PreTrainedModel, want: Tensor) -> None:
    with vattn.VirtualCache(model, max_batch_size=2, **OPTIONS) as cache:
        with pytest.raises(vattn.ConfigError, match=r"3 rows, beams included.*max_batch_size=2"):
            model.generate(IDS, **{CACHE: cache}, num_beams=3, **GREEDY)
        assert torch.equal(model.generate(IDS, **{CACHE: cache}, **GREEDY), want)
        with pytest.raises(vattn.ConfigError, match="max_batch_size=2"):
            cache.batch_repeat_interleave(3)
        cache.batch_repeat_interleave(2)
        with pytest.raises(vattn.ConfigError, match="holds 2 rows, the update has 1"), torch.no_grad():
            model(IDS[:, :1], **{CACHE: cache})
        for rows in ([2], [-3], []):
            with pytest.raises(vattn.ConfigError, match="rows"):
                cache.batch_select_indices(torch.tensor(rows, dtype=torch.int64))
        cache.batch_select_indices(torch.tensor([-1]))
        assert cache.layers[0].keys.shape[0] == 1


@pytest.mark.parametrize("before", ["nothing", "tokens", "reset"])
def test_an_update_without_rows_changes_nothing(model: transformers.PreTrainedModel, before: str) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache, torch.no_grad():
        if before != "nothing":
            model(IDS, **{CACHE: cache})
        if before == "reset":
            cache.reset()
        empty = torch.zeros(0, *model(IDS, use_cache=True).past_key_values.layers[0].keys.shape[1:])
        for index in range(2):
            with pytest.raises(vattn.ConfigError, match=r"keys \[0, .*for one row or more"):
                cache.update(empty, empty, index)
            cache.check()
        assert cache.get_seq_length() == (IDS.shape[1] if before == "tokens" else 0)
        logits = model(IDS, **{CACHE: cache}).logits
        known = torch.cat([IDS, IDS], 1) if before == "tokens" else IDS
        torch.testing.assert_close(logits, model(known).logits[:, -IDS.shape[1] :])


@pytest.mark.parametrize("other", ["llama-mha", "deepseek-v3", "gemma3n"])
def test_a_cache_used_with_two_models(model: transformers.PreTrainedModel, other: str) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache, torch.no_grad():
        model(IDS, **{CACHE: cache})
        config = copy.deepcopy(model.config)
        if other == "gemma3n":  # the same shapes, and more layers
            config.num_hidden_layers = 4
            config.layer_types = None
            second = transformers.LlamaForCausalLM(config)
        else:
            second = make_model(other)
        with pytest.raises(vattn.ConfigError, match="per model"):
            second(IDS, **{CACHE: cache})
        with pytest.raises(vattn.ConfigError, match="layer -1 of a model"):
            cache.update(*torch.zeros(2, 1, 2, 1, 16), -1)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_reset_cache_serves_another_element_type(model: transformers.PreTrainedModel, kv_cache_dtype: str) -> None:
    half = copy.deepcopy(model).bfloat16()
    with vattn.VirtualCache(model, kv_cache_dtype=kv_cache_dtype, **OPTIONS) as cache, torch.no_grad():
        mapped = []
        for each in (model, half, model):
            logits = each(IDS, **{CACHE: cache}).logits
            fresh = vattn.VirtualCache(model, kv_cache_dtype=kv_cache_dtype, **OPTIONS)
            assert torch.equal(logits, each(IDS, **{CACHE: fresh}).logits)
            assert cache.layers[0].keys.dtype == each.dtype
            cache.check()
            mapped.append(cache.stats().owned_pages)
            with pytest.raises(vattn.ConfigError, match="type until a reset"):
                cache.update(*torch.zeros(2, 1, 2, 1, 8, dtype=torch.float64), 0)
            cache.reset()
        assert mapped[0] == mapped[2] >= mapped[1]
        with pytest.raises(vattn.ConfigError, match="type until a reset"):  # only layer 1 in another one
            model(IDS, **{CACHE: cache})
            cache.layers[1].reset()
            cache.update(*torch.zeros(2, 1, 2, 1, 8, dtype=torch.bfloat16), 1)


def test_layers_on_several_devices(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache, torch.no_grad():
        cache.update(*torch.zeros(2, 1, 2, 3, 8), 0)
        with pytest.raises(vattn.ConfigError, match=r"layer 1 computes on meta, and .* is on .*device_map has several"):
            cache.update(*torch.zeros(2, 1, 2, 3, 8, device="meta"), 1)
        assert cache.get_seq_length() == 0
        cache.check()
        model(IDS, **{CACHE: cache})


def test_a_model_with_fewer_layers_is_noticed_at_the_next_forward_pass(model: transformers.PreTrainedModel) -> None:
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    second = transformers.LlamaForCausalLM(config)
    with vattn.VirtualCache(model, **OPTIONS) as cache, torch.no_grad():
        model(IDS, **{CACHE: cache})
        second(IDS, **{CACHE: cache})
        with pytest.raises(vattn.VattnError, match=r"\[20, 40\] tokens"):
            second(IDS, **{CACHE: cache})
        with pytest.raises(vattn.VattnError, match="did not end"):
            cache.reorder_cache(torch.tensor([0]))
        cache.crop(20)
        logits = model(IDS[:, :1], **{CACHE: cache}).logits
        torch.testing.assert_close(logits, model(torch.cat([IDS, IDS[:, :1]], 1)).logits[:, -1:])


def test_what_concerns_all_layers_is_not_done_to_one(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        with pytest.raises(vattn.VattnError, match="of the cache"):
            cache.layers[0].reorder_cache(torch.tensor([0]))
        with pytest.raises(vattn.VattnError, match="call batch_select_indices of the cache"):
            cache.layers[0].batch_select_indices(torch.tensor([0]))
        with pytest.raises(vattn.VattnError, match="call batch_repeat_interleave of the cache"):
            cache.layers[0].batch_repeat_interleave(2)
        with pytest.raises(vattn.ConfigError, match="offloading"):
            cache.layers[0].offload()
        with pytest.raises(vattn.VattnError, match="pickle the cache"):
            copy.copy(cache.layers[0])


# Where else it works


def test_a_config_is_enough(model: transformers.PreTrainedModel, want: Tensor) -> None:
    with vattn.VirtualCache(model.config, **OPTIONS) as cache:
        assert torch.equal(model.generate(IDS, **{CACHE: cache}, **GREEDY), want)


def test_a_copy_is_a_cache_of_its_own(model: transformers.PreTrainedModel, want: Tensor) -> None:
    """As transformers' guide reuses a prefix: its cache is computed once and copied for every prompt."""
    with vattn.VirtualCache(model, **OPTIONS) as prefix:
        with torch.no_grad():
            model(IDS[:, :15], **{CACHE: prefix})
        for _ in range(2):
            with copy.deepcopy(prefix) as cache:
                assert torch.equal(model.generate(IDS, **{CACHE: cache}, **GREEDY), want)
        assert prefix.get_seq_length() == 15
        prefix.check()


def test_early_initialization(model: transformers.PreTrainedModel, want: Tensor) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        assert not cache.is_initialized
        cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
        assert cache.is_initialized
        assert torch.equal(model.generate(IDS, **{CACHE: cache}, **GREEDY), want)


def test_a_reset_cache_is_as_before_its_first_update(model: transformers.PreTrainedModel) -> None:
    """As a DynamicCache: models recognise a prompt by it, also where the cache is used again, or a copy of it."""
    caches = vattn.VirtualCache(model, **OPTIONS), DynamicCache(config=model.config)

    def state(cache: Any) -> list[Any]:
        return [cache.is_initialized, *((layer.is_initialized, layer.keys is None) for layer in cache.layers)]

    empty = 1, 2, 8, torch.float32, torch.device("cpu")
    with torch.no_grad(), caches[0]:
        for call in (
            lambda cache: model(IDS, **{CACHE: cache}),
            lambda cache: cache.crop(-IDS.shape[1]),
            lambda cache: cache.layers[1].reset(),
            lambda cache: model(IDS, **{CACHE: cache}),
            lambda cache: cache.reset(),
            lambda cache: cache.early_initialization(*empty),
            lambda cache: cache.reset(),
        ):
            for cache in caches:
                call(cache)
            assert state(caches[0]) == state(caches[1])
            caches[0].check()
            with copy.deepcopy(caches[0]) as copied, pickle.loads(pickle.dumps(caches[0])) as loaded:
                for each in (copied, loaded):
                    assert state(each) == state(caches[1])
                    each.check()
                    model(IDS[:, :1], **{CACHE: each})


def test_inference_mode_and_outside_of_it(model: transformers.PreTrainedModel, want: Tensor) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        with torch.inference_mode():
            model(IDS[:, :10], **{CACHE: cache})
        assert torch.equal(model.generate(IDS, **{CACHE: cache}, **GREEDY), want)


def test_autocast_in_which_keys_are_wider_than_values(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        reference = DynamicCache(config=model.config)
        for part in (IDS[:, :15], IDS[:, 15:19], IDS[:, 19:]):
            got = model(part, **{CACHE: cache}).logits
            torch.testing.assert_close(got, model(part, **{CACHE: reference}).logits)


@pytest.mark.long  # to load dynamo and to trace takes twenty seconds
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])  # the latter as every compiler gets its graphs
def test_a_compiled_forward_pass(backend: str, model: transformers.PreTrainedModel, want: Tensor) -> None:
    """The update is not traced, and lengths that grow do not make a graph each."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model.forward, backend=backend)
    with vattn.VirtualCache(model, **OPTIONS) as cache, torch.no_grad():
        ids, graphs = IDS, []
        for _ in range(12):
            ids = compiled(ids, **{CACHE: cache}).logits[:, -1:].argmax(-1)
            graphs.append(counters["stats"]["unique_graphs"])
            assert int(ids) == want[0, cache.get_seq_length()]
        assert graphs[-1] == graphs[4]
    assert not cache.is_compileable
    torch._dynamo.reset()


class _Shapes(TorchDispatchMode):
    """The shapes of the queries that SDPA gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            self.seen.add(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("native", [True, False])
def test_who_computes_attention_on_a_cpu(
    native: bool, model: transformers.PreTrainedModel, want: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDPA sees nothing, or the single queries of a KV head as rows; the model's attention is as it was."""
    if not native:
        monkeypatch.setattr(cpu, "refusal", lambda *_: "not here")
    assert model.config._attn_implementation == "sdpa"
    shapes = {}
    for name, cache in (("virtual", vattn.VirtualCache(model, **OPTIONS)), ("dynamic", DynamicCache())):
        with _Shapes() as mode:
            assert torch.equal(model.generate(IDS, **{CACHE: cache}, **GREEDY), want)
        shapes[name] = mode.seen
    assert shapes["dynamic"] == {(1, 4, 20, 8), (1, 4, 1, 8)}, "transformers folds by itself now: do not fold"
    assert shapes["virtual"] == (set() if native else {(1, 4, 20, 8), (1, 2, 2, 8)})


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_with_a_mask(kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding on the left, and a window that is full, whose mask hides nothing."""
    calls, attend = [], cpu.attend
    monkeypatch.setattr(cpu, "attend", lambda *args, **kwargs: (calls.append(1), attend(*args, **kwargs))[1])
    config = MistralConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        sliding_window=window,
    )
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    ids, mask = torch.randint(3, 100, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with vattn.VirtualCache(model) as cache:
        assert torch.equal(model.generate(ids, **{CACHE: cache}, **asked), model.generate(ids, **asked))
    assert len(calls) == 2 * 20


def test_pipelines_and_streamers() -> None:
    path = str(ROOT / "demo" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    prompt = "Question: What is 7 + 5?\nAnswer:"
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    want = tokenizer.decode(model.generate(**inputs, **options)[0], skip_special_tokens=True)

    with vattn.VirtualCache(model, max_context_len=2048, memory_budget="64MiB") as cache:
        streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True, timeout=SECONDS)
        with ThreadPoolExecutor(1) as thread:
            generated = thread.submit(model.generate, **inputs, **options, **{CACHE: cache}, streamer=streamer)
            generated.add_done_callback(lambda _: streamer.end())
            streamed = "".join(streamer)
            generated.result()
        assert streamed == want
        cache.reset()
        pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about generation options
            answer = pipeline(prompt, **{CACHE: cache}, **options)[0]["generated_text"]
        assert answer == want
        assert cache.get_seq_length() > inputs["input_ids"].shape[1]
