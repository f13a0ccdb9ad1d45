"""Which blocks the requests have: allocator, block tables, prefix cache, policy. Where blocks lie is for subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from vattn import cpu
from vattn.attention import PackedBatch
from vattn.config import budget_bytes
from vattn.errors import ConfigError, InvalidLength, OutOfPages, TokenMismatch
from vattn.prefix import (
    Admission,
    Ancestry,
    Block,
    Key,
    PrefixIndex,
    TokenIds,
    as_ids,
    block_keys,
    check_extension,
    root_key,
)
from vattn.units import format_bytes

from ..checks import checked_whole
from .base import KVDescription, PlainStore, SlotView
from .slot_book import SlotBook
from .spec import KVSpec

_OPTIONS = ("num_blocks", "windows")


@dataclass(eq=False, kw_only=True)
class PoolBlock(Block):
    """A block of the pool that is in use or cached."""

    number: int


@dataclass
class _Slot:
    """Blocks of one request, in the order of its tokens: token t is in `blocks[t // block_size]`.

    `tokens` are the known ids, of whole blocks, whose keys start from `salt`. The first `admitted` blocks were found,
    and `published` are those that this slot published. If what follows was retracted or computed on what was, only the
    first `sound` blocks may be published.
    """

    blocks: list[PoolBlock] = field(default_factory=list)
    length: int = 0
    tokens: TokenIds = field(default_factory=lambda: array("q"))
    salt: bytes = b""
    admitted: int = 0
    published: list[PoolBlock] = field(default_factory=list)
    sound: int | None = None


class BlockKV(PlainStore, ABC):
    """Block allocator, block tables, and a prefix cache with the policy of `vattn.prefix`.

    Conservation law: every block is in exactly one of: the free list, the blocks that slots use, the cached blocks that
    no slot uses; together they are `num_blocks`. A slot whose greatest length was n has `ceil(n / block_size)` blocks,
    so a request wastes less than one block, unless `prepare` was asked for more tokens than it has. Only whole blocks
    are shared, and lengths never go down into one, so shared blocks are never written; the last block of a forked
    request, which is not whole, is copied.

    Args:
        num_blocks: blocks in the pool; one block holds `block_size` tokens of every layer, keys and values.

    Raises:
        ConfigError: no block, or layers that differ.
    """

    name: ClassVar[str] = "paged"

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        self._layer = spec.plain_layer(self.name, _OPTIONS)
        self.block_size = spec.block_size
        self.num_blocks = num_blocks = checked_whole("num_blocks", num_blocks, 1)
        self.max_blocks = -(-spec.max_model_len // spec.block_size)
        self.token_bytes = spec.token_bytes
        # Outside inference mode: a tensor made inside could never be written outside it.
        with torch.inference_mode(False):
            self.block_table = torch.zeros((spec.max_num_seqs, self.max_blocks), dtype=torch.int32, device=spec.device)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._slots: SlotBook[_Slot] = SlotBook(spec.max_num_seqs, spec.max_model_len)
        self._index: PrefixIndex[PoolBlock] = PrefixIndex()
        self._ancestry = Ancestry()
        self._scatter: tuple[PackedBatch, Tensor] | None = None
        # Keys and values of each layer, `[rows, heads, dim]`; a row is a token of a block.
        self._homes: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def from_spec(cls, spec: KVSpec) -> Self:
        spec.plain_layer(cls.name, _OPTIONS)
        asked = (spec.kv_options or {}).get("num_blocks")
        if asked is None:
            return cls(spec, spec.units("block", spec.block_size, "a smaller block_size"))
        num_blocks = checked_whole("num_blocks", asked, 1)
        budget, size = budget_bytes(spec.memory_budget, spec.device), num_blocks * spec.block_size * spec.token_bytes
        if size > budget:
            raise ConfigError(
                f"num_blocks={num_blocks} of {spec.block_size} tokens take {format_bytes(size)}, but memory_budget is "
                f"{format_bytes(budget)}; give more memory or fewer blocks"
            )
        return cls(spec, num_blocks)

    @property
    def prefix_block_tokens(self) -> int:
        return self.block_size

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        self._slots.checked_length(num_tokens)
        return self._slots.take(_Slot())

    def admit(self, token_ids: Sequence[int], salt: bytes = b"") -> Admission:
        ids, blocks = self._cached(token_ids, salt)
        number = self.allocate(len(ids))
        slot = self._slots[number]
        self._index.acquire(blocks)
        self._append(number, blocks)
        slot.length = len(blocks) * self.block_size
        slot.tokens, slot.salt, slot.admitted = ids[: slot.length], salt, len(blocks)
        return Admission(number, slot.length)

    def find(self, token_ids: Sequence[int], salt: bytes = b"", *, rows: bool = False) -> int:
        return len(self._cached(token_ids, salt)[1]) * self.block_size

    def commit(self, slot: int, token_ids: Sequence[int]) -> None:
        ids, mine = as_ids(token_ids), self._slots[self._slots.checked(slot)]
        check_extension(mine.tokens, ids, mine.length)
        known, count = len(mine.tokens), len(ids) // self.block_size
        if mine.sound is not None:
            count = min(count, mine.sound)
        ids = ids[: count * self.block_size]
        parent = mine.blocks[known // self.block_size - 1].key if known else root_key(mine.salt)
        assert parent is not None
        blocks = mine.blocks[known // self.block_size :]
        keys = list(block_keys(parent, ids[known:], self.block_size))
        self._ancestry.note(parent, keys, self._live_keys)
        for block, key in zip(blocks, keys, strict=False):
            if block.key not in (None, key):
                raise TokenMismatch(f"block {block.depth} was committed with other tokens by a request that shares it")
        for block, key in zip(blocks, keys, strict=False):
            if not block.published and self._index.publish(block, key):
                mine.published.append(block)
        mine.tokens = ids

    def retract(self, slot: int) -> None:
        mine = self._slots[self._slots.checked(slot)]
        first = {block.key for block in mine.published if block.key is not None}
        committed = mine.blocks[mine.admitted : len(mine.tokens) // self.block_size]
        # Of these the index has blocks that others published: right ones, unless computed on its own.
        right = {block.key for block in committed if block.key is not None} - first
        descendants = self._ancestry.descendants
        self._withdraw(descendants(first) | descendants(right) - right)
        self._distrust(mine, mine.admitted)
        mine.published = []

    def retract_tokens(self, token_ids: Sequence[int], salt: bytes, since: int) -> None:
        keys = list(block_keys(root_key(salt), self._checked(token_ids), self.block_size))
        self._withdraw(self._ancestry.descendants(keys[since // self.block_size :]))

    def _withdraw(self, wrong: Set[Key]) -> None:
        """Have the blocks with these keys not found any more, and nothing published that is computed on them."""
        for block in [block for block in self._index if block.key in wrong]:
            self._index.withdraw(block)
            if not block.users:
                self._free.append(block.number)
        for other in self._slots.values():
            depth = next((block.depth for block in other.blocks if block.key in wrong), None)
            if depth is not None:
                self._distrust(other, depth)

    def _distrust(self, slot: _Slot, count: int) -> None:
        """Publish nothing that a slot has behind its first `count` blocks."""
        slot.sound = count if slot.sound is None else min(count, slot.sound)
        slot.tokens = slot.tokens[: slot.sound * self.block_size]

    def _live_keys(self) -> Iterator[Key]:
        """The keys of cached blocks, and those that the next blocks of requests follow."""
        yield from (block.key for block in self._index if block.key is not None)
        for slot in self._slots.values():
            if slot.tokens and (key := slot.blocks[len(slot.tokens) // self.block_size - 1].key) is not None:
                yield key

    def fork(self, slot: int) -> int:
        source = self._slots[self._slots.checked(slot)]
        whole, rest = divmod(source.length, self.block_size)
        if rest and not self.available():
            raise self._missing(1)
        number = self.allocate(source.length)
        shared = source.blocks[:whole]
        self._index.acquire(shared)
        self._append(number, shared)
        if rest:
            try:
                self._append(number, self._take(1, whole))
                target, origin = self._slots[number].blocks[-1].number, source.blocks[whole].number
                self._copy_block(origin, target)
            except BaseException:  # the device may not have the memory for the copy
                self.free(number)
                raise
        child = self._slots[number]
        child.length, child.salt, child.tokens = source.length, source.salt, source.tokens[:]
        child.admitted, child.sound = len(source.tokens) // self.block_size, source.sound
        return number

    def evict_prefixes(self) -> int:
        before = len(self._free)
        self._evict(self._index.unused)
        return len(self._free) - before

    def prepare(
        self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None, *, look_ahead: bool = True
    ) -> None:
        """As the protocol says. `next_lengths` is ignored: taking a block only pops a list."""
        lengths = self._slots.checked_lengths(lengths)
        for number, length in lengths.items():
            slot = self._slots[number]
            if length < slot.length and any(
                b.users > 1 or b.published for b in slot.blocks[length // self.block_size :]
            ):
                raise InvalidLength(
                    f"slot {number} cannot go from {slot.length} tokens down to {length}: blocks after that are shared "
                    "or cached, and would be written again; free the request, and admit its tokens anew"
                )
        missing = sum(self.needed(length, slot) for slot, length in lengths.items()) - self.available()
        if missing > 0:
            raise self._missing(missing)
        self._grow(lengths)

    def _grow(self, lengths: Mapping[int, int]) -> None:
        """Give each slot its length, and the blocks for it; `available()` covers them."""
        for number, length in lengths.items():
            slot = self._slots[number]
            have = len(slot.blocks)
            if (more := self._blocks(length) - have) > 0:
                self._append(number, self._take(more, have))
            slot.length = length

    def free(self, slot: int, token_ids: Sequence[int] | None = None) -> None:
        slot = self._slots.checked(slot)
        self._release(self._slots[slot].blocks)
        del self._slots[slot]

    def retain(self, slots: Collection[int]) -> None:
        """As the protocol says; rebuilds all state from the slots that stay. Cached prefixes are dropped."""
        self._slots.retain(slots)
        self._index, self._ancestry, self._scatter = PrefixIndex(), Ancestry(), None
        for slot in self._slots.values():
            slot.blocks = [PoolBlock(depth=block.depth, number=block.number) for block in slot.blocks]
        held: dict[int, PoolBlock] = {}
        for number, slot in self._slots.items():
            slot.tokens, slot.published, slot.admitted = array("q"), [], 0
            blocks = [held.setdefault(block.number, block) for block in slot.blocks]
            slot.blocks = []
            self._index.acquire(blocks)
            self._append(number, blocks)
        self._free = [number for number in range(self.num_blocks - 1, -1, -1) if number not in held]

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        have = 0 if slot is None else len(self._slots[self._slots.checked(slot)].blocks)
        return max(0, self._blocks(num_tokens) - have)

    def available(self) -> int:
        return len(self._free) + self._index.unused

    def total(self) -> int:
        return self.num_blocks

    def fill_block_tables(self, slots: list[int], out: Tensor) -> Tensor:
        """The block tables of a step in one padded tensor, as paged kernels take them; padding is arbitrary.

        Args:
            slots: the requests of the step, in its order.
            out: `[max_num_seqs, max_blocks]` int32; what is past the view that is returned stays as it is.

        Returns:
            `out[:len(slots), :n]`, n being the blocks of the longest of the requests.
        """
        used = max((len(self._slots[slot].blocks) for slot in slots), default=0)
        view = out[: len(slots), :used]
        rows = torch.tensor(slots, device=self.block_table.device)
        return torch.index_select(self.block_table[:, :used], 0, rows, out=view)

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        (keys, values), (rows, _) = self._homes[layer], self.places(batch)
        if not cpu.store(key, value, keys, values, rows):
            keys.index_copy_(0, rows, key)
            values.index_copy_(0, rows, value)

    def homes(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self._homes[layer]

    def places(self, batch: PackedBatch) -> tuple[Tensor, None]:
        if self._scatter is None or self._scatter[0] is not batch:
            blocks = self.block_table[batch.slots, batch.positions // self.block_size]
            self._scatter = batch, blocks * self.block_size + batch.positions % self.block_size
        return self._scatter[1], None

    @property
    def _block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def _held_bytes(self) -> tuple[int, int]:
        """`used_bytes` and `live_bytes` of `KVStats`."""
        used = self.num_blocks - self.available()
        saved = sum(len(slot.blocks) for slot in self._slots.values()) - used
        live = sum(slot.length for slot in self._slots.values()) - saved * self.block_size
        return used * self._block_bytes, live * self.token_bytes

    def describe(self) -> KVDescription:
        lists = self.block_lists()
        users = Counter(number for blocks in lists.values() for number in blocks)
        slots = []
        for slot, blocks in lists.items():
            # Requests share whole prefixes, so a block that is shared follows no block that is not.
            shared = sum(users[number] > 1 for number in blocks)
            slots.append(SlotView(slot, len(blocks) * self.block_size, shared * self.block_size, blocks=blocks))
        cached = [block.number for block in self._index if not block.users]
        return KVDescription(slots, num_blocks=self.num_blocks, cached_blocks=cached)

    def block_lists(self) -> dict[int, list[int]]:
        """The numbers of each slot's blocks, in the order of its tokens; a block that is shared is in several lists."""
        return {number: [block.number for block in slot.blocks] for number, slot in self._slots.items()}

    def check(self) -> None:
        self._index.check()
        self._slots.check()
        users: dict[PoolBlock, int] = dict.fromkeys(self._index, 0)
        for slot in self._slots.values():
            for block in slot.blocks:
                users[block] = users.get(block, 0) + 1
        assert all(block.users == count for block, count in users.items()), "a block's users are miscounted"
        held = [block.number for block in users]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "a block is lost, or in two places"
        for number, slot in self._slots.items():
            assert len(slot.blocks) >= self._blocks(slot.length), f"slot {number} holds fewer blocks than it needs"
            numbers = [block.number for block in slot.blocks]
            assert self.block_table[number, : len(numbers)].tolist() == numbers
            assert [block.depth for block in slot.blocks] == list(range(len(slot.blocks))), "blocks are out of order"
            for block in slot.blocks[slot.length // self.block_size :]:
                assert block.users == 1, "a block that is not whole is shared"
                assert not block.published, "a block that is not whole is cached"
            assert 0 <= slot.length <= self._slots.max_model_len
            assert len(slot.tokens) <= slot.length, f"slot {number} has committed tokens that it does not hold"
            keys = list(block_keys(root_key(slot.salt), slot.tokens, self.block_size))
            assert [block.key for block in slot.blocks[: len(keys)]] == keys, "blocks have the keys of other tokens"

    def close(self) -> None:
        self._slots.clear()
        self._index = PrefixIndex()
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._homes = []

    @abstractmethod
    def _copy_block(self, origin: int, target: int) -> None:
        """Copy all layers of a block to one that was just taken."""

    def _cached(self, token_ids: Sequence[int], salt: bytes) -> tuple[TokenIds, list[PoolBlock]]:
        """A prompt, checked, and the blocks of its longest cached prefix."""
        ids = self._checked(token_ids)
        return ids, self._index.find(ids, self.block_size, salt)

    def _checked(self, token_ids: Sequence[int]) -> TokenIds:
        """A prompt's tokens, of a length that a slot can have."""
        ids = as_ids(token_ids)
        if not 1 <= len(ids) <= self._slots.max_model_len:
            raise InvalidLength(f"{len(ids)} tokens; a request has from 1 to max_model_len={self._slots.max_model_len}")
        return ids

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _missing(self, blocks: int) -> OutOfPages:
        return OutOfPages(
            f"{blocks} blocks of {self.block_size} tokens are missing: {self.available()} of {self.num_blocks} are "
            "free, or cached for nobody; preempt or finish a request, or give the pool more memory",
            missing_pages=blocks,
            missing_bytes=blocks * self._block_bytes,
        )

    def _take(self, count: int, depth: int) -> list[PoolBlock]:
        """Free or evicted blocks for one request, from its `depth`-th on; `available()` covers them."""
        self._evict(count - len(self._free))
        blocks = [PoolBlock(depth=depth + i, number=self._free.pop()) for i in range(count)]
        self._index.acquire(blocks)
        return blocks

    def _release(self, blocks: Sequence[PoolBlock]) -> None:
        self._index.release(blocks)
        self._free += [block.number for block in reversed(blocks) if not block.users and not block.published]

    def _evict(self, count: int) -> None:
        for _, block in zip(range(count), self._index.victims(), strict=False):
            self._index.remove(block)
            self._free.append(block.number)

    def _append(self, number: int, blocks: list[PoolBlock]) -> None:
        slot = self._slots[number]
        have, more = len(slot.blocks), len(blocks)
        slot.blocks += blocks
        numbers = [block.number for block in blocks]
        self.block_table[number, have : have + more] = torch.tensor(numbers, dtype=torch.int32, device="cpu")
