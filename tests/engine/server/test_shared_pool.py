"""Servers of two models that share one pool, as their clients and their operator see them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from tests.support import brokers, servers, tiny_models
from tests.support.waiting import SECONDS, wait_until

MIB = 2**20


@pytest.fixture
def pool() -> Iterator[brokers.Process]:
    with brokers.running(8 * MIB) as broker:
        yield broker


def client(server: servers.Server) -> openai.OpenAI:
    """To be closed: one whose server was killed keeps its connection otherwise."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SECONDS)


@pytest.mark.slow(8)
def test_two_servers_of_a_model_and_one_of_another_share_a_pool(pool: brokers.Process, tmp_path: Path) -> None:
    """Each borrows what its requests need, gives it up when others need it, and answers as it does alone."""
    prompt = "One memory for all engines of a machine. " * 20
    lent = {"kv_pool": brokers.NAME, "memory_budget": None, "max_num_seqs": 4}
    other = tmp_path / "another"
    tiny_models.make_model("qwen3").save_pretrained(other)
    tiny_models.make_tokenizer().save_pretrained(other)
    models = [servers.MODEL, servers.MODEL, str(other)]
    expected = []
    for model in (servers.MODEL, str(other)):
        with servers.running({"model": model}) as alone, client(alone) as alone_client:
            expected.append(_complete(alone_client, prompt))
    expected.insert(0, expected[0])
    with ExitStack() as stack:
        shares = ["at least 1MiB, at most 6MiB", "at most 6MiB", None]
        running = [
            stack.enter_context(servers.running({**lent, "model": model, "kv_share": share}))
            for model, share in zip(models, shares, strict=True)
        ]
        clients = [stack.enter_context(client(server)) for server in running]
        answers: dict[int, list[str]] = {}

        def ask(i: int) -> None:
            answers[i] = [_complete(clients[i], prompt) for _ in range(3)]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {i: [expected[i]] * 3 for i in range(3)}
        top = pool.ask("top")
        assert [each["name"] for each in top["borrowers"]] == ["model", "model#2", "another"]
        assert sum(each["lease"] for each in top["borrowers"]) <= 8 * MIB
        assert pool.problems() == []

        pool.ask("limit", name="model", at_least=0, at_most=1 * MIB)
        assert _complete(clients[0], prompt) == expected[0]  # with less, as far as it fits

        running[1].process.kill()  # at any instant
        wait_until(lambda: pool.borrower("model#2") is None)
        assert _complete(clients[2], prompt) == expected[2]

        pool.kill()
        assert _complete(clients[2], prompt) == expected[2]  # with what it has
        pool.start()
        wait_until(lambda: not (pool.borrower("model") or {})["lost"])
        assert _complete(clients[0], prompt) == expected[0]
        assert pool.problems() == []


@pytest.mark.slow(8)
def test_a_second_server_of_a_model_computes_no_prompt_of_the_first(pool: brokers.Process) -> None:
    """Nor does one that is started again after the first was killed."""
    prompt = "One prompt for all replicas of a model. " * 30
    lent = {"kv_pool": brokers.NAME, "kv_share_prefixes": True, "memory_budget": None, "max_num_seqs": 4}
    with servers.running({"model": servers.MODEL}) as alone, client(alone) as alone_client:
        expected = _complete(alone_client, prompt)
    with ExitStack() as stack:
        for number in range(3):
            server = stack.enter_context(servers.running({**lent, "model": servers.MODEL}))
            to = stack.enter_context(client(server))
            answer = to.completions.create(model="tiny", prompt=prompt, max_tokens=40, temperature=0)
            assert answer.choices[0].text == expected
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens or 0
            assert cached > 0.8 * answer.usage.prompt_tokens if number else cached == 0
            if number == 0:
                wait_until(lambda: pool.ask("top")["borrowers"][0]["cached"])
                first = server
            elif number == 1:
                assert pool.ask("top")["kept"] == 0
                first.process.kill()
                wait_until(lambda: pool.ask("top")["kept"])
        assert pool.problems() == []


@pytest.mark.slow(8)
def test_one_server_answers_with_prompts_that_another_one_computes(pool: brokers.Process) -> None:
    """And goes on alone, with the same answers, when that is killed."""
    prompts = [f"{number}: one server for prompts, one for answers. " * 20 for number in range(4)]
    lent = {"model": servers.MODEL, "kv_pool": brokers.NAME, "memory_budget": None, "max_num_seqs": 4}
    with servers.running({"model": servers.MODEL}) as alone, client(alone) as to:
        expected = [_complete(to, prompt) for prompt in prompts]
    with ExitStack() as stack:
        first = stack.enter_context(servers.running({**lent, "role": "prefill"}))
        second = stack.enter_context(servers.running({**lent, "role": "decode"}))
        to = stack.enter_context(client(second))
        wait_until(lambda: second.metric("vattn:prefillers") == 1)
        assert [_complete(to, prompt) for prompt in prompts[:2]] == expected[:2]
        assert second.metric("vattn:remote_prefills_total") == 2
        assert second.metric("vattn:remote_prefills_lost_total") == 0
        first.process.kill()
        assert [_complete(to, prompt) for prompt in prompts[2:]] == expected[2:]
        assert pool.problems() == []


def _complete(to: openai.OpenAI, prompt: str) -> str:
    return to.completions.create(model="tiny", prompt=prompt, max_tokens=40, temperature=0).choices[0].text
