"""The policy of prefix caching, for any store of token blocks: which blocks are kept for later requests.

The values of a block depend on all tokens up to its end, and on whatever else the salt stands for (an adapter, an
image's hash, a tenant). So a block's key is a chained hash of both, and finding a prefix needs only an index from keys
to blocks, not a tree. The hash is cryptographic because a prompt crafted to collide could read another request's cache.

A block that no running request uses stays until its memory is needed. The least recently used block is evicted first;
among blocks last used at the same time, it is the one at the end of the longest prefix, which could not be found
without its predecessors anyway.

Nothing here depends on what a block consists of: pages of a slot, or a row of a pool.
"""

from __future__ import annotations

import heapq
import itertools
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from vattn.errors import InvalidTokens, TokenMismatch

Key = bytes
# 64-bit integers: compared, sliced and hashed in a tenth of the time that a list takes.
TokenIds: TypeAlias = "array[int]"
KEY_BYTES = 32


class Admission(NamedTuple):
    """The result of admitting a request.

    Attributes:
        reqid: the slot of the request.
        cached_tokens: tokens at the start of the request whose K and V are cached; the others, at least one, have to
            be computed.
    """

    reqid: int
    cached_tokens: int


@dataclass(eq=False, slots=True)
class Block:
    """A token block, which a store holds only once, however many requests use it.

    Attributes:
        depth: number of blocks before it.
        key: stands for everything that its values depend on; None if unknown.
        users: number of running requests that use it.
        published: whether it is in the index.
        last_use: when a user last left it: nanoseconds of the machine's monotonic clock, by which all indexes agree.
    """

    depth: int
    key: Key | None = None
    users: int = 0
    published: bool = False
    last_use: int = 0


# The hash of a block before its parent's key and its tokens: copied, which takes less than setting it up.
_EMPTY_BLOCK = blake2b(digest_size=KEY_BYTES, person=b"vattn block")

B = TypeVar("B", bound=Block)
_last = 0


def _tick() -> int:
    """The monotonic clock, later than ever before."""
    global _last
    _last = max(_last + 1, time.monotonic_ns())
    return _last


def root_key(salt: bytes) -> Key:
    """The parent key of a prompt's first block.

    Raises:
        InvalidTokens: the salt is not `bytes`. Encoding text is up to the caller.
    """
    if not isinstance(salt, bytes):
        raise InvalidTokens(f"salt={salt!r} is {type(salt).__name__}; it must be bytes (encode text first)")
    return blake2b(salt, digest_size=KEY_BYTES, person=b"vattn salt").digest()


def block_keys(parent: Key, token_ids: Sequence[int], block_tokens: int) -> Iterator[Key]:
    """The keys of the whole blocks of `token_ids`, in order.

    Args:
        parent: the key of the block before the first one, or `root_key`.
        token_ids: 64-bit integers, without a conversion if `as_ids` returned them.
        block_tokens: tokens per block.
    """
    ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "q" else array("q", token_ids)
    tokens = memoryview(ids).cast("B")
    block_bytes = 8 * block_tokens
    for begin in range(0, len(tokens) - block_bytes + 1, block_bytes):
        block = _EMPTY_BLOCK.copy()
        block.update(parent)
        block.update(tokens[begin : begin + block_bytes])
        parent = block.digest()
        yield parent


def as_ids(token_ids: Sequence[int]) -> TokenIds:
    """Token ids of a caller, copied; one-dimensional tensors and arrays are accepted too.

    Raises:
        InvalidTokens: `token_ids` is not a sequence of 64-bit integers.
    """
    try:
        if not isinstance(token_ids, list | array):
            if isinstance(token_ids, bytes | bytearray | memoryview | Set | Mapping):
                raise TypeError(f"{type(token_ids).__name__} is no sequence of numbers")
            if hasattr(token_ids, "tolist"):
                token_ids = token_ids.tolist()
        return array("q", token_ids)
    except Exception as error:  # iterating over a caller's object may raise anything
        raise InvalidTokens(f"token_ids must be a sequence of whole numbers of 64 bits: {error}") from error


def check_extension(known: TokenIds, token_ids: TokenIds, length: int) -> None:
    """Checks that `token_ids` is consistent with the tokens of a request.

    Args:
        known: the tokens that the request is known to start with.
        token_ids: all tokens of the request up to some point.
        length: number of tokens that the request holds.

    Raises:
        TokenMismatch: there are more ids than the request holds, fewer than are known, or ids that differ from the
            known ones.
    """
    if not len(known) <= len(token_ids) <= length:
        raise TokenMismatch(
            f"{len(token_ids)} token ids for a request that holds {length} tokens, {len(known)} of them committed; "
            "give all from the first token on, and none that is not computed"
        )
    if token_ids[: len(known)] != known:
        at = next(i for i, (old, new) in enumerate(zip(known, token_ids, strict=False)) if old != new)
        raise TokenMismatch(f"token {at} is {token_ids[at]}, but {known[at]} was admitted or committed there")


class Ancestry:
    """Which key each key was made from: what was computed on a block is found by this, if the block is wrong.

    The ancestors of a cached block are known even if they are evicted. All of this follows from what keys are, so a
    call that fails takes none of it back.
    """

    def __init__(self) -> None:
        self._parents: dict[Key, Key] = {}  # of a parent before those of its children
        self._most = 1024

    def __contains__(self, key: Key) -> bool:
        return key in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def note(self, parent: Key, keys: Sequence[Key], live: Callable[[], Iterable[Key]]) -> None:
        """Notes a chain of keys.

        Args:
            parent: as for `block_keys`, which returned the keys.
            live: returns the keys whose ancestors must stay known; called rarely.
        """
        self._parents.update(zip(keys, itertools.chain((parent,), keys), strict=False))
        if len(self._parents) > self._most:
            kept = set[Key]()
            for key in itertools.chain(keys[-1:], live()):  # callers publish the chain only after this
                while key in self._parents and key not in kept:
                    kept.add(key)
                    key = self._parents[key]
            self._parents = {key: parent for key, parent in self._parents.items() if key in kept}
            self._most = 2 * len(kept) + 1024

    def descendants(self, keys: Iterable[Key]) -> set[Key]:
        """These keys, and all that were made from them."""
        found = set(keys)
        for key, parent in self._parents.items():
            if parent in found:
                found.add(key)
        return found


class PrefixIndex(Generic[B]):
    """The published blocks by key, and the order in which they are evicted."""

    def __init__(self) -> None:
        self._blocks: dict[Key, B] = {}
        # A heap of blocks without users, next victim first. Entries whose block was used or removed since are stale.
        self._order: list[tuple[int, int, int, B]] = []
        self._serial = itertools.count()
        self.unused = 0  # blocks without users
        # The blocks of the last `publish_all`, and when that was. Nearly all have a user before anybody looks for a
        # victim, so that they are not in the heap before that.
        self._fresh: tuple[int, Sequence[B]] = (0, ())

    def __iter__(self) -> Iterator[B]:
        return iter(self._blocks.values())

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: Key) -> B | None:
        """The published block with this key, or None."""
        return self._blocks.get(key)

    def find(self, token_ids: Sequence[int], block_tokens: int, salt: bytes) -> list[B]:
        """The longest published prefix of a prompt in whole blocks that leaves at least one token to compute."""
        found = []
        for key in block_keys(root_key(salt), token_ids[: len(token_ids) - 1], block_tokens):
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: B, key: Key) -> bool:
        """Gives a block its key and adds it to the index; returns False if the key is already there."""
        assert block.key in (None, key), "a block has two keys"
        block.key = key
        if key in self._blocks:
            return False
        self._blocks[key] = block
        block.published = True
        self._queue(block)
        return True

    def publish_all(self, blocks: Sequence[B], keys: Sequence[Key]) -> None:
        """Publishes blocks that nobody has used, as if they were used now. None of the keys is in the index."""
        assert self._blocks.keys().isdisjoint(keys), "a key is in the index already"
        now = _tick()
        for block, key in zip(blocks, keys, strict=True):
            block.key, block.published, block.last_use = key, True, now
        self._blocks.update(zip(keys, blocks, strict=True))
        self.unused += len(blocks)
        self._queue_fresh()
        self._fresh = now, blocks

    def acquire(self, blocks: Iterable[B]) -> None:
        """Adds a user to each of these blocks."""
        for block in blocks:
            self.unused -= block.published and not block.users
            block.users += 1

    def release(self, blocks: Iterable[B]) -> None:
        """Removes a user from each of these blocks."""
        now = _tick()
        for block in blocks:
            assert block.users > 0, "released a block that nobody uses"
            block.users -= 1
            block.last_use = now
            self._queue(block)

    def touch(self, block: B) -> None:
        """Has a block without users evicted after those that were used before now."""
        block.last_use = _tick()
        self.unused -= 1
        self._queue(block)

    def victims(self) -> Generator[B]:
        """Published blocks without users, in order of eviction. The caller may remove the current one."""
        seen = []
        self._queue_fresh()
        try:
            while self._order:
                entry = heapq.heappop(self._order)
                if self._counts(entry):
                    seen.append(entry)
                    yield entry[-1]
        finally:
            for entry in seen:
                if self._counts(entry):
                    heapq.heappush(self._order, entry)

    def remove(self, block: B) -> None:
        """Evicts a block without users from the index."""
        assert block.published, "evicted a block that is not published"
        assert not block.users, "evicted a block that is in use"
        self.unused -= 1
        self.take_out(block)

    def withdraw(self, block: B) -> None:
        """Removes a block that may be in use from the index, so that no other request finds it."""
        assert block.published, "withdrew a block that is not published"
        self.unused -= not block.users
        self.take_out(block)

    # These two change only the primary state of the index; `refresh` derives the rest.

    def take_out(self, block: B) -> None:
        """Removes a block from the index. Idempotent."""
        if block.key is not None and self._blocks.get(block.key) is block:
            del self._blocks[block.key]
        block.published = False

    def put_back(self, block: B) -> bool:
        """Undoes `take_out`; returns False if another block has the key by now."""
        assert block.key is not None
        if self._blocks.setdefault(block.key, block) is not block:
            return False
        block.published = True
        return True

    def refresh(self) -> None:
        """Recomputes counts and order from the blocks."""
        unused = [block for block in self if not block.users]
        self.unused = len(unused)
        self._order = [(*self.order(block), next(self._serial), block) for block in unused]
        heapq.heapify(self._order)
        self._fresh = 0, ()

    def check(self) -> None:
        """Asserts that counts, keys and order agree."""
        for key, block in self._blocks.items():
            assert block.key == key, "a block is not where its key says"
            assert block.published, "a block in the index is not published"
        unused = {block for block in self if not block.users}
        assert self.unused == len(unused), "blocks without users are miscounted"
        self._queue_fresh()
        assert {entry[-1] for entry in self._order if self._counts(entry)} == unused, "a block cannot be evicted"

    def _queue(self, block: B) -> None:
        if not block.published or block.users:
            return
        self.unused += 1
        self._push(block)

    def _queue_fresh(self) -> None:
        """Has the blocks of the last `publish_all` that were not used since in the heap."""
        (published, blocks), self._fresh = self._fresh, (0, ())
        for block in blocks:
            if block.published and not block.users and block.last_use == published:
                self._push(block)

    def _push(self, block: B) -> None:
        if len(self._order) > 2 * len(self._blocks) + 64:
            self._order = [entry for entry in self._order if self._counts(entry)]
            heapq.heapify(self._order)
        heapq.heappush(self._order, (*self.order(block), next(self._serial), block))

    @staticmethod
    def order(block: Block) -> tuple[int, int]:
        """The sort key of victims."""
        return block.last_use, -block.depth

    @staticmethod
    def _counts(entry: tuple[int, int, int, B]) -> bool:
        last_use, _, _, block = entry
        return block.published and not block.users and block.last_use == last_use
