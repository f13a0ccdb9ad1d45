"""Which token blocks are kept for requests to come: the policy of prefix caching, for any store of token blocks.

The values of a block depend on all tokens up to its end, and on whatever else the salt stands for (an adapter, an
image's hash, a tenant). So a block's key is a chained hash of both, and an index from key to block is all that finding
a prefix takes: no tree. The hash is cryptographic: a prompt that is crafted to collide would read another's cache.

A block that no running request uses stays until its memory is needed. The first to go is the one that was used least
recently; of those used last at the same time, the one at the end of the longest prefix, since without its predecessors
it could not be found anyway.

Nothing here knows what a block is made of: pages of a slot, or a row of a pool.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

from vattn.errors import InvalidTokens, TokenMismatch

Key = bytes
_KEY_BYTES = 32


class Admission(NamedTuple):
    """A request that was given a slot.

    Attributes:
        reqid: the slot.
        cached_tokens: tokens at its start whose K and V are there; the rest, at least one, has to be computed.
    """

    reqid: int
    cached_tokens: int


@dataclass(eq=False)
class Block:
    """A token block that a store holds once, however many requests use it.

    Attributes:
        depth: blocks before it.
        key: what its values depend on; None where nobody has said.
        users: running requests that use it.
        published: it is in the index.
        last_use: when the last user left, by a clock that all indexes share.
    """

    depth: int
    key: Key | None = None
    users: int = 0
    published: bool = False
    last_use: int = 0


B = TypeVar("B", bound=Block)
_clock = itertools.count(1)


def root_key(salt: bytes) -> Key:
    """The key before a prompt's first block.

    Raises:
        InvalidTokens: the salt is not `bytes`. Text has to be encoded by who knows how.
    """
    if not isinstance(salt, bytes):
        raise InvalidTokens(f"salt={salt!r} is {type(salt).__name__}; it must be bytes (encode text first)")
    return blake2b(salt, digest_size=_KEY_BYTES, person=b"vattn salt").digest()


def block_keys(parent: Key, token_ids: Sequence[int], block_tokens: int) -> Iterator[Key]:
    """The keys of the whole blocks of `token_ids`, in order.

    Args:
        parent: the key of the block before the first one, or `root_key`.
        token_ids: as `as_ids` returns them.
        block_tokens: tokens per block.
    """
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        tokens = array("q", token_ids[start : start + block_tokens]).tobytes()
        parent = blake2b(parent + tokens, digest_size=_KEY_BYTES, person=b"vattn block").digest()
        yield parent


def as_ids(token_ids: Sequence[int]) -> list[int]:
    """Token ids as a list of numbers; a tensor or an array of one dimension is taken as well.

    Raises:
        InvalidTokens: it is no sequence of whole numbers of 64 bits.
    """
    try:
        return array("q", token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids).tolist()
    except (TypeError, OverflowError) as error:
        raise InvalidTokens(f"token_ids must be a sequence of whole numbers of 64 bits: {error}") from error


def check_extension(known: Sequence[int], token_ids: Sequence[int], length: int) -> None:
    """Whether `token_ids` can be what a request holds.

    Args:
        known: the tokens that it is known to start with.
        token_ids: all of its tokens up to some point.
        length: tokens that it has.

    Raises:
        TokenMismatch: they are more than it has, fewer than it is known to have, or others.
    """
    if not len(known) <= len(token_ids) <= length:
        raise TokenMismatch(
            f"{len(token_ids)} token ids for a request that holds {length} tokens, {len(known)} of them committed; "
            "give all from the first token on, and none that is not computed"
        )
    if token_ids[: len(known)] != known:
        at = next(i for i, (old, new) in enumerate(zip(known, token_ids, strict=False)) if old != new)
        raise TokenMismatch(f"token {at} is {token_ids[at]}, but {known[at]} was admitted or committed there")


class PrefixIndex(Generic[B]):
    """Published blocks by key, and the order in which they may go.

    Attributes:
        query_tokens: tokens of all prompts that were admitted.
        hit_tokens: those of them that were found.
    """

    def __init__(self) -> None:
        self._blocks: dict[Key, B] = {}
        # Blocks without users, the next to go first. An entry whose block was used since, or is gone, counts no more.
        self._order: list[tuple[int, int, int, B]] = []
        self._serial = itertools.count()
        self.unused = 0  # blocks without users
        self.query_tokens = 0
        self.hit_tokens = 0

    def __iter__(self) -> Iterator[B]:
        return iter(self._blocks.values())

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: Key) -> B | None:
        """The published block with that key."""
        return self._blocks.get(key)

    def find(self, token_ids: Sequence[int], block_tokens: int, salt: bytes) -> list[B]:
        """The longest published prefix of a prompt in whole blocks, that leaves at least one token to compute."""
        found = []
        for key in block_keys(root_key(salt), token_ids[: len(token_ids) - 1], block_tokens):
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count(self, query_tokens: int, hit_tokens: int) -> None:
        """A request was admitted."""
        self.query_tokens += query_tokens
        self.hit_tokens += hit_tokens

    def publish(self, block: B, key: Key) -> bool:
        """Gives a block its key and makes it findable, unless another one with this key already is."""
        assert block.key in (None, key), "a block has two keys"
        block.key = key
        if key in self._blocks:
            return False
        self._blocks[key] = block
        block.published = True
        self._queue(block)
        return True

    def acquire(self, blocks: Iterable[B]) -> None:
        """A request uses these blocks from now on."""
        for block in blocks:
            self.unused -= block.published and not block.users
            block.users += 1

    def release(self, blocks: Iterable[B]) -> None:
        """A request does no longer."""
        now = next(_clock)
        for block in blocks:
            assert block.users > 0, "released a block that nobody uses"
            block.users -= 1
            block.last_use = now
            self._queue(block)

    def victims(self) -> Generator[B]:
        """Published blocks without users, in the order of eviction. Each may be removed while it is the current one."""
        seen = []
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
        """Evicts a block without users; it can no longer be found."""
        assert block.published, "evicted a block that is not published"
        assert not block.users, "evicted a block that is in use"
        assert block.key is not None
        del self._blocks[block.key]
        block.published = False
        self.unused -= 1

    def withdraw(self, block: B) -> None:
        """A block in use can no longer be found; its users keep it."""
        assert block.published, "withdrew a block that is not published"
        assert block.users, "withdrew a block that nobody uses, which is to be evicted"
        assert block.key is not None
        del self._blocks[block.key]
        block.published = False

    def restore(self, block: B) -> bool:
        """Takes an eviction back, the block's place in the order included; False if another one has its key by now."""
        assert block.key is not None
        return self.publish(block, block.key)

    def check(self) -> None:
        """Asserts that counts, keys and order agree."""
        for key, block in self._blocks.items():
            assert block.key == key, "a block is not where its key says"
            assert block.published, "a block in the index is not published"
        unused = {block for block in self if not block.users}
        assert self.unused == len(unused), "blocks without users are miscounted"
        assert {entry[-1] for entry in self._order if self._counts(entry)} == unused, "a block cannot be evicted"

    def _queue(self, block: B) -> None:
        if not block.published or block.users:
            return
        self.unused += 1
        if len(self._order) > 2 * len(self._blocks) + 64:
            self._order = [entry for entry in self._order if self._counts(entry)]
            heapq.heapify(self._order)
        heapq.heappush(self._order, (*self.order(block), next(self._serial), block))

    @staticmethod
    def order(block: Block) -> tuple[int, int]:
        """What victims are sorted by."""
        return block.last_use, -block.depth

    @staticmethod
    def _counts(entry: tuple[int, int, int, B]) -> bool:
        last_use, _, _, block = entry
        return block.published and not block.users and block.last_use == last_use
