"""A few seconds of the mixed day, which `python -m tests.support.day` runs for longer."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.day import live
from tests.support.effort import effort
from tests.support.servers import Server


@pytest.mark.slow(8)
def test_a_mixed_day(server: Server) -> None:
    day = asyncio.run(live(server, minutes=effort(0, 1), seed=5, wave_seconds=effort(1.0, 4.0)))
    assert day.seen["requests"] == day.seen["answered"] + day.seen["left"]
    assert day.seen["answered"] > 0
    assert day.ttfts
    assert day.idle[0]["budget"] == day.idle[-1]["budget"] > 0
