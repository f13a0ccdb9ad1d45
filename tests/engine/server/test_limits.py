"""What a request may take: no client's body makes the others wait, and what nobody waits for ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.support.applications import client, error_of, run
from tests.support.waiting import SECONDS
from vattn.engine.requests.outputs import RequestOutput
from vattn.engine.server.answers import LIGHT, of_prompt
from vattn.engine.server.limits import Limits
from vattn.engine.server.prompts import Prompts
from vattn.engine.server.service import Run
from vattn.engine.server.streams import parts

pytestmark = pytest.mark.slow(1)

USER = {"role": "user", "content": "What is 17 + 25?"}


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that were tokenized."""
    lengths: list[int] = []
    of = Prompts._token_ids

    def counted(self: Prompts, text: str, *args: Any, **options: Any) -> list[int]:
        lengths.append(len(text))
        return of(self, text, *args, **options)

    monkeypatch.setattr(Prompts, "_token_ids", counted)
    return lengths


LONG = "hello " * 10_000
PARTS = [{"type": "text", "text": LONG}]
ECHO = {"echo": True, "max_tokens": 1, "stream": True}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
        ("/v1/completions", {"prompt": LONG, "add_special_tokens": False}, "prompt"),
        ("/generate", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
            "messages",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 16_000}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(
    tokenized: list[int], path: str, body: dict[str, Any], param: str
) -> None:
    async def test() -> None:
        async with client() as (http, _):
            error = error_of(await http.post(path, json=body))
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "maximum context length is 2048 tokens" in error["message"]

    run(test())
    assert sum(tokenized) <= 1, "more than the letter before it was"


def test_a_long_text_is_tokenized_in_pieces(tokenized: list[int]) -> None:
    """Where the context is long, until it is known not to fit; and of one that is truncated only what is kept."""
    text = "".join(f"{i} " for i in range(80_000))  # 470,000 characters, 230,000 tokens

    async def test() -> None:
        async with client(config={"max_model_len": 2048}) as (http, service):
            prompts = service.prompts
            prompts._limits = Limits.of(10**6, 10, None)
            body = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
            assert error_of(await http.post("/v1/completions", json=body))["code"] == "context_length_exceeded"
            assert 0 < sum(tokenized) < 60_000
            tokenized.clear()
            assert error_of(await http.post("/v1/completions", json={**body, "prompt": text[:40_000]}))
            tokenized.clear()
            kept = {}
            for side in ("left", "right"):
                fields = {"truncate_prompt_tokens": 2000, "truncation_side": side}
                answer = await http.post("/v1/completions", json={**body, **fields})
                kept[side] = answer.json()["choices"][0]["prompt_token_ids"]
                assert sum(tokenized) < 120_000
                tokenized.clear()
            whole = service.engine.core.loaded.tokenizer(text)["input_ids"]  # type: ignore[misc]
            assert kept == {"left": whole[-2000:], "right": whole[:2000]}

    run(test())


def test_prompts_have_a_limit_together() -> None:
    async def test() -> None:
        async with client() as (http, _):
            for prompts, code in ((["w " * 1000] * 300, "too_many_tokens"), ([[7] * 1000] * 300, "too_many_values")):
                error = error_of(await http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1}))
                assert error["code"] == code

    run(test())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ["a"] * 4097}, "prompt: List should have at most 4096 items after validation, not 4097"),
        ({"prompt": [[1]] * 4097}, "prompt: List should have at most 4096 items after validation, not 4097"),
        ({"prompt": ["a"] * 100, "n": 50, "temperature": 1}, "100 prompts with n=50 are over the limit of 4096"),
        ({"prompt": {"a": 1}}, "prompt: Input should be text, a list of texts, a list of token ids, or a list of such"),
        ({"prompt": [1.5]}, "prompt.0: Input should be a valid integer"),
        ({"prompt": "a", "allowed_token_ids": [1] * 2000}, "allowed_token_ids has 2000 token ids"),
        ({"prompt": "a", "stop_token_ids": [1] * 2000}, "stop_token_ids has 2000 token ids"),
    ],
)
def test_too_many_are_counted(body: dict[str, Any], message: str) -> None:
    async def test() -> None:
        async with client() as (http, _):
            assert message in error_of(await http.post("/v1/completions", json=body))["message"]

    run(test())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 2000}),
        ("/v1/completions", {"prompt": ["a"] * 200, "logprobs": 0, "max_tokens": 2000}),
        ("/v1/completions", {"prompt": [[7] * 2000] * 100, "prompt_logprobs": 20, "max_tokens": 1}),
        (
            "/v1/completions",
            {"prompt": [[7] * 2000] * 100, "logprobs": 2, "echo": True, "max_tokens": 1, "stream": True},
        ),
        ("/v1/completions", {"prompt": [7] * 2000, "n": 8, "logprobs": 20, "echo": True, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [7] * 2000, "n": 8, "prompt_logprobs": 20, "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"messages": [USER], "n": 20, "logprobs": True, "top_logprobs": 20, "max_tokens": 2000},
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "n": 20, "logprobs": True, "top_logprobs": 20, "min_tokens": 2000},
        ),
    ],
)
def test_log_probabilities_have_a_limit(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with client() as (http, _):
            error = error_of(await http.post(path, json=body))
            assert (error["code"], error["param"]) == ("too_many_logprobs", "logprobs")

    run(test())


def test_a_chat_without_max_tokens_ends_where_its_log_probabilities_reach_the_limit() -> None:
    async def test() -> None:
        async with client() as (http, service):
            body = {"messages": [USER], "logprobs": True, "top_logprobs": 5, "temperature": 0}

            async def ask(**more: Any) -> tuple[str, int]:
                (choice,) = (await http.post("/v1/chat/completions", json={**body, **more})).json()["choices"]
                return choice["finish_reason"], len(choice["logprobs"]["content"])

            reason, length = await ask()
            assert reason == "stop"
            service.limits = replace(service.limits, logprobs=6 * length)
            assert await ask() == ("stop", length)
            service.limits = replace(service.limits, logprobs=6 * length - 1)
            assert await ask() == ("length", length - 1)
            error = error_of(await http.post("/v1/chat/completions", json={**body, "max_tokens": length}))
            assert error["code"] == "too_many_logprobs"
            prompt = (await http.post("/v1/chat/completions", json={**body, "max_tokens": 1})).json()["usage"]
            service.limits = replace(service.limits, logprobs=prompt["prompt_tokens"] + 6 * 3)
            assert await ask(prompt_logprobs=0) == ("length", 3)

    run(test())


@pytest.mark.parametrize(
    ("path", "body", "others"),
    [
        ("/generate", {"prompt": "w"}, ["top_logprobs", "logprobs", "echo", "tokens"]),
        ("/v1/completions", {"prompt": "w", "stream": True}, ["top_logprobs", "messages", "tokens"]),
        ("/v1/chat/completions", {"messages": [USER]}, ["prompt", "tokens"]),
    ],
)
def test_fields_of_other_endpoints_have_no_effect(path: str, body: dict[str, Any], others: list[str]) -> None:
    async def test() -> None:
        async with client() as (http, _):
            answer = await http.post(path, json={**{name: ["1"] for name in others}, **body, "max_tokens": 2})
            assert answer.status_code == 200, answer.text

    run(test())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "w " * 500, "n": 3, "logprobs": 5, "echo": True, "return_token_ids": True}),
        ("/v1/completions", {"prompt": ["w " * 500, "é"], "n": 3, "prompt_logprobs": 2}),
        ("/v1/completions", {"prompt": ["w"] * 130}),
        ("/v1/chat/completions", {"messages": [USER], "n": 9, "logprobs": True, "top_logprobs": 20}),
    ],
)
def test_an_answer_in_parts_is_the_answer(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**body, "max_tokens": 8, "temperature": 1, "seed": 1, "ignore_eos": True}

    async def ask(http: httpx.AsyncClient, **fields: Any) -> tuple[Any, bool]:
        answer = await http.post(path, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        if not fields:
            return answer.json(), "content-length" not in answer.headers
        *events, done, _ = answer.text.split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        return [chunk["choices"] for chunk in chunks], len(answer.content) > 100_000

    async def test() -> None:
        # Without a prefix cache, which would compute the same prompt in other pieces.
        async with client(config={"enable_prefix_caching": False}) as (http, _):
            streamed = {"stream": True} if "prompt_logprobs" not in body else {}
            for fields in ({}, streamed):
                (found, in_parts), (again, _) = await ask(http, **fields), ({}, None)
                assert in_parts
                monkeypatch.setattr("vattn.engine.server.answers.LIGHT", 10**9)
                again, in_parts = await ask(http, **fields)
                monkeypatch.setattr("vattn.engine.server.answers.LIGHT", LIGHT)
                if fields:
                    key = lambda choices: choices[0]["index"]  # noqa: E731
                    assert sorted(found, key=key) == sorted(again, key=key)
                else:
                    assert not in_parts
                    assert {**found, "id": "", "created": 0} == {**again, "id": "", "created": 0}

    run(test())


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 0}, {"return_token_ids": True}], ids=["echo", "ids"])
def test_the_prompt_weighs_where_it_is_written(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first chunk of a choice, which is written before that of the next one is made."""
    order: list[str] = []

    def noting(what: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            order.append(what)
            return of(*args)

        return noted

    async def test() -> None:
        monkeypatch.setattr("vattn.engine.server.completions.of_prompt", noting("begin", of_prompt))
        monkeypatch.setattr("vattn.engine.server.answers.parts", noting("in parts", parts))
        body = {"prompt": [7] * (LIGHT + 1), "n": 3, "temperature": 1, "max_tokens": 8, "ignore_eos": True}
        async with client() as (http, _):
            answer = await http.post("/v1/completions", json={**body, **fields, "stream": True})
            assert answer.text.count("data: {") == 24

    run(test())
    assert order == ["begin", "in parts"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_texts_of_generate_that_are_long_are_written_in_parts(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event has all of them, with the prompt."""
    written: list[Any] = []

    def noted(value: Any) -> AsyncGenerator[bytes, None]:
        written.append(value)
        return parts(value)

    async def test() -> None:
        body = {"prompt": "w " * 600, "n": 4, "temperature": 1, "max_tokens": 8, "ignore_eos": True, "stream": stream}
        async with client() as (http, _):
            monkeypatch.setattr("vattn.engine.server.answers.LIGHT_TEXTS", 1200)
            monkeypatch.setattr("vattn.engine.server.answers.parts", noted)
            answer = await http.post("/generate", json=body)
            assert len(written) == (answer.text.count("data: {") if stream else 1)
            assert json.dumps(written[-1]["text"][-1])[1:-1] in answer.text

    run(test())


def test_waiting_outputs_of_generate_have_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads slowly would otherwise get the whole texts as often as there are tokens."""
    batches = Run.batches

    async def at_once(self: Run) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        yield [output async for batch in batches(self) for output in batch]

    async def test() -> None:
        body = {"prompt": "w", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        async with client() as (http, _):
            want = (await http.post("/generate", json=body)).json()
            monkeypatch.setattr(Run, "batches", at_once)
            usage = {"include_usage": True, "continuous_usage_stats": True}
            answer = await http.post("/generate", json={**body, "stream": True, "stream_options": usage})
            event, _, done, _ = answer.text.split("\n\n")
            found = json.loads(event.removeprefix("data: "))
            assert found["usage"]["completion_tokens"] == 8
            assert (found["text"], done) == (want["text"], "data: [DONE]")

    run(test())


def test_work_ends_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    calls: list[str] = []
    of = Prompts._token_ids

    def slow(self: Prompts, text: str, *args: Any, **options: Any) -> list[int]:
        begun.set()
        assert go_on.wait(SECONDS)
        found = of(self, text, *args, **options)
        calls.append(text)
        return found

    async def test() -> None:
        async with client() as (http, service):
            monkeypatch.setattr(Prompts, "_token_ids", slow)
            left = asyncio.create_task(http.post("/v1/completions", json={"prompt": [f"{i}" for i in range(100)]}))
            await asyncio.to_thread(begun.wait, SECONDS)
            left.cancel()
            await asyncio.wait({left})
            go_on.set()
            assert (await http.post("/v1/completions", json={"prompt": "other", "max_tokens": 1})).status_code == 200
            assert service.engine.num_unfinished == 0
            while "other" not in calls:
                await asyncio.sleep(0.01)

    run(test())
    assert len(calls) <= 2


def test_limits_grow_with_the_context() -> None:
    for length in (64, 2048, 40_960, 131_072, 1_048_576):
        limits = Limits.of(length, 16, None)
        assert limits.values > length
        assert limits.tokens >= length
        assert limits.characters >= min(16, 8) * length
        assert limits.body_bytes >= 6 * limits.characters / 3
        assert limits.logprobs >= 2 * length
    assert Limits.of(2048, 16, 100).body_bytes == 100
