"""Structured outputs end to end: whatever the model would say, the text has the form that was asked for."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.backends import MAIN_GROWING_KVS, chosen
from tests.support.effort import covering
from tests.support.paths import ROOT
from tests.support.waiting import SECONDS
from vattn.engine import LLM, AsyncEngine, InvalidRequest, RequestOutput, SamplingParams
from vattn.engine.requests import grammar_compiler
from vattn.engine.requests.grammar import Grammar, GrammarError

pytestmark = pytest.mark.slow(1)

PROMPTS = ["Question: What is 17 + 25?\nAnswer:", "The river", "Question: Name 4 planets.\nAnswer:"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
HOW = [{"temperature": 0}, {"temperature": 1.0, "n": 3, "seed": 5}, {"temperature": 2.0, "n": 3, "seed": 6}]


MODEL = str(ROOT / "demo" / "model")


def make_llm(**keywords: Any) -> LLM:
    return LLM(MODEL, **{"max_num_seqs": 8, "max_model_len": 512, **keywords})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    completions = [completion for output in outputs for completion in output.outputs]
    assert {completion.finish_reason for completion in completions} == {"stop"}
    assert {completion.stop_reason for completion in completions} == {None}
    return [completion.text for completion in completions]


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 12
        and type(found["age"]) is int
        and 0 <= found["age"] <= 120
        and len(found["tags"]) <= 3
        and {*found["tags"]} <= {"a", "b"}
    )


@pytest.mark.parametrize("how", HOW)
def test_outputs_have_their_form(llm: LLM, how: dict[str, Any]) -> None:
    def generate(**wanted: Any) -> list[str]:
        params = SamplingParams(max_tokens=300, structured_outputs=wanted, **how)
        return texts(llm.generate(PROMPTS, params, use_tqdm=False))

    assert all(is_person(text) for text in generate(json=PERSON))
    assert all(re.fullmatch(r"[0-9]{3}-[a-z]{1,5}", text) for text in generate(regex=r"[0-9]{3}-[a-z]{1,5}"))
    assert {*generate(choice=["yes", "no", "été\n/x"])} <= {"yes", "no", "été\n/x"}
    assert all(re.fullmatch(r"\([a-z]{1,9}\)", text) for text in generate(grammar='start: "(" /[a-z]{1,9}/ ")"'))
    llm.check()


def test_rows_of_a_batch_have_forms_of_their_own(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=12)
    alone = [llm.generate(prompt, plain, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
    forms: list[dict[str, Any] | None] = [None, {"regex": "[0-9]{5}"}, {"choice": ["red", "green"]}]
    params = [SamplingParams(temperature=0, max_tokens=12, structured_outputs=form) for form in forms]
    first, second, third = (output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False))
    assert first.token_ids == alone[0]
    assert re.fullmatch("[0-9]{5}", second.text)
    assert third.text in ("red", "green")


def test_log_probabilities_are_those_among_allowed_tokens() -> None:
    """As vLLM's, beside a row without a form."""
    forms: list[dict[str, Any] | None] = [{"regex": "[0-9]{3}x[ab]"}, None, {"choice": ["one two"]}]
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=-1, repetition_penalty=1.3, structured_outputs=form)
        for form in forms
    ]
    with make_llm(max_logprobs=-1) as llm:
        tokenizer = llm.get_tokenizer()
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        digits, plain, forced = (output.outputs[0] for output in outputs)
        read = torch.tensor([outputs[0].prompt_token_ids + digits.token_ids[:-1]])
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(MODEL, dtype=llm.model.dtype)(read).logits[0].float()
    assert digits.logprobs is not None
    assert plain.logprobs is not None
    assert forced.logprobs is not None
    start = len(outputs[0].prompt_token_ids) - 1
    for place, (token, report) in enumerate(zip(digits.token_ids, digits.logprobs, strict=True)):
        finite = {other for other, entry in report.items() if math.isfinite(entry.logprob)}
        assert token in finite
        assert {tokenizer.decode([other]) for other in finite} <= {*"0123456789xab"}
        among = logits[start + place, sorted(finite)].log_softmax(-1).tolist()
        assert [report[other].logprob for other in sorted(finite)] == pytest.approx(among, abs=1e-2)
    assert digits.cumulative_logprob == pytest.approx(
        sum(report[token].logprob for token, report in zip(digits.token_ids, digits.logprobs, strict=True))
    )
    assert all(math.isfinite(entry.logprob) for report in plain.logprobs for entry in report.values())
    assert [forced.logprobs[0][forced.token_ids[0]].rank, forced.text] == [1, "one two"]


def test_the_end_comes_before_min_tokens_only_where_nothing_can_follow(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, min_tokens=20, seed=1, structured_outputs={"regex": "[a-z]{1,8}"})
    assert [len(text) for text in texts(llm.generate(PROMPTS, params, use_tqdm=False))] == [8] * 3
    params = SamplingParams(max_tokens=40, min_tokens=20, seed=1, structured_outputs={"regex": "[a-z]+"})
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        assert len(output.outputs[0].token_ids) >= 20
        assert re.fullmatch("[a-z]+", output.outputs[0].text)


def test_ignore_eos_goes_on_to_the_longest_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1, structured_outputs={"regex": "[a-z]{1,8}"})
    assert [len(text) for text in texts(llm.generate(PROMPTS, params, use_tqdm=False))] == [8] * 3


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_the_output_where_it_may_end(llm: LLM, ignore_eos: bool) -> None:
    """A special token, which no form has; the model would always take it."""
    [stop] = {*llm.get_tokenizer().all_special_ids} - {llm.get_tokenizer().eos_token_id}
    params = SamplingParams(
        n=2, seed=1, max_tokens=40, ignore_eos=ignore_eos, stop_token_ids=[stop], logit_bias={stop: 1000.0}
    )
    for form, least, longest in (("[a-z]+", 0, 1), ("[a-z]+", 5, 5), ("[a-z]{3}x[a-z]*", 0, 4)):
        params = params.clone(structured_outputs={"regex": form}, min_tokens=least)
        [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
        for completion in output.outputs:
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            assert max(least, 1) < len(completion.token_ids) <= longest + 1
            assert re.fullmatch(form, completion.text)


def test_a_stop_string_and_max_tokens_cut_off(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, stop=",", structured_outputs={"regex": "[a-z]{3},[0-9]{9}"})
    completion = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert re.fullmatch("[a-z]{3}", completion.text)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ",")
    params = SamplingParams(temperature=0, max_tokens=2, structured_outputs={"regex": "[0-9]{40}"})
    completion = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (2, "length")


@pytest.mark.parametrize(("kv", "mode"), covering(MAIN_GROWING_KVS, ["recompute", "swap"]))
def test_preempted_requests_keep_their_place(kv: str, mode: Any) -> None:
    """Memory for about half of the requests: the others lose their slots in the middle of their outputs."""
    params = SamplingParams(max_tokens=200, seed=2, structured_outputs={"regex": "([0-9]{4} ){30}end"})
    options: dict[str, Any] = {"memory_budget": "1MiB", "max_model_len": 256, "preemption_mode": mode}
    if kv == "virtual":
        options["kv_options"] = {"page_size": 4096}
    with make_llm(**chosen(kv, **options)) as llm:
        outputs = llm.generate(PROMPTS * 3, params, use_tqdm=False)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert all(re.fullmatch("([0-9]{4} ){30}end", text) for text in texts(outputs))


def test_drafts_and_static_batches_do_not_break_the_form() -> None:
    form = {"regex": "(ab ){12}[a-z]{3}"}
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=form)
    for options in (
        {"speculative_config": {"num_speculative_tokens": 4}},
        {"scheduling": "static", "enable_prefix_caching": False},
    ):
        with make_llm(**options) as llm:
            assert all(
                re.fullmatch(form["regex"], text) for text in texts(llm.generate(PROMPTS, params, use_tqdm=False))
            )
            assert llm.speculation.num_drafts == 0


def test_what_cannot_be_enforced_is_refused_and_nothing_starts(llm: LLM) -> None:
    for form in ({"regex": "["}, {"json": {"type": "blob"}}, {"json": {"type": "array", "uniqueItems": True}}):
        with pytest.raises(InvalidRequest, match="structured_outputs cannot be used"):
            llm.generate(PROMPTS, SamplingParams(structured_outputs=form), use_tqdm=False)
    assert not llm.has_unfinished()


def test_a_grammar_that_gives_up_fails_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, told = Grammar.accept, []

    def give_up(self: Grammar, token_id: int) -> None:
        told.append(token_id)
        if len(told) == 3:
            raise GrammarError("a limit was reached")
        accept(self, token_id)

    monkeypatch.setattr(Grammar, "accept", give_up)
    params = [
        SamplingParams(temperature=0, max_tokens=8),
        *[SamplingParams(structured_outputs={"regex": "[0-9]{6}"})] * 2,
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert sorted(reasons) == ["error", "length", "stop"]
    assert isinstance(outputs[reasons.index("error")].error, GrammarError)
    llm.check()


def test_the_asynchronous_engine_streams_them() -> None:
    async def main() -> None:
        engine = AsyncEngine(make_llm())
        try:
            params = SamplingParams(max_tokens=300, seed=4, structured_outputs={"json": PERSON})
            pieces = [output.outputs[0].text async for output in engine.generate(PROMPTS[0], params)]
            assert is_person("".join(pieces))
            with pytest.raises(InvalidRequest, match="unclosed"):
                await engine.add(PROMPTS[0], SamplingParams(structured_outputs={"regex": "["}))
            assert engine.num_unfinished == 0
        finally:
            await engine.shutdown(timeout=0)

    asyncio.run(main())


def test_slow_grammars_keep_no_other_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, go_on = threading.Event(), threading.Event()

    def compile_slowly(trial: object, grammar: str) -> None:
        """Of a grammar that turns out to be too much."""
        tried.set()
        assert go_on.wait(SECONDS)

    monkeypatch.setattr(grammar_compiler._Trial, "compile", compile_slowly)

    async def main() -> None:
        engine = AsyncEngine(make_llm())
        try:
            schemas = [{"type": "integer", "multipleOf": 1_000_003 + 2 * i} for i in range(3)]
            slow = [
                asyncio.create_task(engine.add(PROMPTS[0], SamplingParams(structured_outputs={"json": schema})))
                for schema in schemas
            ]
            assert await asyncio.to_thread(tried.wait, SECONDS)
            async for output in engine.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=4)):
                assert output.error is None
            assert not any(task.done() for task in slow)
            go_on.set()
            refused = await asyncio.gather(*slow, return_exceptions=True)
            assert [type(error) for error in refused] == [InvalidRequest] * 3
        finally:
            go_on.set()
            await engine.shutdown(timeout=0)

    asyncio.run(main())
