"""Several completions of one prompt: it is computed once, and the others start as forks of the first one's slot."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.support.backends import MAIN_GROWING_KVS, PAGED_WINDOWS, chosen
from tests.support.effort import covering
from tests.support.tiny_models import make_model, make_prompts
from vattn.engine import LLM, FinishReason, RequestOutput, SamplingParams
from vattn.errors import NoFreeSlot, VattnError

PROMPT = make_prompts([77], seed=2)[0]
MAX_TOKENS = 12


def make_llm(kv: str, **options: Any) -> LLM:
    pages = {"kv_options": {"page_size": 4096, "layout": "fused"}} if kv == "virtual" else {}
    defaults = {"max_num_seqs": 8, "max_model_len": 200, "skip_tokenizer_init": True}
    return LLM(make_model("llama"), **chosen(kv, **{**defaults, **pages, **options}))


def several(n: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"n": n, "temperature": 1.0, "seed": 3, "max_tokens": MAX_TOKENS, **params})


def alone(prompt: list[int], n: int, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """What `n` requests of their own give, each with the seed that a completion has."""
    return list(_alone(tuple(prompt), n, max_tokens))


@functools.cache
def _alone(prompt: tuple[int, ...], n: int, max_tokens: int) -> tuple[list[int], ...]:
    with make_llm("virtual", enable_prefix_caching=False) as llm:
        sampling = [several(1, max_tokens=max_tokens, seed=3 + index) for index in range(n)]
        outputs = llm.generate([list(prompt)] * n, sampling, use_tqdm=False)
        return tuple(output.outputs[0].token_ids for output in outputs)


def tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def idle(llm: LLM) -> None:
    """Nothing is lost: all memory is there for the next request."""
    llm.check()
    assert not llm.has_unfinished()
    assert llm.core.kv.available() == llm.core.kv.total()
    llm.core.kv.evict_prefixes()
    assert llm.core.kv.stats().used_bytes == 0
    llm.core.kv.check()


def refuse_after_fork(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """The first call of `available` after a fork raises; the list has an element once it did."""
    kv, refused = llm.core.kv, list[None]()
    fork, available = kv.fork, kv.available

    def refuse() -> int:
        monkeypatch.setattr(kv, "available", available)
        refused.append(None)
        raise VattnError("injected")

    def fork_first(slot: int) -> int:
        forked = fork(slot)
        if not refused:
            monkeypatch.setattr(kv, "available", refuse)
        return forked

    monkeypatch.setattr(kv, "fork", fork_first)
    return refused


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [512, 32])
def test_the_prompt_is_computed_once(kv: str, caching: bool, chunk: int) -> None:
    records = []
    options = {"enable_prefix_caching": caching, "max_num_batched_tokens": chunk, "on_step": records.append}
    with make_llm(kv, **options) as llm:
        output = llm.generate(PROMPT, several(4, logprobs=1), use_tqdm=False)[0]
        idle(llm)
    assert tokens(output) == alone(PROMPT, 4)
    assert len(set(map(tuple, tokens(output)))) > 1
    assert sum(record.prefill_tokens for record in records) == len(PROMPT)
    assert len(records) == -(-len(PROMPT) // chunk) + MAX_TOKENS - 1
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert [next(iter(report)) for report in completion.logprobs] == completion.token_ids
    if kv not in ("static", "dynamic"):
        alike = 4 * (len(PROMPT) + MAX_TOKENS) * llm.token_bytes
        assert max(record.kv.used_bytes for record in records) < 0.75 * alike


def test_prompts_that_come_together_are_computed_together(kv: str) -> None:
    """A request waits for the one that it will be forked from, and nobody waits for them."""
    records = []
    prompts = make_prompts([5, 20, 1, 9])
    sampling = [several(2), several(3), several(2), several(1)]
    with make_llm(kv, on_step=records.append) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        idle(llm)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert tokens(output) == alone(prompt, len(output.outputs))
    assert [record.prefill_tokens for record in records[:2]] == [35, 0]
    assert len(records) == MAX_TOKENS


@pytest.mark.parametrize("caching", [True, False])
def test_fewer_slots_than_completions(kv: str, caching: bool) -> None:
    """Those that get no slot wait, and come back through the cache or are computed, one for all that then fit."""
    records = []
    other = make_prompts([30])[0]
    with make_llm(kv, max_num_seqs=2, enable_prefix_caching=caching, on_step=records.append) as llm:
        outputs = llm.generate([PROMPT, other], [several(5), several(2)], use_tqdm=False)
        idle(llm)
    assert tokens(outputs[0]) == alone(PROMPT, 5)
    assert tokens(outputs[1]) == alone(other, 2)
    assert max(record.num_running for record in records) == 2
    if not caching:
        assert sum(record.prefill_tokens for record in records) == 3 * len(PROMPT) + 2 * len(other)


@pytest.mark.slow
@pytest.mark.parametrize(("caching", "kv", "mode"), covering([True, False], MAIN_GROWING_KVS, ["recompute", "swap"]))
def test_short_of_memory(caching: bool, kv: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.engine.scheduling.scheduler.HEADROOM_TOKENS", 4)
    with make_llm(kv) as llm:
        token_bytes = llm.token_bytes
    records = []
    sizes = {"memory_budget": 160 * token_bytes, "max_model_len": 120}
    options = {**sizes, "max_num_batched_tokens": 32, "on_step": records.append}
    with make_llm(kv, enable_prefix_caching=caching, preemption_mode=mode, **options) as llm:
        for _ in range(2):
            outputs = llm.generate([PROMPT, PROMPT[:30]], several(4, max_tokens=40), use_tqdm=False)
            idle(llm)
            assert tokens(outputs[0]) == alone(PROMPT, 4, max_tokens=40)
            assert tokens(outputs[1]) == alone(PROMPT[:30], 4, max_tokens=40)
    assert sum(record.num_preempted for record in records) > 0


def test_one_that_ends_early_takes_nothing_from_the_others(kv: str) -> None:
    with make_llm(kv) as llm:
        group = llm.core.make_group("x", PROMPT, several(4), kind=None)  # type: ignore[arg-type]
        llm.core.add_group(group)
        for ended in (0, 2):  # the one whose slot was forked is the first
            llm.step()
            llm.core.scheduler.finish(group.requests[ended], FinishReason.ABORT)
            llm.check()
        while llm.has_unfinished():
            llm.step()
        want = alone(PROMPT, 4)
        assert [r.output_token_ids for r in group.requests] == [want[0][:1], want[1], want[2][:2], want[3]]
        idle(llm)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_frees_all(kv: str, steps: int) -> None:
    with make_llm(kv, max_num_batched_tokens=60) as llm:
        llm.add_request("x", PROMPT, several(4))
        for _ in range(steps):
            llm.step()
        output = llm.abort("x")
        assert output is not None
        assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 4
        idle(llm)


def test_what_fails_after_the_fork_fails_all_and_loses_nothing(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(kv) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.core.sampler, "sample", lambda logits, requests: 1 / 0)
            output = llm.generate(PROMPT, several(3), use_tqdm=False)[0]
        assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
        idle(llm)
        assert tokens(llm.generate(PROMPT, several(3), use_tqdm=False)[0]) == alone(PROMPT, 3)


def test_what_fails_between_two_forks_fails_those_and_loses_nothing(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is asked about before each of them, and a driver may have an answer to the first only."""
    with make_llm(kv) as llm:
        refused = refuse_after_fork(llm, monkeypatch)
        llm.add_request("n", PROMPT, several(3))
        *_, last = [output for _ in range(MAX_TOKENS + 2) for output in llm.step()]
        assert refused
        assert [completion.finish_reason for completion in last.outputs] == ["error", "error", "length"]
        assert tokens(last)[2] == alone(PROMPT, 3)[2]
        idle(llm)


def test_a_refused_fork_waits(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(slot: int) -> int:
        raise NoFreeSlot("injected")

    with make_llm(kv) as llm:
        monkeypatch.setattr(llm.core.kv, "fork", refuse)
        assert tokens(llm.generate(PROMPT, several(3), use_tqdm=False)[0]) == alone(PROMPT, 3)
        idle(llm)


def test_a_fork_that_fails_holds_nobody_back(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may lack the memory for the copy. Others go on meanwhile, so no step is ever empty."""
    with make_llm(kv) as llm:
        fork, calls = llm.core.kv.fork, []

        def fail_once(slot: int) -> int:
            calls.append(slot)
            if len(calls) == 2:
                raise RuntimeError("injected")
            return fork(slot)

        monkeypatch.setattr(llm.core.kv, "fork", fail_once)
        llm.add_request("others", PROMPT[::-1], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        llm.add_request("n", PROMPT, several(3))
        finished: list[RequestOutput] = []
        while not finished:
            finished = [output for output in llm.step() if output.finished]
            llm.check()
        assert [output.request_id for output in finished] == ["n"]
        assert tokens(finished[0]) == alone(PROMPT, 3)


@pytest.mark.parametrize("kv", ["paged", PAGED_WINDOWS])
def test_a_copy_that_fails_gives_the_slot_back(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(kv) as llm:
        backend = llm.core.kv
        slot = backend.allocate(5)
        backend.prepare({slot: 5})
        before = backend.available()
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_copy_block", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                backend.fork(slot)
        assert backend.available() == before
        backend.free(slot)
        backend.check()
        assert backend.available() == backend.total()


def test_forks_publish_under_the_salt_of_their_prompt_or_not_at_all(caching_kv: str) -> None:
    with make_llm(caching_kv) as llm:
        salted = {"prompt_token_ids": PROMPT, "cache_salt": "a"}
        scored = llm.generate(salted, several(3, prompt_logprobs=0), use_tqdm=False)[0]
        assert scored.prompt_logprobs is not None
        output = llm.generate(PROMPT, several(3), use_tqdm=False)[0]
        assert output.num_cached_tokens == 0
        assert tokens(output) == tokens(scored)
        longer = PROMPT + tokens(output)[2]
        for salt, hit in (("a", False), ("", True)):
            prompt = {"prompt_token_ids": longer, "cache_salt": salt}
            again = llm.generate(prompt, several(1), use_tqdm=False)[0]
            assert (again.num_cached_tokens >= 64) == hit
        idle(llm)


def test_a_write_through_a_fork_changes_nobody_elses_tokens(kv: str) -> None:
    """The rows that each slot has are told from the others' after every step."""
    with make_llm(kv) as llm:
        llm.add_request("x", PROMPT, several(3))
        llm.step()
        requests = list(llm.core.scheduler.running)
        assert len(requests) == 3

        def rows(slot: int, length: int) -> torch.Tensor:
            return torch.cat([torch.cat(llm.core.kv.read(layer, slot, length), dim=-1).clone() for layer in range(2)])

        slots = [request.slot for request in requests if request.slot is not None]
        shared = rows(slots[0], len(PROMPT))
        for step in range(1, MAX_TOKENS - 1):
            before = [rows(slot, len(PROMPT) + step - 1) for slot in slots]
            llm.step()
            for slot, old in zip(slots, before, strict=True):
                new = rows(slot, len(PROMPT) + step)
                assert torch.equal(new[:, :, :-1], old)
                assert torch.equal(new[:, :, : len(PROMPT)], shared)
        assert not torch.equal(rows(slots[0], len(PROMPT) + 5), rows(slots[1], len(PROMPT) + 5))
        llm.abort("x")
