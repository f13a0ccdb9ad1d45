"""What every request passes, without a process: keys, bodies, ids, errors, and the endpoints beside OpenAI's."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.support.applications import client, error_of, run
from tests.support.servers import MODEL, metric
from vattn.engine.requests.outputs import RequestOutput, merged
from vattn.engine.requests.prompts import PromptReader
from vattn.engine.scheduling.scheduler import Scheduler
from vattn.engine.server import answers, completions
from vattn.engine.server.protocol import REFUSED
from vattn.engine.server.service import Run
from vattn.errors import DriverError

PROMPT = {"prompt": "Question: What is 17 + 25?\nAnswer:", "temperature": 0}
ANSWER = " 7 + 5 = 12, so 17 + 25 = 42."


def test_keys() -> None:
    async def test() -> None:
        async with client(api_key=["one", "two"], admin_endpoints=True) as (http, _):
            for path in ("/health", "/metrics", "/version", "/load", "/openapi.json"):
                assert (await http.get(path)).status_code == 200
            for headers in (
                {},
                {"Authorization": "Bearer three"},
                {"Authorization": "one"},
                {"Authorization": "Bearer"},
            ):
                for method, path in (
                    ("GET", "/v1/models"),
                    ("POST", "/v1/completions"),
                    ("POST", "/tokenize"),
                    ("POST", "/generate"),
                    ("POST", "/sleep"),
                    ("GET", "/dashboard/events"),
                ):
                    answer = await http.request(method, path, headers=headers)
                    assert answer.status_code == 401
                    assert error_of(answer)["code"] == "invalid_api_key"
            for key in ("one", "two"):
                answer = await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == 200

    run(test())


def test_prompts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for kind, name in ((PromptReader, "check_token_ids"), (Scheduler, "check_fits")):
        true = getattr(kind, name)

        def counted(*args: Any, true: Callable[..., Any] = true, name: str = name, **options: Any) -> Any:
            calls.append(name)
            return true(*args, **options)

        monkeypatch.setattr(kind, name, counted)

    async def test() -> None:
        async with client() as (http, _):
            chat = {"messages": [{"role": "user", "content": "a"}]}
            for path, body in (
                ("completions", PROMPT),
                ("completions", {"prompt": [5, 6]}),
                ("chat/completions", chat),
            ):
                answer = await http.post(f"/v1/{path}", json={**body, "max_tokens": 2, "cache_salt": "s"})
                assert answer.status_code == 200
                # Of the prompt, and three lists of `SamplingParams`.
                assert sorted(calls) == ["check_fits"] + ["check_token_ids"] * 4
                calls.clear()

    run(test())


def test_bodies_have_a_limit() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    async def test() -> None:
        async with client(max_body_bytes=20_000) as (http, _):
            for content in (b" " * 20_001, chunks()):
                answer = await http.post(
                    "/v1/completions", content=content, headers={"Content-Type": "application/json"}
                )
                assert answer.status_code == 413
                assert "limit of 20000 bytes" in error_of(answer)["message"]
                assert error_of(answer)["code"] == "body_too_large"
            compressed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            answer = await http.post("/v1/completions", content=b"\x1f\x8b", headers=compressed)
            assert "Content-Encoding" in error_of(answer)["message"]
            answer = await http.post("/v1/completions", json=PROMPT)
            assert answer.status_code == 200

    run(test())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "w", "temperature": NaN}',
        b'{"prompt": "w", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "w", "cache_salt": "\\ud800"}',
        b'{"prompt": "w", "model": "\\ud800"}',
        b'{"prompt": "w", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "w", "n": "2"}',
        b'{"prompt": "w", "n": 1000000}',
        b'{"prompt": "w", "stop": [' + b'"a",' * 100 + b'"a"]}',
        b'{"prompt": [' + b"[1]," * 5000 + b"[1]]}",
        b'{"prompt": "w", "logprobs": true}',
        b'{"prompt": "w", "' + b"x" * 10_000 + b'": 1, "min_p": "' + b"x" * 10_000 + b'"}',
    ],
    ids=range(18),
)
def test_bad_bodies_get_short_errors(shared: Callable[[str, bytes], httpx.Response], content: bytes) -> None:
    answers = [shared("/v1/completions", content), shared("/v1/chat/completions", content)]
    if not content.startswith(b'{"prompt": "w"'):
        answers.append(shared("/tokenize", content))
    for answer in answers:
        assert answer.status_code in (400, 404), answer.text
        error_of(answer)
        assert len(answer.content) < 1000


@pytest.fixture(scope="module")
def shared() -> Any:
    """Posts JSON to one application for all tests."""
    loop = asyncio.new_event_loop()
    context = client()
    http, service = loop.run_until_complete(context.__aenter__())

    def post(path: str, content: bytes) -> httpx.Response:
        return loop.run_until_complete(http.post(path, content=content, headers={"Content-Type": "application/json"}))

    yield post
    assert post("/v1/completions", json.dumps(PROMPT).encode()).json()["choices"][0]["text"] == ANSWER
    assert not service.engine.dead
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.mark.parametrize(
    ("message", "more", "param", "what"),
    [
        (b'"content": "a", "z": DEEP', b"", "messages", "a value in messages is nested too deeply"),
        (
            b'"content": "a"',
            b', "chat_template_kwargs": {"eos_token": DEEP}',
            "chat_template_kwargs",
            "a value in chat_template_kwargs is nested too deeply",
        ),
        (
            b'"content": 5',
            b"",
            "messages",
            "messages.0.content: Input should be a valid string, or Input should be a valid list; it is 5",
        ),
    ],
)
def test_messages_that_are_wrong(
    shared: Callable[[str, bytes], httpx.Response], message: bytes, more: bytes, param: str, what: str
) -> None:
    deep = b"[" * 900 + b"]" * 900
    body = (b'{"messages": [{"role": "user", %s}]%s}' % (message, more)).replace(b"DEEP", deep)
    error = error_of(shared("/v1/chat/completions", body))
    assert error["param"] == param
    assert error["message"].startswith(what)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_that_would_change_the_output_are_refused(
    shared: Callable[[str, bytes], httpx.Response], name: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", chat), ("/tokenize", chat)):
        answer = shared(path, json.dumps({**body, name: "a"}).encode())
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["param"] == name
        assert error["message"] == f"{name} is not supported: {REFUSED[name]}"


def test_other_kinds_of_bodies_are_told_what_is_wanted(shared: Callable[[str, bytes], httpx.Response]) -> None:
    assert "'Content-Type: application/json'" in error_of(shared("/v1/completions", b"[1]"))["message"]

    async def test() -> None:
        async with client() as (http, _):
            form = await http.post("/v1/completions", content=b'{"prompt": "w"}')
            assert form.status_code == 400
            assert "'Content-Type: application/json'" in error_of(form)["message"]
            query = await http.get("/health", params={"memory": "perhaps"})
            assert (query.status_code, error_of(query)["param"]) == (400, "memory")

    run(test())


def test_the_engine_knows_requests_by_their_ids() -> None:
    async def test() -> None:
        async with client() as (http, service):
            body = {**PROMPT, "prompt": ["w", "x"], "max_tokens": 60, "ignore_eos": True}
            await service.engine.sleep()
            asked = [
                asyncio.create_task(http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}))
                for _ in range(2)
            ]
            while service.engine.num_unfinished < 4:  # of which none ends meanwhile
                await asyncio.sleep(0.001)
            ids = {request["id"] for request in (await service.state.read())["requests"]}
            assert len(ids) == 4, "one id may be that of several requests"
            assert {each.rpartition("-")[0] for each in ids} == {"mine"}
            await service.engine.wake_up()
            for answer in await asyncio.gather(*asked):
                assert answer.json()["id"] == "cmpl-mine"

    run(test())


def test_a_prompt_that_is_echoed_may_end_before_it_is_computed() -> None:
    async def test() -> None:
        async with client() as (http, service):
            for stream in (False, True):
                body = {"prompt": "w x", "echo": True, "logprobs": 1, "stream": stream}
                await service.engine.sleep()
                asked = asyncio.create_task(http.post("/v1/completions", json=body))
                while not service.engine._streams:
                    await asyncio.sleep(0.001)
                service.engine.abort(list(service.engine._streams))
                answer = await asked
                assert answer.status_code == 200
                text = answer.text.removeprefix("data: ").partition("\n\n")[0]
                (choice,) = json.loads(text)["choices"]
                assert (choice["text"], choice["finish_reason"]) == ("w x", "abort")
                assert choice["logprobs"]["tokens"] == []
                await service.engine.wake_up()

    run(test())


@pytest.mark.parametrize("light", [True, False])
def test_each_event_is_a_line_for_every_reader(light: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some, as httpx's, end lines at characters that JSON leaves as they are."""
    text = "a\x85b\u2028c\u2029é"
    if not light:
        monkeypatch.setattr(answers, "LIGHT", -1)

    async def test() -> None:
        async with client() as (http, _):
            body = {"prompt": text, "echo": True, "max_tokens": 2, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
            assert lines.pop() == "data: [DONE]"
            events = [json.loads(line.removeprefix("data: ")) for line in lines]
            assert events[0]["choices"][0]["text"].startswith(text)
            whole = await http.post("/v1/completions", json={**body, "stream": False})
            assert whole.json()["choices"][0]["text"].startswith(text)

    run(test())


def test_request_ids() -> None:
    async def test() -> None:
        async with client() as (http, _):
            given = await http.get("/version", headers={"X-Request-Id": "abc-123"})
            assert given.headers["x-request-id"] == "abc-123"
            for bad in ("two words", "x" * 200, ""):
                made = await http.get("/version", headers={"X-Request-Id": bad})
                assert made.headers["x-request-id"] not in (bad, "")
            answer = await http.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "mine"})
            assert answer.json()["id"] == "cmpl-mine"

    run(test())


def test_unknown_paths_and_methods() -> None:
    async def test() -> None:
        async with client() as (http, _):
            assert error_of(await http.get("/nothing"))["type"] == "not_found_error"
            assert (await http.get("/v1/completions")).status_code == 405
            for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
                assert (await http.post(path)).status_code == 404, "admin endpoints have to be asked for"
            assert (await http.get("/docs")).status_code == 404

    run(test())


def test_other_origins_are_let_in_only_if_asked() -> None:
    async def test() -> None:
        asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        async with client() as (http, _):
            answer = await http.options("/v1/completions", headers=asking)
            assert "access-control-allow-origin" not in answer.headers
        async with client(allowed_origins=["https://a.example"], api_key=["one"]) as (http, _):
            answer = await http.options("/v1/completions", headers=asking)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://a.example"

    run(test())


def test_tokenize_and_detokenize() -> None:
    async def test() -> None:
        async with client() as (http, service):
            tokenizer = await service.engine.get_tokenizer()
            assert tokenizer is not None
            text = "Question: What is 17 + 25?\nAnswer:"
            ids = tokenizer(text)["input_ids"]
            answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
            assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 2048)
            assert "".join(answer["token_strs"]) == text
            messages = [{"role": "user", "content": "What is 17 + 25?"}]
            assert (await http.post("/tokenize", json={"messages": messages})).json()["tokens"] == ids
            assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": text}
            assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
            for path, body in (
                ("/tokenize", {}),
                ("/tokenize", {"prompt": "w", "messages": messages}),
                ("/detokenize", {"tokens": [5000]}),
                ("/detokenize", {"tokens": [2**70]}),
            ):
                assert (await http.post(path, json=body)).status_code == 400

    run(test())


def test_without_a_tokenizer_prompts_are_token_ids() -> None:
    async def test() -> None:
        async with client(config={"skip_tokenizer_init": True}) as (http, _):
            body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == ""
            assert answer["usage"]["completion_tokens"] == 2
            for path, body in (
                ("/v1/completions", {"prompt": "w"}),
                ("/v1/completions", {"prompt": "w", "truncate_prompt_tokens": 5}),
                ("/tokenize", {"prompt": "w"}),
                ("/detokenize", {"tokens": [5]}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w"}]}),
            ):
                answer = await http.post(path, json=body)
                assert answer.status_code == 400
                assert "the server has no tokenizer" in error_of(answer)["message"]

    run(test())


@pytest.mark.parametrize("name", ["tool_calls", "function_call"])
@pytest.mark.parametrize("empty", [None, []])
def test_a_message_without_tool_calls_may_say_so(name: str, empty: object) -> None:
    """Llama's template takes a message that has the field at all for one with calls."""
    calls = "'tool_calls' in m or 'function_call' in m"
    template = "{% for m in messages %}{{ 'calls' if " + calls + " else m.content }}{% endfor %}"

    async def test() -> None:
        async with client(chat_template=template) as (http, _):
            tokens = (await http.post("/tokenize", json={"prompt": "w"})).json()["tokens"]
            message = {"role": "assistant", "content": "w", name: empty}
            assert (await http.post("/tokenize", json={"messages": [message]})).json()["tokens"] == tokens
            error = error_of(await http.post("/tokenize", json={"messages": [{**message, name: [{"id": "1"}]}]}))
            assert error["param"] == "messages"

    run(test())


def test_special_tokens_can_be_left_out() -> None:
    async def test() -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
        end = ("<|end|>", tokenizer.eos_token_id)
        tokenizer._tokenizer.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[end])
        plain = tokenizer("w", add_special_tokens=False)["input_ids"]
        async with client(config={"tokenizer": tokenizer}) as (http, _):
            for fields, want in (
                ({}, [tokenizer.eos_token_id, *plain]),
                ({"add_special_tokens": False}, plain),
                ({"truncate_prompt_tokens": -1}, [tokenizer.eos_token_id, *plain]),
                ({"truncate_prompt_tokens": -1, "add_special_tokens": False}, plain),
            ):
                body = {"prompt": "w", "max_tokens": 1, "return_token_ids": True, **fields}
                answer = (await http.post("/v1/completions", json=body)).json()
                assert answer["choices"][0]["prompt_token_ids"] == want
                answer = await http.post("/v1/completions", json={**body, "prompt": ["w", ""]})
                assert answer.status_code == (400 if want == plain else 200), "a prompt has a token"
                before = metric((await http.get("/metrics")).text, "vllm:prompt_tokens_total")
                assert (await http.post("/generate", json=body)).status_code == 200
                assert metric((await http.get("/metrics")).text, "vllm:prompt_tokens_total") == before + len(want)
                body = {"prompt": "w", **{name: fields[name] for name in fields if name == "add_special_tokens"}}
                assert (await http.post("/tokenize", json=body)).json()["tokens"] == want

    run(test())


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_prompt_that_is_cut_to_fit_leaves_room_for_the_answer(path: str) -> None:
    async def test() -> None:
        async with client(config={"max_model_len": 64}) as (http, _):
            prompt, answer = 0.0, 0.0
            for fields, kept, generated in (
                ({}, 48, 16),
                ({"max_tokens": 40}, 24, 40),
                ({"max_tokens": 63}, 1, 63),
                ({"truncate_prompt_tokens": 60}, 60, 4),
            ):
                body = {"prompt": "x " * 300, "truncate_prompt_tokens": -1, "ignore_eos": True, **fields}
                assert (await http.post(path, json=body)).status_code == 200
                metrics = (await http.get("/metrics")).text
                prompt, answer = prompt + kept, answer + generated
                assert metric(metrics, "vllm:prompt_tokens_total") == prompt
                assert metric(metrics, "vllm:generation_tokens_total") == answer

    run(test())


def test_the_side_that_a_prompt_is_cut_at() -> None:
    async def test() -> None:
        async with client() as (http, service):
            tokenizer: Any = await service.engine.get_tokenizer()
            text = PROMPT["prompt"]
            ids = tokenizer(text)["input_ids"]
            chat = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
            for side, kept in ((None, ids[-3:]), ("left", ids[-3:]), ("right", ids[:3])):
                fields = {"truncate_prompt_tokens": 3, "truncation_side": side, "max_tokens": 1}
                for prompt in (text, ids):
                    body = {"prompt": prompt, "return_token_ids": True, "echo": True, **fields}
                    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
                    assert choice["prompt_token_ids"] == kept
                    assert choice["text"].startswith(tokenizer.decode(kept))
                answer = await http.post("/v1/chat/completions", json={**chat, "return_token_ids": True, **fields})
                assert answer.json()["prompt_token_ids"] == kept
            body = {"prompt": text, "truncation_side": "right", "max_tokens": 1, "return_token_ids": True}
            (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
            assert choice["prompt_token_ids"] == ids, "only beside truncate_prompt_tokens"

    run(test())


def test_an_answer_that_leaves_no_room_for_a_prompt() -> None:
    async def test() -> None:
        async with client(config={"max_model_len": 64}) as (http, _):
            chat = {"messages": [{"role": "user", "content": "x"}]}
            for path, body, name in (
                ("/v1/completions", {"prompt": "x"}, "max_tokens"),
                ("/v1/chat/completions", chat, "max_tokens"),
                ("/v1/chat/completions", {**chat, "max_tokens": 5}, "max_completion_tokens"),
            ):
                for asked, keep in itertools.product((64, 100), (-1, 5)):
                    fields = {name: asked, "truncate_prompt_tokens": keep}
                    error = error_of(await http.post(path, json={**body, **fields}))
                    assert (error["param"], error["code"]) == (name, "context_length_exceeded")
                    assert error["message"].startswith(f"{name} is {asked}, but this model's maximum context")
                    assert error["message"].endswith(f"lower {name} to 63 or less")
                error = error_of(await http.post(path, json={**body, name: 64}))
                assert (error["param"], error["code"]) == (name, "context_length_exceeded")
                assert f" tokens and {name} is 64, but" in error["message"]
                assert error["message"].endswith(f"shorten the prompt, or lower {name}")
            fields = {"max_tokens": 60, "truncate_prompt_tokens": 5}
            error = error_of(await http.post("/v1/completions", json={"prompt": "x", **fields}))
            assert error["param"] == "truncate_prompt_tokens"
            assert "there is room for 4" in error["message"]
            scored = {"prompt": [5] * 70, "max_tokens": 0, "truncate_prompt_tokens": -1, "return_token_ids": True}
            (choice,) = (await http.post("/v1/completions", json=scored)).json()["choices"]
            assert choice["prompt_token_ids"] == [5] * 64, "none is left out where there is no answer"

    run(test())


def test_generate_as_the_seeds_do() -> None:
    async def test() -> None:
        async with client() as (http, _):
            answer = await http.post("/generate", json={**PROMPT, "max_tokens": 64})
            assert answer.json() == {"text": [PROMPT["prompt"] + ANSWER]}
            answer = await http.post("/generate", json={**PROMPT, "max_tokens": 64, "stream": True})
            *events, done, end = answer.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            assert json.loads(events[-1].removeprefix("data: ")) == {"text": [PROMPT["prompt"] + ANSWER]}

    run(test())


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_generate_has_no_place_for_log_probabilities(fields: dict[str, Any]) -> None:
    async def test() -> None:
        async with client() as (http, _):
            error = error_of(await http.post("/generate", json={**PROMPT, "prompt_logprobs": 1, **fields}))
            assert error["param"] == "prompt_logprobs"
            assert "/v1/completions" in error["message"]

    run(test())


def test_every_token_has_an_event() -> None:
    async def test() -> None:
        async with client() as (http, _):
            # No text: every token begins a character that is never finished.
            body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True, "logit_bias": {"128": 100}}
            chat = {"messages": [{"role": "user", "content": "a"}]}
            for path, prompt in (("/v1/completions", PROMPT), ("/v1/chat/completions", chat)):
                answer = await http.post(path, json={**prompt, **body})
                assert answer.status_code == 200, answer.text
                *events, _, _ = answer.text.split("\n\n")
                assert len(events) == 5

    run(test())


def test_health_version_and_load() -> None:
    async def test() -> None:
        async with client() as (http, _):
            for answer in (await http.get("/health"), await http.head("/health")):
                assert (answer.status_code, answer.content) == (200, b"")
            for answer in (
                await http.get("/health?memory=1"),
                await http.get("/health", headers={"Accept": "application/json"}),
            ):
                assert answer.json()["status"] == "ok"
                assert answer.json()["memory"]["pages"]["budget"] > 0
            assert (await http.get("/version")).json()["version"]
            assert (await http.get("/load")).json() == {"server_load": 0}

    run(test())


def test_a_dead_engine_says_so_and_no_more() -> None:
    async def test() -> None:
        async with client() as (http, service):

            def on_step(_: object) -> None:
                raise MemoryError("at 0xdeadbeef in /home/somebody")

            service.engine.core.on_step = on_step
            for stream in (False, True):
                answer = await http.post("/v1/completions", json={**PROMPT, "stream": stream})
                assert "deadbeef" not in answer.text
                assert "the engine has stopped" in answer.text
            assert (await http.get("/health")).status_code == 503
            assert (await http.head("/health")).status_code == 503
            assert (await http.get("/health?memory=1")).status_code == 503
            answer = await http.get("/metrics")
            assert metric(answer.text, "vllm:num_requests_running") == 0
            assert metric(answer.text, "vllm:request_success_total", finished_reason="error") == 1

    run(test())


def test_sleep_and_the_prefix_cache() -> None:
    async def test() -> None:
        async with client(admin_endpoints=True) as (http, service):
            long = {"prompt": "w " * 600, "max_tokens": 1}

            async def cached() -> int:
                answer = (await http.post("/v1/completions", json=long)).json()
                found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                return found

            assert await cached() == 0
            assert await cached() > 0
            assert (await http.post("/reset_prefix_cache")).status_code == 200
            assert await cached() == 0
            assert (await http.post("/sleep?level=2")).status_code == 400
            assert (await http.post("/sleep")).status_code == 200
            assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert service.engine.core.kv.stats().physical_bytes == 0
            waiting = asyncio.create_task(cached())
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done
            assert service.engine.num_unfinished == 1
            wrong = await http.post("/wake_up?tags=nonsense")
            assert (wrong.status_code, error_of(wrong)["param"]) == (400, "tags")
            assert (await http.post("/wake_up?tags=weights")).status_code == 200
            assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await http.post("/wake_up?tags=weights&tags=kv_cache")).status_code == 200
            assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
            assert await waiting == 0
            assert (await http.post("/sleep")).status_code == 200
            assert (await http.post("/wake_up")).status_code == 200
            assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}

    run(test())


@pytest.mark.parametrize("too", [False, True])
def test_the_prefix_cache_is_reset_with_running_requests_if_asked(too: bool) -> None:
    async def test() -> None:
        async with client(admin_endpoints=True) as (http, service):
            body = {"prompt": "w " * 600, "max_tokens": 1000, "ignore_eos": True, "stream": True}
            running = asyncio.create_task(http.post("/v1/completions", json=body))
            while not service.engine.core.scheduler.running:
                await asyncio.sleep(0.001)
            path = f"/reset_prefix_cache?reset_running_requests={str(too).lower()}"
            assert (await http.post(path)).status_code == 200
            assert metric((await http.get("/metrics")).text, "vllm:num_preemptions_total") == too
            service.engine.abort(list(service.engine._streams))
            assert (await running).status_code == 200
            assert (await http.post("/reset_prefix_cache?reset_running_requests=perhaps")).status_code == 400

    run(test())


def test_the_generation_config_says_what_a_body_does_not(tmp_path: Path) -> None:
    said = {"do_sample": True, "temperature": 0.001, "max_new_tokens": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))

    async def ask(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["usage"])

    async def test() -> None:
        chat = {"messages": [{"role": "user", "content": "Count to 200."}], "ignore_eos": True}
        async with client(config={"generation_config": str(tmp_path)}) as (http, _):
            body = {"prompt": PROMPT["prompt"], "n": 4, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).json()
            assert len({choice["text"] for choice in answer["choices"]}) == 1, "next to greedy"
            assert answer["usage"]["completion_tokens"] == 4 * 3
            assert (await ask(http, "/v1/chat/completions", chat))["completion_tokens"] == 3
            assert (await ask(http, "/v1/chat/completions", {**chat, "max_tokens": 2}))["completion_tokens"] == 2
        async with client(config={"generation_config": "vllm"}) as (http, _):
            assert (await ask(http, "/v1/completions", body))["completion_tokens"] == 4 * 16

    run(test())


def test_priority_where_the_engine_has_it() -> None:
    async def test() -> None:
        async with client(config={"scheduling_policy": "priority"}) as (http, _):
            answer = await http.post("/v1/completions", json={**PROMPT, "priority": -3, "max_tokens": 64})
            assert answer.json()["choices"][0]["text"] == ANSWER

    run(test())


def test_the_queue_is_bounded_all_or_nothing() -> None:
    async def test() -> None:
        async with client(config={"max_num_seqs": 2}, max_num_queued_reqs=2) as (http, service):
            await service.engine.sleep()
            body = {"prompt": "w", "max_tokens": 150, "ignore_eos": True}
            unfinished = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(3)]
            while service.engine.num_unfinished < 3:
                await asyncio.sleep(0.01)
            for body in ({"n": 2}, {"prompt": ["a", "b"]}, {"n": 2, "stream": True}):
                answer = await http.post("/v1/completions", json={"prompt": "w", "max_tokens": 4, **body})
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert error_of(answer)["code"] == "queue_full"
            answer = await http.post("/v1/completions", json={"prompt": "w", "n": 5})
            assert answer.status_code == 400, "that many never fit"
            await service.engine.wake_up()
            assert (await http.post("/v1/completions", json={"prompt": "w", "max_tokens": 4})).status_code == 200
            assert [answer.status_code for answer in await asyncio.gather(*unfinished)] == [200] * 3
            text = (await http.get("/metrics")).text
            assert metric(text, "vattn:requests_refused_total") == 3

    run(test())


def test_a_failing_forward_reaches_its_clients_and_frees_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with client() as (http, service):
            calls = iter(range(10_000))

            def broken(*_: object) -> None:
                if next(calls) % 20 == 10:
                    raise RuntimeError("a broken kernel at 0xdeadbeef")

            hook = service.engine.core.loaded.model.get_output_embeddings().register_forward_hook(broken)  # type: ignore[operator]
            body = {**PROMPT, "ignore_eos": True, "max_tokens": 15}
            whole = await http.post("/v1/completions", json=body, headers={"X-Request-Id": "unlucky"})
            assert whole.status_code == 500
            assert error_of(whole)["message"] == "the request failed: RuntimeError; the server's log has more"
            await http.post("/v1/completions", json={**body, "max_tokens": 9})
            streamed = await http.post("/v1/completions", json={**body, "stream": True})
            assert streamed.status_code == 200
            *events, error, done, end = streamed.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            assert "RuntimeError" in json.loads(error.removeprefix("data: "))["error"]["message"]
            assert len(events) > 3, "the error came in mid-stream"
            assert "deadbeef" not in whole.text + streamed.text
            hook.remove()
            answer = await http.post("/v1/completions", json={**PROMPT, "max_tokens": 64})
            assert answer.json()["choices"][0]["text"] == ANSWER
            kv = service.engine.core.kv
            assert await service.engine.call(kv.available) == kv.total()

    with caplog.at_level(logging.INFO, "vattn.engine.server"):
        run(test())
    told = [record for record in caplog.records if getattr(record, "fields", {}).get("request_id") == "unlucky"]
    assert [(record.message, bool(record.exc_info)) for record in told] == [
        ("a request failed in the engine", True),
        ("request", False),
    ]


@pytest.mark.parametrize("light", [True, False])
def test_what_waited_is_written_before_an_error(light: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was put together with it."""
    if not light:
        monkeypatch.setattr(answers, "LIGHT", -1)
    batches = Run.batches

    async def at_once(self: Run) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        outputs = [output async for batch in batches(self) for output in batch]
        yield [(place, merged([output for number, output in outputs if number == place])) for place in (0, 1)]

    async def test() -> None:
        async with client() as (http, service):
            calls = iter(range(10_000))

            def broken(*_: object) -> None:
                if next(calls) == 10:
                    raise RuntimeError("a broken kernel")

            service.engine.core.loaded.model.get_output_embeddings().register_forward_hook(broken)  # type: ignore[operator]
            monkeypatch.setattr(Run, "batches", at_once)
            body = {"prompt": [[5], [6]], "ignore_eos": True, "max_tokens": 15, "stream": True}
            answer = await http.post("/v1/completions", json={**body, "return_token_ids": True})
            *events, done, end = answer.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            *chunks, error = [json.loads(event.removeprefix("data: ")) for event in events]
            assert "RuntimeError" in error["error"]["message"]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert [(choice["index"], choice["finish_reason"]) for choice in choices] == [(0, "error"), (1, "error")]
            assert all(9 <= len(choice["token_ids"]) <= 10 for choice in choices)

    run(test())


def test_errors_outside_the_engine_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = completions._Completion.chunks

    def broken(self: completions._Completion, number: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if self._begun:
            raise KeyError("x")
        return made(self, number, output)

    async def failing(level: int) -> int:
        raise DriverError("no such device")

    async def test() -> None:
        async with client(admin_endpoints=True) as (http, service):
            monkeypatch.setattr(completions._Completion, "chunks", broken)
            body = {**PROMPT, "stream": True}
            streamed = await http.post("/v1/completions", json=body, headers={"X-Request-Id": "streamed"})
            *_, error, done, _ = streamed.text.split("\n\n")
            assert done == "data: [DONE]"
            message = json.loads(error.removeprefix("data: "))["error"]["message"]
            assert message == "the request failed: KeyError; the server's log has more"
            monkeypatch.setattr(service.engine, "sleep", failing)
            asked = await http.post("/sleep", headers={"X-Request-Id": "asked"})
            assert (asked.status_code, error_of(asked)["type"]) == (500, "server_error")
            refused = await http.post("/wake_up?tags=nonsense", headers={"X-Request-Id": "refused"})
            assert refused.status_code == 400

    run(test())
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [(record.__dict__["fields"]["request_id"], bool(record.exc_info)) for record in told] == [
        ("streamed", True),
        ("asked", True),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_leaves_itself_no_token_is_told(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    body = {"prompt": "w", "max_tokens": 4, "min_tokens": 2, "allowed_token_ids": [5], "stop_token_ids": [5]}

    async def test() -> None:
        async with client() as (http, _):
            answer = await http.post("/v1/completions", json={**body, "stream": stream})
            assert (answer.status_code, error_of(answer)["type"]) == (400, "invalid_request_error")
            assert "every token is excluded, by what allowed_token_ids" in error_of(answer)["message"]

    run(test())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("disable", [False, True])
def test_the_log_has_no_line_for_what_is_asked_every_few_seconds(
    caplog: pytest.LogCaptureFixture, disable: bool
) -> None:
    async def test() -> None:
        async with client(disable_log_requests=disable) as (http, _):
            for path in ("/health", "/metrics", "/version"):
                assert (await http.get(path)).status_code == 200

    with caplog.at_level(logging.INFO, "vattn.engine.server"):
        run(test())
    logged = [record.__dict__["fields"]["path"] for record in caplog.records if record.message == "request"]
    assert logged == ([] if disable else ["/version"])


def test_a_model_may_have_several_names() -> None:
    async def test() -> None:
        async with client(served_model_name=["small", "other"]) as (http, _):
            cards = (await http.get("/v1/models")).json()["data"]
            assert [card["id"] for card in cards] == ["small", "other"]
            chat = {"messages": [{"role": "user", "content": "a"}]}
            for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", chat)):
                for fields in ({}, {"model": "small"}, {"model": "other"}, {"model": ""}, {"stream_options": {}}):
                    body = {**body, "max_tokens": 1, **fields}
                    answer = await http.post(path, json=body)
                    assert (answer.status_code, answer.json()["model"]) == (200, "small")
                streamed = await http.post(path, json={**body, "stream": True})
                event, _, _ = streamed.text.partition("\n\n")
                assert json.loads(event.removeprefix("data: "))["model"] == "small"
            assert (await http.get("/v1/models/other")).json()["id"] == "other"
            assert (await http.get("/v1/models/")).json()["data"] == cards
            for name in ("tiny", MODEL):  # the application's own, and the path
                answer = await http.post("/v1/completions", json={**PROMPT, "model": name})
                assert answer.status_code == 404
                assert error_of(answer)["message"].endswith("does not exist; there is small, other")

    run(test())


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_has_requests_and_no_prompts_unasked(caplog: pytest.LogCaptureFixture, log_prompts: bool) -> None:
    async def test() -> None:
        async with client(log_prompts=log_prompts) as (http, _):
            await http.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "seen"})

    with caplog.at_level(logging.INFO, "vattn"):
        run(test())
    fields = [record.__dict__["fields"] for record in caplog.records if "fields" in record.__dict__]
    (line,) = [each for each in fields if each.get("request_id") == "seen"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert ("What is 17" in str(fields)) is log_prompts
