"""Fences: what the unmapping of a slot's pages has to wait for, so that no kernel still reads them.

Kernels run after their launch returns, so when a request ends on the caller's side its last kernels may still read its
pages. `free_reqid` records an event on the stream of those kernels; whatever unmaps pages of that slot later waits for
the event, on the worker. A request that gets the slot, and its parked pages, waits for nothing: its kernels come after
the old ones in stream order.

A step is prepared before its kernels are launched. When a request ends between the two, an event does not cover kernels
that are still to come. So a slot that was freed is *open* until the next step begins: by then the kernels of the step
before are launched, the event is recorded anew, and only from then on may the slot's pages be unmapped.

On the host kernels end before their calls return: there are no streams, hence no fences, and no slot is ever open.
"""

from __future__ import annotations

from collections.abc import Iterable

from vattn import _native
from vattn.drivers import MemoryDriver, Stream
from vattn.errors import StreamCapturing
from vattn.memory.journal import Change


class Fences:
    """The fences of one cache's slots; used under the pool's lock."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._events: dict[int, dict[int, _native.Event]] = {}  # by slot, then by stream: the last of each
        self._open: dict[int, int] = {}  # slots that were freed since the last step began, with the stream they are on

    def handle(self, stream: Stream | None) -> int | None:
        """The handle of a stream, by default torch's current one; None where there are no streams."""
        return self._driver.device.stream_handle(stream)

    def capturing(self, handle: int | None) -> bool:
        """Whether the stream captures a CUDA graph, in which memory must not change and no fence can be set."""
        return handle is not None and self._driver.native.capturing(handle)

    def uncaptured(self, stream: Stream | None, doing: str) -> int | None:
        """The handle of a stream that does not capture a graph.

        Raises:
            StreamCapturing: it does; `doing` is what has no place there.
        """
        handle = self.handle(stream)
        if self.capturing(handle):
            raise refusal(doing)
        return handle

    def freed(self, slot: int, handle: int | None) -> None:
        """The slot's request ended; its kernels are on the stream."""
        if handle is not None:
            self._set(slot, handle, self._driver.native.record(handle))
            self._open[slot] = handle

    def launched(self) -> bool:
        """The kernels of every step so far are launched: slots that are open get their events, and are open no more.

        Those on a stream that captures a graph stay open: an event recorded there would become part of the graph.

        Returns:
            Whether there were any.
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
        """The slots for which that holds."""
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
        """What the worker does from here on waits for the slot's fences."""
        assert slot not in self._open, "planned to unmap pages of a slot whose kernels may not be launched yet"
        for event in self._events.get(slot, {}).values():
            change.transaction.wait_for(event)

    def guard_running(self, change: Change, handle: int | None) -> None:
        """What the worker does from here on waits for all that was launched on the stream so far."""
        if handle is not None:
            change.transaction.wait_for(self._driver.native.record(handle))

    def _set(self, slot: int, handle: int, event: _native.Event) -> None:
        """An event covers the earlier ones of its stream; those of other streams are dropped once they are complete."""
        events = self._events.setdefault(slot, {})
        for other in [stream for stream, earlier in events.items() if earlier.done()]:
            del events[other]
        events[handle] = event


def refusal(doing: str) -> StreamCapturing:
    """The error for something that has no place in the capture of a graph."""
    return StreamCapturing(
        f"{doing} while the stream captures a CUDA graph: memory does not change in stream order, and a replay would "
        "not repeat it; before the capture, call step with the longest lengths that the graph will see; free requests "
        "after it"
    )
