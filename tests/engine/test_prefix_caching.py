"""Requests with a common start compute it once, and nothing else about them changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from tests.support.backends import CACHING_KVS, PAGED_WINDOWS, chosen
from tests.support.effort import covering
from tests.support.tiny_models import FAMILIES, expected, make_model, make_prompts
from vattn.engine import LLM, InvalidRequest, RequestOutput, SamplingParams
from vattn.engine.model import runner
from vattn.engine.scheduling.scheduler import HEAD_TOKENS
from vattn.errors import MappingLimit

MAX_TOKENS = 10
PREFIX = make_prompts([90], seed=5)[0]


def make_llm(family: str, kv: str, **options: object) -> LLM:
    pages = {"kv_options": {"page_size": 4096, "layout": "fused"}} if kv == "virtual" else {}
    if kv == PAGED_WINDOWS and family.startswith("deepseek"):
        options["block_size"] = 128
    return LLM(make_model(family), **chosen(kv, **{"skip_tokenizer_init": True, **pages, **options}))


def run(llm: LLM, prompts: list[list[int]], **params: int) -> list[RequestOutput]:
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, **params)  # type: ignore[arg-type]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    llm.check()
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("family", "kv"), covering(list(FAMILIES), CACHING_KVS))
def test_the_same_tokens_from_the_cache(family: str, kv: str) -> None:
    """A shared start, a prompt that was there before, a continued conversation; in chunks beside decodes."""
    prompts = [PREFIX + tail for tail in make_prompts([3, 20, 1])]
    with make_llm(family, kv, max_num_seqs=3, max_num_batched_tokens=32, max_model_len=200) as llm:
        first = run(llm, prompts)
        again = [*prompts, prompts[0] + first[0].outputs[0].token_ids + [7, 8, 9]]
        outputs = run(llm, again)
    found = zip(again, tokens(outputs), strict=True)
    want = [expected(family, prompt, MAX_TOKENS, answer) for prompt, answer in found]
    assert tokens(first) == want[:3]
    assert tokens(outputs) == want
    assert first[0].num_cached_tokens == 0
    if not (family.startswith("deepseek") and kv != "paged"):  # blocks of 128 latents; see test_mla
        assert all(output.num_cached_tokens > 0 for output in [*first[1:], *outputs])
    assert all(output.num_cached_tokens < len(prompt) for output, prompt in zip(outputs, again, strict=True))


def test_requests_that_come_together_compute_their_start_once(caching_kv: str) -> None:
    assert len(PREFIX) > HEAD_TOKENS
    computed = []
    with make_llm(
        "llama", caching_kv, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=200, block_size=32
    ) as llm:
        llm.on_step = lambda record: computed.append(record.prefill_tokens)
        outputs = run(llm, [PREFIX + tail for tail in make_prompts([5] * 8)])
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[0] == 0
    assert min(cached[1:]) > 0
    assert sum(computed) == sum(len(output.prompt_token_ids) for output in outputs) - sum(cached)


@pytest.mark.parametrize("kv", ["static", "dynamic"])
def test_a_backend_without_a_cache_computes_prompts_together(kv: str) -> None:
    """Nothing will be found, so nobody waits for it."""
    computed: list[int] = []
    with make_llm("llama", kv, max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=200) as llm:
        llm.on_step = lambda record: computed.append(record.prefill_tokens)
        run(llm, [PREFIX] * 8)
        assert llm.core.scheduler.query_tokens == 0
    assert computed[0] == 8 * len(PREFIX)


def test_who_does_not_use_the_cache_waits_for_nobody(caching_kv: str) -> None:
    computed: list[int] = []
    with make_llm("llama", caching_kv, max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=200) as llm:
        llm.on_step = lambda record: computed.append(record.prefill_tokens)
        greedy = {"temperature": 0, "max_tokens": 1}
        params = [SamplingParams(**greedy), SamplingParams(**greedy, prompt_logprobs=0)]
        llm.generate([PREFIX] * 2, params, use_tqdm=False)
    assert computed[0] == 2 * len(PREFIX)


def test_a_refused_call_keeps_what_is_cached(caching_kv: str) -> None:
    with make_llm("llama", caching_kv, max_model_len=200) as llm:
        run(llm, [PREFIX])
        cached = run(llm, [PREFIX])[0].num_cached_tokens
        assert cached
        with pytest.raises(InvalidRequest):
            llm.generate([[10**9]], use_tqdm=False)
        assert run(llm, [PREFIX])[0].num_cached_tokens == cached


def test_completions_of_one_prompt_share_it(caching_kv: str) -> None:
    computed = []
    with make_llm("llama", caching_kv, max_num_seqs=4, max_model_len=200) as llm:
        llm.on_step = lambda record: computed.append(record.prefill_tokens)
        sampling = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=MAX_TOKENS)
        shared = llm.generate(PREFIX, sampling, use_tqdm=False)[0]
    assert sum(computed) < 2 * len(PREFIX)
    with make_llm("llama", caching_kv, max_num_seqs=4, max_model_len=200, enable_prefix_caching=False) as llm:
        alone = llm.generate(PREFIX, sampling, use_tqdm=False)[0]
    assert [c.token_ids for c in shared.outputs] == [c.token_ids for c in alone.outputs]


def test_a_start_that_is_computed_in_chunks_is_computed_once(caching_kv: str) -> None:
    computed = []
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 200}
    with make_llm("llama", caching_kv, **options) as llm:
        llm.on_step = lambda record: computed.append(record.prefill_tokens)
        prompts = [PREFIX + tail for tail in make_prompts([5] * 4)]
        outputs = run(llm, prompts)
        block = llm.core.kv.prefix_block_tokens
    assert tokens(outputs) == [expected("llama", prompt, MAX_TOKENS) for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0] + [len(PREFIX) // block * block] * 3
    assert sum(computed) == 4 * len(prompts[0]) - 3 * (len(PREFIX) // block * block)


@pytest.mark.parametrize("common", [80, 90, 128])
def test_requests_with_a_cached_start_are_computed_together(caching_kv: str, common: int) -> None:
    """Each has the same start as the others that are being computed, and what it could wait for is its own."""
    start = make_prompts([common], seed=6)[0]
    computed = []
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 256}
    with make_llm("llama", caching_kv, **options) as llm:
        llm.on_step = lambda record: computed.append(record.prefill_tokens)
        outputs = run(llm, [start + tail for tail in make_prompts([60] * 6)])
        found = common // llm.core.kv.prefix_block_tokens * llm.core.kv.prefix_block_tokens
    assert [output.num_cached_tokens for output in outputs] == [0] + [found] * 5
    assert computed[:3] == [common + 60, 5 * (common - found + 60), 0]


def test_hits_are_counted_once_per_request(caching_kv: str) -> None:
    with make_llm("llama", caching_kv, max_model_len=200, max_num_seqs=2) as llm:
        scheduler = llm.core.scheduler
        run(llm, [PREFIX])
        assert (scheduler.query_tokens, scheduler.hit_tokens) == (len(PREFIX), 0)
        llm.add_request("again", PREFIX, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        for _ in range(3):
            llm.step()
            request = scheduler.preempt_last()
        while llm.has_unfinished():
            llm.step()
        assert request.num_preemptions == 3
        assert 0 < request.num_cached_tokens < len(PREFIX)
        assert (scheduler.query_tokens, scheduler.hit_tokens) == (2 * len(PREFIX), request.num_cached_tokens)


def test_salts_and_switching_off(caching_kv: str) -> None:
    prompt = {"prompt_token_ids": PREFIX}
    sampling = SamplingParams(temperature=0, max_tokens=2)
    with make_llm("llama", caching_kv, max_model_len=200) as llm:
        for salt, hit in (("a", False), ("b", False), ("a", True), ("", False), ("b", True)):
            output = llm.generate({**prompt, "cache_salt": salt}, sampling, use_tqdm=False)[0]
            assert (output.num_cached_tokens > 0) == hit
        with pytest.raises(InvalidRequest, match="cache_salt is 5; give text"):
            llm.generate({**prompt, "cache_salt": 5}, sampling, use_tqdm=False)
    with make_llm("llama", caching_kv, max_model_len=200, enable_prefix_caching=False) as llm:
        assert [run(llm, [PREFIX])[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_prompt_logprobs_skip_the_cache(caching_kv: str) -> None:
    with make_llm("llama", caching_kv, max_model_len=200) as llm:
        first = run(llm, [PREFIX], prompt_logprobs=0)[0]
        second = run(llm, [PREFIX], prompt_logprobs=0)[0]
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(second.prompt_logprobs) == len(PREFIX)


@pytest.mark.parametrize(("kv", "mode"), covering(CACHING_KVS, ["recompute", "swap"]))
def test_preempted_requests_with_shared_prefixes(kv: str, mode: str) -> None:
    """A pool that holds less than all of them: cached blocks give way, nobody gets another token."""
    prompts = [PREFIX[:40] + tail for tail in make_prompts([4, 5, 6, 7])]
    with make_llm("llama", kv, max_num_seqs=1) as llm:
        budget = 20 * 128 * llm.token_bytes // 10
    want = [expected("llama", prompt, 100) for prompt in prompts]
    options = {"max_model_len": 170, "memory_budget": budget, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with make_llm("llama", kv, preemption_mode=mode, **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=100)
        for _ in range(2):
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            llm.check()
            assert tokens(outputs) == want
        assert llm.core.kv.available() == llm.core.kv.total()


def test_a_failed_forward_publishes_nothing(caching_kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = expected("llama", PREFIX, MAX_TOKENS)
    with make_llm("llama", caching_kv, max_model_len=200) as llm:
        run_step = llm.core.runner.run
        monkeypatch.setattr(llm.core.runner, "run", lambda entries: 1 / 0)
        assert run(llm, [PREFIX])[0].outputs[0].finish_reason == "error"
        monkeypatch.setattr(llm.core.runner, "run", run_step)
        output = run(llm, [PREFIX])[0]
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == want


def test_a_prefix_that_cannot_be_mapped_is_computed(caching_kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_prompts([30], seed=6)[0]
    want = [expected("llama", prompt, MAX_TOKENS) for prompt in (other, PREFIX)]
    with make_llm("llama", caching_kv, max_num_seqs=4, max_model_len=200) as llm:
        run(llm, [PREFIX])
        sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        llm.add_request("other", other, sampling)
        outputs = {output.request_id: output for output in llm.step()}
        admit, refused = llm.core.kv.admit, []

        def refuse_once(token_ids: Any, salt: bytes = b"") -> Any:
            if not refused:
                refused.append(salt)
                raise MappingLimit("injected", missing_pages=1, missing_bytes=4096)
            return admit(token_ids, salt)

        monkeypatch.setattr(llm.core.kv, "admit", refuse_once)
        llm.add_request("again", PREFIX, sampling)
        while llm.has_unfinished():
            outputs |= {output.request_id: output for output in llm.step()}
            llm.check()
        assert refused
        assert tokens([outputs["other"], outputs["again"]]) == want
        assert outputs["again"].num_cached_tokens == 0
        assert run(llm, [PREFIX])[0].num_cached_tokens > 0
        assert llm.core.kv.available() == llm.core.kv.total()


# What is not finite


@contextlib.contextmanager
def poisoned(module: torch.nn.Module, token: int | None = None) -> Iterator[None]:
    """`module` gives NaN for one row of a step, or all of them."""

    def spoil(_: object, args: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        if token is None:
            output[:] = float("nan")
        elif output.shape[1] > token:
            output[:, token] = float("nan")
        return output

    handle = module.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def values_of_the_last_layer(llm: LLM) -> torch.nn.Module:
    layers: Any = llm.model.get_submodule("model.layers")
    projection: torch.nn.Module = layers[len(layers) - 1].self_attn.v_proj
    return projection


@pytest.mark.parametrize("chunk", [32, 128])
def test_a_prefill_that_is_not_finite_is_not_published(caching_kv: str, chunk: int) -> None:
    prompt = make_prompts([100])[0]
    want = expected("llama", prompt, MAX_TOKENS)
    with make_llm("llama", caching_kv, max_num_batched_tokens=chunk, max_num_seqs=4) as llm:
        with poisoned(llm.model.get_input_embeddings()):
            failed = run(llm, [prompt])[0]
        assert failed.outputs[0].finish_reason == "error"
        assert llm.core.scheduler.hit_tokens == 0
        first, second = run(llm, [prompt])[0], run(llm, [prompt])[0]
    assert tokens([first, second]) == [want, want]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 0


class NotedReads(torch.Tensor):
    """A tensor that notes when its values go to the host."""

    noted: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cpu, torch.Tensor.to, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__):
            cls.noted.append("read")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_what_comes_is_decided_before_a_prefill_is_seen_to_be_finite(
    caching_kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the look waits until the prefill is computed, while the next chunk's memory could be mapped."""
    are_finite = runner._are_finite
    monkeypatch.setattr(runner, "_are_finite", lambda rows: are_finite(rows).as_subclass(NotedReads))
    monkeypatch.setattr(NotedReads, "noted", [])
    with make_llm("llama", caching_kv, max_num_batched_tokens=64, max_num_seqs=1) as llm:
        core = llm.core
        core.runner.launches = True
        look_ahead = core.kv.look_ahead

        def noted_look_ahead() -> None:
            NotedReads.noted.append("look ahead")
            look_ahead()

        monkeypatch.setattr(core.kv, "look_ahead", noted_look_ahead)
        llm.add_request("a", make_prompts([100])[0], SamplingParams(temperature=0, max_tokens=1))
        llm.step()
    assert NotedReads.noted[0] == "look ahead"
    assert "read" in NotedReads.noted


def test_completions_of_a_prefill_that_is_not_finite_do_not_publish_it(caching_kv: str) -> None:
    prompt = make_prompts([100])[0]
    want = expected("llama", prompt, MAX_TOKENS)
    with make_llm("llama", caching_kv, max_num_batched_tokens=128, max_num_seqs=4) as llm:
        # No token is taken, so that none of them fails.
        params = SamplingParams(max_tokens=0, n=3, temperature=1.0)
        with poisoned(llm.model.get_input_embeddings()):
            (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert [each.finish_reason for each in output.outputs] == ["length"] * 3
        again = run(llm, [prompt])[0]
    assert tokens([again]) == [want]
    assert again.num_cached_tokens == 0


def test_a_last_chunk_of_one_token_that_is_not_finite_is_not_published(caching_kv: str) -> None:
    """With max_tokens=0 the request does not fail, since it needs no token."""
    prompt = make_prompts([64])[0]
    longer = prompt + make_prompts([8], seed=5)[0]
    want = expected("llama", longer, MAX_TOKENS)
    with make_llm("llama", caching_kv, max_num_batched_tokens=63, max_num_seqs=2) as llm:
        assert len(prompt) % llm.core.kv.prefix_block_tokens == 0
        llm.add_request("a", prompt, SamplingParams(max_tokens=0))
        assert llm.step() == []
        with poisoned(llm.model.get_input_embeddings()):
            (output,) = llm.step()
        assert output.outputs[0].finish_reason == "length"
        again = run(llm, [longer])[0]
    assert tokens([again]) == [want]
    assert again.num_cached_tokens < len(prompt)


@pytest.mark.parametrize(("chunk", "steps", "token"), [(32, 0, 5), (1, 5, 0)])
def test_what_no_window_reaches_is_not_published_either(caching_kv: str, chunk: int, steps: int, token: int) -> None:
    """The request itself is none the worse for it; one that continued the poisoned block would be."""
    family = "mistral-window"
    prompt = make_prompts([64])[0]
    longer = [prompt[:30] + tail for tail in make_prompts([8, 30], seed=5)]
    want = [expected(family, each, MAX_TOKENS) for each in (prompt, *longer)]
    with make_llm(family, caching_kv, max_num_batched_tokens=chunk, max_num_seqs=1) as llm:
        llm.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        for _ in range(steps):
            assert llm.step() == []
        with poisoned(values_of_the_last_layer(llm), token=token):
            assert llm.step() == []
        outputs: list[RequestOutput] = []
        while llm.has_unfinished():
            outputs += llm.step()
        assert tokens(outputs[-1:]) == want[:1]
        later = run(llm, longer)
    assert later[0].num_cached_tokens == 0
    assert tokens(later) == want[1:]


def test_a_failed_request_takes_back_what_it_published(caching_kv: str) -> None:
    prompt = make_prompts([120])[0]
    want = expected("llama", prompt, MAX_TOKENS)
    with make_llm("llama", caching_kv, max_num_batched_tokens=66, max_num_seqs=1) as llm:
        llm.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        assert llm.step() == []
        with poisoned(llm.model.get_output_embeddings()):
            failed = llm.step()[0]
        assert isinstance(failed.error, FloatingPointError)
        llm.check()
        again = run(llm, [prompt])[0]
        assert again.num_cached_tokens == 0
        assert llm.core.kv.available() == llm.core.kv.total()
    assert tokens([again]) == [want]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_failed_request_takes_back_what_it_published_before_it_was_preempted(caching_kv: str, mode: str) -> None:
    prompt = make_prompts([120])[0]
    want = expected("llama", prompt, MAX_TOKENS)
    options = {"max_num_batched_tokens": 66, "max_num_seqs": 1, "preemption_mode": mode}
    with make_llm("llama", caching_kv, **options) as llm:
        run(llm, [prompt[:33]])
        others = llm.core.kv.find(prompt)
        llm.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        assert llm.step() == []
        assert llm.core.kv.find(prompt) > others > 0
        assert (llm.core.scheduler.preempt_last().saved is not None) == (mode == "swap")
        with poisoned(llm.model.get_output_embeddings()):
            failed = llm.step()[0]
        assert isinstance(failed.error, FloatingPointError)
        llm.check()
        assert llm.core.kv.find(prompt) == others
        again = run(llm, [prompt])[0]
    assert tokens([again]) == [want]


def test_a_failed_request_takes_back_what_it_computed_in_place_of_evicted_blocks(caching_kv: str) -> None:
    prompt = make_prompts([120])[0]
    with make_llm("llama", caching_kv, max_num_batched_tokens=66, max_num_seqs=1, preemption_mode="recompute") as llm:
        run(llm, [prompt[:33]])
        llm.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        assert llm.step() == []
        assert llm.core.scheduler.preempt_last().num_cached_tokens > 0
        llm.core.kv.evict_prefixes()
        assert llm.step() == []
        llm.core.scheduler.preempt_last()
        assert llm.core.kv.find(prompt) > 0
        with poisoned(llm.model.get_output_embeddings()):
            failed = llm.step()[0]
        assert isinstance(failed.error, FloatingPointError)
        llm.check()
        assert llm.core.kv.find(prompt) == 0


def test_a_failed_request_leaves_what_others_published(caching_kv: str) -> None:
    prompt = make_prompts([100])[0]
    expected("llama", prompt, MAX_TOKENS)
    with make_llm("llama", caching_kv, max_num_batched_tokens=128, max_num_seqs=2) as llm:
        run(llm, [prompt])
        with poisoned(llm.model.get_output_embeddings()):
            failed = run(llm, [prompt])[0]
        assert failed.outputs[0].finish_reason == "error"
        assert failed.num_cached_tokens > 0
        block = llm.core.kv.prefix_block_tokens  # what is not in a block was the failed request's own by then
        assert run(llm, [prompt])[0].num_cached_tokens == failed.num_cached_tokens // block * block
