"""Prompts of this engine that another one computes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary, finalize

from ..kv.base import KVBackend
from ..requests.request import Request
from .line import PATIENCE, Kind, LineError, message, receive

logger = logging.getLogger(__name__)

LEAST_TOKENS = 64  # that are worth the way to another process
_LOOK = 0.25  # seconds between two looks for prefillers
_WAIT = 0.01  # seconds for which a step waits that has nothing to compute


@dataclass(eq=False)
class _Job:
    """A prompt that was handed over.

    Attributes:
        tokens: how many it has.
        over: a prefiller has computed it, or will not.
    """

    number: int
    tokens: int
    over: bool = False


@dataclass(eq=False)
class _Line:
    """A prefiller.

    Attributes:
        heard: when it said something, or was first asked for what it works on; in the loop's seconds.
        silent: it did not answer in time, and nothing is asked of it until it says something.
    """

    writer: asyncio.StreamWriter
    heard: float
    silent: bool = False
    jobs: dict[int, _Job] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(job.tokens for job in self.jobs.values())


class RemotePrefills:
    """What the requests of one engine have others compute.

    The life of a request: `look_ahead` when it is queued, `is_ready` or `wait` before it is admitted, `forget` at its
    end. A prompt that nobody takes is computed here.

    Args:
        paths: finds the sockets of prefillers, whose blocks this engine can map.

    Attributes:
        handed, lost: prompts that were handed over, and those of them that no prefiller has computed.
    """

    def __init__(self, kv: KVBackend, paths: Callable[[], Iterable[Path]]) -> None:
        self._kv = kv
        self._lines = _Lines(paths)
        self._jobs: WeakKeyDictionary[Request, _Job] = WeakKeyDictionary()
        self._stopped = False
        self._end = finalize(self, self._lines.close)
        self.handed = 0

    @property
    def lost(self) -> int:
        return self._lines.lost

    @property
    def prefillers(self) -> int:
        """Those that are asked now."""
        return self._lines.count

    def stop(self) -> None:
        """Hand over nothing from here on: what others compute may be something else."""
        self._stopped = True

    def close(self) -> None:
        """Idempotent."""
        self._end()

    def look_ahead(self, request: Request) -> None:
        """Have what memory lacks of a waiting request's tokens computed."""
        self.forget(request)
        if self._stopped or not self._lines.count:
            return
        ids = request.token_ids(0, request.num_tokens)
        if len(ids) - self._kv.find(ids, request.cache_salt) < max(LEAST_TOKENS, self._kv.prefix_block_tokens or 0):
            return
        job = self._lines.hand(request.cache_salt, ids)
        if job is not None:
            self._jobs[request] = job
            self.handed += 1

    def is_ready(self, request: Request) -> bool:
        """Whether a request can be admitted: nobody computes its tokens."""
        job = self._jobs.get(request)
        return job is None or job.over

    def wait(self, request: Request) -> bool:
        """Wait until `is_ready`, but not for long; returns whether it is."""
        job = self._jobs.get(request)
        return job is None or self._lines.wait(job)

    def forget(self, request: Request) -> None:
        """Have nothing more computed for a request."""
        job = self._jobs.pop(request, None)
        if job is not None and not job.over:
            self._lines.drop(job)


class _Lines:
    """The connections, and the thread that keeps them."""

    def __init__(self, paths: Callable[[], Iterable[Path]]) -> None:
        self._paths = paths
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._lines: dict[Path, _Line] = {}  # changed by the thread, with the lock
        self.lost = 0
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="vattn-decoder", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        with self._changed:
            return sum(not line.silent for line in self._lines.values())

    def hand(self, salt: bytes, tokens: list[int]) -> _Job | None:
        """Asks the prefiller that has least to do; None if there is none."""
        with self._changed:
            lines = [line for line in self._lines.values() if not line.silent]
            if not lines:
                return None
            line = min(lines, key=lambda line: line.tokens)
            if not line.jobs:
                line.heard = self._loop.time()
            job = _Job(next(self._numbers), len(tokens))
            line.jobs[job.number] = job
        self._write(line, message(Kind.COMPUTE, job.number, salt, tokens))
        return job

    def drop(self, job: _Job) -> None:
        with self._changed:
            line = next((line for line in self._lines.values() if line.jobs.pop(job.number, None)), None)
        if line is not None:
            self._write(line, message(Kind.DROP, job.number))

    def wait(self, job: _Job) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: job.over, _WAIT)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stopped.set)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _write(self, line: _Line, data: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the engine is closed
            self._loop.call_soon_threadsafe(line.writer.write, data)

    # The thread's

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._keep())
        except BaseException:
            logger.exception("prompts are handed over no more")

    async def _keep(self) -> None:
        """Looks for prefillers, and talks to each of them."""
        talks: dict[Path, asyncio.Task[None]] = {}
        while not self._stopped.is_set():
            for path in self._paths():
                if path not in talks:
                    talks[path] = asyncio.ensure_future(self._talk(path))
                    talks[path].add_done_callback(partial(talks.pop, path))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _LOOK)

    async def _talk(self, path: Path) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
        except ConnectionRefusedError:  # of a process that was killed
            path.unlink(missing_ok=True)
            return
        except OSError:
            return
        line = _Line(writer, self._loop.time())
        with self._changed:
            self._lines[path] = line
        try:
            while True:
                await self._hear(reader, line)
        except LineError as error:
            logger.warning("%s: %s", path, error)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            with self._changed:
                del self._lines[path]
                self._give_up(line)
            writer.close()

    async def _hear(self, reader: asyncio.StreamReader, line: _Line) -> None:
        """Takes the next message; gives up what was asked if none comes for long."""
        try:
            async with asyncio.timeout(PATIENCE / 4):
                kind, number, _, _ = await receive(reader, (Kind.DONE, Kind.FAILED, Kind.ALIVE))
        except TimeoutError:
            if line.jobs and self._loop.time() - line.heard > PATIENCE:
                with self._changed:
                    for each in line.jobs:  # it may go on one day
                        line.writer.write(message(Kind.DROP, each))
                    line.silent = True
                    self._give_up(line)
            return
        with self._changed:
            line.heard, line.silent = self._loop.time(), False
            job = line.jobs.pop(number, None)
            if job is not None:
                self._end(job, lost=kind is not Kind.DONE)

    def _give_up(self, line: _Line) -> None:
        for job in line.jobs.values():
            self._end(job, lost=True)
        line.jobs.clear()

    def _end(self, job: _Job, *, lost: bool) -> None:
        job.over = True
        self.lost += lost
        self._changed.notify_all()
