"""`Stream`: the outputs of one request, for one task of an event loop; `as_they_come`: those of many."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from vattn.errors import VattnError

from .requests.outputs import RequestGroup, RequestOutput, merged
from .requests.sampling import RequestOutputKind

# Outputs of a stream that wait one by one.
_MOST_WAITING = 64


@dataclass(eq=False)
class Waiting:
    """What waits for the readers of streams that were added together.

    Attributes:
        logprobs: in the outputs that wait, alternatives included.
    """

    logprobs: int = 0


class Stream:
    """The outputs of one request, as an async iterator that ends after the finished one. One task may read it.

    Outputs that nobody takes are put together, so that they take little more memory than their tokens.

    Attributes:
        waiting: what waits in this stream, and in those that share it.
    """

    def __init__(self, group: RequestGroup, waiting: Waiting | None = None) -> None:
        self.request_id = group.request_id
        self.group = group
        self.loop = asyncio.get_running_loop()
        self.waiting = waiting or Waiting()
        self._outputs: deque[RequestOutput] = deque()
        self._error: Exception | None = None
        self._on_news: Callable[[], None] | None = None
        self._finished = False
        self._is_awaited = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        while not self._outputs:
            if self._error is not None:
                self._finished = True
                raise self._error
            if self._is_awaited:
                raise VattnError(f"another task waits for {self.request_id!r}; one task may read a stream")
            news = asyncio.Event()
            self._on_news = news.set
            self._is_awaited = True
            try:
                await news.wait()
            finally:
                self._is_awaited = False
        output = self._outputs.popleft()
        self.waiting.logprobs -= _logprobs_of(output)
        self._finished = output.finished
        return output

    async def ready(self) -> list[RequestOutput]:
        """Waits for the next output and returns it with those that have come meanwhile; empty after the finished one.

        For readers that can write several outputs at once.
        """
        if self._finished:
            return []
        outputs = [await anext(self)]
        while self._outputs:
            outputs.append(await anext(self))
        return outputs

    def put(self, output: RequestOutput | Exception) -> None:
        """Called in the event loop; an error ends the stream after the outputs that wait."""
        if isinstance(output, Exception):
            self._error = output
        else:
            self._outputs.append(output)
            self.waiting.logprobs += _logprobs_of(output)
            if len(self._outputs) > _MOST_WAITING:
                together = merged(self._outputs) if self.group.kind is RequestOutputKind.DELTA else output
                self.waiting.logprobs += _logprobs_of(together) - sum(map(_logprobs_of, self._outputs))
                self._outputs.clear()
                self._outputs.append(together)
        if self._on_news is not None:
            self._on_news()

    @property
    def has_news(self) -> bool:
        """Whether `ready` has something to return or to raise without waiting."""
        return not self._finished and (bool(self._outputs) or self._error is not None)

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Have this called whenever something is put, and now, if there is news; None ends that."""
        self._on_news = on_news
        if on_news is not None and self.has_news:
            on_news()


async def as_they_come(streams: Sequence[Stream], most: int) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    """The outputs of these streams, each with the number of its stream, in parts of up to `most` streams.

    One task reads all of them, however many they are. While it does not, outputs wait in their streams.

    Raises:
        EngineStopped: as the streams, after what waited in all of them.
    """
    waiting: dict[int, None] = {}  # streams with news, in order of their coming
    news = asyncio.Event()

    def tell(number: int) -> None:
        waiting[number] = None
        news.set()

    unfinished = len(streams)
    failure: VattnError | None = None
    try:
        for number, stream in enumerate(streams):
            stream.listen(functools.partial(tell, number))
        while unfinished:
            await news.wait()
            batch: list[tuple[int, RequestOutput]] = []
            for number in list(itertools.islice(waiting, most)):
                try:
                    outputs = await streams[number].ready()
                except VattnError as error:
                    outputs, failure = [], error
                if not streams[number].has_news:  # an error may follow
                    del waiting[number]
                unfinished -= bool(outputs) and outputs[-1].finished
                batch += ((number, output) for output in outputs)
            if not waiting:
                news.clear()
            if batch:
                yield batch
            if failure is not None and not waiting:
                raise failure
    finally:
        for stream in streams:
            stream.listen(None)


def _logprobs_of(output: RequestOutput) -> int:
    return sum(len(report) for completion in output.outputs for report in completion.logprobs or ())
