"""Servers that share the memory of one broker: two engines of vLLM, and one beside vattn's own server."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from pools import NAME, Pool, serving_pool, wait_until
from test_server import ask, gauge, running, serving, vllm_serve

from engine import prompts

BLOCK = 128 * 4 * 2 * 2 * 32 * 4  # bytes: tokens, layers, keys and values of two heads of 32 floats
BLOCKS = 12  # of which the prompts need 19
PROMPTS = prompts()[:8]


@pytest.fixture
def pool() -> Iterator[Pool]:
    with serving_pool(BLOCKS * BLOCK) as pool:
        yield pool


@pytest.fixture(scope="module")
def stock(model: Path) -> list[list[int]]:
    with serving(model) as url:
        return [ask(url, prompt) for prompt in PROMPTS]


def at_once(url: str) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda prompt: ask(url, prompt), PROMPTS))


PLUGIN = ["--worker-cls", "vattn_vllm.CPUWorker", "--additional-config", json.dumps({"vattn": {"kv_pool": NAME}})]


def test_two_engines_in_one_pool(model: Path, stock: list[list[int]], pool: Pool) -> None:
    names = model.name, f"{model.name}#2"  # either may be the first
    command = vllm_serve(model, *PLUGIN)
    with running(command, command) as ((first, process), (second, _)):

        def mapped() -> list[float]:
            return [gauge(url, "vattn:kv_mapped_bytes") for url in (first, second)]

        # Each keeps its prefixes until the other one needs the memory, for which an idle engine takes a step.
        for turn, url in enumerate((first, second, first, second)):
            assert at_once(url) == stock
            wait_until(lambda turn=turn: mapped()[turn % 2] > BLOCKS * BLOCK / 2)
            assert sum(mapped()) <= BLOCKS * BLOCK
        assert all(pool.of(name)["asked_back"] for name in names)

        pool.kill()
        assert at_once(second) == stock
        pool.start()
        wait_until(lambda: all(pool.of(name) and not pool.of(name)["lost"] for name in names))
        assert at_once(first) == stock

        os.killpg(process.pid, signal.SIGKILL)
        wait_until(lambda: len(pool.ask("top")["borrowers"]) == 1)
        assert at_once(second) == stock
        assert pool.ask("check")["problems"] == []
    wait_until(lambda: not pool.ask("top")["borrowers"])


def test_an_engine_of_vllm_beside_vattn_serve(model: Path, stock: list[list[int]], pool: Pool) -> None:
    own = [sys.executable, "-m", "vattn.engine.cli", "serve", "--kv-pool", NAME, "--served-model-name", "small"]
    with running(own, vllm_serve(model, *PLUGIN)) as ((vattn, _), (other, process)):

        def answers(url: str) -> list[str]:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            with ThreadPoolExecutor(4) as threads:
                return list(
                    threads.map(
                        lambda words: (
                            client.completions.create(
                                model="small", prompt=f"{words} " * 100, temperature=0, max_tokens=40
                            )
                            .choices[0]
                            .text
                        ),
                        ("One day", "The dog", "A girl", "The sun"),
                    )
                )

        alone = answers(vattn)
        (name,) = (each["name"] for each in pool.ask("top")["borrowers"] if each["name"] != model.name)
        for _ in range(2):
            assert at_once(other) == stock
            assert answers(vattn) == alone
        with ThreadPoolExecutor(2) as threads:
            both = threads.submit(at_once, other), threads.submit(answers, vattn)
            assert [each.result() for each in both] == [stock, alone]
        assert pool.of(name)["asked_back"]
        assert pool.of(model.name)["asked_back"]
        assert pool.ask("check")["problems"] == []
        os.killpg(process.pid, signal.SIGKILL)
        wait_until(lambda: not pool.of(model.name))
        assert answers(vattn) == alone
