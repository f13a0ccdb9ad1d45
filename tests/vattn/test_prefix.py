"""The policy of prefix caching, against a naive model."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch

from vattn import InvalidTokens, TokenMismatch
from vattn.prefix import Ancestry, Block, PrefixIndex, as_ids, block_keys, check_extension, root_key


class Naive:
    """Blocks as the tuples of all tokens up to their ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.users: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.last_use: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.now = 0

    def prefixes(self, ids: list[int], salt: bytes) -> list[tuple[bytes, tuple[int, ...]]]:
        return [(salt, tuple(ids[:end])) for end in range(self.size, len(ids) + 1, self.size)]

    def find(self, ids: list[int], salt: bytes) -> int:
        found = 0
        for prefix in self.prefixes(ids[:-1], salt):
            if prefix not in self.users:
                break
            found += 1
        return found

    def order(self) -> list[tuple[bytes, tuple[int, ...]]]:
        unused = [prefix for prefix, users in self.users.items() if not users]
        return sorted(unused, key=lambda prefix: (self.last_use[prefix], -len(prefix[1])))


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_against_the_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3])
    index: PrefixIndex[Block] = PrefixIndex()
    model = Naive(size)
    tokens_of: dict[Block, tuple[bytes, tuple[int, ...]]] = {}
    running: list[list[Block]] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.5:
            ids = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            salt = rng.choice([b"", b"a"])
            found = index.find(ids, size, salt)
            assert [tokens_of[block] for block in found] == model.prefixes(ids, salt)[: model.find(ids, salt)]
            index.acquire(found)
            keys = list(block_keys(root_key(salt), ids, size))
            for depth in range(len(found), len(keys)):
                block = Block(depth)
                index.acquire([block])
                tokens_of[block] = model.prefixes(ids, salt)[depth]
                assert index.publish(block, keys[depth]) == (tokens_of[block] not in model.users)
                found.append(block)
            for block in found:
                if block.published:
                    model.users[tokens_of[block]] = model.users.get(tokens_of[block], 0) + 1
            running.append(found)
        elif action < 0.8 and running:
            blocks = running.pop(rng.randrange(len(running)))
            model.now += 1
            for block in blocks:
                if block.published:
                    model.users[tokens_of[block]] -= 1
                    model.last_use[tokens_of[block]] = model.now
            index.release(blocks)
        else:
            order = model.order()
            assert [tokens_of[block] for block in index.victims()] == order
            evicted = []
            for block, _ in zip(index.victims(), range(rng.randrange(4)), strict=False):
                if rng.random() < 0.8:  # a store may be unable to give one up just now
                    index.remove(block)
                    evicted.append(block)
            if rng.random() < 0.3:
                for block in reversed(evicted):
                    assert index.put_back(block)
                index.refresh()
                assert [tokens_of[block] for block in index.victims()] == order
            else:
                for block in evicted:
                    del model.users[tokens_of[block]]
        index.check()
        assert index.unused == len(model.order())
        assert len(index) == len(model.users)


def test_blocks_that_are_published_together_are_evicted_after_those_used_before_the_deepest_first() -> None:
    index: PrefixIndex[Block] = PrefixIndex()
    used, mapped, *fresh = blocks = [Block(depth) for depth in (9, 0, 0, 1, 2)]
    index.publish_all([used], [b"u"])
    index.acquire([used])
    index.publish_all(blocks[1:], [b"0", b"1", b"2", b"3"])
    index.check()
    index.acquire([mapped])
    assert index.unused == 3
    assert [*index.victims()] == fresh[::-1]
    index.release([used, mapped])
    assert [*index.victims()] == [*fresh[::-1], used, mapped]
    index.check()
    with pytest.raises(AssertionError, match="in the index"):
        index.publish_all([Block(3)], [b"2"])


def test_a_key_is_of_all_tokens_up_to_the_block_and_of_the_salt() -> None:
    def keys(ids: list[int], salt: bytes = b"") -> list[bytes]:
        return list(block_keys(root_key(salt), ids, 2))

    assert len(keys([1, 2, 3])) == 1
    assert keys([1, 2, 3, 4])[0] == keys([1, 2, 9, 9])[0]
    different = [keys(ids)[-1] for ids in ([1, 2], [2, 1], [1, 2, 1, 2], [3, 4, 1, 2], [-1, 2])]
    different += [keys([1, 2], salt)[-1] for salt in (b"a", b"b", b"ab")]
    assert len(set(different)) == len(different)


def test_a_restored_block_gives_way_to_one_that_was_published_since() -> None:
    index: PrefixIndex[Block] = PrefixIndex()
    old, new = Block(0), Block(0)
    assert index.publish(old, b"k")
    index.remove(old)
    assert index.publish(new, b"k")
    assert not index.put_back(old)
    index.refresh()
    index.check()
    assert list(index) == [new]


@pytest.mark.parametrize("salt", ["text", None, 1, bytearray(b"a")])
def test_salts_of_the_wrong_type(salt: Any) -> None:
    with pytest.raises(InvalidTokens, match="must be bytes"):
        root_key(salt)


@pytest.mark.parametrize("ids", [None, 3, "text", [1, "a"], [1.5], [2**63], [[1]], torch.ones(2, 2, dtype=torch.int64)])
def test_token_ids_of_the_wrong_type(ids: Any) -> None:
    with pytest.raises(InvalidTokens, match="token_ids"):
        as_ids(ids)


def test_token_ids_may_be_a_tensor_or_an_array() -> None:
    assert as_ids(torch.tensor([1, 2])) == as_ids((1, 2)) == as_ids(array("i", [1, 2])) == array("q", [1, 2])


def test_token_ids_that_cannot_be_a_request() -> None:
    check_extension(as_ids([1, 2]), as_ids([1, 2, 3]), 3)
    for ids, reason in (([1], "1 token ids"), ([1, 2, 3, 4], "4 token ids"), ([1, 5, 3], "token 1 is 5")):
        with pytest.raises(TokenMismatch, match=reason):
            check_extension(as_ids([1, 2]), as_ids(ids), 3)


def test_a_chain_is_known_once_it_is_noted() -> None:
    """Also if others are forgotten then: its blocks are not live yet."""
    ancestry, salt = Ancestry(), root_key(b"")
    keys = list(block_keys(salt, range(2000), 1))
    ancestry.note(salt, keys[:10], tuple)
    ancestry.note(keys[9], keys[10:], tuple)
    assert ancestry.descendants(keys[:1]) == set(keys)


def test_descendants_are_found_however_many_keys_are_forgotten() -> None:
    ancestry, salt = Ancestry(), root_key(b"")
    trunk = list(block_keys(salt, range(100), 1))
    ancestry.note(salt, trunk, tuple)
    live = [trunk[-1]]
    for branch in range(5000):
        keys = list(block_keys(trunk[branch % 50], [1000 + branch] * 3, 1))
        ancestry.note(trunk[branch % 50], keys, lambda: live)
        if branch % 100 == 0:
            live.append(keys[-1])
            assert ancestry.descendants(keys[:1]) == set(keys)
            assert ancestry.descendants(keys) == set(keys)
    assert set(live) | set(trunk) <= ancestry.descendants(trunk[:1])
    assert len(ancestry.descendants(trunk[:1])) < 3000
    assert ancestry.descendants([]) == set()
