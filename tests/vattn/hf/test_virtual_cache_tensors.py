"""What a VirtualCache hands out and takes in: tensors that outlive it, copies in files, assignments, gradients."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, MistralConfig

import vattn
from bench.harness.models import CACHE
from tests.support import forks, scripts, target
from tests.support.tiny_models import make_model, make_prompts
from tests.support.waiting import Background
from vattn.hf.attended import Attended
from vattn.pool import shared as shared_pool

OPTIONS: dict[str, Any] = {"max_context_len": 256, "memory_budget": "64MiB", "page_size": 4096}
IDS = torch.tensor(make_prompts([40, 40]))
MORE = torch.tensor(make_prompts([30, 30], seed=5))
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return make_model("llama")


def filled(model: transformers.PreTrainedModel, **options: Any) -> vattn.VirtualCache:
    cache = vattn.VirtualCache(model, **OPTIONS | options)
    with torch.no_grad():
        model(IDS, **{CACHE: cache})
    return cache


def taken(cache: vattn.VirtualCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def generated(model: transformers.PreTrainedModel, cache: Any) -> list[list[int]]:
    ids = torch.cat([IDS, MORE], dim=1)
    output: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, **GREEDY)
    return output.tolist()


def sent_to_a_spawned_process(argument: object) -> Any:
    context.set_spawning_popen(object())  # type: ignore[arg-type]
    try:
        return reduction.ForkingPickler.dumps(argument)
    finally:
        context.set_spawning_popen(None)


# Tensors that are kept

ENDS: dict[str, Callable[[vattn.VirtualCache], Any]] = {
    "closed": lambda cache: cache.close(),
    "more rows": lambda cache: cache.batch_repeat_interleave(2),
    "other rows": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "fewer rows": lambda cache: (cache.batch_select_indices(torch.tensor([1])), cache.trim()),
    "cropped": lambda cache: (cache.crop(-3), cache.update(*[torch.ones(2, 2, 3, 8)] * 2, 0)),
    "reset": lambda cache: (cache.reset(), cache.trim(), cache.update(*[torch.ones(2, 2, 90, 8)] * 2, 0)),
    "assigned": lambda cache: setattr(cache.layers[0], "keys", torch.ones_like(cache.layers[0].keys)),
}


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("end", ENDS)
def test_keys_and_values_outlive_what_happens_to_the_cache(family: str, end: str) -> None:
    """Never zeros, never a fault at a write; and when they are gone, so is their memory."""
    before = target.usage()
    cache = filled(make_model(family))
    kept = taken(cache)
    want = [tensor.clone() for tensor in kept]
    assert all(bool(tensor.any()) for tensor in want)
    ENDS[end](cache)
    assert same(kept, want)
    for tensor in kept:
        tensor.fill_(7)
    if end != "closed":
        cache.check()
        shown = [tensor for tensor in taken(cache) if tensor is not None and tensor.numel()]
        assert not any(bool((tensor == 7).all()) for tensor in shown)
        del shown
    cache.close()
    assert all(bool((tensor == 7).all()) for tensor in kept)
    assert target.usage() != before
    del kept, tensor
    assert target.usage() == before


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_keys_outlive_a_cache_that_is_collected(family: str) -> None:
    before = target.usage()
    model = make_model(family)
    cache = filled(model)
    with torch.no_grad():
        kept, updated = taken(cache), cache.update(*[torch.ones(2, 2, 1, 8)] * 2, 0)[0]
    want, want_updated = [tensor.clone() for tensor in kept], updated.clone()
    del cache
    others = [filled(model) for _ in range(3)]
    assert same(kept, want)
    assert torch.equal(updated, want_updated)
    del others, kept
    assert torch.equal(updated, want_updated)
    updated.zero_()
    assert target.usage() != before
    del updated
    assert target.usage() == before


def test_keys_stay_while_their_window_moves_on() -> None:
    """What lies behind a window is given back, but not under tensors that somebody has."""
    model = make_model("mistral-window")
    with filled(model) as cache, filled(model) as undisturbed:
        kept = taken(cache)
        want = [tensor.clone() for tensor in kept]
        got = generated(model, cache)
        assert same(kept, want)
        assert got == generated(model, undisturbed)
        cache.check()


def test_a_cache_that_cannot_move_says_what_holds_it(model: transformers.PreTrainedModel) -> None:
    with filled(model, memory_budget=30 * 4096, layout="layer") as cache:
        kept = taken(cache)
        want = [tensor.clone() for tensor in kept]
        with pytest.raises(vattn.OutOfPages) as caught:
            cache.crop(-1)
        assert "still show" in caught.value.__notes__[0]
        assert cache.get_seq_length() == 40
        assert same(kept, want)
        del kept
        cache.crop(-1)
        cache.check()
        del caught


def test_writing_keys_changes_the_cache(model: transformers.PreTrainedModel) -> None:
    with filled(model) as cache:
        cache.layers[1].keys[:, :, 3] = 5
        assert bool((cache.layers[1].keys[:, :, 3] == 5).all())
        kept = cache.layers[1].values
        kept.mul_(2)
        with torch.no_grad():
            model(MORE, **{CACHE: cache})
        assert torch.equal(cache.layers[1].values[:, :, :40], kept)


# Assignments, and what a DynamicCache's layers have besides


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_assigned_keys_and_values_are_attended_to(family: str, dtype: str) -> None:
    model = make_model(family)
    ours, theirs = filled(model, kv_cache_dtype=dtype), DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, **{CACHE: theirs})
    wanted = [tensor for layer in ours.layers for tensor in (layer.keys.flip(2), layer.values * 0.5)]
    for cache in (ours, theirs):
        for layer in cache.layers:
            layer.keys = layer.keys.flip(2)
            layer.values *= 0.5
    for got, want in zip(taken(ours), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0 if dtype == "auto" else 0.01 * float(want.abs().max()))
    if dtype == "auto":
        assert generated(model, ours) == generated(model, theirs)
    ours.check()
    ours.close()


def test_an_augmented_assignment_needs_no_other_memory(model: transformers.PreTrainedModel) -> None:
    with filled(model, memory_budget=30 * 4096, layout="layer") as cache:
        want = cache.layers[0].values * 0.5
        cache.layers[0].values *= 0.5
        assert torch.equal(cache.layers[0].values, want)
        kept = cache.layers[0].values
        with pytest.raises(vattn.OutOfPages) as caught:
            cache.layers[0].values = want * 2
        assert "still show" in caught.value.__notes__[0]
        assert torch.equal(cache.layers[0].values, want)
        del kept, caught
        cache.layers[0].values = want * 2
        assert torch.equal(cache.layers[0].values, want * 2)


def test_assignments_that_it_cannot_hold(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache, pytest.raises(vattn.ConfigError, match="before its first"):
        cache.layers[0].keys = torch.zeros(2, 2, 40, 8)
    with filled(model) as cache:
        layer, want = cache.layers[0], cache.layers[0].values.clone()
        for wrong, why in (
            (layer.values[:, :, :4], "crop"),
            (layer.values[:1], "batch_select_indices"),
            (None, "NoneType"),
            (layer.values.double(), "without loss"),
        ):
            with pytest.raises(vattn.ConfigError, match=why):
                layer.values = wrong
        assert torch.equal(layer.values, want)


def test_dtype_and_device_of_a_layer(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        assert not hasattr(cache.layers[0], "dtype")  # as DynamicLayer has it
        with torch.no_grad():
            model(IDS, **{CACHE: cache})
        assert cache.layers[0].dtype == torch.float32
        assert cache.layers[0].device == torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_iteration_is_that_of_a_dynamic_cache(family: str) -> None:
    model = make_model(family)
    with filled(model) as cache:
        theirs = DynamicCache(config=model.config)
        with torch.no_grad():
            model(IDS, **{CACHE: theirs})
        for ours, other in zip(cache, theirs, strict=True):
            assert len(ours) == len(other)
            for a, b in zip(ours, other, strict=True):
                torch.testing.assert_close(a, b)
        if family == "llama":
            again = DynamicCache(list(cache))
            cache.close()
            assert generated(model, again) == generated(model, theirs)


# Copies in files


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "deepseek-v3"])
def test_a_pickled_cache_goes_on(family: str, dtype: str) -> None:
    """Also with torch.save, within an output of generate(), and where it was made with a pool."""
    model = make_model(family)
    pool = vattn.PagePool("16MiB", page_size=4096)
    cache = vattn.VirtualCache(model, max_context_len=256, pool=pool, kv_cache_dtype=dtype)
    output = model.generate(IDS, attention_mask=torch.ones_like(IDS), **{CACHE: cache},
                            return_dict_in_generate=True, **GREEDY)  # fmt: skip
    file = io.BytesIO()
    torch.save(output, file)
    copies = [pickle.loads(pickle.dumps(cache)), torch.load(io.BytesIO(file.getvalue()), weights_only=False)[1]]
    want = [tensor.clone() for tensor in taken(cache)]
    ids = torch.cat([output.sequences, MORE], dim=1)
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: copy.deepcopy(cache)}, **GREEDY)
    cache.close()
    pool.close()
    for again in copies:
        assert type(again) is vattn.VirtualCache
        assert same(taken(again), want)
        again.check()
        got = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: again}, **GREEDY)
        assert torch.equal(got, tokens)
        again.close()


def test_a_pickled_cache_is_as_long_as_its_tokens(model: transformers.PreTrainedModel) -> None:
    with filled(model, max_context_len=100_000) as cache:
        assert len(pickle.dumps(cache)) < cache.stats().live_bytes + 20_000


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_what_is_pickled_of_an_update_is_as_long_as_its_tokens(model: transformers.PreTrainedModel, dtype: str) -> None:
    """Also a copy of it, and what is sent to a process; the storage behind it is all that the cache reserves."""
    with vattn.VirtualCache(model, **OPTIONS | {"max_context_len": 100_000}, kv_cache_dtype=dtype) as cache:
        with torch.no_grad():
            stored = cache.update(*torch.randn(2, 2, 2, 5, 8), 0)
        for rows in stored:
            assert isinstance(rows, Attended)
            file = io.BytesIO()
            torch.save(rows, file)
            assert torch.equal(torch.load(io.BytesIO(file.getvalue())), rows)
            assert len(file.getvalue()) < rows.nbytes + 5_000
            for sent in (pickle.dumps(rows), sent_to_a_spawned_process(rows)):
                assert torch.equal(pickle.loads(sent), rows)
                assert len(sent) < rows.nbytes + 5_000
            assert copy.deepcopy(rows).untyped_storage().nbytes() == rows.nbytes


def test_a_pickled_cache_loads_in_another_process(model: transformers.PreTrainedModel, tmp_path: Any) -> None:
    with filled(model) as cache:
        (tmp_path / "cache").write_bytes(pickle.dumps(cache))
        want = float(cache.layers[1].keys.double().sum())
    code = "import pickle, sys; c = pickle.load(open(sys.argv[1], 'rb')); print(c.layers[1].keys.double().sum().item())"
    done = scripts.run(code, str(tmp_path / "cache"))
    assert float(done.stdout) == want


def test_an_empty_cache_is_pickled_too(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache, pickle.loads(pickle.dumps(cache)) as again:
        assert again.max_context_len == 256
        assert generated(model, again) == generated(model, DynamicCache(config=model.config))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "more rows"])
def test_a_copy_does_not_go_back_to_what_was_not_copied(way: str) -> None:
    """Behind windows only what they show is copied: a crop beyond says so, and does not show zeros."""
    model = make_model("mistral-window")
    with filled(model) as cache:
        with torch.no_grad():
            model(IDS[:, :10], **{CACHE: cache})
        if way == "more rows":
            cache.batch_repeat_interleave(2)
            copied = cache
        else:
            copied = copy.deepcopy(cache) if way == "deepcopy" else pickle.loads(pickle.dumps(cache))
        with torch.no_grad():
            model(MORE.repeat_interleave(copied.layers[0].keys.shape[0] // 2, 0), **{CACHE: copied})
        copied.crop(-30)
        with pytest.raises(vattn.InvalidLength, match="cannot go back"):
            copied.crop(-20)
        copied.close()


# Forked children


def in_child(action: Callable[[], object]) -> str:
    """What an action does in a fork of this process: "done", an exception's name, or a signal."""
    read, write = os.pipe()

    def tell() -> None:
        try:
            action()
            result = "done"
        except BaseException as error:
            result = type(error).__name__
        os.write(write, result.encode())

    with os.fdopen(read) as told:
        with os.fdopen(write):
            status = forks.status(tell)
        return told.read() or f"signal {-status}"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("options", [OPTIONS, {}], ids=["own pool", "shared pool"])
def test_a_forked_child_is_refused_everything_but_the_length(
    model: transformers.PreTrainedModel, options: dict[str, Any]
) -> None:
    cache = vattn.VirtualCache(model, **options)
    with torch.no_grad():
        model(IDS, **{CACHE: cache})
    refused: dict[str, Callable[[], object]] = {
        "keys": lambda: cache.layers[0].keys.sum(),
        "values": lambda: cache.layers[0].values.tolist(),
        "assignment": lambda: setattr(cache.layers[0], "keys", torch.zeros(2, 2, 40, 8)),
        "deepcopy": lambda: copy.deepcopy(cache),
        "pickle": lambda: pickle.dumps(cache),
        "iteration": lambda: list(cache),
        "update": lambda: cache.update(*[torch.ones(2, 2, 1, 8)] * 2, 0),
        "a later layer's update": lambda: cache.update(*[torch.ones(2, 2, 0, 8)] * 2, 1),
        "crop": lambda: cache.crop(-1),
        "reorder": lambda: cache.reorder_cache(torch.tensor([0, 1])),
        "reset": cache.reset,
        "dtype": lambda: cache.layers[0].dtype,
        "stats": cache.stats,
        "trim": cache.trim,
        "close": cache.close,
        "generate": lambda: generated(model, cache),
    }
    assert {name: in_child(action) for name, action in refused.items()} == dict.fromkeys(refused, "ForkedProcess")

    def possible() -> None:
        assert cache.get_seq_length() == 40
        assert "parent" in repr(cache)
        with vattn.VirtualCache(model, **options) as own:
            assert generated(model, own) == generated(model, DynamicCache(config=model.config))

    assert in_child(possible) == "done"
    assert cache.layers[0].keys.any()
    cache.close()


def test_a_cache_is_an_argument_of_a_process_that_is_spawned(model: transformers.PreTrainedModel) -> None:
    """Nothing of it is a descriptor, which would have to be open until the process has started."""
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        with torch.no_grad():
            model(IDS, **{CACHE: cache})
        with pickle.loads(sent_to_a_spawned_process(cache)) as again, torch.no_grad():
            assert same(taken(again), taken(cache))


# Gradients


def gradients(model: transformers.PreTrainedModel, cache: Any, prefix: int) -> list[Tensor]:
    model.zero_grad()
    if prefix:
        with torch.no_grad():
            model(IDS[:, :prefix], **{CACHE: cache})
    model(IDS[:, prefix:], **{CACHE: cache}).logits.square().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("prefix", [0, 25])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_gradients_flow_through_new_tokens(family: str, prefix: int) -> None:
    model = copy.deepcopy(make_model(family)).double()  # rounding is multiplied on the way back
    want = gradients(model, DynamicCache(config=model.config), prefix)
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        got = gradients(model, cache, prefix)
        assert len(got) == len(want) > 10
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            logits = model(MORE, **{CACHE: cache}).logits
        torch.testing.assert_close(logits, model(torch.cat([IDS, MORE], 1)).logits[:, 40:])


def test_gradients_of_what_is_assigned_are_refused_not_lost(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        with torch.no_grad():
            model(IDS, **{CACHE: cache})
        layer: Any = cache.layers[1]
        layer.keys = torch.randn(2, 2, 40, 8, requires_grad=True)
        with pytest.raises(vattn.VattnError, match="assigned to its layers"):
            model(MORE, **{CACHE: cache}).logits.sum().backward()
        cache.reset()
        assert gradients(model, cache, 10)
    torch.ones(1, requires_grad=True).sum().backward()  # torch keeps a graph that failed until the next one


@pytest.mark.parametrize("family", ["llama", "llama-mha"])
def test_gradients_of_queries_alone_outlive_the_rows_that_they_met(family: str) -> None:
    """Keys and values need no gradient then, but attention keeps them for `backward()`."""
    model = copy.deepcopy(make_model(family))
    model.set_attn_implementation("eager" if family == "llama-mha" else "sdpa")  # which copy neither
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.requires_grad_(True)

    def select(cache: Any) -> None:
        cache.batch_select_indices(torch.tensor([1]))

    def reorder(cache: Any) -> None:
        cache.reorder_cache(torch.tensor([1, 0]))

    def smaller_batch(cache: Any) -> None:
        cache.reset()
        with torch.no_grad():
            model(MORE[:1], **{CACHE: cache})

    def trim(cache: Any) -> None:
        cache.reset()
        if isinstance(cache, vattn.VirtualCache):
            cache.trim()

    def found(cache: Any, change: Callable[[Any], None]) -> list[Tensor]:
        model.zero_grad()
        loss = model(IDS, **{CACHE: cache}).logits.square().sum()
        change(cache)
        loss.backward()
        return [layer.self_attn.q_proj.weight.grad for layer in model.model.layers]

    for change in (select, reorder, smaller_batch, trim):
        want = [gradient.clone() for gradient in found(DynamicCache(config=model.config), change)]
        with vattn.VirtualCache(model, **OPTIONS) as cache:
            for a, b in zip(found(cache, change), want, strict=True):
                torch.testing.assert_close(a, b)


def test_gradients_through_earlier_forward_passes_are_refused_not_lost(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        model(IDS, **{CACHE: cache})
        logits = model(MORE, **{CACHE: cache}).logits
        torch.testing.assert_close(logits, model(torch.cat([IDS, MORE], 1)).logits[:, 40:])
        with pytest.raises(vattn.VattnError, match="no gradients of tokens of earlier"):
            logits.sum().backward()
        for copied in (copy.copy(cache), pickle.loads(pickle.dumps(cache))):
            with copied, pytest.raises(vattn.VattnError, match="no gradients of tokens of earlier"):
                model(MORE[:, :1], **{CACHE: copied}).logits.sum().backward()
        cache.crop(-70)
        assert gradients(model, cache, 10)  # none of those tokens is left
        cache.reset()
        assert gradients(model, cache, 0)
    torch.ones(1, requires_grad=True).sum().backward()  # torch keeps a graph that failed until the next one


def test_gradients_are_not_refused_for_tokens_that_a_failure_took() -> None:
    config = LlamaConfig(num_hidden_layers=1)
    options = {"max_batch_size": 4, "memory_budget": 17 * 4096, "layout": "layer", "overlap": False}
    with vattn.VirtualCache(config, **OPTIONS | options) as cache:
        rows = torch.ones(1, 2, 50, 64, requires_grad=True)
        cache.update(rows, rows, 0)
        with pytest.raises(vattn.OutOfPages):
            cache.batch_repeat_interleave(4)
        assert cache.get_seq_length() == 0
        with torch.no_grad():
            cache.update(rows[:, :, :20], rows[:, :, :20], 0)
        sum(each.sum() for each in cache.update(rows[:, :, :5], rows[:, :, :5], 0)).backward()
        assert rows.grad is not None


# Pools


def pool_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_caches_of_one_kind_share_a_pool_and_its_thread(model: transformers.PreTrainedModel) -> None:
    want = generated(model, DynamicCache(config=model.config))
    before = target.usage()
    first = vattn.VirtualCache(model, page_size=4096)
    assert generated(model, first) == want
    threads = pool_threads()
    caches = [vattn.VirtualCache(model, page_size=4096) for _ in range(4)]
    for cache in caches:
        assert generated(model, cache) == want
    assert pool_threads() <= threads  # one of before may have been about to end
    for cache in caches:
        cache.check()
    mapped = first.stats().created_bytes
    caches.pop().close()
    assert first.stats().created_bytes == mapped * 4 // 5  # to the machine, not to the pool's other caches
    caches.pop()
    del cache
    assert first.stats().created_bytes == mapped * 3 // 5
    caches.clear()
    del first
    assert target.usage() == before
    for _ in range(3):
        assert generated(model, vattn.VirtualCache(model, page_size=4096)) == want
        assert target.usage() == before
    assert pool_threads() <= threads  # one of before may have been about to end


def test_a_shared_pool_keeps_a_few_pages_for_the_next_cache(
    model: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = generated(model, DynamicCache(config=model.config))
    monkeypatch.setattr(shared_pool, "KEPT_BYTES", 5 * 4096)
    before = target.usage()
    made = []
    for _ in range(4):
        cache = vattn.VirtualCache(model, page_size=4096)
        assert generated(model, cache) == want
        made.append(cache.stats().calls["cuMemCreate"].count)
        pages = cache.stats().created_bytes // 4096
        del cache
        gc.collect()
        assert target.usage()[1] - before[1] == 5 * 4096
    assert made[3] - made[2] == made[2] - made[1] == pages - 5
    monkeypatch.setattr(shared_pool, "KEPT_BYTES", 0)
    generated(model, vattn.VirtualCache(model, page_size=4096))
    gc.collect()
    assert target.usage() == before


def test_a_budget_that_is_given_bounds_all_layers_of_a_cache() -> None:
    """16 pages would do for either of gemma3's groups of layers."""
    model = make_model("gemma3")
    with vattn.VirtualCache(model, **OPTIONS | {"memory_budget": 20 * 4096, "layout": "layer"}) as cache:
        with pytest.raises(vattn.OutOfPages), torch.no_grad():
            model(torch.tensor(make_prompts([180])), **{CACHE: cache})
        assert cache.get_seq_length() == 0


def test_a_pool_that_is_broken_is_not_shared_any_more(model: transformers.PreTrainedModel) -> None:
    with vattn.VirtualCache(model, page_size=4096) as cache:
        generated(model, cache)
        cache._storage._pool._core._refusal = lambda: vattn.DriverError("broken", call="", code=1, name="")
        with vattn.VirtualCache(model, page_size=4096) as other:
            assert generated(model, other) == generated(model, DynamicCache(config=model.config))
        cache._storage._pool._core._refusal = None


# Where else


def test_threads_hand_a_cache_over(model: transformers.PreTrainedModel) -> None:
    """Made here, filled in one thread, used in another and closed in a third."""
    cache = vattn.VirtualCache(model, **OPTIONS)
    results: list[Any] = []

    def fill() -> None:
        with torch.no_grad():
            model(IDS, **{CACHE: cache})

    for action in (fill, lambda: results.append(generated(model, cache)), cache.close):
        Background(action).finish()
    assert results == [generated(model, DynamicCache(config=model.config))]


def test_threads_each_with_a_cache(model: transformers.PreTrainedModel) -> None:
    want = generated(model, DynamicCache(config=model.config))
    results: list[Any] = []

    def run() -> None:
        for _ in range(3):
            results.append(generated(model, vattn.VirtualCache(model, page_size=4096)))

    for each in [Background(run) for _ in range(4)]:
        each.finish()
    assert results == [want] * 12


def test_copies_between_inference_mode_and_outside(model: transformers.PreTrainedModel) -> None:
    want = generated(model, DynamicCache(config=model.config))
    with torch.inference_mode():
        cache = filled(model)
        inside = copy.deepcopy(cache)
        saved = pickle.dumps(cache)
        keys = cache.layers[0].keys
    outside = copy.deepcopy(cache)
    keys.add_(0)
    for each in (inside, outside, pickle.loads(saved), cache):
        assert generated(model, each) == want
        each.close()


def test_a_model_on_the_meta_device() -> None:
    config = MistralConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
                           intermediate_size=16, vocab_size=9, sliding_window=None)  # fmt: skip
    with torch.device("meta"):
        model = transformers.MistralForCausalLM(config)
        ids = torch.zeros(1, 3, dtype=torch.int64)
    with vattn.VirtualCache(model, **OPTIONS) as cache:
        with pytest.raises(vattn.ConfigError, match="'meta' has no memory driver"):
            model(ids, **{CACHE: cache})
        assert cache.get_seq_length() == 0
