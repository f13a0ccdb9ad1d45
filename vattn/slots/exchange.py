"""Exchange: which blocks of a cache others may map, and which of theirs requests here begin with.

A block of another process is in the index like any other, as a cached one that costs nothing. It stays there while a
request uses it, and a moment longer, so that its owner gets back what nobody uses.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from hashlib import blake2b

from vattn.broker.directory import Shape
from vattn.errors import ConfigError, VattnError
from vattn.layout import Layout
from vattn.pool.journal import Change
from vattn.pool.lent import LentCore
from vattn.pool.shares import Foreign, Shares
from vattn.prefix import Key, TokenIds, block_keys, root_key
from vattn.slots.blocks import PageBlock, State
from vattn.slots.parts import Decisions, Parts
from vattn.slots.reclaimer import Reclaimer

_UNUSED_NS = 10**9  # for which a block of another process stays that no request uses
_TOGETHER = 32  # blocks that are published while calls wait


class Exchange(Decisions):
    """The blocks of one cache; used under the pool's lock.

    Args:
        wake: has `publish` called soon, by another thread.
    """

    def __init__(self, parts: Parts, reclaimer: Reclaimer, shares: Shares, wake: Callable[[], object]) -> None:
        super().__init__(parts)
        self._reclaimer = reclaimer
        self._shares = shares
        self._band = parts.bands.only
        self._band.shared.share(shares)
        self._wake = wake
        self._offers: deque[tuple[PageBlock, Sequence[int]]] = deque()
        self._published: weakref.WeakValueDictionary[int, PageBlock] = weakref.WeakValueDictionary()
        self._foreign: dict[Foreign, dict[int, PageBlock]] = {}  # by depth
        self._withdrawn: set[Key] | None = None  # nothing is kept for nobody: None until `take_withdrawn` is called
        self._stopped = self._closed = False

    @classmethod
    def of(cls, parts: Parts, layout: Layout, reclaimer: Reclaimer) -> Exchange | None:
        """For the first cache of a pool that shares prefixes; None for any other.

        Raises:
            ConfigError: a layer has a sliding window.
        """
        core = parts.core
        if not isinstance(core, LentCore) or core.fingerprint is None or not core.may_share:
            return None
        shape, columns = _shape(layout, core.page_size, core.fingerprint, core.total_pages)
        shares = Shares(core.native, shape, columns)
        exchange = cls(parts, reclaimer, shares, core.borrower.wake)
        core.share(shares, exchange)
        return exchange

    # For calls

    def find(self, change: Change, token_ids: TokenIds, salt: bytes) -> list[Key]:
        """The keys of a prompt's longest prefix that leaves a token to compute, with blocks of others where the index
        has none.
        """
        size, index, found = self._bands.block_tokens, self._band.shared.index, list[Key]()
        ids = token_ids[:-1]
        shares = not self._stopped and bool(self._shares.peers)
        # Lazily, as hashing is much of a miss: of keys that the index lacks, only the first one is needed at first.
        for missing, run in itertools.groupby(
            block_keys(root_key(salt), ids, size), lambda key: index.get(key) is None
        ):
            if not missing:
                found += run
                continue
            ahead = iter(run)
            first = next(ahead)
            places = self._shares.places(first) if shares else ()
            if not places:
                break
            group = [first, *ahead]
            rest, end = iter(group), len(found) + len(group)
            for foreign in self._shares.fetch(group, ids, len(found), places):
                blocks = {
                    depth: PageBlock(depth, foreign=foreign, state=State.CACHED) for depth in sorted(foreign.left)
                }
                self._foreign[foreign] = blocks
                keys = [*itertools.islice(rest, len(blocks))]
                self._slots.ancestry.note(found[-1] if found else root_key(salt), keys, self._slots.live_keys)
                self._band.shared.insert(change, foreign, [*blocks.values()], keys)
                found += keys
            if len(found) < end:
                break
        return found

    def offer(self, blocks: Sequence[PageBlock], token_ids: Sequence[int]) -> None:
        """Has others find blocks soon, of a request with these tokens."""
        size = self._bands.block_tokens
        if self._stopped:
            return
        for block in blocks:
            self._offers.append((block, token_ids[block.depth * size : (block.depth + 1) * size]))
        if blocks:
            self._wake()

    def stop(self, change: Change) -> None:
        """Shares nothing from here on: what is computed may no longer be what the fingerprint says."""
        self._stopped = True
        self._offers.clear()
        for number, block in [*self._published.items()]:
            if block.entry == number:
                self._band.shared.unpublish(change, block)
        self._shares.withdraw_hidden(self._shares.hidden_keys)
        for _, _, block in self._blocks():
            if block.published:
                self._slots.withdraw(change, self._band.shared, block)

    def close(self) -> None:
        """Its cache has gone."""
        self._stopped = self._closed = True
        self._offers.clear()
        self._foreign.clear()

    def heed(self, change: Change) -> None:
        """Lets no request find what its owner has found to be wrong."""
        for peer in self._shares.peers:
            count = peer.directory.withdrawals
            if count == peer.withdrawals:
                continue
            change.set(peer, "withdrawals", count)
            wrong = set[Key]()
            for foreign, depth, block in self._blocks():
                if foreign.peer is peer and block.published and block.key is not None:
                    entry = peer.directory.read(foreign.entry(depth))
                    if entry is None or entry.key != block.key:
                        wrong.add(block.key)
            if wrong:
                wrong = self._slots.ancestry.descendants(wrong)
                self._slots.retract(change, wrong)
                if self._withdrawn is not None:
                    change.set(self, "_withdrawn", self._withdrawn | wrong)

    @property
    def behind(self) -> bool:
        """Whether an owner has found something to be wrong since `heed`."""
        return any(peer.directory.withdrawals != peer.withdrawals for peer in self._shares.peers)

    def take_withdrawn(self, change: Change) -> Set[Key]:
        """The keys of what `heed` has found since the last call, and of what was computed on it."""
        withdrawn = self._withdrawn
        if withdrawn is None or withdrawn:
            change.set(self, "_withdrawn", set())
        return withdrawn or frozenset()

    def _blocks(self) -> Iterator[tuple[Foreign, int, PageBlock]]:
        """The blocks of other processes, with their depths."""
        return ((foreign, depth, block) for foreign, blocks in self._foreign.items() for depth, block in blocks.items())

    # For the borrower's thread, between calls

    @property
    def waits(self) -> bool:
        """Whether there is something to publish."""
        return bool(self._offers or self._band.shared.restored)

    def publish(self) -> None:
        """Publishes some of what was offered."""
        if self._band.shared.restored:
            self._offer_restored()
        for _ in range(min(_TOGETHER, len(self._offers))):
            block, tokens = self._offers[0]
            if block.published and block.entry is None:
                entry = self._band.shared.show(block, tokens)
                if entry is not None:
                    self._published[entry] = block
            self._offers.popleft()  # now that it is done: `waits` is asked meanwhile

    def _offer_restored(self) -> None:
        """Has others find again what a call had evicted that failed."""
        restored, directory = self._band.shared.restored, self._shares.directory
        entries = [] if self._stopped else [*self._published.items()]
        for number, block in entries:
            if block not in restored or not block.published or block.key is None:
                continue
            if block.entry == number:
                directory.show(number, block.key)
            elif block.entry is None and (tokens := directory.removed_tokens(number, block.key)) is not None:
                self._offers.append((block, tokens))
        self._band.shared.restored = set()  # now that they are offered: `waits` is asked meanwhile

    def tend(self) -> None:
        """Gives others' blocks back that nobody uses, and takes back what others do not use."""
        if self._closed:
            return
        with contextlib.suppress(VattnError):  # a driver that fails, say: another time
            self._let_go()
        mapper = self._core.mapper
        if mapper.passed(mapper.last) and not mapper.failed:
            for foreign, depth, block in [*self._blocks()]:
                if not block.published and not block.slots:
                    del self._foreign[foreign][depth]
                    if not self._foreign[foreign]:
                        del self._foreign[foreign]
            self._shares.release_all_but(self._foreign)
        self._shares.forget_ended()
        self._note_pinned()

    def _let_go(self) -> None:
        now = time.monotonic_ns()
        unused = [
            block
            for _, _, block in self._blocks()
            if not block.users
            and (block.published or block.slots)
            and now - block.last_use > _UNUSED_NS
            and self._slots.length.keys().isdisjoint(block.slots)
        ]
        unused.sort(key=lambda block: -block.depth)

        def plan(change: Change) -> None:
            self._shares.give_up_lingering(change)  # first: what lingers from here on may be taken back
            self.heed(change)
            for block in unused:
                self._reclaimer.let_go(change, self._band, block)

        if unused or self._shares.lingers or self.behind:
            self._core.execute(plan)

    def _note_pinned(self) -> None:
        """Notes which blocks others have mapped, and has them evicted after those that are not in use."""
        found = (self._published.get(number) for number in self._shares.directory.pinned())
        blocks = {block for block in found if block is not None}
        self._band.shared.note_pinned(blocks)
        for block in blocks:
            if block.published and not block.users:
                self._band.shared.index.touch(block)


def _shape(layout: Layout, page_size: int, fingerprint: bytes, pages: int) -> tuple[Shape, list[tuple[int, int]]]:
    """What all blocks of a cache have in common, and their columns and lanes per kind of tensor.

    Args:
        fingerprint: of all that their contents depend on but tokens, salt and layout.
        pages: most of the cache.

    Raises:
        ConfigError: a layer has a sliding window.
    """
    band = layout.bands[0]
    if len(layout.bands) > 1 or band.window is not None:
        raise ConfigError("prefixes of models with sliding windows are not shared between processes; leave that out")
    kinds = [(kind.tensors, kind.runs, kind.row_bytes) for kind in band.kinds]
    text = repr((fingerprint, layout.name, layout.kv_order, page_size, band.block_tokens, kinds)).encode()
    columns = [(kind.columns(band.block_tokens), kind.lanes) for kind in band.kinds]
    block_pages = sum(columns * lanes for columns, lanes in columns)
    print_ = blake2b(text, digest_size=32, person=b"vattn share").digest()
    return Shape(print_, page_size, band.block_tokens, block_pages, max(1, pages // block_pages)), columns
