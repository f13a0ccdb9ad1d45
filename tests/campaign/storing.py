"""A process that uses a folder of stored prefixes: by itself, and as an engine does, behind a cache.

What a block holds follows from its key alone, so every process knows what every other has written.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch

from tests.campaign import contents
from tests.campaign.forked import PATIENCE, Wrong
from vattn.config import KVConfig
from vattn.engine.kv.virtual import VirtualKV
from vattn.engine.requests.request import Request
from vattn.engine.scheduling import stored
from vattn.engine.scheduling.stored import StoredPrefixes
from vattn.errors import ConfigError
from vattn.prefix import TokenIds, as_ids
from vattn.store import background
from vattn.store.background import Fetch
from vattn.store.blockfile import KEY_BYTES, Block
from vattn.store.folder import PrefixStore

NUMBERS = 40  # blocks of the processes that use the folder by themselves
QUOTA = 160 * 1024
SLOTS = 4
CONTEXT = 400
BLOCK = 16  # tokens of an engine's blocks, instead of `stored.BLOCK_TOKENS`
_FAILING = (
    "open", "write", "pread", "pwrite", "readv", "ftruncate", "utime", "rename", "unlink", "scandir", "posix_fadvise"
)  # fmt: skip


def block(number: int) -> Block:
    """A block; several are of one prefix."""
    ids = [number * 3 + i for i in range(number % 4)]
    return Block(bytes([number % 2]) * KEY_BYTES, number.to_bytes(KEY_BYTES), number % 5, ids, "campaign")


@functools.cache
def parts(number: int) -> list[bytes]:
    """What it holds."""
    rng = random.Random(number)
    return [rng.randbytes(rng.choice((0, 1, 700, 9000))) for _ in range(1 + number % 4)]


def see(store: PrefixStore, number: int) -> bool:
    """Whether a block is there, which is the right one then."""
    found = store.read(block(number))
    if found is not None and list(map(bytes, found)) != parts(number):
        raise Wrong(f"wrong contents of a block: {number} in {store.path}")
    return found is not None


class Faults:
    """Has one of the next calls by which stores ask for the disk fail, in any thread of this process."""

    def __init__(self) -> None:
        self.left = 0
        self._code = errno.ENOSPC
        for name in _FAILING:
            setattr(os, name, self._failing(getattr(os, name)))

    def arm(self, after: int, code: int) -> None:
        """The call after so many others fails."""
        self._code, self.left = code, after

    def _failing(self, true: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.left > 0 and _of_a_store(sys._getframe(1)):
                self.left -= 1
                if not self.left:
                    raise OSError(self._code, os.strerror(self._code))
            return true(*arguments, **named)

        return call


def _of_a_store(frame: FrameType | None) -> bool:
    for _ in range(3):  # pathlib may be between
        if frame is not None and "/vattn/store/" in frame.f_code.co_filename:
            return True
        frame = frame and frame.f_back
    return False


class _Request:
    """What stored prefixes ask of a request of an engine."""

    def __init__(self, tokens: Sequence[int], salt: bytes) -> None:
        self._tokens = list(tokens)
        self.cache_salt = salt
        self.num_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.num_shared_tokens: int | None = None
        self.first_scheduled_time: float | None = None
        self.slot: int | None = None

    def first_ids(self, end: int) -> TokenIds:
        return as_ids(self._tokens[:end])

    def token_ids(self, start: int, end: int) -> list[int]:
        return self._tokens[start:end]


class Storing:
    """A store, and an engine's prefixes in it.

    Args:
        faults: the disk fails at times.
        is_small: it is full before the quota is.

    Attributes:
        calls: that were made.
        hits: tokens that were read from the store.
    """

    def __init__(self, folder: Path, rng: random.Random, *, faults: bool, is_small: bool) -> None:
        self._folder, self._rng = folder, rng
        self._faults, self._may_fail = Faults() if faults else None, faults or is_small
        self.calls = self.hits = 0
        self._fetches: list[Fetch] = []
        self._open()

    def _open(self) -> None:
        rng = self._rng
        self._store = self._opened(QUOTA)
        self._kind = rng.randrange(2)  # of engine
        config = KVConfig(
            num_layers=2, num_kv_heads=1, head_dim=16, dtype=torch.float32, max_batch_size=SLOTS,
            max_context_len=CONTEXT, memory_budget=4096 * 200, page_size=4096, overlap=False,
        )  # fmt: skip
        self._kv = VirtualKV(config)
        self._arrays = contents.sides(self._kv.cache)
        self._stored = StoredPrefixes(
            self._kv,
            self._opened(QUOTA),
            fingerprint=bytes([self._kind]) * 32,
            windows=[None, None],
            chunk_tokens=64,
            label="campaign",
        )

    def _opened(self, quota: int) -> PrefixStore:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return PrefixStore(self._folder, quota)
            except ConfigError:  # the disk may fail now
                if time.monotonic() > end:
                    raise

    def turn(self) -> None:
        """A random call."""
        rng = self._rng
        if self._faults is not None and rng.random() < 0.2:
            self._faults.arm(rng.randrange(1, 12), rng.choice((errno.ENOSPC, errno.EIO, errno.EMFILE)))
        numbers = [rng.randrange(NUMBERS) for _ in range(rng.randrange(1, 5))]
        keys = [block(number).key for number in numbers]
        calls: tuple[tuple[float, Callable[[], object]], ...] = (
            (5, lambda: self._store.put(block(numbers[0]), parts(numbers[0]))),
            (5, lambda: see(self._store, numbers[0])),
            (1, lambda: self._store.find(keys)),
            (1, lambda: self._store.announce(keys[0])),
            (1, lambda: self._store.use(keys)),
            (1, lambda: self._store.remove(keys[0])),
            (0.2, lambda: self._store.trim(rng.randrange(QUOTA))),
            (0.2, lambda: [entry.head() for entry in self._store.entries()]),
            (0.1, lambda: self._opened(QUOTA // 2)),
            (3, lambda: self._serve(rng.choice((50, CONTEXT)))),
            (0.1, self.again),
        )
        (call,) = rng.choices([call for _, call in calls], [weight for weight, _ in calls])
        self.calls += 1
        try:
            call()
        except FileNotFoundError:  # an unfinished file was deleted by hand
            pass
        except OSError:
            if not self._may_fail:
                raise
        finally:
            if self._faults is not None:
                self._faults.arm(0, 0)

    def flush(self) -> None:
        """Until nothing is written or read any more."""
        self._stored.flush()
        for fetch in self._fetches:
            fetch.ended.wait()
        self._fetches.clear()

    def again(self) -> None:
        """The engine ends, and another begins."""
        self.flush()
        self._stored.close()
        self._kv.close()
        self._open()

    def hit(self) -> bool:
        """Whether what a request has stored is found by the next, where nobody else does anything."""
        for trouble in self._stored._troubles:
            trouble._until = 0.0
        length = 10 * BLOCK + 3
        salt = self._rng.randbytes(4)
        for _ in range(2):
            before = self.hits
            self._kv.evict_prefixes()
            self._request(_Request(contents.text(0, 0, length), salt), retract=False, unwanted=0.0)
            self._stored.flush()
        return self.hits - before == length // BLOCK * BLOCK

    def _serve(self, most: int) -> None:
        rng = self._rng
        tokens = contents.text(rng.randrange(3), 0, rng.randrange(1, most))
        self._request(_Request(tokens, rng.choice((b"", b"salt"))), retract=rng.random() < 0.1, unwanted=0.1)
        if rng.random() < 0.3:
            self._kv.evict_prefixes()
        if rng.random() < 0.3:
            self._stored.flush()

    def _request(self, asked: _Request, *, retract: bool, unwanted: float) -> None:
        """What an engine does for a request, whose prefix is perhaps not wanted any more when it has been found."""
        request, tokens = cast(Request, asked), asked.token_ids(0, asked.num_tokens)
        stored = self._stored
        stored.look_ahead(request)
        if (fetch := stored._fetches.get(request)) is not None:
            self._fetches.append(fetch)
        if self._rng.random() < unwanted:
            stored.forget(request)
        stored.wait(request)
        asked.slot, cached = self._kv.admit(tokens, asked.cache_salt)
        have = stored.restore(request, asked.slot, cached)
        self.hits += have - cached
        self._see(asked, have)
        asked.first_scheduled_time, asked.num_shared_tokens = 0.0, have
        while have < len(tokens):
            end = min(len(tokens), have + 64)
            self._kv.prepare({asked.slot: end})
            for side, array in self._arrays.items():
                array[asked.slot, have:end] = self._rows(asked, side, array)[have:end]
            self._kv.commit(asked.slot, tokens[:end])
            asked.num_computed_tokens = end
            stored.save(request, since=have)
            have = end
        self._see(asked, have)
        if retract:
            self._kv.retract(asked.slot)
            stored.retract(request)
        stored.forget(request)
        self._kv.free(asked.slot)

    def _see(self, asked: _Request, end: int) -> None:
        for side, array in self._arrays.items():
            wrong = (array[asked.slot, :end] != self._rows(asked, side, array)[:end]).any(axis=(1, 2))
            if wrong.any():
                raise Wrong(f"wrong rows from the store: {np.flatnonzero(wrong)} of {end}, layer and side {side}")

    def _rows(self, asked: _Request, side: tuple[int, int], array: Any) -> Any:
        numbers = contents.chain(asked.token_ids(0, asked.num_tokens), asked.cache_salt + bytes([self._kind]))
        return contents.rows(numbers, *side, *array.shape[2:])


def prepare() -> None:
    """In a process that will use a store: small blocks, and no minute without it."""
    stored.BLOCK_TOKENS = BLOCK
    background.PAUSE = 0.02


def is_file(path: Path) -> bool:
    """Whether there is one, itself, at a path."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False
