"""Requests to an OpenAI-compatible server, at their times, with the time of every token."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import aiohttp

from vattn.errors import ConfigError
from vattn.integers import shown

from .samples import Sample
from .sse import EventReader, error_message
from .summary import Timing

Backend: TypeAlias = Literal["openai", "openai-chat"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
ENDPOINTS: Mapping[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go, and what each of them says besides its prompt.

    Attributes:
        url: of the endpoint.
        model: its name on the server.
        fields: of the request's body, over all others: sampling parameters.
    """

    url: str
    model: str
    backend: Backend = "openai"
    api_key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self, sample: Sample) -> dict[str, Any]:
        """The request's body."""
        asked: dict[str, Any] = (
            {"prompt": sample.prompt, "max_tokens": sample.output_len}
            if self.backend == "openai"
            else {
                "messages": [{"role": "user", "content": sample.prompt}],
                "max_completion_tokens": sample.output_len,
            }
        )
        return {
            "model": self.model,
            **asked,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @functools.cached_property
    def proxy(self) -> str | None:
        return _proxy_of(self.url)


async def list_models(base_url: str, api_key: str | None = None) -> list[dict[str, Any]]:
    """The models of a server, as it describes them.

    Raises:
        ConfigError: no server answers there, or it refuses, or its answer is no list of models.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    url = base_url.rstrip("/") + "/v1/models"
    try:
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url, proxy=_proxy_of(url)) as answer:
            status, text = answer.status, await answer.text(errors="replace")
    except ValueError as error:  # aiohttp.InvalidURL, or of a name that no host can have
        raise ConfigError(f"{base_url!r} is no address of a server; give one such as http://localhost:8000") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ConfigError(
            f"no server answers at {base_url} ({error}); start one with `vattn serve`, wait for one that starts with "
            "--ready-check-timeout-sec, or correct the address"
        ) from error
    if status != 200:
        raise ConfigError(f"{url} answers {status}: {error_message(text)}")
    try:
        models = json.loads(text)["data"]
        if all(isinstance(each["id"], str) and isinstance(each.get("root"), str | None) for each in models):
            return list(models)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        pass
    raise ConfigError(f"{url} lists no models; is it an OpenAI-compatible server?")


async def send_all(
    target: Target,
    samples: Sequence[Sample],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    warmups: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    done: Callable[[], None] = lambda: None,
) -> tuple[list[Timing], float]:
    """Send requests at their times, and wait for all of them.

    Args:
        arrivals: seconds from the start to each request; one whose turn has come waits while `max_concurrency` others
            run.
        warmups: requests like the first one that are sent before, and not counted.
        clock: seconds, for all timings.
        done: called when a request that counts has ended.

    Returns:
        What came back for each sample, in order; and the seconds that all took together.
    """
    running = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=target.headers, read_bufsize=2**18
    ) as session:

        async def send_when_free(sample: Sample) -> Timing:
            arrived = clock()
            async with running:
                timing = await send(session, target, sample, clock=clock)
            timing.queued = timing.start - arrived
            return timing

        async def counted(sample: Sample) -> Timing:
            timing = await send_when_free(sample)
            done()
            return timing

        async with asyncio.TaskGroup() as group:
            for _ in range(warmups):
                group.create_task(send_when_free(samples[0]))
        start = clock()
        begun = asyncio.get_running_loop().time()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for sample, arrival in zip(samples, arrivals, strict=True):
                delay = begun + arrival - asyncio.get_running_loop().time()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(group.create_task(counted(sample)))
        return [task.result() for task in tasks], clock() - start


async def send(
    session: aiohttp.ClientSession, target: Target, sample: Sample, *, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Send one request and follow its stream. A failure is in the result."""
    timing = Timing(start=clock(), prompt_tokens=sample.prompt_len)
    try:
        async with session.post(target.url, json=target.body(sample), proxy=target.proxy) as answer:
            if answer.status != 200:
                timing.error = f"{answer.status}: {error_message(await answer.text())}"
                return timing
            timing.error = "the server ended the stream without [DONE]"
            events = EventReader()
            usage: Mapping[str, int] = {}
            async for data in answer.content.iter_any():
                now = None
                for event in events.feed(data):
                    if event == "[DONE]":
                        timing.error = None if timing.token_times else "the stream had no tokens"
                        continue
                    chunk = json.loads(event)
                    if isinstance(chunk, dict) and "error" in chunk:
                        timing.error = error_message(event)
                        return timing
                    text, counts = _read(chunk)
                    usage = counts or usage
                    if text is not None:
                        # Events that arrive together have the same time.
                        now = clock() if now is None else now
                        timing.token_times.append(now)
                        timing.text += text
            timing.output_tokens = usage.get("completion_tokens") or len(timing.token_times)
            timing.prompt_tokens = usage.get("prompt_tokens") or timing.prompt_tokens
    except (aiohttp.ClientError, OSError, RecursionError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    return timing


def _proxy_of(url: str) -> str | None:
    """The proxy of the environment for `url`, as urllib has it; None for none.

    aiohttp's `trust_env` would also send passwords of ~/.netrc, and refuses a request that has a key besides.
    """
    parts = urllib.parse.urlsplit(url)
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def _read(chunk: Any) -> tuple[str | None, Mapping[str, int]]:
    """The text of a chunk, as `_tokens`; and what it counts, if it does.

    Raises:
        ValueError: it is no chunk of an answer.
    """
    try:
        text, usage = _tokens(chunk), chunk.get("usage") or {}
        counts = {name: usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")} if usage else {}
        if isinstance(text, str | None) and all(isinstance(count, int) for count in counts.values()):
            return text, counts
    except (AttributeError, IndexError, KeyError, TypeError):
        pass
    raise ValueError(f"{shown(chunk)} is no chunk of an answer")


def _tokens(chunk: Mapping[str, Any]) -> Any:
    """The text of a chunk with tokens, which may be empty; None for one without: the role, or the usage."""
    if not chunk.get("choices"):
        return None
    choice = chunk["choices"][0]
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"]
    kinds = ("content", "reasoning_content", "reasoning")
    text = next((delta[kind] for kind in kinds if delta.get(kind) is not None), None)
    # A chunk that also ends the answer has its only token.
    return None if text == "" and "role" in delta and choice.get("finish_reason") is None else text
