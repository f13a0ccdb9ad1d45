"""Prefixes on disk: what requests have computed is written there, and read again by later ones, also after a restart.

A block of a store is `BLOCK_TOKENS` tokens, whatever the backend's blocks are: rows are copied out and in as for
requests that are swapped, so any backend that keeps prefixes can write what any other reads.

The life of a request: `look_ahead` when it is queued, `is_ready` or `wait` before it is admitted, `restore` when it has
a slot, `save` when it has published something, `forget` at its end. `heed` is called before each step.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from weakref import WeakKeyDictionary, finalize

import torch

from vattn.errors import VattnError
from vattn.prefix import Ancestry, Key, block_keys, root_key
from vattn.store.background import PATIENCE, Contents, Fetch, ReadAhead, Trouble, Write, WriteBehind
from vattn.store.blockfile import KEY_BYTES, Block
from vattn.store.folder import PrefixStore

from ..kv.base import KVBackend
from ..kv.rows import Rows, contents
from ..requests.request import Request

logger = logging.getLogger(__name__)

# Large enough that a file is read at a disk's full speed; what follows a prompt's last block is computed again.
BLOCK_TOKENS = 128
# Of blocks that wait to be written, and of those that were read for requests that wait.
MOST_WAITING = 1 << 30
# Seconds for what waits to be written when the engine is closed.
_CLOSING = 30.0


@dataclass
class _Chain:
    """The blocks of a request that are in the store, or about to be, from its first one on.

    Attributes:
        written: those that this request was the first to write.
        cached: of an engine that shares prefixes with others, the keys that its backend has for the tokens.
        broken: a block could not be written, so nothing after it could be found; or it is wrong.
    """

    keys: list[Key] = field(default_factory=list)
    written: list[Key] = field(default_factory=list)
    cached: list[Key] = field(default_factory=list)
    broken: bool = False


class StoredPrefixes:
    """The prefixes of one engine in a store.

    Args:
        fingerprint: 32 bytes that stand for everything but tokens and salt that keys and values depend on.
        windows: per layer, its window in tokens, if the backend keeps no others; None for all.
        chunk_tokens: most tokens of a request in one step.
        label: the model's name, for people.

    Attributes:
        query_tokens: tokens looked up: those of admitted requests that were not in memory.
        hit_tokens: how many of them were read from the store.
    """

    def __init__(
        self,
        kv: KVBackend,
        store: PrefixStore,
        *,
        fingerprint: bytes,
        windows: Sequence[int | None],
        chunk_tokens: int,
        label: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        self._kv = kv
        self.store = store
        self._fingerprint = fingerprint
        self._windows = windows
        self._window = min((window for window in windows if window is not None), default=None)
        self._chunk = max(BLOCK_TOKENS, chunk_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        self._label = label
        self._rows = Rows(kv, len(windows), device)
        # Apart, since a full disk can still be read.
        self._troubles = Trouble(store), Trouble(store)
        self._writer = WriteBehind(store, self._troubles[0], most_bytes=MOST_WAITING)
        self._reader = ReadAhead(
            store, self._troubles[1], most_bytes=MOST_WAITING, allocate=_room, missed=self._writer.miss
        )
        self._block_bytes = BLOCK_TOKENS * kv.token_bytes
        self._chains: WeakKeyDictionary[Request, _Chain] = WeakKeyDictionary()
        self._ancestry = Ancestry()
        self._cached: dict[Key, set[Key]] = {}  # by block, the backend's blocks that have a token of it
        self._fetches: WeakKeyDictionary[Request, Fetch] = WeakKeyDictionary()
        self._stopped = False
        self.query_tokens = 0
        self.hit_tokens = 0
        # Also when a script ends without closing its engine: what waits is written.
        self._end = finalize(self, _close, os.getpid(), self._writer, self._reader)

    @property
    def errors(self) -> int:
        """Failures of the disk, and files that were not what they had to be."""
        return sum(trouble.errors for trouble in self._troubles) + self.store.rejected

    @property
    def dropped(self) -> int:
        """Blocks that were not written."""
        return self._writer.dropped

    @property
    def num_bytes(self) -> int:
        """Bytes in the store, of all engines that use it; 0 if its disk does not say."""
        with contextlib.suppress(OSError):
            return self.store.bytes
        return 0

    def stop(self) -> None:
        """Neither write nor read from here on: what the model computes may no longer be what the fingerprint says."""
        self._stopped = True

    def flush(self) -> None:
        """Wait until all that was saved is written."""
        self._writer.flush()

    def close(self) -> None:
        """Write what waits, and end. Idempotent."""
        with contextlib.suppress(VattnError):  # what was written stays as it is if the backend cannot say
            self.heed()
        self._end()

    # What is read

    def look_ahead(self, request: Request) -> None:
        """Begin to read what memory lacks of a waiting request's prefix."""
        self.forget(request)
        if self._stopped:
            return
        ids = request.token_ids(0, request.num_tokens)
        first = self._kv.find(ids, request.cache_salt) // BLOCK_TOKENS
        every = block_keys(self._root(request), ids[:-1], BLOCK_TOKENS)
        keys = list(itertools.takewhile(lambda key: not self._writer.removes(key), every))
        fetch = self._reader.fetch([self._block(index, keys[index], ids) for index in range(first, len(keys))])
        if fetch is not None:
            self._fetches[request] = fetch

    def is_ready(self, request: Request) -> bool:
        """Whether a request can be admitted: nothing of its prefix is being read."""
        fetch = self._fetches.get(request)
        return fetch is None or self._reader.is_ready(fetch)

    def wait(self, request: Request) -> bool:
        """Wait until `is_ready`, which takes no longer than a disk that works; returns True."""
        if (fetch := self._fetches.get(request)) is not None:
            self._reader.wait(fetch)
        return True

    def restore(self, request: Request, slot: int, cached: int) -> int:
        """Put what was read into the slot that a request was just admitted to.

        Args:
            cached: tokens that the slot has.

        Returns:
            Tokens that it has then.
        """
        if request.first_scheduled_time is None:
            self.query_tokens += request.num_tokens - cached
        if self._stopped:
            self.forget(request)
        fetch = self._fetches.pop(request, None)
        if fetch is None:
            return cached
        before = cached
        blocks = [(block.depth, each) for block, each in zip(fetch.blocks, self._reader.take(fetch), strict=False)]
        # Layers with a window back what a chunk of a prompt needs, and no more.
        most = len(blocks) if self._window is None else self._chunk // BLOCK_TOKENS
        ids = request.token_ids(0, request.num_tokens)
        while blocks and blocks[0][0] * BLOCK_TOKENS <= cached:
            chunk, blocks = blocks[:most], blocks[most:]
            end = (chunk[-1][0] + 1) * BLOCK_TOKENS
            if end > cached and not self._put(slot, chunk, cached, ids[:end]):
                break
            cached = max(cached, end)
        self._writer.learn([block.key for block in fetch.blocks if (block.depth + 1) * BLOCK_TOKENS <= cached])
        if request.first_scheduled_time is None:
            self.hit_tokens += cached - before
        return cached

    def _put(self, slot: int, blocks: Sequence[tuple[int, Contents]], cached: int, ids: Sequence[int]) -> bool:
        """Extend a slot of `cached` tokens to these `ids`, the last of which are in `blocks`; returns whether it is."""
        try:
            self._kv.prepare({slot: len(ids)})
            if all(
                (index + 1) * BLOCK_TOKENS <= cached or self._copy_in(slot, index, each, cached)
                for index, each in blocks
            ):
                self._kv.commit(slot, ids)
                return True
        except Exception as error:
            logger.warning("a stored prefix was not used: %s", error)
        # The step that follows computes these tokens, into the same rows. Layers with a window would give back what it
        # needs if these counted as computed.
        self._kv.prepare({slot: cached})
        return False

    # What is written

    def save(self, request: Request, since: int | None = None) -> None:
        """Have what a running request has published written, as far as that is new.

        Args:
            since: the first token that the last step computed; by default the one after the last.
        """
        chain = self._chains.setdefault(request, _Chain())
        computed = request.num_computed_tokens
        done = len(chain.keys)
        if self._stopped or chain.broken or computed // BLOCK_TOKENS <= done:
            return
        ids = request.token_ids(0, computed)
        # Layers with a window may have given earlier rows back.
        first = 0 if self._window is None else (computed if since is None else since) - self._window + 1
        parent = chain.keys[-1] if done else self._root(request)
        writes: list[Write] = []
        for index, key in enumerate(block_keys(parent, ids[done * BLOCK_TOKENS :], BLOCK_TOKENS), done):
            if not self._writer.knows(key):
                if index * BLOCK_TOKENS < first:
                    chain.broken = True
                    break
                if not self._writer.has_room(sum(write.num_bytes for write in writes) + self._block_bytes):
                    break
                assert request.slot is not None
                try:
                    rows = self._rows.copy_out(request.slot, index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
                except Exception as error:
                    logger.warning("a prefix is stored no further, as it cannot be copied: %s", error)
                    chain.broken = True
                    break
                block = self._block(index, key, ids)
                writes.append(Write(block, partial(contents, rows), self._block_bytes))
                chain.written.append(key)
            chain.keys.append(key)
        if len(chain.keys) > done:
            self._ancestry.note(parent, chain.keys[done:], self._writer.known)
            self._note_cached(request, chain, done, ids)
            self._writer.put(chain.keys, writes)

    def retract(self, request: Request, running: Iterable[Request] = ()) -> None:
        """Delete what a request was the first to write, what was copied from blocks of the backend that it may have
        computed, and what was computed on either: it may be wrong.

        Args:
            running: requests that may have it; they write nothing more then.
        """
        chain = self._chains.pop(request, None)
        if request.num_shared_tokens is not None:
            size, ids = self._kv.prefix_block_tokens, request.first_ids(request.num_tokens)
            keys = list(block_keys(root_key(request.cache_salt), ids, size))
            self._take_back_copies(set(keys[request.num_shared_tokens // size :]), running)
        if chain is not None:
            self._take_back(chain.written, running)

    def heed(self, running: Iterable[Request] = ()) -> None:
        """`retract` what was copied from blocks that other processes have found to be wrong, and what was computed on
        them.

        Args:
            running: as for `retract`.
        """
        self._take_back_copies(self._kv.take_withdrawn(), running)

    def _take_back_copies(self, withdrawn: Set[Key], running: Iterable[Request]) -> None:
        """Delete what was copied from blocks of the backend that are wrong, and what was computed on them."""
        if not withdrawn:
            return
        self._break(running, withdrawn, lambda request: root_key(request.cache_salt), self._kv.prefix_block_tokens)
        self._take_back([key for key, cached in self._cached.items() if not cached.isdisjoint(withdrawn)], running)

    def _note_cached(self, request: Request, chain: _Chain, done: int, ids: Sequence[int]) -> None:
        """Note which of the backend's blocks the blocks of a chain are copies of, from block `done` on."""
        size = self._kv.prefix_block_tokens
        parent = chain.cached[-1] if chain.cached else root_key(request.cache_salt)
        chain.cached += block_keys(parent, ids[len(chain.cached) * size :], size)
        for index, key in enumerate(chain.keys[done:], done):
            first, end = index * BLOCK_TOKENS // size, -(-(index + 1) * BLOCK_TOKENS // size)
            self._cached.setdefault(key, set()).update(chain.cached[first:end])
        if len(self._cached) > len(self._ancestry):
            self._cached = {key: cached for key, cached in self._cached.items() if key in self._ancestry}

    def _take_back(self, keys: Iterable[Key], running: Iterable[Request]) -> None:
        """Delete wrong blocks, and what was computed on them."""
        wrong = self._ancestry.descendants(keys)
        if not wrong:
            return
        self._writer.remove(list(wrong))
        self._break(running, wrong, self._root, BLOCK_TOKENS)
        for request, fetch in list(self._fetches.items()):
            if any(block.key in wrong for block in fetch.blocks):
                self.forget(request)

    def _break(self, running: Iterable[Request], wrong: Set[Key], root: Callable[[Request], Key], size: int) -> None:
        """Have requests write nothing more whose tokens have a wrong key, in blocks of `size` tokens."""
        for request in running:
            ids = request.token_ids(0, request.num_tokens)
            if not wrong.isdisjoint(block_keys(root(request), ids, size)):
                self._chains.setdefault(request, _Chain()).broken = True

    def forget(self, request: Request) -> None:
        """Read nothing more for a request."""
        if (fetch := self._fetches.pop(request, None)) is not None:
            self._reader.drop(fetch)

    def _copy_in(self, slot: int, block: int, found: Contents, cached: int) -> bool:
        start, end = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
        return self._rows.copy_in(found.parts, slot, start, end, max(start, cached))

    def _root(self, request: Request) -> Key:
        root = self._fingerprint + root_key(request.cache_salt)
        return blake2b(root, digest_size=KEY_BYTES, person=b"vattn root").digest()

    def _block(self, index: int, key: Key, ids: Sequence[int]) -> Block:
        start = index * BLOCK_TOKENS
        return Block(self._fingerprint, key, index, ids[start : start + BLOCK_TOKENS], self._label)


def _room(num_bytes: int) -> memoryview:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy().data


def _close(owner: int, writer: WriteBehind, reader: ReadAhead) -> None:
    if os.getpid() != owner:  # a child that was forked has none of the threads, and ends, too
        return
    writer.close(_CLOSING)
    reader.close(PATIENCE)
