"""One block as a file.

    what                     bytes                    holds
    head                     160                      `_HEAD`: which block it is, and how long what follows is
    token ids                8 per token
    sizes of parts           8 per part
    checksums of parts       4 per part               CRC-32: against disks, not against whoever may write here
    digest                   32                       BLAKE2b of all of the above
    parts                    as their sizes say

Integers are little-endian. A file is a block only if its length is exactly that, so one that was cut off is none.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

# Of files, and of what keys and values mean in them.
FORMAT = 1
KEY_BYTES = 32

_MAGIC = b"vattn kv"
_HEAD = struct.Struct("<8sIIII32s32s72s")  # magic, format, depth, tokens, parts, fingerprint, key, label
_LABEL_BYTES = 72
_DIGEST_BYTES = 32

Buffer = bytes | bytearray | memoryview
Allocate = Callable[[int], memoryview]


@dataclass(frozen=True)
class Block:
    """What a block's values depend on, all of it in its file.

    Attributes:
        fingerprint: 32 bytes that stand for everything but the tokens and the salt.
        key: 32 bytes that stand for all of it: fingerprint, salt, and the tokens of this block and of those before it.
        depth: number of blocks before it.
        token_ids: its own tokens.
        label: for people, which model it is of; not compared.
    """

    fingerprint: bytes
    key: bytes
    depth: int
    token_ids: Sequence[int]
    label: str = field(default="", compare=False)


class NotThisBlock(Exception):
    """A file that is not, or not wholly, the block that was looked for."""


@dataclass(frozen=True)
class Head:
    """The first bytes of a file, of which nothing has been checked but that they are such bytes."""

    fingerprint: bytes
    key: bytes
    depth: int
    num_tokens: int
    num_parts: int
    label: str

    SIZE = _HEAD.size

    @classmethod
    def of(cls, data: Buffer) -> Head:
        """Reads one.

        Raises:
            NotThisBlock: there is none, or of another format.
        """
        if len(data) < _HEAD.size:
            raise NotThisBlock("it is too short")
        magic, version, depth, tokens, parts, fingerprint, key, label = _HEAD.unpack_from(data)
        if (magic, version) != (_MAGIC, FORMAT):
            raise NotThisBlock("it is no block of this format")
        return cls(fingerprint, key, depth, tokens, parts, label.rstrip(b"\0").decode(errors="replace"))

    @property
    def preamble(self) -> int:
        """Bytes before the first part."""
        return _HEAD.size + 8 * self.num_tokens + 12 * self.num_parts + _DIGEST_BYTES


def pack(block: Block, parts: Sequence[Buffer]) -> bytes:
    """What comes before the parts in a block's file."""
    label = block.label.encode(errors="replace")[:_LABEL_BYTES]
    counts = len(block.token_ids), len(parts)
    head = _HEAD.pack(_MAGIC, FORMAT, block.depth, *counts, block.fingerprint, block.key, label)
    sizes = struct.pack(f"<{len(parts)}Q", *(len(part) for part in parts))
    sums = struct.pack(f"<{len(parts)}I", *map(zlib.crc32, parts))
    stated = head + _ids(block.token_ids) + sizes + sums
    return stated + _digest(stated)


def unpack(block: Block, size: int, read: Callable[[memoryview], None], allocate: Allocate) -> list[memoryview]:
    """The parts of a block, read and checked.

    Args:
        block: what the file has to be.
        size: its length in bytes.
        read: fills a buffer with the next bytes of the file; an OSError or EOFError if it cannot.
        allocate: makes room for so many bytes.

    Raises:
        NotThisBlock: the file is not that block, byte for byte.
    """
    first = bytearray(Head.SIZE)
    if size < len(first):
        raise NotThisBlock("it is too short")
    read(memoryview(first))
    head = Head.of(first)
    if head.num_tokens != len(block.token_ids) or size < head.preamble:
        raise NotThisBlock("it has another number of tokens, or is too short")
    rest = bytearray(head.preamble - Head.SIZE)
    read(memoryview(rest))
    stated, digest = bytes(first) + bytes(rest[:-_DIGEST_BYTES]), bytes(rest[-_DIGEST_BYTES:])
    if _digest(stated) != digest:
        raise NotThisBlock("its head was changed")
    ids = _ids(block.token_ids)
    found = Block(head.fingerprint, head.key, head.depth, block.token_ids)
    if found != block or not rest.startswith(ids):
        raise NotThisBlock("it is another block")
    sizes = struct.unpack_from(f"<{head.num_parts}Q", rest, len(ids))
    sums = struct.unpack_from(f"<{head.num_parts}I", rest, len(ids) + 8 * head.num_parts)
    if head.preamble + sum(sizes) != size:
        raise NotThisBlock("it was cut off, or something was added")
    data = allocate(sum(sizes))
    read(data)
    parts, start = [], 0
    for length, checksum in zip(sizes, sums, strict=True):
        part = data[start : start + length]
        if zlib.crc32(part) != checksum:
            raise NotThisBlock("its contents were changed")
        parts.append(part)
        start += length
    return parts


def _ids(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES, person=b"vattn store").digest()
