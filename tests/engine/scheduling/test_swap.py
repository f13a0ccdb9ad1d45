"""Preempted requests whose cache is copied out and back: what is chosen when, and that nothing is kept for ever."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.support.tiny_models import make_model
from vattn.attention import PackedBatch, Span
from vattn.engine import LLM, SamplingParams
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.requests.request import Request
from vattn.engine.scheduling.swap import PreemptionMode, SwapSpace
from vattn.errors import ConfigError
from vattn.packed import KVShape

TOKEN_BYTES = 2 * 2 * 8 * 4  # one layer, keys and values, 2 heads of 8 floats


def make(*, budget: int = 1 << 20, mode: PreemptionMode = "auto") -> tuple[SwapSpace, PagedKV, Request]:
    """A swap space, its backend, and a request of 20 computed tokens."""
    kv = PagedKV(KVSpec(KVShape.uniform(1, 2, 8, 8), max_num_seqs=2, max_model_len=64), num_blocks=9)
    request = Request("r", [1] * 30, SamplingParams(), max_total_tokens=40, seed=0)
    request.admit(kv.allocate(20))
    assert request.slot is not None
    kv.prepare({request.slot: 20})
    rows = torch.arange(20 * 16.0).view(20, 2, 8)
    kv.write(0, PackedBatch.pack([Span(request.slot, 0, 20)]), rows, -rows)
    request.advance(20)
    return SwapSpace(kv, windows=[None], token_bytes=TOKEN_BYTES, budget=budget, mode=mode), kv, request


def test_out_and_back() -> None:
    swap, kv, request = make(mode="swap")
    assert request.slot is not None
    request.saved = swap.save(request)
    assert swap.used_bytes == 20 * TOKEN_BYTES
    kv.free(request.slot)
    request.preempt()
    assert request.num_computed_tokens == 20
    kv.prepare({kv.allocate(20): 20})  # somebody else has its memory
    request.admit(kv.allocate(20))
    assert request.slot is not None
    kv.prepare({request.slot: 20})
    swap.load(request)
    rows = torch.arange(20 * 16.0).view(20, 2, 8).transpose(0, 1)
    key, value = kv.read(0, request.slot, 20)
    assert torch.equal(key[0], rows)
    assert torch.equal(value[0], -rows)
    assert (swap.used_bytes, swap.num_saved, swap.num_loaded) == (0, 1, 1)


def test_the_budget_is_kept() -> None:
    swap, _, request = make(budget=20 * TOKEN_BYTES - 1, mode="swap")
    assert swap.save(request) is None
    assert swap.used_bytes == 0


@pytest.mark.parametrize(("seconds_per_token", "saves"), [(None, False), (1e-9, False), (1.0, True)])
def test_the_cheaper_way_is_taken(seconds_per_token: float | None, saves: bool) -> None:
    """Computing again is taken where it is cheap, or where nothing is known of it."""
    swap, _, request = make()
    if seconds_per_token is not None:
        swap.observe_prefill(100, 100 * seconds_per_token)
    assert (swap.save(request) is not None) == saves


def test_an_unknown_mode() -> None:
    with pytest.raises(ConfigError, match="preemption_mode='never' is not one of auto, recompute, swap"):
        LLM(make_model("llama"), preemption_mode="never")  # type: ignore[arg-type]


def test_what_is_aborted_keeps_no_copy() -> None:
    model = make_model("llama")
    with LLM(model, max_num_seqs=1) as llm:
        budget = 12 * 128 * llm.token_bytes // 5
    options = {"page_size": 4096, "eager_pages": 0}
    with LLM(
        model,
        max_num_seqs=4,
        max_model_len=128,
        memory_budget=budget,
        kv_options=options,
        preemption_mode="swap",
    ) as llm:
        for name in "abcd":
            llm.add_request(name, [3] * 20, SamplingParams(temperature=0, max_tokens=100))
        swap = llm.core.scheduler.swap
        assert swap is not None
        while not swap.used_bytes:
            llm.step()
        for name in "abcd":
            llm.abort(name)
        assert swap.used_bytes == 0
        llm.check()


@pytest.mark.parametrize("call", ["copy_out", "copy_in"])
@pytest.mark.parametrize(("family", "chunk"), [("llama", 2048), ("mistral-window", 2048), ("mistral-window", 64)])
def test_what_cannot_be_copied_is_recomputed(
    call: str, family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a window, where what comes before the copied tokens was not backed."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options: dict[str, Any] = {"max_num_batched_tokens": chunk, "preemption_mode": "swap"}
    options["kv_options"] = {"page_size": 4096, "layout": "fused"}
    with LLM(make_model(family), max_num_seqs=4, max_model_len=256, **options) as llm:
        prompts = [[3, 7, 11] * 33, [4, 8] * 50]
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.reset_prefix_cache()
        for name, prompt in zip("ab", prompts, strict=True):
            llm.add_request(name, prompt, params)
        for _ in range(6):
            llm.step()
        calls = 0

        def fail(*arguments: object) -> None:
            nonlocal calls
            calls += 1
            raise torch.OutOfMemoryError("no memory for a copy")

        monkeypatch.setattr(llm.core.kv, call, fail)
        request = llm.core.scheduler.preempt_last()
        assert (request.saved is None) == (call == "copy_out")
        outputs = {}
        while llm.has_unfinished():
            outputs |= {output.request_id: output for output in llm.step()}
        assert calls == 1
        assert [outputs[name].outputs[0].token_ids for name in "ab"] == expected
        assert llm.core.scheduler.swap is not None
        assert llm.core.scheduler.swap.used_bytes == 0
        llm.check()


def test_copies_of_what_a_failed_request_published_are_dropped() -> None:
    """A preempted request that was admitted with its blocks is computed again; another one keeps its copy."""
    sharing, alone = [3] * 40, [4] * 40
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(make_model("llama"), max_num_seqs=4, max_model_len=128, preemption_mode="swap", block_size=16) as llm:
        expected = [llm.generate(each, params, use_tqdm=False)[0].outputs[0].token_ids for each in (sharing, alone)]
        llm.reset_prefix_cache()
        scheduler = llm.core.scheduler
        for name, prompt in (("fails", sharing), ("sharing", sharing), ("alone", alone)):
            llm.add_request(name, prompt, params)
            llm.step()
        llm.step()
        copies = [scheduler.preempt_last() for _ in range(2)]
        assert all(request.saved is not None for request in copies)
        llm.core._fail(scheduler.running, FloatingPointError("not finite"))
        assert {request.prompt_token_ids[0]: request.saved is None for request in copies} == {3: True, 4: False}
        outputs = {}
        while llm.has_unfinished():
            outputs |= {output.request_id: output for output in llm.step()}
        assert [outputs[name].outputs[0].token_ids for name in ("sharing", "alone")] == expected
        assert scheduler.swap is not None
        assert scheduler.swap.used_bytes == 0
        llm.check()


def test_copies_are_forgotten_with_the_prefix_cache() -> None:
    """They are of weights that may have changed since."""
    model = copy.deepcopy(make_model("llama"))
    prompt = [3, 7, 11] * 10
    with LLM(model, max_num_seqs=2, max_model_len=128, preemption_mode="swap", block_size=16) as llm:
        scheduler = llm.core.scheduler
        llm.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        for _ in range(4):
            llm.step()
        request = scheduler.preempt_last()
        assert request.saved is not None
        before = request.output_token_ids.copy()
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(-3)
        assert llm.reset_prefix_cache() is True
        assert scheduler.swap is not None
        assert scheduler.swap.used_bytes == 0
        llm.check()
        while llm.has_unfinished():
            llm.step()
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=20 - len(before), ignore_eos=True)
        (anew,) = llm.generate([prompt + before], params, use_tqdm=False)
        assert request.output_token_ids == before + anew.outputs[0].token_ids
