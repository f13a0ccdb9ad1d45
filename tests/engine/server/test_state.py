"""The live state that the dashboard shows, and the figures for Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import vattn
from tests.support import brokers
from tests.support.backends import PAGED_WINDOWS, chosen
from tests.support.servers import MODEL, metric
from tests.support.waiting import SECONDS
from vattn.engine import LLM, SamplingParams
from vattn.engine.server.app import make_service
from vattn.engine.server.service import Service
from vattn.engine.server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
AGE = "vattn.engine.server.state._SHORTEST_AGE"  # seconds that a state is shown for
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
PROMPT = "Question: " + " ".join(str(i) for i in range(250)) + "\nAnswer:"


def make(kv: str, **config: Any) -> Service:
    llm = LLM(MODEL, **chosen(kv, memory_budget="32MiB", **{"max_num_seqs": 4, **config}))
    return make_service(llm.core, ServerSettings(), "tiny")


async def until_running(service: Service, count: int) -> None:
    while len(service.engine.core.scheduler.running) < count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kv", ["virtual", "paged", PAGED_WINDOWS, "static", "dynamic"])
def test_the_state_while_requests_run_and_after(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        service = make(kv)
        engine = service.engine
        try:
            first = await engine.add(PROMPT, LONG)
            assert not (await anext(first)).finished
            others = [await engine.add(PROMPT, LONG) for _ in range(4)]
            await until_running(service, 4)
            monkeypatch.setattr(AGE, float("inf"))
            state = await service.state.read()
            json.dumps(state)
            assert "Question" not in str(state)
            assert state["counts"] == {"running": 4, "waiting": 1}
            assert len(state["requests"]) == 5
            assert {request["state"] for request in state["requests"]} <= {"prefilling", "decoding", "waiting"}
            assert state["requests"][0]["slot"] is not None
            assert 0 < state["memory"]["usage"] <= 1
            memory = state["memory"]
            assert memory["live_bytes"] <= memory["used_bytes"] <= memory["physical_bytes"]
            assert memory["static_bytes"] == 4 * 2048 * engine.core.kv.token_bytes
            if kv == "virtual":
                slots = [slot for slot in state["slots"] if slot["active"]]
                assert len(slots) == 4
                assert all(0 <= slot["shared"] <= slot["length"] <= slot["mapped"] for slot in slots)
                assert all(slot["shared"] >= state["block_tokens"] for slot in slots), "they have one prefix"
                pages = memory["pages"]
                parts = ("owned", "parked", "cached", "other", "free")
                assert pages["budget"] == sum(pages[part] for part in parts)
                assert state["driver"]["map_calls"] > 0
                assert {slot["prefix"] for slot in slots} == {0}
            elif kv in ("paged", PAGED_WINDOWS):
                assert len(state["slots"]) == 4
                lists = [slot["blocks"] for slot in state["slots"]]
                assert len({blocks[0] for blocks in lists}) == 1, "they share their first block"
                for slot in state["slots"]:
                    assert state["block_tokens"] <= slot["shared"] <= slot["length"] <= slot["mapped"]
                    assert slot["prefix"] == 0
                held = {number for blocks in lists for number in blocks}
                assert held < set(range(state["pool"]["blocks"]))
                assert held.isdisjoint(state["pool"]["cached"])
                assert (state["driver"]["map_calls"] > 0) == (kv == PAGED_WINDOWS)
            else:
                assert len(state["slots"]) == 4
                assert all(slot["shared"] == 0 and slot["prefix"] is None for slot in state["slots"])
                assert {slot["mapped"] - slot["length"] == 0 for slot in state["slots"]} == {kv == "dynamic"}
            assert await service.state.read() is state, "a state is shown for a while"

            figures = engine.core.figures
            generated = figures.generation_tokens
            while figures.generation_tokens == generated:
                await asyncio.sleep(0.01)
            for stream in (first, *others):
                engine.abort(stream.request_id)
            while engine.num_unfinished:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(AGE, 0.0)
            state = await service.state.read()
            assert state["counts"] == {"running": 0, "waiting": 0}
            assert state["memory"]["usage"] == 0
            assert not any(slot["active"] for slot in state["slots"])
            if kv in ("paged", PAGED_WINDOWS):
                assert state["pool"]["cached"]
            assert state["rates"]["generation_tokens"] > 0
            assert state["ttft_seconds"]["count"] >= 4
        finally:
            await engine.shutdown(timeout=0)
        assert await service.state.read() is not None, "the last state stays, when the engine is gone"

    asyncio.run(asyncio.wait_for(test(), SECONDS))


def test_prefixes_are_told_apart_and_lists_of_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        service = make("paged")
        engine = service.engine
        try:
            streams = []
            for prompt in (PROMPT, "w " + PROMPT):
                stream = await engine.add(prompt, LONG)
                assert not (await anext(stream)).finished
                streams += [stream, await engine.add(prompt, LONG)]
            await until_running(service, 4)
            state = await service.state.read()
            assert sorted(slot["prefix"] for slot in state["slots"]) == [0, 0, 1, 1]
            monkeypatch.setattr("vattn.engine.server.state._MOST_BLOCKS", 30)
            monkeypatch.setattr(AGE, 0.0)
            state = await service.state.read()
            assert sum(len(slot["blocks"]) for slot in state["slots"]) == 30
            for stream in streams:
                engine.abort(stream.request_id)
        finally:
            await engine.shutdown(timeout=0)

    asyncio.run(asyncio.wait_for(test(), SECONDS))


def test_a_sleeping_engine_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(AGE, 0.0)
        service = make("virtual")
        try:
            assert not (await service.state.read())["sleeping"]
            await service.engine.sleep()
            state = await service.state.read()
            assert state["sleeping"]
            assert state["memory"]["physical_bytes"] == 0
        finally:
            await service.engine.shutdown(timeout=0)

    asyncio.run(asyncio.wait_for(test(), SECONDS))


def test_a_step_that_takes_long_does_not_hold_the_state_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        service = make("virtual")
        go_on = threading.Event()
        monkeypatch.setattr(AGE, 0.0)
        try:
            state = await service.state.read()
            slow = asyncio.ensure_future(service.engine.call(lambda: go_on.wait(SECONDS)))
            monkeypatch.setattr("vattn.engine.server.state._LONGEST_WAIT", 0.05)
            assert await service.state.read() is state
            go_on.set()
            assert await slow
            monkeypatch.setattr("vattn.engine.server.state._LONGEST_WAIT", SECONDS)
            assert await service.state.read() is not state
        finally:
            go_on.set()
            await service.engine.shutdown(timeout=0)

    asyncio.run(asyncio.wait_for(test(), SECONDS))


def test_the_counters_count() -> None:
    async def test() -> None:
        service = make("virtual")
        try:
            for n, max_tokens in ((1, 5), (3, 7)):
                params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
                outputs = [output async for output in service.engine.generate([5, 6, 7, 8], params)]
                assert outputs[-1].finished
            await service.state.read()
        finally:
            await service.engine.shutdown(timeout=0)
        text = service.metrics.text().decode()
        assert metric(text, "vllm:prompt_tokens_total") == 8
        assert metric(text, "vllm:generation_tokens_total") == 5 + 3 * 7
        assert metric(text, "vllm:request_success_total", finished_reason="length") == 4
        assert metric(text, "vllm:time_to_first_token_seconds_count") == 4
        assert metric(text, "vllm:request_generation_tokens_sum") == 26
        assert metric(text, "vllm:inter_token_latency_seconds_count") == 26 - 4
        assert metric(text, "vllm:request_time_per_output_token_seconds_count") == 4
        assert metric(text, "vattn:step_seconds_count") >= 12
        assert metric(text, "vattn:map_calls_total") > 0

    asyncio.run(asyncio.wait_for(test(), SECONDS))


def test_a_shared_pool_is_shown_and_its_broker_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AGE, 0.0)
    monkeypatch.setattr("vattn.engine.server.pool_reader._AGE", 0.0)
    mib = 2**20

    async def test(broker: brokers.Process) -> None:
        service = make("virtual", kv_pool=brokers.NAME, kv_share="at least 2MiB, at most 8MiB")
        label = {"pool": brokers.NAME}

        async def reads(seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            while not seen(pool := (await service.state.read())["kv_pool"]):
                await asyncio.sleep(0.01)
            return pool

        def figure(name: str) -> float:
            return metric(service.metrics.text().decode(), f"vattn:pool_{name}", **label)

        try:
            other = await asyncio.to_thread(
                vattn.PagePool.connect, brokers.NAME, label="other", at_least="4MiB", page_size=4096
            )
            stream = await service.engine.add(PROMPT, LONG)
            assert not (await anext(stream)).finished
            pool = await reads(lambda pool: len(pool["borrowers"]) == 2 and pool["borrowers"][0]["owned"] > 0)
            assert (pool["name"], pool["reachable"], pool["budget"]) == (brokers.NAME, True, 16 * mib)
            mine, others = pool["borrowers"]
            assert (mine["name"], others["name"]) == (pool["borrower"], "other")
            assert (mine["at_least"], mine["at_most"], others["at_least"]) == (2 * mib, 8 * mib, 4 * mib)
            assert 0 < mine["owned"] <= mine["lease"] <= 8 * mib
            json.dumps(pool)
            assert (figure("guaranteed_bytes"), figure("most_bytes")) == (2 * mib, 8 * mib)
            assert 0 < figure("used_bytes") <= figure("lent_bytes") <= 8 * mib
            assert (figure("broker_reachable"), figure("budget_bytes")) == (1, 16 * mib)
            assert figure("free_bytes") == pool["free"] < 16 * mib

            monkeypatch.setattr("vattn.engine.server.pool_reader._PATIENCE", 0.2)
            broker.process.send_signal(signal.SIGSTOP)  # its connections are there, but it says nothing
            pool = await reads(lambda pool: not pool["reachable"])
            assert (pool["free"], pool["borrowers"], pool["budget"]) == (None, [], 16 * mib)
            assert figure("broker_reachable") == 0
            assert figure("lent_bytes") > 0
            assert "pool_free_bytes{" not in service.metrics.text().decode()
            broker.process.send_signal(signal.SIGCONT)
            await reads(lambda pool: pool["reachable"])
            broker.kill()
            await reads(lambda pool: not pool["reachable"])
            await asyncio.to_thread(other.close)
        finally:
            await service.engine.shutdown(timeout=0)

    with brokers.running(16 * mib) as broker:
        asyncio.run(asyncio.wait_for(test(broker), SECONDS))


def documented() -> set[str]:
    """The metrics that docs/server.md names."""
    text = (ROOT / "docs" / "server.md").read_text()
    return set(re.findall(r"`((?:vllm|vattn):\w+)", text))


def offered(store: Path) -> set[str]:
    """The metrics of a server with all that has any, as Prometheus names them."""

    async def look() -> str:
        service = make("virtual", kv_pool=brokers.NAME, kv_store=store, role="decode")
        try:
            while (await service.state.read())["kv_pool"]["free"] is None:  # a broker may be slow to answer
                await asyncio.sleep(0.05)
        finally:
            await service.engine.shutdown(timeout=0)
        return service.metrics.text().decode()

    with brokers.running(32 * 2**20):
        families = text_string_to_metric_families(asyncio.run(asyncio.wait_for(look(), SECONDS)))
    named = [family.name + ("_total" if family.type == "counter" else "") for family in families]
    return {name for name in named if name.startswith(("vllm:", "vattn:"))}


def test_metrics_are_those_that_clients_expect_and_the_page_names(tmp_path: Path) -> None:
    names = offered(tmp_path / "store")
    assert names == documented()
    expected = """num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc
        prefix_cache_queries_total prefix_cache_hits_total gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total
        num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total
        time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
        e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds
        request_decode_time_seconds request_prompt_tokens request_generation_tokens"""
    assert {f"vllm:{name}" for name in expected.split()} <= names


def test_the_grafana_dashboard_uses_metrics_that_there_are(tmp_path: Path) -> None:
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = {name for query in queries for name in re.findall(r"(?:vllm|vattn):\w+", query)}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= offered(tmp_path / "store")
    assert len(queries) > 10
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
