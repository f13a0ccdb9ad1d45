"""Mutations of stored prefixes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.campaign.mutations import mutation
from vattn.engine.scheduling import stored
from vattn.store import blockfile, folder


@mutation(None, "the contents of files are not compared with their checksums", "store")
def no_checksums() -> None:
    blockfile.zlib.crc32 = lambda part: 0  # type: ignore[assignment]


@mutation(None, "the heads of files are not compared with their digests", "store")
def no_digests() -> None:
    blockfile._digest = lambda data: bytes(blockfile._DIGEST_BYTES)


@mutation(None, "a file is the block whose name it has", "store")
def named_is_enough() -> None:
    blockfile.Block.__eq__ = lambda self, other: True  # type: ignore[method-assign, assignment]


@mutation(None, "files that others may have written are served", "store")
def open_to_others() -> None:
    folder._is_open_to_others = lambda found: False


@mutation(None, "files that are no blocks stay", "store")
def rejected_stay() -> None:
    folder.PrefixStore._reject = lambda self, path, inode=None: None  # type: ignore[method-assign]


@mutation(None, "what writers that were killed have left stays", "store")
def abandoned_stay() -> None:
    folder._is_abandoned = lambda path: False


@mutation(None, "nothing gives way to what is new", "store")
def no_eviction() -> None:
    folder.PrefixStore._make_room = lambda self, size, used_ns: True  # type: ignore[method-assign]


@mutation(None, "processes do not wait for each other's lock", "store")
def locks_of_their_own() -> None:
    @contextlib.contextmanager
    def locked(self: folder.PrefixStore) -> Iterator[None]:
        with self._mutex:
            yield

    folder.PrefixStore._locked = locked  # type: ignore[method-assign, assignment]


@mutation("store", "a lock that was deleted is used on", "store")
def deleted_lock() -> None:
    folder.PrefixStore._has_books = lambda self: True  # type: ignore[method-assign]


@mutation("store", "folders count as files", "store")
def folders_count() -> None:
    def files(self: folder.PrefixStore, name: Any) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.path.iterdir():
            if name.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.lstat()

    folder.PrefixStore._files = files  # type: ignore[method-assign]


@mutation("store", "links and pipes count as blocks that are there", "store")
def anything_is_there() -> None:
    def touch(path: Path, used_ns: int) -> bool:
        try:
            os.utime(path, ns=(used_ns, used_ns))
        except FileNotFoundError:
            return False
        return True

    folder._touch = touch


@mutation(None, "an engine's keys do not depend on the salt", "store")
def no_salt_of_keys() -> None:
    stored.StoredPrefixes._root = (  # type: ignore[method-assign]
        lambda self, request: blake2b(self._fingerprint, digest_size=blockfile.KEY_BYTES).digest()
    )


@mutation(None, "engines of other models have the same keys", "store")
def no_fingerprint_of_keys() -> None:
    def root(self: stored.StoredPrefixes, request: stored.Request) -> bytes:
        return blake2b(stored.root_key(request.cache_salt), digest_size=blockfile.KEY_BYTES).digest()

    def block(self: stored.StoredPrefixes, index: int, key: bytes, ids: Sequence[int]) -> blockfile.Block:
        start = index * stored.BLOCK_TOKENS
        return blockfile.Block(bytes(32), key, index, ids[start : start + stored.BLOCK_TOKENS])

    stored.StoredPrefixes._root = root  # type: ignore[method-assign]
    stored.StoredPrefixes._block = block  # type: ignore[method-assign]
