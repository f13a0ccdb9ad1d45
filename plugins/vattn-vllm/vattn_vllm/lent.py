"""What a broker lends one engine of vLLM: `vattn pool serve NAME`, and the options `kv_pool` and `kv_share`.

The scheduler is the borrower, as it alone decides which blocks have memory. It decides within the lease, and what it
has workers give back counts until they have: until the step that says so has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vattn.broker.borrower import Borrower, Usage
from vattn.broker.share import parse_share
from vattn.errors import ConfigError
from vattn.units import format_bytes

_GLANCE = 0.02  # seconds for memory without which a request is preempted, or not admitted
_PAGE = 4096  # bytes, of which leases are multiples: small, as an engine keeps some pages ahead of need
_LOCK = 0.1  # seconds for a decision to end that the borrower's thread waits for


class LentBlocks:
    """A lease, in blocks, until it is closed or dropped, or the process ends.

    Args:
        pool: name of the broker's pool.
        share: what is guaranteed, and the most to be had: `"at least 4GiB, at most 40GiB"`; None: nothing, and all.
        name: what `vattn pool` calls the engine.
        device: of the memory.
        block_bytes: of a block, in all workers.
        blocks: that the engine has addresses for.
        longest: blocks of the longest request.

    Attributes:
        longest: blocks of the longest request.
        wake: has an idle engine take a step.

    Raises:
        ConfigError: no broker serves the pool, it refuses, or it lends less than the longest request needs.
    """

    def __init__(
        self,
        pool: str,
        share: str | None,
        *,
        name: str,
        device: str,
        block_bytes: int,
        blocks: int,
        longest: int,
    ) -> None:
        least, most = (0, None) if share is None else parse_share(share)
        self.wake: Callable[[], object] = lambda: None
        self.longest = longest
        self._block_bytes, self._blocks = block_bytes, blocks
        self._lock = threading.Lock()  # of a decision, and of all that is below
        self._limit = 0  # bytes that may be taken; written by the borrower's thread
        self._counts = deque([0])  # blocks with memory after the last step that has ended, and after each one since
        self._coming = self._parked = self._cached = 0  # blocks
        self._oldest: int | None = None
        self._asked: tuple[int, str] | None = None  # the level that the broker wants, and the stage
        self._ends: int | None = None  # steps after which that is answered; None: no step has dealt with it
        self._borrower = Borrower(pool, name=name, device=device, page=_PAGE, at_least=least, at_most=most)
        if self._borrower.at_most < (needed := longest * block_bytes):
            self._borrower.close()
            raise ConfigError(
                f"vattn: the pool {pool!r} lends at most {format_bytes(self._borrower.at_most)}, and one request of "
                f"max_model_len needs {format_bytes(needed)}; lower --max-model-len, or have it lend more "
                "(kv_share, vattn pool serve --budget)"
            )
        self.raise_to(self._borrower.level)
        self._borrower.start(self)
        self._borrower.request(self._level(longest))

    # For the scheduler

    @contextmanager
    def deciding(self, count: int, coming: int) -> Iterator[int]:
        """A decision, within which nothing is asked back; the most blocks that may have memory.

        Args:
            count: the blocks that have.
            coming: blocks that this step may back beside them. If there is no memory for so many, it waits for more,
                as far as that is quick.
        """
        self._coming = coming
        lent = self._limit // self._block_bytes
        if coming and lent < min(count + coming, self._blocks):
            # Without room for its longest request an engine may get nowhere, whatever it preempts.
            self._borrower.wait(self._level(count + coming), _GLANCE, needed=lent < self.longest)
        with self._lock:
            yield min(self._limit // self._block_bytes, self.most)

    @property
    def most(self) -> int:
        """The most blocks to be had."""
        return self._borrower.at_most // self._block_bytes

    @property
    def asks(self) -> bool:
        """Whether the broker wants memory back, and no step has dealt with it."""
        return self._asked is not None and self._ends is None

    @property
    def wanted(self) -> tuple[int, bool]:
        """The blocks to come down to, and whether those in the prefix cache are meant, too; within a decision."""
        if self._asked is None or not self.asks:
            return self._blocks, False
        level, stage = self._asked
        return level // self._block_bytes, stage != "parked"

    def decided(self, count: int, *, parked: int, cached: int, oldest: int | None) -> None:
        """Ends a decision: the blocks with memory after this step, how many of them no request uses, without contents
        and in the prefix cache, and when the one of those to be evicted next was last used.
        """
        self._counts.append(count)
        self._parked, self._cached, self._oldest = parked, cached, oldest
        if self.asks:
            self._ends = len(self._counts) - 1
        if (level := self._level(count + self._coming)) > self._limit:
            self._borrower.request(level)

    def ended(self) -> None:
        """The workers have executed the earliest step that had yet to end."""
        with self._lock:
            self._counts.popleft()
            if self._ends:
                self._ends -= 1

    def close(self) -> None:
        """Leaves the pool."""
        self._borrower.close()

    def _level(self, count: int) -> int:
        """The lease for so many blocks, in whole chunks, so that few requests for it differ."""
        level = min(count, self._blocks) * self._block_bytes
        return -(-level // self._borrower.chunk) * self._borrower.chunk

    # For the borrower's thread: `vattn.broker.borrower.Lent`

    def usage(self, *, wait: bool) -> Usage:
        with self._lock:
            size = self._block_bytes
            owned = max(0, max(self._counts) - self._parked - self._cached)
            return Usage(owned * size, self._parked * size, self._cached * size, self._oldest)

    def raise_to(self, level: int) -> None:
        self._limit = max(self._limit, level)

    def come_down(self, level: int, stage: str) -> int | None:
        if stage == "all":
            self._limit = min(self._limit, level)
        if not self._lock.acquire(timeout=_LOCK):
            return None
        try:
            held = max(self._counts) * self._block_bytes
            if held > level and stage != "free":
                if self._asked != (level, stage):
                    self._asked, self._ends = (level, stage), None
                    self.wake()
                if self._ends != 0:
                    return None
            self._asked = self._ends = None
            self._limit = min(self._limit, max(level, held))
            return max(self._limit, held)
        finally:
            self._lock.release()
