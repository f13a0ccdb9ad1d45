"""The engine as its users drive it: outputs, stops, aborts, failures, bad input."""

from __future__ import annotations

import copy
import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from tests.support.backends import chosen
from tests.support.interruption import entries, interrupted
from tests.support.tenants import tenant
from tests.support.tiny_models import VOCAB, expected, make_model, make_prompts, make_tokenizer
from vattn.engine import (
    LLM,
    BeamSearchParams,
    EngineClosed,
    InvalidRequest,
    NotOffered,
    RequestOutput,
    SamplingParams,
    StepRecord,
)
from vattn.engine.model import runner
from vattn.engine.model.optimize import supported
from vattn.errors import CacheClosed, ConfigError, OutOfPages, StreamCapturing, VattnError

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def make_llm(kv: str = "paged", **keywords: Any) -> LLM:
    return LLM(make_model("llama"), **chosen(kv, **{"max_model_len": 128, "memory_budget": "4MiB", **keywords}))


def drain(llm: LLM) -> dict[str, RequestOutput]:
    """Step to the end, checking the books after every step."""
    finished = {}
    while llm.has_unfinished():
        for output in llm.step():
            if output.finished:
                finished[output.request_id] = output
        llm.check()
    return finished


def assert_idle(llm: LLM) -> None:
    llm.check()
    assert not llm.has_unfinished()
    assert llm.core.kv.available() == llm.core.kv.total()
    assert llm.core.kv.stats().live_bytes == 0


def test_without_a_model_it_runs_the_one_that_ships() -> None:
    with LLM(memory_budget="64MiB", max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=64)
        (output,) = llm.generate("Question: What is 17 + 25?\nAnswer:", params, use_tqdm=False)
    assert "42" in output.outputs[0].text


def test_outputs_are_shaped_as_in_vllm(kv: str) -> None:
    prompts = make_prompts([5, 9])
    with make_llm(kv) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.request_id for output in outputs] == ["0", "1"]
    for output, prompt in zip(outputs, prompts, strict=True):
        assert (output.prompt, output.prompt_token_ids, output.finished) == (None, prompt, True)
        completion = output.outputs[0]
        assert completion.token_ids == expected("llama", prompt, 8)
        assert (completion.index, completion.text, completion.finish_reason) == (0, "", "length")
        assert completion.finished() is True
        assert output.lora_request is completion.lora_request is None
        times = output.metrics
        assert times.first_scheduled_time is not None
        assert times.first_token_time is not None
        assert times.finished_time is not None
        assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time
        assert 0 < (times.time_to_first_token or 0) <= (times.latency or 0)


def test_a_completion_says_whether_it_has_ended() -> None:
    with make_llm() as llm:
        llm.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=3))
        ended = [output.outputs[0].finished() for _ in range(3) for output in llm.step()]
    assert ended == [False, False, True]


def test_prompt_forms() -> None:
    with make_llm(tokenizer=make_tokenizer()) as llm:
        forms: list[Any] = [
            "w5 w6 w7",
            [5, 6, 7],
            (5, 6, 7),
            torch.tensor([5, 6, 7]),
            {"prompt": "w5 w6 w7"},
            {"prompt_token_ids": [5, 6, 7]},
        ]
        outputs = llm.generate(forms, GREEDY, use_tqdm=False)
        single = llm.generate("w5 w6 w7", GREEDY, use_tqdm=False)
        ids = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
        assert llm.generate([], GREEDY, use_tqdm=False) == []
    want = expected("llama", [5, 6, 7], 8)
    for output in [*outputs, *single, *ids]:
        assert output.outputs[0].token_ids == want
        assert output.outputs[0].text.split() == [f"w{i}" for i in want if i > 1]
    assert len(single) == len(ids) == 1
    assert single[0].prompt == "w5 w6 w7"


def test_one_set_of_parameters_for_each_prompt(kv: str) -> None:
    prompts = make_prompts([5, 9, 3])
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 4, 9)]
    with make_llm(kv) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        with pytest.raises(ConfigError, match="3 prompts with 2"):
            llm.generate(prompts, params[:2])
        assert_idle(llm)
    assert [output.outputs[0].token_ids for output in outputs] == [
        expected("llama", prompt, param.max_tokens) for prompt, param in zip(prompts, params, strict=True)
    ]


def test_stop_and_eos(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = make_prompts([23])[0]
    tokens = expected("llama", prompt, 8)
    assert tokens[3] not in tokens[:3]
    model = make_model("llama")
    monkeypatch.setattr(model.generation_config, "eos_token_id", [tokens[3], VOCAB + 5])
    with LLM(model, **chosen(kv)) as llm:
        cases: list[tuple[dict[str, Any], int, str]] = [
            ({}, 4, "stop"),
            ({"ignore_eos": True}, 8, "length"),
            ({"stop_token_ids": [tokens[1]]}, 2, "stop"),
            ({"stop_token_ids": [tokens[1]], "ignore_eos": True}, 2, "stop"),
        ]
        params = [SamplingParams(temperature=0, max_tokens=8, **keywords) for keywords, _, _ in cases]
        outputs = llm.generate([prompt] * len(cases), params, use_tqdm=False)
        assert_idle(llm)
    for output, (_, count, reason) in zip(outputs, cases, strict=True):
        completion = output.outputs[0]
        assert (completion.token_ids, completion.finish_reason) == (tokens[:count], reason)
        assert completion.stop_reason == (tokens[1] if count == 2 else None)


def test_why_an_end_of_sequence_token_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM: the tokenizer's own is no reason, wherever else it is named; another one of the model's is."""
    prompt = make_prompts([23])[0]
    tokens = expected("llama", prompt, 8)
    fourth = tokens[3]
    assert fourth not in tokens[:3]
    tokenizer = make_tokenizer()
    for own, others, ignored, extra, reason in (
        (fourth, [], False, [], None),
        (fourth, [], False, [fourth], None),
        (fourth, [], True, [fourth], fourth),
        (0, [fourth], False, [], fourth),
        (fourth, None, False, [], None),  # the generation config does not name the tokenizer's
        (fourth, [], True, [fourth, 0], fourth),
    ):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(own)
        ends = [0] if others is None else [own, *others]
        monkeypatch.setattr(make_model("llama").generation_config, "eos_token_id", ends)
        with make_llm("paged", tokenizer=tokenizer) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=ignored, stop_token_ids=extra)
            completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert (completion.token_ids, completion.finish_reason) == (tokens[:4], "stop")
        assert completion.stop_reason == reason


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_end_of_sequence_token_before_min_tokens(ignore_eos: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = make_prompts([23])[0]
    eos = expected("llama", prompt, 8)[3]
    monkeypatch.setattr(make_model("llama").generation_config, "eos_token_id", [eos, VOCAB + 5])
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=8, ignore_eos=ignore_eos)
    with make_llm("paged") as llm:
        completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert eos not in completion.token_ids
    assert len(completion.token_ids) == 8


def test_without_detokenizing() -> None:
    with make_llm("paged", tokenizer=make_tokenizer()) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
        completion = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
    assert (completion.token_ids, completion.text) == (expected("llama", [5, 6, 7], 4), "")


def test_the_context_ends_a_request(kv: str) -> None:
    prompt = make_prompts([20])[0]
    with make_llm(kv, max_model_len=25) as llm:
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)[0]
        assert_idle(llm)
    assert output.outputs[0].token_ids == expected("llama", prompt, 5)
    assert output.outputs[0].finish_reason == "length"


def test_seeds(kv: str) -> None:
    """The same seed gives the same tokens whatever shares the batch; none gives what the engine's seed gives."""
    prompts = make_prompts([9, 9, 30])
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in (7, 8, 7)]
    with make_llm(kv, max_num_batched_tokens=64) as llm:
        alone = [
            llm.generate(prompt, param, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, param in zip(prompts, params, strict=True)
        ]
        together = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert together == alone
    runs = []
    for seed in (1, 1, 2):
        with make_llm(kv, seed=seed) as llm:
            outputs = llm.generate([prompts[0]] * 2, SamplingParams(max_tokens=12), use_tqdm=False)
            runs.append([output.outputs[0].token_ids for output in outputs])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1], "two requests without a seed share their random numbers"


def test_aborts_free_memory_and_harm_nobody(kv: str) -> None:
    prompts = make_prompts([20, 30, 5, 9, 12, 40])
    with make_llm(kv, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        for i, prompt in enumerate(prompts):
            llm.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=10))
        finished = {}
        for step in range(6):
            for output in llm.step():
                if output.finished:
                    finished[output.request_id] = output
            if step in (0, 3):  # one that has just begun, and one that waits
                aborted = llm.abort(str(1 if step == 0 else 5))
                assert aborted is not None
                assert (aborted.finished, aborted.outputs[0].finish_reason) == (True, "abort")
                llm.check()
        finished |= drain(llm)
        assert llm.abort("1") is llm.abort("nobody") is None
        assert_idle(llm)
    assert {name: output.outputs[0].token_ids for name, output in finished.items()} == {
        str(i): expected("llama", prompts[i], 10) for i in (0, 2, 3, 4)
    }


def test_two_hundred_cancelled_at_once(kv: str) -> None:
    prompt = make_prompts([5])[0]
    with make_llm(kv) as llm:
        for i in range(200):
            llm.add_request(str(i), [2, 3, 4], SamplingParams(max_tokens=100))
        for _ in range(3):
            llm.step()
        for i in range(200):
            llm.abort(str(i))
        assert_idle(llm)
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == expected("llama", prompt, 8)


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "empty in a mapping": ({"prompt_token_ids": []}, "empty"),
    "too long": ([2] * 128, "128 tokens, but this model's maximum context length is 128"),
    "past the vocabulary": ([2, VOCAB], f"holds {VOCAB}, .* from 0 to {VOCAB - 1}"),
    "negative": ([-1], "holds -1"),
    "not whole": ([1.5], "whole numbers"),
    "text without a tokenizer": ("hello", "no tokenizer"),
    "no known key": ({"text": "hello"}, "neither 'prompt' nor"),
    "a number": (None, "a prompt is text"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_change_nothing(name: str, kv: str) -> None:
    bad, message = BAD_PROMPTS[name]
    good = make_prompts([9])[0]
    want = expected("llama", good, 8)
    with make_llm(kv) as llm:
        llm.add_request("good", good, GREEDY)
        llm.step()
        with pytest.raises(InvalidRequest, match=message):
            llm.add_request("bad", bad, GREEDY)
        llm.check()
        assert drain(llm)["good"].outputs[0].token_ids == want
        with pytest.raises(InvalidRequest, match=message):
            llm.generate([good, bad], GREEDY)
        assert_idle(llm)


def test_a_request_that_could_never_fit_is_refused(growing_kv: str) -> None:
    good = make_prompts([9])[0]
    options = {"page_size": 4096} if growing_kv == "virtual" else {}
    with make_llm(growing_kv, memory_budget=24 << 10, kv_options=options) as llm:
        assert llm.core.kv.needed(128) > llm.core.kv.total()
        with pytest.raises(InvalidRequest, match=r"may grow to 128 tokens, .* in all"):
            llm.generate([good, good], [GREEDY, SamplingParams(max_tokens=1000)])
        assert_idle(llm)
        assert llm.generate(good, GREEDY, use_tqdm=False)[0].finished


def test_the_budget_may_be_automatic(kv: str) -> None:
    with make_llm(kv, memory_budget="auto", max_num_seqs=2) as llm:
        assert llm.core.kv.total() >= llm.core.kv.needed(
            128
        )  # no more than every request can use, of half of the machine
        assert llm.generate(make_prompts([9])[0], GREEDY, use_tqdm=False)[0].finished


def test_a_share_of_the_memory(kv: str) -> None:
    with LLM(make_model("llama"), **chosen(kv, max_num_seqs=4, max_model_len=64, gpu_memory_utilization=0.001)) as llm:
        assert llm.core.kv.total() > 0
        llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)


def test_names_of_unfinished_requests_are_taken() -> None:
    with make_llm() as llm:
        llm.add_request("a", [2, 3], GREEDY)
        with pytest.raises(InvalidRequest, match="'a' is unfinished"):
            llm.add_request("a", [4], GREEDY)
        with pytest.raises(VattnError, match="1 unfinished"):
            llm.generate([2, 3])
        drain(llm)
        llm.add_request("a", [2, 3], GREEDY)
        drain(llm)


class Flaky:
    """A hook that raises in the n-th forward pass of a module."""

    def __init__(self, model: PreTrainedModel, fail_at: int, error: BaseException) -> None:
        self.calls = 0
        self.fail_at = fail_at
        self.error = error
        self.handle = model.get_output_embeddings().register_forward_hook(self)

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise self.error


@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_a_failing_forward_fails_its_batch_only(kv: str, fail_at: int) -> None:
    prompts = make_prompts([5, 6, 7, 8])
    with make_llm(kv, max_num_seqs=2) as llm:
        flaky = Flaky(llm.model, fail_at, RuntimeError("a broken kernel"))
        try:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        finally:
            flaky.handle.remove()
        assert_idle(llm)
    for output in outputs[:2]:
        assert output.outputs[0].finish_reason == "error"
        assert str(output.error) == "a broken kernel"
        assert len(output.outputs[0].token_ids) == fail_at - 1
    for output, prompt in zip(outputs[2:], prompts[2:], strict=True):
        assert output.error is None
        assert output.outputs[0].token_ids == expected("llama", prompt, 8)


def test_a_failing_prepare_fails_its_batch_only(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts([5, 6, 7])
    with make_llm(kv, max_num_seqs=2) as llm:
        prepare, calls = llm.core.kv.prepare, iter(range(1000))

        def failing(*args: Any, **options: Any) -> None:
            if next(calls) == 3:
                raise VattnError("the driver is unwell")
            prepare(*args, **options)

        monkeypatch.setattr(llm.core.kv, "prepare", failing)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert_idle(llm)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error", "length"]
    assert outputs[2].outputs[0].token_ids == expected("llama", prompts[2], 8)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_backend_that_refuses_more_than_it_said(kv: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out although the accounts said that it would not: preempt, go on, and fail only what is alone."""
    prompts = make_prompts([5, 30, 7, 8])
    with make_llm(kv, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        prepare = llm.core.kv.prepare

        def refusing(lengths: dict[int, int], *rest: Any, **options: Any) -> None:
            if len(lengths) > most:
                raise OutOfPages("the table of mappings is full", missing_pages=1, missing_bytes=4096)
            prepare(lengths, *rest, **options)

        monkeypatch.setattr(llm.core.kv, "prepare", refusing)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert_idle(llm)
    for output, prompt in zip(outputs, prompts, strict=True):
        if most == 0:
            assert isinstance(output.error, OutOfPages)
        else:
            assert output.outputs[0].token_ids == expected("llama", prompt, 8)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(100, 4), (50, 50)], ids=["prompt", "answer"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True], ids=["alone", "caching"])
def test_a_request_that_does_not_fit_beside_other_caches_fails(
    prompt: int, max_tokens: int, mode: str, caching: bool
) -> None:
    """In the step that finds out: begun anew, it would get no further, for as long as they hold the memory."""
    long, short = make_prompts([prompt, 6])
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    options = {
        "kv_options": {"page_size": 4096},
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "preemption_mode": mode,
        "enable_prefix_caching": caching,
    }
    with make_llm("virtual", **options) as llm:
        with tenant(llm, leaving=llm.core.kv.needed(70)):
            llm.add_request("long", long, params)
            llm.add_request("short", short, GREEDY)
            outputs = {}
            for _ in range(100):
                outputs |= {output.request_id: output for output in llm.step() if output.finished}
            llm.check()
        assert_idle(llm)
        again = llm.generate([long], params, use_tqdm=False)[0]
    error = outputs["long"].error
    assert isinstance(error, OutOfPages)
    assert "of a budget of" in str(error)
    assert outputs["short"].outputs[0].token_ids == expected("llama", short, 8)
    assert again.outputs[0].token_ids == expected("llama", long, max_tokens)


def test_an_interrupt_leaves_a_clean_engine(kv: str) -> None:
    prompts = make_prompts([5, 6, 7])
    with make_llm(kv) as llm:
        flaky = Flaky(llm.model, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        flaky.handle.remove()
        assert_idle(llm)
        output = llm.generate(prompts[0], GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == expected("llama", prompts[0], 8)


def test_a_long_prompt_beside_other_requests_is_computed_in_chunks_of_the_threshold(kv: str) -> None:
    records: list[StepRecord] = []
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 8}
    short, long = make_prompts([3, 60])
    sampling = GREEDY.clone(max_tokens=16)
    with make_llm(kv, on_step=records.append, **limits) as llm:
        outputs = llm.generate([short, long], sampling, use_tqdm=False)
        together = len(records)
        llm.generate(long, sampling, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [expected("llama", p, 16) for p in (short, long)]
    assert max(record.prefill_tokens for record in records[1:together]) == 8
    assert max(record.prefill_tokens for record in records[together:]) > 8, "alone, it has the whole step"


def test_step_records(kv: str) -> None:
    records: list[StepRecord] = []
    with make_llm(kv, max_num_seqs=2, max_num_batched_tokens=8, on_step=records.append) as llm:
        llm.generate(make_prompts([12, 5, 3]), GREEDY, use_tqdm=False)
        most = llm.core.kv.stats().peak_physical_bytes
    assert sum(record.prefill_tokens for record in records) == 20
    assert sum(record.decode_tokens for record in records) == 3 * (GREEDY.max_tokens - 1)
    assert (records[0].num_running, records[0].num_waiting) == (1, 2)
    assert (records[-1].num_running, records[-1].num_waiting) == (0, 0)
    for record in records:
        assert 0 < record.forward_seconds < record.seconds
        assert record.schedule_seconds > 0
        assert record.prepare_seconds > 0
        assert record.kv.live_bytes <= record.kv.used_bytes <= most


def test_close(kv: str) -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    llm = make_llm(kv)
    assert model.config._attn_implementation == "vattn"
    llm.add_request("a", [2, 3], GREEDY)
    llm.step()
    llm.close()
    llm.close()
    assert model.config._attn_implementation == before
    for act in (llm.step, lambda: llm.add_request("b", [2], GREEDY), lambda: llm.generate([2, 3])):
        with pytest.raises(VattnError, match="closed"):
            act()


def test_a_cache_that_refuses_to_close_is_closed_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while another thread captures a graph."""
    model = make_model("llama")
    before = model.config._attn_implementation
    llm = make_llm("virtual")
    llm.generate([2, 3], GREEDY, use_tqdm=False)
    cache = llm.core.kv.cache

    def refuse() -> None:
        raise StreamCapturing("close after the capture")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "close", refuse)
        for _ in range(2):
            with pytest.raises(StreamCapturing):
                llm.close()
    cache.check()
    llm.close()
    with pytest.raises(CacheClosed):
        cache.step({})
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"kv": "stack"}, "'stack' is not a backend"),
        ({"kv": "static", "memory_budget": 1000}, "one slot of 256 tokens"),
        ({"kv": "dynamic", "memory_budget": 100}, "one token of 1 tokens"),
        ({"kv": "dynamic", "kv_options": {"page_size": 4096}}, "takes no kv_options"),
        ({"scheduling": "random"}, "'random' is not known"),
        ({"max_model_len": 257}, "give at most 256"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"dtype": "int4"}, "'int4' is not one of"),
        ({"dtype": "bfloat16"}, "convert it first"),
        ({"attention": "magic"}, "unknown attention kernel"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 600, "max_num_batched_tokens": 512}, "raise the one or lower the other"),
        ({"memory_budget": 100}, "one block of 16 tokens"),
        ({"memory_budget": 0}, "more than 0 bytes"),
        ({"block_size": 0}, "block_size is 0"),
        ({"kv_options": {"page_size": 4096}}, "only takes num_blocks, windows as kv_options"),
        ({"kv": "virtual", "kv_options": {"max_batch_size": 3}}, "max_batch_size: not for kv_options"),
        (
            {"kv": "virtual", "kv_options": {"head_dim": 8}},
            "head_dim: not for kv_options",
        ),
        (
            {"kv": "virtual", "kv_options": {"pagesize": 4096}},
            "option pagesize; possible are memory_utilization",
        ),
        ({"gpu_memory_utilization": 1.5, "memory_budget": None}, "a share over 0 and up to 1"),
        ({"gpu_memory_utilization": 0.5, "memory_budget": "1MiB"}, "give one"),
    ],
)
def test_bad_options(keywords: dict[str, Any], message: str) -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=message):
        LLM(model, **{"kv": "paged", **keywords})
    assert model.config._attn_implementation == before


def untouched(model: PreTrainedModel) -> bool:
    """Whether nothing of an engine's is left in a model."""
    return model.config._attn_implementation != "vattn" and not any(
        module._forward_hooks or "forward" in vars(module) for module in model.modules()
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupted_constructor_leaves_the_model_as_it_was(dtype: torch.dtype) -> None:
    model = copy.deepcopy(make_model("llama")).to(dtype)
    LLM(model, kv="static").close()  # imports what is imported on first use
    count = entries(lambda: LLM(model, kv="static").close())
    assert untouched(model)
    for place in range(0, count, count // 15):
        ended = interrupted(lambda: LLM(model, kv="static").close(), place)
        assert ended is not None
        gc.collect()
        assert untouched(model), f"interrupted at entry {place} of {count}"


def test_an_engine_that_is_dropped_leaves_the_model_as_it_was() -> None:
    model = copy.deepcopy(make_model("llama"))
    llm = LLM(model, kv="virtual")
    llm.generate(make_prompts([9])[0], GREEDY, use_tqdm=False)
    alive = weakref.ref(llm.core.kv)
    del llm
    gc.collect()
    assert untouched(model)
    assert alive() is None


def test_bfloat16_runs_to_the_end(kv: str) -> None:
    model = copy.deepcopy(make_model("llama")).to(torch.bfloat16)
    with LLM(model, **chosen(kv, max_num_batched_tokens=64, block_size=64)) as llm:
        outputs = llm.generate(make_prompts([20, 3]), GREEDY, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_the_last_layer_attends_for_the_rows_that_are_read(
    kv: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks without a row, a prompt whose every row is one, and drafts: as with all rows, up to rounding."""
    model = copy.deepcopy(make_model(family)).to(torch.bfloat16)
    attend_rows, counts = runner._Step.attend_rows, set[tuple[int, int]]()

    def compared(step: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, params: Any, rows: Tensor) -> Tensor:
        counts.add((len(rows), len(query)))
        output = attend_rows(step, layer, query, key, value, params, rows)
        expected = step._attend(layer, query, step.batch, params)[rows]
        assert output.shape == expected.shape
        torch.testing.assert_close(output, expected, atol=0.02, rtol=0.02)
        return output

    monkeypatch.setattr(runner._Step, "attend_rows", compared)
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    options = chosen(kv, max_num_seqs=4, max_num_batched_tokens=32, block_size=64, speculative_config=drafts)
    with LLM(model, **options) as llm:
        repeating, other = [5, 6, 7] * 16, *make_prompts([40])
        scored = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1)
        outputs = llm.generate([repeating, other, other[:20]], [GREEDY, GREEDY, scored], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8, 8]
    if supported(model):
        assert any(not wanted for wanted, _ in counts), "no chunk without a row"
        assert any(wanted > 8 for wanted, _ in counts), "no prompt whose rows are read"


def test_a_directory_with_missing_files(tmp_path: Path) -> None:
    """What is missing is named, and it is one error of ours."""
    with pytest.raises(ConfigError, match="the model '/nowhere/at/all' cannot be loaded"):
        LLM("/nowhere/at/all")
    with pytest.raises(ConfigError, match=r"model .* cannot be loaded: .*config"):
        LLM(str(tmp_path))
    make_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model .* cannot be loaded: .*model\.safetensors"):
        LLM(str(tmp_path))
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the tokenizer .* cannot be loaded"):
        LLM(str(tmp_path))
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_num_seqs=1) as llm:
        assert llm.tokenizer is None


def test_remote_code_runs_only_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", sys.path.copy())
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise ValueError('ran')\n")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        LLM(str(tmp_path))
    assert not ran.exists()
    with pytest.raises(ConfigError, match="ran"):
        LLM(str(tmp_path), trust_remote_code=True)
    assert ran.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": 10**100}, "memory_budget=1000.*at most"),
        ({"memory_budget": "1" * 100}, "memory_budget="),
        ({"memory_budget": "1" * 5000}, "memory_budget="),
        ({"memory_budget": True}, "memory_budget=True is not a size"),
        ({"swap_space": "1" * 400}, "swap_space="),
        ({"gpu_memory_utilization": "much", "memory_budget": None}, "gpu_memory_utilization is 'much'"),
        ({"gpu_memory_utilization": float("nan"), "memory_budget": None}, "gpu_memory_utilization is nan"),
        ({"max_num_seqs": 10**9}, "max_num_seqs is 1000000000; it can be at most"),
        ({"max_num_seqs": 10**5000}, "max_num_seqs is an integer of 16610 bits"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_num_seqs": "8"}, "max_num_seqs is '8'"),
        ({"max_num_batched_tokens": 10**30}, "max_num_batched_tokens is 1000"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens is 2.5"),
        ({"max_model_len": 10**50}, "max_model_len is 1000"),
        ({"max_model_len": 64.0}, "max_model_len is 64.0"),
        ({"block_size": 2.0}, "block_size is 2.0"),
        ({"block_size": 10**40}, "block_size is 1000"),
        ({"kv": ["paged"]}, "not a backend"),
        ({"scheduling": []}, r"scheduling=\[\] is not known"),
        ({"scheduling_policy": []}, r"scheduling_policy=\[\] is not one of"),
        ({"preemption_mode": {}}, "preemption_mode={} is not one of"),
        ({"attention": 5}, "attention is 5"),
        ({"speculative_config": 5}, "speculative_config is 5"),
        ({"speculative_config": {"num_speculative_tokens": 10**100}}, "num_speculative_tokens is 1000"),
        ({"speculative_config": {"num_speculative_tokens": 2, 5: 1}}, "has no .'5'"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"on_step": 5}, "on_step is 5"),
        ({"kv_options": 5}, "kv_options is 5"),
        ({"kv_options": {5: 1}}, "kv_options is {5: 1}"),
        ({"dtype": 5}, "dtype is 5"),
        ({"tokenizer": 5}, "tokenizer is 5"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no'"),
        ({"trust_remote_code": "False"}, "trust_remote_code is 'False'"),
    ],
)
def test_arguments_of_other_types_and_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(**options)
    assert make_model("llama").config._attn_implementation != "vattn"


def test_prompts_that_are_none() -> None:
    with make_llm(tokenizer=make_tokenizer()) as llm:
        for prompts, message in (
            (None, "this is None"),
            (5, "this is 5"),
            (b"abc", "decode bytes to text first"),
            (["w2", b"abc"], "decode bytes to text first"),
            ([None], "this is None"),
            ("\ud800", r"lone surrogate '.ud800' at position 0"),
            ({"prompt": "w2", "cache_salt": "a\ud800"}, "cache_salt has the lone surrogate"),
            ({"prompt": None}, "{'prompt': None} has neither 'prompt' nor"),
            ({"prompt": 5, "prompt_token_ids": [2]}, "the prompt's text is 5"),
            ({5: 1}, "neither 'prompt' nor"),
            ({"prompt": "w2", "multi_modal_data": {"image": 1}}, "the prompt has 'multi_modal_data', .* text only"),
            (
                {"prompt_token_ids": [2], "cache_slat": "a"},
                "the prompt has 'cache_slat', .* can have prompt, prompt_",
            ),
            (["w2", {"prompt": "w2", "mm_processor_kwargs": {}}], "the prompt has 'mm_processor_kwargs'"),
            ({"prompt": "w2", 5: 1}, "the prompt has 5,"),
            ([[True, False]], "whole numbers"),
            (np.array([1.5, 2.5]), "this is 1.5"),
            ([10**30], "holds 1000"),
            ([10**5000], "holds an integer of 16610 bits"),
            ({2, 3}, "this is {2, 3}"),
            ((prompt for prompt in ["w2"]), "this is <generator"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                llm.generate(prompts, use_tqdm=False)
        for params in ("x", [None], 5, {"temperature": 0}):
            with pytest.raises(InvalidRequest, match="give SamplingParams"):
                llm.generate([[2]], params, use_tqdm=False)  # type: ignore[arg-type]
        assert_idle(llm)


def test_keys_of_a_prompt_that_are_none_count_as_absent() -> None:
    with make_llm(tokenizer=make_tokenizer()) as llm:
        for prompt in (
            {"prompt": "w5 w6 w7", "prompt_token_ids": None, "multi_modal_data": None, "cache_salt": None},
            {"prompt": None, "prompt_token_ids": [5, 6, 7], "prompt_embeds": None},
        ):
            assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].prompt_token_ids == [5, 6, 7]  # type: ignore[arg-type]


def test_prompts_in_arrays() -> None:
    want = [expected("llama", prompt, 4) for prompt in ([5, 6, 7], [8, 9, 10])]
    params = SamplingParams(temperature=0, max_tokens=4)
    with make_llm() as llm:
        for one in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [np.int64(5), 6, np.uint8(7)]):
            for prompt in (one, [one], {"prompt_token_ids": one}):
                assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == want[0]  # type: ignore[arg-type]
        both = llm.generate(np.array([[5, 6, 7], [8, 9, 10]]), params, use_tqdm=False)  # type: ignore[arg-type]
        assert [output.outputs[0].token_ids for output in both] == want


@pytest.mark.parametrize("call", ["generate", "enqueue"])
def test_what_on_step_does_to_the_call_that_runs(call: str) -> None:
    """It may abort requests, whose outputs so far are among the others'; it cannot run them itself."""
    prompts = make_prompts([5, 9, 7])
    want = [expected("llama", prompt, 8) for prompt in prompts]
    refused: list[str] = []

    def on_step(_: object) -> None:
        if len(refused) == 3:
            assert llm.abort(first) is not None
        for nested in (
            lambda: llm.wait_for_completion(use_tqdm=False),
            lambda: llm.generate(prompts, GREEDY, use_tqdm=False),
        ):
            with pytest.raises(VattnError) as caught:
                nested()
            refused.append(str(caught.value))
        refused.append("")

    with make_llm("virtual") as llm:
        first = str(int(llm.core.new_id()) + 1)
        llm.on_step = on_step
        if call == "generate":
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        else:
            first = llm.enqueue(prompts, GREEDY)[0]
            outputs = llm.wait_for_completion(use_tqdm=False)
        assert refused[0].startswith("wait_for_completion() was called from on_step; the next step begins when")
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "length", "length"]
        found = [output.outputs[0].token_ids for output in outputs]
        assert found == [want[0][: len(found[0])], *want[1:]]
        llm.on_step = None
        assert_idle(llm)


def test_enqueue_then_wait() -> None:
    prompts = make_prompts([5, 9, 7])
    want = [expected("llama", prompt, 8) for prompt in prompts]
    with make_llm("paged") as llm:
        assert llm.wait_for_completion(use_tqdm=False) == []
        names = llm.enqueue(prompts[:2], GREEDY)
        llm.add_request("mine", prompts[2], GREEDY)
        names += llm.enqueue(prompts[2], SamplingParams(n=2, seed=1, max_tokens=4))
        llm.step()
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [output.request_id for output in outputs] == [*names[:2], "mine", names[2]]
        assert [output.outputs[0].token_ids for output in outputs[:3]] == want
        assert [len(completion.token_ids) for completion in outputs[3].outputs] == [4, 4]
        with pytest.raises(InvalidRequest, match="prompt is empty"):
            llm.enqueue([prompts[0], []], GREEDY)
        assert_idle(llm)
        llm.enqueue(prompts[:2], GREEDY)
    with pytest.raises(EngineClosed):
        llm.wait_for_completion(use_tqdm=False)


def test_priorities_of_a_list_of_prompts() -> None:
    prompts = make_prompts([5, 9, 7])
    want = [expected("llama", prompt, 8) for prompt in prompts]
    with make_llm("paged", scheduling_policy="priority", max_num_seqs=1) as llm:
        outputs = llm.generate(prompts, GREEDY, priority=[3, 1, 2], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == want
        ends = [output.metrics.finished_time or 0 for output in outputs]
        assert ends[1] < ends[2] < ends[0]
        llm.generate(prompts, GREEDY, priority=5, use_tqdm=False)
        for priority, error, message in (
            ([1], ConfigError, "3 prompts with 1 priorities"),
            ("high", InvalidRequest, "priority is 'high'; give a whole number"),
        ):
            with pytest.raises(error, match=message):
                llm.generate(prompts, GREEDY, priority=priority, use_tqdm=False)  # type: ignore[arg-type]
        assert_idle(llm)


def test_adapters_are_refused_by_name() -> None:
    adapter: Any = object()
    with make_llm("paged", tokenizer=make_tokenizer()) as llm:
        for call in (
            lambda: llm.generate("w5", lora_request=adapter),
            lambda: llm.enqueue("w5", lora_request=adapter),
            lambda: llm.chat([{"role": "user", "content": "w5"}], chat_template="w5", lora_request=adapter),
            lambda: llm.beam_search("w5", BeamSearchParams(beam_width=1, max_tokens=1), lora_request=adapter),
        ):
            with pytest.raises(InvalidRequest, match="lora_request: adapters are not served; merge the adapter"):
                call()
        assert_idle(llm)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embed", "LLM has no embed: the engine serves models that generate text"),
        ("classify", "run a pooling model by transformers itself"),
        ("score", "pooling model"),
        ("collective_rpc", "LLM has no collective_rpc: there are no workers: the model is in this process"),
        ("add_lora", "merge the adapter into the model"),
    ],
)
def test_methods_of_vllm_that_are_not_offered_say_why(name: str, message: str) -> None:
    with make_llm("paged") as llm:
        assert not hasattr(llm, name)
        with pytest.raises(NotOffered, match=message) as caught:
            getattr(llm, name)
        assert isinstance(caught.value, AttributeError)
        with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'") as misspelt:
            llm.generat  # type: ignore[attr-defined]  # noqa: B018
        assert not isinstance(misspelt.value, NotOffered)


def test_the_tokenizer() -> None:
    tokenizer = make_tokenizer()
    with make_llm("paged", tokenizer=tokenizer) as llm:
        assert llm.get_tokenizer() is tokenizer
    with make_llm("paged") as llm, pytest.raises(ConfigError, match="this LLM has no tokenizer; pass tokenizer="):
        llm.get_tokenizer()


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_allowed_are_refused(name: str) -> None:
    prompt = make_prompts([5])[0]
    for most, refused in ((20, (21, -1)), (0, (1, -1)), (-1, ())):
        with make_llm("paged", max_logprobs=most) as llm:
            for count in refused:
                with pytest.raises(InvalidRequest, match=f"^{name} is {count}.*max_logprobs={most}; ask for fewer"):
                    llm.generate(prompt, SamplingParams(**{name: count}), use_tqdm=False)
            for count in (0, 30 if most < 0 else most):
                llm.generate(prompt, SamplingParams(**{name: count}), use_tqdm=False)


class _Only(LogitsProcessor):
    """Allows the token after the newest one; raises at a length."""

    def __init__(self, limit: int = 10_000) -> None:
        self.limit = limit

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] >= self.limit:
            raise LookupError("long enough")
        scores[0, [i for i in range(VOCAB) if i != (int(input_ids[0, -1]) + 1) % VOCAB]] = float("-inf")
        return scores


def test_logits_processors(kv: str) -> None:
    prompts = [[5, 6, 7], [40, 41], [9]]
    params = [
        SamplingParams(n=2, seed=1, max_tokens=4, logits_processors=[_Only()]),
        SamplingParams(temperature=0, max_tokens=4, logits_processors=[_Only(limit=4)]),
        SamplingParams(temperature=0, max_tokens=4),
    ]
    plain = expected("llama", prompts[2], 4)
    with make_llm(kv) as llm:
        both, failed, other = llm.generate(prompts, params, use_tqdm=False)
        assert [completion.token_ids for completion in both.outputs] == [[8, 9, 10, 11]] * 2
        assert (failed.outputs[0].token_ids, failed.outputs[0].finish_reason) == ([42, 43], "error")
        assert isinstance(failed.error, LookupError)
        assert other.outputs[0].token_ids == plain
        assert_idle(llm)
    with make_llm("virtual", speculative_config={"num_speculative_tokens": 3}) as llm:
        repeating = [5, 6, 7, 8] * 6
        one = SamplingParams(temperature=0, max_tokens=12, logits_processors=[_Only()])
        assert llm.generate(repeating, one, use_tqdm=False)[0].outputs[0].token_ids == list(range(9, 21))
        assert llm.speculation.num_drafts == 0
