"""Two servers behind a router: vLLM's own (PyPI's vllm-router), and that of vLLM's production stack.

The second is not on PyPI: PRODUCTION_STACK is a checkout of github.com/vllm-project/production-stack.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from conftest import SERVE

from tests.support.servers import Server, metric, started

STACK = os.environ.get("PRODUCTION_STACK")
QUESTION = {"model": "tiny", "prompt": "Question: What is 17 + 25?\nAnswer:", "temperature": 0, "max_tokens": 64}
ANSWER = "7 + 5 = 12, so 17 + 25 = 42."


@dataclass
class Router:
    """A router in front of these servers.

    Attributes:
        url, metrics_url: without a slash at their end.
    """

    url: str
    metrics_url: str
    servers: list[Server]

    def served(self) -> list[float]:
        """The ended requests of each server; those by which the production stack looks after it, too."""
        return [server.metric("vllm:e2e_request_latency_seconds_count") for server in self.servers]


def vllm_router(servers: list[Server], port: int, metrics_port: int) -> list[str]:
    command = [str(Path(sys.executable).with_name("vllm-router")), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(server.url for server in servers), "--policy", "round_robin"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    return [*command, "--health-check-interval-secs", "1", "--health-failure-threshold", "1"]


def production_stack(servers: list[Server], port: int, metrics_port: int) -> list[str]:
    urls = [server.url for server in servers]
    command = [sys.executable, "-m", "vllm_router.app", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--service-discovery", "static", "--static-backends", ",".join(urls)]
    command += ["--static-models", ",".join("tiny" for _ in urls), "--routing-logic", "roundrobin"]
    command += ["--static-model-types", ",".join("completion" for _ in urls), "--engine-stats-interval", "1"]
    return [*command, "--static-backend-health-checks", "--static-backend-health-check-interval", "1"]


needs_checkout = pytest.mark.skipif(STACK is None, reason="PRODUCTION_STACK is not set")


@pytest.fixture(scope="module", params=["vllm-router", pytest.param("production-stack", marks=needs_checkout)])
def router(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    folder = tmp_path_factory.mktemp("router")
    make = vllm_router if request.param == "vllm-router" else production_stack
    environment = {**os.environ, "PYTHONPATH": f"{STACK}/src" if make is production_stack else ""}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(started(SERVE)) for _ in range(2)]
        port, metrics_port = free_port(), free_port()
        log = folder / "log"
        with log.open("w") as written:
            process = subprocess.Popen(
                make(servers, port, metrics_port), env=environment, stdout=written, stderr=written, cwd=folder
            )
        try:
            url = f"http://127.0.0.1:{port}"
            metrics_url = url if make is production_stack else f"http://127.0.0.1:{metrics_port}"
            wait(lambda: httpx.get(f"{url}/health").status_code == 200, log.read_text)
            yield Router(url, metrics_url, servers)
        except BaseException as error:
            error.add_note(log.read_text()[-5000:])
            raise
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def wait(until: Callable[[], bool], told: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if until():
                return
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)


def test_a_client_that_leaves_the_router_ends_its_request(router: Router) -> None:
    body = {**QUESTION, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=60) as answer:
        texts = answer.iter_text()  # which closes the connection when it is dropped
        assert next(texts)
        wait(lambda: sum(server.metric("vllm:num_requests_running") for server in router.servers) == 1)
    wait(lambda: not any(server.metric("vllm:num_requests_running") for server in router.servers))
    aborted = [server.metric("vllm:request_success_total", finished_reason="abort") for server in router.servers]
    assert sum(aborted) == 1, "it was not read to its end"


@pytest.mark.parametrize("router", [pytest.param("production-stack", marks=needs_checkout)], indirect=True)
def test_the_stack_reads_our_metrics(router: Router) -> None:
    """Prefix cache hits are what it has from `/metrics` alone."""
    body = {**QUESTION, "prompt": "w " * 500}
    for _ in range(6):
        assert httpx.post(f"{router.url}/v1/completions", json=body, timeout=60).status_code == 200

    def scraped() -> bool:
        text = httpx.get(f"{router.metrics_url}/metrics").text
        for server in router.servers:
            hits = metric(text, "vllm:gpu_prefix_cache_hits_total", server=server.url)
            if not 0 < hits == server.metric("vllm:gpu_prefix_cache_hits_total"):
                return False
        return True

    wait(scraped)
    engines = httpx.get(f"{router.url}/engines").json()
    assert len(engines) == 2


def test_requests_go_to_both_and_round_one_that_is_gone(router: Router) -> None:
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=5)
    assert [model.id for model in client.models.list()] == ["tiny"]

    async def ask_at_once(count: int) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=5) as client:

            async def ask(number: int) -> str:
                if number % 2:
                    return (await client.completions.create(**QUESTION)).choices[0].text  # type: ignore[call-overload]
                stream = await client.completions.create(stream=True, **QUESTION)  # type: ignore[call-overload]
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(ask(number) for number in range(count)))

    before = router.served()
    assert {text.strip() for text in asyncio.run(ask_at_once(20))} == {ANSWER}
    served = [count - earlier for count, earlier in zip(router.served(), before, strict=True)]
    assert sum(served) >= 20
    assert min(served) >= 5, "both work"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(**{**QUESTION, "temperature": -1})  # type: ignore[call-overload]
    assert httpx.get(f"{router.metrics_url}/metrics").status_code == 200

    gone, left = router.servers
    assert gone.terminate() == 0
    time.sleep(3)  # until the router has looked
    count = left.metric("vllm:e2e_request_latency_seconds_count")
    assert {text.strip() for text in asyncio.run(ask_at_once(10))} == {ANSWER}
    assert left.metric("vllm:e2e_request_latency_seconds_count") >= count + 10
