"""A mixed day, scaled to minutes: `python -m tests.support.day --minutes 10 --seed 1`.

Requests arrive at random (Poisson), with bursts and pauses: short and long ones, streamed and whole, many with a common
start, some of tenants with a salt, and some of clients that leave. In each pause, once nothing runs, the pages that
are free, cached and parked must add up to the budget, and no gauge may be above zero. Prints what was seen, with the
time to the first token of the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from tests.support.servers import Server, running

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vattn:pages_owned")
PARTS = ("owned", "parked", "cached", "other", "free")
WAVE_SECONDS = 4.0  # of arrivals, before a pause
IDLE_SECONDS = 600.0  # that the requests of a wave have to end
RATE = 8.0  # requests per second, of a client each
BURST = 30


@dataclass
class Day:
    """What was seen.

    Attributes:
        ttfts: seconds to the first token, of each stream that had one.
        idle: the pages at each idle moment, by kind, with `budget` and the resident bytes as `resident`.
    """

    seen: Counter[str] = field(default_factory=Counter)
    ttfts: list[float] = field(default_factory=list)
    idle: list[dict[str, float]] = field(default_factory=list)

    def __str__(self) -> str:
        p50, p99 = (1000 * np.percentile(self.ttfts, share) for share in (50, 99))
        first, last = self.idle[0], self.idle[-1]
        return (
            f"{dict(self.seen)}\n{len(self.idle)} idle moments, books right at each; TTFT p50 {p50:.0f} ms, p99 "
            f"{p99:.0f} ms; resident {first['resident'] / 1e6:.0f} MB at the first, {last['resident'] / 1e6:.0f} MB at "
            "the last"
        )


def requests(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Bodies; `leave`, which is no field of the API, is the number of seconds after which the client goes."""
    commons = ["Question: " + " ".join(str(number) for number in range(start, start + 120)) for start in (0, 300, 600)]
    for _ in range(count):
        start = rng.choice(commons) if rng.random() < 0.6 else ""
        long = rng.random() < 0.15
        body: dict[str, Any] = {
            "prompt": f"{start}Question: What is {rng.randrange(30)} + {rng.randrange(30)}?\nAnswer:",
            "max_tokens": rng.randint(200, 900) if long else rng.randint(1, 60),
            "ignore_eos": long,
            "temperature": rng.choice([0, 1]),
            "stream": rng.random() < 0.7,
        }
        if rng.random() < 0.2:
            body["cache_salt"] = rng.choice(["one", "two"])
        if body["temperature"] and rng.random() < 0.1:
            body["n"] = 3
        if rng.random() < 0.15:
            body["leave"] = rng.uniform(0, 1)
        yield body


async def live(server: Server, minutes: float, seed: int, wave_seconds: float = WAVE_SECONDS) -> Day:
    """Waves of requests and the pauses between them, for that long; at least two of each.

    Raises:
        AssertionError: an answer is not what was asked for, or memory is missing at an idle moment.
    """
    rng = random.Random(seed)
    day = Day()
    end = time.monotonic() + 60 * minutes
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=IDLE_SECONDS) as http:
        while len(day.idle) < 2 or time.monotonic() < end:
            tasks: list[asyncio.Task[None]] = []
            wave_end = time.monotonic() + wave_seconds
            burst = time.monotonic() + rng.uniform(0, 2 * wave_seconds)  # in every second wave
            while time.monotonic() < wave_end:
                count = 1
                if time.monotonic() > burst:
                    count, burst = BURST, wave_end
                    day.seen["bursts"] += 1
                tasks += [asyncio.create_task(ask(http, body, day)) for body in requests(rng, count)]
                await asyncio.sleep(rng.expovariate(RATE))
            await asyncio.gather(*tasks)
            day.idle.append(await idle(http))
            await asyncio.sleep(rng.uniform(0, 1))
    return day


async def ask(http: httpx.AsyncClient, body: dict[str, Any], day: Day) -> None:
    leave = body.pop("leave", None)
    day.seen["requests"] += 1
    try:
        async with asyncio.timeout(leave):
            texts = await (streamed if body["stream"] else whole)(http, body, day)
    except TimeoutError:
        assert leave is not None, "no answer"
        day.seen["left"] += 1
        return
    assert texts == body.get("n", 1), body
    day.seen["answered"] += 1


async def whole(http: httpx.AsyncClient, body: dict[str, Any], day: Day) -> int:
    """The number of complete choices."""
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return check([choice["finish_reason"] for choice in answer.json()["choices"]])


async def streamed(http: httpx.AsyncClient, body: dict[str, Any], day: Day) -> int:
    """As `whole`; notes the time to the first token."""
    begun = time.monotonic()
    reasons: list[str] = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        events = [event async for event in _events(answer, begun, day)]
    *chunks, done = events
    assert done == "data: [DONE]"
    for chunk in chunks:
        choices = json.loads(chunk.removeprefix("data: "))["choices"]
        reasons += [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return check(reasons)


async def _events(answer: httpx.Response, begun: float, day: Day) -> AsyncIterator[str]:
    first = True
    async for line in answer.aiter_lines():
        if first:
            day.ttfts.append(time.monotonic() - begun)
            first = False
        if line:
            yield line


def check(reasons: list[str]) -> int:
    assert set(reasons) <= {"stop", "length"}, reasons
    return len(reasons)


async def idle(http: httpx.AsyncClient) -> dict[str, float]:
    """Wait until nothing runs; the pages, which must add up."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        await asyncio.sleep(0.3)  # the state is at most a quarter of a second old
        figures = samples((await http.get("/metrics")).text)
        if not any(figures[name] for name in GAUGES):
            break
        assert time.monotonic() < deadline, {name: figures[name] for name in GAUGES}
    pages = {kind: figures[f"vattn:pages_{kind}"] for kind in ("budget", *PARTS)}
    assert pages["budget"] == sum(pages[kind] for kind in PARTS), pages
    assert (await http.get("/load")).json() == {"server_load": 0}
    return {**pages, "resident": figures["process_resident_memory_bytes"]}


def samples(text: str) -> dict[str, float]:
    """The samples in Prometheus' format by name; of several with one name, the last."""
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with running(disable_log_requests=True) as server:
        print(asyncio.run(live(server, arguments.minutes, arguments.seed)))
        assert server.terminate() == 0


if __name__ == "__main__":
    main()
