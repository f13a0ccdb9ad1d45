"""OpenAI's own client against a server process: sync, async, streams, log probabilities, usage, errors."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, cast

import openai
import pytest
from transformers import AutoTokenizer

from tests.support.servers import MODEL, Server
from vattn.engine import LLM, SamplingParams

QUESTION = "Question: What is 17 + 25?\nAnswer:"
ANSWER = " 7 + 5 = 12, so 17 + 25 = 42."
CHAT: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture
def client(server: Server) -> Any:
    http = openai.DefaultHttpxClient(verify=server.verify)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as made:
        yield made


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=QUESTION, temperature=0, max_tokens=64, user="somebody")
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (ANSWER, "stop", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 14)
    assert answer.usage.total_tokens == 25


def test_prompts_of_every_form(client: openai.OpenAI) -> None:
    ids = AutoTokenizer.from_pretrained(MODEL)(QUESTION)["input_ids"]
    for prompt, count in ((QUESTION, 1), (ids, 1), ([QUESTION] * 2, 2), ([ids, ids], 2)):
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=64)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(i, ANSWER) for i in range(count)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 11 * count


def test_the_default_is_16_tokens_and_not_greedy(client: openai.OpenAI) -> None:
    prompt = "Question: Count to 40.\nAnswer:"
    answer = client.completions.create(model="tiny", prompt=prompt, n=4, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * 16
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.finish_reason == "length" for choice in answer.choices)


def test_what_the_server_says_is_what_the_engine_says(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 12, "presence_penalty": 0.5}
    extra: dict[str, Any] = {
        "top_k": 30,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "bad_words": ["is"],
    }
    answer = client.completions.create(
        model="tiny", prompt=QUESTION, n=3, logit_bias={"5": 3}, extra_body=extra, **options
    )
    with LLM(MODEL, memory_budget="4MiB", max_num_seqs=4) as llm:
        params = SamplingParams(n=3, logit_bias={5: 3}, **options, **extra)
        (want,) = llm.generate([QUESTION], params, use_tqdm=False)
    assert [choice.text for choice in answer.choices] == [completion.text for completion in want.outputs]


def test_stop_strings_and_tokens(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> Any:
        answer = client.completions.create(model="tiny", prompt=QUESTION, temperature=0, max_tokens=64, **options)
        return answer.choices[0]

    cut = ask(stop=", so")
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (" 7 + 5 = 12", "stop", ", so")
    kept = ask(stop=["nowhere", "= 12"], extra_body={"include_stop_str_in_output": True})
    assert kept.text == " 7 + 5 = 12"
    (twelve,) = AutoTokenizer.from_pretrained(MODEL)(" 12")["input_ids"]
    token = ask(extra_body={"stop_token_ids": [twelve]})
    assert (token.text, token.stop_reason) == (" 7 + 5 =", twelve)
    special = ask(extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert special.text.startswith(f"{ANSWER}<|end|>")
    assert special.finish_reason == "length"


def test_a_stream_adds_up(client: openai.OpenAI) -> None:
    prompts = [QUESTION, "Question: What is 3 + 4?\nAnswer:"]
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=prompts,
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = ["", ""]
    reasons: list[str] = []
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts[0] == ANSWER
    assert texts[1].endswith("7.")
    assert reasons == ["stop", "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert last.usage.prompt_tokens == sum(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=0, stream=True, stream_options=options, max_tokens=5
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_usage_in_every_chunk_is_that_of_its_choice(client: openai.OpenAI) -> None:
    prompts = [[5], [5, 6, 7]]
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=prompts,
            n=2,
            max_tokens=5,
            stream=True,
            stream_options=cast(Any, {"include_usage": True, "continuous_usage_stats": True}),
            extra_body={"ignore_eos": True},
        )
    )
    usages: dict[int | None, list[tuple[int, int]]] = {}
    for chunk in chunks:
        assert chunk.usage is not None
        index = chunk.choices[0].index if chunk.choices else None
        usages.setdefault(index, []).append((chunk.usage.prompt_tokens, chunk.usage.completion_tokens))
    assert usages.pop(None) == [(4, 20)]
    want = {index: [(len(prompts[index // 2]), count) for count in range(1, 6)] for index in range(4)}
    assert usages == want


def test_echo_with_log_probabilities(client: openai.OpenAI) -> None:
    """As lm-evaluation-harness asks: the probabilities of a text, and one token that it throws away."""
    ids = AutoTokenizer.from_pretrained(MODEL)(QUESTION + ANSWER)["input_ids"]
    answer = client.completions.create(
        model="tiny", prompt=ids, echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1234
    )
    (choice,) = answer.choices
    logprobs: Any = choice.logprobs
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None
    assert choice.text.startswith(QUESTION + ANSWER)
    assert "".join(logprobs.tokens) == choice.text + "<|end|>"
    assert all(
        choice.text[at:].startswith(t) for at, t in zip(logprobs.text_offset, logprobs.tokens[:-1], strict=False)
    )
    answer_part = zip(logprobs.token_logprobs[11:-1], logprobs.top_logprobs[11:-1], strict=True)
    assert all(own == max(top.values()) for own, top in answer_part), "the answer is the greedy one"

    only = client.completions.create(model="tiny", prompt=ids, echo=True, max_tokens=0, logprobs=1)
    assert only.choices[0].text == QUESTION + ANSWER
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:-1]

    pieces = list(
        client.completions.create(model="tiny", prompt=ids, echo=True, max_tokens=1, logprobs=1, stream=True, seed=1)
    )
    streamed: list[Any] = [
        value
        for piece in pieces
        for choice in piece.choices
        for value in choice.logprobs.token_logprobs  # type: ignore[union-attr]
    ]
    assert streamed[:-1] == logprobs.token_logprobs[:-1]


def test_a_chat(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "What is 17 + 25?"}]}]
    for messages in (CHAT, parts):
        answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
        assert choice.finish_reason == "stop"


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_characters_of_several_tokens(client: openai.OpenAI) -> None:
    """Their tokens have bytes of their own, and begin in the text where the character does."""
    text = "Löwe 😀 ok"
    answer = client.completions.create(model="tiny", prompt=text, echo=True, max_tokens=0, logprobs=0)
    logprobs: Any = answer.choices[0].logprobs
    assert answer.choices[0].text == text
    assert logprobs.tokens.count("\ufffd") > 2
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert text[offset:].startswith(token if token != "\ufffd" else ("ö", "😀"))

    form: Any = {"type": "choice", "choice": [text]}
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_completion_tokens=30, logprobs=True, response_format=form
    )
    assert chat.choices[0].message.content == text
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode().startswith(text)


def test_a_chat_with_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_completion_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content == " 7 + 5 ="
    for entry in logprobs.content:
        assert bytes(entry.bytes or ()).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001


def test_templates(client: openai.OpenAI) -> None:
    begun: Any = [*CHAT, {"role": "assistant", "content": " 7 + 5 = 12, so"}]
    extra = {"add_generation_prompt": False, "continue_final_message": True, "return_token_ids": True}
    answer: Any = client.chat.completions.create(model="tiny", messages=begun, max_tokens=1, extra_body=extra)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.decode(answer.prompt_token_ids) == f"{QUESTION[:-1]}:  7 + 5 = 12, so"
    assert len(answer.choices[0].token_ids) == 1
    with pytest.raises(openai.BadRequestError, match="unknown role"):
        client.chat.completions.create(model="tiny", messages=[{"role": "developer", "content": "w"}])


def test_cached_tokens_and_salts(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    prompt = "Question: " + " ".join(str(i) for i in range(300)) + "\nAnswer:"

    def cached(salt: str) -> int:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt})
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0
    hits = server.metric("vllm:prefix_cache_hits_total")
    assert 0 < hits < server.metric("vllm:prefix_cache_queries_total")


def test_token_ids_and_truncation(client: openai.OpenAI) -> None:
    extra: dict[str, Any] = {"return_token_ids": True, "truncate_prompt_tokens": 3, "prompt_logprobs": 2}
    answer: Any = client.completions.create(model="tiny", prompt=QUESTION, max_tokens=2, echo=True, extra_body=extra)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (choice,) = answer.choices
    assert choice.prompt_token_ids == tokenizer(QUESTION)["input_ids"][-3:]
    assert choice.text.startswith("\nAnswer:")
    assert len(choice.token_ids) == 2
    assert [None if report is None else len(report) >= 2 for report in choice.prompt_logprobs] == [None, True, True]
    assert answer.usage.prompt_tokens == 3


def test_many_at_once(server: Server) -> None:
    async def test() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def ask(i: int) -> str:
                if i % 2:
                    answer = await client.chat.completions.create(model="tiny", messages=CHAT, temperature=0)
                    return answer.choices[0].message.content or ""
                stream = await client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(ask(i) for i in range(24)))

    assert asyncio.run(test()) == [ANSWER] * 24


@pytest.mark.parametrize(
    ("options", "error", "param", "message"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature", "greater than or equal to 0"),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens", "maximum context length is 2048 tokens"),
        ({"prompt": "w " * 3000}, openai.BadRequestError, "prompt", "maximum context length is 2048 tokens"),
        ({"prompt": "w" * 1_000_000}, openai.BadRequestError, "prompt", "maximum context length is 2048 tokens"),
        ({"logit_bias": {"5": 101}}, openai.BadRequestError, "logit_bias", "from -100 to 100"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs", "less than or equal to 20; it is 21"),
        ({"n": 2, "temperature": 0}, openai.BadRequestError, "n", "greedy"),
        ({"suffix": "end"}, openai.BadRequestError, "suffix", "suffix is not supported"),
        ({"best_of": 3}, openai.BadRequestError, "best_of", "best_of"),
        ({"logit_bias": {"a": 1}}, openai.BadRequestError, "logit_bias", "no token id"),
        ({"logit_bias": {"1_0": 1}}, openai.BadRequestError, "logit_bias", "no token id"),
        ({"logit_bias": {"9" * 5000: 1}}, openai.BadRequestError, "logit_bias", "larger than any token id"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias", "99999"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options", "set stream"),
        (
            {"stream": True, "extra_body": {"prompt_logprobs": 1}},
            openai.BadRequestError,
            "prompt_logprobs",
            "in a stream",
        ),
        ({"extra_body": {"truncate_prompt_tokens": 0}}, openai.BadRequestError, "truncate_prompt_tokens", "or -1"),
        ({"extra_body": {"priority": 5}}, openai.BadRequestError, "priority", "order of arrival"),
        ({"extra_body": {"use_beam_search": True}}, openai.BadRequestError, "use_beam_search", "beam"),
        ({"extra_body": {"guided_json": {}}}, openai.BadRequestError, "guided_json", "use response_format"),
        ({"extra_body": {"thinking_token_budget": 0}}, openai.BadRequestError, "thinking_token_budget", "max_tokens"),
        ({"extra_body": {"truncation_side": "end"}}, openai.BadRequestError, "truncation_side", "'left' or 'right'"),
        ({"extra_body": {"min_tokens": 99}}, openai.BadRequestError, "min_tokens", "min_tokens is 99"),
        ({"prompt": ""}, openai.BadRequestError, "prompt", "the prompt is empty; give at least one token"),
        ({"prompt": []}, openai.BadRequestError, "prompt", "prompt: "),
        ({"prompt": [[1, -1]]}, openai.BadRequestError, "prompt", "prompt.0.1: Input should be greater than or equal"),
        ({"prompt": ["a", 1]}, openai.BadRequestError, "prompt", "prompt.1: Input should be a valid string"),
        ({"prompt": [5000]}, openai.BadRequestError, "prompt", "no token id"),
        ({"stop": 5}, openai.BadRequestError, "stop", "stop: Input should be a valid string, or Input should be a"),
        ({"model": "huge"}, openai.NotFoundError, "model", "'huge' does not exist; there is tiny"),
    ],
)
def test_what_is_refused(
    client: openai.OpenAI, options: dict[str, Any], error: type[openai.APIStatusError], param: str | None, message: str
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "w", **options})
    body: Any = caught.value.body
    assert body.keys() == {"message", "type", "param", "code"}
    assert message in body["message"]
    assert body["param"] == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "3", "tool_call_id": "1"}]}, "messages"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinkin": True}}}, "chat_template_kwargs"),
        ({"extra_body": {"add_generation_prompt": True, "continue_final_message": True}}, "continue_final_message"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}}, "response_format"),
        ({"response_format": {"type": "choice", "choice": [""]}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"choice": [""]}}}, "structured_outputs"),
        ({"extra_body": {"cache_salt": 5}}, "cache_salt"),
        ({"messages": [{"role": "nobody", "content": "w"}]}, "messages"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"extra_body": {"echo": True}}, "echo"),
        ({"extra_body": {"add_special_tokens": True}}, "add_special_tokens"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_what_is_refused_in_a_chat(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": CHAT, **options})
    body: Any = caught.value.body
    assert body["param"] == param


def test_what_changes_nothing_is_accepted(client: openai.OpenAI) -> None:
    extra = {"suffix": None, "best_of": 1, "something_new": {"a": 1}, "temperature": None, "stop": None, "tools": None}
    extra |= {"logprob_token_ids": [], "thinking_token_budget": -1, "watermarking": False, "truncation_side": None}
    answer = client.completions.create(model="tiny", prompt="w", max_tokens=1, extra_body=extra)
    assert len(answer.choices) == 1
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=1, tools=[], tool_choice="auto", response_format={"type": "text"}
    )
    assert len(chat.choices) == 1


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.owned_by) == ("tiny", "vattn")
    assert client.models.retrieve("tiny") == card
    assert card.model_extra == {"root": MODEL, "max_model_len": 2048}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_the_form_of_an_output(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    greedy: Any = {"model": "tiny", "temperature": 0}
    answer = client.chat.completions.create(**greedy, messages=CHAT, max_tokens=200, response_format=form)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["yes"], bool)
    for structured, matches in (({"choice": ["one", "two"]}, "one|two"), ({"regex": "[0-9]{3}"}, "[0-9]{3}")):
        body = {"structured_outputs": structured}
        completion = client.completions.create(**greedy, prompt=QUESTION, max_tokens=20, extra_body=body)
        assert re.fullmatch(matches, completion.choices[0].text), completion.choices[0].text
