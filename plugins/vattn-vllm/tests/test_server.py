"""vLLM's API server with the plugin: the openai client, an abort in mid-stream, two engines, and the gauges."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from environment import environment

from engine import prompts

PLUGIN = [
    "--worker-cls",
    "vattn_vllm.CPUWorker",
    "--additional-config",
    '{"vattn": {"keep_cached": 0, "keep_free": 0}}',
]


@contextmanager
def serving(model: Path, *options: str) -> Iterator[str]:
    with running(vllm_serve(model, *options)) as ((url, _),):
        yield url


def vllm_serve(model: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager", "--skip-tokenizer-init"]
    return [*command, "--served-model-name", "small", *options]


@contextmanager
def running(*commands: list[str]) -> Iterator[list[tuple[str, subprocess.Popen[bytes]]]]:
    """Servers, each at a free port and in a process group of its own, which may be killed."""
    with ExitStack() as stack:
        servers, logs = [], []
        for command in commands:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            logs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
                stdout=logs[-1],
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, process)
            servers.append((f"http://127.0.0.1:{port}", process))
        end = time.monotonic() + 300
        for (url, process), log in zip(servers, logs, strict=True):
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        raise RuntimeError(log.read()[-6000:]) from None
                    time.sleep(0.5)
        yield servers


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def ask(url: str, prompt: list[int], **options: Any) -> list[int]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    extra = {"return_token_ids": True, "ignore_eos": True, "detokenize": False}
    stream = client.completions.create(
        model="small", prompt=prompt, temperature=0, stream=True, extra_body=extra, **{"max_tokens": 24, **options}
    )
    tokens: list[int] = []
    for chunk in stream:
        tokens += getattr(chunk.choices[0], "token_ids", None) or []
    return tokens


def gauges(url: str, *names: str) -> list[float]:
    """Their values in one answer, each over all engines."""
    lines = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode().splitlines()
    return [sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")) for name in names]


def gauge(url: str, name: str) -> float:
    return gauges(url, name)[0]


def wait_until_nothing_is_mapped(url: str) -> None:
    """As workers say that have address space: of one that does not answer, both numbers are 0."""

    def mapped() -> bool:
        now, reserved = gauges(url, "vattn:kv_mapped_bytes", "vattn:kv_reserved_bytes")
        return now > 0 or reserved == 0

    end = time.monotonic() + 60
    while mapped():
        assert time.monotonic() < end, "memory stays, or no worker answers"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def stock(model: Path) -> list[list[int]]:
    with serving(model) as url:
        assert gauge(url, "vattn:kv_mapped_bytes") == 0
        return [ask(url, prompt) for prompt in prompts()[:6]]


@pytest.mark.parametrize("engines", [1, 2])
def test_the_same_tokens_over_http(engines: int, model: Path, stock: list[list[int]]) -> None:
    more = ["--data-parallel-size", "2"] if engines == 2 else []
    with serving(model, *PLUGIN, *more) as url:
        assert [ask(url, prompt) for prompt in prompts()[:6]] == stock
        assert len(stock[0]) == 24
        end = time.monotonic() + 60
        while gauge(url, "vattn:kv_reserved_bytes") <= engines * 2**30:  # an engine without requests reports nothing
            assert time.monotonic() < end, "not every engine reserves address space"
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda _: ask(url, prompts()[0]), range(4 * engines)))
        wait_until_nothing_is_mapped(url)


def test_a_client_that_leaves_gives_its_memory_back(model: Path, stock: list[list[int]]) -> None:
    with serving(model, *PLUGIN) as url:
        assert gauge(url, "vattn:kv_mapped_bytes") == 0
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        extra = {"ignore_eos": True, "detokenize": False}
        stream = client.completions.create(
            model="small", prompt=prompts()[0], max_tokens=690, temperature=0, stream=True, extra_body=extra
        )
        next(iter(stream))
        assert gauge(url, "vattn:kv_mapped_bytes") > 0
        stream.close()
        wait_until_nothing_is_mapped(url)
        assert ask(url, prompts()[0]) == stock[0]
