"""A prefiller: takes prompts of other engines, and has its own compute and publish them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from vattn.broker.places import credentials
from vattn.errors import ConfigError, VattnError

from ..kv.rows import contents
from ..requests.outputs import RequestGroup, RequestOutput
from ..requests.prompts import Prompt
from ..requests.request import FinishReason, Rest
from ..requests.sampling import SamplingParams
from .line import BEAT, Kind, LineError, early, keep_from_children, message, receive

logger = logging.getLogger(__name__)

_ONLY_THE_PROMPT = SamplingParams(max_tokens=0, temperature=0, detokenize=False)
_GLANCE = 0.001  # seconds between two looks whether a prompt is published
_HANGS = 60.0  # seconds without the end of a step after which an engine hangs: large models take long for one
_LEFT = 60.0  # seconds after which a socket that is not listened to yet was left by a process that was killed
_PUBLISHING = 1.0  # seconds after which nobody waits for that any more
_MOST_UNREAD = 1 << 28  # bytes that a decoder has not taken, after which it is sent no rows


class Computing(Protocol):
    """A request, as a prefiller uses it (`Stream`)."""

    request_id: str
    group: RequestGroup

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...


class Computes(Protocol):
    """An engine, as a prefiller uses it (`AsyncEngine`)."""

    async def add(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Computing: ...

    def abort(self, request_id: str) -> None: ...

    async def call(self, function: Callable[[], None]) -> None: ...


class Prefiller:
    """Takes prompts until `close`, in a thread of its own.

    Args:
        path: of its socket.
        engine: computes the prompts. It is not kept alive.
        sharing: what it has in common with engines that can use what it computes.
        waits: whether blocks that were computed are still to be published.
        steps: grows as long as the engine works; None while it does not, because it sleeps or shares nothing more.

    Raises:
        ConfigError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        engine: Computes,
        *,
        sharing: bytes,
        waits: Callable[[], bool],
        steps: Callable[[], int | None],
    ) -> None:
        self._path = path
        self._engine = weakref.ref(engine)
        self._sharing = sharing
        self._waits, self._steps = waits, steps
        self._listener = _listen(path)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stopped = asyncio.Event()
        self._talks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="vattn-prefiller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more; who waits is told at once. Idempotent."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._serve())
        except BaseException:
            logger.exception("prompts of other engines are taken no more")
        finally:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(self._meet, sock=self._listener)
        async with server:
            await self._stopped.wait()
            for talk in self._talks:
                talk.cancel()
            # What has just been accepted would stay open if its task were cancelled, or the server closed before it.
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)

    def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped.is_set():
            writer.close()
            return
        talk = asyncio.ensure_future(self._talk(reader, writer))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)
        # Also of one that is cancelled before it begins. A close would wait until the decoder has read all, and from
        # Python 3.12 on the end of the server would wait for that.
        talk.add_done_callback(lambda _: writer.transport.abort())

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one decoder until it ends, with which its jobs do."""
        jobs: dict[int, asyncio.Task[None]] = {}
        others: set[asyncio.Task[None]] = set()
        beats = asyncio.ensure_future(self._beat(writer, jobs))
        try:
            mine = credentials(writer.get_extra_info("socket"))[1] == os.getuid()
            while mine:
                came = await receive(reader, (Kind.COMPUTE, Kind.DROP))
                job = came.job
                if came.kind is Kind.DROP:
                    if job in jobs:
                        jobs[job].cancel()
                    others.add(answer := asyncio.ensure_future(self._say_that_it_works(writer)))
                    answer.add_done_callback(others.discard)
                elif job in jobs:
                    raise LineError("a job that is there already")
                else:
                    jobs[job] = asyncio.ensure_future(self._compute(writer, job, came.salt.decode(), came.tokens))
                    jobs[job].add_done_callback(partial(jobs.pop, job))
        except (LineError, UnicodeDecodeError) as error:
            logger.warning("an engine said what is no message: %s", error)
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):  # it has ended, or this engine does
            pass
        finally:
            beats.cancel()
            for task in [*jobs.values(), *others]:
                task.cancel()

    async def _compute(self, writer: asyncio.StreamWriter, job: int, salt: str, tokens: list[int]) -> None:
        answer = message(Kind.FAILED, job)
        engine = self._engine()
        try:
            if engine is not None and self._steps() is not None:
                stream = await engine.add({"prompt_token_ids": tokens, "cache_salt": salt}, _ONLY_THE_PROMPT)
                try:
                    async for output in stream:
                        if output.finished and output.outputs[0].finish_reason == FinishReason.LENGTH:
                            await self._published()
                            answer = self._done(writer, job, stream.group.requests[0].rest)
                finally:
                    engine.abort(stream.request_id)
        except VattnError as error:  # it is full, or such a prompt does not fit
            logger.info("a prompt of another engine was not computed: %s", error)
        except Exception:
            logger.exception("a prompt of another engine was not computed")
        writer.write(answer)

    def _done(self, writer: asyncio.StreamWriter, job: int, rest: Rest | None) -> bytes:
        if rest is None or writer.transport.get_write_buffer_size() > _MOST_UNREAD:
            return message(Kind.DONE, job)
        return message(Kind.DONE, job, tokens=rest.tokens, rows=contents(rest.rows), key=self._sharing)

    async def _published(self) -> None:
        end = self._loop.time() + _PUBLISHING
        while self._waits() and self._loop.time() < end:
            await asyncio.sleep(_GLANCE)

    async def _say_that_it_works(self, writer: asyncio.StreamWriter) -> None:
        """Says so as soon as the engine does: a decoder that gave up waiting asks nothing until it hears something."""
        engine = self._engine()
        with contextlib.suppress(VattnError):  # it ends
            if engine is not None:
                await engine.call(lambda: None)
                writer.write(message(Kind.ALIVE))

    async def _beat(self, writer: asyncio.StreamWriter, jobs: dict[int, asyncio.Task[None]]) -> None:
        """Says that jobs are worked on, as long as they are."""
        before, since = self._steps(), self._loop.time()
        while True:
            await asyncio.sleep(BEAT)
            steps, now = self._steps(), self._loop.time()
            if not jobs or steps != before:
                before, since = steps, now
            if jobs and steps is not None and now - since < _HANGS:
                writer.write(message(Kind.ALIVE))


def _listen(path: Path) -> socket.socket:
    """A socket that listens by the time its path is there: decoders remove one that refuses them twice, as of a process
    that was killed.
    """
    for left in path.parent.glob("*.early"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT:
                left.unlink()
    keep_from_children(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = early(path)
    try:
        listener.bind(str(name))
        name.chmod(0o700)
        listener.listen()
        name.rename(path)
    except OSError as error:
        listener.close()
        name.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be used for prompts of other engines: {error}") from error
    return listener
