"""Fences: what the unmapping of a slot's pages has to wait for, so that no kernel still reads them.

Kernels run asynchronously, so when a request ends on the caller's side, its last kernels may still read its pages.
`free_reqid` records an event on the stream of those kernels; the worker waits for the event before it unmaps pages of
that slot. A request that reuses the slot and its parked pages does not wait: its kernels follow the old ones in stream
order, which callers that use several streams see to.

A step is prepared before its kernels are launched. If a request ends in between, an event recorded then does not cover
the kernels that are still to be launched. So a freed slot is *open* until the next step begins: by then the kernels of
the previous step have been launched, the event is recorded again, and only then may the slot's pages be unmapped.

A cache that is closed or dropped waits for the whole context, because kernels on any stream may read its pages. While
a stream captures a CUDA graph, that is not possible: it would invalidate the capture. Then `close` is refused, and the
pages of a dropped cache are given back later (`Core.take_back`).

On the host, kernels finish before their calls return: there are no streams, hence no fences, and no slot is ever open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager

from vattn import _native
from vattn.drivers import MemoryDriver, Stream
from vattn.errors import ConfigError, StreamCapturing
from vattn.integers import shown
from vattn.pool.journal import Change


class Fences:
    """The fences of one cache's slots; used under the pool's lock."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._events: dict[int, dict[int, _native.Event]] = {}  # by slot and stream: the latest event
        self._open: dict[int, int] = {}  # slots freed since the last step began, with the stream of their kernels

    def handle(self, stream: Stream | None) -> int | None:
        """The handle of a stream, by default torch's current one; None on devices without streams.

        Raises:
            ConfigError: it is no stream.
        """
        if not (stream is None or isinstance(stream, int) or hasattr(stream, "cuda_stream")):
            raise ConfigError(f"stream={shown(stream)} is neither a stream of torch's nor the handle of one")
        return self._driver.device.stream_handle(stream)

    def on_stream(self, handle: int | None) -> AbstractContextManager[None]:
        """Makes the stream torch's current one within the context, for copies that its fences are to cover."""
        return self._driver.device.on_stream(handle)

    def capturing(self, handle: int | None) -> bool:
        """Whether the stream is capturing a CUDA graph; then memory must not change and no fence can be set."""
        return handle is not None and self._driver.native.capturing(handle)

    def uncaptured(self, stream: Stream | None, doing: str) -> int | None:
        """The handle of a stream that is not capturing a graph.

        Args:
            stream: as in `handle`.
            doing: the operation that is not allowed during capture, for the error message.

        Raises:
            ConfigError: it is no stream.
            StreamCapturing: the stream is capturing a graph.
        """
        handle = self.handle(stream)
        if self.capturing(handle):
            raise refusal(doing)
        return handle

    def freed(self, slot: int, handle: int | None) -> None:
        """Fences a slot whose request has ended and whose kernels are on this stream."""
        if handle is not None:
            self._set(slot, handle, self._driver.native.record(handle))
            self._open[slot] = handle

    def ended(self, slots: Collection[int], handle: int | None) -> None:
        """Fences slots whose kernels, on this stream, have all been launched."""
        if handle is not None and slots:
            event = self._driver.native.record(handle)
            for slot in slots:
                self._set(slot, handle, event)

    def launched(self) -> bool:
        """Notes that the kernels of all steps so far have been launched: records events for open slots and closes them.

        Slots on a stream that is capturing a graph stay open: an event recorded there would become part of the graph.

        Returns:
            Whether any slot was closed.
        """
        before = len(self._open)
        for handle in set(self._open.values()):
            if not self.capturing(handle):
                event = self._driver.native.record(handle)
                for slot in [slot for slot, on in self._open.items() if on == handle]:
                    self._set(slot, handle, event)
                    del self._open[slot]
        return len(self._open) < before

    def is_open(self, slot: int) -> bool:
        """Whether kernels that use the slot may not be launched yet."""
        return slot in self._open

    @property
    def open_slots(self) -> Iterable[int]:
        """The open slots."""
        return self._open

    def passed(self, slot: int) -> bool:
        """Whether the slot's pages can be unmapped without waiting."""
        if slot in self._open:
            return False
        events = self._events.get(slot)
        if events and all(event.done() for event in events.values()):
            del self._events[slot]
            return True
        return not events

    def guard(self, change: Change, slot: int) -> None:
        """Makes the rest of the transaction wait for the slot's fences."""
        assert slot not in self._open, "planned to unmap pages of a slot whose kernels may not be launched yet"
        for event in self._events.get(slot, {}).values():
            change.transaction.wait_for(event)

    def guard_running(self, change: Change, handle: int | None) -> None:
        """Makes the rest of the transaction wait for all kernels launched on the stream so far."""
        if handle is not None:
            change.transaction.wait_for(self._driver.native.record(handle))

    def _set(self, slot: int, handle: int, event: _native.Event) -> None:
        """Replaces the slot's event of this stream, which it covers, and drops completed events of other streams."""
        events = self._events.setdefault(slot, {})
        for other in [stream for stream, earlier in events.items() if earlier.done()]:
            del events[other]
        events[handle] = event


def refusal(doing: str) -> StreamCapturing:
    """The error for an operation that is not allowed during graph capture."""
    return StreamCapturing(
        f"{doing} while the stream captures a CUDA graph: memory does not change in stream order, and a replay would "
        "not repeat it; before the capture, call step with the longest lengths that the graph will see; free requests "
        "after it"
    )


def any_capturing(driver: MemoryDriver) -> bool:
    """Whether a stream of the device captures a CUDA graph: torch's current stream, which anyone may have made, or one
    that the native driver knows.
    """
    current = driver.device.stream_handle(None)
    return driver.native.any_capturing() or (current is not None and driver.native.capturing(current))


def guard_all(change: Change, driver: MemoryDriver) -> None:
    """Makes the rest of the transaction wait for all kernels of the device, on whichever stream.

    Raises:
        StreamCapturing: a stream is capturing a CUDA graph, which synchronising its context would invalidate.
        DriverError: the driver does not say whether one is.
    """
    if change.for_books:
        return
    if any_capturing(driver):
        raise sync_refusal()
    change.transaction.wait_for(None)


def sync_refusal() -> StreamCapturing:
    """The error for an operation that waits for all kernels of a device while a stream captures."""
    return StreamCapturing(
        "memory was to be given back while a stream captures a CUDA graph: kernels may still read the pages, and "
        "waiting for all of them would invalidate the capture; close after the capture, or drop the cache, whose pages "
        "are then given back by a later call"
    )
