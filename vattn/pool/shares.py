"""Shares: blocks of a pool that other processes may map, and theirs that this one maps.

What a directory promises, and how it is decided who may use a page, is in `vattn.broker.directory`. Here are the files:
the directory of this process, and, of each other one, its directory and its memory, which can only be read. Pages of
others count in no budget here.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vattn import _native
from vattn.broker.directory import Directory, NoDirectory, OwnDirectory, Shape
from vattn.errors import DriverError
from vattn.pool.journal import Change

# Of a block: per kind of tensor, columns and lanes.
Columns = Sequence[tuple[int, int]]

_RUN = 64  # entries that are looked at together


@dataclass(eq=False)
class Peer:
    """Another process that has published blocks, or had.

    Attributes:
        file: the number of its memory (`_native.open_foreign_file`).
        pins: how many foreign blocks have each entry pinned.
        withdrawals: those that were dealt with.
        offered: what was known of it when its files were last given to the broker: 1 that it has left, for which the
            broker may not take them yet, 2 that its process has ended; 0 before that.
    """

    directory: Directory
    file: int
    pins: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    withdrawals: int = 0
    offered: int = 0


@dataclass(slots=True, eq=False)
class Foreign:
    """Blocks of another process that follow each other, in its directory too. Their pages stay as they are until they
    are released.

    Attributes:
        number: of the entry of the first block.
        depth: of the first block.
        columns: of a block.
        pages: of all of them, per kind of tensor. A prompt has thousands of pages, so that there is no list per block.
        left: the depths of those that were not released.
    """

    peer: Peer
    number: int
    depth: int
    columns: Columns
    pages: Sequence[_native.Pages] = ()
    left: set[int] = field(default_factory=set)

    def entry(self, depth: int) -> int:
        """The number of the entry of the block at this depth."""
        return self.number + depth - self.depth

    def part(self, begin: int, end: int) -> tuple[_native.Pages, ...]:
        """The pages of the blocks from depth `begin` to `end`, per kind of tensor."""
        first, last = begin - self.depth, end - self.depth
        return tuple(
            pages.part(first * columns, last * columns)
            for pages, (columns, _) in zip(self.pages, self.columns, strict=True)
        )


class Left(NamedTuple):
    """A published block whose cache is gone.

    Attributes:
        pages: its pages, per kind of tensor.
        last_use: when a request here last used it, in nanoseconds of the monotonic clock.
    """

    pages: tuple[_native.Pages, ...]
    last_use: int


class Lingering(NamedTuple):
    """A block that has gone here, while others have it mapped.

    Attributes:
        pages: its pages, per kind of tensor.
        key: None once it was found to be wrong.
    """

    pages: tuple[_native.Pages, ...]
    key: bytes | None


class Shares:
    """The files; used under the pool's lock.

    Args:
        shape: what all blocks have in common, of this process and of others.
        columns: of a block.

    Attributes:
        directory: of this process.
        peers: the other processes.
        left: published blocks whose cache is gone, by the numbers of their entries, in order of eviction: others find
            them until their memory is needed, and they stay in the file when the pool ends.
        alone: whether the cache is gone.
    """

    def __init__(self, native: _native.PagePool, shape: Shape, columns: Columns) -> None:
        self._native = native
        self._columns = columns
        self.directory = OwnDirectory.make(shape)
        self.peers: list[Peer] = []
        self.left: dict[int, Left] = {}
        self.alone = False
        self._lingering: dict[int, Lingering] = {}
        self._returned: set[_native.Pages] = set()
        self._fetched: set[Foreign] = set()

    # Blocks of this process

    def publish(self, key: bytes, tokens: Sequence[int], pages: Iterable[_native.Pages]) -> int | None:
        """Lets others map a block, whose pages have been filled; the number of its entry, or None if none is free."""
        if self.directory.find(key) is not None:
            return None
        offsets = [offset for each in pages for offset in self._native.offsets(each)]
        with contextlib.suppress(OSError):  # there is no memory for it
            return self.directory.add(key, tokens, offsets)
        return None

    def remove(self, number: int) -> bool:
        """Lets nobody map a block any more; False if somebody does now, and so keeps it."""
        return self.directory.remove(number)

    def hide(self, change: Change, number: int, key: bytes, pages: tuple[_native.Pages, ...]) -> None:
        """Has nobody find a block any more whose pages others have mapped. These are held until nobody has."""
        change.put(self._lingering, number, Lingering(pages, key))
        self.directory.hide(number)

    def withdraw(self, change: Change, number: int, pages: tuple[_native.Pages, ...]) -> None:
        """`hide` for a block that is wrong: those who have it mapped have no request begin with it."""
        change.put(self._lingering, number, Lingering(pages, None))
        self.directory.withdraw(number)

    def withdraw_hidden(self, keys: Container[bytes]) -> None:
        """`withdraw` for hidden blocks with these keys; a change that fails takes none of it back."""
        for number, block in [*self._lingering.items()]:
            if block.key is not None and block.key in keys:
                self.directory.withdraw(number)
                self._lingering[number] = Lingering(block.pages, None)

    @property
    def hidden_keys(self) -> set[bytes]:
        """The keys of hidden blocks."""
        return {block.key for block in self._lingering.values() if block.key is not None}

    def give_up_lingering(self, change: Change) -> None:
        """Plans to give up what was hidden or withdrawn and is not mapped any more."""
        for number, block in [*self._lingering.items()]:
            if self.directory.remove(number):
                self._returned.update(block.pages)
                del self._lingering[number]
        self._give_up_returned(change)

    def _give_up_returned(self, change: Change) -> None:
        """Plans to give up the pages of removed entries; a later call does if this one fails."""
        for pages in [*self._returned]:
            self._native.let_go(change.transaction, pages)
            change.on_revert(self._returned.add, pages)
            self._returned.discard(pages)

    def reclaim(self, change: Change, pages: int) -> int:
        """Plans to free up to `pages` pages, or a few more, of blocks in `left` that nobody has mapped; returns how
        many become free.
        """
        before = self._native.counts().taken
        self._give_up_returned(change)
        for number, block in [*self.left.items()]:
            if before - self._native.counts().taken >= pages:
                break
            if self.directory.remove(number):
                self._returned.update(block.pages)
                del self.left[number]
                self._give_up_returned(change)
        freed: int = before - self._native.counts().taken
        return freed

    @property
    def left_pages(self) -> int:
        """Pages of the blocks in `left`."""
        return self.directory.shape.block_pages * len(self.left)

    @property
    def spare_pages(self) -> int:
        """Pages that `reclaim` can give."""
        if not self.left:
            return 0
        return self.directory.shape.block_pages * len(self.left.keys() - self.directory.pinned())

    @property
    def oldest_use(self) -> int | None:
        """When the block that `reclaim` would take next was last used."""
        return next((block.last_use for block in self.left.values()), None)

    @property
    def lingers(self) -> bool:
        """Whether anything was hidden or withdrawn that others may have mapped."""
        return bool(self._lingering or self._returned)

    @property
    def held(self) -> list[_native.Pages]:
        """The pages that are held here, and by no cache."""
        left = (each for block in self.left.values() for each in block.pages)
        lingering = (each for block in self._lingering.values() for each in block.pages)
        return [*left, *self._returned, *lingering]

    # Blocks of others

    def meet(self, memory: int, directory: int) -> None:
        """Takes the files of another process, by descriptors that become this object's."""
        try:
            try:
                found = Directory(directory)
            except NoDirectory:
                os.close(directory)
                return
            known = {peer.directory.identity for peer in self.peers} | {self.directory.identity}
            mine, theirs = self.directory.shape, found.shape
            alike = all(
                getattr(mine, name) == getattr(theirs, name)
                for name in ("fingerprint", "page_size", "block_tokens", "block_pages")
            )
            if found.identity in known or not alike:
                found.close()
                return
            try:
                self.peers.append(Peer(found, _native.open_foreign_file(mine.page_size, memory)))
            except DriverError:  # there is no descriptor for it
                found.close()
        finally:
            os.close(memory)

    def orphans(self, *, anew: bool) -> list[tuple[int, int]]:
        """Descriptors of the memory and the directory of each other process that has left or ended since the last call,
        or ever if this is to begin anew; to be closed by the caller.
        """
        size = self.directory.shape.page_size
        opened, offered = list[int](), list[tuple[Peer, int]]()
        try:
            for peer in self.peers:
                before = 0 if anew else peer.offered
                now = 2 if before == 2 or not peer.directory.has_owner else int(peer.directory.left)
                offered.append((peer, now))
                if now > before:
                    opened.append(_native.host_file_descriptor(size, peer.file))
                    opened.append(os.dup(peer.directory.fileno()))
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        for peer, now in offered:
            peer.offered = now
        return list(zip(opened[::2], opened[1::2], strict=True))

    def places(self, key: bytes) -> list[tuple[Peer, int]]:
        """Where another process is said to have a block with this key, with the number of its entry; only `fetch`
        knows.
        """
        found = ((peer, peer.directory.find(key)) for peer in self.peers)
        return [(peer, number) for peer, number in found if number is not None]

    def fetch(
        self, keys: Sequence[bytes], tokens: array[int], depth: int, places: Iterable[tuple[Peer, int]]
    ) -> list[Foreign]:
        """The blocks of other processes with these keys and tokens, pinned: from the first one on, as far as they go.

        Args:
            tokens: of the prompt, from its first one on.
            depth: of the first block.
            places: of the first key.
        """
        fetched, done = list[Foreign](), 0
        while done < len(keys):
            run, where = keys[done : done + _RUN], places if not done else self.places(keys[done])
            found = next(filter(None, (self._fetch(*place, run, tokens, depth + done) for place in where)), None)
            if found is None:
                break
            fetched.append(found)
            done += len(found.left)
        return fetched

    def _fetch(self, peer: Peer, number: int, keys: Sequence[bytes], tokens: array[int], depth: int) -> Foreign | None:
        """Those at the start of `fetch` whose entries are neighbours in one directory, from this number on."""
        count = peer.directory.alike(number, keys)
        while count and not peer.directory.pin(number, count):
            count //= 2
        if not count:
            return None
        found = Foreign(peer, number, depth, self._columns)
        for entry in range(number, number + count):
            peer.pins[entry] += 1
        try:
            self._fetched.add(found)
            size = self.directory.shape.block_tokens
            ids = tokens[depth * size : (depth + count) * size].tobytes()
            offsets = peer.directory.offsets(number, keys[:count], ids)
            found.pages = self._native.add_foreign(peer.file, offsets, self._columns)
            found.left.update(range(depth, depth + found.pages[0].columns // self._columns[0][0]))
        finally:
            for entry in range(number + len(found.left), number + count):
                self._unpin(peer, entry)
            if not found.left:
                self._fetched.discard(found)
        return found if found.left else None

    def release_all_but(self, known: Mapping[Foreign, Iterable[int]]) -> None:
        """Gives up pages that nothing holds or maps any more: of all blocks but these, by depth, and so of those that
        an interrupted call has fetched, and nobody knows of.
        """
        for foreign in [*self._fetched]:
            for depth in foreign.left.difference(known.get(foreign, ())):
                self._release(foreign, depth)

    def _release(self, foreign: Foreign, depth: int) -> None:
        for pages in foreign.part(depth, depth + 1):
            self._native.remove_foreign(pages)
        foreign.left.discard(depth)
        if not foreign.left:
            self._fetched.discard(foreign)
        self._unpin(foreign.peer, foreign.entry(depth))

    @property
    def foreign_pages(self) -> int:
        """Pages of others that requests have, or find."""
        return self.directory.shape.block_pages * sum(len(foreign.left) for foreign in self._fetched)

    def forget_ended(self) -> None:
        """Closes the files of those who have nothing any more."""
        for peer in [*self.peers]:
            if not peer.pins and peer.directory.ended:
                self.peers.remove(peer)
                self._close(peer)

    def close(self) -> None:
        """Closes all files but the directory, which who keeps what was published has as well. That stays in the file of
        the pool's memory. After the worker has ended.
        """
        for foreign in [*self._fetched]:
            for depth in [*foreign.left]:
                with contextlib.suppress(RuntimeError):  # a cache of a pool that cannot be used any more has them still
                    self._release(foreign, depth)
        for peer in self.peers:
            self._close(peer)
        self.peers.clear()
        for pages in self.held:
            self._native.leave(pages)
        for held in (self.left, self._returned, self._lingering):
            held.clear()
        self.directory.leave()

    def _unpin(self, peer: Peer, number: int) -> None:
        peer.pins[number] -= 1
        if not peer.pins[number]:
            del peer.pins[number]
            peer.directory.unpin(number)

    def _close(self, peer: Peer) -> None:
        _native.close_host_file(self.directory.shape.page_size, peer.file)
        peer.directory.close()
