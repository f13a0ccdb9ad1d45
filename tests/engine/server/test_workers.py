"""Threads that prepare requests let the event loop answer others between their parts."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.applications import run
from vattn.engine.server import run as running
from vattn.engine.server import workers
from vattn.engine.server.workers import SMALL_BYTES, Check, Workers


async def _receive() -> dict[str, Any]:
    await asyncio.sleep(3600)
    return {}


@pytest.mark.parametrize("size", [1, SMALL_BYTES + 1])
def test_the_loop_takes_turns_between_the_parts_of_work(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SECONDS", 0.0)
    turns = 0

    def work(check: Check) -> list[int]:
        seen = []
        for _ in range(50):
            before = turns
            check()
            seen.append(turns - before)
        return seen

    async def test() -> None:
        loop = asyncio.get_running_loop()

        def count() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(count)

        count()
        threads = Workers()
        try:
            seen = await threads.run(cast(Any, SimpleNamespace(receive=_receive)), size, work)
        finally:
            threads.close()
        assert min(seen) >= workers._TURNS

    run(test())


def test_garbage_is_collected_while_there_are_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_COLLECT_SECONDS", 0.0)
    tasks = {"a request"}
    collected = asyncio.Event()
    monkeypatch.setattr(gc, "collect", collected.set)
    monkeypatch.setattr(gc, "get_count", lambda: (0, 1, 0))

    async def test() -> None:
        server = cast(Any, SimpleNamespace(server_state=SimpleNamespace(tasks=tasks)))
        collecting = asyncio.ensure_future(running._collect(server))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not collected.is_set()
        tasks.clear()
        await collected.wait()
        collecting.cancel()

    run(test())
