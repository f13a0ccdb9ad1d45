"""Prompts that one engine computes and another one continues: the answers are those of an engine alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_shared_prefixes import MAX_TOKENS, MIB, PROMPT, make_llm, meet, run, shares
from tests.support import brokers, scripts
from tests.support.tiny_models import expected, make_prompts
from tests.support.waiting import wait_until
from vattn.broker import places
from vattn.engine import LLM, AsyncEngine, SamplingParams
from vattn.engine.roles import decoder as decoding
from vattn.engine.roles.decoder import RemotePrefills
from vattn.engine.roles.line import Kind, message
from vattn.errors import ConfigError

SHORT = make_prompts([20], seed=9)[0]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture
def broker() -> Iterator[brokers.Process]:
    for prompt in (PROMPT, SHORT):
        expected("llama", prompt, MAX_TOKENS)  # before the model runs in an engine
    with brokers.running(8 * MIB) as process:
        yield process


@contextlib.contextmanager
def prefiller(**options: Any) -> Iterator[LLM]:
    """An engine that takes prompts, in a thread with an event loop."""
    llm = make_llm(role="prefill", **options)
    ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with AsyncEngine(llm):
            ready.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    try:
        yield llm
    finally:
        end.set()
        thread.join()


@contextlib.contextmanager
def decoder(prefillers: int = 1, **options: Any) -> Iterator[LLM]:
    with make_llm(role="decode", **options) as llm:
        wait_until(lambda: remote(llm).prefillers == prefillers)
        meet(llm, prefillers)
        yield llm


def remote(llm: LLM) -> RemotePrefills:
    assert llm.core.remote is not None
    return llm.core.remote


def figures(llm: LLM) -> dict[str, Any]:
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def test_a_prompt_is_computed_by_the_one_and_continued_by_the_other(broker: brokers.Process) -> None:
    with prefiller() as first, decoder() as second:
        output = run(second, PROMPT)
        assert output.outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        block = second.core.kv.prefix_block_tokens
        assert block is not None
        assert output.num_cached_tokens == (len(PROMPT) - 1) // block * block
        assert shares(second).foreign_pages
        assert first.core.figures.prompt_tokens == len(PROMPT)
        told = figures(second)
        assert (told["vattn:remote_prefills"], told["vattn:remote_prefills_lost"], told["vattn:prefillers"]) == (
            1,
            0,
            1,
        )
        assert broker.problems() == []


def test_short_prompts_and_those_in_memory_stay(broker: brokers.Process) -> None:
    with prefiller(), decoder() as second:
        assert run(second, SHORT).outputs[0].token_ids == expected("llama", SHORT, MAX_TOKENS)
        assert remote(second).handed == 0
        run(second, PROMPT)
        run(second, PROMPT)
        assert remote(second).handed == 1


def test_salts_go_with_prompts(broker: brokers.Process) -> None:
    with prefiller(), decoder() as second:
        assert run(second, PROMPT, cache_salt="eins é").num_cached_tokens
        assert run(second, PROMPT, cache_salt="zwei").num_cached_tokens
        assert remote(second).handed == 2


def test_others_go_on_while_a_prompt_is_computed(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    with prefiller() as first, decoder() as second:
        gate = threading.Event()
        step = first.core.step
        monkeypatch.setattr(first.core, "step", lambda: gate.wait() and step())
        second.add_request("long", {"prompt_token_ids": PROMPT}, GREEDY)
        second.add_request("short", {"prompt_token_ids": SHORT}, GREEDY)
        ended: dict[str, list[int]] = {}
        while len(ended) < 2:
            for output in second.step():
                if output.finished:
                    ended[output.request_id] = list(output.outputs[0].token_ids)
                    gate.set()
        assert list(ended) == ["short", "long"]
        assert ended["long"] == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(second).lost == 0


def test_a_request_that_is_aborted_is_dropped(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    with prefiller() as first, decoder() as second:
        gate = threading.Event()
        step = first.core.step
        monkeypatch.setattr(first.core, "step", lambda: (gate.wait(0.1) and step()) or [])
        second.add_request("long", {"prompt_token_ids": PROMPT}, GREEDY)
        assert second.step() == []
        wait_until(lambda: first.core.num_groups)
        second.abort("long")
        wait_until(lambda: not first.core.num_groups)
        gate.set()
        second.check()
        assert run(second, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)


def test_with_nobody_to_ask_an_engine_computes_all_itself(broker: brokers.Process) -> None:
    with decoder(0) as alone:
        assert run(alone, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(alone).handed == 0


_SCRIPT = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.engine.test_shared_prefixes import make_llm
from vattn.engine import AsyncEngine
from vattn.engine.roles import prefiller
async def serve():
    async with AsyncEngine(make_llm(role="prefill")) as engine:
        if "stuck" in sys.argv:
            prefiller._HANGS = 0.5
        if len(sys.argv) > 1:
            step = engine.core.step
            def slowly():
                print("asked", file=sys.stderr, flush=True)
                import time
                time.sleep(600)
            engine.core.step = slowly
        print("ready", file=sys.stderr, flush=True)
        await asyncio.sleep(600)
asyncio.run(serve())
"""


def say(process: scripts.Process, word: str) -> None:
    """Waits until the process says so."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line == f"{word}\n":
            return
    pytest.fail("".join(said))


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[scripts.Process]:
    started = scripts.start(_SCRIPT, *arguments)
    try:
        say(started, "ready")
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.send_signal(signal.SIGKILL)
        started.wait()
        assert started.stderr is not None
        started.stderr.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_waits_for_an_engine_that_ends_or_hangs_goes_on_alone(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(decoding, "PATIENCE", 0.5)
    with process("slow") as first, decoder() as second:
        second.add_request("long", {"prompt_token_ids": PROMPT}, GREEDY)
        say(first, "asked")
        first.send_signal(how)
        outputs = []
        while second.core.has_unfinished():
            outputs += second.step()
        assert outputs[-1].outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert (remote(second).handed, remote(second).lost, remote(second).prefillers) == (1, 1, 0)
        run(second, [*PROMPT[1:], 4])
        assert remote(second).handed == 1
        if how == signal.SIGKILL:
            wait_until(lambda: not list(places.folder().glob("*.prefill")))


def test_an_engine_whose_steps_do_not_end_is_not_waited_for(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "PATIENCE", 2.5)  # it would say in the meantime that it lives
    with process("stuck"), decoder() as second:
        assert run(second, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(second).lost == 1


def test_an_engine_whose_steps_take_long_is_waited_for(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "PATIENCE", 2.5)
    with prefiller() as first, decoder() as second:
        step = first.core.step

        def slowly() -> Any:
            time.sleep(4)
            return step()

        monkeypatch.setattr(first.core, "step", slowly)
        assert run(second, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(second).lost == 0


def test_another_engine_is_found_when_it_starts(broker: brokers.Process, caplog: pytest.LogCaptureFixture) -> None:
    with decoder(0) as second:
        with prefiller():
            wait_until(lambda: remote(second).prefillers == 1)
            meet(second)
            assert run(second, PROMPT).num_cached_tokens
        wait_until(lambda: remote(second).prefillers == 0)
        with prefiller():
            wait_until(lambda: remote(second).prefillers == 1)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_prompts_go_to_the_engine_that_has_least_to_do(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts([150, 150, 150, 150], seed=10)
    alone = {str(number): expected("llama", prompt, MAX_TOKENS) for number, prompt in enumerate(prompts)}
    with prefiller() as one, prefiller() as two, decoder(2) as second:
        gate = threading.Event()
        for each in (one, two):
            monkeypatch.setattr(each.core, "step", lambda step=each.core.step: gate.wait() and step())
        for number, prompt in enumerate(prompts):
            second.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
        gate.set()
        ended = {}
        while len(ended) < len(prompts):
            ended |= {output.request_id: output for output in second.step() if output.finished}
        assert {name: output.outputs[0].token_ids for name, output in ended.items()} == alone
        assert all(output.num_cached_tokens for output in ended.values())
        assert one.core.figures.prompt_tokens == two.core.figures.prompt_tokens == 300
        second.check()


def test_an_engine_that_sleeps_takes_no_prompts(broker: brokers.Process) -> None:
    with prefiller() as first, decoder() as second:
        first.core.asleep = True  # as `sleep` has it
        assert run(second, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(second).lost == 1
        first.core.asleep = False


def test_prompts_that_the_other_refuses_are_computed_here(broker: brokers.Process) -> None:
    with prefiller(max_model_len=100) as first, decoder() as second:
        assert shares(first).directory.shape.fingerprint == shares(second).directory.shape.fingerprint
        assert run(second, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(second).lost == 1


def test_a_model_that_may_have_changed_is_asked_for_nothing(broker: brokers.Process) -> None:
    with prefiller(), decoder() as second:
        second.reset_prefix_cache()
        assert run(second, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(second).handed == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\x07" * 100,
        message(Kind.DONE, 1),
        message(Kind.COMPUTE, 1, b"\xff\xfe", [1]),
        message(Kind.COMPUTE, 1, b"", [1] * 80) + message(Kind.COMPUTE, 1, b"", [1] * 80),
        message(Kind.COMPUTE, 1, b"", [1] * 80)[:-1],
        message(Kind.COMPUTE, 1, b"", [-1, 10**9]),
        message(Kind.COMPUTE, 1),
        message(Kind.DROP, 5),
    ],
)
def test_who_says_what_is_no_message_disturbs_nobody(broker: brokers.Process, data: bytes) -> None:
    with prefiller() as first, decoder() as second:
        (path,) = places.prefillers(brokers.NAME, first.core.kv.sharing or b"")
        with socket.socket(socket.AF_UNIX) as liar:
            liar.connect(str(path))
            liar.sendall(data)
            liar.shutdown(socket.SHUT_WR)
            while liar.recv(4096):
                pass
        assert run(second, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(second).lost == 0
        wait_until(lambda: not first.core.num_groups)


@pytest.mark.parametrize("data", [b"\x01" * 17, message(Kind.COMPUTE, 1, b"a", [1]), message(Kind.DONE, 10**9), b""])
def test_a_prefiller_that_lies_is_left_alone(broker: brokers.Process, data: bytes) -> None:
    with make_llm(role="decode") as second:
        path = places.prefiller_path(brokers.NAME, second.core.kv.sharing or b"")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            connection, _ = listener.accept()
            wait_until(lambda: remote(second).prefillers == 1)
            second.add_request("long", {"prompt_token_ids": PROMPT}, GREEDY)
            connection.recv(17)
            listener.close()
            connection.sendall(data)
            connection.close()
            outputs = []
            while second.core.has_unfinished():
                outputs += second.step()
        assert outputs[-1].outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(second).lost == 1


def test_many_clients_of_an_engine_that_decodes(broker: brokers.Process) -> None:
    prompts = make_prompts([150, 30, 120, 90, 150, 70], seed=11)
    alone = [list(expected("llama", prompt, MAX_TOKENS)) for prompt in prompts]

    async def ask(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        found: list[int] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, GREEDY):
            found += output.outputs[0].token_ids
        return found

    async def ask_all(llm: LLM) -> list[list[int]]:
        async with AsyncEngine(llm) as engine:
            return await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))

    with prefiller(), decoder() as second:
        assert asyncio.run(ask_all(second)) == alone
        assert remote(second).handed == 5
        assert remote(second).lost == 0


def test_nothing_stays_open(broker: brokers.Process) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = held()
    for _ in range(2):
        with prefiller(), decoder() as second:
            run(second, PROMPT)
        wait_until(lambda: held() <= before)
        assert not list(places.folder().glob("*.prefill"))


@pytest.mark.parametrize(
    "options",
    [{"kv_pool": None}, {"enable_prefix_caching": False}, {"scheduling": "static"}],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_role_needs(broker: brokers.Process, role: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"role='{role}' needs a kv_pool"):
        make_llm(role=role, **{"kv_share_prefixes": False, **options})


def test_a_role_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="role"):
        make_llm(role="prefil")
