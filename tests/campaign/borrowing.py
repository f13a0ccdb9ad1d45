"""A process with caches on a pool of a broker, and a model of what their rows hold.

Every byte that it writes ends in its tag, which no process beside it has: so a byte of another is recognised wherever
it turns up, also in memory that this one has not written. The rest of a byte says what it stands for: that has to be
right in rows that another process has computed and shared, too.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import vattn
from tests.campaign import contents
from tests.campaign.forked import PATIENCE, Wrong

PAGE = 4096
SLOTS = 6
CONTEXT = 1024
_PRINTS = (b"a" * 32, b"a" * 32, b"b" * 32)
TAGS = range(1, 16)


@dataclass
class Request:
    """A request.

    Attributes:
        stream, salt: which text its tokens are, and what else its rows depend on.
        length: tokens whose rows are there.
        reached: the most tokens that it ever had.
        found: tokens that it began with, whoever has computed them.
        committed: tokens in whole blocks that it has published, which a fork may have from whoever has published them.
    """

    stream: int
    salt: bytes
    length: int
    reached: int
    found: int = 0
    committed: int = 0


@dataclass
class Cache:
    """A cache, and the requests in its slots."""

    it: vattn.KVCache
    zeroes: bool
    requests: dict[int, Request] = field(default_factory=dict)
    arrays: dict[tuple[int, int], Any] = field(default_factory=dict)


class Borrowing:
    """Caches on a pool, with random calls.

    Args:
        label: what the broker calls it.
        tag: of `TAGS`.
        stays: it never leaves the pool to come back as somebody new.

    Attributes:
        calls: that were made.
        found: tokens that others had computed.
    """

    def __init__(self, pool: str, label: str, tag: int, rng: random.Random, *, stays: bool = False) -> None:
        self._pool_name, self._label, self._tag, self._rng, self._stays = pool, label, tag, rng, stays
        self.calls = self.found = 0
        self._kept: list[torch.Tensor] = []
        self.connect()

    def connect(self) -> None:
        """Joins the pool with one or two caches, once there is a broker that can guarantee what is asked."""
        rng, end = self._rng, time.monotonic() + PATIENCE
        zeroes = rng.random() < 0.5
        share: dict[str, Any] = {"at_least": rng.choice((0, 0, 16)) * PAGE}
        self._print = rng.choice((None, *_PRINTS))
        share |= {"at_most": rng.choice((None, None, 160 * PAGE)), "fingerprint": self._print}
        while True:
            try:
                self._pool = vattn.PagePool.connect(
                    self._pool_name, label=self._label, page_size=PAGE, zero_on_free=zeroes, **share
                )
                break
            except vattn.ConfigError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        self.caches = [self._make(zeroes) for _ in range(rng.choice((1, 1, 2)))]
        self.calls += 1 + len(self.caches)

    def _make(self, zeroes: bool) -> Cache:
        rng = self._rng
        config = vattn.KVConfig(
            num_layers=1, num_kv_heads=1, head_dim=64, dtype=torch.float32, max_batch_size=SLOTS,
            max_context_len=CONTEXT, layout=rng.choice(("layer", "fused")), overlap=rng.random() < 0.7,
            zero_on_free=zeroes, deferred_reclamation=rng.random() < 0.9,
        )  # fmt: skip
        made = Cache(vattn.KVCache(config, pool=self._pool), zeroes)
        made.arrays = contents.sides(made.it)
        return made

    @property
    def name(self) -> str:
        """What the broker calls it now."""
        assert self._pool.loan is not None
        return self._pool.loan.name

    def leave(self, *, drop: bool = False) -> None:
        """Closes everything, or drops it."""
        if not drop:
            for cache in self.caches:
                cache.it.close()
            self._pool.close()
        self.calls += 1 + len(self.caches)
        self.caches = []
        del self._pool

    def turn(self) -> None:
        """A random call, after what an engine does between two steps: it gives up requests for what is asked back."""
        cache = self._rng.choice(self.caches)
        self._preempt(cache)
        try:
            self._call(cache)
        except vattn.OutOfPages:
            self._preempt(cache)
            if cache.requests and self._rng.random() < 0.5:
                self._free(cache)

    def check(self) -> None:
        """Compares the rows of all requests, and has the pool look at its books."""
        for cache in self.caches:
            for slot in cache.requests:
                self._see(cache, slot)
            cache.it.check()
            self.calls += 1

    def let_go(self) -> None:
        """Ends all requests and forgets all prefixes; the pages are anybody's."""
        self._kept.clear()
        gc.collect()
        for cache in self.caches:
            while cache.requests:
                self._free(cache)
            cache.it.evict_prefixes()
            cache.it.trim()
            self.calls += 2

    def take(self, num_pages: int) -> bool:
        """Whether an empty cache gets so many pages; they are given up again."""
        cache = self.caches[0]
        tokens = num_pages // 2 * (PAGE // 256)
        try:
            while tokens > 0:
                length = min(CONTEXT, tokens)
                self._begin(cache, length, fresh=True)
                tokens -= length
        except vattn.OutOfPages:
            return False
        finally:
            self.let_go()
        return True

    # Calls

    def _call(self, cache: Cache) -> None:
        rng = self._rng
        calls: tuple[tuple[float, Callable[[], None]], ...] = (
            (6, lambda: self._begin(cache, rng.randrange(1, rng.choice((100, CONTEXT))))),
            (6, lambda: self._grow(cache)),
            (4, lambda: self._free(cache)),
            (1, lambda: self._shorten(cache)),
            (1, lambda: self._fork(cache)),
            (0.3, lambda: self._retract(cache)),
            (0.1, lambda: self._stop_sharing(cache)),
            (0.5, lambda: self._collect(cache)),
            (0.3, lambda: self._see_child(cache)),
            (0.0 if self._stays else 0.3, self._join_again),
        )
        (call,) = rng.choices([call for _, call in calls], [weight for weight, _ in calls])
        call()

    def _preempt(self, cache: Cache) -> None:
        while cache.requests and cache.it.available_pages() < 0:
            self._free(cache)

    def _begin(self, cache: Cache, length: int, *, fresh: bool = False) -> None:
        if len(cache.requests) == SLOTS:
            return
        rng = self._rng
        request = Request(rng.randrange(len(contents.BRANCHES)), rng.choice((b"", b"salt")), 0, 0)
        if fresh:
            request.salt = rng.randbytes(8)
        tokens = contents.text(request.stream, 0, length)
        local = cache.it.find_prefix(tokens, request.salt)
        slot, cached = cache.it.admit(tokens, request.salt)
        self.calls += 2
        self.found += max(0, cached - local)
        request.length = request.reached = request.found = cached
        cache.requests[slot] = request
        self._see(cache, slot)
        self._step(cache, slot, length)
        if rng.random() < 0.8:
            cache.it.commit(slot, tokens)
            request.committed = length - length % cache.it.prefix_block_tokens
            self.calls += 1

    def _grow(self, cache: Cache) -> None:
        if (slot := self._any(cache)) is not None:
            length = cache.requests[slot].length
            self._step(cache, slot, min(CONTEXT, length + self._rng.choice((1, 5, 40, 300))))

    def _shorten(self, cache: Cache) -> None:
        if (slot := self._any(cache)) is not None:
            length = self._rng.randrange(cache.requests[slot].length + 1)
            cache.it.step({slot: length})
            self.calls += 1
            cache.requests[slot].length = length

    def _fork(self, cache: Cache) -> None:
        if (slot := self._any(cache)) is not None and len(cache.requests) < SLOTS:
            source = cache.requests[slot]
            made = cache.it.fork(slot)
            self.calls += 1
            found = max(source.found, source.committed)
            cache.requests[made] = replace(source, reached=source.length, found=found)
            self._see(cache, made)

    def _retract(self, cache: Cache) -> None:
        if (slot := self._any(cache)) is not None:
            cache.it.retract(slot)
            self.calls += 1

    def _stop_sharing(self, cache: Cache) -> None:
        cache.it.stop_sharing()
        self.calls += 1

    def _free(self, cache: Cache) -> None:
        if (slot := self._any(cache)) is not None:
            del cache.requests[slot]
            cache.it.free_reqid(slot)
            self.calls += 1

    def _collect(self, cache: Cache) -> None:
        self._rng.choice((cache.it.evict_prefixes, cache.it.trim, cache.it.check, cache.it.stats))()
        self.calls += 1

    def _see_child(self, cache: Cache) -> None:
        """A child that is forked has nothing of the pool, and takes nothing with it when it ends."""
        child = os.fork()
        if not child:
            try:
                cache.it.stats()
            except vattn.ForkedProcess:
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        if status not in (0, signal.SIGKILL):  # a parent that is to kill itself after some calls has a child that does
            raise Wrong(f"a child uses its parent's pool, or crashes: status {status}")

    def _join_again(self) -> None:
        """Leaves, perhaps with a tensor that outlives the caches, and comes back as somebody new."""
        if self._rng.random() < 0.5:
            self._kept = [tensor for cache in self.caches for tensor in cache.it.layer(0)]
        self.leave(drop=self._rng.random() < 0.5)
        self._kept = self._kept if self._rng.random() < 0.5 else []
        self.connect()

    def _any(self, cache: Cache) -> int | None:
        return self._rng.choice(list(cache.requests)) if cache.requests else None

    # Contents

    def _step(self, cache: Cache, slot: int, length: int) -> None:
        """Backs tokens up to `length`, looks at the memory that came, and writes."""
        request = cache.requests[slot]
        cache.it.step({slot: length})
        self.calls += 1
        start, request.length = request.length, length
        for side, array in cache.arrays.items():
            if start == length:
                continue
            if not contents.writable(array, slot, start, length):
                raise Wrong(f"rows of a step cannot be written: {self._label}, slot {slot}, {start} to {length}")
            new = array[slot, start:length]
            # Who shares has copies of what others have computed, in pages that another request may have had before.
            if self._print is None and new[(new & 15) != self._tag].any():
                raise Wrong(f"bytes of another process: {self._label}, slot {slot}, {start} to {length}")
            if cache.zeroes and array[slot, max(start, request.reached) : length].any():
                raise Wrong(f"bytes of another request: {self._label}, slot {slot}, {start} to {length}")
            array[slot, start:length] = self._rows(request, side, array)[start:]
        request.reached = max(request.reached, length)

    def _see(self, cache: Cache, slot: int) -> None:
        request = cache.requests[slot]
        for side, array in cache.arrays.items():
            rows, expected = array[slot, : request.length], self._rows(request, side, array)
            found = rows[: request.found]
            # Whoever has computed them has marked them.
            wrong = (found & 0xF0 != expected[: request.found] & 0xF0).any() or not (found & 15).all()
            if wrong or (rows[request.found :] != expected[request.found :]).any():
                raise Wrong(f"wrong rows: {self._label}, slot {slot}, side {side}, of {request}")

    def _rows(self, request: Request, side: tuple[int, int], array: Any) -> Any:
        salt = request.salt + (self._print or b"")
        return _rows(request.stream, salt, self._tag, side, array.shape[2:])[: request.length]


@functools.lru_cache(64)
def _rows(stream: int, salt: bytes, tag: int, side: tuple[int, int], shape: tuple[int, int]) -> Any:
    numbers = contents.chain(contents.text(stream, 0, CONTEXT), salt)
    return contents.rows(numbers, *side, *shape) & 0xF0 | tag
