"""Prompts of this engine that another one computes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet, finalize

from vattn.errors import VattnError

from ..kv.base import KVBackend
from ..kv.rows import Rows
from ..requests.request import Request
from .line import MOST_SALT, PATIENCE, Kind, LineError, Message, keep_from_children, message, receive, rest_of

logger = logging.getLogger(__name__)

LEAST_TOKENS = 64  # that are worth the way to another process
_LOOK = 0.25  # seconds between two looks for prefillers
_WAIT = 0.01  # seconds for which a step waits that has nothing to compute
_MOST_ROWS = 1 << 30  # bytes that have come for requests which are not admitted yet


@dataclass(eq=False)
class _Job:
    """A prompt that was handed over.

    Attributes:
        tokens: how many it has.
        rest, rest_ids: which of them fill no block.
        over: a prefiller has computed it, or will not.
        rows: those of the rest, if they came.
    """

    number: int
    tokens: int
    rest: range
    rest_ids: list[int]
    over: bool = False
    rows: bytearray | None = None


@dataclass(eq=False)
class _Line:
    """A prefiller.

    Attributes:
        heard: when it said something, or was first asked for what it works on; in the loop's seconds.
        silent: it did not answer in time, and nothing is asked of it until it says something.
        refused: when it last refused a prompt that it may compute another time; in the loop's seconds.
    """

    writer: asyncio.StreamWriter
    heard: float
    silent: bool = False
    refused: float = -math.inf
    jobs: dict[int, _Job] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(job.tokens for job in self.jobs.values())


class RemotePrefills:
    """What the requests of one engine have others compute.

    The life of a request: `look_ahead` when it is queued, `is_ready` or `wait` before it is admitted, `restore` when it
    has a slot, `forget` at its end. A prompt that nobody takes is computed here.

    Args:
        sharing: the backend's.
        paths: finds the sockets of prefillers, whose blocks this engine can map.

    Attributes:
        handed, lost: prompts that were handed over, and those of them that no prefiller has computed.
        row_tokens: tokens behind whole blocks whose rows came, and were used.
    """

    def __init__(self, kv: KVBackend, rows: Rows, sharing: bytes, paths: Callable[[], Iterable[Path]]) -> None:
        self._kv = kv
        self._rows = rows
        self._lines = _Lines(paths, sharing, kv.prefix_block_tokens * kv.token_bytes)
        self._jobs: WeakKeyDictionary[Request, _Job] = WeakKeyDictionary()
        self._stopped = False
        self._end = finalize(self, self._lines.close)
        self.handed = 0
        self.row_tokens = 0

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
        if self._stopped or not self._lines.count or len(request.cache_salt) > MOST_SALT:
            return
        ids = request.token_ids(0, request.num_tokens)
        if len(ids) - self._kv.find(ids, request.cache_salt, rows=True) < LEAST_TOKENS:
            return
        job = self._lines.hand(request.cache_salt, ids, rest_of(len(ids), self._kv.prefix_block_tokens))
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

    def restore(self, request: Request, slot: int, cached: int) -> int:
        """Put the rows that came into the slot that a request was just admitted to.

        Args:
            cached: tokens that the slot has.

        Returns:
            Tokens that it has then.
        """
        job = self._jobs.pop(request, None)
        if self._stopped or job is None or job.rows is None or not job.rest.start <= cached < job.rest.stop:
            return cached
        start, end = job.rest.start, job.rest.stop
        try:
            self._kv.prepare({slot: end})
            if self._rows.copy_in(self._rows.split(job.rows, slot, start, end), slot, start, end, cached):
                self.row_tokens += end - cached
                return end
            logger.warning("rows that came with a prompt are not those of this model; they are computed")
        except Exception as error:
            logger.warning("rows that came with a prompt are computed: %s", error)
        return cached  # the step that follows computes these tokens, into the same rows

    def forget(self, request: Request) -> None:
        """Have nothing more computed for a request."""
        job = self._jobs.pop(request, None)
        if job is not None and not job.over:
            self._lines.drop(job)


class _Lines:
    """The connections, and the thread that keeps them.

    Args:
        most_rows: bytes that can come with one prompt.
    """

    def __init__(self, paths: Callable[[], Iterable[Path]], sharing: bytes, most_rows: int) -> None:
        self._paths = paths
        self._sharing = sharing
        self._most_rows = most_rows
        self._holding: WeakSet[_Job] = WeakSet()  # jobs whose rows have come
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._lines: dict[Path, _Line] = {}  # changed by the thread, with the lock
        self._refused: set[Path] = set()  # sockets that the last attempt found nobody at
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

    def hand(self, salt: bytes, tokens: list[int], rest: range) -> _Job | None:
        """Asks the prefiller that has least to do, of those that refused nothing lately if there are any; None if there
        is none at all.
        """
        with self._changed:
            lines = [line for line in self._lines.values() if not line.silent]
            if not lines:
                return None
            now = self._loop.time()
            line = min(lines, key=lambda line: (now - line.refused < PATIENCE, line.tokens))
            if not line.jobs:
                line.heard = self._loop.time()
            job = _Job(next(self._numbers), len(tokens), rest, tokens[rest.start : rest.stop])
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
            for path in self._look():
                if path not in talks:
                    talks[path] = asyncio.ensure_future(self._talk(path))
                    talks[path].add_done_callback(partial(talks.pop, path))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _LOOK)

    def _look(self) -> list[Path]:
        """The sockets of prefillers; none while there is no descriptor to look with, or no folder."""
        try:
            return [*self._paths()]
        except (OSError, VattnError):
            return []

    async def _talk(self, path: Path) -> None:
        keep_from_children(path)
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
        except ConnectionRefusedError:
            if path in self._refused:  # of a process that was killed: another one listens by the next look
                path.unlink(missing_ok=True)
            self._refused ^= {path}
            return
        except OSError:
            return
        self._refused.discard(path)
        line = _Line(writer, self._loop.time())
        with self._changed:
            self._lines[path] = line
        watch = asyncio.ensure_future(self._watch(line))
        kinds = (Kind.DONE, Kind.FAILED, Kind.ALIVE)
        try:
            while True:
                self._take(line, await receive(reader, kinds, key=self._sharing, most_rows=self._most_rows))
        except LineError as error:
            logger.warning("%s: %s", path, error)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            watch.cancel()
            with self._changed:
                del self._lines[path]
                self._give_up(line)
            writer.close()

    async def _watch(self, line: _Line) -> None:
        """Gives up what was asked if no message comes for long."""
        while True:
            await asyncio.sleep(PATIENCE / 4)
            if line.jobs and self._loop.time() - line.heard > PATIENCE:
                with self._changed:
                    for each in line.jobs:  # it may go on one day
                        line.writer.write(message(Kind.DROP, each))
                    line.silent = True
                    self._give_up(line)

    def _take(self, line: _Line, came: Message) -> None:
        with self._changed:
            line.heard, line.silent = self._loop.time(), False
            job = line.jobs.pop(came.job, None)
            if came.kind is not Kind.ALIVE:
                line.refused = line.heard if came.kind is Kind.FAILED else -math.inf
            if job is None:
                return
            held = sum(len(each.rows or ()) for each in self._holding)
            if came.rows and came.tokens == job.rest_ids and held + len(came.rows) <= _MOST_ROWS:
                job.rows = came.rows
                self._holding.add(job)
            self._end(job, lost=came.kind is not Kind.DONE)

    def _give_up(self, line: _Line) -> None:
        for job in line.jobs.values():
            self._end(job, lost=True)
        line.jobs.clear()

    def _end(self, job: _Job, *, lost: bool) -> None:
        job.over = True
        self.lost += lost
        self._changed.notify_all()
