"""Drafts change how fast tokens come, and not which."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.backends import GROWING_KVS, KVS, MAIN_KVS, PAGED_WINDOWS, chosen
from tests.support.effort import covering
from tests.support.tiny_models import (
    FAMILIES,
    VOCAB,
    expected,
    make_model,
    make_prompts,
    make_smallest_model,
    make_tokenizer,
)
from vattn.engine import LLM, FinishReason, RequestOutput, SamplingParams, StepRecord
from vattn.engine.requests.request import Request
from vattn.engine.scheduling.drafts import NgramProposer, SpeculativeConfig
from vattn.errors import ConfigError

pytestmark = pytest.mark.slow(1)

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MAX_TOKENS = 40


def make_llm(kv: str, model: PreTrainedModel | None = None, **options: Any) -> LLM:
    pages = {"kv_options": {"page_size": 4096, "layout": "fused"}} if kv == "virtual" else {}
    defaults = {"max_model_len": 256, "max_num_seqs": 4, "speculative_config": DRAFTS, "tokenizer": make_tokenizer()}
    return LLM(model or make_model("llama"), **chosen(kv, **{**pages, **defaults, **options}))


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    """Step by step, checking the books after every step."""
    listed = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for number, (prompt, param) in enumerate(zip(prompts, listed, strict=True)):
        llm.add_request(str(number), prompt, param)
    finished = {}
    while llm.has_unfinished():
        for output in llm.step():
            if output.finished:
                finished[output.request_id] = output
        llm.check()
    assert llm.core.kv.available() == llm.core.kv.total()
    return [finished[str(number)] for number in range(len(prompts))]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_greedy(family: str, prompts: list[list[int]], got: list[list[int]], count: int) -> None:
    assert got == [expected(family, prompt, count, found) for prompt, found in zip(prompts, got, strict=True)]


@pytest.mark.parametrize(("family", "kv"), covering(list(FAMILIES), MAIN_KVS))
def test_greedy_tokens_equal_generate(family: str, kv: str) -> None:
    """Prompts that repeat themselves, so that many drafts are made, of which random models reject most."""
    prompts = [2 * prompt for prompt in make_prompts([3, 23, 12, 40])]
    block_size = 128 if kv == PAGED_WINDOWS else 16  # whole pages for every family
    with make_llm(kv, make_model(family), max_num_batched_tokens=24, block_size=block_size) as llm:
        outputs = run(llm, prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        assert 0 < llm.speculation.num_accepted_tokens < llm.speculation.num_drafted_tokens
    assert_greedy(family, prompts, tokens(outputs), MAX_TOKENS)


def mixed_params(seed: int) -> list[SamplingParams]:
    rng = random.Random(seed)
    common: dict[str, Any] = {"max_tokens": 60, "seed": seed}
    return [
        SamplingParams(**common, temperature=0.1, logprobs=2, prompt_logprobs=0),
        SamplingParams(**common, temperature=0, stop=[f"w{rng.randrange(2, VOCAB)}", f"{rng.randrange(10)} w1"]),
        SamplingParams(**common, temperature=0.3, top_k=5, top_p=0.9, logit_bias={4: 3.0}),
        SamplingParams(**common, temperature=0, frequency_penalty=0.7, logprobs=1),
        SamplingParams(**common, temperature=0.2, min_p=0.1, stop_token_ids=[rng.randrange(VOCAB) for _ in range(3)]),
        SamplingParams(**common, temperature=0, min_tokens=20, stop_token_ids=list(range(2, 30)), logprobs=0),
        SamplingParams(**common, temperature=0, bad_words=["w7", "w8 w9"], allowed_token_ids=range(5, 40)),
    ]


@pytest.mark.parametrize(("kv", "seed"), covering(KVS, range(3)))
def test_every_kind_of_request_is_as_without(kv: str, seed: int) -> None:
    """Drawn tokens, stops, log probabilities: what a request gives does not tell whether there were drafts."""
    prompts = [3 * prompt for prompt in make_prompts([5, 9, 4, 7, 3, 8, 6], seed)]
    outputs = []
    for config in (None, DRAFTS):
        with make_llm(kv, make_smallest_model(), max_num_seqs=8, speculative_config=config) as llm:
            outputs.append(run(llm, prompts, mixed_params(seed)))
            assert (llm.speculation.num_accepted_tokens > 0) == (config is not None)
    for plain, drafted in zip(*outputs, strict=True):
        a, b = plain.outputs[0], drafted.outputs[0]
        assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
            b.token_ids,
            b.text,
            b.finish_reason,
            b.stop_reason,
        )
        assert (a.logprobs is None) == (b.logprobs is None)
        for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert list(x) == list(y)
            assert all(x[token].logprob == pytest.approx(y[token].logprob, abs=1e-5) for token in x)
        if a.cumulative_logprob is not None:
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)


def test_max_tokens_and_the_context_end_a_request_in_the_middle_of_a_draft(kv: str) -> None:
    prompt = 8 * [5, 6, 7]
    for max_tokens in range(1, 9):
        with make_llm(kv, max_model_len=30) as llm:
            [output] = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=max_tokens))
        count = min(max_tokens, 30 - len(prompt))
        assert output.outputs[0].token_ids == expected("llama", prompt, count)
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("kv", "mode"), covering(GROWING_KVS, ["recompute", "swap"]))
def test_preempted_requests(kv: str, mode: str) -> None:
    prompts = [2 * prompt for prompt in make_prompts([10, 11, 12, 13])]
    with make_llm(kv, max_num_seqs=1) as llm:
        budget = 12 * 128 * llm.token_bytes // 5  # 2.4 requests of 128 tokens
    with make_llm(kv, memory_budget=budget, preemption_mode=mode, max_model_len=128) as llm:
        outputs = run(llm, prompts, SamplingParams(temperature=0, max_tokens=100))
        assert llm.speculation.num_accepted_tokens > 0
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_greedy("llama", prompts, tokens(outputs), 100)


def test_drafts_take_nobodys_token_and_no_memory_of_a_request() -> None:
    """Four decodes in steps of six tokens: each gets one, and two are left to drafts."""
    records: list[StepRecord] = []
    with make_llm("paged", max_num_batched_tokens=6, on_step=records.append) as llm:
        outputs = run(llm, make_prompts([3] * 4), SamplingParams(temperature=0, max_tokens=30, logit_bias={9: 1000.0}))
    assert tokens(outputs) == [[9] * 30] * 4
    decoding = [record for record in records if record.num_running == 4 and not record.prefill_tokens]
    assert decoding
    assert all(record.decode_tokens == 4 + record.drafted_tokens <= 6 for record in decoding)
    assert max(record.drafted_tokens for record in decoding) == 2


def test_repetitive_text_takes_fewer_steps() -> None:
    records: list[StepRecord] = []
    with make_llm("virtual", on_step=records.append) as llm:
        [output] = run(llm, [[3, 4, 5]], SamplingParams(temperature=0, max_tokens=61, logit_bias={9: 1000.0}))
        stats = llm.speculation
    assert output.outputs[0].token_ids == [9] * 61
    assert len(records) == 2 + 12  # two tokens, until one has followed itself, then 59 by fives
    assert stats.num_accepted_tokens == sum(record.accepted_tokens for record in records) == 59 - 12
    assert stats.acceptance_rate == 1


def test_a_failing_step_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    want = expected("llama", 8 * [5, 6, 7], 40)
    with make_llm("virtual") as llm:
        compute, calls = llm.core.runner.run, iter(range(100))
        monkeypatch.setattr(llm.core.runner, "run", lambda entries: compute(entries) if next(calls) != 6 else 1 / 0)
        [output] = run(llm, [8 * [5, 6, 7]], SamplingParams(temperature=0, max_tokens=40))
        assert output.outputs[0].finish_reason == FinishReason.ERROR
        assert output.outputs[0].token_ids == want[: len(output.outputs[0].token_ids)]
        [again] = run(llm, [8 * [5, 6, 7]], SamplingParams(temperature=0, max_tokens=40))
    assert again.outputs[0].token_ids == want


def propose(context: list[int], most: int = 9, **config: int) -> tuple[int, ...]:
    request = Request("r", context, SamplingParams(max_tokens=100), max_total_tokens=len(context) + 100, seed=0)
    return NgramProposer(SpeculativeConfig(**{"num_speculative_tokens": 4, **config})).propose(request, most)


def test_what_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 1, 2]) == (3, 4, 5, 6)
    assert propose([1, 2, 3, 4, 5, 6, 1, 2], most=2) == (3, 4)
    assert propose([1, 2, 3, 1, 2, 7, 1, 2]) == (7, 1, 2, 7), "the newest occurrence, which then goes on by itself"
    assert propose([1, 2, 3, 4, 9, 3, 7, 2, 3]) == (4, 9, 3, 7), "two tokens count more than one"
    assert propose([1, 2, 3, 4]) == ()
    assert propose([1, 5, 1], prompt_lookup_min=2) == ()
    assert propose([1, 5, 1], prompt_lookup_min=1) == (5, 1, 5, 1)


def test_a_proposer_follows_a_request() -> None:
    rng = random.Random(0)
    proposer = NgramProposer(SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1))
    request = Request("r", [1], SamplingParams(max_tokens=None), max_total_tokens=2000, seed=0)
    for _ in range(300):
        request.output_token_ids += [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        assert proposer.propose(request, 3) == propose(
            request.token_ids(0, request.num_tokens), 3, prompt_lookup_max=3, prompt_lookup_min=1
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": 2, "method": "eagle"}, "method 'eagle' is not known"),
        ({"num_speculative_tokens": None}, "needs num_speculative_tokens"),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_max": 1, "prompt_lookup_min": 2},
            r"prompt_lookup_max is 1; .* \(2\)",
        ),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": -1}, "prompt_lookup_max is -1"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": "x"}, "prompt_lookup_max is 'x'"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": 65}, "prompt_lookup_max is 65; .* at most 64"),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 65}, "prompt_lookup_min is 65; .* at most 64"),
        ({"num_speculative_tokens": 2, "model": "x"}, r"has no \['model'\]"),
    ],
)
def test_bad_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(make_model("llama"), speculative_config=config)


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        ({}, 2, 4),
        ({"prompt_lookup_max": 1}, 1, 1),
        ({"prompt_lookup_max": 3, "prompt_lookup_min": None}, 2, 3),
        ({"prompt_lookup_min": 5}, 5, 5),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": None}, 1, 4),
    ],
)
def test_one_length_of_both_is_enough(given: dict[str, Any], least: int, most: int) -> None:
    config = SpeculativeConfig.from_options({"num_speculative_tokens": 2, **given})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (least, most)


def test_static_scheduling_has_no_drafts() -> None:
    with pytest.raises(ConfigError, match="needs scheduling='continuous'"):
        LLM(make_model("llama"), speculative_config=DRAFTS, scheduling="static")


def test_nan_in_a_row_of_a_draft_counts_when_it_is_reached() -> None:
    prompt = 8 * [5, 6, 7]
    poisoned = 0

    def poison(_module: object, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
        nonlocal poisoned
        poisoned += logits.shape[1] - 1
        logits[0, 1:] = float("nan")
        return logits

    with make_llm("paged") as llm:
        handle = llm.model.get_output_embeddings().register_forward_hook(poison)
        try:
            [output] = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=40))
            assert poisoned
            poisoned = 0
            # Drafts are accepted once the token has followed itself.
            [reached] = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=40, logit_bias={9: 1000.0}))
            assert poisoned
        finally:
            handle.remove()
    got = output.outputs[0].token_ids
    assert got == expected("llama", prompt, 40)[: len(got)]
    assert (output.outputs[0].finish_reason == "error") == (len(got) < 40)
    assert (reached.outputs[0].token_ids, reached.outputs[0].finish_reason) == ([9, 9, 9], "error")
