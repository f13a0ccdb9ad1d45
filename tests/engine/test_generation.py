"""What requests may ask for, through the whole engine: log probabilities, n, stops, chats, and bad values."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.backends import KVS, chosen
from tests.support.effort import covering
from tests.support.tiny_models import VOCAB, expected, make_model, make_prompts, make_tokenizer
from vattn.engine import LLM, InvalidRequest, RequestOutput, RequestOutputKind, SamplingParams

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


def make_llm(kv: str = "paged", **keywords: Any) -> LLM:
    defaults = {"max_model_len": 128, "memory_budget": "4MiB", "tokenizer": make_tokenizer()}
    return LLM(make_model("llama"), **chosen(kv, **{**defaults, **keywords}))


def generate(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    [output] = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 8, **params}), use_tqdm=False)
    return output


def plain_logprobs(tokens: list[int]) -> Tensor:
    """`[len(tokens), VOCAB]`, from one forward pass without any cache."""
    with torch.inference_mode():
        logprobs: Tensor = make_model("llama")(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs


@pytest.mark.parametrize(("kv", "max_num_batched_tokens", "temperature"), covering(KVS, [4, 64], [0, 1.0]))
def test_logprobs_as_a_plain_forward_has_them(kv: str, max_num_batched_tokens: int, temperature: float) -> None:
    prompts = make_prompts([11, 7])
    params = [
        SamplingParams(temperature=temperature, logprobs=3, prompt_logprobs=2, presence_penalty=1.0, top_k=5),
        SamplingParams(temperature=temperature, logprobs=0, prompt_logprobs=-1),
    ]
    want = [plain_logprobs(prompt) for prompt in prompts]
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": max_num_batched_tokens, "max_logprobs": -1}
    with make_llm(kv, **limits) as llm:
        outputs = llm.generate([*prompts, prompts[0]], [*params, SamplingParams()], use_tqdm=False)
    assert outputs[2].prompt_logprobs is outputs[2].outputs[0].logprobs is None
    assert outputs[2].outputs[0].cumulative_logprob is None
    for output, prompt, param in zip(outputs[:2], prompts, params, strict=True):
        completion = output.outputs[0]
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert completion.cumulative_logprob is not None
        assert output.prompt_logprobs[0] is None
        every = [*prompt, *completion.token_ids]
        reports = [*output.prompt_logprobs[1:], *completion.logprobs]
        want = plain_logprobs(every[:-1])
        total = 0.0
        assert len(reports) == len(every) - 1
        for i, (token, report) in enumerate(zip(every[1:], reports, strict=True)):
            count = param.prompt_logprobs if i + 1 < len(prompt) else param.logprobs
            assert count is not None
            count = VOCAB if count == -1 else count
            assert report is not None
            assert next(iter(report)) == token
            assert len(report) == count + (report[token].rank > count)
            best = want[i].argsort(descending=True).tolist()
            assert {best[rank] for rank in range(count)} <= set(report)
            for key, logprob in report.items():
                assert logprob.logprob == pytest.approx(float(want[i, key]), abs=1e-4)
                assert best[logprob.rank - 1] == key
                assert logprob.decoded_token == make_tokenizer().decode([key])
            if i + 1 >= len(prompt):
                total += report[token].logprob
        assert completion.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_survive_preemption(main_growing_kv: str) -> None:
    prompts = make_prompts([20, 24, 22])
    params = SamplingParams(temperature=0, max_tokens=180, prompt_logprobs=0, logprobs=0)
    options = {"kv_options": {"page_size": 4096}} if main_growing_kv == "virtual" else {}
    with make_llm(
        main_growing_kv, max_model_len=256, memory_budget="120KiB", max_num_batched_tokens=8, max_num_seqs=3, **options
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.outputs[0].logprobs is not None
        assert len(output.outputs[0].logprobs) == 180
        want = plain_logprobs(prompt)
        for i, report in enumerate(output.prompt_logprobs[1:]):
            assert report is not None
            assert report[prompt[i + 1]].logprob == pytest.approx(float(want[i, prompt[i + 1]]), abs=1e-4)


def test_n_completions(kv: str) -> None:
    prompt = make_prompts([9])[0]
    with make_llm(kv, max_num_seqs=4) as llm:
        output = generate(llm, prompt, n=6, temperature=1.0, seed=5, prompt_logprobs=0)
        alone = [generate(llm, prompt, temperature=1.0, seed=5 + i).outputs[0] for i in range(6)]
        llm.check()
        assert llm.core.kv.available() == llm.core.kv.total()
    assert output.finished
    assert output.prompt_logprobs is not None
    assert [completion.index for completion in output.outputs] == list(range(6))
    assert [completion.token_ids for completion in output.outputs] == [completion.token_ids for completion in alone]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1


def test_n_completions_step_by_step() -> None:
    prompt = make_prompts([9])[0]
    with make_llm(max_num_seqs=4) as llm:
        params = SamplingParams(n=3, max_tokens=4, output_kind=RequestOutputKind.DELTA)
        llm.add_request("a", prompt, params)
        llm.add_request("b", prompt, SamplingParams(n=2, max_tokens=50))
        deltas: dict[int, list[int]] = {0: [], 1: [], 2: []}
        while True:
            outputs = {output.request_id: output for output in llm.step()}
            llm.check()
            assert len(outputs.get("b", outputs["a"]).outputs) in (2, 3)
            for completion in outputs["a"].outputs:
                deltas[completion.index] += completion.token_ids
            if outputs["a"].finished:
                break
        aborted = llm.abort("b")
        assert aborted is not None
        assert [completion.finish_reason for completion in aborted.outputs] == ["abort", "abort"]
        assert not llm.has_unfinished()
        llm.check()
    assert [len(tokens) for tokens in deltas.values()] == [4, 4, 4]


def test_stop_strings_cross_tokens(kv: str) -> None:
    prompt = next(prompt for prompt in make_prompts([20] * 9) if min(expected("llama", prompt, 8)) > 9)
    words = [f"w{token}" for token in expected("llama", prompt, 8)]
    stop = f"{words[2][1:]} {words[3][:2]}"  # from inside the third word into the fourth
    text = "".join(f" {word}" for word in words)
    cut = text.index(stop)
    with make_llm(kv) as llm:
        plain = generate(llm, prompt, stop=["nothing", stop])
        kept = generate(llm, prompt, stop=stop, include_stop_str_in_output=True)
        late = generate(llm, prompt, stop=stop, min_tokens=5)
        token = generate(llm, prompt, stop_token_ids=[int(words[3][1:])])
        token_kept = generate(llm, prompt, stop_token_ids=[int(words[3][1:])], include_stop_str_in_output=True)
    for output, want in ((plain, text[:cut]), (kept, text[: cut + len(stop)])):
        completion = output.outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (want, "stop", stop)
        assert len(completion.token_ids) == 4
    assert (late.outputs[0].text, late.outputs[0].finish_reason) == (text, "length")
    assert token.outputs[0].text == "".join(f" {word}" for word in words[:3])
    assert token_kept.outputs[0].text == "".join(f" {word}" for word in words[:4])
    assert token.outputs[0].stop_reason == int(words[3][1:])


def test_min_tokens_holds_every_stop_back(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = make_prompts([23])[0]
    tokens = expected("llama", prompt, 8)
    model = make_model("llama")
    monkeypatch.setattr(model.generation_config, "eos_token_id", tokens[1])
    with make_llm() as llm:
        assert len(generate(llm, prompt).outputs[0].token_ids) == 2
        held = generate(llm, prompt, min_tokens=5).outputs[0].token_ids
        biased = generate(llm, prompt, logit_bias={tokens[1]: 100.0}).outputs[0].token_ids
        assert generate(llm, prompt, max_tokens=None, ignore_eos=True).outputs[0].token_ids[:8] == tokens
    assert len(held) >= 5
    assert tokens[1] not in held[:5]
    assert biased == [tokens[1]]


def test_penalties_and_allowed_tokens(kv: str) -> None:
    with make_llm(kv) as llm:
        output = generate(llm, [5, 6, 7], max_tokens=30, frequency_penalty=2.0, presence_penalty=2.0)
        allowed = generate(llm, [5, 6, 7], max_tokens=30, allowed_token_ids=[8, 9], temperature=1.0)
    repeated = len(output.outputs[0].token_ids) - len(set(output.outputs[0].token_ids))
    plain = expected("llama", [5, 6, 7], 30)
    in_plain = len(plain) - len(set(plain))
    assert in_plain > 0
    assert repeated < in_plain
    assert set(allowed.outputs[0].token_ids) <= {8, 9}


def test_bad_words() -> None:
    prompt = next(prompt for prompt in make_prompts([20] * 9) if min(expected("llama", prompt, 8)) > 9)
    tokens = expected("llama", prompt, 8)
    words = [f"w{tokens[2]} w{tokens[3]}", f"w{tokens[0]}"]
    with make_llm() as llm:
        first = generate(llm, prompt, bad_words=words[:1]).outputs[0]
        both = generate(llm, prompt, bad_words=words).outputs[0]
    assert first.token_ids[:3] == tokens[:3]
    assert first.token_ids[3] != tokens[3]
    assert words[0] not in both.text
    assert tokens[0] not in both.token_ids


def test_bad_words_that_the_model_does_not_have() -> None:
    """It never samples tokens that only the tokenizer has, so nothing is excluded."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["extra"])
    prompt = make_prompts([20])[0]
    tokens = expected("llama", prompt, 8)
    words = ["extra", f"extra w{tokens[0]}", f"w{tokens[0]} extra"]
    with make_llm(tokenizer=tokenizer) as llm:
        assert generate(llm, prompt, bad_words=words).outputs[0].token_ids == tokens


def test_a_row_of_nan_fails_its_own_request() -> None:
    prompts = make_prompts([5, 6, 7])
    with make_llm(max_num_seqs=4, max_num_batched_tokens=64) as llm:
        calls = itertools.count()

        def poison(_module: object, _inputs: object, logits: Tensor) -> Tensor:
            if next(calls) == 3:
                logits[0, 1] = float("nan")
            return logits

        handle = llm.model.get_output_embeddings().register_forward_hook(poison)
        try:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        finally:
            handle.remove()
        llm.check()
        assert llm.core.kv.available() == llm.core.kv.total()
    assert isinstance(outputs[1].error, FloatingPointError)
    assert outputs[1].outputs[0].token_ids == expected("llama", prompts[1], 8)[:3]
    for i in (0, 2):
        assert outputs[i].outputs[0].token_ids == expected("llama", prompts[i], 8)


def test_a_prompt_whose_log_probabilities_are_no_numbers_fails() -> None:
    """Although those of its last chunk are: nobody could tell from the tokens."""
    prompts = make_prompts([40, 6])
    params = SamplingParams(temperature=0, max_tokens=8)
    with make_llm(max_num_seqs=4, max_num_batched_tokens=16) as llm:
        calls = itertools.count()

        def poison(_module: object, _inputs: object, logits: Tensor) -> Tensor:
            return logits * float("nan") if next(calls) == 1 else logits

        handle = llm.model.get_output_embeddings().register_forward_hook(poison)
        try:
            outputs = llm.generate(prompts, [replace(params, prompt_logprobs=1), params], use_tqdm=False)
        finally:
            handle.remove()
        llm.check()
        assert llm.core.kv.available() == llm.core.kv.total()
    assert isinstance(outputs[0].error, FloatingPointError)
    assert "log probabilities of the prompt" in str(outputs[0].error)
    assert (outputs[1].error, outputs[1].outputs[0].token_ids) == (None, expected("llama", prompts[1], 8))


def test_a_tokenizer_that_fails_harms_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts([5, 6])
    tokens = expected("llama", prompts[0], 8)
    want = expected("llama", prompts[1], 8)
    bad = next(token for token in tokens if token not in want)
    with make_llm() as llm:
        decode = llm.tokenizer.decode

        def failing(token_ids: list[int], **options: Any) -> Any:
            if bad in token_ids:
                raise KeyError(bad)
            return decode(token_ids, **options)

        monkeypatch.setattr(llm.tokenizer, "decode", failing)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        llm.check()
        assert llm.core.kv.available() == llm.core.kv.total()
    assert isinstance(outputs[0].error, KeyError)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert (outputs[1].error, outputs[1].outputs[0].token_ids) == (None, want)


def test_a_token_that_the_tokenizer_cannot_decode_has_a_log_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alternative, which ends neither the request that asked for it nor the others."""
    prompts = make_prompts([5, 6])
    want = [expected("llama", prompt, 8) for prompt in prompts]
    known = {token for tokens in (*prompts, *want) for token in tokens}
    params = SamplingParams(temperature=0, max_tokens=8)
    with make_llm() as llm:
        decode = llm.tokenizer.decode

        def failing(token_ids: list[int], **options: Any) -> Any:
            if not known.issuperset(token_ids):
                raise KeyError(token_ids)
            return decode(token_ids, **options)

        monkeypatch.setattr(llm.tokenizer, "decode", failing)
        outputs = llm.generate(prompts, [params, replace(params, logprobs=5, prompt_logprobs=5)], use_tqdm=False)
        texts = {token: decode([token]) for token in known}
    assert [(output.error, output.outputs[0].token_ids) for output in outputs] == [(None, tokens) for tokens in want]
    for reports in (outputs[1].outputs[0].logprobs, (outputs[1].prompt_logprobs or [])[1:]):
        found = {token: entry.decoded_token for report in reports or () for token, entry in (report or {}).items()}
        assert set(found) - known
        assert found == {token: texts.get(token) for token in found}


def test_what_a_caller_adds_to_the_prompt_of_an_output_does_not_reach_the_request() -> None:
    [prompt] = make_prompts([5])
    want = expected("llama", prompt, 40)
    with make_llm() as llm:
        llm.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=40))
        while llm.has_unfinished():
            for output in llm.step():
                output.prompt_token_ids.extend(output.outputs[0].token_ids)
    assert output.outputs[0].token_ids == want


def test_chat() -> None:
    tokenizer = make_tokenizer()
    conversation = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
    with make_llm(tokenizer=tokenizer) as llm:
        with pytest.raises(InvalidRequest, match="no chat template"):
            llm.chat(conversation)
        tokenizer.chat_template = TEMPLATE
        params = SamplingParams(temperature=0, max_tokens=8)
        outputs = llm.chat([conversation, conversation[:1]], params, use_tqdm=False)
        [single] = llm.chat(conversation, params, use_tqdm=False)
        [plain] = llm.chat(conversation, params, use_tqdm=False, add_generation_prompt=False)
        [other] = llm.chat(conversation, params, use_tqdm=False, chat_template="w4 w4")
        with pytest.raises(InvalidRequest, match="chat template refuses"):
            llm.chat(conversation, chat_template="{{ raise_exception('no system messages') }}")
        with pytest.raises(InvalidRequest, match="chat template refuses"):
            llm.chat(conversation, chat_template="{% broken")
        with pytest.raises(InvalidRequest, match="'add_generation_promt', which is no variable of the chat template"):
            llm.chat(conversation, add_generation_promt=False)
        parts = [{"role": "user", "content": [{"type": "text", "text": "w5"}, {"type": "text", "text": "w6"}]}]
        [joined] = llm.chat(parts, params, use_tqdm=False, chat_template_kwargs={})
    assert [output.prompt_token_ids for output in outputs] == [[5, 6, 7, 9], [5, 6, 9]]
    assert outputs[0].outputs[0].token_ids == expected("llama", [5, 6, 7, 9], 8)
    assert single.outputs == outputs[0].outputs
    assert plain.prompt_token_ids == [5, 6, 7]
    assert joined.prompt_token_ids == [5, 6, 9]
    assert other.prompt_token_ids == [4, 4]
    with make_llm(tokenizer=None, skip_tokenizer_init=True) as llm, pytest.raises(InvalidRequest, match="a tokenizer"):
        llm.chat(conversation)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids holds {VOCAB}, which is no token id"),
        ({"allowed_token_ids": [5, VOCAB + 7]}, f"allowed_token_ids holds {VOCAB + 7}"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias holds {VOCAB}"),
        ({"bad_words": ["w5"]}, "bad_words is text, but this LLM has no tokenizer"),
        ({"stop": "w5"}, "stop is text, but this LLM has no tokenizer"),
    ],
)
def test_parameters_that_this_model_cannot_serve(params: dict[str, Any], message: str) -> None:
    want = expected("llama", [2, 3], 8)
    with make_llm(tokenizer=None, skip_tokenizer_init=True) as llm:
        with pytest.raises(InvalidRequest, match=message):
            generate(llm, [2, 3], **params)
        assert generate(llm, [2, 3]).outputs[0].token_ids == want


def test_a_prompt_without_output_may_fill_the_context(kv: str) -> None:
    prompt = make_prompts([64])[0]
    with make_llm(kv, max_model_len=64, max_num_seqs=2) as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=0, n=2, prompt_logprobs=0), use_tqdm=False)[0]
        llm.check()
        assert [completion.finish_reason for completion in output.outputs] == ["length"] * 2
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[63] is not None
        want = float(plain_logprobs(prompt)[62, prompt[63]])
        assert output.prompt_logprobs[63][prompt[63]].logprob == pytest.approx(want, abs=1e-4)
        for max_tokens in (1, None):
            with pytest.raises(InvalidRequest, match="the output needs at least one; shorten"):
                llm.generate(prompt, SamplingParams(max_tokens=max_tokens), use_tqdm=False)
        with pytest.raises(InvalidRequest, match=r"64 tokens \(max_model_len\); shorten"):
            llm.generate([*prompt, 1], SamplingParams(max_tokens=0), use_tqdm=False)


@pytest.mark.parametrize("scheduling", ["continuous", "static"])
def test_no_output_tokens_at_all(kv: str, scheduling: str) -> None:
    """`max_tokens=0`: the prompt is computed, in chunks, for its log probabilities."""
    prompts = make_prompts([40, 1, 23])
    params = [
        SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=0),
        SamplingParams(max_tokens=0, n=2),
        SamplingParams(max_tokens=8, temperature=0),
    ]
    with make_llm(kv, max_num_seqs=4, max_num_batched_tokens=16, scheduling=scheduling) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.check()
        assert llm.core.kv.available() == llm.core.kv.total()
    for output in outputs[:2]:
        for completion in output.outputs:
            assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
    assert [len(output.outputs) for output in outputs] == [1, 2, 1]
    assert outputs[0].outputs[0].logprobs == []
    assert outputs[0].prompt_logprobs is not None
    assert len(outputs[0].prompt_logprobs) == 40
    want = plain_logprobs(prompts[0])
    for i, report in enumerate(outputs[0].prompt_logprobs[1:]):
        assert report is not None
        assert report[prompts[0][i + 1]].logprob == pytest.approx(float(want[i, prompts[0][i + 1]]), abs=1e-4)
    assert outputs[2].outputs[0].token_ids == expected("llama", prompts[2], 8)
