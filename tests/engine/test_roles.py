"""Prompts that one engine computes and another one continues: the answers are those of an engine alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_shared_prefixes import MAX_TOKENS, MIB, PROMPT, make_llm, meet, run, shares
from tests.support import brokers, forks, scripts
from tests.support.tiny_models import expected, make_prompts
from tests.support.waiting import SECONDS, wait_until
from vattn.broker import places
from vattn.engine import LLM, AsyncEngine, SamplingParams
from vattn.engine.roles import decoder as decoding
from vattn.engine.roles import prefiller as prefilling
from vattn.engine.roles.decoder import RemotePrefills
from vattn.engine.roles.line import MOST_SALT, Kind, message, rest_of
from vattn.errors import ConfigError, OutOfPages

pytestmark = pytest.mark.slow(1)

SHORT = make_prompts([20], seed=9)[0]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


LENGTHS = 127, 128, 129, 130, 70
PROMPTS = [*make_prompts(LENGTHS, seed=12), [*PROMPT[1:], 4], [*PROMPT[2:], 4, 5]]


@pytest.fixture
def broker() -> Iterator[brokers.Process]:
    for prompt in (PROMPT, SHORT, *PROMPTS):
        expected("llama", prompt, MAX_TOKENS)  # before the model runs in an engine
    with brokers.running(8 * MIB) as process:
        yield process


@contextlib.contextmanager
def prefiller(**options: Any) -> Iterator[LLM]:
    """An engine that takes prompts, in a thread with an event loop. What ends it early is raised here."""
    llm = make_llm(role="prefill", **options)
    ready, end = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    async def serve() -> None:
        async with AsyncEngine(llm):
            ready.set()
            await asyncio.to_thread(end.wait)

    def run_it() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            errors.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run_it)
    thread.start()
    ready.wait()
    try:
        if not errors:
            yield llm
    finally:
        end.set()
        thread.join()
    if errors:
        raise errors[0]


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
        assert output.num_cached_tokens == len(PROMPT) - 1
        assert shares(second).foreign_pages
        assert first.core.figures.prompt_tokens == len(PROMPT)
        told = figures(second)
        assert (told["vattn:remote_prefills"], told["vattn:remote_prefills_lost"], told["vattn:prefillers"]) == (
            1,
            0,
            1,
        )
        assert told["vattn:remote_prefill_row_tokens"] == len(rest(second, PROMPT)) > 1
        assert broker.problems() == []


def rest(llm: LLM, prompt: list[int]) -> range:
    """The tokens of a prompt that come as rows."""
    return rest_of(len(prompt), llm.core.kv.prefix_block_tokens)


def computed(llm: LLM, prompt: list[int]) -> int:
    """How many tokens of a prompt an engine computes, whose answer is right."""
    counts: list[int] = []
    llm.core.on_step = lambda record: counts.append(record.prefill_tokens)
    assert run(llm, prompt).outputs[0].token_ids == expected("llama", prompt, MAX_TOKENS)
    llm.core.on_step = None
    return sum(counts)


@pytest.mark.parametrize(("page_size", "block"), [(4096, 32), (16384, 512)])
def test_no_more_than_the_last_token_is_computed_by_who_continues(
    broker: brokers.Process, page_size: int, block: int
) -> None:
    options = {"kv_options": {"page_size": page_size, "layout": "fused" if block == 32 else "layer"}}
    prompts = PROMPTS[: len(LENGTHS)]
    with prefiller(**options), decoder(**options) as second:
        assert second.core.kv.prefix_block_tokens == block
        assert [computed(second, prompt) for prompt in prompts] == [1] * len(prompts)
        assert remote(second).row_tokens == sum((length - 1) % block for length in LENGTHS)
        assert (remote(second).handed, remote(second).lost) == (len(prompts), 0)


def test_what_an_engine_keeps_behind_its_last_block_is_not_asked_for(broker: brokers.Process) -> None:
    options = {"kv_options": {"page_size": 16384}}
    with prefiller(**options), decoder(**options) as second:
        answer = run(second, PROMPT).outputs[0].token_ids
        turn = [*PROMPT, *answer, 5, 6]
        assert run(second, turn).num_cached_tokens == len(turn) - 3
        assert remote(second).handed == 1


def test_rows_of_8_bits_come_with_their_scales(broker: brokers.Process) -> None:
    with make_llm(kv_pool=None, kv_share_prefixes=False, kv_cache_dtype="int8") as alone:
        answer = run(alone, PROMPT).outputs[0].token_ids
    with prefiller(kv_cache_dtype="int8"), decoder(kv_cache_dtype="int8") as second:
        output = run(second, PROMPT)
        assert output.num_cached_tokens == len(PROMPT) - 1
        assert output.outputs[0].token_ids == answer
        assert remote(second).row_tokens == len(rest(second, PROMPT)) > 0


Sent = dict[str, Any]


def _as_they_are(sent: Sent) -> bytes:
    return message(**sent)


def _changed(sent: Sent) -> bytes:
    data = bytearray(message(**sent))
    data[-40] ^= 1
    return bytes(data)


def _of_another_model(sent: Sent) -> bytes:
    return message(**{**sent, "key": bytes(32)})


def _of_other_tokens(sent: Sent) -> bytes:
    return message(**{**sent, "tokens": [token + 1 for token in sent["tokens"]]})


def _of_fewer_tokens(sent: Sent) -> bytes:
    return message(**{**sent, "tokens": sent["tokens"][:-1]})


def _too_few(sent: Sent) -> bytes:
    return message(**{**sent, "rows": sent["rows"][:-1]})


def _too_many(sent: Sent) -> bytes:
    return message(**{**sent, "rows": [*sent["rows"], memoryview(b"x")]})


def _far_too_many(sent: Sent) -> bytes:
    return message(**{**sent, "rows": [memoryview(bytes(2**20))]})


def _cut_off(sent: Sent) -> bytes:
    return message(**sent)[:-20]


def _none(sent: Sent) -> bytes:
    return message(sent["kind"], sent["job"])


@pytest.mark.parametrize(
    ("lie", "lost"),
    [
        (_as_they_are, 0),
        (_changed, 1),
        (_of_another_model, 1),
        (_of_other_tokens, 0),
        (_of_fewer_tokens, 0),
        (_too_few, 0),
        (_too_many, 0),
        (_far_too_many, 1),
        (_cut_off, 1),
        (_none, 0),
    ],
)
def test_rows_that_are_not_those_of_the_prompt_are_computed(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch, lie: Callable[[Sent], bytes], lost: int
) -> None:
    monkeypatch.setattr(decoding, "PATIENCE", 1.0 if lie is _cut_off else float(SECONDS))
    monkeypatch.setattr(prefilling, "BEAT", 0.1)
    with prefiller(), decoder() as second:
        assert second.core.kv.token_bytes * second.core.kv.prefix_block_tokens < 2**20

        def said(kind: Kind, job: int = 0, **fields: Any) -> bytes:
            return lie({"kind": kind, "job": job, **fields}) if "rows" in fields else message(kind, job)

        monkeypatch.setattr(prefilling, "message", said)
        behind = rest(second, PROMPT)
        used = behind.stop if lie is _as_they_are else behind.start
        assert computed(second, PROMPT) == len(PROMPT) - used
        assert (remote(second).lost, remote(second).row_tokens) == (lost, used - behind.start)
        monkeypatch.setattr(prefilling, "message", message)
        monkeypatch.setattr(decoding, "PATIENCE", float(SECONDS))
        wait_until(lambda: remote(second).prefillers == 1)
        assert computed(second, PROMPTS[-2]) == 1


def test_rows_may_come_in_pieces(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PATIENCE", float(SECONDS))
    done = prefilling.Prefiller._done

    def in_pieces(self: prefilling.Prefiller, writer: asyncio.StreamWriter, *what: Any) -> bytes:
        data = done(self, writer, *what)
        for number, start in enumerate(range(0, len(data), 1 + len(data) // 3)):
            asyncio.get_running_loop().call_later(0.7 * number, writer.write, data[start : start + 1 + len(data) // 3])
        return b""

    monkeypatch.setattr(prefilling.Prefiller, "_done", in_pieces)
    monkeypatch.setattr(prefilling, "BEAT", 2.0 * SECONDS)  # one among the pieces would be no message
    with prefiller(), decoder() as second:
        assert computed(second, PROMPT) == 1


@pytest.mark.parametrize(("module", "limit"), [("prefiller", "_MOST_UNREAD"), ("decoder", "_MOST_ROWS")])
def test_rows_that_would_take_too_much_memory_are_computed(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch, module: str, limit: str
) -> None:
    monkeypatch.setattr(prefilling if module == "prefiller" else decoding, limit, -1)
    with prefiller(), decoder() as second:
        assert computed(second, PROMPT) == len(PROMPT) - rest(second, PROMPT).start
        assert (remote(second).lost, remote(second).row_tokens) == (0, 0)


def test_rows_for_which_there_are_no_pages_are_computed(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prefiller(), decoder() as second:
        prepare, asked = second.core.kv.prepare, []

        def refuse_once(lengths: Any, *rest: Any, **options: Any) -> None:
            asked.append(dict(lengths))
            if len(asked) == 1:
                raise OutOfPages("there is none", missing_pages=1, missing_bytes=4096)
            prepare(lengths, *rest, **options)

        monkeypatch.setattr(second.core.kv, "prepare", refuse_once)
        behind = rest(second, PROMPT)
        assert computed(second, PROMPT) == len(PROMPT) - behind.start
        assert list(asked[0].values()) == [behind.stop]
        assert remote(second).row_tokens == 0


@pytest.mark.parametrize("call", ["copy_out", "copy_in"])
def test_rows_for_which_there_is_no_memory_are_computed(
    broker: brokers.Process, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for a copy")

    with prefiller() as first, decoder() as second:
        monkeypatch.setattr((first if call == "copy_out" else second).core.kv, call, refuse)
        assert computed(second, PROMPT) == len(PROMPT) - rest(second, PROMPT).start
        assert (remote(second).lost, remote(second).row_tokens) == (0, 0)


def test_rows_of_a_request_that_is_aborted_are_dropped(broker: brokers.Process) -> None:
    with prefiller(), decoder() as second:
        holding = remote(second)._lines._holding
        second.add_request("long", {"prompt_token_ids": PROMPT}, GREEDY)
        wait_until(lambda: len(holding) == 1)
        second.abort("long")
        assert not holding
        second.check()
        assert computed(second, PROMPT) == 1
        assert not holding


def test_rows_of_weights_that_may_have_changed_are_not_used(broker: brokers.Process) -> None:
    with prefiller(), decoder() as second:
        second.add_request("long", {"prompt_token_ids": PROMPT}, GREEDY)
        wait_until(lambda: len(remote(second)._lines._holding) == 1)
        second.reset_prefix_cache()
        outputs = []
        while second.core.has_unfinished():
            outputs += second.step()
        assert outputs[-1].outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert outputs[-1].num_cached_tokens == remote(second).row_tokens == 0
    with prefiller() as first, decoder() as second:
        type(first.core).reset_prefix_cache.__wrapped__(first.core)  # type: ignore[attr-defined]
        assert computed(second, PROMPTS[-1]) == len(PROMPT)
        assert remote(second).lost == 1, "it refuses prompts"
        assert not first.core.figures.prompt_tokens


def test_short_prompts_and_those_in_memory_stay(broker: brokers.Process) -> None:
    with prefiller(), decoder() as second:
        assert run(second, SHORT).outputs[0].token_ids == expected("llama", SHORT, MAX_TOKENS)
        assert remote(second).handed == 0
        run(second, PROMPT)
        run(second, PROMPT)
        assert remote(second).handed == 1


def test_a_prompt_whose_salt_is_too_long_to_send_stays(broker: brokers.Process) -> None:
    with prefiller(), decoder() as second:
        assert run(second, PROMPT, cache_salt="x" * (MOST_SALT + 1)).num_cached_tokens == 0
        assert run(second, PROMPT, cache_salt="x").num_cached_tokens
        assert (remote(second).handed, remote(second).lost) == (1, 0)


def test_salts_go_with_prompts(broker: brokers.Process) -> None:
    with prefiller(), decoder() as second:
        assert run(second, PROMPT, cache_salt="eins é").num_cached_tokens
        assert run(second, PROMPT, cache_salt="zwei").num_cached_tokens
        assert remote(second).handed == 2


def test_others_go_on_while_a_prompt_is_computed(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    with prefiller() as first, decoder() as second:
        gate = threading.Event()
        step = first.core.step
        monkeypatch.setattr(first.core, "step", lambda: gate.wait(SECONDS) and step())
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


def test_other_completions_wait_for_the_prompt_that_another_computes(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    with prefiller() as first, decoder(on_step=lambda record: computed.append(record.prefill_tokens)) as second:
        gate = threading.Event()
        step = first.core.step
        monkeypatch.setattr(first.core, "step", lambda: gate.wait(SECONDS) and step())
        computed.clear()
        second.add_request("x", {"prompt_token_ids": PROMPT}, SamplingParams(n=2, temperature=1.0, max_tokens=4))
        outputs = second.step()
        gate.set()
        assert outputs == []
        while second.has_unfinished():
            outputs += second.step()
        second.check()
        assert sum(computed) == len(PROMPT) - outputs[-1].num_cached_tokens < len(PROMPT)
        assert (remote(second).handed, remote(second).lost) == (1, 0)


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
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.engine.test_shared_prefixes import make_llm
from vattn.engine import AsyncEngine
from vattn.engine.roles import prefiller
def fork(*_):
    if pid := os.fork():
        print(pid, file=sys.stderr, flush=True)
    else:
        signal.pause()
signal.signal(signal.SIGUSR1, fork)
async def serve():
    async with AsyncEngine(make_llm(role="prefill")) as engine:
        if "stuck" in sys.argv:
            prefiller._HANGS = 0.5
        if "cut" in sys.argv:
            done = prefiller.Prefiller._done
            def cut(self, writer, *what):
                data = done(self, writer, *what)
                writer.write(data[:len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            prefiller.Prefiller._done = cut
        elif len(sys.argv) > 1:
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


def test_a_child_of_an_engine_that_was_killed_is_no_engine(broker: brokers.Process) -> None:
    """It has neither the socket that the engine listened on nor its connections."""
    with process() as first, decoder() as second:
        first.send_signal(signal.SIGUSR1)
        assert first.stderr is not None
        child = int(first.stderr.readline())
        try:
            first.kill()
            wait_until(lambda: remote(second).prefillers == 0)
            wait_until(lambda: not list(places.folder().glob("*.prefill")))
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_of_an_engine_that_decodes_has_no_connection(broker: brokers.Process) -> None:
    def connected() -> set[str]:
        """The sockets of this process that have the name of a prefiller, at either end."""
        found = set()
        sockets = [each for each in Path("/proc/self/fd").iterdir() if each.is_socket()]
        for each in sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(each.name))) as end:
                names = (end.getsockname(), end.getpeername())
                found |= {str(name) for name in names if str(name).endswith((".prefill", ".early"))}
        return found

    with prefiller(), decoder():
        assert connected()
        assert forks.status(lambda: len(connected())) == 0
        assert connected()


def test_a_fork_leaves_the_sockets_of_its_parent_as_they_are(broker: brokers.Process) -> None:
    before = socket.getdefaulttimeout()
    with prefiller(), decoder(), contextlib.ExitStack() as stack:
        socket.setdefaulttimeout(30)
        stack.callback(socket.setdefaulttimeout, before)
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        for end in ends:
            end.setblocking(True)
        assert forks.status(lambda: socket.getdefaulttimeout() != 30) == 0
        assert all(os.get_blocking(end.fileno()) for end in ends)


def test_an_engine_that_was_stopped_is_asked_again_when_it_goes_on(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "PATIENCE", 0.5)
    with process() as first, decoder() as second:
        first.send_signal(signal.SIGSTOP)
        assert run(second, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert (remote(second).lost, remote(second).prefillers) == (1, 0)
        first.send_signal(signal.SIGCONT)  # it reads at once what it was asked, and that it is wanted no more
        wait_until(lambda: remote(second).prefillers == 1)


def test_rows_that_an_engine_was_sending_when_it_was_killed_are_computed(broker: brokers.Process) -> None:
    with process("cut"), decoder() as second:
        assert computed(second, PROMPT) == len(PROMPT) - rest(second, PROMPT).start
        assert (remote(second).lost, remote(second).row_tokens) == (1, 0)
        second.check()
        wait_until(lambda: remote(second).prefillers == 0)


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
    monkeypatch.setattr(prefilling, "BEAT", 0.1)
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


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ConfigError("the folder cannot be used")])
def test_who_cannot_look_for_engines_looks_again(
    broker: brokers.Process, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail() -> list[Path]:
        failed.set()
        raise error

    with prefiller(), decoder() as second:
        with monkeypatch.context() as failing:
            failing.setattr(remote(second)._lines, "_paths", fail)
            assert failed.wait(SECONDS)
        assert remote(second).prefillers == 1
        with prefiller():
            wait_until(lambda: remote(second).prefillers == 2)


def test_a_socket_listens_before_decoders_can_see_it(tmp_path: Path) -> None:
    path = tmp_path / "some.prefill"
    with contextlib.closing(prefilling._listen(path)), socket.socket(socket.AF_UNIX) as decoder:
        decoder.connect(str(path))
        assert [*tmp_path.iterdir()] == [path]


def test_a_socket_where_nobody_listens_is_removed_at_the_second_look(tmp_path: Path) -> None:
    path = tmp_path / "some.prefill"
    looks = iter([[path]])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        with contextlib.closing(decoding._Lines(lambda: next(looks, []), b"model", 0)) as lines:
            wait_until(lambda: lines._refused)
            listener.listen()
            looks = itertools.repeat([path])
            wait_until(lambda: lines.count == 1)
            listener.close()
            wait_until(lambda: not path.exists())


def test_sockets_of_processes_that_were_killed_before_they_listened_are_removed(tmp_path: Path) -> None:
    left, young = tmp_path / "one.early", tmp_path / "two.early"
    for path in (left, young):
        path.touch()
    os.utime(left, (time.time() - 61,) * 2)
    with contextlib.closing(prefilling._listen(tmp_path / "three.prefill")):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["three.prefill", "two.early"]


def test_a_socket_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "some.prefill"
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be used"):
        prefilling._listen(path)
    assert [*tmp_path.iterdir()] == [path]


def test_prompts_go_to_the_engine_that_has_least_to_do(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts([150, 150, 150, 150], seed=10)
    alone = {str(number): expected("llama", prompt, MAX_TOKENS) for number, prompt in enumerate(prompts)}
    with prefiller() as one, prefiller() as two, decoder(2) as second:
        gate = threading.Event()
        for each in (one, two):
            monkeypatch.setattr(each.core, "step", lambda step=each.core.step: gate.wait(SECONDS) and step())
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


@pytest.mark.parametrize("asleep", [0, 1])
def test_prompts_go_to_an_engine_that_does_not_refuse_them(
    asleep: int, broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that refuses has nothing to do, and would otherwise be asked first."""
    monkeypatch.setattr(decoding, "PATIENCE", SECONDS)  # after which one that has refused is asked again
    gate = threading.Event()
    with prefiller() as one, prefiller() as another, decoder(2) as second:
        first, other = (one, another) if asleep == 0 else (another, one)
        first.core.asleep = True  # as `sleep` has it
        monkeypatch.setattr(other.core, "step", lambda step=other.core.step: gate.wait(SECONDS) and step())
        for number in range(8):
            second.add_request(f"{number}", {"prompt_token_ids": [5 + number, *PROMPT]}, GREEDY)
            if number == 1:  # each of the two was asked once
                wait_until(lambda: remote(second).lost)
        gate.set()
        while second.has_unfinished():
            second.step()
        assert remote(second).lost == 1
        assert other.core.figures.prompt_tokens >= 7 * len(PROMPT)
        first.core.asleep = False


def test_an_engine_whose_model_may_have_changed_takes_no_prompts(broker: brokers.Process) -> None:
    with prefiller() as first, decoder() as second:
        first.core._rows = None  # as `reset_prefix_cache` has it
        assert run(second, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
        assert remote(second).lost == 1
        assert first.core.figures.prompt_tokens == 0


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
            liar.settimeout(SECONDS)
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
        with prefilling._listen(path) as listener:
            listener.settimeout(SECONDS)
            connection, _ = listener.accept()
            connection.settimeout(SECONDS)
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


def test_an_engine_that_gets_no_thread_takes_no_prompts(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its LLM can be used, and closed."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "vattn-engine":
            raise RuntimeError("can't start new thread")
        start(thread)

    llm = make_llm(role="prefill")
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", start_others)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            AsyncEngine(llm)
    assert not list(places.folder().glob("*.prefill"))
    assert run(llm, PROMPT).outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
    llm.close()


def test_nothing_stays_open(broker: brokers.Process) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = held()
    for _ in range(2):
        with prefiller(), decoder() as second:
            run(second, PROMPT)
        wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
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


class Idle:
    """An engine that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def add(self, prompt: Any, sampling_params: Any = None) -> Any:
        raise AssertionError

    async def call(self, function: Callable[[], None]) -> None:
        self.calls += 1

    def abort(self, request_id: str) -> None:
        raise AssertionError


def test_a_decoder_that_comes_as_a_prefiller_ends_leaves_no_socket(tmp_path: Path) -> None:
    """Its connection is accepted, and cancelled before anything of it has run; a socket that is left is an error."""
    path = tmp_path / "prefiller"
    for _ in range(25):
        engine = Idle()
        prefiller = prefilling.Prefiller(path, engine, sharing=b"model", waits=lambda: False, steps=lambda: 0)
        with socket.socket(socket.AF_UNIX) as client:
            wait_until(lambda client=client: client.connect_ex(str(path)) == 0)
            prefiller.close()
    gc.collect()


def test_a_decoder_that_does_not_read_keeps_no_prefiller_from_ending(tmp_path: Path) -> None:
    """Before Python 3.12 the socket was left, which is an error."""
    path, engine, count = tmp_path / "prefiller", Idle(), 2000
    prefiller = prefilling.Prefiller(path, engine, sharing=b"model", waits=lambda: False, steps=lambda: 0)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SECONDS)
        client.connect(str(path))
        client.sendall(message(Kind.DROP, 1) * count)
        wait_until(lambda: engine.calls == count)
        prefiller.close()
    gc.collect()
