"""A store beside a loop that must not wait for a disk: one thread writes behind it, another reads ahead of it.

Where the disk fails or is slow, the loop goes on without the store: what is to be written is dropped, what is to be
read is not there. After a minute it is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .blockfile import Allocate, Block, Buffer
from .folder import PrefixStore

logger = logging.getLogger(__name__)

# Seconds without the store after a failure.
PAUSE = 60.0
# Seconds that a reader waits for the next block of a prefix.
PATIENCE = 1.0
# Blocks that the kernel is told of before they are read.
_ANNOUNCED = 4
_MOST_KNOWN = 2**20
# Prefixes that wait for it to be noted that they were used.
_MOST_USES = 256


class Trouble:
    """What went wrong with a disk when it was read, or written, and until when it is left alone.

    Attributes:
        errors: failures so far.
    """

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._until = 0.0
        self.errors = 0

    @property
    def lasts(self) -> bool:
        """Whether the store is not to be used now."""
        return time.monotonic() < self._until

    def note(self, what: str) -> None:
        """Count a failure; says so in the log unless it was said within the last minute."""
        self.errors += 1
        if not self.lasts:
            logger.warning("the store %s: %s; going on without for %.0f s", self._store.path, what, PAUSE)
        self._until = time.monotonic() + PAUSE


@dataclass(frozen=True)
class Write:
    """A block to be written.

    Attributes:
        parts: its contents, made when they are written.
        num_bytes: about as many as its contents have.
    """

    block: Block
    parts: Callable[[], Sequence[Buffer]]
    num_bytes: int


@dataclass(frozen=True)
class _Job:
    prefix: tuple[bytes, ...] = ()
    writes: tuple[Write, ...] = ()
    removed: tuple[bytes, ...] = ()


class WriteBehind:
    """Writes blocks on a thread of its own.

    Args:
        most_bytes: of blocks that wait to be written.

    Attributes:
        dropped: blocks that were not written, because too many waited, or the disk failed.
    """

    def __init__(self, store: PrefixStore, trouble: Trouble, *, most_bytes: int) -> None:
        self._store = store
        self._trouble = trouble
        self._most_bytes = most_bytes
        self._jobs: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._known: set[bytes] = set()
        self._removing: Counter[bytes] = Counter()  # by key, how often that was asked for; changed with the lock
        self._wrong: list[bytes] = []  # the thread's: what is to be deleted, also what could not be
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="vattn store writer", daemon=True)
        self._thread.start()

    def knows(self, key: bytes) -> bool:
        """Whether a block is in the store, or about to be, as far as this process has heard."""
        return key in self._known

    def known(self) -> list[bytes]:
        """The blocks of which `knows` says so."""
        return list(self._known)

    def removes(self, key: bytes) -> bool:
        """Whether a block waits to be deleted."""
        return key in self._removing

    def learn(self, keys: Sequence[bytes]) -> None:
        """Take it that these blocks are in the store."""
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        self._known.update(keys)

    def miss(self, keys: Sequence[bytes]) -> None:
        """Take it that these blocks are not in the store, but for those that wait to be written."""
        if not self._known.isdisjoint(keys):
            with self._changed:
                waiting = {write.block.key for job in self._jobs for write in job.writes}
                self._known.difference_update(set(keys) - waiting)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a block may wait to be written now; if not, it counts as dropped."""
        if self._waiting_bytes + num_bytes <= self._most_bytes and not self._trouble.lasts and not self._closing:
            return True
        self.dropped += 1
        return False

    def put(self, prefix: Sequence[bytes], writes: Sequence[Write]) -> None:
        """Have blocks written, and note that a prefix was used.

        Args:
            prefix: the keys of its blocks, from the first one on.
            writes: those of them that are new, in order; `has_room` has said so of each.
        """
        with self._changed:  # for `miss`
            self.learn([write.block.key for write in writes])
            if not writes:
                self._bound_uses()
            self._add(_Job(prefix=tuple(prefix), writes=tuple(writes)))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Have blocks deleted, those that wait to be written included."""
        self._known.difference_update(keys)
        with self._changed:
            self._removing.update(keys)
        self._add(_Job(removed=tuple(keys)))

    def close(self, timeout: float | None = None) -> None:
        """Write what waits, for so many seconds at most, and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def flush(self) -> None:
        """Wait until nothing waits to be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    def _add(self, job: _Job) -> None:
        with self._changed:
            if self._closing:
                return
            self._jobs.append(job)
            self._waiting_bytes += sum(write.num_bytes for write in job.writes)
            self._changed.notify_all()

    def _bound_uses(self) -> None:
        """Forgets the prefix that has waited longest, if many wait that have nothing to be written."""
        if len(self._jobs) > _MOST_USES:
            # Without the first job, which the thread may be doing.
            uses = [at for at, job in enumerate(self._jobs) if at and not job.writes and not job.removed]
            if len(uses) >= _MOST_USES:
                del self._jobs[uses[0]]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    break
                job = self._jobs[0]  # stays there until it is done, for `flush`
            try:
                self._do(job)
            except Exception as error:  # a disk that fails, or files that are not ours: never a reason to stop
                self._trouble.note(f"a block could not be written: {error}")
            finally:
                with self._changed:
                    self._jobs.popleft()
                    self._waiting_bytes -= sum(write.num_bytes for write in job.writes)
                    self._changed.notify_all()
        if (failure := self._delete()) is not None:
            self._trouble.note(f"wrong blocks could not be deleted: {failure}")

    def _do(self, job: _Job) -> None:
        now = time.time_ns()
        left = deque(job.writes)
        self._wrong += job.removed
        failure = self._delete() if job.removed or not self._trouble.lasts else None
        if failure is not None and job.removed:  # of those that failed before it was said
            self._trouble.note(f"wrong blocks could not be deleted: {failure}")
        try:
            while left and not self._trouble.lasts and left[0].block.key not in self._wrong:
                if not self._store.put(left[0].block, left[0].parts(), used_ns=now):
                    break
                left.popleft()
        finally:
            self.dropped += len(left)
            self._known.difference_update([write.block.key for write in left])
        there = self._store.use(job.prefix, used_ns=now)
        self._known.difference_update(job.prefix[there:])

    def _delete(self) -> Exception | None:
        """Deletes wrong blocks. One that cannot be deleted hinders nothing else, and still counts as being removed.

        Returns:
            Why the first of those could not be.
        """
        failures: list[tuple[bytes, Exception]] = []
        for key in self._wrong:
            try:
                self._store.remove(key)
            except Exception as error:
                failures.append((key, error))
            else:
                with self._changed:
                    self._removing[key] -= 1
                    if not self._removing[key]:
                        del self._removing[key]
        self._wrong = [key for key, _ in failures]
        return failures[0][1] if failures else None


class Contents:
    """The parts of a block, in memory."""

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts
        self.num_bytes = sum(map(len, parts))


class Fetch:
    """A prefix that is being read.

    Attributes:
        blocks: the blocks that are looked for, in order.
        found: the contents of the first of them, as far as they have been read.
        ended: nothing more will be found.
        dropped: nobody wants it any more.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.found: list[Contents] = []
        self.ended = threading.Event()
        self.dropped = False
        self.since = time.monotonic()


class ReadAhead:
    """Reads blocks on a thread of its own, prefix by prefix.

    Args:
        most_bytes: of contents that nobody has taken: with more, no further prefix is begun. So there may be as many
            bytes more as one prefix has.
        allocate: makes room for a block's contents.
        missed: is told the keys of a prefix from the first one on that was looked for and is not there, by any thread.
    """

    def __init__(
        self,
        store: PrefixStore,
        trouble: Trouble,
        *,
        most_bytes: int,
        allocate: Allocate,
        missed: Callable[[Sequence[bytes]], object] = lambda _: None,
    ) -> None:
        self._store = store
        self._trouble = trouble
        self._most_bytes = most_bytes
        self._allocate = allocate
        self._missed = missed
        self._fetches: deque[Fetch] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._progress = time.monotonic()
        # Contents that somebody still needs; several prefixes may begin with the same blocks.
        self._held: weakref.WeakValueDictionary[bytes, Contents] = weakref.WeakValueDictionary()
        self._thread = threading.Thread(target=self._run, name="vattn store reader", daemon=True)
        self._thread.start()

    def fetch(self, blocks: Sequence[Block]) -> Fetch | None:
        """Begin to read a prefix; None if nothing of it is there.

        Args:
            blocks: in order, each with those before it as its prefix.
        """
        if self._trouble.lasts:
            return None
        try:
            there = self._store.find(block.key for block in blocks)
        except OSError as error:
            self._trouble.note(f"no block can be looked for: {error}")
            return None
        self._missed([block.key for block in blocks[there:]])
        if not there:
            return None
        fetch = Fetch(blocks[:there])
        with self._changed:
            self._fetches.append(fetch)
            self._changed.notify_all()
        return fetch

    def is_ready(self, fetch: Fetch) -> bool:
        """Whether there is nothing to wait for: all has been read, or the disk takes too long."""
        return fetch.ended.is_set() or self._trouble.lasts or self._patience(fetch) <= 0

    def wait(self, fetch: Fetch) -> None:
        """Wait until `is_ready`."""
        while not self.is_ready(fetch):
            fetch.ended.wait(max(0.001, min(self._patience(fetch), PATIENCE / 10)))

    def take(self, fetch: Fetch) -> list[Contents]:
        """What has been read of a prefix, in order; nothing more will be."""
        if not (fetch.ended.is_set() or self._trouble.lasts or self._full()):
            self._trouble.note(f"no block was read for {PATIENCE:.0f} s")
        fetch.dropped = True
        found, fetch.found = fetch.found, []
        return found

    def drop(self, fetch: Fetch) -> None:
        """Read no more of a prefix, and forget what has been read."""
        fetch.dropped, fetch.found = True, []

    def close(self, timeout: float | None = None) -> None:
        """End the thread, which may take as long as reading a block. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _patience(self, fetch: Fetch) -> float:
        """Seconds for which it is still waited for."""
        return max(fetch.since, self._progress) + PATIENCE - time.monotonic()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fetches or self._closing)
                while self._full() and not self._closing:
                    self._changed.wait(0.01)  # nobody says when the last reference to contents goes
                if self._closing:
                    return
                fetch = self._fetches.popleft()
            try:
                self._read(fetch)
            except Exception as error:
                self._trouble.note(f"a block could not be read: {error}")
            finally:
                fetch.ended.set()
                del fetch  # what it has would be held until there is another one

    def _full(self) -> bool:
        return sum(each.num_bytes for each in list(self._held.values())) > self._most_bytes

    def _read(self, fetch: Fetch) -> None:
        announced = 0
        for index, block in enumerate(fetch.blocks):
            if fetch.dropped or self._closing:
                return
            for later in fetch.blocks[max(announced, index + 1) : index + 1 + _ANNOUNCED]:
                self._store.announce(later.key)
            announced = index + 1 + _ANNOUNCED
            contents = self._held.get(block.key)
            if contents is None:
                rejected = self._store.rejected
                parts = self._store.read(block, self._allocate)
                if self._store.rejected > rejected:
                    logger.warning("the store %s: a file was cut off or changed; it is deleted", self._store.path)
                if parts is None:
                    self._missed([each.key for each in fetch.blocks[index:]])
                    return
                contents = self._held[block.key] = Contents(parts)
            found = fetch.found
            found.append(contents)
            if fetch.dropped:  # taken in between: what was appended may be in neither list
                return
            self._progress = time.monotonic()
