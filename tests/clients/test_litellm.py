"""litellm, as its users call servers that speak OpenAI's API."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import litellm
import pytest

from tests.support.servers import Server

MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
QUESTION = "Question: What is 17 + 25?\nAnswer:"
ANSWER = "7 + 5 = 12, so 17 + 25 = 42."


@pytest.fixture(params=["openai/tiny", "hosted_vllm/tiny"])
def options(request: pytest.FixtureRequest, server: Server) -> dict[str, Any]:
    """For chats."""
    return {"model": request.param, "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}


def test_chat(options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=MESSAGES, max_tokens=64, **options)
    assert answer.choices[0].message.content.strip() == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


def test_chat_in_a_stream(options: dict[str, Any]) -> None:
    chunks = list(
        litellm.completion(
            messages=MESSAGES, max_tokens=64, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices).strip() == ANSWER
    assert len(chunks) > 5
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    plain = litellm.completion(messages=MESSAGES, max_tokens=64, **options)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.content == plain.choices[0].message.content
    assert whole.usage.completion_tokens == plain.usage.completion_tokens
    assert whole.usage.prompt_tokens == plain.usage.prompt_tokens


def test_chats_at_once(options: dict[str, Any]) -> None:
    async def ask(number: int) -> str:
        messages = [{"role": "user", "content": f"What is {number} + 7?"}]
        if number % 2:
            answer = await litellm.acompletion(messages=messages, max_tokens=64, **options)
            return str(answer.choices[0].message.content)
        stream = await litellm.acompletion(messages=messages, max_tokens=64, stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def test() -> list[str]:
        return await asyncio.gather(*(ask(number) for number in range(12)))

    answers = asyncio.run(test())
    assert [str(number + 7) in answer for number, answer in enumerate(answers)].count(True) >= 10


def test_several_choices_and_logprobs(options: dict[str, Any]) -> None:
    answer = litellm.completion(
        messages=MESSAGES, max_tokens=5, n=3, logprobs=True, top_logprobs=2, **{**options, "temperature": 1}
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 5
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_a_schema(options: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = litellm.completion(messages=MESSAGES, max_tokens=100, response_format=form, **options)
    assert answer.choices[0].message.content.replace(" ", "").replace("\n", "") in ('{"yes":true}', '{"yes":false}')


def test_completions(server: Server) -> None:
    options: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 64}
    answer = litellm.text_completion(model="text-completion-openai/tiny", prompt=QUESTION, **options)
    assert answer.choices[0].text.strip() == ANSWER
    stream = litellm.text_completion(model="text-completion-openai/tiny", prompt=QUESTION, stream=True, **options)
    assert "".join(chunk.choices[0].text or "" for chunk in stream).strip() == ANSWER
    answer = litellm.text_completion(model="text-completion-openai/tiny", prompt=[QUESTION, "w"], **options)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.strip() == ANSWER


def test_errors_are_told_apart(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "w " * 5000}], **options)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **{**options, "temperature": -1})
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(messages=MESSAGES, **{**options, "model": options["model"].replace("tiny", "other")})
    with pytest.raises(litellm.Timeout):
        litellm.completion(
            messages=MESSAGES, max_tokens=1900, timeout=0.3, num_retries=0, extra_body={"ignore_eos": True}, **options
        )


def test_keys_and_overload(guarded: Server) -> None:
    options: dict[str, Any] = {"model": "openai/tiny", "api_base": f"{guarded.url}/v1", "messages": MESSAGES}
    options |= {"max_retries": 0, "temperature": 0}
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(api_key="wrong", **options)
    body = {"prompt": "w", "max_tokens": 2000, "ignore_eos": True}
    headers = {"Authorization": "Bearer secret"}
    long = {"url": f"{guarded.url}/v1/completions", "json": body, "headers": headers, "timeout": 60}
    threading.Thread(target=httpx.post, kwargs=long, daemon=True).start()
    while httpx.get(f"{guarded.url}/load").json() != {"server_load": 1}:
        pass
    with pytest.raises(litellm.ServiceUnavailableError, match="try again later"):
        litellm.completion(api_key="secret", **options)
    # With its own retries the client waits until there is room.
    answer = litellm.completion(api_key="secret", max_tokens=64, **{**options, "max_retries": 30})
    assert answer.choices[0].message.content.strip() == ANSWER
