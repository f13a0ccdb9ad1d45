"""Beam search finds what transformers and a search without a cache find, whatever the memory it has."""

from __future__ import annotations

import functools
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from tests.engine.test_fork import refuse_after_fork
from tests.support.backends import KVS, MAIN_GROWING_KVS, chosen
from tests.support.effort import covering
from tests.support.tenants import tenant
from tests.support.tiny_models import expected, make_model, make_prompts, make_tokenizer
from vattn.engine import LLM, BeamSearchOutput, BeamSearchParams, InvalidRequest, SamplingParams, StepRecord
from vattn.engine.beam_search import make_beams
from vattn.engine.requests.prompts import TokenizedPrompt
from vattn.errors import ConfigError, NoFreeSlot, VattnError

PROMPT = make_prompts([41], seed=2)[0]
SHORT = make_prompts([5], seed=7)[0]
EOS = frozenset(range(2, 12))  # likely enough to end sequences at many lengths


def make_llm(kv: str, family: str = "llama", **options: Any) -> LLM:
    pages = {"kv_options": {"page_size": 4096, "layout": "fused"}} if kv == "virtual" else {}
    defaults = {"max_num_seqs": 8, "max_model_len": 200, "skip_tokenizer_init": True}
    return LLM(make_model(family), **chosen(kv, **{**defaults, **pages, **options}))


def idle(llm: LLM) -> None:
    llm.check()
    assert not llm.has_unfinished()
    assert llm.core.kv.available() == llm.core.kv.total()
    llm.core.kv.evict_prefixes()
    assert llm.core.kv.stats().used_bytes == 0
    llm.core.kv.check()


@functools.cache
def transformers_beams(
    family: str, prompt: tuple[int, ...], width: int, max_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """Sequences and sums of log probabilities from `generate`, where no sequence ends early."""
    model = make_model(family)
    assert model.config._attn_implementation != "vattn", "the reference would run the code under test"
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return found.sequences.tolist(), found.sequences_scores.tolist()


def plain_beams(prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """vLLM's search, every sequence computed whole in every step, and without an end before `max_tokens`."""
    model = make_model("llama")
    beams, completed = [(prompt, 0.0)], []
    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in beams:
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            top = logits.log_softmax(-1).topk(2 * params.beam_width)
            for logprob, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                ended = token in EOS and not params.ignore_eos
                (completed if ended else grown).append(([*tokens, token], total + logprob))
        beams = sorted(grown, key=lambda beam: beam[1], reverse=True)[: params.beam_width]

    def score(beam: tuple[list[int], float]) -> float:
        ended = beam[0][-1] in EOS and not params.ignore_eos
        return float(beam[1] / (len(beam[0]) - ended) ** params.length_penalty)

    return sorted(completed + beams, key=score, reverse=True)[: params.beam_width]


def same(output: BeamSearchOutput, sequences: list[list[int]], logprobs: list[float]) -> None:
    assert output.error is None
    assert [found.tokens for found in output.sequences] == sequences
    assert [found.cum_logprob for found in output.sequences] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(("kv", "width", "caching"), covering(KVS, [2, 3, 8], [True, False]))
def test_the_same_beams_as_transformers(kv: str, width: int, caching: bool) -> None:
    records = []
    prompts = [PROMPT, SHORT]
    options = {"max_num_batched_tokens": 24, "enable_prefix_caching": caching, "on_step": records.append}
    with make_llm(kv, **options) as llm:
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=width, max_tokens=15, ignore_eos=True))
        idle(llm)
    for prompt, output in zip(prompts, outputs, strict=True):
        same(output, *transformers_beams("llama", tuple(prompt), width, 15))
        assert {found.finish_reason for found in output.sequences} == {"length"}
    assert sum(record.prefill_tokens for record in records) == len(PROMPT) + len(SHORT)
    assert sum(record.decode_tokens for record in records) == 2 * width * 14


@pytest.mark.parametrize("family", ["qwen2-window", "gemma2", "mixtral", "deepseek-v3"])
def test_other_families(family: str) -> None:
    with make_llm("virtual", family) as llm:
        output = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True))[0]
        idle(llm)
    same(output, *transformers_beams(family, tuple(PROMPT), 3, 10))


@pytest.mark.parametrize(
    ("kv", "options"),
    covering(
        KVS,
        [
            {},
            {"length_penalty": 0.0},
            {"length_penalty": -2.0},
            {"length_penalty": 3.0},
            {"temperature": 0.3},
            {"temperature": 2.0, "ignore_eos": True},
            {"beam_width": 1},
        ],
    ),
)
def test_the_same_beams_as_without_a_cache(kv: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that end at different lengths; nothing is lost by ending where no beam can win any more."""
    params = BeamSearchParams(**{"beam_width": 3, "max_tokens": 20, **options})
    steps = 0

    def count(record: object) -> None:
        nonlocal steps
        steps += 1

    want = plain_beams(SHORT, params)
    with make_llm(kv, on_step=count) as llm:
        monkeypatch.setattr(llm.core.intake, "eos_token_ids", EOS)
        output = llm.beam_search(SHORT, params)[0]
        idle(llm)
    same(output, [tokens for tokens, _ in want], [total for _, total in want])
    for found in output.sequences:
        ended = not params.ignore_eos and found.tokens[-1] in EOS
        assert (found.finish_reason == "stop") == ended
        assert found.stop_reason == (found.tokens[-1] if ended else None)
    if params.length_penalty <= 0:
        assert steps < params.max_tokens


@pytest.mark.parametrize(("caching", "kv", "mode"), covering([True, False], MAIN_GROWING_KVS, ["recompute", "swap"]))
def test_short_of_memory_beside_others(caching: bool, kv: str, mode: str) -> None:
    """Beams of three prompts and a request preempt each other, and come to the same."""
    prompts = [PROMPT, PROMPT[:20], SHORT]
    with make_llm(kv) as llm:
        budget = 320 * llm.token_bytes
    preempted = 0

    def count(record: Any) -> None:
        nonlocal preempted
        preempted += record.num_preempted

    options = {"memory_budget": budget, "max_num_batched_tokens": 32, "max_num_seqs": 16, "on_step": count}
    with make_llm(kv, enable_prefix_caching=caching, preemption_mode=mode, **options) as llm:
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=55, ignore_eos=True))
        idle(llm)
    for prompt, output in zip(prompts, outputs, strict=True):
        same(output, *transformers_beams("llama", tuple(prompt), 3, 55))
    assert preempted > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_memory_for_one_beam_at_a_time(mode: str) -> None:
    """Another cache on the pool has the rest."""
    preempted = []
    with make_llm(
        "virtual", preemption_mode=mode, on_step=lambda record: preempted.append(record.num_preempted)
    ) as llm:
        with tenant(llm, leaving=llm.core.kv.needed(len(PROMPT) + 8) + 1):
            output = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))[0]
            llm.check()
        idle(llm)
    same(output, *transformers_beams("llama", tuple(PROMPT), 3, 8))
    assert any(preempted)


def test_fewer_slots_than_all_want(kv: str) -> None:
    """Three searches begin where one and a half have room, beside requests; a search alone is started with room."""
    prompts = [PROMPT, SHORT, PROMPT[:7]]
    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    want = [transformers_beams("llama", tuple(prompt), 3, 12) for prompt in prompts]
    greedy = [expected("llama", prompt, 30) for prompt in prompts]
    with make_llm(kv, max_num_seqs=4) as llm:
        groups = []
        for name, prompt in zip("abc", prompts, strict=True):
            limits = {"max_num_seqs": 4, "max_model_len": 200}
            beams = make_beams(name, TokenizedPrompt(None, prompt), params, kv=llm.core.kv, eos_token_ids=EOS, **limits)
            llm.core.add_group(beams)
            llm.add_request(f"request {name}", prompt, SamplingParams(temperature=0, max_tokens=30))
            groups.append(beams)
        answers = {}
        while llm.has_unfinished():
            for output in llm.step():
                answers[output.request_id] = output.outputs[0].token_ids
            llm.check()
        idle(llm)
        for beams, found in zip(groups, want, strict=True):
            same(beams.result(None), *found)
        assert [answers[f"request {name}"] for name in "abc"] == greedy

        records: list[StepRecord] = []
        llm.on_step = records.append
        outputs = llm.beam_search(prompts, params)
        idle(llm)
    for output, found in zip(outputs, want, strict=True):
        same(output, *found)
    assert not any(record.num_preempted for record in records)


def test_a_limit_of_prompts_at_a_time_and_a_progress_bar() -> None:
    """As vLLM takes them, also by position."""
    prompts = [PROMPT, SHORT, PROMPT[:7]]
    params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    want = [transformers_beams("llama", tuple(prompt), 2, 6) for prompt in prompts]
    file = io.StringIO()
    with make_llm("paged") as llm:
        together: list[int] = []
        llm.on_step = lambda record: together.append(llm.core.num_groups)
        for limit, most in ((1, 1), (2, 2), (100, 3), (None, 3)):
            together.clear()
            outputs = llm.beam_search(prompts, params, None, functools.partial(tqdm, file=file), limit)
            assert max(together) == most
            for output, found in zip(outputs, want, strict=True):
                same(output, *found)
        for bad in (0, "1"):
            with pytest.raises(InvalidRequest, match="concurrency_limit is "):
                llm.beam_search(prompts, params, concurrency_limit=bad)  # type: ignore[arg-type]
        idle(llm)
    assert file.getvalue().count("3/3") >= 4


def test_beams_that_cannot_be_forked_are_computed(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(slot: int) -> int:
        raise NoFreeSlot("injected")

    with make_llm(kv) as llm:
        monkeypatch.setattr(llm.core.kv, "fork", refuse)
        output = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))[0]
        idle(llm)
    same(output, *transformers_beams("llama", tuple(PROMPT), 3, 8))


def test_what_fails_between_two_forks_loses_no_beam(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(kv) as llm:
        refused = refuse_after_fork(llm, monkeypatch)
        output = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))[0]
        assert refused
        assert isinstance(output.error, VattnError)
        idle(llm)


def test_a_search_that_on_step_aborts_has_an_error_and_no_sequences(kv: str) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    steps: list[Any] = []

    def abort_in_the_third(record: Any) -> None:
        steps.append(record)
        if len(steps) == 3:
            assert llm.abort("0") is None, "a search has no output before its end"

    with make_llm(kv, on_step=abort_in_the_third) as llm:
        aborted, other = llm.beam_search([PROMPT, SHORT], params)
        idle(llm)
    assert not aborted.sequences
    assert "aborted" in str(aborted.error)
    same(other, *transformers_beams("llama", tuple(SHORT), 3, 8))


def test_a_failure_ends_the_beams_of_that_prompt_only(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    with make_llm(kv, max_num_batched_tokens=8) as llm:
        run, calls = llm.core.runner.run, 0

        def fail_once(entries: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("injected")
            return run(entries)

        monkeypatch.setattr(llm.core.runner, "run", fail_once)
        outputs = llm.beam_search([SHORT, PROMPT], params)
        idle(llm)
        assert any(isinstance(output.error, RuntimeError) for output in outputs)
        assert all(bool(output.sequences) != bool(output.error) for output in outputs)
        monkeypatch.setattr(
            llm.core.runner,
            "run",
            lambda entries: replace(forward := run(entries), logits=forward.logits * float("nan")),
        )
        output = llm.beam_search(SHORT, params)[0]
        assert isinstance(output.error, FloatingPointError)
        idle(llm)


def test_text_and_what_is_refused() -> None:
    tokenizer = make_tokenizer()
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    with make_llm("virtual", tokenizer=tokenizer, skip_tokenizer_init=False) as llm:
        found = llm.beam_search("w5 w6 w7", params)[0].sequences[0]
        assert found.text == tokenizer.decode(found.tokens)
        assert found.text.startswith("w5 w6 w7 ")
        tokenizer.add_special_tokens({"additional_special_tokens": [f"w{found.tokens[-1]}", "w6"]})
        told = llm.beam_search("w5 w6 w7", params)[0].sequences[0]
        assert told.tokens == found.tokens
        assert told.text == tokenizer.decode([t for t in found.tokens if t not in (6, found.tokens[-1])])
        with pytest.raises(InvalidRequest, match="beam_width is 9, but max_num_seqs is 8"):
            llm.beam_search("w5", BeamSearchParams(beam_width=9, max_tokens=3))
        llm.add_request("x", "w5", SamplingParams())
        with pytest.raises(VattnError, match="beam_search\\(\\) was called with 1 unfinished"):
            llm.beam_search("w5", params)
        llm.abort("x")
        idle(llm)
        budget = 250 * llm.token_bytes
    with (
        make_llm("paged", memory_budget=budget) as llm,
        pytest.raises(InvalidRequest, match=r"4 beams of up to 80 tokens may take 20 units .* but there are 15 in all"),
    ):
        llm.beam_search([[5] * 10], BeamSearchParams(beam_width=4, max_tokens=70))
    with (
        make_llm("paged", scheduling="static") as llm,
        pytest.raises(ConfigError, match="beam search needs scheduling='continuous'"),
    ):
        llm.beam_search([[5] * 10], params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 2.0}, "beam_width is 2.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"temperature": -1}, "temperature is -1"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": -190}, "length_penalty is -190; give a number from -32 to 32"),
    ],
)
def test_bad_parameters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **options})
