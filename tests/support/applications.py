"""The server's application over the small shipped model, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.support.servers import MODEL
from tests.support.waiting import SECONDS
from vattn.engine import LLM
from vattn.engine.server.app import make_app, make_service
from vattn.engine.server.service import Service
from vattn.engine.server.settings import ServerSettings


@asynccontextmanager
async def client(
    *, config: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """A client of an application in this process, whose engine must be idle in the end."""
    llm = LLM(MODEL, **{"memory_budget": "8MiB", "max_num_seqs": 8, **(config or {})})
    service = make_service(llm.core, ServerSettings(**settings), "tiny")
    app = make_app(service)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=SECONDS) as made:
            yield made, service
        if not service.engine.dead:
            assert service.engine.num_unfinished == 0
            await service.engine.call(llm.check)
    finally:
        await service.engine.shutdown(timeout=0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, SECONDS))


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error
