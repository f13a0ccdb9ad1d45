"""The engine for many clients at once: asyncio outside, one engine thread inside.

    engine = AsyncEngine(LLM("path/or/hub-id"), max_num_queued_reqs=256)
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
        print(output.outputs[0].text, end="")
    await engine.shutdown()

Only the engine thread touches queues, cache and model. Clients pass it requests under a lock, and it passes outputs to
the event loops of its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from transformers import PreTrainedTokenizerBase

from vattn.broker.places import prefiller_path
from vattn.errors import ConfigError, VattnError
from vattn.integers import shown

from .absent import absent
from .checks import checked_whole, number
from .core import EngineCore
from .exclusive import EngineClosed
from .metrics import Metric
from .requests.intake import as_params, refuse_lora
from .requests.outputs import RequestOutput
from .requests.prompts import Prompt
from .requests.request import InvalidRequest, check_request_id
from .requests.sampling import RequestOutputKind, SamplingParams
from .roles.prefiller import Prefiller
from .streams import Stream, Waiting

if TYPE_CHECKING:
    from .llm import LLM

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
# Threads that compile grammars: a client that sends slow ones keeps no other client's prompt waiting.
_GRAMMAR_THREADS = 2
# How long an idle engine that has a request waits for those that are announced.
_GATHER_SECONDS = 0.02

# What ends the announcement of the task's request.
_announced: ContextVar[Callable[[], None] | None] = ContextVar("_announced", default=None)


class QueueFull(VattnError):
    """The engine has reached its limit of unfinished requests; this one was not accepted. Try again later."""


class EngineStopped(VattnError, RuntimeError):
    """The engine takes no requests: it was shut down, or died of the error that is the cause of this one."""


class AsyncEngine:
    """Serves requests of any number of tasks and event loops.

    Invariant, under the lock: `_streams` has every request that has not ended; each of them is either in `_arriving` or
    in the core.

    Args:
        llm: an LLM, or the core of one: used by this engine alone from here on; `shutdown` closes it.
        max_num_queued_reqs: maximum number of requests beyond the `max_num_seqs` that can run; None for no limit. Each
            of `n` completions counts.
        max_waiting_logprobs: requests that were added together are aborted when more log probabilities than these wait
            in their streams, since they take hundreds of bytes each; None for no limit.

    Attributes:
        core: the loop underneath, for functions that `call` runs.

    Raises:
        ConfigError: a negative limit, or an LLM that has unfinished requests.
        EngineBusy: a thread, or another AsyncEngine, uses the LLM.
        EngineClosed: it is closed.
    """

    def __init__(
        self, llm: LLM | EngineCore, *, max_num_queued_reqs: int | None = None, max_waiting_logprobs: int | None = None
    ) -> None:
        self.max_num_queued_reqs = _checked_limit("max_num_queued_reqs", max_num_queued_reqs)
        self._max_waiting_logprobs = _checked_limit("max_waiting_logprobs", max_waiting_logprobs)
        core = getattr(llm, "core", llm)
        if not isinstance(core, EngineCore):
            raise ConfigError(f"llm is {shown(llm)}; give an LLM")
        self.core = core
        self._names = itertools.count()
        self._changed = threading.Condition()
        self._streams: dict[str, Stream] = {}
        self._arriving: list[Stream] = []
        self._aborting: list[Stream] = []
        self._delivering: list[tuple[Stream, RequestOutput]] = []
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._on_their_way = 0  # requests that are announced
        self._grammar_threads = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="vattn-grammar")
        self._ended = False
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="vattn-engine", daemon=True)
        self._prefiller: Prefiller | None = None
        core.lend(self._thread, type(self).__name__, self._wake)
        try:
            if core.has_unfinished():
                raise ConfigError(
                    "the LLM has unfinished requests, whose outputs would be lost; finish or abort them first"
                )
            self._prefiller = _make_prefiller(self)
            self._thread.start()
        except BaseException:
            if not self._thread.is_alive():  # one that runs, after an interrupt, ends with the LLM
                if self._prefiller is not None:
                    self._prefiller.close()
                core.end_loan(self._thread)
            raise
        # Finalizers run newest first, so this one before those of the caches, which must not be closed during a step.
        weakref.finalize(core, _stop, weakref.ref(self))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            absent(self, name)

    def _wake(self) -> None:
        if self._thread.is_alive():  # it is not in a fork, where its copy may hold the lock for ever
            with self._changed:
                self._changed.notify()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown(timeout=0)

    @property
    def dead(self) -> bool:
        """Whether the engine thread ended by an error."""
        return self._error is not None

    @property
    def stopped(self) -> bool:
        """Whether the engine thread has ended, by `shutdown` or by an error."""
        return self._ended

    @property
    def num_unfinished(self) -> int:
        """Waiting and running requests; each of `n` completions counts."""
        with self._changed:
            # One of each stream counts until its last output is delivered, which leaves the name to others.
            return sum(len(stream.group.unfinished()) or 1 for stream in self._streams.values())

    async def call(self, function: Callable[[], _T]) -> _T:
        """What `function` returns or raises, on the engine thread between two steps, where it may use the LLM, but not
        add requests to it or step it. The stream of a request that it aborts ends.

        Raises:
            EngineStopped: the engine was shut down, or died.
        """
        future: Future[_T] = Future()
        with self._changed:
            if self._ended:
                raise EngineStopped("the engine was shut down") if self._error is None else _stopped(self._error)
            self._calls.append((function, future))
            self._changed.notify()
        return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def announce(self) -> Iterator[None]:
        """Announces a request that the task will add within the context. An idle engine waits for it for up to 20 ms
        if another one has come: prompts that are computed one after the other delay the tokens of all before them.
        """
        ended = False

        def end() -> None:
            nonlocal ended
            with self._changed:
                self._on_their_way -= not ended
                ended = True
                self._changed.notify()

        with self._changed:
            self._on_their_way += 1
        reset = _announced.set(end)
        try:
            yield
        finally:
            end()
            _announced.reset(reset)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one prompt and stream its outputs; leaving the loop early, or cancelling its task, aborts the request.

        Arguments, outputs and errors are as for `add`.
        """
        stream = await self.add(prompt, sampling_params, request_id, lora_request=lora_request, priority=priority)
        try:
            async for output in stream:
                yield output
        finally:
            self._abort([stream])

    async def add(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> Stream:
        """Queue a request; to leave its stream early, `abort` it.

        Outputs are deltas, unless `output_kind` says otherwise. The last one is finished, and says whether the request
        was aborted or failed.

        Args:
            request_id: a name that no unfinished request has, for `abort`; None for a generated one.
            lora_request: None: adapters are not served.
            priority: lower runs earlier, where the LLM's `scheduling_policy` is "priority".

        Raises:
            InvalidRequest: as `LLM.add_request`; or more completions at once than `max_num_queued_reqs` ever admits.
            QueueFull: see `max_num_queued_reqs`; of several completions none was accepted.
            EngineStopped: the engine was shut down, or died. The stream raises it too.
        """
        refuse_lora(lora_request)
        name = self._new_name("async") if request_id is None else request_id
        check_request_id(name)
        (stream,) = await self._add({name: prompt}, sampling_params, priority)
        return stream

    async def add_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        prefix: str = "async",
        priority: int = 0,
    ) -> list[Stream]:
        """Queue several requests, all of them or none; one stream for each prompt, in order.

        Arguments and errors are as for `add`.

        Args:
            prefix: what the names of the requests begin with; a dash and a number follow.
        """
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise InvalidRequest(f"prompts is {shown(prompts)}; give a list of prompts, or call add() for one")
        named = {self._new_name(prefix): prompt for prompt in prompts}
        return await self._add(named, sampling_params, priority)

    def _new_name(self, prefix: str) -> str:
        """A name that no unfinished request has."""
        return next(name for number in self._names if (name := f"{prefix}-{number}") not in self._streams)

    async def _add(
        self, prompts: Mapping[str, Prompt], sampling_params: SamplingParams | None, priority: int
    ) -> list[Stream]:
        params = self.get_default_sampling_params() if sampling_params is None else as_params(sampling_params)
        kind = params.output_kind or RequestOutputKind.DELTA
        count = params.n * len(prompts)
        make = self.core.make_groups
        with self._changed:
            self._check_room(prompts, count)
        # Tokenizing a long prompt takes longer than the event loop should wait.
        try:
            loop = asyncio.get_running_loop()
            waits = params.structured_outputs is not None and not await loop.run_in_executor(
                None, self.core.intake.has_grammar, params
            )
            try:
                making = loop.run_in_executor(
                    self._grammar_threads if waits else None,
                    lambda: make(prompts, params, kind=kind, priority=priority),
                )
            except RuntimeError:  # the threads ended meanwhile
                with self._changed:
                    self._check_room(prompts, count)
                raise
            groups = await making
        except EngineClosed as error:
            raise _stopped(error) from error
        waiting = Waiting()
        streams = [Stream(group, waiting) for group in groups]
        with self._changed:
            self._check_room(prompts, count)
            for stream in streams:
                self._streams[stream.request_id] = stream
            self._arriving += streams
            self._changed.notify()
        if (end_announcement := _announced.get()) is not None:
            end_announcement()
        return streams

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests soon; each stream gets a last output. No effect if a name is unknown.

        Raises:
            InvalidRequest: a name is no text; none of the requests ends.
        """
        if isinstance(request_id, bytes) or not isinstance(request_id, Iterable):
            raise InvalidRequest(
                f"request_id is {shown(request_id)}; give text, or a list of names", param="request_id"
            )
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        for name in names:
            check_request_id(name)
        with self._changed:
            known = [self._streams[name] for name in names if name in self._streams]
            self._aborting += known
            if known:
                self._changed.notify()

    async def shutdown(self, *, timeout: float | None = None) -> None:
        """Refuse new requests, let the others finish, stop the thread and close the LLM. Idempotent.

        Args:
            timeout: seconds after which unfinished requests are aborted; None to wait for all of them, 0 for none.
        """
        if timeout is not None and (number(timeout) is None or timeout < 0):
            raise ConfigError(f"timeout is {shown(timeout)}; give seconds, 0 or more, or None to wait for all requests")
        with self._changed:
            self._stopping = True
            self._changed.notify()
        most = threading.TIMEOUT_MAX  # a few centuries
        await asyncio.to_thread(self._thread.join, None if timeout is None else min(timeout, most))
        with self._changed:
            streams = list(self._streams.values())
        self._abort(streams)
        await asyncio.to_thread(self._thread.join)
        self._grammar_threads.shutdown(wait=False)
        self.core.close()

    async def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """As `LLM.get_tokenizer`."""
        return self.core.loaded.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """As `LLM.get_default_sampling_params`."""
        return self.core.loaded.sampling_params

    async def get_metrics(self) -> list[Metric]:
        """As `LLM.get_metrics`, between two steps.

        Raises:
            EngineStopped: the engine was shut down, or died.
        """
        return await self.call(self.core.get_metrics)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As `LLM.reset_prefix_cache`, between two steps; prefixes on disk and of other engines stay.

        Raises:
            EngineStopped: the engine was shut down, or died.
        """
        return await self.call(functools.partial(self.core.reset_prefix_cache, reset_running_requests))

    async def sleep(self, level: int = 1) -> int:
        """As `LLM.sleep`, between two steps; requests are accepted and wait, up to `max_num_queued_reqs`.

        Raises:
            ConfigError: as `LLM.sleep`.
            EngineStopped: the engine was shut down, or died.
        """
        return await self.call(functools.partial(self.core.sleep, level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """As `LLM.wake_up`; a `shutdown` wakes the engine up, too, to finish what waits.

        Raises:
            ConfigError: as `LLM.wake_up`.
            EngineStopped: the engine was shut down, or died.
        """
        return await self.call(functools.partial(self.core.wake_up, tags))

    async def is_sleeping(self) -> bool:
        """As `LLM.is_sleeping`."""
        return self.core.asleep

    def _check_room(self, names: Collection[str], count: int) -> None:
        """Raise unless `count` requests may come under these names; with the lock held."""
        if self._error is not None:
            raise _stopped(self._error)
        if self._stopping:
            raise EngineStopped("the engine is shutting down and takes no requests")
        if taken := [name for name in names if name in self._streams]:
            raise InvalidRequest(
                f"a request {taken[0]!r} is unfinished; choose another name, or abort it first", param="request_id"
            )
        if self.max_num_queued_reqs is None:
            return
        running = self.core.scheduler.max_num_seqs
        limit = running + self.max_num_queued_reqs
        if count > limit:
            raise InvalidRequest(
                f"{count} requests at once are over the limit of {limit}: {running} that run and "
                f"{self.max_num_queued_reqs} that wait; ask for fewer prompts or completions at once"
            )
        unfinished = self.num_unfinished
        if unfinished + count > limit:
            raise QueueFull(
                f"{count} more requests with {unfinished} unfinished are over the limit of {limit}: "
                f"{running} that run and {self.max_num_queued_reqs} that wait; try again later"
            )

    def _abort(self, streams: Iterable[Stream]) -> None:
        with self._changed:
            self._aborting += streams
            self._changed.notify()

    def _run(self) -> None:
        """The engine thread."""
        try:
            while self._take_orders():
                if self._has_work():
                    self._deliver(self.core.step())
        except BaseException as error:
            if not isinstance(error, EngineClosed):
                logger.critical("the engine died", exc_info=error)
            with self._changed:
                self._error = error
                streams = {*self._streams.values(), *(stream for stream, _ in self._delivering)}
                for request in (request for stream in self._streams.values() for request in stream.group.requests):
                    self.core.figures.ended(request)
                self._streams.clear()
                self._arriving.clear()
            self._hand_over([(stream, _stopped(error)) for stream in streams])
        finally:
            if self._prefiller is not None:
                self._prefiller.close()
            with self._changed:
                self._ended = True
                calls, self._calls = self._calls, []
            for _, future in calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineStopped("the engine was shut down before it came to this call"))
            self.core.end_loan(self._thread)

    def _take_orders(self) -> bool:
        """Wait for work and take what clients asked for; False when all is done and the engine is stopping."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._arriving
                    or self._aborting
                    or self._calls
                    or self._stopping
                    or self.core.closing
                    or self._has_work()
                )
            )
            if self._arriving and not self._has_work():
                self._changed.wait_for(lambda: not self._on_their_way or self.core.closing, _GATHER_SECONDS)
            if self.core.closing:
                raise EngineClosed("the LLM was closed")
            arriving, self._arriving = self._arriving, []
            # The name may belong to another request by now.
            aborting = [stream for stream in self._aborting if self._streams.get(stream.request_id) is stream]
            self._aborting = []
            stopping = self._stopping
        for stream in arriving:
            self.core.add_group(stream.group)
        aborted = (self.core.abort(stream.request_id) for stream in dict.fromkeys(aborting))
        self._deliver([output for output in aborted if output is not None])
        while self._calls:  # one by one, so that an error before leaves the others to `_run`, which ends them
            with self._changed:
                function, future = self._calls.pop(0)
            _answer(function, future)
            self._deliver([])
        if stopping:
            self.core.wake_up()
        return self.core.has_unfinished() or not stopping

    def _has_work(self) -> bool:
        return self.core.has_unfinished() and not self.core.asleep

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand over these outputs, and the last ones of requests that a call, or `on_step`, has aborted."""
        with self._changed:
            ended = sum(output.finished for output in outputs)
            if len(self._streams) - len(self._arriving) - ended > self.core.num_groups:
                there = {*self._arriving, *(self._streams[output.request_id] for output in outputs)}
                lost = [stream for stream in self._streams.values() if stream not in there]
                last = [stream.group.output() for stream in lost if not stream.group.unfinished()]
                outputs = [*outputs, *(output for output in last if output is not None)]
            # Kept until they are handed over, so that an error on the way reaches these streams, too.
            self._delivering = [(self._streams[output.request_id], output) for output in outputs]
            for output in outputs:
                if output.finished:
                    del self._streams[output.request_id]
        self._hand_over(self._delivering)
        self._delivering = []

    def _hand_over(self, items: Iterable[tuple[Stream, RequestOutput | EngineStopped]]) -> None:
        """Put outputs into their streams, with one call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput | EngineStopped]]] = {}
        for item in items:
            by_loop.setdefault(item[0].loop, []).append(item)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._put_all, batch)
            except RuntimeError:  # the loop is closed: nobody will read these streams
                self._abort(stream for stream, _ in batch)
        if by_loop:
            # A loop that waits for this core would otherwise have it at the kernel's next tick, up to 4 ms later.
            os.sched_yield()

    def _put_all(self, batch: list[tuple[Stream, RequestOutput | EngineStopped]]) -> None:
        """Called in the event loop of these streams."""
        for stream, output in batch:
            stream.put(output)
        most = self._max_waiting_logprobs
        if most is not None and (full := {stream.waiting for stream, _ in batch if stream.waiting.logprobs > most}):
            with self._changed:
                self._abort([stream for stream in self._streams.values() if stream.waiting in full])


def _make_prefiller(engine: AsyncEngine) -> Prefiller | None:
    core = engine.core
    config, kv = core.config, core.kv
    if config.role != "prefill" or config.kv_pool is None or kv.sharing is None:
        return None
    return Prefiller(
        prefiller_path(config.kv_pool, kv.sharing),
        engine,
        sharing=kv.sharing,
        waits=lambda: kv.publishing,
        steps=lambda: None if core.asleep or not core.publishes_prompts else core.figures.steps,
    )


def _checked_limit(name: str, limit: int | None) -> int | None:
    return None if limit is None else checked_whole(name, limit, 0, what="0 or more, or None for no limit")


def _answer(function: Callable[[], _T], future: Future[_T]) -> None:
    """Run a function for whoever waits for the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # the engine dies of it
        future.set_exception(_stopped(error))
        raise
    else:
        future.set_result(result)


def _stopped(error: BaseException) -> EngineStopped:
    what = "its LLM was closed" if isinstance(error, EngineClosed) else f"it died of {type(error).__name__}: {error}"
    stopped = EngineStopped(f"the engine stopped: {what}; start a new one")
    stopped.__cause__ = error
    return stopped


def _stop(engine: weakref.ref[AsyncEngine]) -> None:
    """At the interpreter's exit: end the thread, which would otherwise use memory that is being freed."""
    running = engine()
    if running is not None and running._thread.is_alive():
        running.core.close()
