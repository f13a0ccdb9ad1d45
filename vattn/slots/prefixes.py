"""Prefixes: which slot a request gets and what it finds there; what requests publish and how often it is found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vattn.errors import NoFreeSlot
from vattn.pool.fences import refusal
from vattn.pool.journal import Change
from vattn.prefix import Key, TokenIds, block_keys, check_extension, root_key
from vattn.slots.backer import Backer
from vattn.slots.bands import Prefix
from vattn.slots.exchange import Exchange
from vattn.slots.kept import Kept
from vattn.slots.parts import Decisions, Parts
from vattn.slots.table import Known

# How many idle slots per criterion are compared in detail.
_CANDIDATES = 4
# What follows a prefix, where nothing is asked for.
_NOTHING: tuple[Key, Sequence[int]] = (b"", ())


class Prefixes(Decisions):
    """Gives slots to requests.

    Args:
        exchange: what other processes find of this cache, and this one of theirs; None for nothing.

    Attributes:
        query_tokens: total tokens of all admitted prompts.
        hit_tokens: how many of those were found in the cache.
        exchange: as given; None once the cache has gone.
    """

    def __init__(self, parts: Parts, backer: Backer, exchange: Exchange | None) -> None:
        super().__init__(parts)
        self._backer = backer
        self.query_tokens = 0
        self.hit_tokens = 0
        self.exchange = exchange
        # For `look_ahead`: the prefix that requests were last admitted with while others used it, how many since the
        # last step, and the ticket under which it was last mapped. Guesses, so no failure takes them back.
        self._demanded: list[Key] = []
        self._demand = 0
        self._ahead = 0

    # Plans: each takes and returns a slot

    def empty(self, change: Change, num_tokens: int | None, start: int) -> int:
        """Takes a slot for a request that needs `num_tokens` tokens, the first `start` of which are copied in."""
        slot = self._choose(self._bands.prefix(()), num_tokens, _NOTHING)
        self._slots.take(change, slot, 0, start=start, origin=start if self._bands.windowed else 0)
        self._slots.note_left_over(change, slot)
        return slot

    def admit(self, change: Change, token_ids: TokenIds, salt: bytes) -> int:
        """Takes a slot with the longest cached prefix of a prompt that leaves at least one token to compute."""
        bands = self._bands
        if self.exchange is None:
            keys = self.find(token_ids, salt)
        else:
            self.exchange.heed(change)
            keys = self.exchange.find(change, token_ids, salt)
        prefix = bands.prefix(keys)
        slot = self._choose(prefix, len(token_ids), self._rest(keys, token_ids, salt))
        if self._fences.is_open(slot):
            del keys[bands.in_place(slot, prefix) :]
            prefix = bands.prefix(keys)
        if keys and any(block.users for block in bands.lasting_blocks(prefix)[-1:]):
            self._demand = self._demand + 1 if keys == self._demanded else 1
            self._demanded = keys
        whole = prefix.count * bands.block_tokens
        rest = self._rest(keys, token_ids, salt)
        self._slots.take(change, slot, whole + self._kept(slot, prefix, rest))
        self._put(change, slot, prefix)
        bands.use(change, slot, prefix.count)
        self._slots.note_left_over(change, slot)
        self._slots.know(change, slot, Known(token_ids[:whole], keys, admitted=prefix.count, salt=salt))
        return slot

    def fork(self, change: Change, source: int, handle: int | None) -> tuple[int, list[int]]:
        """Takes a slot with the blocks of the request in slot `source`, and with pages for the rest of its tokens.

        Returns:
            The slot, and per band the first token that has to be copied.
        """
        slots, bands = self._slots, self._bands
        length, start, known = slots.length[source], slots.start[source], slots.known[source]
        count = length // bands.block_tokens
        bands.adopt(change, source, count)
        prefix = bands.prefix_of(source, count, start)
        slot = self._choose(prefix, length, _NOTHING)
        if self._fences.is_open(slot):
            raise refusal("fork was called")
        slots.take(change, slot, length, start=start, origin=slots.origin.get(source, 0))
        if source in slots.sound:
            change.put(slots.sound, slot, slots.sound[source])
        self._put(change, slot, prefix)
        self._backer.keep_only(change, slot, count, handle)
        bands.use(change, slot, count)
        slots.know(change, slot, replace(known, admitted=len(known.keys), published=(), rewound=False))
        self._backer.grow(change, {slot: slots.backed(length)}, now=True, handle=handle)
        return slot, bands.first_copied(prefix, start)

    # Ahead of requests

    def look_ahead(self) -> None:
        """Maps a prefix that running requests share in idle slots, as many as requests took it since the last step:
        more of them are likely to come with it. A block for their own tokens follows, if pages can be spared. Slots
        with blocks, which others may find there, are left as they are.
        """
        count, self._demand = self._demand, 0
        if not count or not self._config.overlap:
            return
        slots, bands = self._slots, self._bands
        prefix = bands.prefix(bands.find(self._demanded))
        blocks = bands.lasting_blocks(prefix)
        if not blocks:
            return
        count -= len(slots.idle.ending_with(blocks[-1].key, count))
        taken = [
            slot
            for slot in slots.idle.fitting(0, count)
            if not slots.idle[slot].blocks and slot not in slots.leaving and self._fences.passed(slot)
        ]

        end = slots.backed((prefix.count + 1) * bands.block_tokens)
        # With windows, what follows depends on where queries start.
        grows = self._config.eager_pages and not bands.windowed and end <= self._config.max_context_len

        def plan(change: Change) -> None:
            for slot in taken:
                self._put(change, slot, prefix)
                if grows and self._backer.can_spare(bands.growth(slot, end, 0)):
                    self._backer.grow(change, {slot: end})

        if ticket := self._backer.in_background(plan):
            self._ahead = ticket
            slots.remapping(taken, ticket)

    def await_ahead(self) -> None:
        """Waits for what `look_ahead` maps: blocks that a request uses cannot be taken back from it."""
        if self._ahead:
            self._core.wait(self._ahead)
            self._ahead = 0

    # What is published

    def find(self, token_ids: Sequence[int], salt: bytes) -> list[Key]:
        """The keys of a prompt's longest cached prefix in whole blocks that leaves at least one token to compute.

        In a band with a window, only the last blocks of the prefix, which queries after it see, have to be cached.
        """
        before_last = token_ids[: len(token_ids) - 1]
        return self._bands.find(block_keys(root_key(salt), before_last, self._bands.block_tokens))

    def most_kept(self, keys: Sequence[Key], token_ids: Sequence[int], salt: bytes) -> int:
        """How many tokens after a prompt's cached prefix some idle slot keeps."""
        kept, rest = self._slots.kept, self._rest(keys, token_ids, salt)
        return max((kept.common(slot, *rest) for slot in kept.holders(*rest, _CANDIDATES)), default=0)

    def publish(self, change: Change, slot: int, token_ids: TokenIds) -> None:
        """Publishes the whole blocks of `token_ids`, the tokens of the slot's request up to some point.

        Raises:
            TokenMismatch: the request cannot hold these tokens.
        """
        bands, known = self._bands, self._slots.known[slot]
        check_extension(known.tokens, token_ids, self._slots.length[slot])
        count = len(token_ids) // bands.block_tokens
        count = min(count, self._slots.sound.get(slot, count))
        if count == len(known.keys):
            return
        parent, tokens = known.keys[-1] if known.keys else root_key(known.salt), token_ids[: count * bands.block_tokens]
        more = list(block_keys(parent, tokens[len(known.tokens) :], bands.block_tokens))
        self._slots.ancestry.note(parent, more, self._slots.live_keys)
        keys = known.keys + more
        bands.check_keys(slot, keys)
        bands.adopt(change, slot, count)
        # In bands with windows, tokens before the origin may never have been copied in.
        origin = -(-self._slots.origin.get(slot, 0) // bands.block_tokens)
        new = bands.publish(change, slot, keys, len(known.keys), origin)
        published = known.published + new
        if self.exchange is not None:
            self.exchange.offer([block for _, block in new], token_ids)
        self._slots.know(change, slot, replace(known, tokens=tokens, keys=keys, published=published))

    def kept(self, slot: int, token_ids: TokenIds) -> Kept | None:
        """What the slot's request, which has published these tokens, leaves behind its last block."""
        known = self._slots.known[slot]
        if self._bands.windowed or slot in self._slots.sound or len(token_ids) == len(known.tokens):
            return None
        parent = known.keys[-1] if known.keys else root_key(known.salt)
        return Kept(parent, len(known.tokens), token_ids[len(known.tokens) :])

    def retract(self, change: Change, slot: int) -> None:
        """Removes from the index the blocks that the slot's request was the first to commit, and what was computed on
        blocks that it committed, for good.
        """
        slots, known = self._slots, self._slots.known[slot]
        first = {block.key for _, block in known.published if block.key is not None}
        # The index has right blocks with the same keys, for which these must not serve in an idle slot.
        twins = tuple(each for each in self._bands.committed(slot, known.admitted) if not each[1].published)
        right = {block.key for _, block in twins if block.key is not None} - first
        # Of these, those that were computed on its own blocks are wrong like any others.
        descendants = slots.ancestry.descendants
        slots.retract(change, descendants(first) | descendants(right) - right, twins)
        slots.distrust(change, slot, known.admitted)
        slots.know(change, slot, replace(slots.known[slot], published=()))

    def retract_tokens(self, change: Change, token_ids: TokenIds, salt: bytes, since: int) -> None:
        """Removes the blocks of a request's tokens from the index, from the one of token `since` on, and what was
        computed on them, for good.
        """
        slots, size = self._slots, self._bands.block_tokens
        keys = list(block_keys(root_key(salt), token_ids, size))
        right = keys[: since // size]
        parent, rest = right[-1] if right else root_key(salt), token_ids[len(right) * size :]
        for slot in slots.kept.holders(parent, rest, slots.count):
            if slots.kept.common(slot, parent, rest) > since % size:
                slots.kept.forget(change, slot)
        slots.retract(change, slots.ancestry.descendants(keys[len(right) :]))

    def count(self, query_tokens: int, hit_tokens: int) -> None:
        """Counts an admitted request."""
        self.query_tokens += query_tokens
        self.hit_tokens += hit_tokens

    def clear(self) -> None:
        """Drops the blocks of other processes, and with them the virtual tensors."""
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    # Choosing a slot

    def _rest(self, keys: Sequence[Key], token_ids: Sequence[int], salt: bytes) -> tuple[Key, Sequence[int]]:
        """The key of a prompt's cached prefix, and the tokens after it but for the last, which is to be computed.

        Nothing if no slot keeps rows: an admission takes forty microseconds, and this would add four.
        """
        if not self._slots.kept.rows:
            return _NOTHING
        return keys[-1] if keys else root_key(salt), token_ids[len(keys) * self._bands.block_tokens : -1]

    def _kept(self, slot: int, prefix: Prefix, rest: tuple[Key, Sequence[int]]) -> int:
        """How many tokens after a prefix the slot offers; none if its mappings have to change for the prefix."""
        kept, bands = self._slots.kept, self._bands
        if slot not in kept.rows or bands.in_place(slot, prefix) < prefix.count or bands.stop(slot) > prefix.count:
            return 0
        return kept.common(slot, *rest)

    def _choose(self, prefix: Prefix, num_tokens: int | None, rest: tuple[Key, Sequence[int]]) -> int:
        """The idle slot that offers most of a prefix and what follows it, with the fewest blocks to map and the fewest
        to lose.
        """
        if not self._slots.idle:
            raise NoFreeSlot(
                f"all {self._slots.count} slots are taken; free one with free_reqid, or raise max_batch_size"
            )
        want = num_tokens if num_tokens is not None else self._config.max_context_len

        def rank(slot: int) -> tuple[int, int, int, int, bool, bool, int]:
            usable = self._bands.in_place(slot, prefix) if self._fences.is_open(slot) else prefix.count
            missing, lost = self._bands.compare(slot, prefix, usable)
            waits = bool(lost or missing) and not self._fences.passed(slot)
            extent = self._bands.lasting_extent(slot)
            # Blocks that another request could find in place here are worth as much as blocks to be mapped.
            return (
                -usable,
                -self._kept(slot, prefix, rest),
                missing + lost,
                lost,
                waits,
                extent < want,
                extent if extent >= want else -extent,
            )

        candidates = dict.fromkeys(self._candidates(prefix, want))
        if rest is not _NOTHING:
            candidates |= dict.fromkeys(self._slots.kept.holders(*rest, _CANDIDATES))
        return min(candidates, key=rank) if len(candidates) > 1 else next(iter(candidates))

    def _candidates(self, prefix: Prefix, tokens: int) -> Iterator[int]:
        """A few idle slots, nearly always including the best one for a prefix and a number of tokens."""
        idle, blocks = self._slots.idle, self._bands.lasting_blocks(prefix)
        for block in reversed(blocks):
            if slots := idle.ending_with(block.key, _CANDIDATES):
                yield from slots
                if block is blocks[-1] and not all(map(self._fences.is_open, slots)):
                    return
                break
        if blocks:
            holders = itertools.islice(blocks[-1].slots, 4 * _CANDIDATES)
            yield from itertools.islice(filter(idle.__contains__, holders), _CANDIDATES)
        for slot in idle.fitting(tokens, _CANDIDATES):
            yield slot
            if self._fences.passed(slot):
                break
        # An open slot can only be used with its mappings unchanged.
        yield from itertools.islice(filter(idle.__contains__, self._fences.open_slots), _CANDIDATES)

    def _put(self, change: Change, slot: int, prefix: Prefix) -> None:
        """Plans that the slot starts with a cached prefix."""
        self._bands.put(change, slot, prefix, lambda: self._fences.guard(change, slot))
